"""The arguments of all commands."""

from __future__ import annotations

import argparse
from typing import NoReturn

from codistill.cli import (
    advise_command,
    catalogue_commands,
    certs_command,
    compare_command,
    data_command,
    export_command,
    network_commands,
    policy_commands,
    predict_command,
    restore_command,
    run_commands,
    sweep_command,
    theory_command,
)
from codistill.cli.console import print_results
from codistill.cli.recipe_arguments import add_recipe_arguments
from codistill.version import __version__

_EPILOG = """\
A first look:        codistill demo
Your own run:        codistill run RECIPE.toml --set protocol.rounds=5
One command:         codistill COMMAND --help
Exit codes:          0 done, 1 unexpected error, 2 recipe or arguments, 3 data, 4 model, 5 message,
                     6 checkpoint, 7 cannot write, 8 runtime, 9 network, 130 interrupted
"""


class Parser(argparse.ArgumentParser):
    """A parser that says how a field of a recipe is changed."""

    def error(self, message: str) -> NoReturn:
        """End with code 2."""
        if "unrecognized arguments" in message:
            message += "; a field of a recipe is changed by --set, as in --set protocol.rounds=3"
        super().error(message)


def make_parser() -> argparse.ArgumentParser:
    """The parser; each command sets `command`, a function of the parsed options that returns the exit code."""
    parser = Parser(
        prog="codistill",
        description="Federated learning by knowledge distillation, for agents that share neither data nor a model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"codistill {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run_commands.add_parsers(commands)
    advise_command.add_parser(commands)
    sweep_command.add_parser(commands)
    compare_command.add_parsers(commands)
    export_command.add_parser(commands)
    predict_command.add_parser(commands)
    catalogue_commands.add_parsers(commands)
    data_command.add_parser(commands)
    theory_command.add_parser(commands)
    network_commands.add_parsers(commands, add_recipe_arguments, print_results)
    restore_command.add_parser(commands)
    certs_command.add_parser(commands)
    policy_commands.add_parsers(commands)
    return parser
