"""Foundations that every other package uses: errors, settings, files, random numbers, devices and text."""

from __future__ import annotations

import platform
from importlib.metadata import version

__version__ = "0.1.0"
_PACKAGES = ("codistill", "numpy", "scikit-learn", "scipy", "torch", "safetensors", "skops")


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that determine results."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
