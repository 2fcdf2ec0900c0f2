"""The label guard finds class counts in what an agent sends, and computes them from scores weighted by them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.naive_bayes import GaussianNB

import codistill as cd
from codistill.engine.description import RunDescription
from codistill.engine.evaluation import score
from codistill.engine.privacy_guard import LabelGuard
from codistill.network.terms import description_under, terms_of
from codistill.nodes.record import record_of
from codistill.wire.message import Message

COUNTS = {"a": [4, 11, 5], "b": [9, 2, 13]}
TESTED = [4, 6, 5]


def labels(counts: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(counts)), counts)


def federation(protocol: cd.Protocol, **options: Any) -> cd.Federation:
    rng = np.random.default_rng(0)

    def samples(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        y = labels(counts)
        return rng.normal(size=(len(y), 2)) + y[:, None], y

    agents = [cd.Agent(name, GaussianNB(), *samples(counts)) for name, counts in COUNTS.items()]
    return cd.Federation(agents, protocol, public=rng.normal(size=(20, 2)), test=samples(TESTED), classes=3, **options)


class Moves(cd.Protocol):
    """Predictions that differ in each round, as those of a model do that learns."""

    name = "moves"
    needs = cd.Ability.LABELS
    topology = "silent"

    async def begin(self, me: cd.Agent) -> None:
        me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: cd.Agent, t: int) -> None:
        me.state["t"] = t

    def predict(self, me: cd.Agent, x: np.ndarray) -> np.ndarray:
        return np.random.default_rng(me.state.get("t", 0)).dirichlet([1, 1, 1], len(x))


def leaks(protocol: cd.Protocol, rounds: int, *, tells: bool) -> list[str]:
    made = federation(protocol)
    guard = LabelGuard(replace(made.description, tells_class_mix=tells))
    made.description = replace(made.description, watchers=(guard,))
    made.run(rounds, runtime="simulation", progress=False, alone=False, observers=[guard])
    return guard.leaks


def test_shares_come_out_of_weighted_scores_by_least_squares() -> None:
    """4, 11 and 5 samples are shares of 0.2, 0.55 and 0.25; with three classes, two evaluations are enough."""
    found = leaks(Moves(), 4, tells=True)
    assert len(found) == 2
    assert found[0].endswith("class shares of 'a' come out of its 'own_accuracy': 0.200000, 0.550000, 0.250000")
    assert any(f"{9 / 24:.6f}, {2 / 24:.6f}, {13 / 24:.6f}" in sentence for sentence in found)
    assert leaks(Moves(), 4, tells=False) == []


def test_a_single_weighted_score_is_found_as_well() -> None:
    found = leaks(Moves(), 1, tells=True)
    assert "each 'own_accuracy' of 'a' is an equation in its class shares: 1 of 2" in found
    assert leaks(Moves(), 1, tells=False) == []


@pytest.mark.parametrize("aggregate", ["coverage", "mean"])
def test_shares_in_a_message_are_found(aggregate: str) -> None:
    found = leaks(cd.FedMD(aggregate=aggregate), 1, tells=False)
    assert ("the class shares of 'a' are in 'coverage' sent to 'hub'" in found) == (aggregate == "coverage")


@pytest.mark.parametrize(
    "sent",
    [
        Message.of(x=np.array([7, 8, 11, 5.0]), n=3), Message.of(x=np.array([[0, 0, 0.2, 0.55, 0.25]], np.float32)),
        Message.of(x=[1, 4, 11, 5]), Message.of(p=4, q=11, r=5), Message.of(x=np.array([[4, 1], [11, 1], [5, 1]])),
    ],
)  # fmt: skip
def test_counts_and_shares_in_sequence_are_found_at_any_place(sent: Message) -> None:
    guard = LabelGuard(federation(cd.Alone()).description)
    guard("a", "hub", sent.encoded)
    guard("b", "hub", sent.encoded)
    expected = [] if 7 in np.ravel(sent.get("x", 0)) else ["a"]
    assert [sentence.split("'")[1] for sentence in guard.leaks] == expected


def test_an_agent_that_joins_does_not_tell_its_class_mix() -> None:
    made = federation(cd.FedMD())
    agent = made.agents[0]
    joined: RunDescription = description_under(terms_of(made.description), agent, made.description.public, made.test)
    agent.learner.fit(agent.shard.x, agent.shard.targets)
    assert set(score(joined.bind_nodes(), agent, None)) == {"accuracy"}
    assert set(score(made.description, agent, None)) == {"accuracy", "own_accuracy"}
    alone = joined.baseline()
    assert alone is not None
    assert not alone.tells_class_mix


def test_scores_on_an_agents_own_test_data_are_its_own_choice() -> None:
    made = federation(cd.FedMD())
    agent = made.agents[0]
    agent.learner.fit(agent.shard.x, agent.shard.targets)
    record_of(agent).test = agent.shard.x[:5], agent.shard.labels[:5]
    told = score(replace(made.description, tells_class_mix=False), agent, None)
    assert told["own_accuracy"] == np.mean(
        agent.learner.predict(record_of(agent).test[0]).argmax(axis=1) == record_of(agent).test[1]
    )


def test_an_error_that_is_not_finite_is_reported_as_the_largest() -> None:
    """So that the hub does not exclude an agent whose model another agent's message has made useless."""
    x = np.eye(3, dtype=np.float32)
    agent = cd.Agent("a", cd.KernelRidge(), x, x[:, :1])
    made = cd.Federation([agent], cd.Alone(), test=(x, x[:, :1]))
    agent.learner.fit(x, x[:, :1])
    for bad in (np.nan, np.inf, 1e200):
        agent.learner._coefficients[...] = bad
        assert score(made.description, agent, None) == {"rmse": 1e100}
