"""Hooks of the documentation site: what MkDocs does not do by itself.

Changelog and contributing guide stand in the root of the repository, and are shown as pages. Pages may link to files of
the repository that are not pages (examples, service files, recipes): on the site these are copied to `files/`, and the
links lead there. Decisions are listed in the navigation as they are found. A block of the language `math` is a formula,
as on forges. No page loads anything from another server.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pymdownx.arithmatex import arithmatex_fenced_format

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
LOADED = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?https?:[^>]*>|<link\b[^>]*stylesheet[^>]*https?:[^>]*>")
# Pages of the site whose text stands in the root of the repository.
FROM_ROOT = {"changelog.md": ROOT / "CHANGELOG.md", "contributing.md": ROOT / "CONTRIBUTING.md"}
PAGE_OF = {path: page for page, path in FROM_ROOT.items()} | {ROOT / "README.md": "index.md"}


def on_config(config: Any) -> Any:
    """Add the decisions to the navigation, under Project, and blocks of formulas to the Markdown."""
    decisions = []
    for page in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        title = page.read_text("utf-8").splitlines()[0].removeprefix("#").strip()
        decisions.append({title: f"decisions/{page.name}"})
    project = next(part["Project"] for part in config.nav if "Project" in part)
    project.insert(1, {"Decisions": decisions})
    formula = {"name": "math", "class": "arithmatex", "format": arithmatex_fenced_format(mode="generic")}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [formula]
    return config


def on_page_markdown(text: str, page: Any, config: Any, files: Files) -> str:
    """Fill in pages from the root of the repository, and let links lead to where their targets are on the site."""
    source, here = FROM_ROOT.get(page.file.src_uri), Path(page.file.abs_src_path).parent
    if source is not None:
        text, here = source.read_text("utf-8"), ROOT

    def lead(match: re.Match[str]) -> str:
        path = (here / match["target"]).resolve()
        if "://" in match["target"] or not path.is_relative_to(ROOT) or not path.is_file():
            return match[0]  # another site; or broken, which MkDocs reports
        anchor = match["anchor"] or ""
        if path in PAGE_OF:
            place = PAGE_OF[path]
        elif path.is_relative_to(DOCS):
            place = path.relative_to(DOCS).as_posix()
        else:
            place, anchor = f"files/{path.relative_to(ROOT).as_posix()}", ""
            if path.suffix == ".md":  # as it is, not as a page
                place += ".txt"
            if files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, content=path.read_bytes()))
        start = Path(page.file.src_uri).parent.as_posix()
        return f"]({quote(Path(os.path.relpath(place, start)).as_posix())}{anchor})"

    return LINK.sub(lead, text)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """A mean and its deviation stay on one line."""
    return html.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def on_post_page(output: str, page: Any, config: Any) -> None:
    """The site works offline: no page loads a font, a script or a picture from another server."""
    loaded = LOADED.search(output)
    if loaded:
        raise PluginError(f"{page.file.src_uri} loads something from another server: {loaded[0]}")
