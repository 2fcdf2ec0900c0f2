"""What agents answer at the end of a run: the average output by true class, and where they disagree."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import codistill as cd
from codistill.core.errors import CheckpointError, MessageError
from codistill.engine.store import OUTPUTS, read_outputs
from codistill.results import outputs
from codistill.results.outputs import Outputs, collect, disagreement, view

# Four test samples, of the classes 0, 0, 1, 1 (none of class 2), and what three agents answer to them.
Y = np.array([0, 0, 1, 1])
A = np.array([[0.8, 0.2, 0.0], [0.6, 0.4, 0.0], [0.1, 0.9, 0.0], [0.3, 0.5, 0.2]], dtype=np.float32)
B = np.array([[0.4, 0.6, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.3, 0.2]], dtype=np.float32)
REAL = np.array([[5.0, -9.0, 1.0], [0.1, 0.2, 0.0], [-1.0, -2.0, -3.0], [0.0, 0.0, 7.0]], dtype=np.float32)  # 0 1 0 2

MEAN_A = [[0.7, 0.3, 0.0], [0.2, 0.7, 0.1], [np.nan] * 3]
MEAN_B = [[0.7, 0.3, 0.0], [0.25, 0.65, 0.1], [np.nan] * 3]
MEAN_REAL = [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [np.nan] * 3]
# Classes chosen: A 0 0 1 1, B 1 0 1 0, REAL 0 1 0 2. Of the pairs AB, AR, BR differ 2, 2, 2 and 3 of 3.
COUNTS = [
    [[2, 0, 0], [0, 2, 0], [0, 0, 0]],
    [[1, 1, 0], [1, 1, 0], [0, 0, 0]],
    [[1, 1, 0], [1, 0, 1], [0, 0, 0]],
]
APART = [2 / 3, (2 / 3 + 1) / 2, np.nan]


class Fixed(cd.Learner):
    """Answers sample number i by row i of a table, and counts how often it was asked."""

    def __init__(self, table: np.ndarray, probabilistic: bool = True) -> None:
        self.table, self.probabilistic, self.asked = table, probabilistic, 0

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None: ...

    def predict(self, x: np.ndarray) -> np.ndarray:
        self.asked += 1
        return self.table[x[:, 0].astype(int)]

    def state(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def restore(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


@dataclass(frozen=True, kw_only=True)
class Nothing(cd.Protocol):
    """Nobody does anything."""

    name = "nothing"

    def alone(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Broken(Nothing):
    """Fails in the last of three rounds."""

    async def round(self, me: cd.Agent, t: int) -> None:
        if t == 2:
            raise OSError("no power")


def federation(
    protocol: cd.Protocol | None = None, y: Any = Y, classes: int | None = 3, **options: Any
) -> cd.Federation:
    learners = {"a": Fixed(A), "b": Fixed(B), "real": Fixed(REAL, probabilistic=False)}
    own = Y if np.ndim(y) == 1 else np.zeros((4, 3))
    members = [cd.Agent(name, learner, np.arange(4.0)[:, None], own) for name, learner in learners.items()]
    return cd.Federation(members, protocol or Nothing(), test=(np.arange(4.0)[:, None], y), classes=classes, **options)


def check(found: Outputs | None, done: int) -> None:
    assert found is not None
    assert (found.round, found.agents, found.samples.tolist()) == (done, ("a", "b", "real"), [2, 2, 0])
    assert found.by_agent is not None
    np.testing.assert_allclose(found.by_agent, [MEAN_A, MEAN_B, MEAN_REAL], atol=1e-7)
    np.testing.assert_allclose(found.mean, np.mean([MEAN_A, MEAN_B, MEAN_REAL], axis=0), atol=1e-7)
    np.testing.assert_allclose(found.mean[:2].sum(axis=1), 1, atol=1e-7)
    np.testing.assert_allclose(found.disagreement, APART)
    assert found.mean_disagreement == pytest.approx(np.mean([2, 2, 2, 3]) / 3)
    assert found.confusion is not None
    np.testing.assert_array_equal(found.confusion, COUNTS)


def test_the_matrices_are_those_of_the_answers_and_equal_in_both_runtimes(tmp_path: Path) -> None:
    for runtime in ("simulation", "processes"):
        folder = tmp_path / runtime
        result = federation().run(2, runtime=runtime, workers=2, folder=folder, progress=False)
        check(result.outputs, 2)
        check(result.summary().outputs, 2)
        check(read_outputs(folder, 2), 2)
        assert {agent.learner.asked for agent in result.agents.values()} == {2}  # once per evaluation
        assert not {"mean", "chosen", "outputs"} & set(result.frame())
    assert (tmp_path / "simulation" / OUTPUTS).read_bytes() == (tmp_path / "processes" / OUTPUTS).read_bytes()


def test_byzantine_agents_do_not_count() -> None:
    lie = cd.Fault(kind="invert", agent="real")
    found = federation(faults=[lie]).run(1, runtime="simulation", progress=False).outputs
    assert found is not None
    assert found.agents == ("a", "b")
    np.testing.assert_allclose(found.mean, np.mean([MEAN_A, MEAN_B], axis=0), atol=1e-7)


def test_a_resumed_run_writes_them_in_its_last_round(tmp_path: Path) -> None:
    options: dict[str, Any] = {"runtime": "simulation", "folder": tmp_path, "progress": False}
    with pytest.raises(OSError, match="no power"):
        federation(Broken()).run(3, **options)
    assert not (tmp_path / OUTPUTS).exists()
    check(federation().run(3, resume=True, **options).outputs, 3)
    check(read_outputs(tmp_path, 3), 3)
    # Of a run that is done, they are read.
    check(federation().run(3, resume=True, **options).outputs, 3)
    # Of an earlier moment than the run has reached, they are not shown.
    assert read_outputs(tmp_path, 4) is None


@pytest.mark.parametrize("names", [{"a": A}, {"a": A, "b": B}, {"a": A, "b": B, "c": REAL, "d": B}])
def test_disagreement_by_a_plain_loop_over_pairs(names: dict[str, np.ndarray]) -> None:
    found = collect(1, {name: _view(answers) for name, answers in names.items()}, Y)
    assert found is not None
    if len(names) == 1:
        assert found.disagreement is None
        assert found.mean_disagreement is None
        return
    assert found.disagreement is not None
    for c in (0, 1):
        shares = []
        for sample in np.flatnonzero(c == Y):
            pairs = list(itertools.combinations([int(answers[sample].argmax()) for answers in names.values()], 2))
            shares.append(sum(first != second for first, second in pairs) / len(pairs))
        assert found.disagreement[c] == pytest.approx(np.mean(shares))


def test_disagreement_of_many() -> None:
    rng = np.random.default_rng(0)
    chosen, y = rng.integers(0, 7, (6, 50)), rng.integers(0, 7, 50)
    pairs = [chosen[i] != chosen[j] for i, j in itertools.combinations(range(6), 2)]
    expected = [np.mean(pairs, axis=0)[y == c].mean() for c in range(7)]
    np.testing.assert_allclose(disagreement(chosen, y, 7), expected)


def _view(answers: np.ndarray, **options: Any) -> Any:
    return view(answers, Y, **{"probabilistic": answers is not REAL, "agents": 2} | options)


def test_sums_of_probabilities_are_no_probabilities() -> None:
    """An ensemble that adds up the answers of two models names classes, as real values do."""
    np.testing.assert_array_equal(_view(A + B)["mean"][:2], [[1, 0, 0], [0.5, 0.5, 0]])


def test_real_values_that_look_like_probabilities_are_none() -> None:
    np.testing.assert_array_equal(_view(A, probabilistic=False)["mean"][:2], [[1, 0, 0], [0, 1, 0]])


def test_too_much_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "chosen" in _view(A, agents=5_000_000)
    assert "chosen" not in _view(A, agents=5_000_001)
    assert _view(np.eye(100)[:4]) is not None
    assert _view(np.eye(101)[:4]) is None
    bare = collect(1, {name: _view(A, agents=5_000_001) for name in "ab"}, Y)
    assert bare is not None
    assert bare.disagreement is None
    monkeypatch.setattr(outputs, "MOST_ENTRIES", 17)
    short = collect(1, {name: _view(A) for name in "ab"}, Y)
    assert short is not None
    assert short.by_agent is None
    again = Outputs.decode(short.encode())
    assert again.by_agent is None
    np.testing.assert_array_equal(again.mean, short.mean)


def test_real_values_have_no_classes(tmp_path: Path) -> None:
    result = federation(y=np.zeros((4, 3)), classes=None).run(1, folder=tmp_path, progress=False)
    assert "rmse" in result.frame()
    assert result.outputs is None
    assert not (tmp_path / OUTPUTS).exists()


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    federation().run(1, runtime="simulation", folder=tmp_path, progress=False)
    whole = (tmp_path / OUTPUTS).read_bytes()
    for damaged in (b"", whole[:-8], b"x" * 100, cd.Message.of(samples=np.ones(2), mean=np.ones((2, 3))).encoded):
        (tmp_path / OUTPUTS).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is corrupted"):
            read_outputs(tmp_path, 1)
    values = {"round": 1, "agents": ["a"]}
    for arrays in ({}, {"samples": np.ones(())}, {"samples": np.ones(0), "mean": np.ones((0, 0))}):
        with pytest.raises(MessageError, match="must have matching shapes"):
            Outputs.decode(outputs.encode(arrays, values))
