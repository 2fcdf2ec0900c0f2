"""The command line. Heavy imports happen inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from codistill.cli.console import print_error, print_unexpected
from codistill.cli.parser import make_parser
from codistill.errors import CodistillError


def _words_of(options: argparse.Namespace) -> dict[str, str]:
    """What an advice that is the same for all commands calls by another name for this one."""
    words = {}
    if hasattr(options, "log_format"):  # hub, join, up
        words["'codistill resume' then continues"] = "the same command then continues"
    if hasattr(options, "state"):
        words["--out"] = "--state"
    return words


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake is a short message and an exit code, never a traceback."""
    options = make_parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except CodistillError as error:
        print_error(error, _words_of(options))
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
