"""One table, four writers: each escapes what its format reads as more than text."""

from __future__ import annotations

import csv
import io
from html.parser import HTMLParser

import pytest
from rich.console import Console

from codistill.results.tables import Cell, Table, plain_text

NASTY = "<b>[red] :smile: & 50 % \\ $x_1$"
TABLE = Table(
    ("name", "gain\nover Silo", "why"),
    "lrl",
    [[NASTY, Cell("+12.3", 0.123), ""], [Cell("=1+1", bold=True), Cell("-4.5", -0.045, worse=True), "-"]],
    [["mean", Cell("+3.9", 0.039), ""]],
    title="a title",
    result="the result",
    notes=["one note", NASTY],
)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts += [data.strip()] if data.strip() else []


def test_a_terminal_shows_text_as_it_is_with_the_footer_below_a_rule() -> None:
    lines = [line.rstrip() for line in plain_text([TABLE], 100).splitlines()]
    assert lines[0] == "a title"
    assert [line.split("│")[1].strip() for line in lines if "│" in line] == [NASTY, "=1+1", "mean"]
    assert lines[-3:] == ["the result", "one note", NASTY]
    assert sum("├" in line for line in lines) == 1
    assert plain_text([Table(("a",), "l", [["x"]])], 20).count("\n") == 5  # no title, no notes, no footer


def test_what_stands_out_on_a_terminal() -> None:
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=True, color_system="standard").print(TABLE)
    assert "\x1b[1m=1+1" in out.getvalue()
    assert "\nthe result" in out.getvalue()  # notes are dim, the result is not
    assert "\x1b[2;3mone note" in out.getvalue()


def test_html_for_a_notebook() -> None:
    page = Page(TABLE.html())
    assert page.texts == [
        "a title", "name", "gain\nover Silo", "why", NASTY, "+12.3", "=1+1", "-4.5", "-", "mean", "+3.9", "the result",
        "one note", NASTY,
    ]  # fmt: skip
    assert [tag for tag, _ in page.tags].count("b") == 1  # the bold cell's, not that of the text
    right = [attributes for tag, attributes in page.tags if tag == "td" and "style" in attributes]
    assert len(right) == 3
    assert not any("class" in attributes for _, attributes in page.tags)


def test_html_for_a_page_can_be_sorted() -> None:
    page = Page(TABLE.html(page=True))
    assert "a title" not in page.texts  # the page has its own headings and notes
    assert "one note" not in page.texts
    cells = [attributes for tag, attributes in page.tags if tag == "td"]
    assert [cell.get("data-by") for cell in cells] == [None, "0.123", None, None, "-0.045", None, None, "0.039", None]
    assert [cell.get("class") for cell in cells[3:6]] == ["left", "worse", "left"]
    assert [tag for tag, _ in page.tags].count("button") == 3


def test_csv_has_numbers_in_full_and_no_formulas() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows == [["name", "gain over Silo", "why"], [NASTY, "0.123", ""], ["'=1+1", "-0.045", ""]]


def test_latex_needs_no_package() -> None:
    text = TABLE.latex()
    assert r"\begin{tabular}{lrl}" in text
    assert r"name & gain over Silo & why \\" in text
    assert r"$<$b$>$[red] :smile: \& 50 \% \textbackslash{} \$x\_1\$ & +12.3 &  \\" in text
    assert r"\caption{a title. the result one note" in text


@pytest.mark.parametrize("wrong", [("l", [["x", "y"]]), ("ll", [["x", "y"]]), ("c", [["x"]])])
def test_a_table_has_one_cell_per_column(wrong: tuple[str, list[list[str]]]) -> None:
    with pytest.raises(AssertionError):
        Table(("a",), *wrong)
