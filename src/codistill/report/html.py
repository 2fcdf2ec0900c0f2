"""What the pages of a report are made of: charts as SVG, sections, and the templates that write them.

The templates escape all text that is not marked as safe; only a chart's SVG and a table's HTML are.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from codistill.core.files import write_atomically, writing
from codistill.report import style
from codistill.results.tables import Table


@dataclass(frozen=True)
class Chart:
    """A picture, and sentences on how to read it."""

    name: str  # its id on the page
    svg: Markup
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Switch:
    """A box that shows and hides the lines of a selector; without a selector, it switches all boxes of its form."""

    selector: str
    name: str
    series: int | None = None  # the number of the line that is shown beside the name
    on: bool = False

    @property
    def stroke(self) -> tuple[str, str] | None:
        """Colour and dashes of the line, as SVG writes them; None if no line is shown."""
        if self.series is None:
            return None
        colour, dashes = style.series_style(self.series)
        return colour, {"solid": "none", "dashed": "6 3", "dotted": "2 3", "dashdot": "7 3 2 3"}[dashes]


@dataclass(frozen=True)
class Section:
    """A heading, and below it in this order what there is."""

    heading: str
    switches: Sequence[Switch] = ()
    charts: Sequence[Chart] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)  # a few figures by their names
    table: Table | None = None
    notes: Sequence[str] = ()  # sentences


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def sentence(phrase: str) -> str:
    return f"{capitalised(phrase)}."


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Fill a template and write it to a file, whose folder is made if need be; returns its path."""
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _templates().get_template(template).render(values).encode("utf-8", "replace"))
    return path


@cache
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("codistill.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    found.filters["sentence"] = sentence
    return found


def chart(
    figure: Figure, name: str, label: str, *notes: str, titles: Mapping[str, str] | None = None, hidden: bool = False
) -> Chart:
    """A figure for a page; artists with a gid in `titles` can be switched, and show their title on hover."""
    return Chart(name, svg(figure, name, label, titles or {}, hidden=hidden), notes)


# Colours of the charts become variables, so that the style sheet can choose others on a dark background.
_NAMED = {
    style.INK: "var(--ink)", style.MUTED: "var(--muted)", style.AXIS: "var(--axis)", style.GRID: "var(--grid)",
    style.BLUE: "var(--blue)", style.GREY: "var(--grey)", style.WORSE: "var(--worse)",
    style.HEAT: "var(--heat)", style.PAPER: "var(--paper)",
}  # fmt: skip


def svg(figure: Figure, name: str, label: str, titles: Mapping[str, str], *, hidden: bool) -> Markup:
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
        if gid in titles:
            element.attrib |= {"data-series": gid} | ({"class": "hidden"} if hidden else {})
            ElementTree.SubElement(element, "title").text = titles[gid]
    root.attrib |= {"role": "img", "aria-label": label}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


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
