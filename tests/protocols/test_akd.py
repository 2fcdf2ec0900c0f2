"""AKD, PKD, EKD and backfitting: who trains on what, what travels, and what happens when something is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

import codistill as cd
from codistill.core.errors import LearnerError
from codistill.protocols.ekd import Ensemble
from codistill.wire.message import Message

C, GAMMA = 0.1, 0.7
Data = list[tuple[np.ndarray, np.ndarray]]


def gram(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    return np.exp(-GAMMA * ((x[:, None] - z[None]) ** 2).sum(-1))


def fitted(data: Data, i: int, y: np.ndarray) -> np.ndarray:
    """Coefficients of agent i's kernel ridge on labels y, with N of the whole federation."""
    x = data[i][0]
    total = sum(len(x) for x, _ in data)
    return np.linalg.solve(gram(x, x) + C * total * np.eye(len(x)), y)


@pytest.fixture
def data() -> Data:
    rng = np.random.default_rng(7)
    return [(rng.normal(size=(n, 2)), rng.normal(size=(n, 2))) for n in (4, 5, 6)]


def run(data: Data, protocol: cd.Protocol, rounds: int, **options: Any) -> tuple[list[cd.Agent], Any]:
    members = [
        cd.Agent(f"a{i}", cd.KernelRidge("rbf", C, gamma=GAMMA, reveal_inputs=True), x, y)
        for i, (x, y) in enumerate(data)
    ]
    federation = cd.Federation(members, protocol, **options)
    return members, federation.run(rounds, runtime="simulation", alone=False, progress=False)


PROBE = np.random.default_rng(8).normal(size=(6, 2))


def answers(data: Data, i: int, coefficients: np.ndarray) -> np.ndarray:
    return gram(PROBE, data[i][0]) @ coefficients


@pytest.mark.parametrize("agents", [2, 3])
def test_one_chain_goes_around_the_ring(data: Data, agents: int) -> None:
    """ŷ_0 = y^1; agent (t mod M) + 1 trains on ŷ_t; ŷ_{t+1} = g_t(X) at the next. Others' labels are never seen."""
    data = data[:agents]
    _, result = run(data, cd.AKD(), 3)
    y = data[0][1]
    last: dict[int, np.ndarray] = {}
    for t in range(3 * agents):
        i, after = t % agents, (t + 1) % agents
        last[i] = fitted(data, i, y)
        y = gram(data[after][0], data[i][0]) @ last[i]
    for i in range(agents):
        np.testing.assert_allclose(result.agents[f"a{i}"].predict(PROBE), answers(data, i, last[i]), rtol=1e-10)


def test_simultaneous_chains_start_from_everyones_labels(data: Data) -> None:
    _, result = run(data, cd.AKD(simultaneous=True), 5)
    labels = [y for _, y in data]
    for _ in range(5):
        models = [fitted(data, i, y) for i, y in enumerate(labels)]
        labels = [gram(data[i][0], data[i - 1][0]) @ models[i - 1] for i in range(3)]
    for i in range(3):
        np.testing.assert_allclose(result.agents[f"a{i}"].predict(PROBE), answers(data, i, models[i]), rtol=1e-10)


def chains(data: Data, terms: int) -> list[np.ndarray]:
    """Σ_i g_t^i(PROBE) for t = 0, 1, ...: each step every chain is at another agent."""
    labels, sums = [y for _, y in data], []
    for _ in range(terms):
        models = [fitted(data, i, y) for i, y in enumerate(labels)]
        sums.append(sum(answers(data, i, model) for i, model in enumerate(models)))
        labels = [gram(data[i][0], data[i - 1][0]) @ models[i - 1] for i in range(len(data))]
    return sums


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_ensemble_is_the_signed_sum_of_all_chains(data: Data, rounds: int, half: bool) -> None:
    """f_t = Σ_{s<t} (-1)^s Σ_i g_s^i + h (-1)^t Σ_i g_t^i, the sign of t = 0 positive."""
    _, result = run(data, cd.EKD(half=half), rounds)
    terms = chains(data, rounds)
    wanted = sum((-1) ** t * term for t, term in enumerate(terms[:-1]))
    wanted = wanted + (0.5 if half else 1.0) * (-1) ** (rounds - 1) * terms[-1]
    for agent in result.agents.values():
        np.testing.assert_allclose(agent.predict(PROBE), wanted, rtol=1e-9, atol=1e-12)


def test_parallel_distillation_forgets_the_labels(data: Data) -> None:
    """ŷ_{t+1}^i = (ŷ_t^i + Σ_{j≠i} g_t^j(X^i)) / M: the true labels enter at t = 0 only."""
    members, _ = run(data, cd.PKD(), 3)
    labels = [y for _, y in data]
    for _ in range(3):
        models = [fitted(data, i, y) for i, y in enumerate(labels)]
        labels = [
            (labels[i] + sum(gram(data[i][0], data[j][0]) @ models[j] for j in range(3) if j != i)) / 3
            for i in range(3)
        ]
    for member, wanted in zip(members, labels, strict=True):
        np.testing.assert_allclose(member.state["targets"], wanted, rtol=1e-10)


@pytest.mark.parametrize("simultaneous", [False, True])
def test_backfitting_is_the_centralised_solution(data: Data, simultaneous: bool) -> None:
    _, result = run(data, cd.Backfitting(simultaneous=simultaneous), 80 if simultaneous else 30)
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    wanted = gram(PROBE, x) @ np.linalg.solve(gram(x, x) + C * len(x) * np.eye(len(x)), y)
    for agent in result.agents.values():
        np.testing.assert_allclose(agent.predict(PROBE), wanted, rtol=1e-10)


def test_the_pooled_yardstick_counts_every_sample_once(data: Data) -> None:
    """c N on the diagonal, N the samples of the federation: pooling must not count them once per agent."""
    _, result = run(data, cd.Centralised(refit=True), 1)
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    wanted = gram(PROBE, x) @ np.linalg.solve(gram(x, x) + C * len(x) * np.eye(len(x)), y)
    np.testing.assert_allclose(result.agents["a0"].predict(PROBE), wanted, rtol=1e-10)


@pytest.mark.parametrize(
    ("protocol", "models_sent"),
    [(cd.AKD(), 1), (cd.AKD(simultaneous=True), 1), (cd.PKD(), 2), (cd.EKD(), 2), (cd.Backfitting(), 2)],
    ids=lambda value: str(value),
)
def test_how_many_models_travel(data: Data, protocol: cd.Protocol, models_sent: int) -> None:
    """M in all for a ring, M (M - 1) where everyone hears everyone."""
    sent: list[tuple[str, str]] = []
    run(data, protocol, 1, watchers=[lambda sender, receiver, _: sent.append((sender, receiver))])
    assert len(sent) == len(set(sent)) == 3 * models_sent
    if models_sent == 1:
        assert sorted(sent) == [("a0", "a1"), ("a1", "a2"), ("a2", "a0")]


def test_the_ring_closes_over_who_is_absent(data: Data) -> None:
    sent: list[tuple[str, str]] = []
    gone = [cd.Fault(kind="gone", agent="a1", first=1, last=1)]
    run(data, cd.AKD(), 1, faults=gone, watchers=[lambda sender, receiver, _: sent.append((sender, receiver))])
    assert sorted(sent) == [("a0", "a2"), ("a2", "a0")]


def lost(data: Data, protocol: cd.Protocol, rounds: int, pairs: Sequence[tuple[int, str, str]]) -> list[cd.Agent]:
    """A run in which the model of (round, sender, receiver) is unreadable on arrival."""

    class Lossy(type(protocol)):  # type: ignore[misc]
        async def round(self, me: cd.Agent, t: int) -> None:
            kept = me.open_model

            def unsound(sender: str, message: Message) -> Any:
                return None if (t, sender, me.name) in pairs else kept(sender, message)

            me.open_model = unsound  # type: ignore[method-assign]
            try:
                await super().round(me, t)
            finally:
                del me.open_model

    members, _ = run(data, Lossy(**{f.name: getattr(protocol, f.name) for f in fields(protocol)}), rounds)
    return members


def test_who_gets_no_model_trains_on_the_labels_it_had(data: Data) -> None:
    members = lost(data[:2], cd.AKD(), 1, [(0, "a0", "a1")])
    wanted = answers(data[:2], 1, fitted(data[:2], 1, data[1][1]))
    np.testing.assert_allclose(members[1].learner.predict(PROBE), wanted, rtol=1e-10)


def test_a_lost_chain_ends_and_no_term_is_counted_twice(data: Data) -> None:
    """a1 loses the chain of a0 in round 1: it is silent in round 2, and a0's ensemble has one model less there."""
    members = lost(data[:2], cd.EKD(), 3, [(0, "a0", "a1")])
    sizes = {member.name: [len(term) for term in member.state["ensemble"]] for member in members}
    assert sizes == {"a0": [2, 1, 1], "a1": [1, 1, 1]}
    signs = [[weight for weight, *_ in term] for term in members[0].state["ensemble"]]
    assert signs == [[1.0, 1.0], [-1.0], [1.0]]


@pytest.mark.parametrize("age", ["old", -1, 1, 1.0, [0], None])
def test_an_age_that_cannot_be_is_refused_and_the_round_goes_on(data: Data, age: Any) -> None:
    """In round 1 every honest model has been distilled 0 times."""

    class Lying(cd.EKD):
        def _train(self, me: cd.Agent) -> Message:
            model = super()._train(me)
            return Message(model.arrays, {**model.plain, "age": age}) if me.name == "a0" else model

    members, _ = run(data, Lying(), 1)
    assert [len(member.state["ensemble"][0]) for member in members] == [2, 2, 2]


def test_one_model_in_place_of_the_ensemble(data: Data) -> None:
    """The agent's own model, fitted to f_t on its own and the public samples, answers for the ensemble."""
    public = np.random.default_rng(1).normal(size=(9, 2))
    members, result = run(data[:2], cd.EKD(single=True), 3, public=public)
    x = np.concatenate([data[0][0], public])
    f = Ensemble(members[0]).predict(x, last=0.5)
    total = sum(len(x) for x, _ in data[:2])
    wanted = gram(PROBE, x) @ np.linalg.solve(gram(x, x) + C * total * np.eye(len(x)), f)
    np.testing.assert_allclose(result.agents["a0"].predict(PROBE), wanted, rtol=1e-9)


def test_a_remembered_sum_equals_a_fresh_one_to_the_bit(data: Data) -> None:
    members, _ = run(data, cd.EKD(), 4)
    me = members[0]
    ensemble = Ensemble(me)
    other = PROBE + 1
    first = [ensemble.predict(PROBE, last=0.5), ensemble.predict(other)]
    term = me.state["ensemble"][0]
    ensemble.append([(-1.0, Message.decode(data), sender) for _, data, sender in term])
    remembered = [ensemble.predict(PROBE, last=0.5), ensemble.predict(other)]
    me.memo.clear()
    fresh = [Ensemble(me).predict(PROBE, last=0.5), Ensemble(me).predict(other)]
    np.testing.assert_array_equal(remembered, fresh)
    assert not np.allclose(first, fresh)


def test_only_a_few_sums_are_remembered(data: Data) -> None:
    members, _ = run(data, cd.EKD(), 2)
    for shift in range(9):
        Ensemble(members[0]).predict(PROBE + shift)
    assert len(members[0].memo["ensemble"]) == 4


@pytest.mark.parametrize("protocol", [cd.AKD(), cd.AvgKD(), cd.PKD(), cd.EKD(single=True)], ids=lambda p: p.name)
def test_a_classifier_can_learn_from_a_regressor(protocol: cd.Protocol) -> None:
    """Real values below 0 are no targets of a classifier: it learns what is positive, scaled to 1."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), np.arange(40) % 3
    x[:, 0] += 3 * y
    models = [Ridge(), DecisionTreeClassifier(), DecisionTreeRegressor(), LogisticRegression()]
    members = [cd.Agent(f"a{i}", model, x[i::4], y[i::4]) for i, model in enumerate(models)]
    result = cd.Federation(members, protocol, test=(x, y)).run(2, runtime="simulation", alone=False, progress=False)
    assert all(row["accuracy"] > 0.4 for row in result.rows)
    for i in (1, 3):
        targets = members[i].state["targets"]
        assert (targets >= 0).all()


def test_residuals_are_not_for_classifiers(data: Data) -> None:
    x, y = data[0][0], np.array([0, 1, 0, 1])
    members = [cd.Agent("a", Ridge(), x, y), cd.Agent("b", LogisticRegression(), x, y)]
    with pytest.raises(LearnerError, match="'b' has LogisticRegression, which predicts probabilities"):
        cd.Federation(members, cd.Backfitting())


def test_damping_moves_the_labels_part_of_the_way(data: Data) -> None:
    members, _ = run(data[:2], cd.Backfitting(damping=0.25), 2)
    (x0, y0), (x1, y1) = data[:2]
    t0 = y0
    t1 = y1 - gram(x1, x0) @ fitted(data[:2], 0, t0)
    t0 = 0.75 * t0 + 0.25 * (y0 - gram(x0, x1) @ fitted(data[:2], 1, t1))
    np.testing.assert_allclose(members[0].state["targets"], t0, rtol=1e-10)
