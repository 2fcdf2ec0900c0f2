"""The tables of a sweep for the terminal: scores per round, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
from rich.markup import escape
from rich.table import Table

from codistill.experiments.sweep import Axis, Sweep, lines_of, panels
from codistill.experiments.sweep_costs import COSTS, compared_costs
from codistill.results.metric_text import metric_name
from codistill.text import bytes_text

_MOST_ROUNDS = 7  # columns of a table
_SPREAD_NOTE = "±: sample standard deviation over n seeds"
_OWN_NOTE = "scores on each agent's own test data"
_PRESENT_NOTE = "scores of the agents that took part in the round"
_THESE_NOTE = "±: sample standard deviation over these seeds"
_BYTES_NOTE = "bytes: sent by all agents and the hub in all rounds, each message counted once"
_COUNTS_NOTE = "exchanges and gradient steps: sums over rounds of the mean of the agents that took part"
_TARGET_NOTE = "of the seeds that reach it, up to the first evaluated round in which the mean of the agents does"
_FACTOR_NOTE = "how many times fewer: means of the factors of each seed in which both reach it"

Cell = Callable[[Any], str]  # the text of one column, from a row of costs


def score_tables(sweep: Sweep, table: pd.DataFrame, *, percent: bool) -> Iterator[Table]:
    """One table per panel: a row per line, a column per round; means, and the spread over seeds."""
    compared = lines_of(sweep)
    for title, part in panels(sweep, table):
        rounds = sorted(part["round"].unique())
        places = np.unique(np.linspace(0, len(rounds) - 1, _MOST_ROUNDS).round().astype(int))
        shown = [rounds[i] for i in places] if rounds else []  # empty where all agents are Byzantine
        cells: dict[str, list[str]] = {}
        repeated = _is_repeated(table)
        for label in compared.values:
            mine = part[part[compared.key] == label].set_index("round")
            if len(mine):
                seeds = [str(int(mine["seeds"].max()))] if repeated else []
                cells[label] = [*seeds, *(_score_cell(mine, t, percent) for t in shown)]
        heads = [*(["n"] if repeated else []), *(f"round {t}" for t in shown)]
        yield _table(title, compared, heads, cells, _notes(sweep, table))


def cost_tables(sweep: Sweep, table: pd.DataFrame, *, percent: bool) -> Iterator[Table]:
    """For each panel a table of what scores cost, of the costs up to the target, and of factors between lines."""
    compared, compare = lines_of(sweep), sweep.compare
    kinds = [("costs", _cost_columns(sweep, percent, table.attrs["metric"]), f"{_COUNTS_NOTE}; {_BYTES_NOTE}")]
    if compare.target is not None:
        target = target_text(compare.target, percent=percent)
        kinds.append((f"costs to reach {target}", _target_columns(), _TARGET_NOTE))
        if compare.costs_against is not None:
            title = f"fewer than {compare.costs_against} to reach {target}"
            kinds.append((title, _factor_columns(sweep), _FACTOR_NOTE))
    for title, part in panels(sweep, table):
        rows = {row[compared.key]: row for row in part.to_dict("records")}
        for number, (kind, columns, note) in enumerate(kinds):
            if _is_repeated(table) and not number:
                columns = {"n": lambda row: str(row["seeds"]), **columns}
            cells = {line: [cell(rows[line]) for cell in columns.values()] for line in compared.values if line in rows}
            notes = note, _notes(sweep, table, _THESE_NOTE if number else _SPREAD_NOTE)
            yield _table(f"{title}: {kind}", compared, list(columns), cells, "; ".join(filter(None, notes)))


def _is_repeated(table: pd.DataFrame) -> bool:
    """Whether some figures are means over several seeds."""
    return bool((table["seeds"] > 1).any())


def _notes(sweep: Sweep, table: pd.DataFrame, spread: str = _SPREAD_NOTE) -> str:
    compare = sweep.compare
    own, present = _OWN_NOTE if compare.own else "", _PRESENT_NOTE if compare.present else ""
    return "; ".join(filter(None, (own, present, spread if _is_repeated(table) else "", honest_note(table))))


def honest_note(table: pd.DataFrame) -> str:
    """What means are of, where Byzantine agents are left out."""
    return "means of the honest agents" if table.attrs.get("honest") else ""


def target_text(target: float, *, percent: bool) -> str:
    """0.958 -> '95.8 %'; an error as it is."""
    return f"{100 * target:g} %" if percent else f"{target:g}"


def _table(
    title: str, compared: Axis, headings: Sequence[str], cells: Mapping[str, Sequence[str]], caption: str
) -> Table:
    table = Table(title=escape(title), title_justify="left", caption=caption or None, caption_justify="left")
    table.add_column(compared.name)
    for heading in headings:
        table.add_column(escape(heading), justify="right")
    for label, row in cells.items():
        table.add_row(escape(label), *row)
    return table


def _score_cell(mine: pd.DataFrame, t: int, percent: bool) -> str:
    if t not in mine.index:
        return ""
    row: Any = mine.loc[t]
    return _score_text(row["mean"], row["spread"] if row["seeds"] > 1 else None, percent=percent)


def _score_text(
    mean: float, spread: float | None = None, *, percent: bool, digits: int = 1, sign: Literal["", "+"] = ""
) -> str:
    """0.956, 0.002 -> '95.6 ± 0.2'; an error as it is."""
    if np.isnan(mean):
        return "-"
    scale, digits = (100, digits) if percent else (1, 4)
    return f"{scale * mean:{sign}.{digits}f}" + ("" if spread is None else f" ± {scale * spread:.{digits}f}")


def _cost_columns(sweep: Sweep, percent: bool, metric: str) -> dict[str, Cell]:
    """The columns by their headings."""
    compare, line = sweep.compare, lines_of(sweep).key

    def over_seeds(row: Any, name: str, digits: int = 1, sign: Literal["", "+"] = "") -> str:
        spread = row[f"{name}_spread"] if row["seeds"] > 1 else None
        return _score_text(row[name], spread, percent=percent, digits=digits, sign=sign)

    columns: dict[str, Cell] = {metric_name(metric): lambda row: over_seeds(row, metric)}
    if compare.gain_over is not None:
        columns[f"gain over\n{compare.gain_over}"] = lambda row: (
            "-" if row[line] == compare.gain_over else over_seeds(row, "gain", digits=2, sign="+")
        )
    columns["worst agent"] = lambda row: _score_text(row["worst_agent"], percent=percent)
    for name in ("exchanges", "steps"):
        columns[name] = lambda row, name=name: _count_text(row[name])  # type: ignore[misc]
    columns["bytes"] = lambda row: bytes_text(row["bytes"])
    if compare.costs_against is not None:
        columns["fewer bytes"] = lambda row: _factor(row["fewer_bytes"])
    return columns


def _target_columns() -> dict[str, Cell]:
    """Each cost up to the target, of the seeds that reach it."""

    def cell(row: Any, name: str, text: Callable[[float], str]) -> str:
        return _spread_text(row[f"{name}_to_target"], row[f"{name}_to_target_spread"], text)

    columns: dict[str, Cell] = {"seeds": lambda row: f"{row['seeds_at_target']} of {row['seeds']}"}
    for name in COSTS:
        columns[name] = partial(cell, name=name, text=bytes_text if name == "bytes" else _count_text)
    return columns


def _factor_columns(sweep: Sweep) -> dict[str, Cell]:
    """The factors of each seed in which both lines reach the target."""

    def cell(row: Any, name: str) -> str:
        shown = _spread_text(row[f"fewer_{name}"], row[f"fewer_{name}_spread"], _factor)
        return shown.replace(" x ±", " ±")

    columns: dict[str, Cell] = {"seeds": lambda row: f"{row['seeds_compared']} of {row['seeds']}"}
    for name in compared_costs(sweep.compare):
        if name.endswith("_to_target"):
            columns[f"fewer\n{name.removesuffix('_to_target')}"] = partial(cell, name=name)
    return columns


def _spread_text(mean: float, spread: float, text: Callable[[float], str]) -> str:
    """A mean and, of several seeds, its spread."""
    if np.isnan(mean):
        return "-"
    return text(mean) if np.isnan(spread) else f"{text(mean)} ± {text(spread)}"


def _count_text(count: float) -> str:
    """2.5 -> '2.5', 1234.5 -> '1,234'."""
    if np.isnan(count):
        return "-"
    return f"{count:,.0f}" if count >= 100 else f"{round(count, 1):g}"


def _factor(factor: float) -> str:
    if np.isnan(factor):
        return "-"
    return f"{factor:,.0f} x" if factor >= 10 else f"{factor:.2g} x"
