"""Settings of a sweep that some of its protocols have and others do not: left out where they do not exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from codistill.experiments.recipe import protocol_settings
from codistill.experiments.user_code import is_own

ABSENT = "-"  # the label of a field that a run's protocol does not have
_PROTOCOL = "protocol."


def known_settings(all_tables: Iterable[Mapping[str, Any]], folder: Path) -> dict[str, set[str]]:
    """By name of the protocol, what the [protocol] tables of a sweep may hold; files are relative to `folder`."""
    names = {name for tables in all_tables if (name := _name(tables)) is not None}
    return {name: protocol_settings(str(folder / name) if is_own(name) else name) for name in names}


def leave_out(tables: dict[str, Any], known: Mapping[str, set[str]]) -> list[str]:
    """Remove what this run's protocol does not have but another one of the sweep does; returns the removed keys.

    What none of them has stays, and is refused as a mistake.
    """
    name = _name(tables)
    if name is None:
        return []
    others = set().union(*known.values())
    odd = [key for key in tables["protocol"] if key not in known[name] and key in others]
    tables["protocol"] = {key: value for key, value in tables["protocol"].items() if key not in odd}
    return [f"{_PROTOCOL}{key}" for key in odd]


def on_all_values(keys: Mapping[str, Sequence[str]], table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a run without some field once for each of its values, by field: they are compared with all of them.

    `keys`: the values of each field.
    """
    for key, labels in keys.items():
        if key in table and (absent := table[key].eq(ABSENT)).any():
            copies = [table[absent].assign(**{key: label}) for label in labels]
            table = pd.concat([table[~absent], *copies], ignore_index=True)
    return table


def _name(tables: Mapping[str, Any]) -> str | None:
    protocol = tables.get("protocol")
    name = protocol.get("name") if isinstance(protocol, dict) else None
    return name if isinstance(name, str) else None
