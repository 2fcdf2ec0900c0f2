"""Hosts, links and worker processes, with small protocols that do one thing each."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.preprocessing import StandardScaler
from torch import nn

import codistill as cd
from codistill.core.errors import RuntimeFault
from codistill.engine.privacy_guard import PrivacyGuard
from codistill.nodes.agent import Hub
from codistill.nodes.node import Receive, Send
from codistill.nodes.record import record_of
from codistill.runtimes.service import RemoteError
from codistill.runtimes.workers import SocketLinks
from codistill.wire.message import Message

both_runtimes = pytest.mark.parametrize("runtime", ["simulation", "processes"])


class Silent:
    """A model that learns nothing."""

    def fit(self, x: Any, targets: Any) -> None: ...

    def predict(self, x: Any) -> Any:
        return np.zeros((len(x), 2))


@dataclass(frozen=True, kw_only=True)
class Probe(cd.Protocol):
    """Base of the protocols below."""

    name = "probe"
    needs = cd.Ability.LABELS

    def alone(self) -> None: ...


def _run(protocol: cd.Protocol, runtime: str, rounds: int = 1, agents: int = 4, **options: Any) -> dict[str, Any]:
    members = [cd.Agent(f"a{i}", Silent(), [[float(i)], [i + 0.5]], [0, 1]) for i in range(agents)]
    federation = cd.Federation(members, protocol, **options)
    federation.run(rounds, runtime=runtime, workers=2, progress=False)
    return {agent.name: agent.state for agent in members}


@dataclass(frozen=True, kw_only=True)
class Relay(Probe):
    """Everyone asks the hub three times; the hub tells how many asked before."""

    async def round(self, me: cd.Agent, t: int) -> None:
        for _ in range(3):
            answer = await me.ask_hub(who=me.name)
            assert answer is not None
            me.state.setdefault("numbers", []).append(answer["number"])

    def serve(self, me: Hub, sender: str, message: Message) -> Message:
        me.state["count"] = me.state.get("count", 0) + 1
        assert message["who"] == sender
        return cd.Message.of(number=me.state["count"])


@both_runtimes
def test_a_relay_answers_in_the_order_of_the_roster(runtime: str) -> None:
    numbers = {name: state["numbers"] for name, state in _run(Relay(), runtime).items()}
    assert numbers == {f"a{i}": [i + 1, i + 5, i + 9] for i in range(4)}


@dataclass(frozen=True, kw_only=True)
class Gossip(Probe):
    """Neighbours average a number along the links of a ring, many small steps in a round."""

    topology = "ring"
    steps: int = 50

    async def begin(self, me: cd.Agent) -> None:
        me.state["value"] = me.shard.x[0].astype(np.float64)

    async def round(self, me: cd.Agent, t: int) -> None:
        for _ in range(self.steps):
            heard = await me.exchange(v=me.state["value"])
            me.state["value"] = me.mix(me.state["value"], {name: message["v"] for name, message in heard.items()})


@both_runtimes
def test_neighbours_mix_to_consensus(runtime: str) -> None:
    """Metropolis weights on a ring of four are 1/3 each; the mean of 0, 1, 2, 3 is 1.5."""
    states = _run(Gossip(), runtime, rounds=2)
    np.testing.assert_allclose([state["value"][0] for state in states.values()], 1.5, atol=1e-6)


@both_runtimes
def test_one_step_of_mixing_follows_the_weights(runtime: str) -> None:
    states = _run(Gossip(steps=1), runtime)
    values = [state["value"][0] for state in states.values()]
    np.testing.assert_allclose(values, [(0 + 1 + 3) / 3, (0 + 1 + 2) / 3, (1 + 2 + 3) / 3, (0 + 2 + 3) / 3])


@dataclass(frozen=True, kw_only=True)
class Listen(Gossip):
    """Keeps who was heard, and whom one may speak to."""

    async def round(self, me: cd.Agent, t: int) -> None:
        heard = await me.exchange(v=me.state["value"])
        me.state["heard"], me.state["told"] = sorted(heard), sorted(me.neighbours)
        me.state["value"] = me.mix(me.state["value"], {name: message["v"] for name, message in heard.items()})


# Row n holds how much n takes of whose word; the columns sum to 1 as well.
DIRECTED = np.array([[0.5, 0, 0.25, 0.25], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.25, 0.75]])


@both_runtimes
def test_what_arrives_on_a_directed_graph_is_of_sources_only_and_mixed_by_their_weights(runtime: str) -> None:
    states = _run(Listen(), runtime, topology=cd.Topology.from_matrix([f"a{i}" for i in range(4)], DIRECTED))
    assert [state["heard"] for state in states.values()] == [["a2", "a3"], ["a0"], ["a1"], ["a2"]]
    assert [state["told"] for state in states.values()] == [["a1"], ["a2"], ["a0", "a3"], ["a0"]]
    values = [state["value"][0] for state in states.values()]
    np.testing.assert_allclose(values, DIRECTED @ [0, 1, 2, 3], rtol=1e-12)
    assert np.mean(values) == pytest.approx(1.5), "rows and columns sum to 1, so the mean is kept"


@both_runtimes
def test_a_source_that_is_absent_leaves_its_weight_to_the_one_who_would_hear_it(runtime: str) -> None:
    """Without a2, which says 2: a0 keeps .75 of 0 and takes .25 of 3; a3 keeps all of its 3."""
    topology = cd.Topology.from_matrix([f"a{i}" for i in range(4)], DIRECTED)
    gone = [cd.Fault(kind="gone", agent="a2", first=1)]
    states = _run(Listen(), runtime, topology=topology, faults=gone)
    assert [state.get("heard") for state in states.values()] == [["a3"], ["a0"], None, []]
    np.testing.assert_allclose([states[name]["value"][0] for name in ("a0", "a1", "a3")], [0.75, 0.5, 3.0])


@both_runtimes
def test_a_directed_graph_mixes_to_the_mean(runtime: str) -> None:
    topology = cd.Topology.from_matrix([f"a{i}" for i in range(4)], DIRECTED)
    states = _run(Gossip(), runtime, rounds=2, topology=topology)
    np.testing.assert_allclose([state["value"][0] for state in states.values()], 1.5, atol=1e-6)


@dataclass(frozen=True, kw_only=True)
class Large(Probe):
    """Megabytes each way at once, more than any buffer holds."""

    topology = "complete"

    async def round(self, me: cd.Agent, t: int) -> None:
        mine = np.full(1_000_003, float(me.name[1:]), dtype=np.float32)
        heard = await me.exchange(big=mine)
        me.state["sums"] = {name: float(message["big"].sum(dtype=np.float64)) for name, message in heard.items()}


@both_runtimes
def test_large_messages_in_all_directions_do_not_block(runtime: str) -> None:
    states = _run(Large(), runtime)
    for name, state in states.items():
        assert state["sums"] == {other: int(other[1:]) * 1_000_003.0 for other in states if other != name}


@dataclass(frozen=True, kw_only=True)
class Deadlock(Probe):
    """Everyone waits for a neighbour who waits as well."""

    topology = "ring"

    async def round(self, me: cd.Agent, t: int) -> None:
        await me.receive(me.neighbours[0])


@both_runtimes
def test_a_deadlock_is_an_error_that_says_who_waits_for_whom(runtime: str) -> None:
    with pytest.raises(RuntimeFault, match="every node is waiting.*'a0' waits for a1"):
        _run(Deadlock(), runtime)


@dataclass(frozen=True, kw_only=True)
class Quitter(Probe):
    """a1 sends once and ends; the others go on to wait for it twice."""

    topology = "complete"

    async def round(self, me: cd.Agent, t: int) -> None:
        heard = []
        for _ in range(1 if me.name == "a1" else 2):
            heard.append(sorted(await me.exchange(n=1)))
        me.state["heard"] = heard


@both_runtimes
def test_nobody_waits_for_who_has_ended_its_round(runtime: str) -> None:
    states = _run(Quitter(), runtime)
    assert states["a0"]["heard"] == [["a1", "a2", "a3"], ["a2", "a3"]]


@dataclass(frozen=True, kw_only=True)
class Garbage(Probe):
    """a1 sends NaN, a2 a wrong shape, a3 nothing that was asked for."""

    async def round(self, me: cd.Agent, t: int) -> None:
        value: dict[str, Any] = {
            "a0": {"v": np.ones(2)},
            "a1": {"v": np.array([1.0, np.nan])},
            "a2": {"v": np.ones(3)},
            "a3": {"w": np.ones(2)},
        }[me.name]
        answer = await me.ask_hub(**value)
        assert answer is not None
        me.state["kept"] = answer["names"]

    async def hub(self, me: cd.Hub, t: int) -> None:
        heard = await me.gather(expect={"v": (2,)})
        await me.broadcast(names=sorted(heard))


@both_runtimes
def test_bad_messages_are_refused_by_name_and_the_round_goes_on(runtime: str, tmp_path: Any) -> None:
    members = [cd.Agent(f"a{i}", Silent(), [[float(i)]], [0]) for i in range(4)]
    federation = cd.Federation(members, Garbage())
    federation.run(1, runtime=runtime, workers=2, progress=False, folder=tmp_path)
    assert all(agent.state["kept"] == ["a0"] for agent in members)
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert len(log) == 3
    assert "'hub' continues without a message of 'a1'" in log[0]
    assert "NaN or infinity in 'v'" in log[0]
    assert "shape (2)" in log[1]
    assert "must have an array 'v'" in log[2]


@dataclass(frozen=True, kw_only=True)
class Draw(Probe):
    """Uses every source of randomness, before and after waiting for the others."""

    topology = "complete"

    async def round(self, me: cd.Agent, t: int) -> None:
        import random

        import torch

        def draw() -> list[float]:
            legacy = float(np.random.rand())  # noqa: NPY002
            return [random.random(), legacy, float(torch.rand(())), float(me.rng("own").random())]

        drawn = draw()
        await me.exchange(n=1)
        me.state.setdefault("drawn", []).append(drawn + draw())


def test_randomness_depends_on_seed_agent_and_round_only() -> None:
    alike = [_run(Draw(), runtime, rounds=2, seed=7) for runtime in ("simulation", "processes")]
    assert alike[0] == alike[1]
    drawn = [tuple(row[:3] + row[4:7]) for state in alike[0].values() for row in state["drawn"]]
    assert len({value for row in drawn for value in row}) == 4 * 2 * 6
    assert all(row[3] == row[7] for state in alike[0].values() for row in state["drawn"])
    assert _run(Draw(), "simulation", rounds=2, seed=8) != alike[0]


@dataclass(frozen=True, kw_only=True)
class OneByOne(Draw):
    """The same with a send to each neighbour and a receive, in as many steps as an exchange."""

    async def round(self, me: cd.Agent, t: int) -> None:
        async def exchange(**items: Any) -> None:
            await me._yield(Send(dict.fromkeys(me.neighbours, Message.of(**items))))
            await me._yield(Receive(me.sources))

        me.exchange = exchange  # type: ignore[method-assign, assignment]
        await super().round(me, t)
        del me.exchange


def test_an_exchange_is_a_send_and_a_receive_for_randomness_too() -> None:
    assert _run(OneByOne(), "simulation", seed=7) == _run(Draw(), "simulation", seed=7)


def test_mixing_is_the_weighted_sum_in_the_order_of_the_roster_and_keeps_the_dtype() -> None:
    agent = cd.Agent("a", Silent(), [[0.0], [1.0]], [0, 1])
    agent.topology = cd.Topology.complete(["a", "b", "c"])
    rng = np.random.default_rng(0)
    for kind, shape in (("f4", (3, 2)), ("f8", (2,)), ("f2", ()), ("i8", (2,))):
        own, b, c = (np.asarray(10 * rng.random(shape)).astype(kind) for _ in range(3))
        before, third = own.copy(), 1 / 3
        expected = ((1.0 - (third + third)) * own + third * b) + third * c
        mixed = agent.mix(own, {"b": b, "c": c})
        assert mixed.dtype == kind
        assert np.array_equal(mixed, expected.astype(kind))
        assert np.array_equal(own, before)
    # Who sends more digits is taken with all of them.
    own, b, c = rng.random(50).astype(np.float32), rng.random(50), rng.random(50)
    expected = ((1.0 - (third + third)) * own + third * b) + third * c
    assert np.array_equal(agent.mix(own, {"b": b, "c": c}), expected.astype(np.float32))
    # A new topology has its own weights.
    agent.topology = cd.Topology.complete(["a", "b"])
    assert agent.mix(np.zeros(1), {"b": np.ones(1)}) == 0.5


@dataclass(frozen=True, kw_only=True)
class Stranger(Probe):
    """Speaks past the links."""

    topology = "ring"

    async def round(self, me: cd.Agent, t: int) -> None:
        await me.send("a2" if me.name == "a0" else me.neighbours[0], n=1)


@both_runtimes
def test_messages_only_go_along_links(runtime: str) -> None:
    with pytest.raises(RuntimeFault, match="link of the topology.*'a0' tried to send to 'a2'"):
        _run(Stranger(), runtime)


@dataclass(frozen=True, kw_only=True)
class Broken(Probe):
    """A protocol with a defect."""

    async def round(self, me: cd.Agent, t: int) -> None:
        if me.name == "a2":
            raise ZeroDivisionError("defect")
        await me.ask_hub(n=1)


def test_a_defect_in_a_protocol_says_where_it_happened() -> None:
    with pytest.raises(ZeroDivisionError) as here:
        _run(Broken(), "simulation")
    line = Broken.round.__code__.co_firstlineno + 2
    assert here.value.__notes__[0] == "This happened at 'a2' in round 1."
    assert here.value.__notes__[1].endswith(f'test_host.py:{line}, in round: raise ZeroDivisionError("defect")')
    with pytest.raises(RemoteError, match="ZeroDivisionError: defect") as there:
        _run(Broken(), "processes")
    assert "This happened at 'a2' in round 1." in there.value.__notes__
    assert any("Traceback" in note for note in there.value.__notes__)
    assert here.value.__notes__[1] in there.value.__notes__


@dataclass(frozen=True, kw_only=True)
class Killed(Probe):
    """A worker that is killed from outside."""

    async def round(self, me: cd.Agent, t: int) -> None:
        if me.name == "a1":
            os.kill(os.getpid(), signal.SIGKILL)
        await me.ask_hub(n=1)


def test_a_dead_worker_ends_the_run_with_a_sentence() -> None:
    with pytest.raises(RuntimeFault, match="worker . ended unexpectedly"):
        _run(Killed(), "processes")


@dataclass(frozen=True, kw_only=True)
class Leak(Probe):
    """Sends a private sample in the middle of other numbers."""

    async def round(self, me: cd.Agent, t: int) -> None:
        await me.ask_hub(stuff=np.concatenate([np.zeros(3), me.shard.x[1].astype(np.float64), np.ones(2)]))


@both_runtimes
def test_the_privacy_guard_finds_a_private_sample(runtime: str) -> None:
    rng = np.random.default_rng(0)
    members = [cd.Agent(f"a{i}", Silent(), rng.normal(size=(3, 4)), [0, 1, 0]) for i in range(2)]
    for member in members:
        record_of(member).encode_labels(2)
    federation = cd.Federation(members, Leak(), watchers=[PrivacyGuard(members)])
    with pytest.raises(RuntimeFault, match="Data stays home.*sample 1 of agent 'a0'.*'stuff'"):
        federation.run(1, runtime=runtime, workers=1, progress=False)


@dataclass(frozen=True, kw_only=True)
class LeakOf(Probe):
    """Sends one of the things that must stay at home, in the middle of other numbers."""

    what: str = "labels"

    async def round(self, me: cd.Agent, t: int) -> None:
        leaks = {
            "labels": lambda: me.shard.labels[3:40].astype(np.uint8),
            "one-hot": lambda: me.shard.targets[:20],
            "weights": lambda: np.append(1.0, me.learner.weights()["weight"].ravel()),
            "nothing": lambda: me.shard.labels[:8],
            "hub": lambda: np.zeros(1),
        }
        leak = leaks[self.what]()
        await me.ask_hub(stuff=leak) if self.what != "labels" else await me.ask_hub(stuff=leak.tolist())

    def serve(self, me: Hub, sender: str, message: Message) -> Message:
        me.state["secret"] = {"weights": [torch.arange(9.0)]}
        return Message.of(stuff=np.arange(12.0) if self.what == "hub" else np.zeros(1))


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("labels", "run of labels 1 of agent 'a0' is in the array 'stuff' sent to 'hub'"),
        ("one-hot", "run of labels 0 of agent 'a0' is in the array 'stuff' sent to 'hub'"),
        ("weights", "learnt array 0 of agent 'a0' is in the array 'stuff' sent to 'hub'"),
        ("hub", "learnt array 0 of the hub is in the array 'stuff' sent to 'a0'"),
        ("nothing", ""),
    ],
)
def test_the_privacy_guard_finds_labels_weights_and_what_the_hub_keeps(what: str, sentence: str) -> None:
    rng = np.random.default_rng(0)
    members = [cd.Agent(f"a{i}", nn.Linear(4, 5), rng.normal(size=(50, 4)), rng.integers(0, 5, 50)) for i in range(2)]
    federation = cd.Federation(members, LeakOf(what=what), classes=5)
    guard = PrivacyGuard(members, federation.hub, models=True)
    federation.description = replace(federation.description, watchers=(guard,))
    if sentence:
        with pytest.raises(RuntimeFault, match=sentence):
            federation.run(1, runtime="simulation", alone=False, progress=False)
    else:
        assert federation.run(1, runtime="simulation", alone=False, progress=False).rows


def _half(row: np.ndarray) -> np.ndarray:
    return row.astype(np.float32).astype(np.float16)


def _bfloat16(row: np.ndarray) -> torch.Tensor:
    return torch.tensor(row, dtype=torch.float32).bfloat16()


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), dtype=np.uint8)


NOISE = np.random.default_rng(7).normal(size=(3, 64))
# Of a row: what is sent in its place.
CHANGED: dict[str, Callable[[np.ndarray], Any]] = {
    "half precision": _half,
    "bfloat16": lambda row: _bfloat16(row).float().numpy(),
    "bfloat16, cut off": lambda row: (row.astype(np.float32).view(np.uint32) >> 16 << 16).view(np.float32),
    "bfloat16 as integers": lambda row: _bfloat16(row).view(torch.int16).numpy(),
    "single precision as integers": lambda row: row.astype(np.float32).view(np.int32),
    "scaled": lambda row: 3.7 * row,
    "shifted": lambda row: row - 2.1,
    "negated and shifted": lambda row: 1 - row,
    "scaled, in half precision": lambda row: _half(0.37 * row + 1),
    "eight bits": lambda row: np.round((row - row.min()) / np.ptp(row) * 255).astype(np.uint8),
    "bytes": lambda row: _bytes(row.astype(np.float32)),
    "bytes of half precision": lambda row: _bytes(_half(row)),
    "bytes at an odd place": lambda row: np.append(np.uint8([1, 2, 3]), _bytes(row.astype(np.float64))),
    "bytes, the highest first": lambda row: _bytes(row.astype(">f4")),
    "a list": lambda row: (2 * row).tolist(),
    "JSON": lambda row: json.dumps(row.tolist()),
    "text of four digits": lambda row: ", ".join(f"{value:.4f}" for value in row),
    "bytes of a text": lambda row: np.frombuffer(json.dumps(row.tolist()).encode(), dtype=np.uint8),
    "between other numbers": lambda row: np.concatenate([NOISE[0], 2 * row, NOISE[1]]),
    "a column": lambda row: np.stack([NOISE[0, : len(row)], 2 * row, NOISE[1, : len(row)]], axis=1),
    "a batch": lambda row: np.stack([NOISE[0, : len(row)], 2 * row])[None],
}


def _guarded(x: np.ndarray, model: Any = None) -> tuple[PrivacyGuard, np.ndarray]:
    agent = cd.Agent("a", model or Silent(), x, np.arange(len(x)) % 2)
    record_of(agent).encode_labels(2)
    return PrivacyGuard([agent]), agent.shard.x.reshape(len(x), -1)


@pytest.mark.parametrize("form", list(CHANGED))
@pytest.mark.parametrize("data", ["digits", "table"])
def test_the_privacy_guard_finds_changed_copies_of_a_sample(form: str, data: str, digits: Any) -> None:
    """Images with 17 grey levels, and standardised tables of 13 columns."""
    x, _ = load_wine(return_X_y=True)
    rows = digits[0][:60].reshape(60, -1) if data == "digits" else (x[:60] - x.mean(axis=0)) / x.std(axis=0)
    guard, known = _guarded(rows)
    for index in (0, 31, 59):
        message = Message.of(stuff=CHANGED[form](known[index].astype(np.float64)))
        with pytest.raises(RuntimeFault, match=f"sample {index} of agent 'a'"):
            guard("a", "hub", message.encoded)
        guard("b", "hub", message.encoded)  # of another sender it is no secret


def test_the_privacy_guard_finds_a_sample_as_numbers_with_names_of_their_own(digits: Any) -> None:
    guard, known = _guarded(digits[0][:60].reshape(60, -1))
    message = Message.of(**{f"v{place}": float(3 * value) for place, value in enumerate(known[7])})
    with pytest.raises(RuntimeFault, match="sample 7 of agent 'a', changed, is in 'plain values'"):
        guard("a", "hub", message.encoded)


@pytest.mark.parametrize("form", ["half precision", "bfloat16", "scaled", "shifted", "JSON", "a column"])
def test_the_privacy_guard_finds_changed_copies_of_short_rows(form: str) -> None:
    """Of four columns: the fewer values there are, the more exactly they must agree."""
    guard, known = _guarded(np.random.default_rng(0).normal(size=(20, 4)))
    with pytest.raises(RuntimeFault, match="sample 3 of agent 'a'"):
        guard("a", "hub", Message.of(stuff=CHANGED[form](known[3].astype(np.float64))).encoded)


def test_the_privacy_guard_finds_samples_as_they_were_before_they_were_prepared() -> None:
    """Each column scaled by its own factor is another row; both must stay at home."""
    x = np.random.default_rng(0).normal(size=(20, 9)) * np.arange(1, 10)
    agent = cd.Agent("a", Silent(), x, np.arange(20) % 2, prepare=StandardScaler())
    record_of(agent).encode_labels(2)
    guard = PrivacyGuard([agent])
    for row in (x[5], agent.shard.x[5]):
        with pytest.raises(RuntimeFault, match="sample 5 of agent 'a'"):
            guard("a", "hub", Message.of(stuff=3 * row.astype(np.float64)).encoded)


def test_the_privacy_guard_is_not_alarmed_by_anything_else(digits: Any) -> None:
    """Other samples of the same kind, means, covariances, outputs, indices, random bytes, and simple sequences."""
    random = np.random.default_rng(0)
    cancer, _ = load_breast_cancer(return_X_y=True)  # columns of very different size: rows are alike up to a percent
    images = digits[0].reshape(len(digits[0]), -1)
    hot = np.eye(5)[random.integers(0, 5, (300, 3))].reshape(300, -1)
    tables = {
        "cancer": cancer,
        "standardised": (cancer - cancer.mean(axis=0)) / cancer.std(axis=0),
        "digits": images,
        "one-hot": np.hstack([hot, random.normal(size=(300, 1))]),
        "ramps": np.outer(random.uniform(1, 2, 300), np.arange(12)) + random.normal(size=(300, 1)),
        "two columns": random.normal(size=(300, 2)),
    }
    for rows in tables.values():
        guard, known = _guarded(rows[:60])
        honest = {
            "others": rows[60:300].astype(np.float32),
            "means": np.stack([known[:30].mean(axis=0), known[30:].mean(axis=0)]),
            "covariance": np.cov(known.T),
            "outputs": random.dirichlet(np.ones(10), 200).astype(np.float32),
            "labels": np.eye(10)[random.integers(0, 10, 200)],
            "numbers": random.normal(size=3000),
            "bytes": random.integers(0, 256, 3000).astype(np.uint8),
            "places": random.permutation(3000),
            "count": np.arange(2000),
            "wave": np.sin(np.arange(2000) / 7),
            "nothing": np.zeros(2000),
        }
        guard("a", "hub", Message(honest, {"text": "round 3 of 10", "n": 3}).encoded)


def test_a_gradient_of_one_sample_is_that_sample_scaled(digits: Any) -> None:
    """d loss / d W = δ xᵀ: in arrays that have the form of weights it does not count, anywhere else it does."""
    module = nn.Linear(64, 10)
    guard, known = _guarded(digits[0][:60].reshape(60, -1), module)
    module(torch.from_numpy(known[:1])).square().sum().backward()
    gradient = module.weight.grad
    assert gradient is not None
    guard("a", "hub", Message.of(weight=gradient.numpy()).encoded)
    with pytest.raises(RuntimeFault, match="sample 0 of agent 'a', changed, is in 'other'"):
        guard("a", "hub", Message.of(other=gradient.numpy()).encoded)


def test_message_numbers_decide_the_fate_of_messages_not_their_order_of_arrival() -> None:
    lossy = [cd.Fault(kind="drop", rate=0.5)]
    states = [_run(Gossip(steps=20), runtime, faults=lossy) for runtime in ("simulation", "processes")]
    assert states[0] == states[1]
    values = [state["value"][0] for state in states[0].values()]
    assert max(values) - min(values) < 3.0


@dataclass(frozen=True, kw_only=True)
class Slow(Probe):
    """a0 keeps everybody waiting, again and again, for longer than it takes to look for a deadlock."""

    async def round(self, me: cd.Agent, t: int) -> None:
        import time

        for step in range(2):
            if me.name == f"a{step}":
                time.sleep(3.5)
            assert await me.ask_hub(n=step) is not None

    async def hub(self, me: cd.Hub, t: int) -> None:
        for _ in range(2):
            await me.gather()
            await me.broadcast(ok=1)


def test_waiting_for_a_slow_agent_is_no_deadlock() -> None:
    assert set(_run(Slow(), "processes")) == {"a0", "a1", "a2", "a3"}


ORDER: list[str] = []


@dataclass(frozen=True, kw_only=True)
class BusyHub(Probe):
    """The hub has something to do after it has answered."""

    async def round(self, me: cd.Agent, t: int) -> None:
        await me.ask_hub(who=me.name)

    async def hub(self, me: Hub, t: int) -> None:
        heard = await me.gather()
        ORDER.append("heard")
        await me.scatter({name: Message.of(number=1) for name in heard})
        ORDER.append("goes on")


def test_the_hub_sends_its_answers_before_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    flush = SocketLinks.flush
    monkeypatch.setattr(SocketLinks, "flush", lambda links: (ORDER.append("sends"), flush(links))[1])
    ORDER.clear()
    _run(BusyHub(), "processes")
    start = ORDER.index("heard")
    assert ORDER[start : start + 3] == ["heard", "sends", "goes on"]
