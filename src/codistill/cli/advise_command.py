"""The command `advise`: which protocol, if any, is expected to help these agents."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.cli.console import make_console
from codistill.cli.recipe_arguments import add_recipe_arguments
from codistill.errors import RecipeError

if TYPE_CHECKING:
    from codistill.experiments.advice import Advice

_WIDTH = 140  # of tables, where the output is not a terminal
_SAID_EVERY = 5.0  # seconds between lines of progress, where there is no terminal


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    advise = commands.add_parser(
        "advise",
        help="which protocol shall these agents choose, if any?",
        description="Short probing runs on held-out parts of the agents' training data (never on the test set): what "
        "each agent is expected to gain with each protocol that it can run, what is revealed, bytes and time, and a "
        "recommendation. With a file of summaries in place of a recipe: from the facts in it alone.",
    )
    advise.add_argument("recipe", type=Path, metavar="RECIPE", help="a TOML recipe, or a file of summaries")
    add_recipe_arguments(advise)
    advise.add_argument(
        "--seconds", type=float, default=300.0, metavar="N", help="time for probing runs, about (default: 300)"
    )
    advise.add_argument("--json", type=Path, metavar="FILE", help="also write the advice to a file")
    advise.add_argument("--quiet", action="store_true", help="no progress display")
    advise.set_defaults(command=_advise)


def _advise(options: argparse.Namespace) -> int:
    if not math.isfinite(options.seconds) or options.seconds <= 0:
        raise RecipeError("--seconds must be a number above 0.", f"{options.seconds}", "60 is a usual choice.")
    advice = _find(options)
    from codistill.experiments.advice_table import as_plain, tables

    console = make_console(_WIDTH)
    for table in tables(advice):
        console.print(table)
    console.print(advice.sentence, highlight=False, markup=False)
    if options.json:
        import json

        from codistill.files import write_atomically, writing

        with writing(options.json):
            write_atomically(options.json, json.dumps(as_plain(advice), indent=1).encode())
        print(f"written: {options.json}")
    return 130 if advice.findings is not None and advice.findings.interrupted else 0


def _find(options: argparse.Namespace) -> Advice:
    from codistill.experiments.advice_summaries import advise_summaries, is_summary, read_file

    tables = read_file(options.recipe)
    if is_summary(tables):
        from codistill.experiments.overrides import override

        for change in options.set:
            override(tables, change)
        return advise_summaries(tables)
    from codistill.experiments.advice import advise_recipe
    from codistill.experiments.recipe import read_recipe

    recipe = read_recipe(options.recipe, options.set)
    if options.quiet:
        return advise_recipe(recipe, data_dir=options.data_dir, seconds=options.seconds)
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("reading the data") as status:
            return advise_recipe(recipe, data_dir=options.data_dir, seconds=options.seconds, tell=status.update)
    return advise_recipe(recipe, data_dir=options.data_dir, seconds=options.seconds, tell=_plain_lines())


def _plain_lines() -> Callable[[str], None]:
    said = -math.inf

    def tell(text: str) -> None:
        nonlocal said
        if time.monotonic() - said >= _SAID_EVERY:
            said = time.monotonic()
            print(f"advise: {text}", file=sys.stderr, flush=True)

    return tell
