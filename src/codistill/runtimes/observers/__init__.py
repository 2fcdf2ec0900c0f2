"""Observers: everything that watches a run. No protocol knows that it is being measured.

An observer is any object with one or more of these methods; what it lacks is not called:

    started(record)      a `RunStarted`, before the first round
    evaluated(record)    an `Evaluated`, after every evaluation
    round_ended(record)  a `RoundEnded`; if it returns a true value, the run stops gently after this round
    finished(record)     a `RunFinished`, whatever has ended the run
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from codistill.errors import RecipeError
from codistill.results.records import Evaluated, RoundEnded, RunFinished, RunStarted

METHODS = ("started", "evaluated", "round_ended", "finished")


def check_observers(given: Any) -> list[Any]:
    """Observers as a list; each must have at least one of the methods."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | dict):
        raise RecipeError("Observers must be given as a list.", _shown(given), "Write observers=[observer].")
    observers = list(given)
    for observer in observers:
        if not any(callable(getattr(observer, name, None)) for name in METHODS) or isinstance(observer, type):
            raise RecipeError(
                f"An observer must be an object with at least one of the methods {', '.join(METHODS)}.",
                _shown(observer),
                "Define for example round_ended(self, record); see docs/how-to/observe.md.",
            )
    return observers


def _shown(given: Any) -> str:
    what = f"the class {given.__name__} itself" if isinstance(given, type) else f"an object of {type(given).__name__}"
    return f"{what}, {given!r}"[:120]


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Any]) -> None:
        self._observers = observers

    def started(self, record: RunStarted) -> None:
        """Tell all observers that the run begins."""
        self._call("started", record)

    def evaluated(self, record: Evaluated) -> None:
        """Tell all observers the scores."""
        self._call("evaluated", record)

    def round_ended(self, record: RoundEnded) -> bool:
        """Tell all observers that a round is over; returns whether one of them wants to stop."""
        return any(self._call("round_ended", record))  # any true value: comparisons of numpy give np.True_, not True

    def finished(self, record: RunFinished) -> None:
        """Tell all observers that the run is over, even if one of them raises an error."""
        with ExitStack() as stack:
            for observer in reversed(self._observers):
                if callable(getattr(observer, "finished", None)):
                    stack.callback(observer.finished, record)

    def _call(self, method: str, record: Any) -> list[Any]:
        return [
            getattr(observer, method)(record)
            for observer in self._observers
            if callable(getattr(observer, method, None))
        ]
