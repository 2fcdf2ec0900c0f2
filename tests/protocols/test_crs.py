"""CRS against a straight-line copy of its pseudo-code; what agents choose; and what the relay keeps and passes on."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import codistill as cd
from codistill.core.errors import LearnerError, RecipeError
from codistill.core.rng import generator
from codistill.learners.zoo import build
from codistill.nodes.record import record_of
from codistill.protocols import parts
from codistill.protocols.crs import mean_representations, own_representations
from codistill.topology import Topology
from codistill.wire.message import Message

LR, CLASSES, WIDTH = 0.1, 3, 4
ANY: dict[str, Any] = {"smallest_group": 1}  # also means of single samples, by which the pseudo-code is followed here
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

    def step(
        self,
        mean: dict[int, torch.Tensor],
        observed: dict[int, torch.Tensor],
        kd: float,
        disc: float,
        over: tuple[str, str] = ("mean", "mean"),
    ) -> None:
        """L_CE + λ_KD L_KD + λ_disc L_disc, with naive logarithms; `over` features and over pairs: a mean or a sum."""
        s = self.net[:2](self.x)
        f = self.net[2](s)
        loss = cross_entropy(f, self.y)
        for i, y in enumerate(self.y.tolist()):
            if y in mean:
                loss = loss + kd * getattr((s[i] - mean[y]).square(), over[0])() / len(self.y)
            pairs = []
            for c, t in observed.items():
                h = torch.softmax(f[i], 0) @ torch.softmax(self.net[2](t), 0)
                pairs.append(-h.log() if c == y else -(1 - h).log())
            if pairs:
                loss = loss + disc * getattr(torch.stack(pairs), over[1])() / len(self.y)
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


_FORMS = {
    "random": ({"start": "random"}, ("mean", "mean")),
    "none": ({"start": "none"}, ("mean", "mean")),
    "sum over features": ({"features": "sum"}, ("sum", "mean")),
    "sum over pairs": ({"pairs": "sum"}, ("mean", "sum")),
    "printed": ({"form": "printed"}, ("sum", "sum")),
}


@pytest.mark.parametrize("form", _FORMS)
def test_rounds_through_the_relay_equal_the_pseudo_code(form: str) -> None:
    """Two agents: the other's only observation is its mean, as n_avg is above what it has of any class."""
    settings, over = _FORMS[form]
    protocol = cd.CRS(kd_weight=2.0, disc_weight=0.5, average_over=9, **settings, **ANY)
    start = protocol.start
    assert (start == "random") == (form in ("random", "printed"))
    federation = _federation(protocol, "ab", seed=3)
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
            copies[name].step(mean, observed, 2.0, 0.5, over)
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
    federation = _federation(cd.CRS(kd_weight=2.0, disc_weight=0.0, average_over=9, **ANY), topology=path)
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
    """Neither in a mean nor in the model that computes it: before, the withheld samples were trained on.

    Agent a releases sample 0 of class 0 and sample 2 of class 1, so it is sent what one step on these two gives.
    """
    (some,) = _watched(ANY, releases=np.array([True, False, True, False]))
    copy = _Copy("a")
    copy.x, copy.y = copy.x[[0, 2]], copy.y[[0, 2]]
    copy.step({}, {}, 0, 0)
    for c, mean in copy.means().items():
        np.testing.assert_allclose(some["representations"][0, c], mean, atol=1e-6)
    assert some["held"].tolist() == [True, True, False]
    assert _watched({}, releases=np.array([True, False, True, False])) == []  # each class has one sample only
    with pytest.raises(
        cd.CodistillError, match="releases of agent 'a' must release at least one sample.*4 samples, all withheld"
    ):
        _watched({}, releases=[False] * 4)
    with pytest.raises(cd.CodistillError, match="releases of agent 'a' must be a boolean mask of its 4 samples"):
        _watched({}, releases=[0, 1])


def test_choices_are_checked_before_the_run() -> None:
    with pytest.raises(RecipeError, match="Agent 'a' may choose only what crs leaves to its agents.*Did you mean"):
        cd.Federation([_agent("a", choices={"upload": 1}), _agent("b")], cd.CRS(), classes=CLASSES)
    with pytest.raises(RecipeError, match=r"crs\.uploads must be at least 0"):
        cd.Federation([_agent("a", choices={"uploads": -1}), _agent("b")], cd.CRS(), classes=CLASSES)
    with pytest.raises(RecipeError, match="what fedproto leaves to its agents"):
        cd.Federation([_agent("a", choices={"weight": 1.0}), _agent("b")], cd.FedProto(), classes=CLASSES)


_STAR, _RING = None, Topology.ring(["a", "b", "c", "d"])
_SWITCHED_OFF: list[tuple[dict[str, Any], str]] = [
    ({"listen_to": ()}, "listen_to of agent 'a' must name an agent that it hears.*an empty list.*Name some of b, "),
    ({"listen_to": ("a",)}, "listen_to of agent 'a' must name .*'a'"),
    ({"listen_to": ("bb",)}, "listen_to of agent 'a' must name .*'bb'.*Did you mean 'b'"),
    ({"listen_to": ("b", "bb")}, "'bb'.*Did you mean 'b'"),
    ({"release_classes": (CLASSES,)}, f"release_classes of agent 'a' must be classes .*, 0 to 2.*{CLASSES}"),
    ({"release_classes": (0, 7)}, "release_classes of agent 'a'.*7"),
    ({"oldest": 0.5}, "oldest of agent 'a' must be at least 1 with rounds.*0.5"),
]  # fmt: skip


@pytest.mark.parametrize("topology", [_STAR, _RING], ids=["hub", "ring"])
@pytest.mark.parametrize(("settings", "error"), _SWITCHED_OFF, ids=lambda given: str(given)[:30])
def test_what_would_switch_learning_off_is_refused_by_name(
    settings: dict[str, Any], error: str, topology: Topology | None
) -> None:
    """With a hub and without, as a setting of all agents and as the choice of one, also where it is alone at hand."""
    others = [cd.Agent(name, _net(name), _samples("b"), LABELS["b"]) for name in "bcd"]
    options: dict[str, Any] = {"classes": CLASSES, "topology": topology}
    with pytest.raises(RecipeError, match=error):
        cd.Federation([_agent("a"), *others], cd.CRS(**settings), **options)
    with pytest.raises(RecipeError, match=error):
        cd.Federation([_agent("a", choices=settings), *others], cd.CRS(), **options)
    known = cd.Federation([_agent("a"), *others], cd.CRS(), **options)
    (alone,) = (agent for agent in known.agents if agent.name == "a")
    alone.choices = settings
    with pytest.raises(RecipeError, match=error):
        cd.CRS().check([alone])


def test_whom_an_agent_may_listen_to() -> None:
    """Oneself only as one of a list for all; without a hub one's neighbours only; without rounds, below 1 s."""
    names = ["a", "b", "c", "d"]

    def made(protocol: cd.CRS, choices: dict[str, Any] | None = None, **options: Any) -> cd.Federation:
        agents = [cd.Agent(name, _net(name), _samples("b"), LABELS["b"]) for name in "bcd"]
        return cd.Federation([_agent("a", choices=choices or {}), *agents], protocol, classes=CLASSES, **options)

    made(cd.CRS(listen_to=("a", "b")))
    made(cd.CRS(listen_to=("a", "b", "c", "d")), topology=Topology.ring(names))
    with pytest.raises(RecipeError, match="listen_to of agent 'a' must name other agents that it hears.*itself, 'a'"):
        made(cd.CRS(), {"listen_to": ("a", "b")})
    with pytest.raises(
        RecipeError, match="listen_to of agent 'a' must name other agents that it hears.*'c'.*Known: b, d"
    ):
        made(cd.CRS(), {"listen_to": ("c",)}, topology=Topology.ring(names))
    with pytest.raises(RecipeError, match="listen_to of agent 'b' must name an agent that it hears.*'b'"):
        made(cd.CRS(listen_to=("b",)))
    made(cd.CRS(oldest=0.5), clock=cd.Clock(asynchronous=True))
    made(cd.CRS(oldest=1.0))


# --- the smallest group ---------------------------------------------------------------------------


def _sent(protocol: cd.Protocol, key: str, labels: list[int], **options: Any) -> tuple[list[Message], cd.Result]:
    """What agent a sends with `key` in one round, and the result; agent b has plenty of every class."""
    seen: list[Message] = []

    def watch(sender: str, receiver: str, data: bytes) -> None:
        message = Message.decode(data)
        if sender == "a" and key in message:
            seen.append(message)

    rng, many = np.random.default_rng(0), np.arange(30) % CLASSES
    x, other = rng.normal(size=(len(labels), 2)), rng.normal(size=(30, 2))
    agents = [cd.Agent("a", _net("a"), x, labels, **options), cd.Agent("b", _net("a"), other, many)]
    result = cd.Federation(agents, protocol, classes=CLASSES, watchers=[watch]).run(1, **QUIET)
    return seen, result


_BY_CLASS = [
    (cd.CRS, "representations", "held"), (cd.FD, "means", "seen"), (cd.FedProto, "prototypes", "seen"),
    (cd.FedDistill, "class means", "classes seen"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "key", "flags"), _BY_CLASS, ids=[kind.name for kind, _, _ in _BY_CLASS])
@pytest.mark.parametrize("epochs", [{}, {"local_epochs": 3}, {"local_steps": 4, "batch_size": 6}], ids=str)
def test_a_class_below_the_smallest_group_is_left_out_by_name(kind: Any, key: str, flags: str, epochs: Any) -> None:
    """Agent a has 3, 2 and 1 samples of the classes 0, 1 and 2; one that is used in several epochs is still one.

    The remark names what is not sent, never how many samples there are.
    """
    labels = [0, 0, 0, 1, 1, 2]
    for smallest, expected in ((1, [1, 1, 1]), (2, [1, 1, 0]), (3, [1, 0, 0]), (4, [0, 0, 0])):
        sent, result = _sent(kind(smallest_group=smallest, **epochs), key, labels)
        said = [event for event in result.events if "smallest_group" in event]
        left_out = ", ".join(str(c) for c in range(CLASSES) if not expected[c])
        wanted = f"round 1: 'a': it sends no mean of the classes {left_out}: fewer than {smallest} samples of each"
        assert said == ([] if smallest == 1 else [f"{wanted} (smallest_group)."])
        assert sent or (kind is cd.CRS and smallest == 4)  # who has nothing to upload sends nothing
        for message in sent:
            assert message[flags].tolist() == [bool(each) for each in expected]
            values = np.moveaxis(message[key], -2, 0)  # by class
            assert [bool(each.any()) for each in values] == message[flags].tolist()
    # The default is 2, and an agent may choose for itself.
    (plain, *_), _ = _sent(kind(**epochs), key, labels)
    assert plain[flags].tolist() == [True, True, False]
    (chosen, *_), _ = _sent(kind(smallest_group=1, **epochs), key, labels, choices={"smallest_group": 3})
    assert chosen[flags].tolist() == [True, False, False]


def test_steps_that_have_used_one_sample_of_a_class_send_no_mean_of_it() -> None:
    """A batch of two samples is one of each class, or two of one: only the latter is a group."""
    for seed_labels in ([0, 1] * 6, [0, 0, 1, 1] * 3):
        (sent, *_), _ = _sent(cd.FD(local_steps=1, batch_size=2), "means", seed_labels)
        used = np.array([np.abs(mean).sum() > 0 for mean in sent["means"]])
        assert used.tolist() == sent["seen"].tolist()
        assert sent["seen"].sum() in (0, 1)


@pytest.mark.parametrize(
    ("average_over", "samples", "expected"), [(1, 6, 2), (2, 6, 2), (5, 6, 6), (4, 6, 4), (9, 6, 6)]
)
def test_no_single_sample_comes_out_of_an_observation_or_its_difference_to_the_mean(
    average_over: int, samples: int, expected: int
) -> None:
    """n times the class mean less k times an observation is the sum over the n - k samples that it leaves out.

    So k is at least 2, and n - k is 0 or at least 2: of six samples an observation of five would leave out one.
    """
    agent = _federation(cd.CRS(), "ab").agents[0]
    record_of(agent).start(0, ("a", "b"))
    rng = np.random.default_rng(3)
    agent.shard = type(agent.shard)(rng.normal(size=(samples, 2)), np.zeros(samples, int), CLASSES, "a")
    own, _ = own_representations(agent, average_over, 1, smallest=2)
    features = agent.learner.evaluated_features(agent.shard.x)
    matches = [
        k for k in range(1, samples + 1)
        for rows in itertools.combinations(range(samples), k)
        if np.allclose(features[list(rows)].mean(axis=0), own[1, 0], atol=1e-6)
    ]  # fmt: skip
    assert matches == [expected]


# --- the relay ------------------------------------------------------------------------------------


def _relay() -> cd.Hub:
    hub = cd.Hub()
    hub.classes, hub.topology = CLASSES, Topology.star(["a", "b", "c"])
    record_of(hub).start(0, ("a", "b", "c"))
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
    record_of(hub).start(4, ("a", "b", "c"))
    protocol.serve(hub, "c", _upload(5.0, [True] * 3))
    record_of(hub).start(6, ("a", "b", "c"))
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
    from codistill.nodes.agent import JoinInfo

    hub = _relay()
    hub.joined["b"] = JoinInfo(4, features=WIDTH)
    answer = cd.CRS().serve(hub, "b", message)
    assert not answer
    assert [sender for sender, _ in record_of(hub).rejected] == ["b"]
    assert hub.state["uploads"] == {}


def test_it_goes_on_while_all_but_two_are_offline_and_who_comes_back_catches_up() -> None:
    gone = [cd.Fault(kind="gone", agent="c", first=2, last=4)]
    federation = _federation(cd.CRS(average_over=9, **ANY), faults=gone)
    federation.run(5, **QUIET)
    # c was away in rounds 2 to 4: in round 5 it downloads what a and b uploaded in round 4, one round old.
    relayed = federation.agents[2].state["relayed"]
    assert relayed["time"] == 4.0
    assert relayed["age"][1:].max() == 1.0
    assert (relayed["age"][1] == [1, 1, 1]).all()
    # The others still used c's upload of round 1, unless it is too old for them.
    assert federation.agents[0].state["relayed"]["age"][0, 0] == 4.0
    strict = _federation(cd.CRS(average_over=9, oldest=2.0, **ANY), faults=gone)
    strict.run(5, **QUIET)
    assert strict.agents[0].state["relayed"]["age"][0, 0] == 1.0


# --- parts ----------------------------------------------------------------------------------------


def test_a_class_with_fewer_samples_is_averaged_over_those_there_are() -> None:
    federation = _federation(cd.CRS(), "ab")
    agent = federation.agents[1]
    record_of(agent).start(0, ("a", "b"))
    own, held = own_representations(agent, 2, 3)
    features = agent.learner.evaluated_features(_samples("b"))
    assert held.tolist() == [True, True, True]
    np.testing.assert_allclose(own[:, 0], np.tile(features[0], (4, 1)), rtol=1e-6)  # a single sample of class 0
    np.testing.assert_allclose(own[:, 2], np.tile(features[2:].mean(axis=0), (4, 1)), rtol=1e-6)  # both of class 2


def test_a_robust_aggregate_of_representations() -> None:
    values = np.array([[[1.0]], [[2.0]], [[900.0]], [[5.0]]], np.float32)
    held = np.array([[True], [True], [True], [False]])
    median = parts.Aggregation(kind="median", trim=0.2, outputs=False)
    assert mean_representations(values, held, median)[0, 0] == 2.0
    assert mean_representations(values, held)[0, 0] == 301.0


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
