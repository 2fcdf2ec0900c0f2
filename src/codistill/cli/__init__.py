"""The command line. Heavy imports happen inside the commands, so that help answers at once."""

from __future__ import annotations

import argparse
import io
import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from codistill.cli import certs_command as certs_cli
from codistill.cli import network_commands as network_cli
from codistill.errors import CodistillError, RecipeError
from codistill.version import __version__

if TYPE_CHECKING:
    from codistill.experiments.recipe import Recipe
    from codistill.results.summary import Summary

_EPILOG = """\
A first look:        codistill demo
Your own run:        codistill run RECIPE.toml --set protocol.rounds=5
Exit codes:          0 done, 2 recipe or arguments, 3 data, 4 model, 5 message, 6 checkpoint,
                     7 cannot write, 8 runtime, 9 network, 130 interrupted
"""
_PICTURES = ("png", "svg", "pdf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake is a sentence and an exit code, never a traceback."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except CodistillError as error:
        _complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "Stopped at once. What was reached is in the run's last checkpoint: codistill resume RUN; or, between "
            "machines, the same command again.",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:  # a defect, ours or of a model or protocol of one's own: say it, keep the trace
        return _unexpected(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="codistill",
        description="Federated learning by knowledge distillation, for agents that share neither data nor a model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"codistill {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = commands.add_parser("run", help="run a recipe")
    run.add_argument("recipe", type=Path, help="a TOML recipe")
    _run_options(run)
    run.set_defaults(command=_run)

    demo = commands.add_parser("demo", help="five agents with five kinds of models learn from one another")
    _run_options(demo)
    demo.set_defaults(command=_demo)

    resume = commands.add_parser("resume", help="go on with a run that was killed or stopped")
    resume.add_argument("run", type=Path, help="the run's folder")
    resume.add_argument("--quiet", action="store_true", help="no progress display")
    resume.set_defaults(command=_resume)

    sweep = commands.add_parser("sweep", help="run every combination of a recipe with a table [sweep]")
    sweep.add_argument("recipe", type=Path, help="a TOML recipe with a table [sweep]")
    sweep.add_argument("--quick", action="store_true", help="the quick form: with the changes in its table [quick]")
    sweep.add_argument("--out", type=Path, help="the sweep's folder; runs that are done there are not run again")
    _recipe_options(sweep)
    sweep.set_defaults(command=_sweep)

    compare = commands.add_parser("compare", help="several runs side by side")
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    compare.add_argument("--out", type=Path, help="also write an HTML page")
    compare.set_defaults(command=_compare)

    protocols = commands.add_parser("protocols", help="all protocols: paper, what is exchanged, which models")
    protocols.add_argument("name", nargs="?", help="one protocol, with its hyper-parameters")
    protocols.set_defaults(command=_protocols)

    learners = commands.add_parser("learners", help="all learners that a recipe can name")
    learners.set_defaults(command=_learners)

    data = commands.add_parser("data", help="data sets at hand; or how a recipe hands its data out")
    data.add_argument("recipe", type=Path, nargs="?", help="show this recipe's partition and graph of agents")
    data.add_argument("--out", type=Path, help="write the partition as a picture (.png, .svg, .pdf)")
    _recipe_options(data)
    data.set_defaults(command=_data)

    theory = commands.add_parser("theory", help="what knowledge distillation does to kernel machines, in closed form")
    theory.add_argument("--rounds", type=int, default=250, help="of the toy problem (default: 250)")
    theory.add_argument("--seed", type=int, default=0, help="of its data (default: 0)")
    theory.add_argument("--out", type=Path, default=Path("theory"), help="folder of the pictures (default: ./theory)")
    theory.set_defaults(command=_theory)
    network_cli.add_parsers(commands, _recipe_options, _show)
    certs_cli.add_parser(commands)
    return parser


def _run_options(parser: argparse.ArgumentParser) -> None:
    _recipe_options(parser)
    parser.add_argument("--out", type=Path, help="the run's folder (default: a new one in runs/)")
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def _recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="change the recipe, e.g. protocol.rounds=5",
    )
    parser.add_argument("--data-dir", help="folder of <name>.npz data sets (or set CODISTILL_DATA)")


def _complain(error: CodistillError) -> None:
    print(f"error: {error.must}\nfound: {error.found}\nto do: {error.do}", file=sys.stderr)
    for note in getattr(error, "__notes__", []):
        print(f"where: {note}", file=sys.stderr)


def _unexpected(error: Exception) -> int:
    import tempfile
    import traceback

    try:
        with tempfile.NamedTemporaryFile("w", prefix="codistill-", suffix=".log", delete=False) as log:
            traceback.print_exception(error, file=log)
        trace = f"The full trace is in {log.name}."
    except OSError as problem:
        trace = f"The full trace could not be kept: {problem.strerror}."
    text = str(error) if type(error).__name__ == "RemoteError" else f"{type(error).__name__}: {error}"
    print(
        "error: Every model and protocol must do its part without failing.",
        f"found: {text}",
        f"to do: Check the options of your model, and your own code. {trace}",
        *(f"where: {note}" for note in getattr(error, "__notes__", []) if "Traceback" not in note),
        sep="\n",
        file=sys.stderr,
    )
    return 1


# --- commands -----------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from codistill.experiments.recipe import read_recipe

    recipe = read_recipe(options.recipe, options.set)
    return _execute(recipe, options, options.recipe.stem)


def _demo(options: argparse.Namespace) -> int:
    from codistill.experiments.recipe import read_recipe

    with resources.as_file(resources.files("codistill.experiments") / "demo.toml") as path:
        recipe = read_recipe(path, options.set)
    return _execute(recipe, options, "demo")


def _execute(recipe: Recipe, options: argparse.Namespace, stem: str) -> int:
    from codistill.experiments.run import execute, new_folder

    folder = options.out or new_folder(Path("runs"), stem)
    if recipe.protocol.pools_data:
        print(
            f"{recipe.protocol.name} pools the private data of all agents: a yardstick, run in simulation only.",
            file=sys.stderr,
        )
    summary, complete = execute(recipe, folder, data_dir=options.data_dir, progress=not options.quiet)
    return _show(summary, complete, folder)


def _resume(options: argparse.Namespace) -> int:
    from codistill.experiments.run import execute, reopen

    summary, complete = execute(reopen(options.run), options.run, resume=True, progress=not options.quiet)
    return _show(summary, complete, options.run)


def _sweep(options: argparse.Namespace) -> int:
    from rich.console import Console

    from codistill.experiments.sweep import (
        MEASURES_PICTURE,
        OUTPUTS_PICTURE,
        PICTURE,
        TABLE,
        execute_sweep,
        means,
        read_sweep,
    )
    from codistill.experiments.sweep_costs_view import show_costs
    from codistill.experiments.sweep_measures import draw_measures_of
    from codistill.experiments.sweep_outputs import draw_outputs_of
    from codistill.experiments.sweep_view import draw, tables
    from codistill.files import writing

    sweep = read_sweep(options.recipe, options.set, quick=options.quick)
    folder = options.out or Path("runs") / (options.recipe.stem + ("-quick" if options.quick else ""))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    frame = execute_sweep(sweep, folder, data_dir=options.data_dir)
    if frame is None:
        print("stopped; to go on, give the same command again: what is done is not run again")
        return 130
    table, percent = means(sweep, frame), "accuracy" in frame
    console = Console(width=None if sys.stdout.isatty() else 140)
    for drawn in tables(sweep, table, percent=percent):
        console.print(drawn)
    costs = show_costs(sweep, frame, folder, console)
    draw(sweep, table, folder / PICTURE, percent=percent)
    print(f"table: {folder / TABLE}\npicture: {folder / PICTURE}")
    for what, path in costs.items():
        print(f"{what}: {path}")
    if draw_measures_of(sweep, frame, folder, folder / MEASURES_PICTURE):
        print(f"what protocols measured: {folder / MEASURES_PICTURE}")
    if draw_outputs_of(sweep, folder, folder / OUTPUTS_PICTURE):
        print(f"average outputs: {folder / OUTPUTS_PICTURE}")
    return 0


def _show(summary: Summary, complete: bool, folder: Path, again: str | None = None) -> int:
    from rich.console import Console

    from codistill.experiments.run import REPORT

    Console(width=None if sys.stdout.isatty() else 120).print(summary.table())
    print(f"report: {folder / REPORT}")
    if not complete:
        again = again or f"codistill resume {shlex.quote(str(folder))}"
        print(f"stopped after {summary.rounds} rounds; to go on: {again}")
        return 130
    return 0


def _compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    from codistill.experiments.run import read_summary
    from codistill.results.summary import comparison_table

    summaries = [read_summary(folder) for folder in options.runs]
    Console(width=None if sys.stdout.isatty() else 120).print(comparison_table(summaries))
    if options.out:
        from codistill.reports.pages import write_comparison

        print(f"report: {write_comparison(summaries, options.out)}")
    return 0


def _protocols(options: argparse.Namespace) -> int:
    from codistill.errors import nearest
    from codistill.learners.ability import Ability
    from codistill.protocols import PROTOCOLS

    if options.name is None:
        rows = [
            (p.name, p.paper, p.exchanges, p.needs.words(), "no" if Ability.GRADIENTS in p.needs else "yes")
            for p in PROTOCOLS.values()
        ]
        _print_table(("protocol", "paper", "what is exchanged", "ability needed", "black boxes"), rows)
        print("black boxes: models that only fit and predict (forests, boosting, kernels) may take part, also mixed")
        return 0
    if options.name not in PROTOCOLS:
        raise RecipeError("A protocol must be known.", f"'{options.name}'", nearest(options.name, PROTOCOLS))
    import dataclasses
    import inspect

    protocol = PROTOCOLS[options.name]
    print(inspect.cleandoc(protocol.__doc__ or ""), "\n")
    fields = [
        (field.name, str(field.type), "absent" if field.default is None else str(field.default), field.metadata["help"])
        for field in dataclasses.fields(protocol)
    ]
    _print_table(("hyper-parameter", "type", "default", "what it is"), fields)
    return 0


def _learners(options: argparse.Namespace) -> int:
    from codistill.learners.catalogue import entries

    _print_table(("learner", "library", "what it is"), [(e.name, e.library, e.description) for e in entries()])
    print("Any other scikit-learn, XGBoost or LightGBM estimator by its full name, e.g. sklearn.svm.SVC.")
    return 0


def _data(options: argparse.Namespace) -> int:
    if options.recipe is not None:
        return _show_partition(options)
    from codistill.data.loading import catalogue

    rows = [
        (d.name, d.where, f"{d.train:,}", f"{d.test:,}", " x ".join(map(str, d.shape)), str(d.classes), d.problem)
        for d in catalogue(options.data_dir)
    ]
    _print_table(("data set", "where", "train", "test", "sample", "classes", "problem"), rows)
    print("More: put <name>.npz files in a folder and name it with --data-dir or CODISTILL_DATA.")
    return 0


def _show_partition(options: argparse.Namespace) -> int:
    from codistill.data.partition import counts
    from codistill.data.split import split_public
    from codistill.experiments.recipe import read_recipe
    from codistill.experiments.run import agent_names, hand_out, load_data, topology_of
    from codistill.files import write_atomically
    from codistill.plots.partitions import draw_partition, partition_text
    from codistill.topology.facts import figures

    recipe = read_recipe(options.recipe, options.set)
    data = load_data(recipe.data, recipe.seed, options.data_dir)
    if recipe.data.public:
        _, data = split_public(data, recipe.data.public, recipe.seed)
    table = counts(data.y, hand_out(recipe, data), data.classes)
    topology = topology_of(recipe)
    print(partition_text(table, agent_names(recipe), data.class_names))
    if topology.links:
        print("\ntopology: " + "; ".join(f"{name} {value}" for name, value in figures(topology).items()))
    if options.out:
        kind = options.out.suffix.lower().removeprefix(".")
        if kind not in _PICTURES:
            raise RecipeError(
                f"A picture must be one of {', '.join(_PICTURES)}.",
                f"'{options.out}'",
                "Change its ending.",
            )
        picture = io.BytesIO()
        draw_partition(table, agent_names(recipe), data.class_names).savefig(picture, format=kind, bbox_inches="tight")
        write_atomically(options.out, picture.getvalue())
        print(f"picture: {options.out}")
    return 0


def _theory(options: argparse.Namespace) -> int:
    from rich.console import Console

    from codistill.cli.theory_command import pictures, run_toys, show
    from codistill.files import write_atomically, writing

    toys = run_toys(options.rounds, options.seed)
    with writing(options.out):
        options.out.mkdir(parents=True, exist_ok=True)
    show(toys, Console(width=None if sys.stdout.isatty() else 120))
    for name, picture in pictures(toys).items():
        write_atomically(options.out / name, picture)
        print(f"picture: {options.out / name}")
    return 0


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    kept = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    for i in kept:
        table.add_column(headings[i], overflow="fold")
    for row in rows:
        table.add_row(*(escape(row[i]) for i in kept))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
