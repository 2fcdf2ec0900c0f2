"""The documentation is true: generated pages are fresh, links lead somewhere, protocols have pages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from codistill.protocols import PROTOCOLS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def test_the_recipe_reference_is_what_the_settings_say() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / "recipes.md").read_text() == generate.page(), "run: python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_every_protocol_is_on_the_list_of_pages() -> None:
    index = (ROOT / "docs" / "protocols" / "README.md").read_text()
    for name, protocol in PROTOCOLS.items():
        row = next(line for line in index.splitlines() if line.startswith(f"| [{name}]"))
        assert protocol.needs.words() in row


def test_the_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme
