"""The command `sweep`: every combination of some values of a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.cli.console import make_console
from codistill.cli.recipe_arguments import add_recipe_arguments
from codistill.errors import RecipeError, RuntimeFault

if TYPE_CHECKING:
    from codistill.experiments.sweep_on_cluster import SweepJobs

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
    sweep.add_argument(
        "--on",
        choices=("local", "slurm", "ray"),
        help="run every combination as a job: local processes, Slurm (extra 'cluster'), Ray (extra 'ray')",
    )
    sweep.add_argument("--on-file", type=Path, metavar="FILE", help="TOML file with options of the jobs, of your site")
    sweep.add_argument(
        "--on-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the jobs, e.g. partition=gpu, time=120, at_once=4; may be repeated",
    )
    add_recipe_arguments(sweep)
    sweep.set_defaults(command=_sweep)


def _sweep(options: argparse.Namespace) -> int:
    from codistill.experiments.sweep import read_sweep
    from codistill.experiments.sweep_run import execute_sweep
    from codistill.experiments.sweep_view import show_sweep

    folder = options.out or Path("runs") / (options.recipe.stem + ("-quick" if options.quick else ""))
    jobs = _jobs(options, folder)
    sweep = read_sweep(options.recipe, options.set, quick=options.quick)
    frame = execute_sweep(sweep, folder, data_dir=options.data_dir, run=None if jobs is None else jobs.run)
    if frame is None:
        print("stopped; to continue, give the same command again: finished runs are not repeated")
        return 130
    for what, path in show_sweep(sweep, frame, folder, make_console(_WIDTH)).items():
        print(f"{what}: {path}")
    if jobs is not None and jobs.failed:
        raise RuntimeFault(
            "Every run of a sweep must succeed.",
            f"{len(jobs.failed)} of {len(sweep)} have failed, and are not in the tables: {'; '.join(jobs.failed)}",
            "See their logs, named above. The same command again runs them, and only them.",
        )
    return 0


def _jobs(options: argparse.Namespace, folder: Path) -> SweepJobs | None:
    """What runs the combinations as jobs, if that is asked for; what it needs must be there."""
    if options.on is None:
        if options.on_file is not None or options.on_option:
            raise RecipeError(
                "Options of jobs need --on.",
                "--on-file or --on-option alone",
                "Add --on local, --on slurm or --on ray.",
            )
        return None
    from codistill.experiments.cluster_options import cluster_options
    from codistill.experiments.job_systems import check_system
    from codistill.experiments.sweep_on_cluster import SweepJobs

    check_system(options.on)
    asked = cluster_options(options.on_file, options.on_option, options.on)
    return SweepJobs(folder, options.on, asked, data_dir=options.data_dir)
