"""Modules of which some weights are not trained: those stay as they are, are not sent, and must be equal everywhere."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import codistill as cd
from codistill.core.errors import LearnerError
from codistill.learners.portable.models import export_torch
from codistill.learners.zoo import build
from codistill.nodes.agent import Hub, JoinInfo
from codistill.nodes.record import record_of
from codistill.protocols import parts
from codistill.protocols.parts.weights import kind_of
from codistill.wire.message import Message

X = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
Y = (X[:, 0] * X[:, 1] > 0).astype(int)
SHARING = [
    cd.FedAvg(),
    cd.FedProx(),
    cd.FedMAX(),
    cd.FedBN(),
    cd.FedDKD(),
    cd.FedDF(),
    cd.DSGD(),
    cd.FedDistill(),
    cd.FedGen(),
]


def module(base: int = 0, head: int = 0) -> nn.Sequential:
    """A frozen layer, drawn with one seed, and a head, drawn with another."""
    torch.manual_seed(base)
    first = nn.Linear(4, 12).requires_grad_(False)
    torch.manual_seed(head)
    return nn.Sequential(first, nn.ReLU(), nn.BatchNorm1d(12), nn.Linear(12, 2))


def agents(*modules: nn.Module, **options: Any) -> list[cd.Agent]:
    return [
        cd.Agent(name, cd.TorchLearner(each, **options), X[part], Y[part])
        for name, each, part in zip("ab", modules, (slice(30), slice(30, 60)), strict=True)
    ]


@pytest.mark.parametrize("protocol", SHARING, ids=lambda each: each.name)
def test_only_what_is_trained_is_shared_and_the_rest_stays_as_it_is(protocol: cd.Protocol) -> None:
    sent: list[int] = []
    given = [module(0, 1), module(0, 2)]
    before = copy.deepcopy(given[0][0].state_dict())
    federation = cd.Federation(
        agents(*given), protocol, public=X[60:] if protocol.needs_public else None,
        watchers=[lambda sender, receiver, data: sent.append(len(data))],
    )  # fmt: skip
    federation.run(1, runtime="simulation", progress=False, alone=False)
    for agent in federation.agents:
        assert all(torch.equal(each, before[name]) for name, each in agent.learner.module[0].state_dict().items())
        assert list(agent.learner.weights()) == [name for name in agent.learner.module.state_dict() if name[0] != "0"]
    if protocol.name == "fedavg":  # the same messages, and no others
        weights = federation.agents[0].learner.weights()
        upload = len(Message(weights, {"samples": 30}).encoded)
        assert sent == [upload, upload, *2 * [len(Message(weights).encoded)]]


def test_frozen_weights_of_other_values_are_refused_by_name() -> None:
    for protocol in (cd.FedAvg(), cd.DSGD()):
        with pytest.raises(LearnerError, match="agents 'a' and 'b' have frozen weights of different values"):
            cd.Federation(agents(module(0), module(1)), protocol)
    cd.Federation(agents(module(0), module(1)), cd.AvgKD())  # its agents share no weights


def test_a_hub_averages_agents_with_other_frozen_weights_separately() -> None:
    here = [
        record_of(agent).join_info(agent.learner.abilities)
        for agent in cd.Federation(agents(module(0), module(1)), cd.AvgKD()).agents
    ]
    assert here[0].frozen != here[1].frozen
    assert here[0].weights == here[1].weights
    hub = Hub()
    hub.present, hub.joined = ("a", "b", "c"), {"a": here[0], "b": here[1], "c": here[0]}
    heard = {name: Message({"w": np.ones(2)}) for name in "abc"}
    assert [names for names, _ in parts.architectures(hub, heard)] == [["a", "c"], ["b"]]
    assert kind_of(hub, "a") == kind_of(hub, "c") != kind_of(hub, "b")


def test_the_digest_depends_on_names_types_and_values() -> None:
    digests = {cd.TorchLearner(module(seed)).frozen for seed in (0, 0, 1)}
    half = module(0)
    half[0].to(torch.bfloat16)
    renamed = nn.Sequential(nn.Identity(), *module(0))
    digests |= {cd.TorchLearner(each).frozen for each in (half, renamed)}
    assert len(digests) == 4
    assert cd.TorchLearner(nn.Linear(4, 2)).frozen is None
    assert cd.TorchLearner(module(0, 1)).frozen == cd.TorchLearner(module(0, 2)).frozen


def test_a_reset_draws_what_is_trained_and_nothing_else() -> None:
    learner = cd.TorchLearner(module(0, 1))
    before = copy.deepcopy(learner.module.state_dict())
    learner.module[2].running_mean.fill_(3)
    torch.manual_seed(5)
    learner.reset()
    after = learner.module.state_dict()
    same = {name for name in after if torch.equal(before[name], after[name])}
    assert {"0.weight", "0.bias", "2.running_mean"} <= same
    assert not {"3.weight", "3.bias"} & same


@pytest.mark.parametrize("optimiser", ["adam", "adamw", "sgd"])
def test_weight_decay_leaves_frozen_weights_alone(optimiser: str) -> None:
    learner = cd.TorchLearner(module(), optimiser=optimiser, weight_decay=0.5, lr=0.1, warm=True)
    before = copy.deepcopy(learner.module.state_dict())
    learner.fit(X, np.eye(2)[Y])
    after = learner.module.state_dict()
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["3.weight"], after["3.weight"])
    assert {id(each) for group in learner.optimiser.param_groups for each in group["params"]} == {
        id(each) for each in learner.module.parameters() if each.requires_grad
    }


def test_a_registered_architecture_travels_with_its_frozen_weights() -> None:
    made = build("mlp", (4,), 2)
    first = next(iter(made.parameters())).requires_grad_(False)
    message = export_torch(cd.TorchLearner(made))
    assert message.arrays.keys() == made.state_dict().keys()
    assert any(np.array_equal(array, first.numpy()) for array in message.arrays.values())


def test_a_module_without_anything_to_train_is_refused() -> None:
    with pytest.raises(LearnerError, match="must have weights to train"):
        cd.Federation([cd.Agent("a", nn.Linear(4, 2).requires_grad_(False), X, Y)], cd.Alone())


def test_an_agent_that_says_nothing_of_frozen_weights_has_none() -> None:
    assert JoinInfo(3).frozen is None
