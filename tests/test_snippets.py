"""Every snippet in README and docs is run: Python blocks are executed, recipes are read, commands are parsed.

All Python blocks of a page share one namespace and run in order, in an empty folder; functions named test_* are called
at the end. A block with a title (```python title="vote.py") is written to that file first: Python for a later block to
import, a recipe to be read. A block that cannot run is marked, on the line before it, with the reason:
<!-- not run: ... -->
"""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import codistill as cd
from codistill.cli import make_parser
from codistill.experiments.recipe import make_recipe
from codistill.experiments.search import read_search
from codistill.experiments.sweep import read_sweep
from codistill.learners import architectures

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
INDENTED = re.compile(r"^ {4}(codistill [^\n]+)$", re.MULTILINE)  # commands in blocks that are indented
INLINE = re.compile(r"`((?:codistill|make) [^`]+)`")
MOST_NOT_RUN = 3
# The bytes of an example, on the page of a protocol.
MEASURED = re.compile(r"Measured\s+in\s+the\s+example:\s+([\d,]+)\s+bytes\s+sent\s+and\s+([\d,]+)\s+received")
# A recipe to try single tables in: a snippet may show [compression] alone.
AROUND = {
    "data": {"name": "digits", "public": 100},
    "partition": {"kind": "iid"},
    "agents": [{"name": "a", "learner": "mlp"}, {"name": "b", "learner": "mlp"}],
    "protocol": {"name": "fedmd"},
}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    title: str | None
    text: str
    reason: str | None  # why it is not run
    line: int

    @property
    def runs(self) -> bool:
        return self.reason is None


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(Block(match["language"], match["title"], match["text"], match["reason"], line))
    return found


def with_blocks(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to run in; what a page imports from it or registers is forgotten afterwards."""
    monkeypatch.setattr(architectures, "_entries", dict(architectures._entries))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if name == "snippets" or (file is not None and Path(file).is_relative_to(tmp_path)):
            del sys.modules[name]
    importlib.invalidate_caches()


def write_titled(page: Path, folder: Path) -> None:
    for block in blocks(page):
        if block.title is not None and block.runs:
            (folder / block.title).write_text(block.text, "utf-8")


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in with_blocks("python") if page != README], ids=named)
def test_python_runs(page: Path, folder: Path) -> None:
    write_titled(page, folder)
    module = types.ModuleType("snippets")
    module.__file__ = str(folder / "snippets.py")
    sys.modules["snippets"] = module  # so that dataclasses find the names of their annotations
    lines = page.read_text("utf-8").splitlines()
    claimed = []
    found = [block for block in blocks(page) if block.language == "python" and block.title is None and block.runs]
    for block, following in zip(found, [*found[1:], None], strict=False):
        code = "\n" * (block.line - 1) + block.text  # a traceback names the page's own line
        exec(compile(code, named(page), "exec"), module.__dict__)
        below = " ".join(lines[block.line : None if following is None else following.line])
        claimed += [(claim.groups(), measured(module.__dict__["result"])) for claim in MEASURED.finditer(below)]
    assert [claim for claim, _ in claimed] == [figures for _, figures in claimed], "bytes of the examples"
    for name, function in list(vars(module).items()):
        if name.startswith("test_") and inspect.isfunction(function):
            function(**({"tmp_path": folder / name} if "tmp_path" in inspect.signature(function).parameters else {}))


def measured(result: cd.Result) -> tuple[str, str]:
    """Bytes that an agent has sent and received in the last round, in the mean, as a page says them."""
    rows = result.frame()
    last = rows[rows["round"] == rows["round"].max()]
    return f"{last['sent'].mean():,.0f}", f"{last['received'].mean():,.0f}"


def test_the_readme_runs_and_shows_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """In the same form, and in figures that another processor may change by rounding."""
    (code,) = [block for block in blocks(README) if block.language == "python"]
    shown = next(block for block in blocks(README) if "┏" in block.text)
    exec(compile("\n" * (code.line - 1) + code.text, "README.md", "exec"), {"__name__": "readme"})
    printed, told = capsys.readouterr().out.split(), shown.text.split()
    number = re.compile(r"[+-]?\d+\.\d")
    # Who is worse off is listed by how much, so that rounding can change the order; the names are the same.
    listed = [(words.index("worse:"), words.index("own", words.index("worse:"))) for words in (printed, told)]
    names = [
        sorted(word for word in words[start:end] if not re.search(r"\d|points", word))
        for words, (start, end) in zip((printed, told), listed, strict=True)
    ]
    assert names[0] == names[1]
    for (start, end), words in zip(listed, (printed, told), strict=True):
        words[start:end] = []
    for found, claimed in zip(printed[: printed.index("time:")], told[: told.index("time:")], strict=True):
        if number.fullmatch(claimed):
            assert float(found) == pytest.approx(float(claimed), abs=3)
        elif not number.search(claimed):
            assert found == claimed


@pytest.mark.parametrize("page", with_blocks("toml"), ids=named)
def test_recipes_are_valid(page: Path, folder: Path) -> None:
    write_titled(page, folder)
    for block in blocks(page):
        if block.language != "toml" or not block.runs:
            continue
        tables = tomllib.loads(block.text)
        if "sweep" in tables:
            (folder / "sweep.toml").write_text(block.text, "utf-8")
            assert read_sweep(folder / "sweep.toml")
        elif "search" in tables:
            (folder / "search.toml").write_text(block.text, "utf-8")
            assert read_search(folder / "search.toml").fields
        else:
            assert make_recipe(tables if "agents" in tables else AROUND | tables, folder)


def commands(page: Path) -> list[str]:
    """All commands in the blocks of a page, fenced or indented."""
    shell = [block.text for block in blocks(page) if block.language in ("", "sh") and block.runs]
    lines = [line for text in shell for line in text.replace("\\\n", " ").splitlines()]
    outside = FENCE.sub("", page.read_text("utf-8"))
    return [line for line in lines if re.match("(codistill|make) ", line)] + INDENTED.findall(outside)


def mentioned_commands(page: Path) -> list[str]:
    """All commands in the text of a page, whole or not."""
    return INLINE.findall(FENCE.sub("", page.read_text("utf-8")).replace("\n", " "))


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page) or mentioned_commands(page)], ids=named)
def test_commands_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(page):
        check_command(command)
    for command in mentioned_commands(page):
        code = 0
        try:
            check_command(command)
        except SystemExit as end:
            code = end.code
        told = capsys.readouterr().err
        # In the text a command may stand without its arguments.
        assert code == 0 or "required" in told or "expected one argument" in told, command


def check_command(command: str) -> None:
    """The command line accepts it, and what it names is there."""
    program, *arguments = shlex.split(command, comments=True)
    if program == "make":
        assert set(arguments) <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
        return
    make_parser().parse_args(arguments)
    missing = [part for part in arguments if part.startswith(("recipes/", "examples/")) and not (ROOT / part).exists()]
    assert not missing, command


def test_few_blocks_are_not_run() -> None:
    marked = [
        f"{named(page)}:{block.line}: {block.reason}" for page in PAGES for block in blocks(page) if not block.runs
    ]
    assert len(marked) <= MOST_NOT_RUN, marked


def test_languages_are_known() -> None:
    known = {"", "python", "toml", "bibtex", "sh", "json", "math"}
    strange = {block.language for page in PAGES for block in blocks(page)} - known
    assert not strange
