"""The command `predict`: a table through a saved model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    text = "predict the rows of a table with a saved model"
    predict = commands.add_parser("predict", help=text, description=text)
    predict.add_argument(
        "model", type=Path, metavar="MODEL", help="a file of 'codistill export', of agent.save(path), or an .onnx file"
    )
    predict.add_argument("table", type=Path, metavar="TABLE", help="a .csv or .parquet file with a row per sample")
    predict.add_argument("--label", metavar="COLUMN", help="a column to leave out (default: as the model knows it)")
    predict.add_argument("--out", type=Path, metavar="FILE", help="a .csv or .parquet file (default: print as CSV)")
    predict.set_defaults(command=_predict)


def _predict(options: argparse.Namespace) -> int:
    from codistill.federation.table_predictions import predict_table, write_predictions
    from codistill.text import csv_text

    predictions, notes = predict_table(options.model, options.table, label=options.label)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if options.out is None:
        print(csv_text(predictions), end="")
        return 0
    write_predictions(predictions, options.out)
    print(f"{len(predictions)} rows: {options.out}")
    return 0
