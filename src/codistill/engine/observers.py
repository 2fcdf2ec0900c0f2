"""Observers: everything that watches a run. No protocol knows that it is being measured.

An observer is any object with one or more of these methods; what it lacks is not called:

    started(record)      a `RunStarted`, before the first round
    evaluated(record)    an `Evaluated`, after every evaluation
    round_ended(record)  a `RoundEnded`; if it returns a true value, the run stops gently after this round
    finished(record)     a `RunFinished`, whatever has ended the run
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar

from codistill.core.errors import RecipeError
from codistill.core.settings import clear_argument_errors
from codistill.core.text import bytes_text, duration_text
from codistill.results.outputs import FeatureSpace, Outputs
from codistill.results.records import RoundEnded, Row, RunFinished, RunStarted
from codistill.results.scores import VALIDATION, find_score

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

    def tell(self, method: str, record: Any) -> list[Any]:
        """Call this method of all that have it; what they return."""
        return [
            getattr(observer, method)(record)
            for observer in self._observers
            if callable(getattr(observer, method, None))
        ]

    def finished(self, record: RunFinished) -> None:
        """Tell all observers that the run is over, even if one of them raises an error."""
        with ExitStack() as stack:
            for observer in reversed(self._observers):
                if callable(getattr(observer, "finished", None)):
                    stack.callback(observer.finished, record)


# --- Keeps every round's rows and events in memory.


class History:
    """All rows so far, one per round and agent; and the events of the rounds that were run here."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.events: list[str] = []
        self.outputs: Outputs | None = None
        self.features: list[FeatureSpace] = []

    def started(self, record: RunStarted) -> None:
        self.rows, self.outputs, self.features = list(record.rows), record.outputs, list(record.features)

    def round_ended(self, record: RoundEnded) -> None:
        """Keep the rows, the features where they are kept, and after the last round the outputs."""
        self.rows.extend(record.rows)
        self.events.extend(record.events)
        self.outputs = record.outputs
        self.features += [] if record.features is None else [record.features]


class TimeLimit:
    """Stops the run after the first round that ends later than `minutes` from now."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def round_ended(self, record: RoundEnded) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._end


class EarlyStopping:
    """Stops the run when a score has not improved in `patience` evaluations in a row.

    `score`: its name in the rows: "validation_accuracy" on the samples that agents hold out of their own, "accuracy" on
    the common test set, "own_accuracy" on the agents' own test data. Unset: the first score of the run, on validation
    samples if there are any (`Federation(validation=0.2)`), else on the common test set, else on own test data;
    `watched` is its name. `of`: its "mean" over the agents, or that of the "worst" agent: then the run goes on as long
    as that one gains. A gain of at most `min_delta` is none. `greater_is_better`: of a score of one's own. `best` is
    the value that was reached, in round `best_round`.
    """

    @clear_argument_errors
    def __init__(
        self,
        patience: int,
        *,
        score: str | None = None,
        of: str = "mean",
        min_delta: float = 0.0,
        greater_is_better: bool | None = None,
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise RecipeError("patience must be an integer of at least 1.", repr(patience), "Write EarlyStopping(5).")
        if of not in ("mean", "worst"):
            raise RecipeError("of must be 'mean' or 'worst'.", repr(of), 'Write of="worst".')
        if not min_delta >= 0:
            raise RecipeError("min_delta must be at least 0.", repr(min_delta), "Leave it out.")
        self.patience, self.score, self.of, self.min_delta = patience, score, of, min_delta
        self.greater_is_better = greater_is_better
        if score is not None:
            self._is_gain(score)
        self.best: float | None = None
        self.best_round = self._since = 0
        self.watched = score  # unset until the first evaluation
        self._scores: Sequence[str] = ()

    def started(self, record: RunStarted) -> None:
        """Begin anew; in a run that is resumed, with the rounds that were done before."""
        self.best, self.best_round, self._since = None, 0, 0
        by_trust = [f"{prefix}{name}" for prefix in (VALIDATION, "", "own_") for name in record.scores]
        self._scores = by_trust if self.score is None else [self.score]
        self.watched = self.score
        if self.greater_is_better is None and self.score is not None and self.score not in by_trust:
            raise RecipeError(
                "EarlyStopping must watch a score of the run.",
                f"'{self.score}'; the run has {', '.join(record.scores)}",
                f'Add it: Federation(scores=["{record.scores[0]}", "{self.score}"]).',
            )
        for t, rows in groupby(record.rows, key=itemgetter("round")):
            self._take(t, list(rows))

    def round_ended(self, record: RoundEnded) -> bool:
        """Whether it is time to stop."""
        self._take(record.round, record.rows)
        return self._since >= self.patience

    def _take(self, t: int, rows: Sequence[Row]) -> None:
        honest = [row for row in rows if not row.get("lies")]
        names = self._scores if self.watched is None else [self.watched]
        name = next((name for name in names if any(name in row for row in honest)), None)
        if name is None:
            self._check_validation(honest)
            return  # nobody was evaluated in this round
        self.watched = name
        values, greater = [row[name] for row in honest if name in row], self._is_gain(name)
        worst = min if greater else max
        value = worst(values) if self.of == "worst" else sum(values) / len(values)
        if self.best is None or (value - self.best if greater else self.best - value) > self.min_delta:
            self.best, self.best_round, self._since = value, t, 0
        else:
            self._since += 1

    def _check_validation(self, rows: Sequence[Row]) -> None:
        evaluated = [row for row in rows if "test_samples" in row]
        if (self.score or "").startswith(VALIDATION) and evaluated:
            raise RecipeError(
                "EarlyStopping must watch a score of the run.",
                f"'{self.score}', and no agent has validation samples",
                "Hold some out: Federation(validation=0.2), or in a recipe [evaluation] validation = 0.2.",
            )

    def _is_gain(self, name: str) -> bool:
        """Whether a score is better when it is greater."""
        known = find_score(name.removeprefix("own_").removeprefix(VALIDATION))
        if self.greater_is_better is not None:
            return self.greater_is_better
        if known is None:
            raise RecipeError(
                "EarlyStopping must know whether a score of your own is better when it is greater.",
                f"'{name}'",
                "Add greater_is_better=True, or False.",
            )
        return known.greater_is_better


# --- A live line while a run goes on; plain lines where there is no terminal.

_PLAIN_EVERY = 5.0  # seconds between plain lines, so that a log stays short


class Progress:
    """Round, agents, accuracy so far, bytes and time left, on standard error."""

    def __init__(self, title: str | None = None) -> None:
        self._title = title  # None: the protocol's name
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        self._score = ""
        self._scores: tuple[str, ...] = ("accuracy", "rmse")
        self._bytes = self._rounds = self._agents = self._present = self._start = 0
        self._spent = self._said = 0.0

    def started(self, record: RunStarted) -> None:
        self._title = self._title or record.protocol
        self._rounds, self._start = record.rounds, record.done
        self._agents = self._present = len(record.agents)
        self._scores = record.scores
        self._said, self._spent = time.monotonic(), 0.0
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(24),
                TextColumn("{task.fields[rest]}"),
            )
            self._bar = Bar(*columns, console=self._console, transient=True)
            head = self._head(record.done)
            self._task = self._bar.add_task(head, total=record.rounds, completed=record.done, rest="starting")
            self._bar.start()

    def round_ended(self, record: RoundEnded) -> None:
        self._bytes += sum(row["sent"] + row["received"] for row in record.rows)
        self._present = sum(bool(row["present"]) for row in record.rows)
        honest = [row for row in record.rows if not row.get("lies")]
        word = next((key for key in self._scores for row in honest if key in row), None)
        if word is not None:
            scores = [row[word] for row in honest if word in row]
            self._score = f"{word.replace('_', ' ')} {sum(scores) / len(scores):.3f} · "
        self._spent += record.seconds
        left = self._spent / (record.round - self._start) * (self._rounds - record.round)
        rest = f"{self._score}{bytes_text(self._bytes)} · {duration_text(left)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=record.round, description=self._head(record.round), rest=rest)
        elif time.monotonic() - self._said >= _PLAIN_EVERY or record.round in (self._start + 1, self._rounds):
            self._said = time.monotonic()
            self._print(f"{self._head(record.round)} · {rest}")
        for event in record.events[:3]:
            self._print(event, style="yellow")
        if len(record.events) > 3:
            self._print(f"round {record.round}: {len(record.events) - 3} more such events", style="yellow")

    def finished(self, record: RunFinished) -> None:
        """Leave a clean screen."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str, style: str | None = None) -> None:
        """One line, however long: a log is searched by lines."""
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def _head(self, done: int) -> str:
        agents = "1 agent" if self._agents == 1 else f"{self._agents} agents"
        if self._present < self._agents:
            agents = f"{self._present} of {agents}"
        return f"{self._title}: round {done}/{self._rounds} · {agents}"
