"""The sections of the page about a run on all scores but the first, and on the safeguard."""

from __future__ import annotations

from codistill.reports import html
from codistill.reports.score_cells import gain_cell, score_cells
from codistill.results.further_scores import HOW_TO_READ, footer, missing_notes, score_heading
from codistill.results.many_agents import FEW_ON_PAGE, MOST_ON_PAGE, shown_lines
from codistill.results.safeguard_table import HEADINGS, guarded_cells
from codistill.results.safeguard_table import HOW_TO_READ as HOW_TO_READ_SAFEGUARD
from codistill.results.summary import Summary


def further_section(summary: Summary) -> str:
    """A table of every further score of every agent, alone and together; only notes where there is one score."""
    scores = summary.shown_scores[1:]
    notes = html.note(*(f"{html.capitalised(note)}." for note in missing_notes(summary)))
    if not scores:
        return notes
    heads = ["agent"]
    for score in scores:
        heads += [f"{score_heading(score)}, alone", "together", "gain"]
    rows = []
    shown = {line.name for line in shown_lines(summary.lines(), MOST_ON_PAGE, FEW_ON_PAGE)}
    for lines in zip(*(summary.lines(score) for score in scores), strict=True):
        if lines[0].name not in shown:
            continue
        row = [html.cell(lines[0].name)]
        for score, line in zip(scores, lines, strict=True):
            row += [*score_cells(score.name, line.alone, line.together), gain_cell(score.name, line.gain)]
        rows.append(row)
    foot = [
        [html.cell(label), *(f"<td colspan='3'>{html.escaped(text)}</td>" for text in cells)]
        for label, cells in footer(summary, scores).items()
    ]
    return html.table(heads, rows, left=(0,), foot=foot) + html.note(f"{HOW_TO_READ}.") + notes


def safeguard_section(summary: Summary) -> str:
    """Each agent alone, as taught and with the safeguard; nothing where there was none."""
    rows = [[html.cell(text) for text in row] for row in guarded_cells(summary, MOST_ON_PAGE, FEW_ON_PAGE)]
    if not rows:
        return ""
    return html.table(list(HEADINGS), rows, left=(0,)) + html.note(f"{html.capitalised(HOW_TO_READ_SAFEGUARD)}.")
