"""A table of the terminal as HTML, for notebooks."""

from __future__ import annotations

from html import escape

from rich.table import Table
from rich.text import Text


def html_table(table: Table) -> str:
    """The title, the cells and the notes of a table, without a style of its own."""
    heads = "".join(f"<th>{_plain(column.header)}</th>" for column in table.columns)
    right = [" style='text-align: right'" if column.justify == "right" else "" for column in table.columns]
    rows = [
        "".join(f"<td{style}>{_plain(cell)}</td>" for style, cell in zip(right, row, strict=True))
        for row in zip(*(column.cells for column in table.columns), strict=True)
    ]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    notes = "".join(f"<br>{_plain(line)}" for line in str(table.caption or "").splitlines()).removeprefix("<br>")
    return (
        f"<p>{_plain(table.title)}</p>\n<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n"
        f"<p>{notes}</p>"
    )


def _plain(cell: object) -> str:
    """A cell's text, which may hold the terminal's markup."""
    return escape(Text.from_markup(str(cell or "")).plain)
