"""The documentation is true: generated pages are fresh, links lead somewhere, every protocol has one place."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path

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


def test_the_recipe_reference_is_what_the_settings_say() -> None:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (DOCS / "recipes.md").read_text("utf-8") == generate.page(), "run: python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.finditer(text):
        target = (page.parent / link["path"]).resolve() if link["path"] else page
        assert target.exists(), link[0]
        if link["anchor"] and target.suffix == ".md":
            assert link["anchor"] in anchors(target), link[0]


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
