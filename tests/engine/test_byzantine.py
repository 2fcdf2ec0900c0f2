"""Byzantine agents (injected faults): what their messages hold, to whom, when, and where it is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import codistill as cd
from codistill.core.errors import RecipeError
from codistill.nodes.faults import Fault, Faults
from codistill.results.records import Row
from codistill.topology import Topology
from codistill.wire.message import Message

NAMES = ("a", "b", "c")
Watched = list[tuple[str, str, bytes]]


class Silent:
    """A model that learns nothing."""

    def fit(self, x: Any, targets: Any) -> None: ...

    def predict(self, x: Any) -> Any:
        return np.tile([1.0, 0.0], (len(x), 1))


@dataclass(frozen=True, kw_only=True)
class Tell(cd.Protocol):
    """Everyone tells known arrays twice per round: to all neighbours at once, and then one by one."""

    name = "tell"
    needs = cd.Ability.LABELS
    topology = "complete"

    def alone(self) -> None: ...

    async def round(self, me: cd.Agent, t: int) -> None:
        heard = [await me.exchange(honest(me.name, t))]
        same = honest(me.name, t)
        for name in me.neighbours:
            await me.send(name, same)
        second = {name: await me.receive(name) for name in me.neighbours}
        heard.append({name: message for name, message in second.items() if message is not None})
        me.state.setdefault("heard", []).extend(
            {name: {**message.arrays, **message.plain} for name, message in each.items()} for each in heard
        )


def honest(name: str, t: int) -> Message:
    """What an honest agent says in round t."""
    own = NAMES.index(name) + 1
    p = np.array([[1.0, -2.0, 0.5], [3.0, 0.25, -4.0]], np.float32) * own + t
    w = np.linspace(-1, 1, 400) * own + t
    return Message.of(p=p, w=w, count=np.arange(3) - own, seen=np.array([True, False]), size=2.5)


def run(
    *faults: Fault, rounds: int = 2, runtime: str = "simulation", protocol: cd.Protocol | None = None, **options: Any
) -> tuple[dict[str, Any], list[Row]]:
    """What each agent heard, by place in the run and sender; and the rows."""
    kept = {key: options.pop(key) for key in ("folder", "resume") if key in options}
    agents = [cd.Agent(name, Silent(), [[0.0], [1.0]], [0, 1]) for name in NAMES]
    federation = cd.Federation(agents, protocol or Tell(), faults=faults, test=([[0.0]], [0]), **options)
    result = federation.run(rounds, runtime=runtime, workers=2, progress=False, alone=False, **kept)
    return {agent.name: agent.state.get("heard") for agent in agents}, result.rows


def arrays_equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(arrays_equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(arrays_equal, left, right))
    return bool(np.array_equal(left, right)) and getattr(left, "dtype", None) == getattr(right, "dtype", None)


# --- what is said ---------------------------------------------------------------------------------


def test_inverted_is_minus_what_an_honest_run_says_and_nothing_else_changes() -> None:
    """b's floating-point arrays times -2 in round 2 only; its other items, and all that others say, stay."""
    sound, _ = run(rounds=3)
    false, _ = run(Fault(kind="invert", agent="b", strength=2.0, first=2, last=2), rounds=3)
    for listener, places in sound.items():
        for place, heard in enumerate(places):
            expected = {sender: dict(items) for sender, items in heard.items()}
            if place in (2, 3) and listener != "b":  # two messages per round
                expected["b"]["p"] = -2 * expected["b"]["p"]
                expected["b"]["w"] = -2 * expected["b"]["w"]
            assert arrays_equal(false[listener][place], expected), (listener, place)


def test_random_is_noise_of_the_honest_spread() -> None:
    """400 values: the sample's deviation is within 4 · 1/√800 = 14 % of the true one, the mean within 4/√400."""
    heard, _ = run(Fault(kind="random", agent="b", strength=10.0))
    expected = honest("b", 0)
    said = heard["a"][0]["b"]
    assert {name: (said[name].shape, said[name].dtype) for name in expected.arrays} == {
        name: (array.shape, array.dtype) for name, array in expected.arrays.items()
    }
    scale = 10 * expected["w"].std()
    assert said["w"].std() == pytest.approx(scale, rel=0.14)
    assert abs(said["w"].mean()) < 0.2 * scale
    assert abs(np.corrcoef(said["w"], expected["w"])[0, 1]) < 0.2
    assert said["count"].tolist() == expected["count"].tolist()
    assert said["seen"].tolist() == [True, False]
    assert said["size"] == 2.5
    assert arrays_equal(heard["b"], run()[0]["b"]), "a Byzantine agent receives what the others send"


def test_noise_differs_by_round_message_seed_and_agent_and_is_the_same_for_all_receivers() -> None:
    # Faults in this order give b its place 1: the place is one of the keys.
    faults = [Fault(kind="random", agent=name) for name in ("a", "b")]
    heard, _ = run(*faults)
    assert arrays_equal([h["b"] for h in heard["a"]], [h["b"] for h in heard["c"]])
    # Standardised, so that the honest arrays' different spreads do not count as a difference.
    noises = [h[name]["w"] / h[name]["w"].std() for h in heard["c"] for name in ("a", "b")]
    noises.append((w := run(*faults, seed=1)[0]["c"][0]["b"]["w"]) / w.std())
    assert len(noises) == 2 * 2 * 2 + 1
    assert all(abs(np.mean(x * y)) < 0.3 for i, x in enumerate(noises) for y in noises[:i])
    assert arrays_equal(heard, run(*faults)[0])


def test_a_rate_is_the_share_of_byzantine_messages() -> None:
    faults = Faults([Fault(kind="invert", agent="b", rate=0.3)], NAMES, seed=0)
    message = honest("b", 0)
    false = [faults.as_sent(0, "b", number, message) is not message for number in range(2000)]
    # Four standard deviations of a binomial: 4 sqrt(0.3 · 0.7 / 2000) = 0.041.
    assert np.mean(false) == pytest.approx(0.3, abs=0.041)
    never = Faults([Fault(kind="invert", agent="b", rate=0)], NAMES, seed=0)
    assert never.as_sent(0, "b", 1, message) is message


def test_what_does_not_fit_is_finite() -> None:
    """-1e6 · (3, -3, 0.01) in half precision, which ends at 65504: (-65504, 65504, -10000)."""
    faults = Faults([Fault(kind="invert", agent="b", strength=1e6)], NAMES, seed=0)
    said = faults.as_sent(0, "b", 1, Message.of(x=np.array([3, -3, 0.01], np.float16)))["x"]
    assert said.dtype == np.float16
    np.testing.assert_allclose(said.astype(float), [-65504, 65504, -1e4], rtol=1e-3)
    garbage = Faults([Fault(kind="random", agent="b", strength=1e308)], NAMES, seed=0)
    for dtype in (np.float16, np.float32, np.float64):
        noise = garbage.as_sent(0, "b", 1, Message.of(x=np.array([3, -30, 40], dtype)))["x"]
        assert np.isfinite(noise).all()
        assert np.abs(noise).max() > 1e4


@pytest.mark.parametrize("kind", ["invert", "random"])
@pytest.mark.filterwarnings("error")
def test_odd_arrays_keep_shape_and_dtype(kind: str) -> None:
    arrays = {"none": np.zeros((0, 3), np.float32), "one": np.float64(2.5), "swapped": np.ones(2, ">f4")}
    message = Message(arrays)
    false = Faults([Fault(kind=kind, agent="b")], NAMES, seed=0).as_sent(0, "b", 1, message)
    sent = Message.decode(false.encoded)
    assert {name: array.shape for name, array in sent.arrays.items()} == {"none": (0, 3), "one": (), "swapped": (2,)}
    # A single value and equal values do not spread: noise of deviation 0.
    expected = (-2.5, [-1, -1]) if kind == "invert" else (0.0, [0, 0])
    assert (float(sent["one"]), sent["swapped"].tolist()) == expected
    assert (float(message["one"]), message["swapped"].tolist()) == (2.5, [1, 1]), "the sender's own stay"


def test_of_two_byzantine_faults_the_first_applies() -> None:
    faults = [Fault(kind="invert", agent="b", last=1), Fault(kind="invert", agent="b", strength=5.0)]
    heard, _ = run(*faults)
    factors = [h["b"]["p"] / honest("b", place // 2)["p"] for place, h in enumerate(heard["a"])]
    assert [set(factor.ravel().round(4).tolist()) for factor in factors] == [{-1.0}, {-1.0}, {-5.0}, {-5.0}]


# --- on the way -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["invert", "random"])
def test_simulation_equals_processes(kind: str) -> None:
    faults = [Fault(kind=kind, agent="b", rate=0.6), Fault(kind="random", agent="c"), Fault(kind="drop", rate=0.2)]
    here, there = (run(*faults, rounds=3, runtime=runtime) for runtime in ("simulation", "processes"))
    assert arrays_equal(here[0], there[0])
    assert here[1] == there[1]
    assert not arrays_equal(here[0], run(faults[2], rounds=3)[0])


def test_watchers_see_what_travels_and_its_bytes_are_counted() -> None:
    watched: Watched = []
    _, rows = run(Fault(kind="invert", agent="b"), rounds=1, watchers=[lambda *seen: watched.append(seen)])
    seen = [Message.decode(data)["p"] for sender, _, data in watched if sender == "b"]
    assert len(seen) == 4
    assert all(np.array_equal(p, -honest("b", 0)["p"]) for p in seen)
    assert rows[1]["sent"] == sum(len(data) for sender, _, data in watched if sender == "b")
    assert rows[1]["sent"] == rows[0]["sent"], "as long as an honest message"


def test_a_byzantine_message_can_be_lost() -> None:
    heard, rows = run(Fault(kind="invert", agent="b"), Fault(kind="drop", agent="b"))
    assert all("b" not in places for places in heard["a"])
    assert rows[1]["sent"] > 0


def test_a_byzantine_fault_loses_no_message() -> None:
    faults = Faults([Fault(kind="random", agent="b")], NAMES, seed=0)
    assert faults, "messages are looked at"
    assert faults.strikes(0, "b", "a", 1) is None
    assert faults.strikes(0, "a", "b", 1) is None


@dataclass(frozen=True, kw_only=True)
class Hubbed(cd.Protocol):
    """Everyone asks the hub, which sends back what it got."""

    name = "hubbed"
    needs = cd.Ability.LABELS

    def alone(self) -> None: ...

    async def round(self, me: cd.Agent, t: int) -> None:
        answer = await me.ask_hub(p=np.array([1.0, 2.0]))
        me.state["heard"] = None if answer is None else answer["p"].tolist()

    async def hub(self, me: cd.Hub, t: int) -> None:
        await me.scatter(await me.gather())


def test_a_byzantine_agent_deceives_the_hub_but_the_hub_stays_honest() -> None:
    heard, _ = run(Fault(kind="invert", agent="b"), protocol=Hubbed(), rounds=1)
    assert heard == {"a": [1.0, 2.0], "b": [-1.0, -2.0], "c": [1.0, 2.0]}


def test_byzantine_messages_along_a_ring_of_several_hosts() -> None:
    fault = Fault(kind="random", agent="a")
    results = [run(fault, runtime=runtime, topology=Topology.ring(NAMES)) for runtime in ("simulation", "processes")]
    assert arrays_equal(results[0][0], results[1][0])


# --- where it is recorded ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["invert", "random"])
def test_a_byzantine_agent_must_be_named(kind: str) -> None:
    with pytest.raises(RecipeError, match=f"A fault '{kind}' must name its agent"):
        Fault(kind=kind)


@pytest.mark.parametrize("strength", [0, -1.0, float("inf")])
def test_a_strength_is_above_nothing(strength: float) -> None:
    with pytest.raises(RecipeError, match=r"faults.strength must be (above 0|finite)"):
        Fault(kind="invert", agent="b", strength=strength)


def test_every_row_of_a_byzantine_agent_is_marked_and_the_log_says_it_once(tmp_path: Path) -> None:
    faults = [
        Fault(kind="random", agent="b", first=3),
        Fault(kind="invert", agent="b", first=2, last=2),
        Fault(kind="invert", agent="c", rate=0),
        Fault(kind="random", agent="a", first=5),
    ]
    _, rows = run(*faults, rounds=4, folder=tmp_path / "run")
    assert [row.get("lies") for row in rows] == [None, True, None] * 4
    assert (tmp_path / "run" / "log.txt").read_text().splitlines() == [
        "round 2: 'b' begins to send Byzantine messages (injected fault: invert)"
    ]


def test_a_resumed_run_equals_the_whole_one(tmp_path: Path) -> None:
    faults = [Fault(kind="random", agent="b")]
    whole, rows = run(*faults, rounds=3, folder=tmp_path / "whole")
    run(*faults, rounds=1, folder=tmp_path / "parts")
    parts, again = run(*faults, rounds=3, folder=tmp_path / "parts", resume=True)
    assert arrays_equal(whole, parts)
    assert rows == again
