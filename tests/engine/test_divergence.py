"""The guard against divergence: around `me.learner` in every round, whatever the protocol."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import codistill as cd
from codistill.engine.guard import GuardedLearner
from codistill.protocol import Agent, Protocol

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)


@dataclass(frozen=True, kw_only=True)
class Steps(Protocol):
    """Takes the steps that a test gives it, and keeps what it saw."""

    name = "steps"
    needs = cd.Ability.LABELS
    topology = "silent"

    async def round(self, me: Agent, t: int) -> None:
        SEEN.append(STEP(me, t))


SEEN: list[Any] = []
STEP: Any = None


def run(step: Any, model: Any, folder: Path | None = None, rounds: int = 1, y: Any = Y) -> Agent:
    """Run rounds of one agent whose round is `step`."""
    global STEP
    SEEN.clear()
    STEP = step
    agent = cd.Agent("a", model, X, y)
    cd.Federation([agent], Steps()).run(rounds, runtime="simulation", alone=False, progress=False, folder=folder)
    return agent


def network(loss: str = "cross_entropy", outputs: int = 2) -> cd.TorchLearner:
    torch.manual_seed(0)
    return cd.TorchLearner(nn.Linear(3, outputs), optimiser="sgd", lr=0.1, loss=loss)


def weights(agent: Agent) -> np.ndarray:
    return agent.learner.weights()["weight"]


def scaled(me: Agent, factor: float) -> None:
    me.learner.module.weight.data.mul_(factor)  # type: ignore[attr-defined]


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e9])
def test_outputs_that_diverge_send_the_model_back_to_the_start_of_the_round(factor: float, tmp_path: Path) -> None:
    def step(me: Agent, t: int) -> Any:
        first = me.learner(torch.from_numpy(X)).detach()
        scaled(me, factor)
        return first, me.learner(torch.from_numpy(X)).detach(), me.diverged

    start = network().weights()["weight"]
    agent = run(step, network(), tmp_path / "run")
    first, then, diverged = SEEN[0]
    assert diverged
    torch.testing.assert_close(first, then, rtol=0, atol=0)
    np.testing.assert_array_equal(weights(agent), start)
    assert (tmp_path / "run" / "log.txt").read_text().count("'a': diverged: its outputs") == 1


@pytest.mark.parametrize("loss", [float("nan"), 1e10])
def test_a_step_down_a_loss_that_diverges_is_left_out(loss: float) -> None:
    def step(me: Agent, t: int) -> None:
        f = me.learner(torch.from_numpy(X))
        me.learner.descend(f.sum() * 0 + loss)

    agent = run(step, network())
    np.testing.assert_array_equal(weights(agent), network().weights()["weight"])
    assert agent.diverged


def test_weights_that_are_not_finite_never_leave_the_round() -> None:
    """A last step left them so: they are checked before they are sent, and at the end of the round."""

    def step(me: Agent, t: int) -> np.ndarray:
        me.learner(torch.from_numpy(X))
        scaled(me, float("nan"))
        sent = me.learner.weights()["weight"]
        scaled(me, float("nan"))
        return sent

    agent = run(step, network())
    start = network().weights()["weight"]
    np.testing.assert_array_equal(SEEN[0], start)
    np.testing.assert_array_equal(weights(agent), start)


def spoil(me: Agent) -> None:
    with torch.no_grad():
        me.learner.parameters()["weight"].fill_(float("inf"))


def load(me: Agent) -> None:
    me.learner.load({"weight": np.full((2, 3), np.nan, dtype=np.float32)})


@pytest.mark.parametrize("change", [spoil, load])
def test_a_change_after_weights_were_found_finite_is_found_as_well(change: Any) -> None:
    """Through something that was handed out, or by weights that are loaded; at the end of the round, or before."""

    def step(me: Agent, t: int) -> Any:
        me.learner.descend(me.learner(torch.from_numpy(X)).sum())
        me.learner.weights()  # found to be finite
        change(me)
        return me.learner.weights()["weight"] if t == 0 else None

    start = network().weights()["weight"]
    agent = run(step, network(), rounds=1)
    np.testing.assert_array_equal(SEEN[0], start)
    np.testing.assert_array_equal(weights(agent), start)
    agent = run(lambda me, t: (step(me, 1), None), network(), rounds=1)
    np.testing.assert_array_equal(weights(agent), start)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_a_model_that_returns_goes_on_as_if_nothing_had_been(optimiser: str) -> None:
    """Weights, moments, the number of steps and the learning rate are those of the start of the round."""
    wanted = torch.nn.functional.one_hot(torch.from_numpy(Y)).float()

    def learner() -> cd.TorchLearner:
        torch.manual_seed(0)
        return cd.TorchLearner(nn.Linear(3, 2), optimiser=optimiser, lr=0.1, momentum=0.9)

    def good(me: Agent) -> None:
        me.learner.descend(me.learner.loss(me.learner(torch.from_numpy(X)), wanted))

    def bad(me: Agent, t: int) -> None:
        good(me)
        if t == 1:
            me.learner.set_lr(0.001)
            good(me)
            scaled(me, float("nan"))

    interrupted = run(bad, learner(), rounds=3)
    plain = run(lambda me, t: good(me), learner(), rounds=2)  # the second of three rounds has left nothing behind
    np.testing.assert_array_equal(weights(interrupted), weights(plain))
    ours, theirs = (agent.learner.state()["optimiser"] for agent in (interrupted, plain))
    assert [group["lr"] for group in ours["param_groups"]] == [group["lr"] for group in theirs["param_groups"]]
    for mine, other in zip(ours["state"].values(), theirs["state"].values(), strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_the_next_round_starts_afresh() -> None:
    def step(me: Agent, t: int) -> tuple[bool, bool]:
        before = me.diverged
        me.learner(torch.from_numpy(X))
        if t == 0:
            scaled(me, float("inf"))
            me.learner(torch.from_numpy(X))
        return before, me.diverged

    run(step, network(), rounds=2)
    assert SEEN == [(False, True), (False, False)]


def test_real_values_of_any_scale_do_not_diverge() -> None:
    def step(me: Agent, t: int) -> bool:
        me.learner(torch.from_numpy(X))
        scaled(me, 1e9)
        me.learner(torch.from_numpy(X))
        return me.diverged

    run(step, network("squared", 1), y=X[:, :1])
    assert SEEN == [False]


def test_a_black_box_has_no_guard_and_a_guard_passes_everything_else_on() -> None:
    run(lambda me, t: type(me.learner), LogisticRegression())
    assert SEEN[0] is not GuardedLearner

    def step(me: Agent, t: int) -> Any:
        me.learner.epochs = 7  # type: ignore[attr-defined]
        return type(me.learner), me.learner.describe(), copy.deepcopy(me.learner).describe()

    agent = run(step, network())
    assert [(GuardedLearner, "Linear", "Linear")] == SEEN
    assert agent.learner.epochs == 7  # type: ignore[attr-defined]
    assert isinstance(agent.learner, cd.TorchLearner)


def test_an_averaged_model_that_diverges_does_not_ruin_the_others() -> None:
    """FedAvg: the step size of one agent is far too large; what it sends is finite all the same."""
    agents = [cd.Agent(f"a{n}", cd.TorchLearner(nn.Linear(3, 2), optimiser="sgd", lr=lr), X, Y)
              for n, lr in enumerate((0.1, 1e30))]  # fmt: skip
    result = cd.Federation(agents, cd.FedAvg(local_steps=5)).run(3, runtime="simulation", alone=False, progress=False)
    assert all(np.isfinite(weights(agent)).all() for agent in agents)
    assert len(result.rows) == 6


ONE_CLASS = np.tile([[1.0, 0.0]], (len(X), 1)).astype(np.float32)


def test_a_model_that_cannot_be_fitted_to_what_was_received_is_fitted_to_its_own_labels(tmp_path: Path) -> None:
    """A logistic regression needs two classes; a Byzantine model may predict one only."""

    def step(me: Agent, t: int) -> None:
        me.learner.fit(me.shard.x, ONE_CLASS)

    agent = run(step, LogisticRegression(), tmp_path)
    expected = LogisticRegression().fit(X, Y).predict_proba(X)
    np.testing.assert_allclose(agent.learner.predict(X), expected, atol=1e-6)
    log = (tmp_path / "log.txt").read_text()
    assert "could not be fitted to what it received, and is fitted to its own labels" in log


def test_an_agent_with_one_class_takes_part_with_any_model_and_learns_the_other_class() -> None:
    """Its logistic regression cannot be fitted in round 0, travels as a constant, and is fitted in round 1."""
    one_class = Y == 0
    agents = [
        cd.Agent("both", LogisticRegression(), X, Y),
        cd.Agent("one", LogisticRegression(), X[one_class], Y[one_class]),
    ]
    result = cd.Federation(agents, cd.AvgKD(), test=(X, Y)).run(2, runtime="simulation", alone=False, progress=False)
    assert not result.agents["one"].learner.is_constant
    assert result.agents["one"].learner.predict(X)[:, 1].max() > 0


class _Broken(LogisticRegression):  # type: ignore[misc]
    def fit(self, x: Any, y: Any, sample_weight: Any = None) -> Any:
        raise OSError("out of order")


def test_a_model_that_cannot_be_fitted_to_its_own_labels_is_an_error() -> None:
    def step(me: Agent, t: int) -> None:
        me.learner.fit(me.shard.x, me.shard.targets)

    with pytest.raises(OSError, match="out of order"):
        run(step, _Broken())


def test_a_network_that_diverges_while_it_is_fitted_stays_as_it_was(tmp_path: Path) -> None:
    def step(me: Agent, t: int) -> None:
        me.learner.fit(me.shard.x, np.full((len(X), 1), 1e300))
        assert me.diverged

    model = network("squared", outputs=1)
    before = model.weights()["weight"].copy()
    agent = run(step, model, tmp_path, y=X[:, :1])
    np.testing.assert_array_equal(weights(agent), before)
    assert "diverged" in (tmp_path / "log.txt").read_text()
