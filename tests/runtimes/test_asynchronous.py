"""Runs without rounds in virtual time: what happens when, derived by hand; and the same to the bit when repeated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import codistill as cd
from codistill.engine.privacy_guard import PrivacyGuard
from codistill.nodes.agent import Hub
from codistill.topology import Topology
from codistill.wire.message import Message

QUIET: dict[str, Any] = {"runtime": "simulation", "progress": False, "alone": False}


class Silent:
    """A model that learns nothing; to fit it takes one gradient step of time."""

    def fit(self, x: Any, targets: Any) -> None: ...

    def predict(self, x: Any) -> Any:
        return np.zeros((len(x), 2))


@dataclass(frozen=True, kw_only=True)
class Probe(cd.Protocol):
    """Base of the protocols below: a round is so many gradient steps."""

    name = "probe"
    needs = cd.Ability.LABELS
    asynchronous = True
    steps: int = 4

    def compute(self, me: cd.Agent) -> None:
        for _ in range(self.steps):
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: cd.Agent, t: int) -> None:
        self.compute(me)

    def alone(self) -> None: ...


def probed(protocol: cd.Protocol, names: str, rounds: int, clock: cd.Clock, **options: Any) -> cd.Result:
    """A run of agents with names of one letter."""
    members = [cd.Agent(name, Silent(), [[1.0], [2.0]], [0, 1]) for name in names]
    return cd.Federation(members, protocol, clock=clock, **options).run(rounds, **QUIET)


def states(result: cd.Result) -> dict[str, dict[str, Any]]:
    return {name: trained._agent.state for name, trained in result.agents.items()}


def column(result: cd.Result, name: str, agent: str) -> list[Any]:
    return [row[name] for row in result.rows if row["agent"] == agent]


# --- times that are derived by hand ----------------------------------------------------------------


def test_everyone_goes_on_at_its_own_pace() -> None:
    """Four steps of 0.01 s take 0.04 s, ten times slower 0.4 s: after r seconds 25 r rounds, and floor(2.5 r)."""
    clock = cd.Clock(asynchronous=True, step=0.01, slowness={"b": 10.0})
    result = probed(Probe(), "ab", 4, clock)
    assert column(result, "time", "a") == [1, 2, 3, 4]
    assert column(result, "own_rounds", "a") == [25, 50, 75, 100]
    assert column(result, "own_rounds", "b") == [2, 5, 7, 10]


def test_a_fit_takes_the_time_of_its_batches() -> None:
    """70 samples are three batches of 32: rounds of 0.03 s. A module of 5 epochs in batches of 16 takes 25 steps."""
    x, y = np.ones((70, 1)), [0, 1] * 35
    module = cd.TorchLearner(nn.Linear(1, 2), epochs=5, batch_size=16)
    members = [cd.Agent("plain", Silent(), x, y), cd.Agent("torch", module, x, y)]
    result = cd.Federation(members, Probe(steps=1), clock=cd.Clock(asynchronous=True)).run(1, **QUIET)
    assert [row["own_rounds"] for row in result.rows] == [33, 4]


def test_a_round_without_work_takes_the_time_of_a_step() -> None:
    result = probed(Probe(steps=0), "a", 2, cd.Clock(asynchronous=True, step=0.125))
    assert column(result, "own_rounds", "a") == [8, 16]


@dataclass(frozen=True, kw_only=True)
class Diary(Probe):
    """Neighbours tell one another when they sent; each notes what it received when."""

    topology = "complete"

    async def round(self, me: cd.Agent, t: int) -> None:
        me.state.setdefault("began", []).append(me.time)
        self.compute(me)
        notes = me.state.setdefault("notes", [])
        heard = await me.exchange(round=t)
        notes.append([t, me.time, {name: message["round"] for name, message in heard.items()}])


def test_an_exchange_returns_at_once_with_the_newest_that_has_arrived() -> None:
    """a sends its message i at 4 (i + 1), b at 10 (j + 1); each arrives 3 later, and only the newest is kept."""
    clock = cd.Clock(asynchronous=True, step=1.0, slowness={"b": 2.5}, delay=3.0, delays="constant", period=41.0)
    notes = {name: state["notes"] for name, state in states(probed(Diary(), "ab", 1, clock)).items()}
    last = {"a": -1, "b": -1}
    lengths = {"a": 4, "b": 10}
    for me, other in ("ab", "ba"):
        assert len(notes[me]) == 41 // lengths[me]
        for t, time, heard in notes[me]:
            assert time == (t + 1) * lengths[me]
            newest = max(i for i in range(-1, 99) if i < 0 or lengths[other] * (i + 1) + 3 <= time)
            assert heard == ({other: newest} if newest > last[other] else {})
            last[other] = newest
    assert sum(bool(heard) for _, _, heard in notes["a"]) == 3


@dataclass(frozen=True, kw_only=True)
class Register(Probe):
    """A relay that tells who has uploaded before, and when that arrived."""

    async def round(self, me: cd.Agent, t: int) -> None:
        answer = await me.ask_hub(ask=t)
        me.state.setdefault("notes", []).append([me.time, None if answer is None else dict(answer)])
        self.compute(me)
        await me.send("hub", upload=t)

    def serve(self, me: Hub, sender: str, message: Message) -> Message | None:
        known = me.state.setdefault("known", {})
        if "upload" in message:
            known[sender] = me.time
            return None
        return Message.of(asked=me.time, **known)


def test_a_relay_answers_at_once_and_nobody_waits_for_anybody() -> None:
    """A round: 1 to the hub, 1 back, then computing (4, or 41 for b); the upload arrives 1 later."""
    clock = cd.Clock(asynchronous=True, step=1.0, slowness={"b": 10.25}, delay=1.0, delays="constant", period=100.0)
    result = probed(Register(), "ab", 1, clock)
    length = {"a": 6, "b": 43}
    uploads = {name: [length[name] * (i + 1) + 1 for i in range(20)] for name in "ab"}  # when they arrive
    for me in "ab":
        notes = states(result)[me]["notes"]
        assert len(notes) == 100 // length[me]
        for t, (time, answer) in enumerate(notes):
            asked = t * length[me] + 1
            assert time == asked + 1
            # An own upload, sent just before the question, arrives before it.
            known = {name: [at for at in uploads[name] if at <= asked] for name in "ab"}
            assert answer == {"asked": asked, **{name: at[-1] for name, at in known.items() if at}}
    assert column(result, "own_rounds", "a") == [16]
    assert column(result, "own_rounds", "b") == [2]


@dataclass(frozen=True, kw_only=True)
class Eager(Probe):
    """A relay that answers whatever arrives; agents ask it only now and then."""

    async def round(self, me: cd.Agent, t: int) -> None:
        self.compute(me)
        await me.send("hub", number=t)
        unasked = await me.receive("hub")
        asked = await me.ask_hub(number=t + 100)
        silent = await me.ask_hub(number=-1)
        me.state.setdefault("notes", []).append([unasked, None if asked is None else asked["number"], silent])

    def serve(self, me: Hub, sender: str, message: Message) -> dict[str, Any] | None:
        return None if message["number"] < 0 else {"number": message["number"]}


def test_only_who_asks_is_answered() -> None:
    clock = cd.Clock(asynchronous=True, step=1.0, delay=1.0, delays="constant", period=40.0)
    result = probed(Eager(), "ab", 1, clock)
    assert states(result)["a"]["notes"] == [[None, 100 + t, None] for t in range(5)]  # 4 + 2 + 2 s each
    # Two answers for each round; of the sixth, which begins at 40, none yet.
    length = len(Message.of(number=100).encoded)
    assert column(result, "received", "b") == [5 * length]


def test_messages_do_not_overtake_one_another() -> None:
    """With random delays an upload would often arrive after the question that is sent right after it."""
    clock = cd.Clock(asynchronous=True, step=0.1, delay=5.0, period=400.0)
    notes = states(probed(Register(steps=1), "a", 1, clock))["a"]["notes"]
    assert len(notes) > 20
    for before, (_, answer) in pairwise(notes):
        assert answer["a"] > before[0]  # the upload of the round before has arrived
        assert answer["a"] <= answer["asked"]


def test_an_agent_that_is_offline_starts_no_round_and_comes_back() -> None:
    """Rounds of 4 s: 0-4 and 4-8 are begun before 5 and ended; the next begins at 21. Messages wait meanwhile."""
    spell = cd.Offline(agent="b", first=5.0, last=21.0)
    clock = cd.Clock(asynchronous=True, step=1.0, period=10.0, offline=(spell,))
    result = probed(Diary(), "ab", 3, clock)
    assert column(result, "own_rounds", "b") == [2, 2, 4]
    assert column(result, "own_rounds", "a") == [2, 5, 7]
    assert column(result, "present", "b") == [True, False, True]
    notes = states(result)["b"]["notes"]
    assert states(result)["b"]["began"] == [0, 4, 21, 25]
    assert [time for _, time, _ in notes] == [4, 8, 25, 29]
    assert notes[2][2] == {"a": 5}  # sent at 24; those before it are discarded


def test_whoever_is_absent_in_a_period_starts_no_round_in_it() -> None:
    """Rounds of 4 s in periods of 10: gone in the second, a round begun at 8 still ends at 12."""
    clock = cd.Clock(asynchronous=True, step=1.0, period=10.0)
    gone = cd.Fault(kind="gone", agent="b", first=2, last=2)
    result = probed(Diary(), "ab", 3, clock, faults=[gone])
    assert column(result, "own_rounds", "b") == [2, 3, 5]
    assert [time for _, time, _ in states(result)["b"]["notes"]] == [4, 8, 12, 24, 28]
    nobody = [cd.Fault(kind="gone", agent=name, first=1, last=2) for name in "ab"]
    result = probed(Diary(), "ab", 3, clock, faults=nobody)
    assert column(result, "own_rounds", "a") == [0, 0, 2]
    assert column(result, "present", "a") == [False, False, True]
    half = probed(Probe(), "abcd", 4, clock, participation=0.5)
    rows = [row for row in half.rows if row["round"] == 1]
    assert [row["own_rounds"] > 0 for row in rows] == [row["present"] for row in rows]
    assert sum(row["present"] for row in rows) == 2


def test_lost_messages_stop_nobody() -> None:
    """A question or an answer that is lost is no answer, after the time that both would have taken."""
    clock = cd.Clock(asynchronous=True, step=1.0, delay=1.0, delays="constant", period=60.0)
    faults = [cd.Fault(kind="drop", agent="b")]
    result = probed(Register(), "ab", 1, clock, faults=faults)
    notes = states(result)
    assert [time for time, _ in notes["a"]["notes"]] == [time for time, _ in notes["b"]["notes"]]
    assert all(answer is None for _, answer in notes["b"]["notes"])
    assert all(answer is not None and "b" not in answer for _, answer in notes["a"]["notes"])
    assert column(result, "own_rounds", "b") == [10]
    assert column(result, "received", "b") == [0]
    assert any("lost on the way" in event for event in result.events)
    rare = probed(Register(), "ab", 1, clock, faults=[cd.Fault(kind="drop", rate=0.3)])
    answers = [answer for _, answer in states(rare)["a"]["notes"]]
    assert None in answers
    assert any(answer is not None for answer in answers)


@dataclass(frozen=True, kw_only=True)
class Value(Probe):
    """The relay notes what it is sent."""

    async def round(self, me: cd.Agent, t: int) -> None:
        self.compute(me)
        await me.send("hub", value=np.array([1.0 + t, 0.0]))

    def serve(self, me: Hub, sender: str, message: Message) -> None:
        me.state.setdefault(sender, []).append(float(message["value"][0]))


def test_random_lies_are_the_same_after_a_resume(tmp_path: Path) -> None:
    """A message every 1.5 s, in periods of 4 s: the lies of a sender are numbered throughout."""

    def make() -> cd.Federation:
        members = [cd.Agent(name, Silent(), [[1.0], [2.0]], [0, 1]) for name in "ab"]
        clock = cd.Clock(asynchronous=True, step=0.375, period=4.0)
        return cd.Federation(members, Value(), clock=clock, faults=[cd.Fault(kind="random", agent="b")])

    whole, part, rest = make(), make(), make()
    whole.run(3, **QUIET)
    part.run(1, folder=tmp_path, **QUIET)
    rest.run(3, folder=tmp_path, resume=True, **QUIET)
    assert whole.hub is not None
    assert rest.hub is not None
    assert whole.hub.state == rest.hub.state
    assert len(set(whole.hub.state["b"])) == 8


def test_a_byzantine_agent_lies_to_the_relay() -> None:
    """Inverted in the second period only; rounds of 2 s."""
    clock = cd.Clock(asynchronous=True, step=0.5, period=9.0)
    lies = cd.Fault(kind="invert", agent="b", first=2, last=2)
    members = [cd.Agent(name, Silent(), [[1.0], [2.0]], [0, 1]) for name in "ab"]
    federation = cd.Federation(members, Value(), clock=clock, faults=[lies])
    federation.run(3, **QUIET)
    assert federation.hub is not None
    assert federation.hub.state["a"] == [1.0 + t for t in range(13)]
    # Message t is sent at 2 (t + 1); the second period is from 9 to 18.
    assert federation.hub.state["b"] == [(-1 if 9 <= 2 * (t + 1) < 18 else 1) * (1.0 + t) for t in range(13)]


# --- with models -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learning(digits: Any) -> Any:
    """A federation of agents with small networks."""
    x, y = digits

    def make(protocol: cd.Protocol, agents: int = 4, **options: Any) -> cd.Federation:
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        members = []
        for i in range(agents):
            rows = rng.choice(1000, 32, replace=False)
            module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
            members.append(cd.Agent(f"a{i}", cd.TorchLearner(module, lr=0.01), x[rows], y[rows]))
        test, public = (x[1200:1300], y[1200:1300]), x[1300:1340]
        return cd.Federation(members, protocol, public=public, test=test, classes=10, **options)

    return make


CRS = cd.CRS(batch_size=16, average_over=3)
SPREAD = cd.Clock(asynchronous=True, slowest=10, delay=0.01, period=0.25)
RING = Topology.ring([f"a{i}" for i in range(4)])
CASES: dict[str, tuple[cd.Protocol, dict[str, Any]]] = {
    "relay": (CRS, {}),
    "ring": (CRS, {"topology": RING}),
    "faults": (
        CRS,
        {
            "faults": [
                cd.Fault(kind="drop", rate=0.3), cd.Fault(kind="random", agent="a1"),
                cd.Fault(kind="gone", agent="a2", first=2, last=2),
            ],
            "compression": cd.Compression(bits=8, error_feedback=True), "participation": 0.75,
        },
    ),
    "safeguard": (CRS, {"safeguard": True, "topology": RING, "compression": cd.Compression(bits=8)}),
    "fedmd": (cd.FedMD(batch_size=16, transfer_steps=2, less_forgetting=1.0), {}),
    "alone": (cd.Alone(), {}),
}  # fmt: skip
all_cases = pytest.mark.parametrize("case", CASES)


def test_without_rounds_those_who_took_part_are_evaluated_as_all_would_be(learning: Any) -> None:
    options = {"clock": SPREAD, "participation": 0.5}
    everyone = learning(CRS, **options).run(3, **QUIET).rows
    some = learning(CRS, **options).run(3, evaluate_agents="present", **QUIET).rows
    assert {row["present"] for row in some} == {True, False}
    assert [("accuracy" in row) for row in some] == [row["present"] for row in some]
    for row, same in zip(some, everyone, strict=True):
        assert not row["present"] or row["accuracy"] == same["accuracy"]


@pytest.mark.long
@all_cases
def test_stopped_after_each_period_and_resumed_it_equals_the_whole(
    case: str, learning: Any, digits: Any, tmp_path: Path
) -> None:
    """To the bit: metrics, log, and the models at the end. The same seed gives the same run, another seed another."""
    protocol, options = CASES[case]

    def make(seed: int = 0) -> cd.Federation:
        return learning(protocol, clock=SPREAD, seed=seed, **options)

    whole = make().run(4, folder=tmp_path / "whole", **QUIET)
    for done in range(1, 5):
        parts = make().run(done, folder=tmp_path / "parts", resume=done > 1, **QUIET)
    for name in ("metrics.jsonl", "log.txt"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    for name, agent in whole.agents.items():
        np.testing.assert_array_equal(
            agent.predict_proba(digits[0][:50]), parts.agents[name].predict_proba(digits[0][:50])
        )
    assert make(seed=1).run(1, **QUIET).rows != whole.rows[:4]


def test_agents_end_as_they_were_measured(learning: Any, digits: Any) -> None:
    """At the end of their last rounds of their own, not in the middle of one."""
    result = learning(CRS, clock=SPREAD).run(2, **QUIET)
    x, y = digits[0][1200:1300], digits[1][1200:1300]
    for row in result.rows[-4:]:
        assert (result.agents[row["agent"]].predict(x) == y).mean() == row["accuracy"]


@pytest.mark.parametrize("topology", [None, Topology.ring(["a0"])], ids=["relay", "ring"])
def test_a_lone_agent_equals_local_training(topology: Topology | None, learning: Any) -> None:
    """Two steps of 0.01 s in a round, periods of as long: after each, as many rounds as with rounds."""
    clock = cd.Clock(asynchronous=True, period=0.02)
    free = learning(CRS, agents=1, clock=clock, topology=topology).run(4, **QUIET)
    rounds = learning(cd.Alone(batch_size=16), agents=1).run(4, **QUIET)
    assert column(free, "own_rounds", "a0") == [1, 2, 3, 4]
    assert column(free, "accuracy", "a0") == column(rounds, "accuracy", "a0")


def test_without_delays_and_at_one_speed_alone_is_as_with_rounds(learning: Any) -> None:
    free = learning(cd.Alone(batch_size=16), clock=cd.Clock(asynchronous=True, period=0.02)).run(3, **QUIET)
    rounds = learning(cd.Alone(batch_size=16)).run(3, **QUIET)
    assert [row["accuracy"] for row in free.rows] == [row["accuracy"] for row in rounds.rows]


def test_the_baseline_has_the_same_time(learning: Any) -> None:
    """Alone, an agent computes for as long as together: without delays, as many rounds."""
    clock = replace(SPREAD, delay=0.0)
    result = learning(CRS, clock=clock).run(2, **{**QUIET, "alone": True})
    assert result.alone_rows is not None
    assert [row["own_rounds"] for row in result.alone_rows] == [row["own_rounds"] for row in result.rows]


def test_training_goes_on_while_two_of_ten_are_online(learning: Any) -> None:
    offline = tuple(cd.Offline(agent=f"a{i}", first=0.0, last=0.9) for i in range(2, 10))
    result = learning(CRS, agents=10, clock=replace(SPREAD, slowest=2, offline=offline)).run(4, **QUIET)
    early = [row for row in result.rows if row["round"] <= 3]
    assert {row["agent"] for row in early if row["present"]} == {"a0", "a1"}
    assert all(row["received"] > 1000 for row in early if row["present"] and row["round"] > 1)
    first, last = (
        np.mean([row["accuracy"] for row in result.rows if row["round"] == r and row["agent"] in ("a0", "a1")])
        for r in (1, 3)
    )
    assert last > first
    assert all(row["own_rounds"] > 0 and row["received"] > 0 for row in result.rows if row["round"] == 4)


@pytest.mark.parametrize("topology", [None, RING], ids=["relay", "ring"])
def test_no_message_holds_private_data(topology: Topology | None, learning: Any) -> None:
    federation = learning(CRS, clock=SPREAD, topology=topology)
    guard, sizes = PrivacyGuard(federation.agents, None, models=True), []

    def watch(sender: str, receiver: str, data: bytes) -> None:
        sizes.append(len(data))
        guard(sender, receiver, data)

    federation.description = replace(federation.description, watchers=(watch,))
    result = federation.run(2, **QUIET)
    assert sum(sizes) >= sum(row["sent"] for row in result.rows) > 0


def test_what_agents_report_is_of_the_period_in_which_their_rounds_ended() -> None:
    """Rounds of 4 s end at 4 and 8, then at 12, 16 and 20."""

    @dataclass(frozen=True, kw_only=True)
    class Tells(Probe):
        async def round(self, me: cd.Agent, t: int) -> None:
            self.compute(me)
            me.measure(me.name, number=t)
            me.remark(f"my round {t}")

    result = probed(Tells(), "a", 2, cd.Clock(asynchronous=True, step=1.0, period=10.0))
    assert column(result, "number", "a") == [(0 + 1) / 2, (2 + 3 + 4) / 3]
    assert [event for event in result.events if "my round" in event] == [
        f"round {1 + (t > 1)}: 'a': my round {t}" for t in range(5)
    ]


def test_the_safeguard_judges_after_every_round_of_an_agent(learning: Any) -> None:
    result = learning(CRS, agents=2, clock=SPREAD, safeguard=True).run(2, **QUIET)
    assert all(("safeguard_weight" in row) == (row["own_rounds"] > 0) for row in result.rows)
    assert any(row["own_rounds"] > 0 for row in result.rows)


def test_an_error_names_the_agent_and_its_round() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Fails(Probe):
        async def round(self, me: cd.Agent, t: int) -> None:
            self.compute(me)
            if t == 2 and me.name == "b":
                raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        probed(Fails(), "ab", 1, cd.Clock(asynchronous=True))
    assert "'b' in its round 3" in "".join(caught.value.__notes__)
