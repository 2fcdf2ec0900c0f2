"""Many runs of one recipe: every combination of some of its fields, as the figures of papers are made."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from codistill.core.errors import RecipeError, nearest
from codistill.core.files import lock, write_atomically, writing
from codistill.core.settings import check_settings, from_table, setting
from codistill.core.text import csv_text, flat
from codistill.experiments.building import topology_of
from codistill.experiments.recipe import Recipe, apply_overrides, make_recipe, protocol_settings, put, read_tables
from codistill.experiments.run import trackers_of
from codistill.experiments.sweep_jobs import Cell, Outcome, check_no_jobs, outcome_of
from codistill.experiments.user_code import is_own
from codistill.results.agents import metric_name, score_text
from codistill.results.records import Row
from codistill.results.scores import as_score

VARIANTS = "variants"  # the axis whose values change several fields at once
ABSENT = "-"  # the label of a field that a run's protocol does not have


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
        value = self.values[label]
        says_field = isinstance(value, dict) and label.partition("=")[0] in value  # as 'bits=8' does
        return label if self.named or says_field else f"{self.name}={label}"

    @property
    def fields(self) -> set[str]:
        """What its values set, by the names of the fields."""
        found: set[str] = set()
        for value in self.values.values():
            for key, item in value.items() if self.key == VARIANTS else ((self.key, value),):
                found |= {".".join(filter(None, (key, name))) for name, _ in flat(item)} if item != {} else set()
        return found


@dataclass(frozen=True, kw_only=True)
class Compare:
    """[compare]: what a sweep's lines are held against."""

    target: float | None = setting(
        None, "accuracy, or highest RMSE, whose price in rounds, exchanges, steps and bytes is told", above=0, at_most=1
    )
    gain_over: str | None = setting(None, "the line over which gains are computed, seed by seed, with a paired t-test")
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

    @cached_property
    def runs(self) -> tuple[tuple[dict[str, str], Recipe], ...]:
        """Every combination: its labels by field, and its recipe."""
        return tuple(
            (labels, make_recipe(_tracked(tables, labels), self.folder)) for labels, tables, _ in self._combinations
        )

    @cached_property
    def notes(self) -> tuple[str, ...]:
        found = {(key, tables["protocol"]["name"]): None for _, tables, keys in self._combinations for key in keys}
        return tuple(f"{key} is left out for {name}, which has no such setting" for key, name in found)

    @cached_property
    def _combinations(self) -> list[tuple[dict[str, str], dict[str, Any], list[str]]]:
        """Of each run its labels, its tables, and the settings that were left out; no run twice.

        Left out of a run is what its protocol does not have but another one of the sweep does. What none of them has
        stays, and is refused as a mistake.
        """
        combinations = list(itertools.product(*(axis.values for axis in self.axes)))
        all_tables = [self._tables(labels) for labels in combinations]
        known: dict[str, set[str]] = {}  # what the [protocol] tables may hold, by name
        for name in filter(None, map(_protocol_name, all_tables)):
            if name not in known:
                known[name] = protocol_settings(str(self.folder / name) if is_own(name) else name)
        known_to_some = set().union(*known.values())
        found: dict[tuple[str, ...], tuple[dict[str, str], dict[str, Any], list[str]]] = {}
        for labels, tables in zip(combinations, all_tables, strict=True):
            odd = []
            if (own := _protocol_name(tables)) is not None:
                foreign = [key for key in tables["protocol"] if key in known_to_some - known[own]]
                tables["protocol"] = {key: item for key, item in tables["protocol"].items() if key not in foreign}
                odd = [f"protocol.{key}" for key in foreign]
            chosen = {
                axis.key: ABSENT if axis.key in odd else label for axis, label in zip(self.axes, labels, strict=True)
            }
            found.setdefault(tuple(chosen.values()), (chosen, tables, odd))
        return list(found.values())

    def _tables(self, labels: Sequence[str]) -> dict[str, Any]:
        tables = copy.deepcopy(self.tables)
        for axis, label in zip(self.axes, labels, strict=True):
            value = copy.deepcopy(axis.values[label])
            for key, item in value.items() if axis.key == VARIANTS else ((axis.key, value),):
                # A table changes what it names and keeps the rest, such as a protocol's number of rounds.
                if isinstance(item, dict) and isinstance(tables.get(key), dict):
                    item = {**tables[key], **item}
                put(tables, key, item)
        return tables

    def words(self, labels: Mapping[str, str]) -> str:
        named = {axis.key: axis for axis in self.axes}
        return ", ".join(named[key].words(label) for key, label in labels.items() if label != ABSENT)

    @cached_property
    def lines(self) -> Axis:
        """The axis whose values are compared with one another: the protocols, variants, or else the last axis."""
        found = {axis.key: axis for axis in self.axes if axis.key != "seed"} or {axis.key: axis for axis in self.axes}
        return found.get("protocol") or found.get(VARIANTS) or list(found.values())[-1]

    @cached_property
    def panels(self) -> list[Axis]:
        """All other axes; what is averaged over (the seed) is none."""
        return [axis for axis in self.axes if axis.key not in ("seed", self.lines.key)]

    @property
    def shown_keys(self) -> list[str]:
        """The fields that distinguish results; not the seed, over which they are averaged."""
        return [axis.key for axis in (*self.panels, self.lines)]

    def parts(self, table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
        """The figures of one combination of all axes but the compared one, with its title."""
        for chosen, part in self.parts_by_labels(table):
            yield self.title(chosen), part

    def parts_by_labels(self, table: pd.DataFrame) -> Iterator[tuple[dict[str, str], pd.DataFrame]]:
        """The same, with its labels by field."""
        for labels in itertools.product(*(axis.values for axis in self.panels)):
            part, chosen = table, dict(zip((axis.key for axis in self.panels), labels, strict=True))
            for key, label in chosen.items():
                part = part[part[key] == label]
            yield chosen, part

    def title(self, chosen: Mapping[str, str]) -> str:
        return self.words(chosen) or "all"

    def on_all_values(self, table: pd.DataFrame) -> pd.DataFrame:
        """Figures with those of runs without some field once at each of its values: they are compared with all."""
        attributes = table.attrs
        for axis in self.axes:
            if axis.key in table and (absent := table[axis.key].eq(ABSENT)).any():
                copies = [table[absent].assign(**{axis.key: label}) for label in axis.values]
                table = pd.concat([table[~absent], *copies], ignore_index=True)
        table.attrs = attributes
        return table

    @property
    def test_part(self) -> str:
        """What the figures are measured on: the test set, the validation set, or in some runs the one or the other."""
        common = "own test" if self.compare.own else "common test"
        parts = {"validation" if recipe.data.validation else common for _, recipe in self.runs}
        return " or ".join(sorted(parts))


def _tracked(tables: dict[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """The tables of a run, which its tracker shows by its values: also where they are labels of whole tables."""
    table = tables.get("track")
    if not isinstance(table, dict):
        return tables
    if "name" in table:
        raise RecipeError(
            "The runs of a sweep are named by their values.", f"track.name = {table['name']!r}"[:80], "Remove it."
        )
    own = table.get("params", {})
    values = {key: label for key, label in labels.items() if label != ABSENT}
    params = {**values, **own} if isinstance(own, dict) else own
    return {**tables, "track": {**table, "name": slug(labels), "params": params}}


def _protocol_name(tables: Mapping[str, Any]) -> str | None:
    protocol = tables.get("protocol")
    name = protocol.get("name") if isinstance(protocol, dict) else None
    return name if isinstance(name, str) else None


def read_sweep(path: Path, overrides: Sequence[str] = (), *, quick: bool = False) -> Sweep:
    """Read a recipe with a table [sweep]; `quick` applies the changes in its table [quick] first."""
    tables = read_tables(path)
    changes = tables.pop("quick", {})
    if quick and not changes:
        raise RecipeError("A quick form needs a table [quick].", f"none in {path}", "Run it without --quick.")
    for key, value in changes.items() if quick else ():
        put(tables, key, value)
    apply_overrides(tables, overrides, path.resolve().parent)  # after the quick form: a person has the last word
    axes, compare = tables.pop("sweep", None), tables.pop("compare", {})
    if not isinstance(axes, dict) or not axes:
        raise RecipeError(
            "A sweep needs a table [sweep] of fields and their values.",
            f"none in {path}",
            "Write for example [sweep] and below it \"seed\" = [0, 1, 2]; or use 'codistill run'.",
        )
    if isinstance(tables.get("track"), dict):
        tables["track"] = {"experiment": path.stem, **tables["track"]}
    made = tuple(as_axis(key, values, _protocol_name(tables)) for key, values in axes.items())
    _check_apart(made)
    sweep = Sweep(made, tables, path.resolve().parent)
    sweep = replace(sweep, compare=_compare(compare, sweep.lines))
    for _, recipe in sweep.runs:
        topology_of(recipe)  # every recipe is checked before any runs, and so is its graph
    return sweep


def as_axis(key: str, values: Any, protocol: str | None = None, table: str = "sweep") -> Axis:
    """The values of a field in [sweep], or another table of a recipe, each with a label.

    `protocol`: the name in [protocol], which a table without a name keeps.
    """
    if key == VARIANTS and not (isinstance(values, dict) and all(isinstance(each, dict) for each in values.values())):
        raise RecipeError(
            f"sweep.{VARIANTS} must be a table of named changes of the recipe.",
            f"{values!r}"[:100],
            f'Write [sweep.{VARIANTS}] and below it "8 bit" = {{ compression = {{ bits = 8 }} }}.',
        )
    if isinstance(values, dict) and values:
        return Axis(key, values, named=True)
    if isinstance(values, list) and values:
        if key == "protocol":  # a name alone is a table with it
            values = [{"name": each} if isinstance(each, str) else each for each in values]
        labels = _labels(values, (protocol or "") if key == "protocol" else "")
        if len(set(labels)) == len(labels):
            plain = [
                {k: v for k, v in each.items() if k != "label"} if isinstance(each, dict) else each for each in values
            ]
            return Axis(key, dict(zip(labels, plain, strict=True)))
    raise RecipeError(
        f"{table}.{key} must be a list of different values{', or a table of named ones' if table == 'sweep' else ''}.",
        f"{values!r}"[:100],
        'Write for example "seed" = [0, 1, 2].',
    )


def _labels(values: list[Any], usual: str) -> list[str]:
    """A label for each value. Tables of one name, such as a protocol with several settings, are told apart by these.

    `usual`: the name of tables without one.
    """
    labels = [
        str(v.get("label", v.get("name", v.get("kind", usual)))) if isinstance(v, dict) else str(v) for v in values
    ]
    for label in dict.fromkeys(labels):
        same = [i for i, each in enumerate(labels) if each == label]
        tables = [values[i] for i in same]
        if (label and len(same) == 1) or not all(isinstance(table, dict) and "label" not in table for table in tables):
            continue
        settings = [{key: value for key, value in flat(table) if key not in ("name", "kind")} for table in tables]
        said_by_all = [] if len(same) == 1 else settings[0].items()
        shared = [key for key, value in said_by_all if all(key in each and each[key] == value for each in settings)]
        for i, table in zip(same, settings, strict=True):
            said = [f"{key}={value}" for key, value in table.items() if key not in shared]
            labels[i] = ", ".join(filter(None, [label, *said])) or str(values[i])
    return labels


def _check_apart(axes: Sequence[Axis]) -> None:
    """Two axes must not set the same field: the later one would win, and labels of the other would be wrong."""
    for one, other in itertools.combinations(axes, 2):
        for name, again in itertools.product(sorted(one.fields), sorted(other.fields)):
            if f"{name}.".startswith(f"{again}.") or f"{again}.".startswith(f"{name}."):
                raise RecipeError(
                    "Each field of a sweep must be set in one place.",
                    f"{name} by sweep.{one.key} and by sweep.{other.key}",
                    "Remove it from one of them, or write every combination in one list.",
                )


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


# --- The runs of a sweep and their table: what is done is not run again, what is impossible is reported.

TABLE = "sweep.csv"

RunCells = Callable[[Sequence[Cell]], Iterable[tuple[Cell, Outcome]]]


def execute_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    data_dir: str | None = None,
    tell: Callable[[str], None] = print,
    run: RunCells | None = None,
) -> pd.DataFrame | None:
    """Run what is not done yet; returns a row per run, round and agent, or None if it was interrupted.

    Impossible combinations are reported and skipped. `run` has the runs done, in any order; by default they are done
    here, one after the other.
    """
    for note in sweep.notes:
        tell(f"note: {note}")
    trackers_of(sweep.runs[0][1])  # which must be installed
    cells = [Cell(labels, sweep.words(labels), recipe, folder / slug(labels)) for labels, recipe in sweep.runs]
    places: dict[Path, Cell] = {}
    for cell in cells:
        if cell.recipe.spec.runtime == "ray":
            raise RecipeError(
                "Each run of a sweep is computed on one machine.",
                "runtime.kind = 'ray'",
                "Use the runtime 'processes', or start each run by itself.",
            )
        other = places.setdefault(cell.place, cell)
        if other is not cell:
            raise RecipeError(
                "The runs of a sweep must have folders of their own.",
                f"'{cell.place.name}' for both {other.words} and {cell.words}",
                "Name the values by labels that differ in their letters or digits.",
            )
    found: dict[Path, list[Row]] = {}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with writing(folder, "Wait for the sweep that uses it to end, or choose another --out."):
        handle = lock(folder)
    with closing(handle):
        if run is None:
            check_no_jobs(folder, [cell.place.name for cell in cells])
        here = ((cell, outcome_of(cell.recipe, cell.place, data_dir)) for cell in cells)
        for ended, (cell, outcome) in enumerate(here if run is None else run(cells), 1):
            if outcome is None:
                return None
            said = outcome if isinstance(outcome, str) else _score_words(sweep, cell, outcome)
            tell(f"[{ended}/{len(cells)}] {cell.words}: {said}")
            if not isinstance(outcome, str):
                found[cell.place] = outcome
        if not found:
            raise RecipeError("A sweep must hold at least one possible run.", "none", "See what was said above.")
        frame = pd.concat([_frame(cell, found[cell.place]) for cell in cells if cell.place in found], ignore_index=True)
        write_atomically(folder / TABLE, csv_text(frame).encode())
    return frame


def _score_words(sweep: Sweep, cell: Cell, rows: list[Row]) -> str:
    recipe = cell.recipe
    honest = [row for row in rows if row["round"] == recipe.spec.rounds and not row.get("lies")]
    metric = as_score(recipe.scores[0] if recipe.scores else "accuracy").name
    key, where = (f"own_{metric}", " on own data") if sweep.compare.own else (metric, "")
    last = [row[key] for row in honest if key in row]
    said = f"{metric_name(metric)} {score_text(metric, sum(last) / len(last))}{where}" if last else "done"
    return said + (f" (of the {len(honest)} honest agents)" if any(row.get("lies") for row in rows) else "")


def _frame(cell: Cell, rows: list[Row]) -> pd.DataFrame:
    # With a hub, all that agents receive is from it; between peers every message is in somebody's `sent`.
    frame = pd.DataFrame([{**cell.labels, **row} for row in rows])
    return frame.assign(from_hub=frame["received"]) if topology_of(cell.recipe).hub else frame


def slug(labels: Mapping[str, str]) -> str:
    return "_".join(re.sub(r"[^\w.+-]+", "", label) for label in labels.values()).lstrip(".") or "run"
