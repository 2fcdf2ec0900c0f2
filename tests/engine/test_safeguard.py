"""The safeguard: the weight by its formula, its bounds, and that it stands around every protocol alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression
from torch import nn

import codistill as cd
from codistill.core.errors import RecipeError
from codistill.engine import safeguard as weights
from codistill.engine.safeguard import as_safeguard
from codistill.nodes.agent import twin_of
from codistill.nodes.record import record_of

QUIET = {"progress": False}


# --- the weight -----------------------------------------------------------------------------------


def test_the_weight_is_the_mean_of_the_posterior() -> None:
    """By hand: π(w) exp(-Σ loss), normalised; its mean over the grid 0, .05, ..., 1."""
    own = np.array([[0.6, 0.4], [0.3, 0.7], [0.5, 0.5]])
    taught = np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])
    y = np.array([0, 1, 0])
    total = mean = 0.0
    spread = {w: (1 - w + 0.025) ** 8 for w in np.linspace(0, 1, 21)}
    above = 0.5 * 3 / (3 + 5)  # three samples
    for w, shape in spread.items():
        prior = above * shape / sum(spread.values()) + (1 - above if w == 0 else 0.0)
        likelihood = 1.0
        for mine, theirs, label in zip(own, taught, y, strict=True):
            p = (1 - w) * mine[label] + w * theirs[label]
            likelihood *= 0.99 * p + 0.01 / 2
        total += prior * likelihood
        mean += prior * likelihood * w
    assert weights.posterior_mean(weights.log_losses(own, taught, y), 9.0) == pytest.approx(mean / total, rel=1e-12)


@pytest.mark.parametrize("shrinkage", [1.0, 9.0])
def test_half_of_the_prior_or_more_is_at_the_own_model(shrinkage: float) -> None:
    many, five = weights.prior(shrinkage, 10**9), weights.prior(shrinkage, 5)
    for prior in (many, five):
        assert prior.sum() == pytest.approx(1.0)
        assert prior[0] >= 0.5
    assert five @ weights.GRID == pytest.approx(many @ weights.GRID / 2)  # n / 2(n + 5) instead of 1 / 2 is spread
    # With samples that do not tell the models apart, the weight is the mean of the prior; without any, it is 0.
    assert weights.posterior_mean(np.ones((21, 5)), shrinkage) == pytest.approx(float(five @ weights.GRID))
    assert weights.posterior_mean(np.zeros((21, 0)), shrinkage) == 0.0


def test_taught_answers_are_adapted_to_how_frequent_the_classes_are_at_the_agent() -> None:
    """Others have seen class 1 in every second sample, the agent in one of ten; by hand, b solves the fixed point."""
    rng = np.random.default_rng(0)
    taught = rng.dirichlet([1.0, 1.0], 400)
    frequencies = np.array([0.9, 0.1])
    factors = weights.class_factors(taught, frequencies)
    answers = weights.adapted(taught, factors)
    np.testing.assert_allclose(answers.sum(axis=1), 1.0)
    np.testing.assert_allclose(answers.mean(axis=0), frequencies, atol=1e-4)  # mean_i q_ic = f_c
    # q_c ∝ b_c p_c: the odds of all samples change by one factor.
    odds, before = answers[:, 1] / answers[:, 0], taught[:, 1] / taught[:, 0]
    np.testing.assert_allclose(odds / before, factors[1] / factors[0])
    # Four samples, none of a class more than the agent has of it: twenty steps, by hand, do not get there.
    few, by_hand = np.array([[0.5, 0.5]] * 4), 1.0  # the odds b_1 / b_0
    for _ in range(20):
        share = by_hand / (1 + by_hand)
        by_hand *= (4 * 0.1 + 20) / (4 * share + 20) * (4 * (1 - share) + 20) / (4 * 0.9 + 20)
    ratio = weights.class_factors(few, frequencies)
    assert ratio[1] / ratio[0] == pytest.approx(by_hand)
    assert 0.1 / 0.9 < by_hand < 0.25


def test_frequencies_that_are_right_already_change_nothing() -> None:
    taught = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.1, 0.1, 0.8]])
    factors = weights.class_factors(taught, taught.mean(axis=0))
    np.testing.assert_allclose(factors, 1.0)
    assert weights.adapted(taught, None) is taught


def _answers(rng: np.random.Generator, n: int, classes: int, sharpness: float) -> np.ndarray:
    return rng.dirichlet(np.full(classes, 1 / sharpness), n)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 60), classes=st.integers(2, 12),
    own=st.floats(0.2, 50), taught=st.floats(0.2, 50), shrinkage=st.floats(1, 30),
)  # fmt: skip
def test_on_held_out_samples_the_answer_loses_at_most_log_2_in_all(
    seed: int, n: int, classes: int, own: float, taught: float, shrinkage: float
) -> None:
    """n r(w̄) <= n r(0) + log 1/π(0), whatever the others answer: here at random, sharp or flat."""
    rng = np.random.default_rng(seed)
    y = rng.integers(classes, size=n)
    mine, theirs = _answers(rng, n, classes, own), _answers(rng, n, classes, taught)
    chosen = weights.posterior_mean(weights.log_losses(mine, theirs, y), shrinkage)
    losses = weights.log_losses(mine, weights.mixture(mine, theirs, chosen), y)[[0, -1]].sum(axis=1)
    assert losses[1] <= losses[0] + np.log(2) + 1e-9
    # And for each sample, whatever it is: -log q_w <= -log p_own + log 1/(1 - w).
    rows = np.arange(n)
    q = weights.mixture(mine, theirs, chosen)[rows, y]
    assert (q >= (1 - chosen) * mine[rows, y] - 1e-12).all()


def test_who_lies_loses_all_weight_and_who_helps_gets_it() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=40)
    right = np.where(np.eye(2)[y] == 1, 0.9, 0.1)
    unsure = np.full((40, 2), 0.5)
    assert weights.posterior_mean(weights.log_losses(right, 1 - right, y), 9.0) < 0.01
    assert weights.posterior_mean(weights.log_losses(unsure, right, y), 9.0) > 0.5


def test_the_weight_of_real_values_follows_the_squared_error() -> None:
    """Own errors of 1 and taught errors of -1: the mixture at w = 1/2 is exact, and many samples say so."""
    y = np.linspace(0, 1, 400)[:, None]
    losses = weights.squared_losses(y + 1, y - 1, y)
    np.testing.assert_allclose(losses.mean(axis=1), (1 - 2 * weights.GRID) ** 2 / 2, atol=1e-12)
    assert weights.posterior_mean(losses, 9.0) == pytest.approx(0.5, abs=0.05)
    assert weights.posterior_mean(weights.squared_losses(y + 1, np.full_like(y, np.nan), y), 9.0) == 0.0


def test_classes_that_the_agent_does_not_hold_pass_from_the_threshold_that_its_own_samples_allow() -> None:
    seen = np.array([True, True, False])
    taught = np.array([[0.8, 0.1, 0.1]] * 98 + [[0.2, 0.2, 0.6]] * 2)
    assert weights.unseen_threshold(taught, seen, 0.03) == 0.0  # 2 of 100 would be lost: (2 + 1/2) / 101
    assert weights.unseen_threshold(taught, seen, 0.02) == 0.7  # none of them is as sure as that: (0 + 1/2) / 101
    assert weights.unseen_threshold(taught[:30], seen, 0.01) is None  # too few to say: (0 + 1/2) / 31
    assert weights.unseen_threshold(taught, seen, 0.0) is None
    assert weights.unseen_threshold(taught, np.ones(3, bool), 0.5) is None
    own = np.tile([0.5, 0.5, 0.0], (2, 1))
    sure = np.array([[0.1, 0.1, 0.8], [0.2, 0.2, 0.6]])
    np.testing.assert_array_equal(weights.with_unseen(own, sure, seen, 0.7), [[0.1, 0.1, 0.8], [0.5, 0.5, 0.0]])
    np.testing.assert_array_equal(weights.with_unseen(own, sure, seen, None), own)


# --- around a protocol ----------------------------------------------------------------------------


def federation(
    digits: tuple[np.ndarray, np.ndarray], protocol: cd.Protocol, samples: int = 60, **options: Any
) -> cd.Federation:
    """A torch module, a forest and a regression, each with its own test samples."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    x, y = digits[0].reshape(len(digits[0]), -1), digits[1]
    models = [
        cd.TorchLearner(nn.Linear(x.shape[1], 10), lr=0.02),
        RandomForestClassifier(8, random_state=0),
        LogisticRegression(max_iter=50),
    ]
    agents = []
    for i, model in enumerate(models):
        rows = slice(i * samples, (i + 1) * samples)
        agents.append(cd.Agent(f"a{i}", model, x[rows], y[rows], test=(x[1000:1200], y[1000:1200])))
    return cd.Federation(agents, protocol, public=x[600:660], test=(x[1200:1300], y[1200:1300]), classes=10, **options)


PROTOCOLS = [cd.FedMD(batch_size=16), cd.AvgKD()]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda each: each.name)
def test_a_safeguarded_run_is_the_same_everywhere_and_after_a_resume(
    protocol: cd.Protocol, digits: Any, tmp_path: Path
) -> None:
    def run(folder: str, rounds: int, runtime: str, **options: Any) -> bytes:
        made = federation(digits, protocol, safeguard=True)
        made.run(rounds, runtime=runtime, folder=tmp_path / folder, **QUIET, **options)
        return (tmp_path / folder / "metrics.jsonl").read_bytes()

    whole = run("simulation", 2, "simulation")
    run("parts", 1, "processes", workers=2)
    assert run("parts", 2, "simulation", resume=True) == whole
    assert run("network", 2, "network") == whole


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_own_model_is_the_baseline_to_the_bit(digits: Any) -> None:
    """Where what was taught is refused, the answer is that of the agent alone: all others invert their answers."""
    invert = [cd.Fault(kind="invert", agent=name) for name in ("a0", "a2")]
    made = federation(digits, cd.FedMD(batch_size=16), safeguard=True, faults=invert)
    result = made.run(2, runtime="simulation", **QUIET)
    agent = made.agents[1]
    alone = made.description.baseline_protocol
    assert alone is not None
    record_of(agent).safeguard.weight, record_of(agent).safeguard.threshold = 0.0, None
    tested = record_of(agent).test[0]
    correct = result.agents["a1"].predict(tested) == record_of(agent).test[1]
    rows = [row for row in result.alone_rows or [] if row["agent"] == "a1" and row["round"] == 2]
    assert rows[0]["own_accuracy"] == pytest.approx(float(np.mean(correct)), abs=1e-12)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_held_out_samples_are_not_in_the_shard_and_nothing_more_is_sent(digits: Any) -> None:
    plain = federation(digits, cd.FedMD(batch_size=16))
    guarded = federation(digits, cd.FedMD(batch_size=16), safeguard=cd.Safeguard(share=0.3))
    for before, after in zip(plain.agents, guarded.agents, strict=True):
        held = record_of(after).safeguard.held
        assert len(after.shard) + len(held) == len(before.shard)
        assert abs(len(held) - 0.3 * len(before.shard)) <= 1
        together = np.concatenate([after.shard.x, held.x])
        assert sorted(map(tuple, together)) == sorted(map(tuple, before.shard.x))
        assert set(after.shard.labels) == set(before.shard.labels)  # no class is held out whole
    sent = [sum(row["sent"] for row in made.run(1, runtime="simulation", **QUIET).rows) for made in (plain, guarded)]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_few_samples_are_enough(samples: int, digits: Any) -> None:
    x, y = digits[0].reshape(len(digits[0]), -1), digits[1]
    models = [RandomForestClassifier(4, random_state=0) for _ in range(2)]
    agents = [cd.Agent(f"a{i}", model, x[i : i + samples], y[i : i + samples]) for i, model in enumerate(models)]
    made = cd.Federation(agents, cd.AvgKD(), classes=10, safeguard=True)
    made.run(1, runtime="simulation", **QUIET)
    held = [len(record_of(agent).safeguard.held) for agent in made.agents]
    assert held == [0, 0]  # of every class one must stay: what cannot be judged is not taken
    assert all(record_of(agent).safeguard.weight == 0.0 for agent in made.agents)


def test_real_values_are_safeguarded_too() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((90, 4))
    y = x @ rng.standard_normal((4, 1))
    agents = [
        cd.Agent("right", LinearRegression(), x[:40], y[:40], test=(x[60:], y[60:])),
        cd.Agent("wrong", LinearRegression(), x[40:60], -y[40:60]),
    ]
    result = cd.Federation(agents, cd.AvgKD(), safeguard=True).run(2, runtime="simulation", **QUIET)
    error = next(row["own_rmse"] for row in result.rows[-2:] if row["agent"] == "right")
    assert error < 1e-6  # alone it is exact; taught by the other it is not
    taught = cd.Federation([twin_of(agent) for agent in agents], cd.AvgKD()).run(2, runtime="simulation", **QUIET)
    assert next(row["own_rmse"] for row in taught.rows[-2:] if row["agent"] == "right") > 0.1


def test_a_baseline_has_no_safeguard(digits: Any) -> None:
    made = federation(digits, cd.Alone(batch_size=16), safeguard=True)
    assert all(record_of(agent).safeguard is None for agent in made.agents)


def test_what_a_user_may_write() -> None:
    assert as_safeguard(True) == cd.Safeguard()
    assert as_safeguard(False) is None
    with pytest.raises(RecipeError, match="safeguard must be true, false"):
        as_safeguard("yes")
    with pytest.raises(RecipeError, match=r"safeguard\.share must be"):
        cd.Safeguard(share=0.9)
    with pytest.raises(TypeError, match="Did you mean 'share'"):
        cd.Safeguard(shares=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "protocol", [cd.FedAvg, cd.FedProx, cd.FedMAX, cd.FedBN, cd.FedDKD, cd.FedDistill, cd.FedGen, cd.FedDF]
)
def test_shared_weights_are_averaged_under_a_safeguard(protocol: Any) -> None:
    """The samples that it holds out are fewer than the agents joined with: the hub takes their weights all the same."""
    x, y = load_digits(return_X_y=True)
    x, rest = (x / 16).astype(np.float32), slice(3, None, 4)
    nets = [nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)) for _ in range(3)]
    agents = [cd.Agent(f"a{k}", net, x[k::4], y[k::4]) for k, net in enumerate(nets)]
    public = x[rest] if protocol is cd.FedDF else None
    federation = cd.Federation(agents, protocol(), public=public, test=(x[rest], y[rest]), safeguard=True)
    result = federation.run(1, runtime="simulation", alone=False, **QUIET)
    first, *others = (agent.learner.weights() for agent in result.agents.values())
    for other in others:
        assert all(np.array_equal(first[name], other[name]) for name in first)
