r"""Tables of the terminal as LaTeX: tabular environments that need no package."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"$<$", ">": r"$>$", "|": r"$|$",
    "\n": " ", "\u00a0": "~",
}  # fmt: skip


def latex_tables(tables: Sequence[Table]) -> str:
    """A `table` environment for each table, with its title and notes as the caption."""
    return "\n".join(_latex(table) for table in tables)


def _latex(table: Table) -> str:
    columns = "".join("r" if column.justify == "right" else "l" for column in table.columns)
    heads = " & ".join(_text(column.header) for column in table.columns)
    rows = [
        " & ".join(_text(cell) for cell in row) + r" \\"
        for row in zip(*(column.cells for column in table.columns), strict=True)
    ]
    caption = ". ".join(filter(None, (_text(table.title), _text(table.caption))))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{caption}.}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\hline",
            heads + r" \\",
            r"\hline",
            *rows,
            r"\hline",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _text(cell: object) -> str:
    """A cell's text, which may hold the terminal's markup, with LaTeX's special characters escaped."""
    plain = Text.from_markup(str(cell or "")).plain
    return "".join(_SPECIAL.get(letter, letter) for letter in plain)
