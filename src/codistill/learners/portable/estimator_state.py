"""Models in an agent's own checkpoint: any estimator or plain object, never pickled, never executed."""

from __future__ import annotations

import importlib
import io
import json
import zipfile
from typing import Any

from codistill.errors import CheckpointError
from codistill.learners.portable.skops_archive import nodes

# Packages whose classes may be rebuilt, and single types of others.
_OWN_PACKAGES = frozenset({"numpy", "scipy", "sklearn", "collections"})
_OWN_TYPES = frozenset({"builtins.complex", "builtins.frozenset", "builtins.range", "functools.partial"})


def dump_estimator(estimator: Any) -> bytes:
    """Any estimator or plain object in the skops format."""
    import skops.io  # takes seconds, so only where it is needed
    from skops.io.exceptions import UnsupportedTypeException

    try:
        return bytes(skops.io.dumps(estimator))
    except (UnsupportedTypeException, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"A model must be made of plain attributes to be saved: {type(estimator).__name__}.",
            f"{type(error).__name__}: {str(error)[:200]}",
            "Keep only arrays, numbers, strings, lists and dicts in its attributes.",
        ) from None


def load_own_estimator(data: bytes, like: Any) -> Any:
    """An estimator from an agent's own checkpoint: of the configured class, and without foreign types inside."""
    import skops.io

    packages = _OWN_PACKAGES | {type(part).__module__.split(".")[0] for part in _configured(like)} - {"builtins"}
    try:
        untrusted = skops.io.get_untrusted_types(data=data)
        foreign = [name for name in untrusted if name not in _OWN_TYPES and name.split(".")[0] not in packages]
        if foreign:
            raise ValueError(f"foreign types {', '.join(foreign)}")
        _check_calls(data)
        model = skops.io.loads(data, trusted=untrusted)
        if type(model) is not type(like):
            raise ValueError(f"a {type(model).__name__} in place of a {type(like).__name__}")
    except Exception as error:
        raise CheckpointError(
            "A saved model must be of the class that the agent is configured with.",
            f"{type(error).__name__}: {str(error)[:200]}",
            "Resume with the recipe the run was started with, or from an earlier checkpoint.",
        ) from None
    return model


def _configured(model: Any) -> list[Any]:
    """A model and what its owner built it of."""
    parts = model.get_params() if hasattr(model, "get_params") else getattr(model, "__dict__", {})
    return [model, *parts.values()]


def _check_calls(data: bytes) -> None:
    """Classes are built by calling them; functions are never called."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        outline = json.loads(archive.read("schema.json"))
    for node in nodes(outline):
        if node["__loader__"] in ("ConstructorFromReduceNode", "LossNode"):
            named = getattr(importlib.import_module(node["__module__"]), node["__class__"])
            if not isinstance(named, type):
                raise ValueError(f"a call of {node['__module__']}.{node['__class__']}")
