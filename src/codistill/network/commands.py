"""Commands of a hub to its agents and the answers to them: each side checks what it reads before it uses any of it.

An agent reads a command by `read_*`, which return what it says by name and raise KeyError, TypeError or ValueError if
it is invalid. A hub reads an answer by `checked_*`, which raise `MessageError`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from codistill.core.errors import MessageError
from codistill.core.text import printable
from codistill.engine.exchange import Report
from codistill.network.frames import Turn
from codistill.results.outputs import View
from codistill.results.scores import ACCURACY, DEFAULT_SCORES, PREFIXES, SAFEGUARD_WEIGHT, Score
from codistill.topology import HUB

# --- What an agent reads --------------------------------------------------------------------------------

_MOST = 1 << 62
_LONGEST = 1e12  # seconds of a run

Content = Mapping[str, Any]


def read_command(
    do: str, content: Content, roster: tuple[str, ...], rounds: int, *, asynchronous: bool
) -> tuple[dict[str, Any], int]:
    """What a command that is to be answered says, and its number; without rounds there is only `evaluate`."""
    number = integer(content["number"], _MOST)
    said: dict[str, Any] = {}
    match do:
        case "evaluate":
            part = None if content["samples"] is None else integer(content["samples"], _MOST)
            said = {"part": part, "samples": integer(content["of"], _MOST), "views": content["views"] is True}
        case _ if asynchronous:
            raise ValueError("unknown command")
        case "run":
            phase, attempt = content["turn"]
            turn = Turn(integer(phase, rounds - 1), integer(attempt, (1 << 16) - 1))
            names = frozenset(map(str, list(content["present"])))
            present = tuple(name for name in roster if name in names)
            said = {"turn": turn, "present": present, "samples": integer(content["samples"], _MOST)}
        case "keep":
            said = {"done": integer(content["round"], rounds), "store": content["store"] is True}
        case "store":
            pass
        case "alone":
            said = {"samples": integer(content["samples"], _MOST), "number": number}
        case _:
            raise ValueError("unknown command")
    return said, number


def read_go(content: Content) -> dict[str, Any]:
    """The command to start or continue, in a run without rounds."""
    elapsed, part = content["elapsed"], content["part"]
    if type(elapsed) not in (int, float) or not (math.isfinite(elapsed) and 0 <= elapsed < _LONGEST):
        raise ValueError(f"{elapsed!r} instead of seconds")
    counts = {key: integer(content[key], _MOST) for key in ("samples", "evaluate_every", "store_every")}
    return {"elapsed": float(elapsed), "part": None if part is None else integer(part, _MOST), **counts}


def read_missed(content: Content, rounds: int) -> tuple[int, int, int]:
    count, first, last = (integer(content[key], rounds) for key in ("count", "first", "last"))
    return count, first, last


def integer(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} instead of an integer from 0 to {most}")
    return value


# --- What a hub reads -----------------------------------------------------------------------------------

_TEXT = 500  # characters of a reason or a remark
_MANY = 10_000  # entries of one report
_KINDS = 100  # names of measures in one report: each is a column of the metrics
_MOST_ANSWERED = 1e100  # largest value of a measure: sums of many of them are still finite
_COUNT = 1 << 62  # more than the bytes, gradient steps and exchanges of an agent in a round
_COUNTED = ("sent", "received", "steps", "exchanges")
_TOLERANCE = 1e-3  # by which a probability may exceed its bounds, from rounding
_DO = "The sender must use the same version of codistill."
_COLUMNS = {"round", "agent", "present", "lies", "test_samples", *_COUNTED}  # of the metrics, beside scores


def report_content(report: Report) -> dict[str, Any]:
    return {key: value for key, value in vars(report).items() if key not in ("present", "events", "waited")}


def checked_report(
    name: str, content: Any, roster: tuple[str, ...], scores: Sequence[Score] = DEFAULT_SCORES
) -> Report:
    """A report that is about its sender only; no measure may be named like one of the run's `scores`."""
    try:
        counts = {key: {who: _count(count) for who, count in content[key].items()} for key in _COUNTED}
        refused = [(_text(to), _text(by), printable(_text(why), _TEXT)) for to, by, why in content["refused"]]
        remarks = [(_text(who), printable(_text(text), _TEXT)) for who, text in content["remarks"]]
        measures = [
            (_text(who), printable(_text(what), 80), _number(value)) for who, what, value in content["measures"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise MessageError("A report must be well-formed.", f"{error!r}"[:200], _DO) from None
    nodes = {*roster, HUB}
    counted = {who for each in counts.values() for who in each}
    about = {*counted, *(who for who, _ in remarks), *(who for who, _, _ in measures)} - {name}
    strange = {node for to, by, _ in refused for node in (to, by)} - nodes
    foreign = [(to, by) for to, by, _ in refused if name not in (to, by)]
    if about or strange or foreign:
        raise MessageError("A report must be about its sender.", f"{sorted(map(str, about)) or 'others'}"[:200], _DO)
    kinds = {what for _, what, _ in measures}
    taken = kinds & (_COLUMNS | {*_keys(DEFAULT_SCORES), *_keys(scores)})
    if len(refused) + len(remarks) + len(measures) > _MANY or len(kinds) > _KINDS or taken:
        found = f"measures named {', '.join(sorted(taken))}" if taken else "too many entries"
        raise MessageError("A report must stay within its limits.", found, _DO)
    all_counts = [count for each in counts.values() for count in each.values()]
    if not all(0 <= count < _COUNT for count in all_counts) or not all(
        abs(value) <= _MOST_ANSWERED for _, _, value in measures
    ):
        raise MessageError("A report must stay within its limits.", "a number out of range", _DO)
    sent, received, steps, exchanges = counts.values()
    return Report(sent, received, refused, remarks, measures, steps=steps, exchanges=exchanges)


def checked_scores(content: Any, wanted: Sequence[Score] = DEFAULT_SCORES) -> dict[str, float]:
    """Scores that the run asks for, each within its bounds."""
    known = _keys(wanted)
    try:
        if len(content) > len(known):
            raise ValueError(f"{len(content)} scores")
        scores = {str(key): _number(value) for key, value in content.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise MessageError("Scores must be numbers.", f"{error!r}"[:200], _DO) from None
    for key, value in scores.items():
        if key not in known:
            names = ", ".join(score.name for score in wanted)
            raise MessageError(f"The scores of this run must be: {names}.", key[:40], _DO)
        if not known[key].lowest <= value <= known[key].highest:
            raise MessageError("Scores must be within their bounds.", f"{key} = {value}", _DO)
    return scores


def checked_steps(content: Any, rounds: int) -> list[int]:
    try:
        steps = [_count(count) for count in content]
    except TypeError as error:
        raise MessageError("Steps must be counts.", f"{error!r}"[:200], _DO) from None
    if len(steps) != rounds or not all(0 <= count < _COUNT for count in steps):
        raise MessageError(f"Steps must be one count for each of {rounds} rounds.", f"{steps[:8]}"[:200], _DO)
    return steps


def _keys(scores: Sequence[Score]) -> dict[str, Score]:
    """The scores by their keys in a row."""
    keys = {f"{prefix}{score.name}": score for score in scores for prefix in PREFIXES}
    return keys | {SAFEGUARD_WEIGHT: ACCURACY}  # a share, too


def checked_view(arrays: Mapping[str, np.ndarray], labels: np.ndarray, classes: int) -> View | None:
    """An agent's outputs on the common test set: means by true class, and the predicted classes."""
    if not arrays:
        return None
    if labels.ndim != 1:
        raise MessageError("Outputs are sent for classes only.", f"{[*arrays]}, of real values"[:200], _DO)
    mean, chosen = arrays.get("mean"), arrays.get("chosen")
    fits = set(arrays) <= {"mean", "chosen"} and mean is not None and mean.shape == (classes, classes)
    if fits and chosen is not None:
        fits = chosen.shape == labels.shape and chosen.dtype == np.uint8 and int(chosen.max(initial=0)) < classes
    if not fits or mean is None or mean.dtype != np.float64:
        raise MessageError("Outputs must fit the test set.", f"{ {k: a.shape for k, a in arrays.items()} }"[:200], _DO)
    of_samples = mean[np.unique(labels)]  # a class without test samples has no mean
    if not ((of_samples >= -_TOLERANCE) & (of_samples <= 1 + _TOLERANCE)).all():
        raise MessageError("Mean outputs must be probabilities.", "values outside of 0 to 1", _DO)
    return dict(arrays)


def _text(value: Any) -> str:
    return str(_of_type(value, str))


def _count(value: Any) -> int:
    return int(_of_type(value, int))


def _number(value: Any) -> float:
    return float(_of_type(value, int, float))


def _of_type(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"{type(value).__name__} instead of {kinds[-1].__name__}")
    return value


# --- Waiting for agents, and continuing without them ----------------------------------------------------

_LONGEST_WAIT = 10  # an agent is left out of at most 2^10 rounds at a time
_REFILL = 0.1  # part of the time of a completed round by which an agent's allowance grows again


@dataclass
class AgentStatus:
    """What the hub knows of an agent of the roster."""

    ready: bool = False  # it has joined: it knows the terms and has restored a state that counts
    unanswered: int | None = None  # the number of the command that it has not answered yet
    answered: int = 0  # the number of the last command that it has answered
    samples: int = 0
    trained: int = 0  # rounds that it has trained alone, as far as it has said
    progressed: float = 0.0  # when it last said so
    joining: float = 0.0  # seconds that it has been connected without being ready
    missed: tuple[int, int, int] | None = None  # rounds since it last took part: how many, the first and the last

    def progress(self, rounds: object, most: int) -> bool:
        """Note how many rounds it has trained alone; False unless it is more than before, and at most all of them."""
        if not isinstance(rounds, int) or isinstance(rounds, bool) or not self.trained < rounds <= most:
            return False
        self.trained, self.progressed = rounds, time.monotonic()
        return True

    def miss(self, number: int) -> None:
        count, first, _ = self.missed or (0, number, number)
        self.missed = count + 1, first, number

    def take_missed(self) -> tuple[int, int, int] | None:
        missed, self.missed = self.missed, None
        return missed


class Grace:
    """How long a round waits for agents that have just disconnected.

    An agent that comes and goes must not delay every round: waiting for it uses up its allowance of `seconds`, which
    grows again by a tenth of the time of each round that it completes.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left: dict[str, float] = {}  # when each disconnected
        self._allowance: dict[str, float] = {}  # where it is not all of `seconds`

    def disconnected(self, name: str) -> None:
        self._left[name] = time.monotonic()

    def returned(self, name: str) -> None:
        """An agent is ready, or has said that it leaves."""
        self._left.pop(name, None)

    def covers(self, name: str) -> bool:
        """Whether a round still waits for an agent."""
        left = self._left.get(name)
        in_time = left is not None and time.monotonic() - left < self._seconds
        return in_time and self._allowance.get(name, self._seconds) > 0

    def waited(self, names: Sequence[str], seconds: float) -> None:
        for name in names:
            self._allowance[name] = self._allowance.get(name, self._seconds) - seconds

    def completed(self, names: Sequence[str], seconds: float) -> None:
        for name in names:
            if name in self._allowance:
                self._allowance[name] = min(self._seconds, self._allowance[name] + _REFILL * seconds)


class Unreliable:
    """Agents that take part in rounds and do not complete them: each such round costs the others a deadline.

    After k of them in a row an agent is left out of the next 2^(k-1) - 1 rounds: of none after the first.
    """

    def __init__(self) -> None:
        self._failed: dict[str, int] = {}  # rounds in a row
        self._until: dict[str, int] = {}  # the first round in which it takes part again

    def ended(self, number: int, asked: Sequence[str], done: Sequence[str]) -> dict[str, int]:
        """A round has ended; returns who skips the next rounds, and how many."""
        left_out = {}
        for name in asked:
            self._failed[name] = 0 if name in done else self._failed.get(name, 0) + 1
            rounds = 2 ** min(self._failed[name] - 1, _LONGEST_WAIT) - 1 if self._failed[name] else 0
            self._until[name] = number + 1 + rounds
            if rounds:
                left_out[name] = rounds
        return left_out

    def among(self, names: Sequence[str], number: int) -> list[str]:
        return [name for name in names if self._until.get(name, 0) > number]


def missed_text(count: int, first: int, last: int) -> str:
    """'missed 55 rounds: 6 to 60'."""
    if count == 1:
        return f"missed round {first}"
    joint = f": {first} to {last}" if last - first + 1 == count else f" from {first} to {last}"
    return f"missed {count} rounds{joint}"
