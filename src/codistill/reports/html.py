"""Pieces of a self-contained HTML page: charts, tables, switches, sections, and the page around them."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from codistill.files import write_atomically, writing
from codistill.plots import style
from codistill.plots.style import series_style

# Colours of the charts become variables, so that the style sheet can choose others on a dark background.
_NAMED = {
    style.INK: "var(--ink)", style.MUTED: "var(--muted)", style.AXIS: "var(--axis)", style.GRID: "var(--grid)",
    style.BLUE: "var(--blue)", style.GREY: "var(--grey)", style.WORSE: "var(--worse)",
    style.HEAT: "var(--heat)", style.PAPER: "var(--paper)",
}  # fmt: skip

_SWATCH_DASHES = {"solid": "none", "dashed": "6 3", "dotted": "2 3", "dashdot": "7 3 2 3"}


def switch(selector: str, name: str, swatch: str = "", *, on: bool = False) -> str:
    """A box that shows and hides the lines of a selector; without a selector, it switches all boxes of its form."""
    checked = " checked" if on else ""
    return f"<label><input type='checkbox' value='{selector}'{checked}>{swatch} {escaped(name)}</label>"


def swatch(index: int) -> str:
    """A short piece of the line that a series is drawn with."""
    colour, dash = series_style(index)
    return (
        "<svg class='swatch' viewBox='0 0 22 8' aria-hidden='true'><path d='M1 4h20' "
        f"stroke='{colour}' stroke-dasharray='{_SWATCH_DASHES[dash]}'/></svg>"
    )


def cards(named: Mapping[str, str]) -> str:
    """A few figures with their names."""
    items = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in named.items())
    return f"<dl class='figures few'>{items}</dl>"


def chart(
    figure: Figure, name: str, label: str, titles: Mapping[str, str] | None = None, *, hidden: bool = False
) -> str:
    """The figure; artists with a gid in `titles` can be switched, and show their title on hover."""
    out = io.BytesIO()
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # Text stays text: letters that matplotlib's font lacks are drawn by the browser's.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(out, format="svg", transparent=True, dpi=150, metadata={"Date": None})
    root = ElementTree.fromstring(out.getvalue())
    for parent in list(root.iter()):
        for child in [child for child in parent if _local(child.tag) in ("metadata", "style")]:
            parent.remove(child)
    for element in list(root.iter()):
        gid = element.get("id", "")
        _adapt(element, name)
        if titles and gid in titles:
            element.attrib |= {"data-series": gid} | ({"class": "hidden"} if hidden else {})
            ElementTree.SubElement(element, "title").text = titles[gid]
    root.attrib |= {"role": "img", "aria-label": label}
    return f"<figure class='chart' id='{name}'>{ElementTree.tostring(root, encoding='unicode')}</figure>"


def _adapt(element: ElementTree.Element, name: str) -> None:
    """No namespaces, ids unlike those of the page's other charts, named colours, short numbers."""
    element.tag = _local(element.tag)
    for key, value in list(element.attrib.items()):
        del element.attrib[key]
        key = _local(key)
        if key == "id":
            value = f"{name}-{value}"
        elif key == "href":
            value = re.sub("^#", f"#{name}-", value)
        elif key == "clip-path":
            value = value.replace("url(#", f"url(#{name}-")
        elif key == "style":
            value = re.sub("#[0-9a-f]{6}", lambda hit: _NAMED.get(hit[0], hit[0]), value)
        elif key == "d":
            value = re.sub(r"\d+\.\d+", lambda hit: f"{float(hit[0]):.2f}", " ".join(value.split()))
        element.set(key, value)


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int], foot: Sequence[Sequence[str]] = ()
) -> str:
    """A table whose columns can be sorted; `left`: columns of text; `foot`: rows below all others."""
    head = "".join(
        f"<th scope='col'{' class=left' if place in left else ''}><button type='button'>{escaped(text)}</button></th>"
        for place, text in enumerate(heads)
    )
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    last = "\n".join(f"<tr>{''.join(row)}</tr>" for row in foot)
    ending = f"<tfoot>{last}</tfoot>" if foot else ""
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>{ending}</table></div>"


def cell(text: str) -> str:
    """A cell of text."""
    return f"<td class='left'>{escaped(text)}</td>"


def numbers(*texts: str, by: Sequence[float]) -> list[str]:
    """Cells of numbers as text, with the plain numbers by which to sort them."""
    return [f"<td data-by='{number!r}'>{escaped(text)}</td>" for text, number in zip(texts, by, strict=True)]


def sorted_by(value: float | None) -> str:
    """The attribute of a cell that its column is sorted by."""
    return "" if value is None else f" data-by='{float(value)!r}'"


def section(heading: str, content: str) -> str:
    """A heading and its content."""
    return f"<section><h2>{escaped(heading)}</h2>{content}</section>"


def note(*sentences: str) -> str:
    """Sentences in small print; nothing if all are empty."""
    text = " ".join(filter(None, sentences))
    return f"<p class='note'>{escaped(text)}</p>" if text else ""


def page(title: str, *parts: str) -> str:
    """The whole page, with its style and script inside."""
    css, script = ((files("codistill.reports") / f"report.{kind}").read_text("utf-8") for kind in ("css", "js"))
    body = "\n".join(filter(None, parts))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{escaped(title)} - codistill</title>
<style>
{css}</style>
</head>
<body>
<main>
<h1>{escaped(title)}</h1>
{body}
</main>
<script>
{script}</script>
</body>
</html>
"""


def write(page: str, path: Path) -> Path:
    """Write a page to a file, whose folder is made if need be."""
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.encode("utf-8", "replace"))
    return path


def escaped(text: str) -> str:
    """Text that is safe in a page."""
    return escape(str(text))


def capitalised(text: str) -> str:
    """Text with a capital letter, for the start of a sentence."""
    return text[:1].upper() + text[1:]
