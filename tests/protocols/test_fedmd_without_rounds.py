"""FedMD without rounds: what the relay keeps and answers, by hand; and black boxes beside networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from torch import nn

import codistill as cd
from codistill.data.shard import PublicData
from codistill.nodes.agent import Hub
from codistill.nodes.record import record_of
from codistill.topology import Topology
from codistill.wire.message import Message

QUIET: dict[str, Any] = {"runtime": "simulation", "progress": False, "alone": False}
F = np.arange(24, dtype=np.float32).reshape(3, 4, 2) ** 1.5  # of three agents, for four samples


def hub() -> Hub:
    made = Hub()
    made.topology, made.classes = Topology.star(["a", "b", "c"]), 2
    made.public = PublicData(np.zeros((6, 1)), 0)
    return made


def question(agent: int, *ids: int, **others: Any) -> Message:
    return Message.of(f=F[agent, : len(ids)], ids=np.array(ids, np.int32), **others)


def test_the_relay_answers_with_the_mean_of_the_latest_outputs_of_others() -> None:
    me, protocol = hub(), cd.FedMD(batch_size=4)
    assert not protocol.serve(me, "a", question(0, 0, 1, 2, 3))  # nobody else has sent anything
    answer = protocol.serve(me, "b", question(1, 3, 4))  # of sample 3 a has sent F[0, 3], of sample 4 nothing
    assert answer["known"].tolist() == [True, False]
    np.testing.assert_array_equal(answer["told"][0], F[0, 3])
    answer = protocol.serve(me, "c", question(2, 3, 0, 4, 5))
    assert answer["known"].tolist() == [True, True, True, False]
    np.testing.assert_allclose(answer["told"][0], (F[0, 3] + F[1, 0]) / 2)
    np.testing.assert_array_equal(answer["told"][1], F[0, 0])
    np.testing.assert_array_equal(answer["told"][2], F[1, 1])
    # Sent again, the newer outputs of a stand in place of those before; those for other samples stay.
    protocol.serve(me, "a", question(0, 3))
    answer = protocol.serve(me, "b", question(1, 3, 1))
    np.testing.assert_allclose(answer["told"], [(F[0, 0] + F[2, 0]) / 2, F[0, 1]])
    assert ("b", "disagreement") in [(agent, name) for agent, name, _ in record_of(me).measures]


def test_other_aggregates_and_the_coverage_are_of_those_who_have_sent() -> None:
    me, protocol = hub(), cd.FedMD(batch_size=4, aggregate="coverage")
    shares = np.array([[0.2, 0.8], [0.5, 0.5], [1.0, 0.0]], np.float32)
    for agent, name in enumerate("ab"):
        protocol.serve(me, name, question(agent, 0, 1, coverage=shares[agent]))
    answer = protocol.serve(me, "c", question(2, 1, coverage=shares[2]))
    log_p = F[:2, 1] - np.log(np.exp(F[:2, 1]).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(answer["told"][0], (shares[:2] * log_p).sum(axis=0) / shares[:2].sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize(
    "message",
    [
        question(0, 6),
        question(0, -1),
        Message.of(f=F[0], ids=np.arange(3, dtype=np.int32)),
        Message.of(f=F[0], ids=np.arange(4)),
        Message.of(f=F[0].astype(np.float64), ids=np.arange(4, dtype=np.int32)),
        Message.of(f=np.zeros((6, 2), np.float32), ids=np.arange(6, dtype=np.int32)),
        Message.of(f=F[0, :, :1], ids=np.arange(4, dtype=np.int32)),
        Message.of(f=F[0]),
        Message.of(f=F[0, :0], ids=np.zeros(0, np.int32)),
    ],
)
def test_what_is_not_about_public_samples_is_refused(message: Message) -> None:
    me = hub()
    assert not cd.FedMD(batch_size=4).serve(me, "a", message)
    assert [sender for sender, _ in record_of(me).rejected] == ["a"]
    assert not me.state.get("latest")


def make(digits: Any, agents: int = 3, protocol: cd.Protocol | None = None, **options: Any) -> cd.Federation:
    import torch

    torch.manual_seed(0)
    x, y = digits
    models = [
        cd.TorchLearner(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)), lr=0.01),
        LogisticRegression(max_iter=200),
        cd.TorchLearner(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), lr=0.01),
    ]
    rows = [np.flatnonzero(np.isin(y[:1000], np.arange(6) + 2 * i))[:40] for i in range(agents)]
    members = [cd.Agent(f"a{i}", models[i], x[rows[i]], y[rows[i]]) for i in range(agents)]
    protocol = protocol or cd.FedMD(batch_size=16, transfer_steps=2)
    return cd.Federation(
        members, protocol, public=x[1000:1060], test=(x[1200:1400], y[1200:1400]), classes=10, **options
    )


def test_black_boxes_and_networks_learn_at_their_own_pace(digits: Any) -> None:
    """a1 holds digits 2 to 7 only: of 0, 1 and 8 it hears from others alone."""
    clock = cd.Clock(asynchronous=True, slowness={"a0": 1.0, "a1": 4.0, "a2": 2.0}, delay=0.001, period=0.5)
    result = make(digits, clock=clock).run(3, **QUIET)
    rounds = [row["own_rounds"] for row in result.rows[-3:]]
    assert rounds[0] > rounds[2] > rounds[1] > 0
    assert all("disagreement" in row for row in result.rows[-3:])
    x, y = digits[0][1400:], digits[1][1400:]
    unseen = ~np.isin(y, np.arange(2, 8))
    assert np.mean(result.agents["a1"].predict(x[unseen]) == y[unseen]) > 0.1
    again = make(digits, clock=clock).run(3, **QUIET)
    assert again.rows == result.rows


def test_a_lone_agent_equals_local_training(digits: Any) -> None:
    free = make(digits, agents=1, clock=cd.Clock(asynchronous=True, period=0.03)).run(3, **QUIET)
    rounds = make(digits, agents=1, protocol=cd.Alone(batch_size=16)).run(3, **QUIET)
    assert [row["own_rounds"] for row in free.rows] == [1, 2, 3]
    assert [row["accuracy"] for row in free.rows] == [row["accuracy"] for row in rounds.rows]
