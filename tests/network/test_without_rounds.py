"""Runs without rounds between machines: everybody at its own pace, whoever is slow, away, restarted, or floods."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.network.fakes import HOOKS, Centre, FakeTransport, Killed, Life, Net, agent, describe, with_node

from codistill.core.spec import RunSpec
from codistill.engine.description import RunDescription
from codistill.engine.runtime import Outcome, run
from codistill.engine.store import RunFolder
from codistill.network import connections
from codistill.network.connections import Connections
from codistill.network.frames import FrameKind, Turn
from codistill.network.hub import HubWithoutRounds
from codistill.network.options import Network
from codistill.network.peer import PeerWithoutRounds
from codistill.nodes.agent import Hub
from codistill.nodes.clock import Clock
from codistill.protocol import Protocol
from codistill.topology import HUB, Topology
from codistill.wire.message import Message

NAMES = ("a", "b", "c", "d")
WORK: dict[str, Callable[[Any], None]] = {}  # what agents do in each round, by name


@pytest.fixture(autouse=True)
def no_work() -> Iterator[None]:
    yield
    WORK.clear()
    HOOKS.clear()


@dataclass(frozen=True, kw_only=True)
class Newest(Protocol):
    """Everyone tells the relay its round, and asks it for the newest round of each."""

    name = "newest"
    asynchronous = True

    async def begin(self, me: Any) -> None:
        me.state["rounds"], me.state["times"] = 0, []
        me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Any, t: int) -> None:
        WORK.get(me.name, lambda _: time.sleep(0.005))(me)
        assert t == me.state["rounds"]  # its rounds follow one another, whatever happens to it
        heard = await me.ask_hub()
        if heard is not None:
            me.state["heard"] = dict(zip(heard["names"], heard["rounds"].tolist(), strict=True))
        me.state["rounds"] = t + 1
        me.state["times"] = [*me.state["times"][-50:], me.time]
        await me.send(HUB, x=np.full(1, float(t + 1)))

    def serve(self, me: Any, sender: str, message: Message) -> Message | None:
        kept = me.state.setdefault("newest", {})
        me.state["served"] = me.state.get("served", 0) + 1
        if "x" in message:
            if me.accepts(sender, message, {"x": (1,)}):
                kept[sender] = float(message["x"][0])
            return None
        return Message.of(names=list(kept), rounds=np.array([*kept.values()]))


def whole_run(names: tuple[str, ...] = NAMES, periods: int = 8, period: float = 0.2, **clock: Any) -> RunDescription:
    made = describe(names, periods, Newest())
    rng = np.random.default_rng(0)
    test = rng.normal(size=(6, 2)).astype(np.float32), np.arange(6) % 2
    plan = RunSpec(rounds=periods, alone=False)
    return replace(made, clock=Clock(asynchronous=True, period=period, **clock), spec=plan, test=test)


class Relay(threading.Thread):
    """A hub in a thread: it can be killed, and started again with what it has stored."""

    def __init__(self, net: Net, whole: RunDescription, folder: Path | None = None, **network: Any) -> None:
        super().__init__(daemon=True, name=HUB)
        self.told: list[str] = []
        self.node = Hub()
        self.network = Network(**{"linger": 2.0, **network})
        self.wire = FakeTransport(net, HUB, whole.topology.names, self.network.message_limit or 1 << 20)
        self.lines = Connections(self.wire, self.network, self.told.append, leads=True)  # type: ignore[arg-type]
        self.runtime = HubWithoutRounds(with_node(whole, self.node), self.lines, run="run1")
        self.folder, self.result = folder, None
        self.rows: list[Any] = []
        self.start()

    def round_ended(self, record: Any) -> None:
        self.rows += record.rows

    def run(self) -> None:
        store = None
        try:
            if self.folder is not None:
                store = RunFolder(self.folder)
                store.open(resume=True)
            self.result = run(self.runtime.description, self.runtime, store=store, observers=[self])
        except Killed:
            self.result = "killed"
        except Exception as error:
            self.result = error
        finally:
            if store is not None:
                store.close()
            self.wire.close()

    def end(self) -> Outcome:
        self.join(timeout=30)
        assert not self.is_alive(), f"the hub has not ended: {self.told}"
        assert isinstance(self.result, Outcome), self.result
        assert self.result.complete
        return self.result

    def of(self, name: str, column: str) -> list[Any]:
        return [row.get(column) for row in self.rows if row["agent"] == name]


def test_nobody_waits_for_an_agent_that_is_slow() -> None:
    net, whole = Net(), whole_run(slowness={"d": 20.0})
    WORK["d"] = lambda me: time.sleep(0.1)  # and 19 times longer by the clock: longer than the run
    lives = {name: Life(net, name, whole) for name in NAMES}
    began = time.monotonic()
    hub = Relay(net, whole)
    rows = hub.end().rows
    assert time.monotonic() - began < 6  # 8 periods of 0.2 s; one round of d takes 2 s
    assert [life.end() for life in lives.values()] == [True] * 4
    assert hub.of("a", "time") == pytest.approx([0.2 * r for r in range(1, 9)])
    assert len(rows) == 8 * 4
    fast = [hub.of(name, "own_rounds")[-1] for name in "abc"]
    assert min(fast) >= 20
    assert hub.of("d", "own_rounds")[-1] == 0
    assert lives["d"].agent.state["rounds"] == 0  # returned to the end of its last round: there was none
    # The others go on in the rows in which d has nothing to say yet, and all are evaluated at the end.
    assert hub.of("a", "own_rounds") == sorted(hub.of("a", "own_rounds"))
    assert hub.of("d", "accuracy")[:-1] == [None] * 7
    assert all(row["accuracy"] is not None for row in rows[-4:])
    # The last figures are those of the models at the end.
    assert {name: lives[name].agent.state["rounds"] for name in "abc"} == dict(zip("abc", fast, strict=True))
    times = lives["a"].agent.state["times"]
    assert times == sorted(times)
    assert times[-1] <= 1.6 + 2  # seconds of the run, as the hub counts them


def test_an_agent_that_is_joining_when_the_run_ends_is_told_so() -> None:
    """It has its welcome and restores its state: the hub waits for it, but not longer than `linger`."""
    net, whole = Net(), whole_run(periods=4)
    lives = {name: Life(net, name, whole) for name in "abc"}
    hub = Relay(net, whole)
    _until(lambda: len(hub.rows) >= 1 * 4)
    ended, welcomed = threading.Event(), threading.Event()
    late = Life(net, "d", whole)
    describes = late.member._describe

    def slowly(terms: Any) -> RunDescription:
        welcomed.set()
        assert ended.wait(timeout=20)
        return describes(terms)

    late.member._describe = slowly
    assert welcomed.wait(timeout=20)
    _until(lambda: len(hub.rows) == 4 * 4)
    _until(lambda: any("done; waiting up to 2 s to tell d" in line for line in hub.told))
    ended.set()
    hub.end()
    assert [life.end() for life in (*lives.values(), late)] == [True] * 4


def test_two_of_four_go_on_and_a_third_joins_later() -> None:
    net, whole = Net(), whole_run(periods=10)
    first = {name: Life(net, name, whole) for name in "ab"}
    hub = Relay(net, whole)
    _until(lambda: len(hub.rows) >= 3 * 4)
    late = Life(net, "c", whole)
    hub.end()
    assert [life.end() for life in (*first.values(), late)] == [True] * 3
    assert [row["present"] for row in hub.rows[:4]] == [True, True, False, False]
    assert hub.of("a", "own_rounds")[2] > 0
    assert hub.of("c", "own_rounds")[2] == 0
    assert hub.of("c", "own_rounds")[-1] > 0
    assert late.agent.state["heard"]["a"] > 0  # of what others sent before it came
    assert late.agent.state["times"][0] >= 0.6  # seconds since the run's start, not since its own
    assert hub.of("d", "present") == [False] * 10
    assert not any("waiting up to" in text for text in hub.told)  # nobody waits to tell d, which never came


def test_an_agent_that_was_killed_goes_on_with_its_last_stored_state(tmp_path: Path) -> None:
    net, whole = Net(), whole_run(("a", "b"), periods=14)
    lives = {name: Life(net, name, whole, tmp_path / name) for name in "ab"}
    hub = Relay(net, whole)
    _until(lambda: hub.of("b", "own_rounds")[-1:] > [5])
    lives["b"].wire.kill()
    assert lives["b"].end() == "killed"
    before = len(hub.rows)
    _until(lambda: len(hub.rows) >= before + 4)
    back = Life(net, "b", whole, tmp_path / "b")
    hub.end()
    assert [life.end() for life in (lives["a"], back)] == [True, True]
    assert any("with the state of round" in text for text in back.told)
    assert back.agent.state["rounds"] == hub.of("b", "own_rounds")[-1] > 10  # `round` has checked that none is missing
    assert not all(hub.of("b", "present"))
    assert all(hub.of("a", "present"))


def test_a_hub_that_was_killed_goes_on_with_what_it_had_relayed(tmp_path: Path) -> None:
    net, whole = Net(), whole_run(("a", "b"), periods=12)
    lives = {name: Life(net, name, whole) for name in "ab"}
    first = Relay(net, whole, tmp_path / "hub")
    first.node.state["mark"] = "kept"
    _until(lambda: len(first.rows) >= 4 * 2)
    first.wire.kill()
    first.join(10)
    assert first.result == "killed"
    reached = {name: lives[name].agent.state["rounds"] for name in "ab"}
    second = Relay(net, whole, tmp_path / "hub")
    outcome = second.end()
    assert [life.end() for life in lives.values()] == [True, True]
    assert {row["round"] for row in outcome.rows} == set(range(1, 13))
    assert min(row["round"] for row in second.rows) >= 4  # it did not begin anew
    assert second.node.state["mark"] == "kept"
    assert second.runtime._relay.served == second.node.state["served"]  # both as they were, and then one by one
    assert second.node.state["newest"].keys() == {"a", "b"}
    for name in "ab":  # they did not lose a round, and have gone on
        assert lives[name].agent.state["rounds"] > reached[name]
    assert second.of("a", "time")[-1] == pytest.approx(12 * 0.2)


def test_a_member_that_floods_the_relay_is_refused_by_name_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_UNREAD", 500)
    net, whole = Net(), whole_run(("a", "b", "c"), periods=10)
    lives = {name: Life(net, name, whole) for name in "abc"}
    message = Message.of(x=np.full(1, 1e6)).encoded

    def flood(me: Any) -> None:
        for _ in range(1500):
            lives["c"].wire.send([HUB], FrameKind.ASK, Turn(0), message)

    WORK["c"] = flood
    hub = Relay(net, whole)
    hub.end()
    assert [lives[name].end() for name in "ab"] == [True, True]
    strikes = [text for text in hub.told if text.startswith("'c': strike")]
    assert len(strikes) == 3
    assert all("more messages per second than a run without rounds allows" in text for text in strikes)
    assert any("'c' is excluded" in text for text in hub.told)
    assert not any(text.startswith(("'a': strike", "'b': strike")) for text in hub.told)
    assert min(hub.of(name, "own_rounds")[-1] for name in "ab") > 10
    assert isinstance(lives["c"].end(), Exception)  # it is told why


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"own_rounds": -1}, "A number of rounds"),
        ({"scores": {"accuracy": 7.0}}, "Scores must be within"),
        ({"report": {}}, "A report must be well-formed"),
        ({"report": "many"}, "A report must be well-formed"),
    ],
    ids=["rounds", "scores", "empty", "text"],
)
def test_a_false_report_is_a_strike_and_changes_no_row(changed: dict[str, Any], why: str) -> None:
    net, whole = Net(), whole_run(("a", "b"), periods=3)
    lives = [Life(net, name, whole) for name in "ab"]

    def lie(me: Any) -> None:
        time.sleep(0.005)
        if me.state["rounds"] == 3:
            empty = {
                "sent": {},
                "received": {},
                "steps": {},
                "exchanges": {},
                "refused": [],
                "remarks": [],
                "measures": [],
            }
            content = {"own_rounds": 10**6, "report": empty, "scores": {}, **changed}
            lives[1].member._connections.command(HUB, do="report", **content)

    WORK["b"] = lie
    hub = Relay(net, whole)
    hub.end()
    assert [life.end() for life in lives] == [True, True]
    [strike] = [text for text in hub.told if "strike" in text]
    assert strike.startswith("'b': strike 1 of 3")
    assert why in strike
    assert hub.of("b", "own_rounds")[-1] < 10**6


@pytest.mark.parametrize("do", ["run", "keep", "alone", "store", "go"])
def test_an_agent_without_rounds_executes_no_other_command(do: str) -> None:
    net, whole = Net(), whole_run(("a", "b"), periods=6)
    lives = [Life(net, name, whole) for name in "ab"]
    hub = Relay(net, whole)
    _until(lambda: len(hub.rows) >= 2)
    wrong = {"elapsed": float("inf"), "samples": 1, "part": None, "evaluate_every": 1, "store_every": 1}
    hub.lines.command("a", do=do, number=9, **(wrong if do == "go" else {"samples": 3, "round": 1, "store": True}))
    hub.end()
    assert [life.end() for life in lives] == [True, True]
    assert any(f"strike 1 of 3: an invalid command '{do}'" in text for text in lives[0].told)


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.01)


# --- peers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rumour(Protocol):
    """Everyone tells its neighbours its round, and keeps the newest of each."""

    name = "rumour"
    topology = "ring"
    asynchronous = True

    async def begin(self, me: Any) -> None:
        me.state["rounds"], me.state["heard"], me.state["old"] = 0, {}, 0
        me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Any, t: int) -> None:
        WORK.get(me.name, lambda _: time.sleep(0.02))(me)
        assert t == me.state["rounds"]
        heard = await me.exchange({"x": np.full(1, float(t + 1))}, expect={"x": (1,)})
        before = me.state["heard"]
        me.state["old"] += sum(message["x"][0] <= before.get(name, 0) for name, message in heard.items())
        me.state["heard"] = {**before, **{name: float(message["x"][0]) for name, message in heard.items()}}
        me.state["rounds"] = t + 1


class Peer(threading.Thread):
    """A peer in a thread."""

    def __init__(self, net: Net, name: str, folder: Path, periods: int = 8, **clock: Any) -> None:
        super().__init__(daemon=True, name=name)
        self.agent, self.told = agent(name), []  # type: Any, list[str]
        whole = describe(NAMES, periods, Rumour(), Topology.ring(NAMES))
        plan = RunSpec(rounds=periods, alone=False)
        test = np.zeros((4, 2), np.float32), np.arange(4) % 2
        whole = replace(whole, clock=Clock(asynchronous=True, period=0.2, **clock), spec=plan, test=test)
        self.whole = with_node(whole, self.agent)
        self.wire = FakeTransport(net, name, whole.topology.neighbours(name))
        self.folder = folder / name
        self.rows: list[Any] = []
        self.result: Any = None
        self.start()

    def round_ended(self, record: Any) -> None:
        self.rows += record.rows

    def run(self) -> None:
        store = RunFolder(self.folder)
        store.open(resume=True)
        try:
            lines = Connections(self.wire, Network(), self.told.append)  # type: ignore[arg-type]
            runtime = PeerWithoutRounds(self.whole, lines)
            self.result = run(self.whole, runtime, store=store, observers=[self]).complete
        except Killed:
            self.result = "killed"
        except Exception as error:
            self.result = error
        finally:
            store.close()
            self.wire.close()

    def end(self) -> Any:
        self.join(timeout=30)
        assert not self.is_alive(), f"{self.name} has not ended: {self.told}"
        return self.result


def test_peers_on_a_ring_end_and_wait_for_nobody(tmp_path: Path) -> None:
    net = Net()
    WORK["c"] = lambda me: time.sleep(0.5)  # several periods
    peers = {name: Peer(net, name, tmp_path) for name in NAMES}
    assert [peer.end() for peer in peers.values()] == [True] * 4
    for name, peer in peers.items():
        assert [row["time"] for row in peer.rows] == pytest.approx([0.2 * r for r in range(1, 9)])
        assert peer.rows[-1]["own_rounds"] == peer.agent.state["rounds"]
        assert peer.rows[-1]["accuracy"] is not None, name
        assert not any("strike" in text for text in peer.told)
        assert peer.agent.state["old"] == 0  # each message is used once, and none after a newer one
    assert min(peers[name].agent.state["rounds"] for name in "abd") >= 15
    assert peers["c"].agent.state["rounds"] <= 4
    # In a ring of four, a has b and d.
    assert peers["a"].agent.state["heard"].keys() == {"b", "d"}
    assert peers["a"].agent.state["heard"]["b"] >= 10
    assert peers["c"].agent.state["heard"]["b"] > 1  # it skips what is old


def test_a_peer_that_was_killed_goes_on_with_its_last_checkpoint(tmp_path: Path) -> None:
    net = Net()
    peers = {name: Peer(net, name, tmp_path, periods=16) for name in NAMES}
    _until(lambda: len(peers["b"].rows) >= 4)
    peers["b"].wire.kill()
    assert peers["b"].end() == "killed"
    back = Peer(net, "b", tmp_path, periods=16)
    assert [back.end(), *(peers[name].end() for name in "acd")] == [True] * 4
    assert back.rows[0]["round"] > 3
    assert back.rows[0]["own_rounds"] > 0  # `round` has checked that none is missing
    assert back.agent.state["rounds"] > peers["b"].rows[3]["own_rounds"]
    assert peers["a"].agent.state["heard"]["b"] > peers["b"].rows[-1]["own_rounds"]


# --- the run's clock --------------------------------------------------------------------------------


def test_delays_of_the_clock_are_imitated() -> None:
    net, whole = Net(), whole_run(("a", "b"), delay=0.2, delays="constant")
    lives = [Life(net, name, whole) for name in "ab"]
    hub = Relay(net, whole)
    hub.end()
    assert [life.end() for life in lives] == [True, True]
    # A round asks (0.2 s there, 0.2 s back) and sends (0.2 s): at most two in 1.6 s.
    assert 1 <= hub.of("a", "own_rounds")[-1] <= 2


def test_with_rounds_everybody_waits_for_the_slowest() -> None:
    net, whole = Net(), describe(("a", "b"), 2)
    whole = replace(whole, clock=Clock(slowness={"b": 6.0}, delay=0.05, delays="constant"))
    for t in range(2):
        HOOKS["b", t] = lambda me: time.sleep(0.1)
    lives = [Life(net, name, whole) for name in "ab"]
    centre = Centre(net, whole)
    reports = [centre.runtime.run(t, ("a", "b")) for t in range(2)]
    saved = centre.runtime.save()
    centre.finish()
    assert [life.end() for life in lives] == [True, True]
    times = [report.measures[0][2] for report in reports]
    assert [name for report in reports for _, name, _ in report.measures] == ["time"] * 4
    assert times[0] >= 0.6 + 0.1  # the messages there and back
    assert times[1] >= 2 * (0.6 + 0.1)
    again = Centre(net, whole)
    again.runtime.load(saved)
    assert again.runtime._stopwatch.elapsed >= times[1]  # it goes on from there
    again.runtime.close()
