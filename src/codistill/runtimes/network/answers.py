"""What an agent answers the hub, held to its form before it is used; a `MessageError` otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from codistill.errors import MessageError
from codistill.results.outputs import View
from codistill.runtimes.host import Report
from codistill.text import printable
from codistill.topology import HUB

_TEXT = 500  # characters of a reason or a remark
_MANY = 10_000  # of them in one report
_KINDS = 100  # of measures in one report: each is a column of the metrics
_MOST = 1e100  # of any figure: sums of many of them are still numbers
_BYTES = 1 << 62  # that an agent can have sent in a round
_UNSURE = 1e-3  # by how much a probability may miss its bounds
_DO = "The sender must use the same version of codistill."
SCORES = ("accuracy", "own_accuracy", "rmse", "own_rmse")
_TAKEN = {"round", "agent", "present", "lies", "sent", "received", "test_samples", *SCORES}  # in a row of the metrics


def as_plain(report: Report) -> dict[str, Any]:
    """A report of one agent as it travels."""
    return {key: value for key, value in vars(report).items() if key not in ("present", "events", "waited")}


def checked_report(name: str, content: Any, roster: tuple[str, ...]) -> Report:
    """A report that speaks of its sender alone."""
    try:
        sent, received = ({who: int(count) for who, count in content[key].items()} for key in ("sent", "received"))
        refused = [(str(to), str(by), printable(str(why), _TEXT)) for to, by, why in content["refused"]]
        remarks = [(str(who), printable(str(text), _TEXT)) for who, text in content["remarks"]]
        measures = [(str(who), printable(str(what), 80), float(value)) for who, what, value in content["measures"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise MessageError("A report must have its form.", f"{error!r}"[:200], _DO) from None
    nodes = {*roster, HUB}
    about = {*sent, *received, *(who for who, _ in remarks), *(who for who, _, _ in measures)} - {name}
    strange = {node for to, by, _ in refused for node in (to, by)} - nodes
    foreign = [(to, by) for to, by, _ in refused if name not in (to, by)]
    if about or strange or foreign:
        raise MessageError("A report must speak of its sender.", f"{sorted(map(str, about)) or 'others'}"[:200], _DO)
    kinds = {what for _, what, _ in measures}
    if len(refused) + len(remarks) + len(measures) > _MANY or len(kinds) > _KINDS or kinds & _TAKEN:
        found = f"figures named {', '.join(sorted(kinds & _TAKEN))}" if kinds & _TAKEN else "too much"
        raise MessageError("A report must have its measure.", found, _DO)
    counts = (*sent.values(), *received.values())
    if not all(0 <= count < _BYTES for count in counts) or not all(abs(value) <= _MOST for _, _, value in measures):
        raise MessageError("A report must have its measure.", "figures that are none", _DO)
    return Report(sent, received, refused, remarks, measures)


def checked_scores(content: Any) -> dict[str, float]:
    """Figures between zero and one, or errors."""
    try:
        scores = {str(key): float(value) for key, value in content.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise MessageError("Scores must be figures.", f"{error!r}"[:200], _DO) from None
    for key, value in scores.items():
        most = 1.0 if "accuracy" in key else _MOST
        if key not in SCORES or not 0 <= value <= most:
            raise MessageError("Scores must be known and in their bounds.", f"{key[:40]} = {value}", _DO)
    return scores


def checked_view(arrays: Mapping[str, np.ndarray], labels: np.ndarray, classes: int) -> View | None:
    """What an agent answers on the common test set: means by class, and the classes that it chose."""
    if not arrays:
        return None
    mean, chosen = arrays.get("mean"), arrays.get("chosen")
    fits = set(arrays) <= {"mean", "chosen"} and mean is not None and mean.shape == (classes, classes)
    if fits and chosen is not None:
        fits = chosen.shape == labels.shape and chosen.dtype == np.uint8 and int(chosen.max(initial=0)) < classes
    if not fits or mean is None or mean.dtype != np.float64:
        raise MessageError("A view must fit the test set.", f"{ {k: a.shape for k, a in arrays.items()} }"[:200], _DO)
    of_samples = mean[np.unique(labels)]  # there is none for a class without test samples
    if not ((of_samples >= -_UNSURE) & (of_samples <= 1 + _UNSURE)).all():
        raise MessageError("A view must hold mean outputs.", "some that are no probabilities", _DO)
    return dict(arrays)
