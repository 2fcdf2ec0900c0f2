"""What `codistill theory` prints and draws."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from codistill.errors import RecipeError
from codistill.theory.forecast import forecast_of
from codistill.theory.iteration import at_least
from codistill.theory.toy import SETTINGS, Toy, run_toy

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

ROUNDS = (0, 1, 10, 50, 250)  # that the table shows, as far as they were run
MOST_ROUNDS = 100_000
_CLOSE = 0.01


def run_toys(rounds: int, seed: int) -> list[Toy]:
    """The three settings of figure 3."""
    at_least(rounds, 1)
    if rounds > MOST_ROUNDS:
        raise RecipeError(f"Rounds must be at most {MOST_ROUNDS:,}.", repr(rounds), "Limits: codistill.theory.*_limit.")
    if seed < 0:
        raise RecipeError("A seed must be at least 0.", repr(seed), "Choose another.")
    return [run_toy(setting, rounds, seed) for setting in SETTINGS]


def toy_table(toy: Toy) -> Table:
    """The error of every method in some rounds, and when it reaches the centralised error."""
    from rich.table import Table

    last = len(toy.errors["AKD"]) - 1
    shown = sorted({*(t for t in ROUNDS if t <= last), last})
    table = Table(
        title=f"{toy.setting.title}, c = {toy.setting.c:g}: relative error on all training inputs",
        title_justify="left",
    )
    table.add_column("method")
    for t in shown:
        table.add_column(f"round {t}", justify="right")
    table.add_column(f"within {_CLOSE:.0%} of centralised", justify="right")
    for name, errors in toy.errors.items():
        first = toy.first_within(name, _CLOSE)
        reached = "-" if name == "centralised" else "never so far" if first is None else f"from round {first}"
        table.add_row(name, *(f"{errors[t]:.4f}" for t in shown), reached)
    return table


def show(toys: list[Toy], console: Console) -> None:
    """Each setting: what happened, and what theory says about it."""
    for toy in toys:
        console.print(toy_table(toy))
        console.print("What theory says of it, before any round:")
        console.print(forecast_of(toy.problem).table())
        console.print()


def pictures(toys: list[Toy]) -> dict[str, bytes]:
    """File names and PNGs."""
    from codistill.plots.theory_plots import draw_ensemble, draw_projections, draw_toy

    drawn = {
        "toy.png": draw_toy(toys),  # figure 3
        "projections.png": draw_projections(),  # figure 1b
        "ensemble.png": draw_ensemble(),  # figure 2b
    }
    return {name: _png(figure) for name, figure in drawn.items()}


def _png(figure: Figure, dots: int = 110) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dots)
    return out.getvalue()
