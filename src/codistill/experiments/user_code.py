"""One's own Python file, named by oneself: imported as any module is, but beside all others."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def run_file(path: Path, prefix: str) -> ModuleType:
    """The module in a file; raises whatever the file does when it is run."""
    spec = importlib.util.spec_from_file_location(f"{prefix}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
