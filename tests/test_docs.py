"""The documentation is true: generated pages are fresh, links lead somewhere, every protocol has one place."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from trials.__main__ import TRIALS

from codistill.core import __version__
from codistill.protocols import PROTOCOLS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
LINK = re.compile(r"\]\((?!\w+://)(?P<path>[^)#]*)(?:#(?P<anchor>[^)]+))?\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/generate.py as a module."""
    monkeypatch.syspath_prepend(DOCS)
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_generated_is_fresh(generate: ModuleType) -> None:
    assert (DOCS / "recipes.md").read_text("utf-8") == generate.page(), "run: python docs/generate.py"
    for page in (DOCS / "protocols").glob("*.md"):
        text = page.read_text("utf-8")
        assert text == generate.filled(text), "run: python docs/generate.py"
    draw = generate.draw_rounds
    assert {path.stem for path in draw.FOLDER.glob("*.svg")} == set(draw.ROUNDS) == set(PROTOCOLS)
    for name in PROTOCOLS:
        assert (draw.FOLDER / f"{name}.svg").read_text("utf-8") == draw.drawn(name), "run: python docs/generate.py"


# The parts of the section of a protocol, in this order, and what each of them must hold.
PARTS = {
    "What it is for": "",
    "One round": r"<!-- generated: picture of {name} -->\n\n!\[One round of {name}\. [^\]]+\]\(rounds/{name}\.svg\)",
    "Algorithm": r"```math\n",
    "Example": r"```python\n(.*\n)*result = ",
    "Settings": r"<!-- generated: settings of {name} -->",
    "What is exchanged": r"\*\*Bytes\*\*.*\$(.|\n)*Measured\s+in\s+the\s+example",
    "Deviations from the paper": "",
    "Results": "",
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_page_of_a_protocol_has_all_parts(name: str) -> None:
    index = (DOCS / "protocols" / "README.md").read_text("utf-8")
    page, anchor = re.search(rf"^\| \[{name}\]\(([^)#]+)#?([^)]*)\)", index, re.MULTILINE).groups()  # type: ignore[union-attr]
    text = whole = (DOCS / "protocols" / page).read_text("utf-8")
    level = "##"
    if f"\n## {name}\n" in text:  # one of several protocols on the page
        text = re.split(r"\n## ", text.partition(f"\n## {name}\n")[2])[0]
        level = "###"
    assert anchor in {"", name}
    found = dict(re.findall(rf"^{level} (.+)\n((?:(?!{level} ).*\n?)*)", text, re.MULTILINE))
    assert [title for title in found if title in PARTS] == list(PARTS)
    for title, content in PARTS.items():
        assert found[title].strip(), title
        assert re.search(content.format(name=name), found[title]), title
    for field in dataclasses.fields(PROTOCOLS[name]):
        assert f"| `{field.name}` |" in found["Settings"]
    assert_symbols_are_explained(found["Algorithm"], whole)


def assert_symbols_are_explained(algorithm: str, page: str) -> None:
    """Every Greek letter and every letter with an accent in a displayed formula is named outside of these."""
    shown = re.findall(r"```math\n(.*?)```", algorithm, re.DOTALL)
    outside = re.sub(r"```math\n.*?```", "", page, flags=re.DOTALL)
    greek = r"\\(?:alpha|beta|gamma|eta|lambda|mu|theta|tau|varphi|psi|Phi|varepsilon)\b"
    for symbol in set(re.findall(rf"{greek}|\\(?:bar|hat|tilde) \w", " ".join(shown))):
        assert symbol in outside, symbol


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.finditer(text):
        target = (page.parent / link["path"]).resolve() if link["path"] else page
        assert target.exists(), link[0]
        if link["anchor"] and target.suffix == ".md":
            assert link["anchor"] in anchors(target), link[0]


def test_formulas_and_search_need_no_server() -> None:
    """Their scripts, styles and fonts are files of the site with a licence; formulas use no other font."""
    site = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), yaml.SafeLoader)
    assert "offline" in site["plugins"]
    loaded = [*site["extra_css"], *site["extra_javascript"], *site["extra"]["polyfills"]]
    assert all((DOCS / path).is_file() for path in loaded)
    assert all((folder / "LICENSE").is_file() for folder in (DOCS / "vendor").iterdir())
    fonts = {path.stem for path in (DOCS / "vendor" / "katex" / "fonts").iterdir()}
    assert {"KaTeX_Main-Regular", "KaTeX_Math-Italic", "KaTeX_AMS-Regular", "KaTeX_Size4-Regular"} <= fonts
    for page in (DOCS / "protocols").glob("*.md"):
        text = page.read_text("utf-8")
        formulas = re.findall(r"^```math\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        formulas += re.findall(r"\$([^$\n]+)\$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
        for formula in formulas:
            assert formula.count("{") == formula.count("}"), formula
            assert formula.count("\\big(") == formula.count("\\big)"), formula
            assert not re.search(r"\\(?:mathfrak|mathscr|mathsf|mathtt|boldsymbol)\b", formula), formula


def test_every_protocol_has_one_place() -> None:
    index = (DOCS / "protocols" / "README.md").read_text("utf-8")
    places = []
    for name, protocol in PROTOCOLS.items():
        (row,) = [line for line in index.splitlines() if line.startswith(f"| [{name}]")]
        assert protocol.needs.words() in row
        page, _, anchor = re.match(r"\| \[\w+\]\(([^)#]+)(#?)([^)]*)\)", row).groups()  # type: ignore[union-attr]
        assert anchor in {name, ""}
        assert name in anchors(DOCS / "protocols" / page) or anchor == ""
        assert anchor == name or name in page
        places.append((page, anchor))
    assert len(set(places)) == len(PROTOCOLS)


def test_the_navigation_has_every_page() -> None:
    loader = yaml.SafeLoader
    listed = set(re.findall(r"[\w/-]+\.md", str(yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), loader)["nav"])))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    decisions = {page for page in pages if re.match(r"decisions/\d", page)}  # a hook lists these
    assert pages - decisions == listed


def test_the_trials_take_at_most_80_minutes_and_their_page_says_so() -> None:
    """65 minutes of trials, and the tests that are too long for `make test`; most take half of their limit.

    `golden` runs 384 federations: six minutes on two idle cores, and twice that where others use them as well.
    """
    page = (ROOT / "trials" / "README.md").read_text("utf-8")
    limits = {name: 60 * int(minutes) for name, minutes in re.findall(r"^\| `(\w+)`: .* (\d+) min \|$", page, re.M)}
    assert limits == {trial.name: trial.limit for trial in TRIALS}
    assert sum(limits.values()) <= 80 * 60


def test_the_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "make demo" in readme
    assert "make test" in readme


def test_the_readme_says_what_the_demo_reaches() -> None:
    """The figures of the run that docs/demo.png shows; that the demo still gives them is tested in test_cli.py."""
    figures = json.loads((ROOT / "docs" / "demo.json").read_text("utf-8"))
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    together, alone = (f"{100 * figures[which]:.1f} %" for which in ("together", "alone"))
    assert f"Together they reach {together} on average, alone {alone};" in readme
    assert f"they exchange {figures['bytes'] / 1e6:.1f} MB of predictions" in readme


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert project["version"] == citation["version"] == __version__
    assert f"version = {{{__version__}}}" in (ROOT / "README.md").read_text("utf-8")


def test_the_number_of_protocols_in_the_readme() -> None:
    assert f"**{len(PROTOCOLS)} protocols and baselines**" in (ROOT / "README.md").read_text("utf-8")
