"""The command `data`: the data sets at hand, or how a recipe partitions its data."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.cli.console import print_table
from codistill.cli.recipe_arguments import add_recipe_arguments, add_trust_argument
from codistill.errors import RecipeError

if TYPE_CHECKING:
    import numpy as np

    from codistill.data.columns import Columns

_PICTURES = ("png", "svg", "pdf")
_LONGEST_NAME = 20


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    text = "list the data sets at hand; or show how a recipe partitions its data"
    data = commands.add_parser("data", help=text, description=text)
    data.add_argument("recipe", type=Path, nargs="?", help="show this recipe's partition and graph of agents")
    data.add_argument("--out", type=Path, metavar="FILE", help="write the partition as a picture (.png, .svg, .pdf)")
    add_recipe_arguments(data)
    add_trust_argument(data)
    data.set_defaults(command=_data)


def _data(options: argparse.Namespace) -> int:
    if options.recipe is not None:
        return _show_partition(options)
    from codistill.data.loading import catalogue

    rows = [
        (d.name, d.where, f"{d.train:,}", f"{d.test:,}", " x ".join(map(str, d.shape)), str(d.classes), d.problem)
        for d in catalogue(options.data_dir)
    ]
    print_table(("data set", "where", "train", "test", "sample", "classes", "problem"), rows)
    print("More: put <name>.npz files in a folder and name it with --data-dir or CODISTILL_DATA.")
    return 0


def _show_partition(options: argparse.Namespace) -> int:
    import numpy as np

    from codistill.data.partition import counts
    from codistill.data.split import split_public
    from codistill.experiments.recipe import read_recipe
    from codistill.experiments.recipe_federation import agent_names, hand_out, load_data, topology_of
    from codistill.experiments.user_code import UnreadProtocol
    from codistill.files import write_atomically
    from codistill.topology.facts import figures

    recipe = read_recipe(options.recipe, options.set, run_code=options.trust_code)
    data = load_data(recipe, options.data_dir)
    public = None
    if recipe.data.public:
        public, data = split_public(data, recipe.data.public, recipe.seed)
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
        write_atomically(options.out, _picture(options.out, table, names, data.class_names))
        print(f"picture: {options.out}")
    return 0


def _picture(path: Path, table: np.ndarray, names: Sequence[str], class_names: Sequence[str]) -> bytes:
    kind = path.suffix.lower().removeprefix(".")
    if kind not in _PICTURES:
        raise RecipeError(
            f"A picture must be one of {', '.join(_PICTURES)}.", f"'{path}'", "Change the ending of its name."
        )
    from codistill.plots.partition_plot import draw_partition

    picture = io.BytesIO()
    draw_partition(table, names, class_names).savefig(picture, format=kind, bbox_inches="tight")
    return picture.getvalue()


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
    numbers = [name for name, kind, _ in described if kind == "number"]
    lines = [f"columns: {len(described)}, which become {missing.shape[1]} features"]
    if numbers:
        lines.append("  number: " + ", ".join(numbers))
    lines += [f"  {kind}: {name} ({how})" for name, kind, how in described if kind != "number"]
    shares = zip(columns.feature_names(), missing.mean(axis=0), strict=True)
    holes = [f"{name} {share:.0%}" for name, share in shares if share > 0]
    return "\n".join(lines + (["  missing: " + ", ".join(holes)] if holes else []))


def _short(names: Sequence[str]) -> list[str]:
    return [name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…" for name in names]
