"""Changes of a recipe's tables by `--set a.b=value`, and what such a change leaves without a meaning."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from codistill.data.partition import KINDS as PARTITIONS
from codistill.errors import CodistillError, RecipeError
from codistill.experiments.user_code import is_own, protocol_class
from codistill.text import parse_toml
from codistill.topology.graphs import KINDS as GRAPHS

_OF_ANY = {"name", "rounds", "topology"}  # keys of [protocol] that are no field of a protocol
# The key that says which fields a table has.
_KIND = {"partition": "kind", "protocol": "name", "topology": "kind"}


def apply_overrides(
    tables: dict[str, Any], changes: Sequence[str], folder: Path, *, run_code: bool = True
) -> list[str]:
    """Apply every `--set`; returns notes on what was dropped, because it belonged to the kind that was there before."""
    before = {table: _kind(tables, table) for table in _KIND}
    given: set[tuple[str, ...]] = set()
    for change in changes:
        override(tables, change)
        given.add(tuple(_steps(change.partition("=")[0])))
    notes = []
    for table, old in before.items():
        new = _kind(tables, table)
        whole = (table,) in given  # a table that was given as a whole holds nothing of before
        if old is not None and new is not None and new != old and not whole:
            kept = {steps[1] for steps in given if steps[0] == table and len(steps) > 1}
            notes += _drop(tables[table], table, old, new, kept, folder, run_code)
    return notes


def _kind(tables: dict[str, Any], table: str) -> str | None:
    held = tables.get(table)
    kind = held.get(_KIND[table]) if isinstance(held, dict) else None
    return kind if isinstance(kind, str) else None


def _drop(
    held: dict[str, Any], table: str, old: str, new: str, given: set[str], folder: Path, run_code: bool
) -> list[str]:
    """Remove fields that the new kind does not have, or has with another meaning, unless they are given with it."""
    unread = [kind for kind in (old, new) if table == "protocol" and is_own(kind) and not run_code]
    if new in unread:
        return []  # what it has is not known
    try:
        after = _fields(table, new, folder)
        before = dict.fromkeys(held.keys() - _OF_ANY, "") if old in unread else _fields(table, old, folder)
    except (CodistillError, KeyError):
        return []  # an unknown kind: refused when the recipe is made
    # What two protocols call by one name means the same; what two kinds of partitions do may not.
    same = {key for key in after if table == "protocol" or before.get(key) == after[key]}
    foreign = [key for key in held if key in before and key not in given and key not in same]
    dropped = ", ".join(f"{key} = {held.pop(key)!r}" for key in foreign)
    return [f"[{table}] {dropped}: left out, as {new} does not have it as {old} does"] if dropped else []


def _fields(table: str, kind: str, folder: Path) -> dict[str, str]:
    """The fields of a kind, with their help texts: equal texts say that they mean the same."""
    if table == "protocol":
        cls: type[Any] = protocol_class(str(folder / kind) if is_own(kind) else kind)
    else:
        cls = (PARTITIONS if table == "partition" else GRAPHS)[kind]
    return {field.name: str(field.metadata.get("help", "")) for field in dataclasses.fields(cls)}


def override(tables: dict[str, Any], text: str) -> None:
    """Apply `--set a.b=value`; the value is TOML, or a string as it stands."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError("--set must have the form table.key=value.", f"'{text}'", "Example: protocol.rounds=5.")
    try:
        parsed = parse_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    put(tables, key, parsed)


def put(tables: dict[str, Any], key: str, parsed: Any) -> None:
    """Set the value at a dotted key; steps into a list are numbers, a name with dots in it stands in quotes."""
    place: Any = tables
    *path, last = _steps(key) or [""]
    try:
        for step in path:
            place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
        if isinstance(place, list):
            place[int(last)] = parsed
        else:
            place[last] = parsed
    except (ValueError, IndexError, TypeError, AttributeError):
        do = "Example: protocol.rounds=5."
        if isinstance(place, list):
            do = f"There is a list of {len(place)}, counted from 0. Example: agents.0.learner=mlp."
        raise RecipeError("A change must name a place in the recipe.", f"'{key}'", do) from None


def _steps(key: str) -> list[str]:
    return [quoted or plain for quoted, plain in re.findall(r'"([^"]+)"|([^."]+)', key.strip())]
