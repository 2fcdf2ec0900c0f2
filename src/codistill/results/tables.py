"""One model of a table, with a writer each for a terminal, a page or a notebook, CSV and LaTeX.

Cells are plain text: every writer escapes what its format needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Cell:
    """Text, and the number behind it: pages sort by it, and CSV files hold it."""

    text: str
    value: float | None = None
    worse: bool = False  # a loss; pages give it a colour
    bold: bool = False
    parts: Mapping[str, float | None] = field(default_factory=dict)  # several numbers: columns of CSV files by heading


AnyCell = str | Cell  # text is a cell without a number


@dataclass(frozen=True)
class Table:
    """Headings, rows, and what stands around them."""

    headings: Sequence[str]
    align: str  # a letter per column, as in LaTeX: l or r
    rows: Sequence[Sequence[AnyCell]]
    footer: Sequence[Sequence[AnyCell]] = ()  # means and the like: below a rule, and never sorted
    title: str = ""
    result: str = ""  # the main result in words; on a terminal it stands out from the notes
    notes: Sequence[str] = ()  # how to read the table: phrases without a full stop

    def __post_init__(self) -> None:
        assert set(self.align) <= set("lr")
        assert {len(self.headings), *map(len, self.rows), *map(len, self.footer)} == {len(self.align)}

    def __rich__(self) -> RichTable:
        """For a terminal: `console.print(table)`."""
        from rich.table import Table as RichTable
        from rich.text import Text

        # Text, not str: rich reads markup and emoji codes in strings.
        caption = Text(style="table.caption")
        if self.result:
            caption.append(self.result, style="not dim not italic")
        caption.append("\n".join(["", *self.notes] if self.result else self.notes))
        drawn = RichTable(
            title=Text(self.title, style="table.title") if self.title else None, title_justify="left",
            caption=caption if caption.plain else None, caption_justify="left",
        )  # fmt: skip
        for heading, side in zip(self.headings, self.align, strict=True):
            drawn.add_column(Text(heading), justify="right" if side == "r" else "left", overflow="fold")
        for part in (self.rows, self.footer):
            for row in part:
                drawn.add_row(*(Text(cell.text, style="bold" if cell.bold else "") for cell in _cells(row)))
            drawn.add_section()
        return drawn

    def html(self, *, page: bool = False) -> Markup:
        """For a notebook, with the title and without a style sheet; or for a page, where columns can be sorted."""
        from markupsafe import Markup

        made = _template().render(
            title=self.title, columns=list(zip(self.headings, self.align, strict=True)), align=self.align, page=page,
            rows=[_cells(row) for row in self.rows], footer=[_cells(row) for row in self.footer],
            notes=[note for note in (self.result, *self.notes) if note],
        )  # fmt: skip
        return Markup(made)

    def csv(self) -> str:
        """The headings and rows, with numbers in full precision; without the footer, which repeats them.

        A cell of several numbers, such as a mean and its spread, is a column for each.
        """
        import pandas as pd

        from codistill.core.text import csv_text

        rows = [_cells(row) for row in self.rows]
        columns: list[tuple[str, Sequence[float | str | None]]] = []
        for place, heading in enumerate(self.headings):
            cells = [row[place] for row in rows]
            names = dict.fromkeys(name for cell in cells for name in cell.parts)
            columns += [(name, [cell.parts.get(name) for cell in cells]) for name in names]
            columns += [] if names else [(" ".join(heading.split()), [_csv_value(cell) for cell in cells])]
        frame = pd.DataFrame({place: values for place, (_, values) in enumerate(columns)})
        return csv_text(frame.set_axis([heading for heading, _ in columns], axis=1))

    def latex(self) -> str:
        """A `table` environment that needs no package, with title and notes as the caption."""
        caption = ". ".join(filter(None, (self.title, "\n".join(filter(None, (self.result, *self.notes))))))
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{_latex(caption)}.}}",
                rf"\begin{{tabular}}{{{self.align}}}",
                r"\hline",
                " & ".join(map(_latex, self.headings)) + r" \\",
                r"\hline",
                *(" & ".join(_latex(cell.text) for cell in _cells(row)) + r" \\" for row in (*self.rows, *self.footer)),
                r"\hline",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


def plain_text(tables: Sequence[Table], width: int) -> str:
    """Tables as text without colours, wherever it is asked for."""
    from rich.console import Console

    out = StringIO()
    # In a notebook rich takes every console for a screen with colours, and FORCE_COLOR asks for them.
    plain = Console(file=out, width=width, force_terminal=False, force_jupyter=False, color_system=None)
    for table in tables:
        plain.print(table)
    return out.getvalue()


def _cells(row: Sequence[AnyCell]) -> list[Cell]:
    return [Cell(cell) if isinstance(cell, str) else cell for cell in row]


def _csv_value(cell: Cell) -> float | str | None:
    """The number where there is one; nothing where it is unknown."""
    return cell.value if cell.value is not None else None if cell.text == "-" else cell.text


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    source = (files("codistill.results") / "table.html").read_text("utf-8")
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(source)


_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"$<$", ">": r"$>$", "|": r"$|$",
    "\n": " ", "\u00a0": "~",
}  # fmt: skip


def _latex(text: str) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in text)
