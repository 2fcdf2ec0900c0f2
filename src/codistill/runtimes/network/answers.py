"""Checks of what an agent answers the hub, before it is used; each raises `MessageError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from codistill.errors import MessageError
from codistill.results.outputs import View
from codistill.results.scores import ACCURACY, DEFAULT_SCORES, PREFIXES, SAFEGUARD_WEIGHT, Score
from codistill.runtimes.round_report import Report
from codistill.text import printable
from codistill.topology import HUB

_TEXT = 500  # characters of a reason or a remark
_MANY = 10_000  # entries of one report
_KINDS = 100  # names of measures in one report: each is a column of the metrics
_MOST = 1e100  # largest value of a measure: sums of many of them are still finite
_COUNT = 1 << 62  # more than the bytes, gradient steps and exchanges of an agent in a round
_COUNTED = ("sent", "received", "steps", "exchanges")
_TOLERANCE = 1e-3  # by which a probability may exceed its bounds, from rounding
_DO = "The sender must use the same version of codistill."
_COLUMNS = {"round", "agent", "present", "lies", "test_samples", *_COUNTED}  # of the metrics, beside scores


def report_content(report: Report) -> dict[str, Any]:
    """A report of one agent as plain values."""
    return {key: value for key, value in vars(report).items() if key not in ("present", "events", "waited")}


def checked_report(
    name: str, content: Any, roster: tuple[str, ...], scores: Sequence[Score] = DEFAULT_SCORES
) -> Report:
    """A report that is about its sender only; `scores` of the run are no measures of a protocol."""
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
    if not all(0 <= count < _COUNT for count in all_counts) or not all(abs(value) <= _MOST for _, _, value in measures):
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
    """Gradient steps of each round of training alone."""
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
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of a text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} instead of a count")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{type(value).__name__} instead of a number")
    return float(value)
