"""CRS against a straight-line copy of its pseudo-code; what agents choose; and what the relay keeps and passes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import codistill as cd
from codistill.errors import LearnerError, RecipeError
from codistill.learners.zoo import build
from codistill.message import Message
from codistill.protocols import parts
from codistill.randomness import generator
from codistill.topology import Topology

LR, CLASSES, WIDTH = 0.1, 3, 4
# Class 0 is met by all, class 1 by a and b, class 2 by b alone.
LABELS = {"a": [0, 1, 1, 0], "b": [0, 1, 2, 2], "c": [0, 0, 0]}
QUIET: dict[str, Any] = {"runtime": "simulation", "alone": False, "progress": False}


def _samples(name: str) -> np.ndarray:
    return np.random.default_rng(ord(name)).standard_normal((len(LABELS[name]), 2)).astype(np.float32)


def _net(name: str) -> nn.Sequential:
    torch.manual_seed(ord(name))
    return nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def _agent(name: str, **options: Any) -> cd.Agent:
    return cd.Agent(name, cd.TorchLearner(_net(name), optimiser="sgd", lr=LR), _samples(name), LABELS[name], **options)


def _federation(protocol: cd.CRS, names: str = "abc", **options: Any) -> cd.Federation:
    return cd.Federation([_agent(name) for name in names], protocol, classes=CLASSES, **options)


class _Copy:
    """One agent, straight line: full batches, means over all samples of a class."""

    def __init__(self, name: str) -> None:
        self.net, self.x, self.y = _net(name), torch.tensor(_samples(name)), torch.tensor(LABELS[name])

    def means(self) -> dict[int, torch.Tensor]:
        with torch.no_grad():
            s = self.net[:2](self.x)
            return {c: s[self.y == c].mean(dim=0) for c in sorted(set(self.y.tolist()))}

    def step(self, mean: dict[int, torch.Tensor], observed: dict[int, torch.Tensor], kd: float, disc: float) -> None:
        """L_CE + λ_KD L_KD + λ_disc L_disc, with naive logarithms."""
        s = self.net[:2](self.x)
        f = self.net[2](s)
        loss = cross_entropy(f, self.y)
        for i, y in enumerate(self.y.tolist()):
            if y in mean:
                loss = loss + kd * (s[i] - mean[y]).square().mean() / len(self.y)
            pairs = []
            for c, t in observed.items():
                h = torch.softmax(f[i], 0) @ torch.softmax(self.net[2](t), 0)
                pairs.append(-h.log() if c == y else -(1 - h).log())
            if pairs:
                loss = loss + disc * torch.stack(pairs).mean() / len(self.y)
        self.net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in self.net.parameters():
                weight -= LR * weight.grad


def _mean(given: list[dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
    known = sorted({c for each in given for c in each})
    return {c: torch.stack([each[c] for each in given if c in each]).mean(dim=0) for c in known}


def _assert_equal(federation: cd.Federation, copies: dict[str, _Copy]) -> None:
    for agent in federation.agents:
        for name, value in copies[agent.name].net.state_dict().items():
            np.testing.assert_allclose(agent.learner.weights()[name], value, atol=1e-6, err_msg=f"{agent.name} {name}")


@pytest.mark.parametrize("start", ["random", "none"])
def test_rounds_through_the_relay_equal_the_pseudo_code(start: str) -> None:
    """Two agents: the other's only observation is its mean, as n_avg is above what it has of any class."""
    federation = _federation(cd.CRS(kd_weight=2.0, disc_weight=0.5, average_over=9, start=start), "ab", seed=3)
    federation.run(3, **QUIET)
    copies = {name: _Copy(name) for name in "ab"}
    uploads: dict[str, dict[int, torch.Tensor]] = {}
    for t in range(3):
        old, uploads = uploads, {}
        for name, other in (("a", "b"), ("b", "a")):
            # t̄^c only where the other agent has class c: of class 2 agent b has nobody to learn from.
            observed = old.get(other, {})
            mean = {c: value for c, value in _mean(list(old.values())).items() if c in observed}
            if t == 0 and start == "random":  # of all classes, equal for both agents
                numbers = generator(3, "initial representations").standard_normal((2, CLASSES, WIDTH))
                mean, observed = (dict(enumerate(torch.tensor(each, dtype=torch.float32))) for each in numbers)
            copies[name].step(mean, observed, 2.0, 0.5)
        uploads = {name: copies[name].means() for name in "ab"}
    _assert_equal(federation, copies)


def test_the_random_start_is_for_round_1_and_never_for_a_lone_agent() -> None:
    alone = _federation(cd.CRS(start="random"), "a")
    alone.run(1, **QUIET)
    copy = _Copy("a")
    copy.step({}, {}, 0, 0)
    _assert_equal(alone, {"a": copy})
    # b is away: from round 2 on agent a has nothing to learn from, as nobody else has uploaded.
    away = [cd.Fault(kind="gone", agent="b", first=1, last=3)]
    runs = {}
    for rounds in (1, 3):
        runs[rounds] = _federation(cd.CRS(kd_weight=2.0, disc_weight=0.5, start="random"), "ab", faults=away)
        runs[rounds].run(rounds, **QUIET)
    copy.net.load_state_dict({k: torch.tensor(v) for k, v in runs[1].agents[0].learner.weights().items()})
    copy.step({}, {}, 0, 0)
    copy.step({}, {}, 0, 0)
    for name, value in copy.net.state_dict().items():
        np.testing.assert_allclose(runs[3].agents[0].learner.weights()[name], value, atol=1e-6, err_msg=name)


def test_rounds_between_neighbours_equal_the_pseudo_code() -> None:
    """On a path a - b - c the mean of the observations received stands for t̄; with one sender, they are one."""
    path = Topology(["a", "b", "c"], [("a", "b"), ("b", "c")])
    federation = _federation(cd.CRS(kd_weight=2.0, disc_weight=0.0, average_over=9), topology=path)
    federation.run(3, **QUIET)
    copies, neighbours = {name: _Copy(name) for name in "abc"}, {"a": "b", "b": "ac", "c": "b"}
    sent: dict[str, dict[int, torch.Tensor]] = {}
    for _ in range(3):
        for name in "abc":
            copies[name].step(_mean([sent[other] for other in neighbours[name] if other in sent]), {}, 2.0, 0.0)
        sent = {name: copies[name].means() for name in "abc"}
    _assert_equal(federation, copies)


def test_without_both_weights_it_is_learning_alone() -> None:
    federation = _federation(cd.CRS(kd_weight=0.0, disc_weight=0.0))
    federation.run(2, **QUIET)
    copies = {name: _Copy(name) for name in "abc"}
    for copy in copies.values():
        copy.step({}, {}, 0, 0)
        copy.step({}, {}, 0, 0)
    _assert_equal(federation, copies)


def test_bytes_per_agent_and_round() -> None:
    """(1 + M) C d floats each way: 6,720 bytes for the paper's 10 classes and 84 features, and at most 5 % more."""
    rng = np.random.default_rng(0)
    agents = [
        cd.Agent(f"a{i}", build("lenet5_gap", (1, 8, 8), 10), rng.random((40, 1, 8, 8)), np.arange(40) % 10)
        for i in range(3)
    ]
    result = cd.Federation(agents, cd.CRS(), classes=10).run(2, **QUIET)
    for row in result.rows[3:]:
        assert 6720 < row["sent"] <= 1.05 * 6720
        assert 6720 < row["received"] <= 1.05 * 6720
    assert all(row["received"] < 100 for row in result.rows[:3])  # nothing to download yet


# --- what is released, and to whom one listens ----------------------------------------------------


def _watched(choices: dict[str, Any], **options: Any) -> list[Message]:
    """The uploads of agent a."""
    seen: list[Message] = []

    def watch(sender: str, receiver: str, data: bytes) -> None:
        message = Message.decode(data)
        if sender == "a" and "representations" in message:
            seen.append(message)

    agents = [_agent("a", choices=choices, **options), _agent("b")]
    cd.Federation(agents, cd.CRS(uploads=4, average_over=1), classes=CLASSES, watchers=[watch]).run(1, **QUIET)
    return seen


def test_an_agent_chooses_what_it_releases_and_the_hub_cannot_raise_it() -> None:
    (plain,) = _watched({})
    assert plain["representations"].shape == (5, CLASSES, WIDTH)  # as the protocol says: the mean and 4 observations
    assert plain["held"].tolist() == [True, True, False]
    (less,) = _watched({"uploads": 1, "release_classes": [1], "average_over": 2})
    assert less["representations"].shape == (2, CLASSES, WIDTH)
    assert less["held"].tolist() == [False, True, False]
    assert not less["representations"][:, [0, 2]].any()
    np.testing.assert_allclose(less["representations"][1, 1], less["representations"][0, 1], rtol=1e-6)  # of both
    assert _watched({"release_classes": []}) == []
    assert _watched({"release_share": 0.0}) == []


def test_only_samples_that_its_owner_releases_are_in_what_it_sends() -> None:
    (some,) = _watched({}, releases=np.array([True, False, True, False]))
    federation = _federation(cd.CRS(), "ab")
    federation.run(1, **QUIET)  # one plain step: the features are the same in both runs
    features = federation.agents[0].learner.evaluated_features(_samples("a"))
    np.testing.assert_allclose(some["representations"][0, 0], features[0], atol=1e-6)  # of class 0 only sample 0
    np.testing.assert_allclose(some["representations"][0, 1], features[2], atol=1e-6)
    with pytest.raises(cd.CodistillError, match="releases of agent 'a' must be a boolean for each of its 4 samples"):
        _watched({}, releases=[0, 1])


def test_choices_are_checked_before_the_run() -> None:
    with pytest.raises(RecipeError, match="Agent 'a' may choose only what crs leaves to its agents.*Did you mean"):
        cd.Federation([_agent("a", choices={"upload": 1}), _agent("b")], cd.CRS(), classes=CLASSES)
    with pytest.raises(RecipeError, match=r"crs\.uploads must be at least 0"):
        cd.Federation([_agent("a", choices={"uploads": -1}), _agent("b")], cd.CRS(), classes=CLASSES)
    with pytest.raises(RecipeError, match="what fedproto leaves to its agents"):
        cd.Federation([_agent("a", choices={"weight": 1.0}), _agent("b")], cd.FedProto(), classes=CLASSES)


# --- the relay ------------------------------------------------------------------------------------


def _relay() -> cd.Hub:
    hub = cd.Hub()
    hub.classes, hub.topology = CLASSES, Topology.star(["a", "b", "c"])
    hub.start(0, ("a", "b", "c"))
    return hub


def _upload(value: float, held: list[bool], observations: int = 1) -> Message:
    rows = np.full((1 + observations, CLASSES, WIDTH), value, np.float32)
    rows[1:] += np.arange(1, observations + 1, dtype=np.float32)[:, None, None] / 8
    return Message.of(representations=rows, held=np.array(held))


def _download(hub: cd.Hub, sender: str, **wish: Any) -> Message:
    wanted = {"downloads": 2, "oldest": 0.0, "listen_to": [], **wish}
    reply = cd.CRS().serve(hub, sender, Message.of(**wanted))
    assert reply is not None
    return reply


def test_the_relay_answers_with_the_mean_of_all_and_observations_of_others() -> None:
    hub, protocol = _relay(), cd.CRS()
    assert protocol.serve(hub, "a", _upload(1.0, [True, True, False])) is None
    assert len(_download(hub, "a")) == 0  # of nobody but itself
    protocol.serve(hub, "b", _upload(2.0, [True, False, False], observations=2))
    protocol.serve(hub, "c", _upload(6.0, [True, False, False], observations=0))
    reply = _download(hub, "a")
    assert reply["representations"].shape == (3, CLASSES, WIDTH)
    np.testing.assert_allclose(reply["representations"][0, 0], 3.0)  # (1 + 2 + 6) / 3
    assert reply["age"].tolist() == [[0, -1, -1], [0, -1, -1], [0, -1, -1]]  # class 1: only its own; class 2: nobody's
    assert sorted(reply["representations"][1:, 0, 0].tolist()) == [2.125, 2.25]  # both of b


def test_the_relay_keeps_the_last_upload_and_knows_its_age() -> None:
    hub, protocol = _relay(), cd.CRS()
    protocol.serve(hub, "b", _upload(1.0, [True] * 3))
    hub.start(4, ("a", "b", "c"))
    protocol.serve(hub, "c", _upload(5.0, [True] * 3))
    hub.start(6, ("a", "b", "c"))
    reply = _download(hub, "a", downloads=8)
    first = reply["representations"][1:, 0, 0].tolist()
    ages = dict(zip(first, reply["age"][1:, 0].tolist(), strict=True))
    assert ages == {1.125: 6.0, 5.125: 2.0}
    assert reply["age"][0].tolist() == [6.0] * 3
    recent = _download(hub, "a", downloads=8, oldest=3.0)
    assert (recent["representations"][1:] == 5.125).all()
    np.testing.assert_allclose(recent["representations"][0], 5.0)
    only = _download(hub, "a", downloads=8, listen_to=["b"])
    assert (only["representations"][1:] == 1.125).all()
    protocol.serve(hub, "b", _upload(3.0, [True] * 3))
    np.testing.assert_allclose(_download(hub, "a")["representations"][0], 4.0)  # in place of the one before


@pytest.mark.parametrize(
    "message",
    [
        Message.of(representations=np.zeros((2, CLASSES, WIDTH)), held=np.ones(CLASSES, bool)),  # float64
        Message.of(representations=np.zeros((80, CLASSES, WIDTH), np.float32), held=np.ones(CLASSES, bool)),
        Message.of(representations=np.zeros((2, 9, WIDTH), np.float32), held=np.ones(CLASSES, bool)),
        Message.of(representations=np.zeros((2, CLASSES, WIDTH), np.float32)),
        Message.of(representations=np.zeros((2, CLASSES, WIDTH + 1), np.float32), held=np.ones(CLASSES, bool)),
        Message.of(downloads=1),
        Message.of(downloads=True, oldest=0.0, listen_to=[]),
    ],
)  # fmt: skip
def test_an_invalid_message_is_refused_by_name_and_not_kept(message: Message) -> None:
    from codistill.hub import Hello

    hub = _relay()
    hub.hellos["b"] = Hello(4, features=WIDTH)
    answer = cd.CRS().serve(hub, "b", message)
    assert not answer
    assert [sender for sender, _ in hub.rejected] == ["b"]
    assert hub.state["uploads"] == {}


def test_it_goes_on_while_all_but_two_are_offline_and_who_comes_back_catches_up() -> None:
    gone = [cd.Fault(kind="gone", agent="c", first=2, last=4)]
    federation = _federation(cd.CRS(average_over=9), faults=gone)
    federation.run(5, **QUIET)
    # c was away in rounds 2 to 4: in round 5 it downloads what a and b uploaded in round 4, one round old.
    relayed = federation.agents[2].state["relayed"]
    assert relayed["time"] == 4.0
    assert relayed["age"][1:].max() == 1.0
    assert (relayed["age"][1] == [1, 1, 1]).all()
    # The others still used c's upload of round 1, unless it is too old for them.
    assert federation.agents[0].state["relayed"]["age"][0, 0] == 4.0
    strict = _federation(cd.CRS(average_over=9, oldest=2.0), faults=gone)
    strict.run(5, **QUIET)
    assert strict.agents[0].state["relayed"]["age"][0, 0] == 1.0


# --- parts ----------------------------------------------------------------------------------------


def test_a_class_with_fewer_samples_is_averaged_over_those_there_are() -> None:
    federation = _federation(cd.CRS(), "ab")
    agent = federation.agents[1]
    agent.start(0, ("a", "b"))
    own, held = parts.own_representations(agent, 2, 3)
    features = agent.learner.evaluated_features(_samples("b"))
    assert held.tolist() == [True, True, True]
    np.testing.assert_allclose(own[:, 0], np.tile(features[0], (4, 1)), rtol=1e-6)  # a single sample of class 0
    np.testing.assert_allclose(own[:, 2], np.tile(features[2:].mean(axis=0), (4, 1)), rtol=1e-6)  # both of class 2


def test_a_robust_aggregate_of_representations() -> None:
    values = np.array([[[1.0]], [[2.0]], [[900.0]], [[5.0]]], np.float32)
    held = np.array([[True], [True], [True], [False]])
    median = parts.Aggregation(kind="median", trim=0.2, outputs=False)
    assert parts.mean_representations(values, held, median)[0, 0] == 2.0
    assert parts.mean_representations(values, held)[0, 0] == 301.0


def test_features_must_have_one_dimension_and_a_projection_gives_it() -> None:
    wide = nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, CLASSES))
    with pytest.raises(LearnerError, match=r"crs compares features.*TorchLearner\(module, projection=7\)"):
        cd.Federation(
            [cd.Agent("a", wide, _samples("a"), LABELS["a"]), _agent("b")], cd.CRS(), classes=CLASSES
        )  # fmt: skip
    projected = cd.Agent("a", cd.TorchLearner(wide, projection=WIDTH), _samples("a"), LABELS["a"])
    federation = cd.Federation([projected, _agent("b")], cd.CRS(), classes=CLASSES)
    federation.run(2, **QUIET)
    assert projected.learner.head.in_features == WIDTH
    assert federation.agents[1].state["relayed"]["age"][0, 0] == 1.0
    linear = cd.Agent("a", nn.Linear(2, CLASSES), _samples("a"), LABELS["a"])
    with pytest.raises(LearnerError, match="must not be the samples themselves"):
        cd.Federation([linear], cd.CRS(), classes=CLASSES)
    with pytest.raises(LearnerError, match="a width of at least 1"):
        cd.TorchLearner(nn.Flatten(), projection=3)
