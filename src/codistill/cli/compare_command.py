"""The command `compare`: several runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from codistill.cli.console import make_console


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    text = "several runs side by side"
    compare = commands.add_parser("compare", help=text, description=text)
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    compare.add_argument("--out", type=Path, metavar="PAGE.html", help="also write an HTML page")
    compare.set_defaults(command=_compare)


def _compare(options: argparse.Namespace) -> int:
    from codistill.experiments.run import read_summary
    from codistill.results.summary import comparison_table

    summaries = [read_summary(folder) for folder in options.runs]
    make_console().print(comparison_table(summaries))
    if options.out:
        from codistill.reports.pages import write_comparison

        print(f"report: {write_comparison(summaries, options.out)}")
    return 0
