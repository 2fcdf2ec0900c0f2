"""Hooks of the documentation site: what MkDocs does not do by itself.

Pages may link to files of the repository that are not pages (examples, service files, recipes). On the site these are
copied to `files/`, and the links are changed to lead there. Decisions are listed in the navigation as they are found.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?P<head>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<tail>\))")
# Pages of the repository that stand outside of docs/ and are included in a page of the site.
INCLUDED = {
    ROOT / "README.md": "index.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
}


def on_config(config: Any) -> Any:
    """Add the decisions to the navigation, under Project."""
    decisions = []
    for page in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        title = page.read_text("utf-8").splitlines()[0].removeprefix("#").strip()
        decisions.append({title: f"decisions/{page.name}"})
    project = next(part["Project"] for part in config.nav if "Project" in part)
    project.insert(1, {"Decisions": decisions})
    return config


def on_page_markdown(text: str, page: Any, config: Any, files: Files) -> str:
    """Let links to files outside of docs/ lead to copies on the site."""
    here = Path(page.file.abs_src_path).parent

    def lead(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = (here / target).resolve()
        if path.is_relative_to(DOCS) or not path.is_relative_to(ROOT) or not path.is_file():
            return match[0]  # a page of the site; or broken, which MkDocs reports
        depth = page.file.src_uri.count("/")
        if path in INCLUDED:
            return f"{match['head']}{'../' * depth}{INCLUDED[path]}{match['anchor'] or ''}{match['tail']}"
        copied = f"files/{path.relative_to(ROOT).as_posix()}"
        if path.suffix == ".md":  # as it is, not as a page of the site
            copied += ".txt"
        if files.get_file_from_path(copied) is None:
            files.append(File.generated(config, copied, content=path.read_bytes()))
        return f"{match['head']}{'../' * depth}{quote(copied)}{match['tail']}"

    return LINK.sub(lead, text)
