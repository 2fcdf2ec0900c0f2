"""Observers: told of everything, in order, in every runtime; one that wants to stop stops the run gently."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.naive_bayes import GaussianNB

import codistill as cd
from codistill.core.errors import RecipeError
from codistill.nodes.record import record_of
from codistill.results.records import Evaluated, RoundEnded, RunFinished, RunStarted

RUNTIMES = ("simulation", "processes", "network")
QUIET = {"progress": False, "alone": False, "workers": 2}
Digits = tuple[np.ndarray, np.ndarray]
in_every_runtime = pytest.mark.parametrize("runtime", RUNTIMES)
pytestmark = pytest.mark.usefixtures("time_limit")


def federation(digits: Digits) -> cd.Federation:
    """Two agents that share their outputs, with a hub whose state must survive."""
    x, y = digits[0].reshape(-1, 64), digits[1]
    agents = [
        cd.Agent("a", GaussianNB(), x[:40], y[:40]),
        cd.Agent("b", RandomForestClassifier(3), x[40:80], y[40:80]),
    ]
    return cd.Federation(agents, cd.FedMD(), public=x[80:120], test=(x[120:160], y[120:160]), classes=10)


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def started(self, record: RunStarted) -> None:
        self.told.append(("started", record))

    def evaluated(self, record: Evaluated) -> None:
        self.told.append(("evaluated", record))

    def round_ended(self, record: RoundEnded) -> None:
        self.told.append(("round_ended", record))

    def finished(self, record: RunFinished) -> None:
        self.told.append(("finished", record))


class StopAfter:
    """Wants to stop after a round, by any true value."""

    def __init__(self, last: int, answer: Any = True) -> None:
        self.last, self.answer = last, answer

    def round_ended(self, record: RoundEnded) -> Any:
        return self.answer if record.round == self.last else None


class Failing:
    """Fails in one of the methods."""

    def __init__(self, method: str) -> None:
        setattr(self, method, self._fail)

    def _fail(self, record: Any) -> None:
        raise ZeroDivisionError("an observer's own mistake")


@pytest.fixture(scope="module")
def whole(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The metrics of three rounds without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    federation(digits).run(3, runtime="simulation", folder=folder, **QUIET)
    return (folder / "metrics.jsonl").read_bytes()


@in_every_runtime
def test_every_method_is_called_with_its_record_and_in_order(runtime: str, digits: Digits) -> None:
    recorder = Recorder()
    result = federation(digits).run(2, runtime=runtime, evaluate_every=2, observers=[recorder], **QUIET)
    assert [name for name, _ in recorder.told] == ["started", "round_ended", "evaluated", "round_ended", "finished"]
    started, first, evaluated, second, finished = (record for _, record in recorder.told)
    assert replace(started, settings={}) == RunStarted("fedmd", ("a", "b"), rounds=2, scores=("accuracy",))
    chosen = {"protocol.name": "fedmd", "protocol.rounds": 2, "runtime.kind": runtime, "evaluation.every": 2, "seed": 0}
    assert {key: started.settings[key] for key in chosen} == chosen
    assert (first.round, second.round) == (1, 2)
    assert first.rows + second.rows == result.rows
    assert first.outputs is None
    assert second.outputs == evaluated.outputs == result.outputs is not None
    last = {row["agent"]: row for row in second.rows}
    assert (evaluated.round, evaluated.test_samples) == (2, 40)
    assert {name: score["accuracy"] for name, score in evaluated.scores.items()} == {
        name: row["accuracy"] for name, row in last.items()
    }
    assert first.seconds > 0
    assert (finished.done, finished.rounds, finished.outcome) == (2, 2, "complete")
    assert finished.seconds >= first.seconds + second.seconds - 0.01
    assert (finished.by_operator, finished.summary().rows) == (False, result.rows)
    assert not result.interrupted


def test_it_is_told_whether_an_operator_has_stopped_the_run(digits: Digits) -> None:
    class Interrupts:
        def round_ended(self, record: RoundEnded) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    for stops, by_operator in ((Interrupts(), True), (StopAfter(1), False)):
        recorder = Recorder()
        federation(digits).run(3, runtime="simulation", observers=[stops, recorder], **QUIET)
        _, finished = recorder.told[-1]
        assert (finished.done, finished.outcome, finished.by_operator) == (1, "stopped", by_operator)


def test_what_an_observer_lacks_is_not_called(digits: Digits) -> None:
    class OnlyTheEnd:
        outcome = ""

        def finished(self, record: RunFinished) -> None:
            self.outcome = record.outcome

    observer = OnlyTheEnd()
    federation(digits).run(1, runtime="simulation", observers=[observer], **QUIET)
    assert observer.outcome == "complete"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([object()], "at least one of the methods started, evaluated, round_ended, finished"),
        ([Recorder], "the class Recorder itself"),
        ([Recorder(), print], "docs/how-to/observe.md"),
        (Recorder(), "Observers must be given as a list"),
        ("progress", "Observers must be given as a list"),
    ],
    ids=["no-method", "class", "function", "no-list", "text"],
)
def test_what_is_no_observer_is_an_error_before_anything_runs(given: Any, said: str, digits: Digits) -> None:
    run = federation(digits)
    with pytest.raises(RecipeError, match="object|list") as caught:
        run.run(1, runtime="simulation", observers=given, **QUIET)
    assert said in str(caught.value)
    assert not any(record_of(agent).learned for agent in run.agents)


def test_the_page_that_the_error_names_is_there() -> None:
    assert (Path(__file__).parents[2] / "docs/how-to/observe.md").exists()


@in_every_runtime
def test_a_stop_is_gentle_and_resuming_equals_a_run_without_it(
    runtime: str, digits: Digits, tmp_path: Path, whole: bytes
) -> None:
    recorder = Recorder()
    options = {"runtime": runtime, "folder": tmp_path, "checkpoint_every": 3, **QUIET}
    result = federation(digits).run(3, observers=[StopAfter(1), recorder], **options)
    assert result.interrupted
    assert [name for name, _ in recorder.told] == ["started", "evaluated", "round_ended", "finished"]
    assert (recorder.told[-1][1].done, recorder.told[-1][1].outcome) == (1, "stopped")
    assert {row["round"] for row in result.rows} == {1}
    assert len(result.agents["a"].predict(digits[0][:5].reshape(5, 64))) == 5  # the models are at hand as they are
    assert whole.startswith((tmp_path / "metrics.jsonl").read_bytes())
    # The stop has written a checkpoint, though only every third round has one: round 1 is not run again.
    recorder = Recorder()
    resumed = federation(digits).run(3, resume=True, observers=[recorder], **options)
    assert not resumed.interrupted
    started = recorder.told[0][1]
    assert (started.done, list(started.rows)) == (1, result.rows)
    assert [record.round for name, record in recorder.told if name == "round_ended"] == [2, 3]
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


@in_every_runtime
def test_no_round_begins_after_max_minutes(runtime: str, digits: Digits, tmp_path: Path, whole: bytes) -> None:
    options = {"runtime": runtime, "folder": tmp_path, **QUIET}
    first = federation(digits).run(3, max_minutes=1e-9, **options)
    assert first.interrupted
    assert {row["round"] for row in first.rows} == {1}
    # Counted anew after each start, so that each has at least one round.
    second = federation(digits).run(3, max_minutes=1e-9, resume=True, **options)
    assert {row["round"] for row in second.rows} == {1, 2}
    last = federation(digits).run(3, max_minutes=60, resume=True, **options)
    assert not last.interrupted
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_max_minutes_do_not_end_the_training_alone(digits: Digits) -> None:
    result = federation(digits).run(3, runtime="simulation", max_minutes=1e-9, progress=False)
    assert result.interrupted
    assert result.alone_rows is not None
    assert {row["round"] for row in result.alone_rows} == {1, 2, 3}


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), "ten"])
def test_max_minutes_must_be_positive(minutes: Any, digits: Digits) -> None:
    with pytest.raises(RecipeError, match="max_minutes must be"):
        federation(digits).run(1, runtime="simulation", max_minutes=minutes, **QUIET)


@pytest.mark.parametrize(
    ("answer", "stops"), [(np.True_, True), (1, True), ("enough", True), (np.False_, False), (0, False), (None, False)]
)
def test_any_true_value_stops(answer: Any, stops: bool, digits: Digits) -> None:
    result = federation(digits).run(2, runtime="simulation", observers=[StopAfter(1, answer)], **QUIET)
    assert result.interrupted == stops
    assert max(row["round"] for row in result.rows) == (1 if stops else 2)


def test_who_wants_to_stop_does_not_keep_others_from_being_told(digits: Digits) -> None:
    recorder = Recorder()
    federation(digits).run(2, runtime="simulation", observers=[StopAfter(1), recorder], **QUIET)
    assert [name for name, _ in recorder.told] == ["started", "evaluated", "round_ended", "finished"]


@in_every_runtime
@pytest.mark.parametrize("method", ["started", "round_ended", "finished"])
def test_an_observer_that_fails_leaves_no_process_behind(runtime: str, method: str, digits: Digits) -> None:
    before, recorder = set(multiprocessing.active_children()), Recorder()
    with pytest.raises(ZeroDivisionError, match="an observer's own mistake"):
        federation(digits).run(1, runtime=runtime, observers=[Failing(method), recorder], **QUIET)
    assert set(multiprocessing.active_children()) == before
    # The others hear of the end in any case.
    assert [record.outcome for name, record in recorder.told if name == "finished"] == [
        "complete" if method == "finished" else "failed"
    ]


def rounds_of(*scores: float | None, lies: float = 0.0) -> list[RoundEnded]:
    """Rounds in which two honest agents, 0.1 apart, and one that lies have these mean scores; None: no evaluation."""
    ended = []
    for t, score in enumerate(scores, start=1):
        rows: list[dict[str, Any]] = [{"round": t, "agent": name} for name in "abc"]
        if score is not None:
            rows[0]["accuracy"], rows[1]["accuracy"] = score - 0.05, score + 0.05
            rows[2] |= {"accuracy": lies, "lies": True}
        ended.append(RoundEnded(t, rows, [], 0.0))
    return ended


def stops_after(observer: cd.EarlyStopping, rounds: list[RoundEnded], done: int = 0) -> int | None:
    """The round after which it stops a run, of which some rounds were done before."""
    before = tuple(row for each in rounds[:done] for row in each.rows)
    observer.started(RunStarted("fedmd", ("a", "b", "c"), len(rounds), done, before))
    return next((each.round for each in rounds[done:] if observer.round_ended(each)), None)


def test_early_stopping_counts_evaluations_without_a_gain() -> None:
    rounds = rounds_of(0.5, None, 0.6, 0.6, None, 0.59, 0.7, 0.65, lies=0.99)
    stopping = cd.EarlyStopping(2)
    assert stops_after(stopping, rounds) == 6
    assert (stopping.best_round, stopping.best) == (3, pytest.approx(0.6))
    assert stops_after(cd.EarlyStopping(3), rounds) is None
    assert stops_after(cd.EarlyStopping(1, min_delta=0.15), rounds) == 3
    assert stops_after(cd.EarlyStopping(2), rounds, done=4) == 6  # as if it had not been interrupted
    worst = cd.EarlyStopping(2, of="worst")
    assert (stops_after(worst, rounds), worst.best) == (6, pytest.approx(0.55))
    assert stops_after(cd.EarlyStopping(1, greater_is_better=False), rounds) == 3


def test_early_stopping_ends_a_run_which_can_be_resumed_with_more_patience(digits: Digits, tmp_path: Path) -> None:
    options: dict[str, Any] = {"runtime": "simulation", "folder": tmp_path / "run", **QUIET}
    stopping = cd.EarlyStopping(1, score="accuracy", min_delta=1.0)  # which nothing reaches
    result = federation(digits).run(4, observers=[stopping], **options)
    assert result.interrupted
    assert max(row["round"] for row in result.rows) == 2
    result = federation(digits).run(4, observers=[cd.EarlyStopping(3, min_delta=1.0)], resume=True, **options)
    assert max(row["round"] for row in result.rows) == 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"patience": 0}, "patience must be"),
        ({"patience": True}, "patience must be"),
        ({"patience": 1, "of": "best"}, "of must be"),
        ({"patience": 1, "min_delta": float("nan")}, "min_delta must be"),
        ({"patience": 1, "score": "own_cost"}, "must know whether .* 'own_cost'"),
        ({"patience": 1, "patiance": 2}, "patience"),
    ],
)
def test_early_stopping_refuses_what_means_nothing(options: dict[str, Any], text: str) -> None:
    with pytest.raises(cd.CodistillError, match=text):
        cd.EarlyStopping(**options)
