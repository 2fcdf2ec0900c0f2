"""One's own Python file, named by oneself: imported as any module is, but beside all others."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from codistill.errors import RecipeError, nearest
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.source_lines import own_line

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


def digests_of(names: list[Any]) -> dict[str, str]:
    """The SHA-256 of each file among such names, by the file's name."""
    files = sorted({Path(name.rpartition(":")[0]) for name in names if is_own(name)})
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def protocol_class(name: str) -> type[Protocol]:
    """A protocol by its name, or one's own as 'file.py:Class'."""
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    if not is_own(name):
        raise RecipeError(
            "A protocol must be on the list of 'codistill protocols', or be your own as 'file.py:Class'.",
            f"'{name}'",
            nearest(name, PROTOCOLS),
        )
    cls = load_own(name)
    if not (isinstance(cls, type) and issubclass(cls, Protocol)):
        raise RecipeError(f"'{name}' must be a class derived from Protocol.", f"{cls!r}"[:80], "Name such a class.")
    return cls
