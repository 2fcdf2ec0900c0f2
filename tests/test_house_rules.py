"""Rules of the house that a machine can check."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "codistill"
ALLOWED = {
    "codistill.protocol",
    "codistill.protocols.parts.losses",
    "codistill.protocols.parts.aggregation",
    "codistill.learners.ability",
    "numpy",
    "torch",
}
PROTOCOL_FILES = sorted((SOURCE / "protocols").glob("[a-z]*.py"))


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("path", PROTOCOL_FILES, ids=lambda path: path.stem)
def test_a_protocol_imports_only_what_it_is_written_in(path: Path) -> None:
    standard = {"__future__", "dataclasses", "collections.abc", "typing"}
    others = {name for name in _imports(path) if name not in standard | ALLOWED}
    assert all(name.startswith("codistill.protocols.") for name in others), others


@pytest.mark.parametrize("path", PROTOCOL_FILES, ids=lambda path: path.stem)
def test_a_protocol_file_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 130


def test_nothing_is_unpickled_or_evaluated() -> None:
    unsafe = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for path in SOURCE.rglob("*.py"):
        assert not unsafe & {name.split(".")[0] for name in _imports(path)}, path
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {call.id for call in calls if isinstance(call, ast.Name)}
        assert not {"eval", "exec"} & names, path
