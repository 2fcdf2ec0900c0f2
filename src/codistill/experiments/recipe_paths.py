"""Paths in a recipe: relative to its own folder as they are written, absolute from there on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codistill.experiments.user_code import is_own


def with_absolute_paths(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of a recipe's tables in which paths do not depend on where the recipe is."""
    source = {key: dict(value) if isinstance(value, dict) else value for key, value in tables.items()}
    data = source.get("data")
    if isinstance(data, dict):
        if isinstance(data.get("file"), str):
            data["file"] = _beside(folder, data["file"])
        if isinstance(data.get("schema"), str):
            data["schema"] = str(folder / data["schema"])
        if isinstance(data.get("public_file"), str):
            data["public_file"] = str(folder / data["public_file"])
        if isinstance(data.get("dir"), str):
            data["dir"] = str(folder / data["dir"])
        if isinstance(data.get("files"), dict):
            data["files"] = {name: _beside(folder, str(path)) for name, path in data["files"].items()}
    protocol = source.get("protocol")
    if isinstance(protocol, dict) and is_own(protocol.get("name")):
        protocol["name"] = str(folder / protocol["name"])
    if isinstance(source.get("agents"), list):
        source["agents"] = [
            {**entry, "learner": _with_absolute_models(entry["learner"], folder)}
            if isinstance(entry, dict) and "learner" in entry
            else entry
            for entry in source["agents"]
        ]
    return source


def _with_absolute_models(learner: Any, folder: Path) -> Any:
    """A learner, or a step of a pipeline, with the path of its file."""
    if isinstance(learner, list):
        return [_with_absolute_models(step, folder) for step in learner]
    if isinstance(learner, dict):
        paths = ("kind", "steps")
        return {key: _with_absolute_models(value, folder) if key in paths else value for key, value in learner.items()}
    return str(folder / learner) if is_own(learner) else learner


def _beside(folder: Path, path: str) -> str:
    """A table beside the recipe; what is not there is looked for in the data folder when it is read."""
    beside = (folder / path).absolute()
    return str(beside) if beside.exists() else path
