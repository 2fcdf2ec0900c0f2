"""The tables of a sweep for the terminal: scores per round, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from rich.markup import escape
from rich.table import Table

from codistill.experiments.sweep import Axis, Sweep, lines_of, panels
from codistill.results.metric_text import metric_name
from codistill.text import bytes_text

_MOST_ROUNDS = 7  # columns of a table
_SPREAD_NOTE = "±: sample standard deviation over n seeds"
_BYTES_NOTE = "bytes: sent by all agents and the hub in all rounds, each message counted once"

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
        yield _table(title, compared, heads, cells, _notes(table))


def cost_tables(sweep: Sweep, table: pd.DataFrame, *, percent: bool) -> Iterator[Table]:
    """One table per panel: a row per line, with what its score cost."""
    compared, columns = lines_of(sweep), _cost_columns(sweep, percent, table.attrs["metric"])
    caption = "; ".join(filter(None, (_BYTES_NOTE, _notes(table))))
    if _is_repeated(table):
        columns = {"n": lambda row: str(row["seeds"]), **columns}
    for title, part in panels(sweep, table):
        rows = {row[compared.key]: row for row in part.to_dict("records")}
        cells = {label: [cell(rows[label]) for cell in columns.values()] for label in compared.values if label in rows}
        yield _table(f"{title}: costs", compared, list(columns), cells, caption)


def _is_repeated(table: pd.DataFrame) -> bool:
    """Whether some figures are means over several seeds."""
    return bool((table["seeds"] > 1).any())


def _notes(table: pd.DataFrame) -> str:
    return "; ".join(filter(None, (_SPREAD_NOTE if _is_repeated(table) else "", honest_note(table))))


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
    columns["bytes"] = lambda row: bytes_text(row["bytes"])
    if compare.bytes_against is not None:
        columns["fewer bytes"] = lambda row: _factor(row["fewer_bytes"])
    if compare.target is not None:
        target = target_text(compare.target, percent=percent)
        columns[f"bytes\nto {target}"] = _bytes_to_target
        columns[f"rounds\nto {target}"] = lambda row: (
            f"{round(row['round_of_target'], 1):g}" if row["seeds_at_target"] else "-"
        )
        if compare.bytes_against is not None:
            columns[f"fewer bytes\nto {target}"] = lambda row: _factor(row["fewer_bytes_to_target"])
    return columns


def _bytes_to_target(row: Any) -> str:
    if not row["seeds_at_target"]:
        return "not reached"
    some = f"{row['seeds_at_target']} of {row['seeds']} seeds: " if row["seeds_at_target"] < row["seeds"] else ""
    return some + bytes_text(row["bytes_to_target"])


def _factor(factor: float) -> str:
    if np.isnan(factor):
        return "-"
    return f"{factor:,.0f} x" if factor >= 10 else f"{factor:.2g} x"
