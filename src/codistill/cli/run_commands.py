"""The commands `run`, `demo` and `resume`: one run of a recipe."""

from __future__ import annotations

import argparse
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.cli.console import print_results
from codistill.cli.recipe_arguments import add_recipe_arguments, add_trust_argument

if TYPE_CHECKING:
    from codistill.experiments.recipe import Recipe


def add_parsers(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the command line."""
    text = "run a recipe"
    run = commands.add_parser(
        "run", help=text, description=f"{text}: train alone and together, print a table, write a report"
    )
    run.add_argument("recipe", type=Path, help="a TOML recipe")
    _add_run_arguments(run)
    run.set_defaults(command=_run)

    text = "five agents with five kinds of models learn from one another"
    demo = commands.add_parser("demo", help=text, description=text)
    _add_run_arguments(demo)
    demo.set_defaults(command=_demo)

    text = "continue a run that was interrupted, from its last checkpoint"
    resume = commands.add_parser("resume", help=text, description=text)
    resume.add_argument("run", type=Path, help="the folder of the run")
    resume.add_argument("--quiet", action="store_true", help="no progress display")
    add_trust_argument(resume, "run the Python files that the recipe names even if they have changed since it began")
    resume.set_defaults(command=_resume)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: a new one in runs/)")
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def _run(options: argparse.Namespace) -> int:
    from codistill.experiments.recipe import read_recipe

    return _execute(read_recipe(options.recipe, options.set), options, options.recipe.stem)


def _demo(options: argparse.Namespace) -> int:
    from codistill.experiments.recipe import read_recipe

    with resources.as_file(resources.files("codistill.experiments") / "demo.toml") as path:
        recipe = read_recipe(path, options.set)
    return _execute(recipe, options, "demo")


def _execute(recipe: Recipe, options: argparse.Namespace, stem: str) -> int:
    from codistill.experiments.run import execute, new_folder
    from codistill.experiments.same_run import has_run_of

    # In a Ray cluster a job that was put into the queue again gives the same command: it goes on with the run.
    again = recipe.runtime.kind == "ray" and options.out is not None and has_run_of(recipe, options.out)
    folder = options.out or new_folder(Path("runs"), stem)
    if recipe.protocol.pools_data:
        print(
            f"{recipe.protocol.name} pools the private data of all agents: a baseline, for simulation only.",
            file=sys.stderr,
        )
    summary, complete = execute(recipe, folder, data_dir=options.data_dir, resume=again, progress=not options.quiet)
    return print_results(summary, complete, folder)


def _resume(options: argparse.Namespace) -> int:
    from codistill.experiments.run import execute
    from codistill.experiments.saved_run import reopen

    recipe = reopen(options.run)
    summary, complete = execute(
        recipe, options.run, resume=True, progress=not options.quiet, trust_code=options.trust_code
    )
    return print_results(summary, complete, options.run)
