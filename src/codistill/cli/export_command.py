"""The command `export`: the trained model of an agent, from the folder of a run to a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from codistill.cli.recipe_arguments import add_trust_argument


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    text = "write the trained model of an agent to a file, for codistill.load, 'codistill predict' or ONNX runtimes"
    export = commands.add_parser("export", help=text, description=text)
    export.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    export.add_argument("agent", metavar="AGENT", help="the agent's name")
    export.add_argument("--onnx", action="store_true", help="as an ONNX graph that takes samples as they are")
    export.add_argument("--out", type=Path, metavar="FILE", help="default: AGENT.codistill or AGENT.onnx")
    export.add_argument("--data-dir", metavar="DIR", help="folder of <name>.npz data sets (default: as in the run)")
    add_trust_argument(export)
    export.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> int:
    from codistill.experiments.export import trained_in
    from codistill.federation.onnx_file import save_onnx

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
