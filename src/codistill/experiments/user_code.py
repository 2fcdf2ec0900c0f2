"""One's own Python file, named by oneself: imported as any module is, but beside all others.

A recipe can name such files, so whoever runs it runs them. Commands that only look at a recipe or at the folder of a
run run none: an `UnreadProtocol` takes the place of a protocol, and files are compared by their digests.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from codistill.core.errors import RecipeError, nearest, own_line
from codistill.core.settings import setting
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS

_loaded: dict[tuple[str, bytes], ModuleType] = {}  # by path and content


def run_file(path: Path, prefix: str) -> ModuleType:
    """The module in a file; raises whatever the file does when it is run."""
    name = f"{prefix}_{path.stem}"
    if getattr(sys.modules.get(name), "__file__", str(path)) != str(path):  # a file of the same name elsewhere
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(path.parent))  # for what stands beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def is_own(name: Any) -> bool:
    """Whether a name in a recipe has the form 'file.py:Name'."""
    return isinstance(name, str) and name.rpartition(":")[0].endswith(".py")


def load_own(name: str) -> Any:
    """What 'file.py:Name' names. A file that has not changed is run once: all agents share its classes."""
    path, _, attribute = name.rpartition(":")
    try:
        key = (path, Path(path).read_bytes())
        if key not in _loaded:
            _loaded[key] = run_file(Path(path), "own")
    except Exception as error:  # whatever the file does when it is run
        raise RecipeError(
            f"'{name}' must be importable.",
            f"{type(error).__name__}: {error}" + (f", at {line}" if (line := own_line(error)) else ""),
            "Check the path, the file and the name of the class in it.",
        ) from error
    module = _loaded[key]
    if not hasattr(module, attribute):
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise RecipeError(
            f"'{name}' must name something in {path}.", f"no '{attribute}' there", nearest(attribute, own)
        )
    return getattr(module, attribute)


def files_of(names: Iterable[Any]) -> dict[str, str | None]:
    """Every file that is run for such names, with its SHA-256: the files, and modules beside them that they import.

    None of them is run. A file that cannot be read has no digest.
    """
    found: dict[Path, str | None] = {}
    waiting = [Path(name.rpartition(":")[0]) for name in names if is_own(name)]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        content = _content(path)
        found[path] = None if content is None else hashlib.sha256(content).hexdigest()
        waiting += [] if content is None else _imported_beside(path, content)
    return {str(path): found[path] for path in sorted(found)}


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (OSError, ValueError):  # a path with a NUL in it is a ValueError
        return None


def _imported_beside(path: Path, content: bytes) -> Iterator[Path]:
    """Modules in the folder of a file that it imports by name, at whatever place."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # it fails when it is run
    for node in ast.walk(tree):
        named = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            named = [node.module, *(f"{node.module}.{name}" for name in named)]
        for name in named:
            place = path.parent.joinpath(*name.split("."))
            yield from (each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file())


def shown_files(files: dict[str, str | None]) -> str:
    return ", ".join(
        f"{path} ({'not readable' if code is None else f'SHA-256 {code}'})" for path, code in files.items()
    )


def digests_of(names: list[Any]) -> dict[str, str]:
    """The SHA-256 of each file among such names, by the file's name."""
    files = sorted({Path(name.rpartition(":")[0]) for name in names if is_own(name)})
    contents = {path.name: _content(path) for path in files}  # what is not readable is reported when it is run
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items() if content is not None}


@dataclass(frozen=True, kw_only=True)
class UnreadProtocol(Protocol):
    """In the place of a protocol in a file of one's own that was not run: of it only its place and settings are known.

    It cannot be run: see `recipe.with_code`.
    """

    place: str = setting("", "its file and class, 'file.py:Class'")
    table: dict[str, Any] = setting(factory=dict, help="its settings, as they are written, not checked")

    @property
    def class_name(self) -> str:
        return self.place.rpartition(":")[2]


def protocol_class(name: str) -> type[Protocol]:
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    if not is_own(name):
        raise RecipeError(
            f"Unknown protocol '{name}'.",
            "",
            f"{nearest(name, PROTOCOLS)} See 'codistill protocols'; your own is named as 'file.py:Class'.",
        )
    cls = load_own(name)
    if not (isinstance(cls, type) and issubclass(cls, Protocol)):
        raise RecipeError(f"'{name}' must be a class derived from Protocol.", f"{cls!r}"[:80], "Name such a class.")
    return cls
