"""How long certificates and lists are valid, and how that is said."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from codistill.errors import RecipeError

CLOCK_SKEW = timedelta(minutes=5)  # by which clocks of different machines may differ
_LONGEST_DAYS = 36500


def utc_now() -> datetime:
    """The time of this machine."""
    return datetime.now(UTC)


def life(days: int, hours: int | None = None) -> timedelta:
    """A time in days, or in hours if they are given."""
    option, count, most = ("--days", days, _LONGEST_DAYS) if hours is None else ("--hours", hours, 24 * _LONGEST_DAYS)
    if not 1 <= count <= most:
        raise RecipeError(f"{option} must be between 1 and {most}.", f"{count}", "Choose another number.")
    return timedelta(days=days) if hours is None else timedelta(hours=hours)


def is_due(start: datetime, end: datetime, now: datetime) -> bool:
    """Whether something must be renewed soon: less than a third of its life is left, and less than 30 days."""
    return end - now < min((end - start) / 3, timedelta(days=30))


def left_text(left: timedelta) -> str:
    """'12 days', '5 h' or 'less than an hour': a text that does not change every minute, as it is logged."""
    if left >= timedelta(days=3):
        return f"{left.days} days"
    hours = left // timedelta(hours=1)
    return f"{hours} h" if hours else "less than an hour"


def date_text(moment: datetime) -> str:
    """'2027-11-16 10:47 UTC'."""
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def end_text(end: datetime, now: datetime) -> str:
    """A date; with the time of the day if it is near."""
    return f"{end:%Y-%m-%d}" if abs(end - now) >= timedelta(days=3) else date_text(end)
