"""Numbers and text formatted for people."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """1,234 -> '1.2 kB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration_text(seconds: float) -> str:
    """75 -> '1 min 15 s'."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def percent_text(share: float) -> str:
    """0.956 -> '95.6 %'."""
    return f"{100 * share:.1f} %"


def printable(text: str, most: int) -> str:
    """Received text as one printable line of at most `most` characters, safe for a terminal or a log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])
