"""Commands of a hub to an agent, as the agent reads them: all of one is checked before anything is executed.

Each check returns what the command says by name; it raises KeyError, TypeError or ValueError if the command is invalid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from codistill.runtimes.network.frame_header import Turn

_MOST = 1 << 62
_LONGEST = 1e12  # seconds of a run

Content = Mapping[str, Any]
Read = Callable[[Content, tuple[str, ...], int], dict[str, Any]]


def _run(content: Content, roster: tuple[str, ...], rounds: int) -> dict[str, Any]:
    phase, attempt = content["turn"]
    turn = Turn(integer(phase, rounds - 1), integer(attempt, (1 << 16) - 1))
    names = frozenset(map(str, list(content["present"])))
    present = tuple(name for name in roster if name in names)
    return {"turn": turn, "present": present, "samples": integer(content["samples"], _MOST)}


def _keep(content: Content, roster: tuple[str, ...], rounds: int) -> dict[str, Any]:
    return {"done": integer(content["round"], rounds), "store": content["store"] is True}


def _store(content: Content, roster: tuple[str, ...], rounds: int) -> dict[str, Any]:
    return {}


def _evaluate(content: Content, roster: tuple[str, ...], rounds: int) -> dict[str, Any]:
    part = None if content["samples"] is None else integer(content["samples"], _MOST)
    return {"part": part, "samples": integer(content["of"], _MOST), "views": content["views"] is True}


def _alone(content: Content, roster: tuple[str, ...], rounds: int) -> dict[str, Any]:
    return {"samples": integer(content["samples"], _MOST), "number": integer(content["number"], _MOST)}


WITH_ROUNDS: dict[str, Read] = {
    "run": _run, "keep": _keep, "store": _store, "evaluate": _evaluate, "alone": _alone,
}  # fmt: skip
WITHOUT_ROUNDS: dict[str, Read] = {"evaluate": _evaluate}  # besides `go`, which is not answered


def read_command(
    do: str, content: Content, roster: tuple[str, ...], rounds: int, *, asynchronous: bool
) -> tuple[dict[str, Any], int]:
    """What a command that is to be answered says, and its number."""
    number = integer(content["number"], _MOST)
    known = WITHOUT_ROUNDS if asynchronous else WITH_ROUNDS
    if do not in known:
        raise ValueError("unknown command")
    return known[do](content, roster, rounds), number


def read_go(content: Content) -> dict[str, Any]:
    """The command to start, or go on, in a run without rounds."""
    elapsed, part = content["elapsed"], content["part"]
    if type(elapsed) not in (int, float) or not (math.isfinite(elapsed) and 0 <= elapsed < _LONGEST):
        raise ValueError(f"{elapsed!r} instead of seconds")
    counts = {key: integer(content[key], _MOST) for key in ("samples", "evaluate_every", "store_every")}
    return {"elapsed": float(elapsed), "part": None if part is None else integer(part, _MOST), **counts}


def read_missed(content: Content, rounds: int) -> tuple[int, int, int]:
    """How many rounds were missed, the first and the last."""
    count, first, last = (integer(content[key], rounds) for key in ("count", "first", "last"))
    return count, first, last


def integer(value: Any, most: int) -> int:
    """An integer from 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} instead of an integer from 0 to {most}")
    return value
