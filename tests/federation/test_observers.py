"""Observers: what they are told, in which order, and that they can stop a run; the same in all three runtimes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import codistill as cd
from codistill.errors import RecipeError
from codistill.results.records import Evaluated, RoundEnded, RunFinished, RunStarted

RUNTIMES = ("simulation", "processes", "network")
QUIET: dict[str, Any] = {"progress": False, "alone": False}


def federation(protocol: cd.Protocol | None = None) -> cd.Federation:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] > 0).astype(int)
    parts = {"a": slice(0, 30), "b": slice(30, 60)}
    agents = [cd.Agent(name, LogisticRegression(), x[part], y[part]) for name, part in parts.items()]
    return cd.Federation(agents, protocol or cd.FedMD(), public=x[60:80], test=(x[80:], y[80:]), seed=3)


class Everything:
    """Keeps all that it is told, and where."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.told: list[tuple[str, Any]] = []
        self.processes: set[int] = set()
        self.stop_after = stop_after

    def _keep(self, method: str, record: Any) -> None:
        self.told.append((method, record))
        self.processes.add(os.getpid())

    def started(self, record: RunStarted) -> None:
        self._keep("started", record)

    def evaluated(self, record: Evaluated) -> None:
        self._keep("evaluated", record)

    def round_ended(self, record: RoundEnded) -> bool:
        self._keep("round_ended", record)
        return record.round == self.stop_after

    def finished(self, record: RunFinished) -> None:
        self._keep("finished", record)

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.told]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_all_four_methods_are_called_in_order_in_this_process(runtime: str) -> None:
    observer = Everything()
    result = federation().run(3, runtime=runtime, evaluate_every=2, observers=[observer], **QUIET)
    assert observer.methods == [
        "started", "round_ended", "evaluated", "round_ended", "evaluated", "round_ended", "finished",
    ]  # fmt: skip
    assert observer.processes == {os.getpid()}
    started, finished = observer.told[0][1], observer.told[-1][1]
    assert (started.protocol, started.agents, started.rounds, started.done) == ("fedmd", ("a", "b"), 3, 0)
    assert (finished.done, finished.rounds, finished.outcome) == (3, 3, "complete")
    rounds = [record for method, record in observer.told if method == "round_ended"]
    assert [row for record in rounds for row in record.rows] == result.rows
    last = [record for method, record in observer.told if method == "evaluated"][-1]
    assert {name: scores["accuracy"] for name, scores in last.scores.items()} == {
        row["agent"]: row["accuracy"] for row in result.rows if row["round"] == 3
    }
    assert (last.round, last.test_samples) == (3, 40)


class OnlyTheEnd:
    """Has one method, and no base class."""

    def __init__(self) -> None:
        self.outcome = ""

    def finished(self, record: RunFinished) -> None:
        self.outcome = record.outcome


def test_what_an_observer_lacks_is_not_called() -> None:
    observer = OnlyTheEnd()
    federation().run(1, runtime="simulation", observers=[observer], **QUIET)
    assert observer.outcome == "complete"


@pytest.mark.parametrize(
    ("observers", "found"),
    [([object()], "an object of object"), ([OnlyTheEnd], "the class OnlyTheEnd itself"), (5, "an object of int")],
)
def test_what_is_no_observer_is_an_error(observers: Any, found: str) -> None:
    with pytest.raises(RecipeError, match="bserver") as caught:
        federation().run(1, runtime="simulation", observers=observers, **QUIET)
    assert found in caught.value.found


def test_an_error_of_an_observer_ends_the_run_and_the_others_are_told() -> None:
    class Failing:
        def round_ended(self, record: RoundEnded) -> None:
            raise ZeroDivisionError

    end = OnlyTheEnd()
    with pytest.raises(ZeroDivisionError):
        federation().run(2, runtime="simulation", observers=[Failing(), end], **QUIET)
    assert end.outcome == "failed"


@pytest.mark.parametrize("protocol", [cd.FedMD(), cd.AvgKD()], ids=["hub", "peers"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_stopped_early_and_resumed_it_equals_a_run_that_was_not(
    runtime: str, protocol: cd.Protocol, tmp_path: Path
) -> None:
    """It stops after round 2, between two checkpoints, and still goes on from there."""
    whole = federation(protocol).run(5, runtime="simulation", folder=tmp_path / "whole", progress=False)
    options: dict[str, Any] = {"runtime": runtime, "folder": tmp_path / "run", "progress": False, "checkpoint_every": 4}
    observer = Everything(stop_after=2)
    stopped = federation(protocol).run(5, observers=[observer], **options)
    assert stopped.interrupted
    assert stopped.rows == whole.rows[:4]
    assert (observer.told[-1][1].done, observer.told[-1][1].outcome) == (2, "stopped")
    again = Everything()
    resumed = federation(protocol).run(5, resume=True, observers=[again], **options)
    assert not resumed.interrupted
    assert again.told[0][1].done == 2
    assert again.methods.count("round_ended") == 3
    for name in ("metrics.jsonl", "log.txt", "alone/metrics.jsonl", "outputs.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    probe = np.ones((1, 4), np.float32)
    for name, agent in whole.agents.items():
        np.testing.assert_array_equal(resumed.agents[name].decision_function(probe), agent.decision_function(probe))
