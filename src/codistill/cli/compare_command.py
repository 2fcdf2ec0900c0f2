"""The commands `compare` and `report`: several runs side by side, and the page about one run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from codistill.cli.console import make_console


def add_parsers(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the command line."""
    text = "several runs side by side"
    compare = commands.add_parser("compare", help=text, description=text)
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    compare.add_argument("--out", type=Path, metavar="PAGE.html", help="also write an HTML page")
    compare.set_defaults(command=_compare)

    text = "write the report of a run, from a recipe or from Python, and print its table"
    report = commands.add_parser("report", help=text, description=text)
    report.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, finished or not")
    report.add_argument("--out", type=Path, metavar="PAGE.html", help="the page (default: report.html in the folder)")
    report.set_defaults(command=_report)


def _compare(options: argparse.Namespace) -> int:
    from codistill.experiments.saved_run import read_summary
    from codistill.results.comparison_table import comparison_table

    summaries = [read_summary(folder) for folder in options.runs]
    make_console().print(comparison_table(summaries))
    if options.out:
        from codistill.reports.pages import write_comparison

        print(f"report: {write_comparison(summaries, options.out)}")
    return 0


def _report(options: argparse.Namespace) -> int:
    from codistill.experiments.run import REPORT
    from codistill.experiments.saved_run import read_summary
    from codistill.reports.pages import write_report

    summary = read_summary(options.run)
    make_console().print(summary.table())
    print(f"report: {write_report(summary, options.out or options.run / REPORT)}")
    return 0
