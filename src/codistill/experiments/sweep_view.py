"""The results of a sweep: tables on the terminal, and tables and pictures in its folder."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter
from rich.console import Console

from codistill.core.files import write_atomically
from codistill.core.text import bytes_text, csv_text
from codistill.experiments.sweep import TABLE, Sweep
from codistill.experiments.sweep_results import (
    COSTS,
    along_costs,
    compared_costs,
    costs,
    features_grid,
    has_costs,
    means,
    measured,
    metric_of,
    metrics_of,
    on_compared_data,
    outputs_grid,
    scores_by_seed,
)
from codistill.report.maps import draw_feature_grid, draw_grid
from codistill.report.style import BLUE, COLOURS, INK, MOST_MARKERS, MUTED, STYLE, tick_text
from codistill.results.agents import in_percent, metric_name
from codistill.results.scores import as_score
from codistill.results.seeds import is_worth_a_table, seeds_table
from codistill.results.tables import Table


def show_sweep(sweep: Sweep, frame: pd.DataFrame, folder: Path, console: Console) -> dict[str, Path]:
    """Print all tables, and write them and the pictures to the sweep's folder; returns what is where.

    Tables are also written as LaTeX, and pictures as PDF, beside them.
    """
    compared = sweep.on_all_values(on_compared_data(sweep, frame))
    table = means(sweep, compared)
    tex, measures = (folder / TABLE).with_suffix(".tex"), folder / "measures.png"
    _show(list(score_tables(sweep, table)), tex, console)
    written = {"table": folder / TABLE, "LaTeX": tex, "picture": folder / "sweep.png"}
    written |= show_seeds(sweep, compared, table, folder, console)
    written |= show_costs(sweep, compared, folder, console)
    draw_scores(sweep, table, written["picture"])
    if draw_measures(sweep, sweep.on_all_values(measured(sweep, frame, folder)), measures):
        written["protocol measures"] = measures
    if grid := outputs_grid(sweep, folder):
        written["average outputs"] = save_figure(draw_grid(grid), folder / "outputs.png")
    if maps := features_grid(sweep, folder):
        written["feature space"] = save_figure(draw_feature_grid(maps), folder / "features.png")
    return written


def show_seeds(
    sweep: Sweep, frame: pd.DataFrame, table: pd.DataFrame, folder: Path, console: Console
) -> dict[str, Path]:
    """Print every score at the end, over seeds, a table per panel, and write them; returns what is where.

    `table`: the means of all rounds.
    """
    parts, scores = scores_by_seed(sweep, frame), [as_score(name) for name in metrics_of(frame)]
    over = sweep.compare.gain_over if sweep.lines.key != "seed" else None
    if not is_worth_a_table([line for _, lines in parts for line in lines], scores, over):
        return {}
    what, notes, path = sweep.lines.name, _note(sweep, table, spread=""), folder / "scores.csv"
    tables = [
        seeds_table([({}, lines)], scores, over, what=what, title=f"{sweep.title(labels)}: after the run", notes=notes)
        for labels, lines in parts
        if lines
    ]
    _show(tables, path.with_suffix(".tex"), console)
    write_atomically(path, seeds_table(parts, scores, over, what=what).csv().encode())
    return {"scores": path}


def show_costs(sweep: Sweep, frame: pd.DataFrame, folder: Path, console: Console) -> dict[str, Path]:
    """Print the tables of costs, and write them and the picture to the sweep's folder; returns what is where."""
    if not has_costs(sweep, frame):
        return {}
    table, path, picture = costs(sweep, frame), folder / "costs.csv", folder / "costs.png"
    _show(list(cost_tables(sweep, table)), path.with_suffix(".tex"), console)
    write_atomically(path, csv_text(table).encode())
    if not frame["sent"].any():
        return {"costs": path}
    draw_costs(sweep, along_costs(sweep, frame), picture)
    return {"costs": path, f"{metric_name(metric_of(frame))} against costs": picture}


def _show(tables: Sequence[Table], path: Path, console: Console) -> None:
    for table in tables:
        console.print(table)
    write_atomically(path, "\n".join(table.latex() for table in tables).encode())


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


def score_tables(sweep: Sweep, table: pd.DataFrame) -> Iterator[Table]:
    """One table per panel: a row per line, a column per round; means, and the spread over seeds."""
    compared, repeated, note = sweep.lines, _is_repeated(table), _note(sweep, table)
    metric = table.attrs["metric"]
    for title, part in sweep.parts(table):
        rounds = sorted(part["round"].unique())
        places = np.unique(np.linspace(0, len(rounds) - 1, _MOST_ROUNDS).round().astype(int))
        shown = [rounds[i] for i in places] if rounds else []  # empty where all agents are Byzantine
        rows = []
        for label in compared.values:
            mine = part[part[compared.key] == label]
            texts = {
                row["round"]: _score_text(metric, row["mean"], row["spread"] if row["seeds"] > 1 else None)
                for row in mine.to_dict("records")
            }
            if texts:
                seeds = [str(int(mine["seeds"].max()))] if repeated else []
                rows.append([label, *seeds, *(texts.get(t, "") for t in shown)])
        headings = [compared.name, *(["n"] if repeated else []), *(f"round {t}" for t in shown)]
        yield Table(headings, "l" + "r" * (len(headings) - 1), rows, title=title, notes=note)


def cost_tables(sweep: Sweep, table: pd.DataFrame) -> Iterator[Table]:
    """For each panel a table of what scores cost, of the costs up to the target, and of factors between lines."""
    compared, compare = sweep.lines, sweep.compare
    kinds = [("costs", _cost_columns(sweep, table.attrs["metric"]), f"{_COUNTS_NOTE}; {_BYTES_NOTE}")]
    if compare.target is not None:
        target = target_text(compare.target, table)
        columns = {"seeds": _of_seeds("seeds_at_target")}
        for name in COSTS:
            columns[name] = _with_spread(f"{name}_to_target", bytes_text if name == "bytes" else _count_text)
        kinds.append((f"costs to reach {target}", columns, _TARGET_NOTE))
        if compare.costs_against is not None:
            factors = {"seeds": _of_seeds("seeds_compared")}
            for name in compared_costs(compare):
                if name.endswith("_to_target"):
                    factors[f"fewer\n{name.removesuffix('_to_target')}"] = _with_spread(f"fewer_{name}", _factor)
            kinds.append((f"fewer than {compare.costs_against} to reach {target}", factors, _FACTOR_NOTE))
    for title, part in sweep.parts(table):
        found = {row[compared.key]: row for row in part.to_dict("records")}
        for number, (kind, columns, note) in enumerate(kinds):
            if _is_repeated(table) and not number:
                columns = {"n": lambda row: str(row["seeds"]), **columns}
            rows = [
                [line, *(cell(found[line]) for cell in columns.values())] for line in compared.values if line in found
            ]
            notes = _note(sweep, table, note, spread=_THESE_NOTE if number else _SPREAD_NOTE)
            align = "l" + "r" * len(columns)
            yield Table([compared.name, *columns], align, rows, title=f"{title}: {kind}", notes=notes)


def _is_repeated(table: pd.DataFrame) -> bool:
    return bool((table["seeds"] > 1).any())


def _note(sweep: Sweep, table: pd.DataFrame, first: str = "", *, spread: str = _SPREAD_NOTE) -> list[str]:
    """How to read a table, in one line; empty if there is nothing to say."""
    own, present = _OWN_NOTE if sweep.compare.own else "", _PRESENT_NOTE if sweep.compare.present else ""
    parts = (first, own, present, spread if _is_repeated(table) else "", honest_note(table))
    return ["; ".join(filter(None, parts))] if any(parts) else []


def honest_note(table: pd.DataFrame) -> str:
    """What means are of, where Byzantine agents are left out."""
    return "means of the honest agents" if table.attrs.get("honest") else ""


def target_text(target: float, table: pd.DataFrame) -> str:
    """0.958 -> '95.8 %'; an error as it is."""
    return f"{100 * target:g} %" if in_percent(table.attrs["metric"]) else f"{target:g}"


def _score_text(
    metric: str, mean: float, spread: float | None = None, *, digits: int = 1, sign: Literal["", "+"] = ""
) -> str:
    """0.956, 0.002 -> '95.6 ± 0.2'; an error as it is."""
    if np.isnan(mean):
        return "-"
    scale, digits = (100, digits) if in_percent(metric) else (1, 4)
    return f"{scale * mean:{sign}.{digits}f}" + ("" if spread is None else f" ± {scale * spread:.{digits}f}")


def _cost_columns(sweep: Sweep, metric: str) -> dict[str, Cell]:
    compare, line = sweep.compare, sweep.lines.key

    def over_seeds(row: Any, name: str, digits: int = 1, sign: Literal["", "+"] = "") -> str:
        spread = row[f"{name}_spread"] if row["seeds"] > 1 else None
        return _score_text(metric, row[name], spread, digits=digits, sign=sign)

    columns: dict[str, Cell] = {metric_name(metric): lambda row: over_seeds(row, metric)}
    if compare.gain_over is not None:
        columns[f"gain over\n{compare.gain_over}"] = lambda row: (
            "-" if row[line] == compare.gain_over else over_seeds(row, "gain", digits=2, sign="+")
        )
    columns["worst agent"] = lambda row: _score_text(metric, row["worst_agent"])
    for name in ("exchanges", "steps"):
        columns[name] = lambda row, name=name: _count_text(row[name])  # type: ignore[misc]
    columns["bytes"] = lambda row: bytes_text(row["bytes"])
    if compare.costs_against is not None:
        columns["fewer bytes"] = lambda row: _factor(row["fewer_bytes"])
    return columns


def _of_seeds(name: str) -> Cell:
    return lambda row: f"{row[name]} of {row['seeds']}"


def _with_spread(name: str, text: Callable[[float], str]) -> Cell:
    """A mean and, of several seeds, its spread; the unit of a factor is said once."""

    def cell(row: Any) -> str:
        mean, spread = row[name], row[f"{name}_spread"]
        if np.isnan(mean):
            return "-"
        return text(mean) if np.isnan(spread) else f"{text(mean)} ± {text(spread)}".replace(" x ±", " ±")

    return cell


def _count_text(count: float) -> str:
    """2.5 -> '2.5', 1234.5 -> '1,234'."""
    if np.isnan(count):
        return "-"
    return f"{count:,.0f}" if count >= 100 else f"{round(count, 1):g}"


def _factor(factor: float) -> str:
    if np.isnan(factor):
        return "-"
    return f"{factor:,.0f} x" if factor >= 10 else f"{factor:.2g} x"


# The pictures: panels of lines with one legend. A panel is a title and, for each line by its label, a frame with the
# columns `round` and `mean`, and where they are known `spread` (over seeds) and the costs so far.

Lines = Mapping[str, pd.DataFrame]  # label -> rows of one line
Panel = tuple[str, Lines]  # title, lines

_LOG_FROM = 100  # ratio of the largest to the smallest value of a measure
_COST_LABELS = {
    "rounds": "rounds",
    "exchanges": "exchanges so far, per agent",
    "steps": "gradient steps so far, per agent",
    "bytes": "bytes sent so far, all together",
}
_WIDEST = 38  # letters beside an axis
_DOTS_PER_INCH = 110


def draw_scores(sweep: Sweep, table: pd.DataFrame, path: Path) -> None:
    """Score per round; lines are means over agents and seeds, bands the spread over seeds."""

    def dress(axes: Axes) -> None:
        _rounds_below(axes)
        _score_axis(axes, sweep, table)

    drawn = [(title, lines, "round", dress) for title, lines in _panels(sweep, table)]
    _draw_panels(sweep, table, drawn, path)


def draw_costs(sweep: Sweep, table: pd.DataFrame, path: Path) -> None:
    """Score against each cost: a row for each panel, a column for each cost.

    A line without some cost (nothing sent, no steps) is drawn dashed at its last score, a target dotted.
    """
    target = sweep.compare.target
    spent = {}  # all values of a cost that can be drawn; where nobody was evaluated there is one empty column
    for name in COSTS:
        values = table.loc[table[name] > 0, name]
        if len(values) or name == "rounds":
            spent[name] = values

    def dress(axes: Axes, cost: str) -> None:
        if target is not None:
            label = f"target: {target_text(target, table)}"
            axes.axhline(target, color=MUTED, linestyle="dotted", linewidth=1.2, label=label)
        axes.set_xlabel(_COST_LABELS[cost])
        _cost_axis(axes, spent[cost], is_bytes=cost == "bytes")
        _score_axis(axes, sweep, table)

    drawn = [
        (title if cost == "rounds" else "", lines, cost, partial(dress, cost=cost))  # the title once in a row
        for title, lines in _panels(sweep, table)
        for cost in spent
    ]
    _draw_panels(sweep, table, drawn, path, columns=len(spent), sharex="col")


def draw_measures(sweep: Sweep, table: pd.DataFrame, path: Path) -> bool:
    """What the protocols measured, per round; returns whether there was anything to draw."""
    if table.empty:
        return False

    def dress(axes: Axes, name: str, logarithmic: bool) -> None:
        axes.set_ylabel("\n".join(textwrap.wrap(name, _WIDEST)), fontsize=9)
        _rounds_below(axes)
        if logarithmic:
            axes.set_yscale("log")

    drawn = []
    for name, part in table.groupby("measure", sort=False):
        low, high = part["mean"].min(), part["mean"].max()
        fixed = partial(dress, name=str(name), logarithmic=bool(low > 0 and high > _LOG_FROM * low))
        drawn += [(title, lines, "round", fixed) for title, lines in _panels(sweep, part)]
    _draw_panels(sweep, table, drawn, path, sharey="row")
    return True


def _panels(sweep: Sweep, table: pd.DataFrame) -> list[Panel]:
    return [
        (title, {sweep.lines.words(str(label)): rows for label, rows in part.groupby(sweep.lines.key, sort=False)})
        for title, part in sweep.parts(table)
    ]


def _draw_panels(
    sweep: Sweep,
    table: pd.DataFrame,
    drawn: Sequence[tuple[str, Lines, str, Callable[[Axes], None]]],
    path: Path,
    *,
    columns: int | None = None,
    sharex: Literal["all", "col"] = "all",
    sharey: Literal["all", "row"] = "all",
) -> None:
    """Panels with one legend: of each the title, the lines, the column below, and what else belongs to its axes.

    `columns`: panels side by side; None: one per value of the last panel axis.
    """
    if columns is None:
        columns = len(sweep.panels[-1].values) if sweep.panels else 1
    rows = -(-len(drawn) // columns)
    labels = [sweep.lines.words(label) for label in sweep.lines.values]  # in the order of their colours
    with matplotlib.rc_context(STYLE):
        # The legend stands at the right: panels keep their width however long its words are.
        legend = 0.7 + 0.085 * max(map(len, labels))
        width = 4.6 if columns == 1 else 3.4
        figure = Figure(figsize=(width * columns + legend, 2.9 * rows + 0.5), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
        handles: dict[Any, Any] = {}
        for axes, (title, lines, x, dress) in zip(grid.flat, drawn, strict=True):
            _draw_lines(axes, lines, labels, x)
            axes.set_title(title)
            dress(axes)
            axes.label_outer()
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(list(handles.values()), list(handles), loc="outside right upper")
        if note := honest_note(table):
            figure.supxlabel(note, fontsize=9)
    save_figure(figure, path)


def _draw_lines(axes: Axes, lines: Lines, labels: Sequence[str], x: str) -> None:
    """A line of means for each label, with the spread as a band; one without values along `x` is drawn dashed."""
    colours = (BLUE, *COLOURS, INK)
    for number, label in enumerate(labels):
        if label not in lines:
            continue
        colour, mine = colours[number % len(colours)], lines[label].sort_values("round")
        # A baseline of one round, or without this cost.
        if len(mine) == 1 if x in ("round", "rounds") else not mine[x].any():
            axes.axhline(mine["mean"].iloc[-1], color=colour, linestyle="dashed", linewidth=1.4, label=label)
            continue
        mine = mine[mine[x] > 0]  # a logarithmic axis has no place for rounds before the first of it
        size = 3 if len(mine) <= MOST_MARKERS else 0
        axes.plot(mine[x], mine["mean"], color=colour, marker="o", markersize=size, linewidth=1.8, label=label)
        if "spread" in mine:
            low, high = mine["mean"] - mine["spread"], mine["mean"] + mine["spread"]
            axes.fill_between(mine[x], low, high, color=colour, alpha=0.15, linewidth=0)


def _rounds_below(axes: Axes) -> None:
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _score_axis(axes: Axes, sweep: Sweep, table: pd.DataFrame) -> None:
    axes.set_ylabel(f"{metric_name(table.attrs['metric'])}, {sweep.test_part} set")
    if in_percent(table.attrs["metric"]):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _cost_axis(axes: Axes, spent: pd.Series[float], *, is_bytes: bool) -> None:
    """Numbers below: logarithmic for bytes, and for counts that span much."""
    decades = float(np.log10(spent.max() / spent.min())) if len(spent) else 0.0
    if is_bytes or spent.max() > _LOG_FROM * spent.min():
        axes.set_xscale("log")
        # As many numbers as have room for their labels beside one another.
        subs = (1, 2, 5) if decades < 1.3 else (1, 3) if decades < 2.3 else (1,)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]) if decades < 0.5 else LogLocator(subs=subs))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=3, steps=[1, 2, 2.5, 3, 4, 5, 10]))
    axes.xaxis.set_major_formatter(lambda count, _: tick_text(count) if is_bytes else f"{count:,.0f}")


def save_figure(figure: Figure, path: Path) -> Path:
    for kind, metadata in (("png", {}), ("pdf", {"CreationDate": None})):  # equal pictures, equal bytes
        picture = io.BytesIO()
        with matplotlib.rc_context({"pdf.fonttype": 42}):  # letters stay text, which journals ask for
            figure.savefig(picture, format=kind, dpi=_DOTS_PER_INCH, metadata=metadata)
        write_atomically(path.with_suffix(f".{kind}"), picture.getvalue())
    return path
