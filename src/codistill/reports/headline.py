"""The top of the page about a run: key figures, and what needs attention."""

from __future__ import annotations

from codistill.reports import html
from codistill.reports.score_cells import byzantine_note
from codistill.results.agent_lines import left_out_text
from codistill.results.metric_text import gain_text, in_percent, metric_name, score_text
from codistill.results.run_scores import RunScores
from codistill.results.summary import Summary
from codistill.text import bytes_text, duration_text

_MOST_NAMED = 6  # agents that a note names


def headline(summary: Summary, run: RunScores) -> str:
    """Key figures as cards, and notes below them."""
    agents, rounds = len(summary.agents), summary.rounds
    size = f"{agents:,} agent{'' if agents == 1 else 's'}, {rounds:,} round{'' if rounds == 1 else 's'}"
    figures = [
        *_better(summary),
        *_scores(run),
        (summary.protocol, f"protocol: {size}"),
        _traffic(summary),
        (duration_text(summary.seconds), "time"),
    ]
    items = "".join(
        f"<div{' class=wide' if '→' in name or 'better' in name else ''}>"
        f"<dt>{html.escaped(name)}</dt><dd>{html.escaped(value)}</dd></div>"
        for value, name in figures
    )
    notes = f"{_worse(summary)}{_absent(summary)}{_left_out(run)}{_behind(summary)}{byzantine_note(run)}"
    return f"<dl class='figures'>{items}</dl>{notes}"


def _better(summary: Summary) -> list[tuple[str, str]]:
    against = summary.against_alone()
    if against is None:
        return []
    honest = "honest agents" if against.byzantine else "agents"
    return [(against.share, f"{honest} better than alone on their own data")]


def _scores(run: RunScores) -> list[tuple[str, str]]:
    name = f"mean {metric_name(run.metric)} on {'their own data' if run.own else f'the common {run.test_part} set'}"
    if run.together is None:
        return [("-", f"mean {metric_name(run.metric)}: not evaluated")]
    if run.alone is None:
        return [(score_text(run.metric, run.together), f"{name}, together")]
    both = f"{score_text(run.metric, run.alone)} → {score_text(run.metric, run.together)}"
    gain = "mean gain, percentage points" if in_percent(run.metric) else "mean gain (positive is better)"
    return [(both, f"{name}, alone → together"), (gain_text(run.metric, run.gain), gain)]


def _traffic(summary: Summary) -> tuple[str, str]:
    sent, received = (sum(row[way] for row in summary.rows) for way in ("sent", "received"))
    return bytes_text(sent + received), f"{bytes_text(sent)} sent, {bytes_text(received)} received"


def _worse(summary: Summary) -> str:
    """Who would be better off alone; that nobody would is said as well."""
    against = summary.against_alone()
    if against is None:
        return ""
    if not against.worse:
        return html.note("No agent is worse than alone on its own data.")
    losses = html.escaped(against.losses(_MOST_NAMED))
    return f"<p class='note warning'>Worse than alone on their own data: {losses}.</p>"


def _absent(summary: Summary) -> str:
    """Who missed rounds; empty if nobody did."""
    missed: dict[str, int] = {}
    for row in summary.rows:
        if not row["present"]:
            missed[row["agent"]] = missed.get(row["agent"], 0) + 1
    if not missed:
        return ""
    if len(missed) > _MOST_NAMED:
        times = f"{sum(missed.values()):,} of {len(summary.rows):,} times"
        who = f"{len(missed):,} of {len(summary.agents):,} agents, {times}"
    else:
        who = ", ".join(f"{name} ({count} of {summary.rounds})" for name, count in missed.items())
    return html.note(f"Absent in some rounds: {who}.")


def _left_out(run: RunScores) -> str:
    """Whose scores are older than those of the others; empty if there is nobody."""
    text = left_out_text(run.lines, _MOST_NAMED)
    return html.note(f"{html.capitalised(text)}." if text else "")


def _behind(summary: Summary) -> str:
    """Who ends far below its own best round; empty if nobody does."""
    names = summary.fell_behind()
    who = "; ".join(names) if len(names) <= _MOST_NAMED else f"{len(names):,} of {len(summary.agents):,} agents"
    return html.note(f"Fell behind: {who}." if names else "")
