"""The arguments of every command that reads a recipe."""

from __future__ import annotations

import argparse


def add_trust_argument(parser: argparse.ArgumentParser, help: str = "") -> None:
    """Add --trust-code, for commands that inspect."""
    text = help or "run Python files that the recipe names; without it, none is run, and those needed are listed"
    parser.add_argument("--trust-code", action="store_true", help=text)


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
