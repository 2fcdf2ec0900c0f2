"""What the commands print: tables, the results of a run, errors."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from codistill.core.errors import CodistillError, add_line, own_line

if TYPE_CHECKING:
    from rich.console import Console

    from codistill.results.summary import Summary


def make_console(width: int = 120) -> Console:
    """A console as wide as the terminal; of a fixed width where the output is not a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of text, without columns that are empty."""
    from codistill.results.tables import Table

    kept = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    table = Table([headings[i] for i in kept], "l" * len(kept), [[row[i] for i in kept] for row in rows])
    make_console().print(table)


def print_results(summary: Summary, complete: bool, folder: Path, again: str | None = None) -> int:
    from codistill.experiments.run import REPORT

    for table in summary.tables():
        make_console().print(table)
    print(f"report: {folder / REPORT}")
    if not complete:
        again = again or f"codistill resume {shlex.quote(str(folder))}"
        print(f"stopped after {summary.rounds} rounds; to continue: {again}")
        return 130
    return 0


def print_error(error: CodistillError, words: Mapping[str, str] = MappingProxyType({})) -> None:
    """What must hold, what was found, what to do, and where it happened; `words` replaces some of the advice."""
    do = error.do
    for usual, here in words.items():
        do = do.replace(usual, here)
    found = f"found: {error.found}\n" if error.found else ""
    print(f"error: {error.must}\n{found}to do: {do}", file=sys.stderr)
    for note in getattr(error, "__notes__", []):
        print(f"where: {note}", file=sys.stderr)


def print_unexpected(error: Exception) -> None:
    """The same for any other exception; its traceback is kept in a file."""
    add_line(error)
    text = str(error) if type(error).__name__ == "RemoteError" else f"{type(error).__name__}: {error}"
    print(
        "error: An unexpected error occurred in a model, a protocol or codistill itself.",
        f"found: {text}",
        f"to do: Check {'the line below, ' if own_line(error) else ''}the options of your model and your own code. If "
        f"none of it is the cause, report it with the traceback. {_keep_traceback(error)}",
        *(f"where: {note}" for note in getattr(error, "__notes__", []) if "Traceback" not in note),
        sep="\n",
        file=sys.stderr,
    )


def _keep_traceback(error: Exception) -> str:
    import tempfile
    import traceback

    try:
        with tempfile.NamedTemporaryFile("w", prefix="codistill-", suffix=".log", delete=False) as log:
            traceback.print_exception(error, file=log)
        return f"The full traceback is in {log.name}."
    except OSError as problem:
        return f"The full traceback could not be kept: {problem.strerror}."


def add_command(
    commands: argparse._SubParsersAction[Any], name: str, function: Any, text: str, description: str = ""
) -> argparse.ArgumentParser:
    """A command, done by a function of the parsed options that returns the exit code; it says `text` of itself."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=description or text)
    parser.set_defaults(command=function)
    return parser


def add_trust_argument(parser: argparse.ArgumentParser, help: str = "") -> None:
    text = help or "run Python files that the recipe names; without it, none is run, and those needed are listed"
    parser.add_argument("--trust-code", action="store_true", help=text)


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override a value of the recipe, e.g. protocol.rounds=5; may be repeated",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="folder of <name>.npz data sets (default: $CODISTILL_DATA)")
