"""Many runs of one recipe: every combination of some of its fields, as the figures of papers are made."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from codistill.errors import RecipeError, nearest
from codistill.experiments.overrides import apply_overrides, put
from codistill.experiments.recipe import Recipe, make_recipe, read_tables
from codistill.experiments.recipe_federation import topology_of
from codistill.experiments.sweep_fields import ABSENT, known_settings, leave_out, on_all_values
from codistill.settings import check_settings, from_table, setting

VARIANTS = "variants"  # the axis whose values change several fields at once


@dataclass(frozen=True)
class Axis:
    """A field of the recipe and the values it takes, each with a label."""

    key: str
    values: dict[str, Any]
    named: bool = False  # the labels say it all

    @property
    def name(self) -> str:
        """The last part of the field's name, for a person."""
        return self.key.rpartition(".")[2]

    def words(self, label: str) -> str:
        """A value as a person reads it, with its key."""
        return label if self.named else f"{self.name}={label}"


@dataclass(frozen=True, kw_only=True)
class Compare:
    """[compare]: what a sweep's lines are held against."""

    target: float | None = setting(
        None, "accuracy, or highest RMSE, whose price in rounds, exchanges, steps and bytes is told", above=0, at_most=1
    )
    gain_over: str | None = setting(None, "the line over which gains are told, seed by seed")
    fewer_against: str | None = setting(None, "the line with whose costs up to the target those of others are compared")
    bytes_against: str | None = setting(None, "the same, of bytes only")
    own: bool = setting(False, "compare scores on each agent's own test data, not on the common test set")
    present: bool = setting(False, "compare scores of agents that took part in the round: of the newest common model")

    def __post_init__(self) -> None:
        check_settings(self, "compare")
        if self.fewer_against is not None and self.bytes_against is not None:
            raise RecipeError(
                "[compare] may have one of fewer_against and bytes_against.",
                f"fewer_against = '{self.fewer_against}', bytes_against = '{self.bytes_against}'",
                "Remove bytes_against: fewer_against compares bytes, too.",
            )

    @property
    def costs_against(self) -> str | None:
        """The line with whose costs, or bytes only, those of the others are compared."""
        return self.fewer_against or self.bytes_against


@dataclass(frozen=True)
class Sweep:
    """A recipe's tables, and the axes along which they change."""

    axes: tuple[Axis, ...]
    tables: dict[str, Any]
    folder: Path  # of the recipe: paths in it are relative to this
    compare: Compare = field(default_factory=Compare)

    def __len__(self) -> int:
        return len(self.runs)

    @cached_property
    def runs(self) -> tuple[tuple[dict[str, str], Recipe], ...]:
        """Every combination: its labels by field, and its recipe."""
        return tuple((labels, make_recipe(tables, self.folder)) for labels, tables, _ in self._combinations)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Which settings are left out where, for the user."""
        found = {(key, tables["protocol"]["name"]): None for _, tables, keys in self._combinations for key in keys}
        return tuple(f"{key} is left out for {name}, which has no such setting" for key, name in found)

    @cached_property
    def _combinations(self) -> list[tuple[dict[str, str], dict[str, Any], list[str]]]:
        """Of each run its labels, its tables, and the settings that were left out; no run twice."""
        combinations = list(itertools.product(*(axis.values for axis in self.axes)))
        all_tables = [self._tables(labels) for labels in combinations]
        known = known_settings(all_tables, self.folder)
        found: dict[tuple[str, ...], tuple[dict[str, str], dict[str, Any], list[str]]] = {}
        for labels, tables in zip(combinations, all_tables, strict=True):
            odd = leave_out(tables, known)
            chosen = {
                axis.key: ABSENT if axis.key in odd else label for axis, label in zip(self.axes, labels, strict=True)
            }
            found.setdefault(tuple(chosen.values()), (chosen, tables, odd))
        return list(found.values())

    def _tables(self, labels: Sequence[str]) -> dict[str, Any]:
        """The recipe's tables with one value of each axis."""
        tables = copy.deepcopy(self.tables)
        for axis, label in zip(self.axes, labels, strict=True):
            value = copy.deepcopy(axis.values[label])
            for key, item in value.items() if axis.key == VARIANTS else ((axis.key, value),):
                _change(tables, key, item)
        return tables

    def words(self, labels: Mapping[str, str]) -> str:
        """A combination as a person reads it."""
        named = {axis.key: axis for axis in self.axes}
        return ", ".join(named[key].words(label) for key, label in labels.items() if label != ABSENT)

    def on_all_values(self, table: pd.DataFrame) -> pd.DataFrame:
        """Figures with those of runs without some field at each of its values."""
        attributes = table.attrs
        spread = on_all_values({axis.key: list(axis.values) for axis in self.axes}, table)
        spread.attrs = attributes
        return spread

    @property
    def test_part(self) -> str:
        """What the figures are measured on: the test set, the validation set, or in some runs the one or the other."""
        common = "own test" if self.compare.own else "common test"
        parts = {"validation" if recipe.data.validation else common for _, recipe in self.runs}
        return " or ".join(sorted(parts))


def lines_of(sweep: Sweep) -> Axis:
    """The axis whose values are compared with one another: the protocols, variants, or else the last axis."""
    return _compared(sweep.axes)


def _compared(axes: Sequence[Axis]) -> Axis:
    found = {axis.key: axis for axis in axes if axis.key != "seed"} or {axis.key: axis for axis in axes}
    return found.get("protocol") or found.get(VARIANTS) or list(found.values())[-1]


def panels_of(sweep: Sweep) -> list[Axis]:
    """All other axes; what is averaged over (the seed) is none."""
    return [axis for axis in sweep.axes if axis.key not in ("seed", lines_of(sweep).key)]


def panels(sweep: Sweep, table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The figures of one combination of all axes but the compared one, with its title."""
    axes = panels_of(sweep)
    for labels in itertools.product(*(axis.values for axis in axes)):
        part = table
        for axis, label in zip(axes, labels, strict=True):
            part = part[part[axis.key] == label]
        yield ", ".join(axis.words(label) for axis, label in zip(axes, labels, strict=True)) or "all", part


def read_sweep(path: Path, overrides: Sequence[str] = (), *, quick: bool = False) -> Sweep:
    """Read a recipe with a table [sweep]; `quick` applies the changes in its table [quick] first."""
    tables = read_tables(path)
    changes = tables.pop("quick", {})
    if quick and not changes:
        raise RecipeError("A quick form needs a table [quick].", f"none in {path}", "Run it without --quick.")
    for key, value in changes.items() if quick else ():
        put(tables, key, value)
    # After the quick form: a person has the last word.
    for note in apply_overrides(tables, overrides, path.resolve().parent):
        print(f"note: {note}", file=sys.stderr)
    axes, compare = tables.pop("sweep", None), tables.pop("compare", {})
    if not isinstance(axes, dict) or not axes:
        raise RecipeError(
            "A sweep needs a table [sweep] of fields and their values.",
            f"none in {path}",
            "Write for example [sweep] and below it \"seed\" = [0, 1, 2]; or use 'codistill run'.",
        )
    made = tuple(_axis(key, values) for key, values in axes.items())
    sweep = Sweep(made, tables, path.resolve().parent, _compare(compare, _compared(made)))
    for _, recipe in sweep.runs:
        topology_of(recipe)  # every recipe is checked before any runs, and so is its graph
    return sweep


def _change(tables: dict[str, Any], key: str, value: Any) -> None:
    """Set a field; a table changes what it names and keeps the rest, such as a protocol's number of rounds."""
    if isinstance(value, dict) and isinstance(tables.get(key), dict):
        value = {**tables[key], **value}
    put(tables, key, value)


def _axis(key: str, values: Any) -> Axis:
    if key == VARIANTS and not (isinstance(values, dict) and all(isinstance(each, dict) for each in values.values())):
        raise RecipeError(
            f"sweep.{VARIANTS} must be a table of named changes of the recipe.",
            f"{values!r}"[:100],
            f'Write [sweep.{VARIANTS}] and below it "8 bit" = {{ compression = {{ bits = 8 }} }}.',
        )
    if isinstance(values, dict) and values:
        return Axis(key, values, named=True)
    if isinstance(values, list) and values:
        labels = _labels(values)
        if len(set(labels)) == len(labels):
            return Axis(key, dict(zip(labels, map(_without_label, values), strict=True)))
    raise RecipeError(
        f"sweep.{key} must be a list of different values, or a table of named ones.",
        f"{values!r}"[:100],
        'Write for example "seed" = [0, 1, 2].',
    )


def _labels(values: list[Any]) -> list[str]:
    """A label for each value. Tables of one name, such as a protocol with several settings, are told apart by these."""
    labels = [str(v.get("label", v.get("name", v))) if isinstance(v, dict) else str(v) for v in values]
    for label in {label for label in labels if labels.count(label) > 1}:
        same = [i for i, each in enumerate(labels) if each == label]
        tables = [values[i] for i in same]
        if all(isinstance(table, dict) and "label" not in table for table in tables):
            said_by_all = [key for key in tables[0] if all(each.get(key) == tables[0][key] for each in tables)]
            for i in same:
                said = [f"{key}={value}" for key, value in values[i].items() if key not in said_by_all]
                labels[i] = ", ".join([label, *said])
    return labels


def _compare(table: Any, compared: Axis) -> Compare:
    if not isinstance(table, dict):
        raise RecipeError(
            "'compare' must be a [compare] table.", f"{table!r}"[:80], "Write [compare] on a line, and its keys below."
        )
    compare: Compare = from_table(Compare, table, "compare")
    for key in ("gain_over", "fewer_against", "bytes_against"):
        label = getattr(compare, key)
        if label is not None and label not in compared.values:
            raise RecipeError(
                f"compare.{key} must be one of the values of sweep.{compared.key}, which are compared.",
                f"'{label}'",
                nearest(label, compared.values),
            )
    return compare


def _without_label(value: Any) -> Any:
    return {key: item for key, item in value.items() if key != "label"} if isinstance(value, dict) else value
