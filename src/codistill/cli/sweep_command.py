"""The command `sweep`: every combination of some values of a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from codistill.cli.console import make_console
from codistill.cli.recipe_arguments import add_recipe_arguments

_WIDTH = 140  # of tables, where the output is not a terminal


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    sweep = commands.add_parser(
        "sweep",
        help="run every combination of the values in a recipe's table [sweep]",
        description="run every combination of the values in a recipe's table [sweep]; impossible combinations are "
        "reported and skipped",
    )
    sweep.add_argument("recipe", type=Path, help="a TOML recipe with a table [sweep]")
    sweep.add_argument("--quick", action="store_true", help="apply the changes in the recipe's table [quick] first")
    sweep.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the sweep; runs that are finished there are not repeated"
    )
    add_recipe_arguments(sweep)
    sweep.set_defaults(command=_sweep)


def _sweep(options: argparse.Namespace) -> int:
    from codistill.experiments.sweep import read_sweep
    from codistill.experiments.sweep_run import execute_sweep
    from codistill.experiments.sweep_view import show_sweep
    from codistill.files import writing

    sweep = read_sweep(options.recipe, options.set, quick=options.quick)
    folder = options.out or Path("runs") / (options.recipe.stem + ("-quick" if options.quick else ""))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    frame = execute_sweep(sweep, folder, data_dir=options.data_dir)
    if frame is None:
        print("stopped; to continue, give the same command again: finished runs are not repeated")
        return 130
    for what, path in show_sweep(sweep, frame, folder, make_console(_WIDTH)).items():
        print(f"{what}: {path}")
    return 0
