"""Several runs side by side, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from codistill.results.agent_lines import counted_lines, honest_lines, left_out_text
from codistill.results.summary import Summary
from codistill.text import bytes_text, duration_text

_BYZANTINE_NOTE = "Byzantine agents are left out of all means"


def comparison_table(summaries: Sequence[Summary]) -> Table:
    """Several runs side by side, for the terminal."""
    table = Table(title="means over the agents, on each run's common test set", title_justify="left")
    for heading in ("run", "protocol"):
        table.add_column(heading)
    for heading in ("agents", "rounds", "alone", "together", "gain", "own data", "own gain", "better", "bytes", "time"):
        table.add_column(heading, justify="right")
    notes = ["better: agents that are better than alone on their own data"]
    timed = any(summary.clock_seconds is not None for summary in summaries)
    if timed:
        table.add_column("clock", justify="right")
        notes.append("clock: seconds by the clock of the run, virtual in a simulation")
    for summary in summaries:
        lines, against = summary.lines(), summary.against_alone()
        byzantine = len(lines) - len(honest_lines(lines))
        if byzantine and _BYZANTINE_NOTE not in notes:
            notes.append(_BYZANTINE_NOTE)
        if left_out := left_out_text(lines):
            notes.append(f"{escape(summary.title)}: {escape(left_out)}")
        table.add_row(
            escape(summary.title), escape(summary.protocol),
            f"{len(lines)} ({byzantine} Byzantine)" if byzantine else f"{len(lines)}", str(summary.rounds),
            *summary.mean_cells(counted_lines(lines)), "-" if against is None else against.share,
            bytes_text(sum(line.sent + line.received for line in lines)), duration_text(summary.seconds),
            *([] if not timed else ["-" if summary.clock_seconds is None else f"{summary.clock_seconds:.4g} s"]),
        )  # fmt: skip
    table.caption, table.caption_justify = "\n".join(notes), "left"
    return table
