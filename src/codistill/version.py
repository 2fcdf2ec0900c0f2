"""The version of codistill, and of what its figures rest on."""

from __future__ import annotations

import platform
from importlib.metadata import version

__version__ = "0.1.0"
_PACKAGES = ("codistill", "numpy", "scikit-learn", "scipy", "torch", "safetensors", "skops")


def versions() -> dict[str, str]:
    """Of what the figures rest on."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
