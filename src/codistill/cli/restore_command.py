"""The command `restore`: the states of an agent on its disk, and the one that it begins with when it joins next."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.errors import CheckpointError

if TYPE_CHECKING:
    from codistill.runtimes.network.state_store import StateFile


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    text = "list the states of an agent on this machine, or choose one with which it begins when it joins next"
    parser = commands.add_parser("restore", help=text, description=text)
    parser.add_argument(
        "folder", type=Path, help="the agent's folder: --state of 'codistill join', by default agents/NAME"
    )
    parser.add_argument("--round", type=int, metavar="N", help="begin with the state of this round")
    parser.add_argument("--time", metavar="TIME", help="the one of this time, as listed, or its beginning")
    parser.add_argument("--run", metavar="RUN", help="the one of this run, as listed, or its beginning")
    parser.set_defaults(command=_restore)


def _restore(options: argparse.Namespace) -> int:
    from codistill.files import locked
    from codistill.runtimes.network.state_store import START, find_states, read_state, write_state

    folder: Path = options.folder
    states = list(find_states(folder)) if folder.is_dir() else []
    if not states:
        raise CheckpointError(
            f"{folder} must be the folder of an agent that has taken part under a hub.",
            "no states of it" if folder.is_dir() else "no such folder",
            "Give the folder that 'codistill join' has as --state, by default agents/NAME.",
        )
    chosen = [state for state in states if _is_chosen(state, options)]
    if options.round is None:
        print("\n".join(map(_line, chosen)))
        return 0
    if not chosen:
        raise CheckpointError(
            "The state to begin with must be on the disk.",
            f"none of round {options.round}",
            f"List them: codistill restore {folder}",
        )
    with locked(folder):  # not while the agent takes part
        newest = max(chosen, key=lambda state: state.time)
        data = read_state(newest.path)
        if data is None:
            raise CheckpointError(f"{newest.path} must be as it was written.", "it is damaged", "Choose another one.")
        write_state(folder / START, data)
    print(f"{_line(newest)}\nThe agent begins with this state when it joins next. No other state was removed.")
    return 0


def _is_chosen(state: StateFile, options: argparse.Namespace) -> bool:
    by_round = options.round is None or state.done == options.round
    return by_round and state.time.startswith(options.time or "") and state.run.startswith(options.run or "")


def _line(state: StateFile) -> str:
    where = "in use" if state.back_to is None else f"set aside, went on from round {state.back_to}"
    return f"round {state.done:>6}  {state.time}  run {state.run[:8]}  {where}"
