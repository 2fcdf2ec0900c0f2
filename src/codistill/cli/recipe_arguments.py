"""The arguments of every command that reads a recipe."""

from __future__ import annotations

import argparse


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --set and --data-dir."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override a value of the recipe, e.g. protocol.rounds=5; may be repeated",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="folder of <name>.npz data sets (default: $CODISTILL_DATA)")
