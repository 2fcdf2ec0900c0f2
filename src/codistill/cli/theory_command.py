"""The command `theory`: closed-form kernel analysis of distillation between two agents, with plots."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.cli.console import make_console
from codistill.errors import RecipeError

if TYPE_CHECKING:
    from rich.table import Table

    from codistill.theory.toy import Toy

_ROUNDS = (0, 1, 10, 50, 250)  # that the table shows, as far as they were run
_MOST_ROUNDS = 100_000
_CLOSE = 0.01
_DOTS_PER_INCH = 110


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    text = "closed-form kernel analysis, with plots"
    theory = commands.add_parser(
        "theory",
        help=text,
        description=f"{text}: the toy problem of figure 3 of the AKD paper, and what theory predicts",
    )
    theory.add_argument("--rounds", type=int, default=250, help="rounds of the toy problem (default: 250)")
    theory.add_argument("--seed", type=int, default=0, help="seed of its data (default: 0)")
    theory.add_argument(
        "--out", type=Path, default=Path("theory"), metavar="DIR", help="folder of the plots (default: ./theory)"
    )
    theory.set_defaults(command=_theory)


def _theory(options: argparse.Namespace) -> int:
    from codistill.files import write_atomically, writing
    from codistill.theory.forecast import forecast_of

    toys = _run_toys(options.rounds, options.seed)
    with writing(options.out):
        options.out.mkdir(parents=True, exist_ok=True)
    console = make_console()
    for toy in toys:
        console.print(_toy_table(toy))
        console.print("What theory predicts, before any round:")
        console.print(forecast_of(toy.problem).table())
        console.print()
    for name, picture in _pictures(toys).items():
        write_atomically(options.out / name, picture)
        print(f"picture: {options.out / name}")
    return 0


def _run_toys(rounds: int, seed: int) -> list[Toy]:
    """The three settings of figure 3."""
    from codistill.theory.iteration import at_least
    from codistill.theory.toy import SETTINGS, run_toy

    at_least(rounds, 1)
    if rounds > _MOST_ROUNDS:
        raise RecipeError(
            f"Rounds must be at most {_MOST_ROUNDS:,}.", repr(rounds), "For limits, see codistill.theory.*_limit."
        )
    if seed < 0:
        raise RecipeError("A seed must be at least 0.", repr(seed), "Choose another.")
    return [run_toy(setting, rounds, seed) for setting in SETTINGS]


def _toy_table(toy: Toy) -> Table:
    """The error of every method in some rounds, and when it reaches the centralised error."""
    from rich.table import Table

    last = len(toy.errors["AKD"]) - 1
    shown = sorted({*(t for t in _ROUNDS if t <= last), last})
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
        reached = "-" if name == "centralised" else "not reached" if first is None else f"from round {first}"
        table.add_row(name, *(f"{errors[t]:.4f}" for t in shown), reached)
    return table


def _pictures(toys: list[Toy]) -> dict[str, bytes]:
    """File names and PNGs."""
    from codistill.plots.theory_plots import draw_ensemble, draw_projections, draw_toy

    pictures = {}
    for name, figure in (
        ("toy.png", draw_toy(toys)),  # figure 3
        ("projections.png", draw_projections()),  # figure 1b
        ("ensemble.png", draw_ensemble()),  # figure 2b
    ):
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=_DOTS_PER_INCH)
        pictures[name] = out.getvalue()
    return pictures
