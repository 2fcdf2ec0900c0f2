"""The commands of recipes on this machine: runs, advice and sweeps, their results, and predictions with models."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.cli.console import add_command, add_recipe_arguments, add_trust_argument, make_console, print_results
from codistill.core.errors import RecipeError, RuntimeFault
from codistill.core.files import write_atomically

if TYPE_CHECKING:
    from codistill.experiments.advice import Advice
    from codistill.experiments.job_systems import SweepJobs


def add_parsers(commands: argparse._SubParsersAction[Any]) -> None:
    text = "run a recipe"
    run = add_command(commands, "run", _run, text, f"{text}: train alone and together, print a table, write a report")
    run.add_argument("recipe", type=Path, help="a TOML recipe")
    _add_run_arguments(run)

    demo = add_command(commands, "demo", _run, "five agents with five kinds of models learn from one another")
    _add_run_arguments(demo)
    demo.set_defaults(recipe=None)

    resume = add_command(commands, "resume", _resume, "continue a run that was interrupted, from its last checkpoint")
    resume.add_argument("run", type=Path, help="the folder of the run")
    resume.add_argument("--quiet", action="store_true", help="no progress display")
    add_trust_argument(resume, "run the Python files that the recipe names even if they have changed since it began")

    advise = add_command(
        commands,
        "advise",
        _advise,
        "which protocol shall these agents choose, if any?",
        "Short probing runs on held-out parts of the agents' training data (never on the test set): what each agent "
        "is expected to gain with each protocol that it can run, what is revealed, bytes and time, and a "
        "recommendation. With a file of summaries in place of a recipe: from the facts in it alone.",
    )
    advise.add_argument("recipe", type=Path, metavar="RECIPE", help="a TOML recipe, or a file of summaries")
    add_recipe_arguments(advise)
    advise.add_argument(
        "--seconds", type=float, default=300.0, metavar="N", help="time for probing runs, about (default: 300)"
    )
    advise.add_argument("--json", type=Path, metavar="FILE", help="also write the advice to a file")
    advise.add_argument("--quiet", action="store_true", help="no progress display")

    text = "run every combination of the values in a recipe's table [sweep]"
    sweep = add_command(commands, "sweep", _sweep, text, f"{text}; impossible combinations are reported and skipped")
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

    text = "choose settings of a recipe by its table [search], on validation samples"
    search = add_command(
        commands,
        "search",
        _search,
        text,
        f"{text}: each agent holds them out of its own samples, and test samples are not read. Ends with what the "
        "recipe's own settings score on the same samples, and writes what was found as a recipe. Needs the extra "
        "'search'.",
    )
    search.add_argument("recipe", type=Path, help="a TOML recipe with a table [search]")
    search.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the search; the same command goes on with what is there"
    )
    add_recipe_arguments(search)

    text = "several runs side by side, with means and intervals over seeds, and recall per class"
    compare = add_command(commands, "compare", _compare, text)
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    compare.add_argument(
        "--gain-over",
        metavar="LINE",
        help="a protocol (its label in the table of means), or one of its runs: gains over it, seed by seed, with a "
        "paired t-test",
    )
    compare.add_argument(
        "--out", type=Path, metavar="FILE", help="also write an HTML page, or the tables as .csv or .tex"
    )

    text = "write the report of a run, from a recipe or from Python, and print its table"
    report = add_command(commands, "report", _report, text)
    report.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, finished or not")
    report.add_argument("--out", type=Path, metavar="PAGE.html", help="the page (default: report.html in the folder)")

    text = "write the trained model of an agent to a file, for codistill.load, 'codistill predict' or ONNX runtimes"
    export = add_command(commands, "export", _export, text)
    export.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, or of 'codistill join'")
    export.add_argument("agent", metavar="AGENT", help="the agent's name")
    export.add_argument("--onnx", action="store_true", help="as an ONNX graph that takes samples as they are")
    export.add_argument("--out", type=Path, metavar="FILE", help="default: AGENT.codistill or AGENT.onnx")
    text = "for a folder of 'codistill join': the file that it was given; my_agent.py is run"
    export.add_argument("--file", type=Path, metavar="FILE", help=text)
    export.add_argument("--data-dir", metavar="DIR", help="folder of <name>.npz data sets (default: as in the run)")
    add_trust_argument(export)

    predict = add_command(commands, "predict", _predict, "predict the rows of a table with a saved model")
    predict.add_argument(
        "model", type=Path, metavar="MODEL", help="a file of 'codistill export', of agent.save(path), or an .onnx file"
    )
    predict.add_argument("table", type=Path, metavar="TABLE", help="a .csv or .parquet file with a row per sample")
    predict.add_argument("--label", metavar="COLUMN", help="a column to leave out (default: as the model knows it)")
    predict.add_argument("--out", type=Path, metavar="FILE", help="a .csv or .parquet file (default: print as CSV)")


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: a new one in runs/)")
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def _run(options: argparse.Namespace) -> int:
    from codistill.experiments.recipe import read_recipe

    with resources.as_file(resources.files("codistill.experiments") / "demo.toml") as demo:
        recipe = read_recipe(options.recipe or demo, options.set)

    # These take seconds to import: an error in the recipe is shown before.
    from codistill.experiments.run import execute, new_folder
    from codistill.experiments.saved_run import RECIPE, is_run_of

    # In a Ray cluster a job that was put into the queue again gives the same command: it goes on with the run.
    begun = recipe.spec.runtime == "ray" and options.out is not None and (options.out / RECIPE).exists()
    again = begun and is_run_of(recipe, options.out)
    folder = options.out or new_folder(Path("runs"), (options.recipe or demo).stem)
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


# --- Several runs: all of a sweep, and those that advice is made from.

_WIDTH = 140  # of tables, where the output is not a terminal
_SAID_EVERY = 5.0  # seconds between lines of progress, where there is no terminal


def _sweep(options: argparse.Namespace) -> int:
    from codistill.experiments.sweep import execute_sweep, read_sweep
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
            f"{len(jobs.failed)} of {len(sweep.runs)} have failed, and are not in the tables: {'; '.join(jobs.failed)}",
            "See their logs, named above. The same command again runs them, and only them.",
        )
    return 0


def _search(options: argparse.Namespace) -> int:
    from codistill.experiments.search import check_installed, execute_search, read_search

    check_installed()
    search, folder = read_search(options.recipe, options.set), options.out or Path("runs") / options.recipe.stem
    found = execute_search(search, folder, data_dir=options.data_dir)
    if found is None:
        print("stopped; to continue, give the same command again: finished trials are not repeated")
        return 130
    from codistill.experiments.search_view import show_search

    for what, path in show_search(found, folder, make_console(_WIDTH), options.data_dir).items():
        print(f"{what}: {path}")
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
    from codistill.experiments.job_systems import SweepJobs, check_system
    from codistill.experiments.sweep_jobs import cluster_options

    check_system(options.on)
    asked = cluster_options(options.on_file, options.on_option, options.on)
    return SweepJobs(folder, options.on, asked, data_dir=options.data_dir)


def _advise(options: argparse.Namespace) -> int:
    if not math.isfinite(options.seconds) or options.seconds <= 0:
        raise RecipeError("--seconds must be a number above 0.", f"{options.seconds}", "60 is a usual choice.")
    advice = _find(options)
    from codistill.experiments.advice import as_plain, tables

    console = make_console(_WIDTH)
    for table in tables(advice):
        console.print(table)
    console.print(advice.sentence, highlight=False, markup=False)
    if options.json:
        write_atomically(options.json, json.dumps(as_plain(advice), indent=1).encode())
        print(f"written: {options.json}")
    return 130 if advice.findings is not None and advice.findings.interrupted else 0


def _find(options: argparse.Namespace) -> Advice:
    from codistill.experiments.advice import advise_summaries, is_summary, read_file

    tables = read_file(options.recipe)
    if is_summary(tables):
        from codistill.experiments.recipe import override

        for change in options.set:
            override(tables, change)
        return advise_summaries(tables)
    from codistill.experiments.advice import advise_recipe
    from codistill.experiments.recipe import read_recipe

    find = partial(
        advise_recipe, read_recipe(options.recipe, options.set), data_dir=options.data_dir, seconds=options.seconds
    )
    if options.quiet:
        return find()
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("reading the data") as status:
            return find(tell=status.update)
    said = -math.inf

    def tell(text: str) -> None:
        nonlocal said
        if time.monotonic() - said >= _SAID_EVERY:
            said = time.monotonic()
            print(f"advise: {text}", file=sys.stderr, flush=True)

    return find(tell=tell)


# --- What is done with runs.


def _compare(options: argparse.Namespace) -> int:
    from codistill.experiments.saved_run import read_summary
    from codistill.results.per_class import runs_lacking, runs_table
    from codistill.results.seeds import over_seeds_table
    from codistill.results.summary import comparison_table

    summaries = [read_summary(folder) for folder in options.runs]
    over_seeds = over_seeds_table(summaries, options.gain_over)
    found = {"": comparison_table(summaries), "-seeds": over_seeds, "-classes": runs_table(summaries)}
    tables = {name: table for name, table in found.items() if table is not None}
    console = make_console()
    for table in tables.values():
        console.print(table)
    for lack in () if "-classes" in tables else runs_lacking(summaries):
        print(lack)
    out: Path | None = options.out
    if out and out.suffix == ".tex":
        write_atomically(out, "\n".join(table.latex() for table in tables.values()).encode())
        print(f"table: {out}")
    elif out and out.suffix == ".csv":
        for name, table in tables.items():
            path = out.with_stem(f"{out.stem}{name}")
            whole = runs_table(summaries, None) if name == "-classes" else None  # a file has room for all classes
            write_atomically(path, (whole or table).csv().encode())
            print(f"table: {path}")
    elif out:
        from codistill.report.pages import write_comparison

        print(f"report: {write_comparison(summaries, out, over_seeds)}")
    return 0


def _report(options: argparse.Namespace) -> int:
    from codistill.experiments.run import REPORT
    from codistill.experiments.saved_run import read_summary
    from codistill.report.pages import write_report

    summary = read_summary(options.run)
    make_console().print(summary.table())
    print(f"report: {write_report(summary, options.out or options.run / REPORT)}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from codistill.experiments.networked import trained_at
    from codistill.experiments.run import trained_in
    from codistill.federation.onnx_file import save_onnx

    if options.file is not None:
        trained, done = trained_at(options.run, options.agent, options.file, data_dir=options.data_dir)
    else:
        trained, done = trained_in(options.run, options.agent, data_dir=options.data_dir, trust_code=options.trust_code)
    suffix = ".onnx" if options.onnx else ".codistill"
    path = options.out or Path(f"{options.agent}{suffix}")
    if options.onnx:
        save_onnx(trained, path)
    else:
        trained.save(path)
    rounds = "1 round" if done == 1 else f"{done} rounds"
    print(f"{trained.learner.describe()} of '{options.agent}' after {rounds} of {trained.protocol}: {path}")
    return 0


def _predict(options: argparse.Namespace) -> int:
    from codistill.core.text import csv_text
    from codistill.federation.onnx_file import predict_table, write_predictions

    predictions, notes = predict_table(options.model, options.table, label=options.label)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if options.out is None:
        print(csv_text(predictions), end="")
        return 0
    write_predictions(predictions, options.out)
    print(f"{len(predictions)} rows: {options.out}")
    return 0
