"""What a search has found: a table of its best trials, a picture of the score against each field, and a recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import pandas as pd
import tomli_w
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from codistill.core import __version__
from codistill.core.files import write_atomically
from codistill.core.text import csv_text
from codistill.experiments.run import source_of
from codistill.experiments.search import Found, Range, Searched, Trial
from codistill.experiments.sweep_view import save_figure
from codistill.report.style import BLUE, MUTED, STYLE, WORSE, plain
from codistill.results.agents import gain_text, in_percent, metric_name, score_cell, score_text
from codistill.results.tables import AnyCell, Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

TRIALS, PICTURE, BEST = "search.csv", "search.png", "best.toml"
_SHOWN = 10  # trials of the table
_COLUMNS = 3  # panels side by side


def show_search(found: Found, folder: Path, console: Console, data_dir: str | None = None) -> dict[str, Path]:
    """Print the best trials and what they are worth, and write all trials, the picture and the recipe."""
    console.print(best_table(found))
    for line in conclusion(found):
        console.print(line, highlight=False, markup=False)
    write_atomically(folder / TRIALS, csv_text(trials_frame(found)).encode())
    write_atomically(folder / BEST, best_recipe(found, data_dir).encode())
    written = {"all trials": folder / TRIALS, "what was found": folder / BEST}
    if found.ranked():
        draw_search(found, folder / PICTURE)
        written["picture"] = folder / PICTURE
    return written


def best_table(found: Found) -> Table:
    search, ranked, name = found.search, found.ranked(), found.search.judged_by.name
    headings = ["trial", *(each.name for each in search.fields), "mean", "worst agent", "gain over own"]

    def figures(trial: Trial) -> list[AnyCell]:
        gain = search.judged_by.gain(found.own.score, trial.score)
        return [score_cell(name, trial.mean), score_cell(name, trial.worst), Cell(gain_text(name, gain), gain)]

    rows: list[list[AnyCell]] = [
        [str(trial.number), *(each.text(trial.values[each.key]) for each in search.fields), *figures(trial)]
        for trial in ranked[:_SHOWN]
    ]
    given = [(each, search.own_value(each.key)) for each in search.fields]
    values = ["default" if value is None else each.text(value) for each, value in given]
    own: list[AnyCell] = ["own", *values, *figures(found.own)[:2], ""]
    failed = len(found.trials) - len(ranked)
    seeds = search.options.seeds
    notes = [
        f"ranked by the {search.measured}; each agent holds out {100 * search.share:g} % of its own samples",
        f"each trial is {'one run' if seeds == 1 else f'the mean of {seeds} runs of different seeds'}",
        "own: the recipe's own settings, on the same validation samples",
        *([f"{failed} of {len(found.trials)} trials were not possible"] if failed else []),
    ]
    title = f"the best {min(_SHOWN, len(ranked))} of {len(found.trials)} trials"
    return Table(headings, "l" + "r" * (len(headings) - 1), rows, [own], title, notes=notes)


def conclusion(found: Found) -> list[str]:
    """What the search was worth, and what it was not."""
    search, own, winner = found.search, found.own, found.winner
    if winner is own:
        return [
            f"No trial is better than the recipe's own settings, with {search.result(own)}: {BEST} holds those.",
        ]
    unit = " points" if in_percent(search.judged_by.name) else ""
    gain = f"{gain_text(search.judged_by.name, found.gain)}{unit}"
    lines = [
        f"Best: trial {winner.number} with {search.words(winner)}. {search.measured[0].upper()}{search.measured[1:]}: "
        f"{search.result(winner)}; with the recipe's own settings {search.result(own)}; gain {gain}.",
        f"The best of {len(found.trials)} trials was chosen by these samples: its score and gain are optimistic. No "
        f"test sample was used; 'codistill run {BEST}' measures on them.",
    ]
    spreads = [each for each in (own.spread, winner.spread) if each is not None]
    if search.options.seeds == 1:
        lines.append("Each trial is one run: with [search] seeds = 3 it is seen how much of a gain is chance.")
    elif found.gain is not None and spreads and found.gain < max(spreads):
        lines.append("The gain is smaller than the standard deviation over the seeds: it may be chance.")
    return lines


def trials_frame(found: Found) -> pd.DataFrame:
    """A row per trial, the recipe's own settings first."""
    rows = [
        {
            "trial": trial.name,
            **{each.key: each.text(trial.values[each.key]) if trial.values else "" for each in found.search.fields},
            "mean": trial.mean, "worst": trial.worst, "spread": trial.spread, "score": trial.score, "why": trial.why,
        }
        for trial in (found.own, *found.trials)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def best_recipe(found: Found, data_dir: str | None = None) -> str:
    """The recipe with the settings that were found, and in a comment where they are from."""
    search, own, winner = found.search, found.own, found.winner
    seeds = "1 seed" if search.options.seeds == 1 else f"{search.options.seeds} seeds"
    lines = [
        f"Found by 'codistill search' (codistill {__version__}, TPE of optuna {_optuna()}): "
        f"{f'trial {winner.number}' if winner is not own else 'none was better than its own settings'} "
        f"of {len(found.trials)}, {seeds} each.",
        f"{search.measured[0].upper()}{search.measured[1:]}: {search.result(winner)}; with the recipe's own settings "
        f"{search.result(own)}.",
        "The best of several trials by validation is optimistic. No test sample was used.",
        *(f"{each.key} = {each.text(winner.values[each.key])}" for each in search.fields if winner.values),
    ]
    comment = "\n".join(f"# {' '.join(line.split())}" for line in lines)
    recipe = search.recipe(winner.values)
    return f"{comment}\n\n{tomli_w.dumps(source_of(recipe, data_dir))}"


def _optuna() -> str:
    import optuna

    return str(optuna.__version__)


# --- The picture: a panel for each field, a point for each trial.


def draw_search(found: Found, path: Path) -> None:
    """The score of every trial against each field; the winner stands out, the recipe's own score is a line."""
    fields = found.search.fields
    columns = 2 if len(fields) == 4 else min(len(fields), _COLUMNS)
    rows = math.ceil(len(fields) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6 * columns + 0.4, 2.9 * rows + 0.6), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes, searched in zip(grid.flat, fields, strict=False):
            _draw_field(axes, found, searched)
        for axes in grid.flat[len(fields) :]:
            axes.set_visible(False)
        score = found.search.judged_by
        worst = ", worst agent" if found.search.options.of == "worst" else ""
        lower = "" if score.greater_is_better else " (lower is better)"
        figure.supylabel(f"validation {metric_name(score.name)}{worst}{lower}", fontsize=10)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        save_figure(figure, path)


def _draw_field(axes: Axes, found: Found, searched: Searched) -> None:
    trials = found.ranked()
    scores = [trial.score or 0.0 for trial in trials]
    if searched.choices is None:
        places = [float(trial.values[searched.key]) for trial in trials]
        _range_axis(axes, searched.range)
    else:
        labels = list(searched.choices.values)
        places = [float(labels.index(searched.text(trial.values[searched.key]))) for trial in trials]
        axes.set_xticks(range(len(labels)), [plain(label) for label in labels])
        axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.scatter(places[1:], scores[1:], color=BLUE, alpha=0.6, s=26, linewidths=0, label="trial")
    axes.scatter(places[:1], scores[:1], color=WORSE, s=90, marker="*", zorder=3, label="the best trial")
    name = found.search.judged_by.name
    label = f"the recipe's own settings: {score_text(name, found.own.score)}"
    axes.axhline(found.own.score or 0.0, color=MUTED, linestyle="dotted", linewidth=1.2, label=label)
    if in_percent(name):
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axes.set_xlabel(plain(searched.key, 40))


def _range_axis(axes: Axes, drawn: Range | None) -> None:
    """The whole range, in plain numbers."""
    assert drawn is not None
    if drawn.log:
        axes.set_xscale("log")
        margin = (drawn.high / drawn.low) ** 0.04
        axes.set_xlim(drawn.low / margin, drawn.high * margin)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if drawn.high < 100 * drawn.low else (1,)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        margin = 0.04 * (drawn.high - drawn.low)
        axes.set_xlim(drawn.low - margin, drawn.high + margin)
