"""The command line. Heavy imports happen inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from codistill.cli import certs_command, data_commands, network_commands, policy_commands, run_commands
from codistill.cli.console import print_error, print_unexpected
from codistill.core import __version__
from codistill.core.errors import CodistillError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake is a short message and an exit code, never a traceback."""
    options = make_parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except CodistillError as error:
        words = {}  # what an advice that is the same for all commands calls by another name for this one
        if hasattr(options, "log_format"):  # hub, join, up
            words["'codistill resume' then continues"] = "the same command then continues"
        if hasattr(options, "state"):
            words["--out"] = "--state"
        print_error(error, words)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "Stopped at once. To continue from the last checkpoint: codistill resume RUN; or, between machines, the "
            "same command again.",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:  # a defect of codistill, or of a user's model or protocol
        print_unexpected(error)
        return 1


# --- The arguments of all commands.

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
    for module in (run_commands, data_commands, network_commands, certs_command, policy_commands):
        module.add_parsers(commands)
    return parser
