"""Commands that list what is available and what to expect: `protocols`, `learners`, `data` and `theory`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.cli.console import add_command, add_recipe_arguments, add_trust_argument, make_console, print_table
from codistill.core.errors import RecipeError, nearest
from codistill.core.files import write_atomically, writing

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from codistill.data.columns import Columns
    from codistill.report.theory_plots import Toy
    from codistill.results.tables import Table

_PICTURES = ("png", "svg", "pdf")
_LONGEST_NAME = 20
_FEW = 10


def add_parsers(commands: argparse._SubParsersAction[Any]) -> None:
    text = "list all protocols: paper, what is exchanged, which models"
    protocols = add_command(commands, "protocols", _protocols, text)
    protocols.add_argument("name", nargs="?", help="show one protocol, with its hyper-parameters")
    add_command(commands, "learners", _learners, "list all learners that a recipe can name")

    text = "list the available data sets; or show a table, a folder of classes, or a recipe"
    data = add_command(commands, "data", _data, text)
    data.add_argument(
        "recipe", type=Path, nargs="?", metavar="RECIPE|FILE|FOLDER",
        help="a recipe: its partition and graph of agents; a .csv, .tsv or .parquet file: its columns, and settings "
        "that would make features of them; a folder: the texts or images of each class",
    )  # fmt: skip
    data.add_argument("--out", type=Path, metavar="FILE", help="write the partition as a picture (.png, .svg, .pdf)")
    add_recipe_arguments(data)
    add_trust_argument(data)

    text = "closed-form kernel analysis, with plots"
    told = f"{text}: the toy problem of figure 3 of the AKD paper, and what theory predicts"
    theory = add_command(commands, "theory", _theory, text, told)
    theory.add_argument("--rounds", type=int, default=250, help="rounds of the toy problem (default: 250)")
    theory.add_argument("--seed", type=int, default=0, help="seed of its data (default: 0)")
    theory.add_argument(
        "--out", type=Path, default=Path("theory"), metavar="DIR", help="folder of the plots (default: ./theory)"
    )


def _data(options: argparse.Namespace) -> int:
    if options.recipe is not None and options.recipe.is_dir():
        return _show_folder(options.recipe)
    if options.recipe is not None and options.recipe.suffix.lower() in (".csv", ".tsv", ".parquet"):
        return _show_table(options.recipe)
    if options.recipe is not None:
        return _show_partition(options)
    from codistill.data.datasets import catalogue

    rows = [
        (d.name, d.where, f"{d.train:,}", f"{d.test:,}", " x ".join(map(str, d.shape)), str(d.classes), d.problem)
        for d in catalogue(options.data_dir)
    ]
    print_table(("data set", "where", "train", "test", "sample", "classes", "problem"), rows)
    print("More: put <name>.npz files in a folder and name it with --data-dir or CODISTILL_DATA.")
    return 0


def _show_table(path: Path) -> int:
    """The columns of a file, and what to write in a recipe to make features of them."""
    from codistill.data.cells import SEPARATORS, find_separator
    from codistill.data.problems import find_problems, toml_advice
    from codistill.data.tables import read_file

    frame = read_file(path)
    problems = {each.column: each for each in find_problems(frame, {}, f"table {path}")}
    rows = []
    for name, values in frame.items():
        one = problems.get(str(name))
        cells = values.dropna()
        examples = ", ".join(str(value)[:_LONGEST_NAME] for value in cells.drop_duplicates()[:3]) if len(cells) else ""
        kind = "" if one is None else "drop" if one.drop else "" if one.kind is None else str(one.kind["kind"])
        found = "" if one is None else f"{one.found}{f' ({one.note})' if one.note else ''}"
        rows.append((str(name), kind or "number", f"{values.isna().mean():.0%}", examples, found))
    separator = ""
    if path.suffix.lower() != ".parquet":
        names = {character: name for name, character in SEPARATORS.items()}
        separator = f", separated by {names[find_separator(path)]}s"
    print(f"{path}: {len(frame):,} rows, {len(frame.columns)} columns{separator}")
    print_table(("column", "could be", "missing", "values", "what to know"), rows)
    advice = toml_advice([each for each in problems.values() if each.stops])
    print(f"\nIn a recipe, but for the label column and ids:\n\n{advice}" if advice else "\nAll columns are numbers.")
    return 0


def _show_folder(folder: Path) -> int:
    """The texts or images of each class in a folder."""
    from codistill.data.folders import list_folder, look_at

    found = list_folder(folder)
    rows = [
        (name, *(str(sum(label == number for _, label in part)) for part in (found.train, found.test)))
        for number, name in enumerate(found.classes)
    ]
    print(f"{folder}: {len(found.files):,} {found.kind if found.kind == 'images' else 'texts'}")
    if found.test:
        print_table(("class", "train", "test"), rows)
    else:
        print_table(("class", "files"), [row[:2] for row in rows])
    if found.others:
        print("left out: " + ", ".join(f"{count} of {ending}" for ending, count in sorted(found.others.items())))
    if found.kind == "images":
        about, problems = look_at(found.files)
        for what, values in (("sizes", [f"{w} x {h}" for _, (w, h) in about]), ("pixels", [mode for mode, _ in about])):
            common = Counter(values).most_common(_FEW)
            print(f"{what}: " + ", ".join(f"{value} ({count})" for value, count in common))
        if problems:
            print(f"unreadable: {len(problems)}")
            print("\n".join(f"  {path}: {' '.join(str(error).split())}" for path, error in problems[:_FEW]))
    print(f'\nIn a recipe:\n\n[data]\nkind = "{found.kind}"\nfolder = "{folder}"')
    if found.kind == "images" and len({size for _, size in about}) > 1:
        print("size = 64")
    return 0


def _show_partition(options: argparse.Namespace) -> int:
    import numpy as np

    from codistill.data.partition import counts
    from codistill.experiments.building import agent_names, hand_out, load_and_split, topology_of
    from codistill.experiments.recipe import read_recipe
    from codistill.experiments.user_code import UnreadProtocol
    from codistill.topology.graphs import figures

    recipe = read_recipe(options.recipe, options.set, run_code=options.trust_code)
    data, public = load_and_split(recipe, options.data_dir)
    names = agent_names(recipe)
    table = counts(data.y, hand_out(recipe, data), data.classes)
    print("private training samples by agent and class")
    print(partition_text(table, names, data.class_names))
    print(f"\npublic samples: {0 if public is None else len(public):,}; test samples: {len(data.x_test):,}")
    if data.columns is not None:
        print(columns_text(data.columns, np.isnan(data.x)))
    if recipe.topology is None and isinstance(recipe.protocol, UnreadProtocol):
        print(f"topology: as {recipe.protocol.place} says, which was not run; --trust-code runs it")
    elif (topology := topology_of(recipe)).links:
        print("topology: " + "; ".join(f"{name} {value}" for name, value in figures(topology).items()))
    if options.out:
        kind = options.out.suffix.lower().removeprefix(".")
        if kind not in _PICTURES:
            raise RecipeError(
                f"A picture must be one of {', '.join(_PICTURES)}.",
                f"'{options.out}'",
                "Change the ending of its name.",
            )
        from codistill.report.graphs import draw_partition

        _write(draw_partition(table, names, data.class_names), options.out, format=kind, bbox_inches="tight")
    return 0


def _write(figure: Figure, path: Path, **options: Any) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, **options)
    write_atomically(path, picture.getvalue())
    print(f"picture: {path}")


def partition_text(counts: np.ndarray, agent_names: Sequence[str], class_names: Sequence[str], width: int = 100) -> str:
    """The samples by agent and class as a table, with totals; many classes are folded at `width`."""
    by_class = [
        [name, *map(str, column), str(column.sum())] for name, column in zip(_short(class_names), counts.T, strict=True)
    ]
    columns = [*by_class, ["total", *map(str, counts.sum(axis=1)), str(counts.sum())]]
    names = ["agent", *_short(agent_names), "total"]
    first = [name.ljust(max(map(len, names))) for name in names]
    blocks = [first]
    for column in columns:
        cells = [text.rjust(max(map(len, column)) + 2) for text in column]
        if blocks[-1] is not first and len(blocks[-1][0] + cells[0]) > width:
            blocks.append(first)
        blocks[-1] = [line + cell for line, cell in zip(blocks[-1], cells, strict=True)]
    return "\n\n".join("\n".join(block) for block in blocks)


def columns_text(columns: Columns, missing: np.ndarray) -> str:
    """The kinds of a table's columns, and how much of the training samples' numbers is missing."""
    described = columns.describe()
    numbers = [f"{name}{f' ({how})' if how else ''}" for name, kind, how in described if kind == "number"]
    lines = [f"columns: {len(described)}, which become {missing.shape[1]} features"]
    if numbers:
        lines.append("  number: " + ", ".join(numbers))
    lines += [f"  {kind}: {name} ({how})" for name, kind, how in described if kind != "number"]
    shares = zip(columns.feature_names(), missing.mean(axis=0), strict=True)
    holes = [f"{name} {share:.0%}" for name, share in shares if share > 0]
    return "\n".join(lines + (["  missing: " + ", ".join(holes)] if holes else []))


def _short(names: Sequence[str]) -> list[str]:
    return [name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…" for name in names]


def _protocols(options: argparse.Namespace) -> int:
    from codistill.learners.ability import Ability
    from codistill.protocols import PROTOCOLS

    if options.name is not None:
        if options.name not in PROTOCOLS:
            raise RecipeError(
                "The protocol must be a known one.", f"'{options.name}'", nearest(options.name, PROTOCOLS)
            )
        protocol = PROTOCOLS[options.name]
        print(inspect.cleandoc(protocol.__doc__ or ""), "\n")
        fields = [
            (each.name, str(each.type), "unset" if each.default is None else str(each.default), each.metadata["help"])
            for each in dataclasses.fields(protocol)
        ]
        print_table(("hyper-parameter", "type", "default", "what it is"), fields)
        return 0
    rows = [
        (p.name, p.paper, p.exchanges, p.needs.words(), "no" if Ability.GRADIENTS in p.needs else "yes")
        for p in PROTOCOLS.values()
    ]
    print_table(("protocol", "paper", "what is exchanged", "ability needed", "black boxes"), rows)
    print("black boxes: models that only fit and predict (forests, boosting, kernels) may take part, also mixed")
    print("One protocol with its hyper-parameters: codistill protocols NAME")
    return 0


def _learners(options: argparse.Namespace) -> int:
    from codistill.learners.catalogue import entries

    print_table(("learner", "library", "what it is"), [(e.name, e.library, e.description) for e in entries()])
    print("Any other scikit-learn, XGBoost or LightGBM estimator by its full name, e.g. sklearn.svm.SVC.")
    return 0


# --- The command `theory`: closed-form kernel analysis of distillation between two agents, with plots.

_ROUNDS = (0, 1, 10, 50, 250)  # that the table shows, as far as they were run
_MOST_ROUNDS = 100_000
_CLOSE = 0.01
_DOTS_PER_INCH = 110


def _theory(options: argparse.Namespace) -> int:
    from codistill.report.theory_plots import SETTINGS, draw_ensemble, draw_projections, draw_toy, run_toy
    from codistill.theory.protocols import at_least
    from codistill.theory.two_agents import forecast_of

    at_least(options.rounds, 1)
    if options.rounds > _MOST_ROUNDS:
        raise RecipeError(
            f"Rounds must be at most {_MOST_ROUNDS:,}.",
            repr(options.rounds),
            "For limits, see codistill.theory.*_limit.",
        )
    if options.seed < 0:
        raise RecipeError("A seed must be at least 0.", repr(options.seed), "Choose another.")
    toys = [run_toy(setting, options.rounds, options.seed) for setting in SETTINGS]
    with writing(options.out):
        options.out.mkdir(parents=True, exist_ok=True)
    console = make_console()
    for toy in toys:
        console.print(_toy_table(toy))
        console.print("What theory predicts, before any round:")
        console.print(forecast_of(toy.problem).table())
        console.print()
    for name, figure in (
        ("toy.png", draw_toy(toys)),  # figure 3
        ("projections.png", draw_projections()),  # figure 1b
        ("ensemble.png", draw_ensemble()),  # figure 2b
    ):
        _write(figure, options.out / name, format="png", dpi=_DOTS_PER_INCH)
    return 0


def _toy_table(toy: Toy) -> Table:
    """The error of every method in some rounds, and when it reaches the centralised error."""
    from codistill.results.tables import Table

    last = len(toy.errors["AKD"]) - 1
    shown = sorted({*(t for t in _ROUNDS if t <= last), last})
    rows = []
    for name, errors in toy.errors.items():
        first = toy.first_within(name, _CLOSE)
        reached = "-" if name == "centralised" else "not reached" if first is None else f"from round {first}"
        rows.append([name, *(f"{errors[t]:.4f}" for t in shown), reached])
    headings = ["method", *(f"round {t}" for t in shown), f"within {_CLOSE:.0%} of centralised"]
    title = f"{toy.setting.title}, c = {toy.setting.c:g}: relative error on all training inputs"
    return Table(headings, "l" + "r" * (len(shown) + 1), rows, title=title)
