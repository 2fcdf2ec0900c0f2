"""One's own Python file, named by oneself: imported as any module is, but beside all others."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from codistill.errors import RecipeError, nearest
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.source_lines import own_line


def run_file(path: Path, prefix: str) -> ModuleType:
    """The module in a file; raises whatever the file does when it is run."""
    spec = importlib.util.spec_from_file_location(f"{prefix}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def protocol_class(name: str) -> type[Protocol]:
    """A protocol by its name, or one's own as 'file.py:Class'."""
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        raise RecipeError(
            "A protocol must be on the list of 'codistill protocols', or be your own as 'file.py:Class'.",
            f"'{name}'",
            nearest(name, PROTOCOLS),
        )
    try:
        cls = getattr(run_file(Path(path), "own"), attribute)
    except Exception as error:  # whatever the file does when it is run
        raise RecipeError(
            f"'{name}' must be importable.",
            f"{type(error).__name__}: {error}" + (f", at {line}" if (line := own_line(error)) else ""),
            "Check the path, the file and the name of the class in it.",
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Protocol)):
        raise RecipeError(f"'{name}' must be a class derived from Protocol.", f"{cls!r}"[:80], "Name such a class.")
    return cls
