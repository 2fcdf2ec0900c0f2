"""How long a hub waits for whom, what it tells those who come back, and what its health file says meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.network.fakes import HOOKS, Centre, FakeTransport, Life, Net, agent, describe

import codistill as cd
from codistill.network.base_hub import ColumnOrder
from codistill.network.commands import AgentStatus, Grace, Unreliable, missed_text
from codistill.network.frames import FrameKind, Turn
from codistill.network.log import EventLog
from codistill.network.options import Network
from codistill.network.terms import columns_digest, describe_columns, difference, hello_of, terms_of
from codistill.topology import Topology
from codistill.wire.codec import encode

pytestmark = pytest.mark.usefixtures("time_limit")

NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def no_hooks() -> Iterator[None]:
    HOOKS.clear()
    yield
    HOOKS.clear()


def until(true: Any, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def with_baseline(lives: dict[str, Life], slow: str, alone: Any) -> None:
    """Let everybody answer at once what it reaches alone, except one."""
    for name, life in lives.items():
        reached = alone if name == slow else (lambda samples, number: {"scores": {"own_accuracy": 0.5}})
        life.member._alone = reached  # type: ignore[method-assign]


# --- the deadline -----------------------------------------------------------------------------------


def test_an_agent_that_never_answers_alone_holds_nobody_up() -> None:
    net, whole = Net(), describe(NAMES, 2)
    lives, gate = {name: Life(net, name, whole) for name in NAMES}, threading.Event()
    with_baseline(lives, "b", lambda samples, number: gate.wait(20) and {"scores": {}})
    centre = Centre(net, whole, network=Network(deadline=0.5))
    began = time.monotonic()
    assert centre.runtime.measure_baseline().scores == {"a": {"own_accuracy": 0.5}, "b": {}, "c": {"own_accuracy": 0.5}}
    assert [report.present for report in centre.rounds(0, 2)] == [("a", "c")] * 2
    assert time.monotonic() - began < 5
    assert "the baseline of 'b' is missing" in "".join(centre.told)
    gate.set()
    centre.finish()
    lives["a"].end()


def test_progress_in_training_alone_restarts_the_deadline_once_for_each_round() -> None:
    """Two rounds, a deadline of 0.5 s, and a message every 0.3 s: 'b' is waited for until 0.3 + 0.3 + 0.5 s at most."""
    net, whole = Net(), describe(NAMES, 2)
    lives, stop = {name: Life(net, name, whole) for name in NAMES}, threading.Event()

    def chatter(samples: int, number: int) -> dict[str, Any]:
        done = 0
        while not stop.wait(0.3):
            done += 1
            lives["b"].member._connections.command("hub", do="working", number=number, round=done)
        return {"scores": {}}

    with_baseline(lives, "b", chatter)
    centre = Centre(net, whole, network=Network(deadline=0.5))
    began = time.monotonic()
    assert centre.runtime.measure_baseline().scores["b"] == {}
    assert 1.0 < time.monotonic() - began < 2.5
    until(lambda: (centre.runtime.pump(0.01), any("strike" in text for text in centre.told))[1])
    assert "'b': strike 1 of 3: an unknown command 'working'" in centre.told
    stop.set()
    centre.finish()
    lives["a"].end()


def test_a_slow_agent_that_shows_progress_has_its_baseline_measured() -> None:
    """It needs 1.2 s for its four rounds, each within the deadline of 0.6 s."""
    net, whole = Net(), describe(NAMES, 4)
    lives = {name: Life(net, name, whole) for name in NAMES}

    def slowly(samples: int, number: int) -> dict[str, Any]:
        for done in range(1, 5):
            time.sleep(0.3)
            lives["b"].member._connections.command("hub", do="working", number=number, round=done)
        return {"scores": {"own_accuracy": 0.75}, "steps": [5, 5, 5, 5]}

    with_baseline(lives, "b", slowly)
    centre = Centre(net, whole, network=Network(deadline=0.6))
    measured = centre.runtime.measure_baseline()
    assert measured.scores["b"] == {"own_accuracy": 0.75}
    assert measured.steps == {"b": [5, 5, 5, 5]}  # the others have not told theirs
    centre.finish()
    lives["a"].end()


def test_the_start_does_not_wait_longer_than_the_deadline_for_an_agent_that_never_says_ready() -> None:
    net, whole = Net(), describe(NAMES, 1)
    lives = {name: Life(net, name, whole) for name in ("a", "c")}
    gate = threading.Event()

    class Hanging(Life):
        def run(self) -> None:
            self.member._enter = lambda welcome: gate.wait(20)  # type: ignore[method-assign,assignment,return-value]
            super().run()

    lives["b"] = Hanging(net, "b", whole)
    centre = Centre(net, whole, network=Network(deadline=0.5))
    began = time.monotonic()
    assert centre.rounds(0, 1)[0].present == ("a", "c")
    assert 0.4 < time.monotonic() - began < 5
    gate.set()
    centre.finish()
    lives["a"].end()


def test_a_checkpoint_waits_once_for_all_that_have_not_kept_their_state() -> None:
    net, whole = Net(), describe(NAMES, 1)
    lives, gate = {name: Life(net, name, whole) for name in NAMES}, threading.Event()
    for name in ("a", "b"):
        lives[name].member._keep = lambda *given, **how: gate.wait(20) and None  # type: ignore[method-assign]
    centre = Centre(net, whole, network=Network(deadline=0.5))
    centre.rounds(0, 1)
    began = time.monotonic()
    centre.runtime.save()
    assert time.monotonic() - began < 0.95  # and not a deadline for each
    gate.set()
    centre.finish()
    lives["c"].end()


def test_an_agent_that_trains_alone_tells_which_rounds_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codistill.network.agent_rounds._PROGRESS", 0.0)
    net, whole = Net(), describe(NAMES, 4)
    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole, network=Network(deadline=5))
    assert centre.runtime.measure_baseline().steps == {name: [0, 0, 0, 0] for name in NAMES}  # it has no gradients
    assert [status.trained for status in centre.runtime.statuses.values()] == [4, 4, 4]
    assert not [text for text in centre.told if "strike" in text]
    centre.finish()
    lives["a"].end()


# --- grace ------------------------------------------------------------------------------------------


def test_a_round_waits_for_an_agent_that_was_there_a_moment_ago(tmp_path: Path) -> None:
    net, whole = Net(), describe(NAMES, 4)
    lives = {name: Life(net, name, whole, tmp_path / name) for name in NAMES}
    centre = Centre(net, whole, network=Network(grace=5))
    HOOKS["b", 1] = lambda me: lives["b"].wire.kill()
    centre.rounds(0, 2)
    lives["b"].end()
    HOOKS.clear()
    threading.Timer(0.5, lambda: lives.update(b=Life(net, "b", whole, tmp_path / "b"))).start()
    assert [report.present for report in centre.rounds(2, 4)] == [NAMES, NAMES]
    centre.finish()
    lives["b"].end()
    assert "round 3: 'b' is back: it missed round 2" in centre.told
    assert "missed round 2: counted by the hub without this agent" in lives["b"].told


def test_without_grace_rounds_go_on_and_who_comes_back_is_told_what_it_missed(tmp_path: Path) -> None:
    net, whole = Net(), describe(NAMES, 60)
    lives = {name: Life(net, name, whole, tmp_path / name) for name in NAMES}
    centre = Centre(net, whole, network=Network(grace=0))
    HOOKS["b", 5] = lambda me: lives["b"].wire.kill()
    centre.rounds(0, 59)
    lives["b"].end()
    HOOKS.clear()
    states: list[dict[str, Any]] = []
    back = Life(net, "b", whole, tmp_path / "b")
    back.member._watch = lambda what, done, scores, **more: states.append({"status": what, **more})
    until(lambda: (centre.runtime.pump(0.01), centre.runtime.statuses["b"].ready)[1])
    centre.rounds(59, 60)
    centre.finish()
    back.end()
    assert "round 60: 'b' is back: it missed 54 rounds: 6 to 59" in centre.told
    assert "missed 54 rounds: 6 to 59: counted by the hub without this agent" in back.told
    assert {"status": "running", "missed": 54} in states


def test_an_agent_that_leaves_is_not_waited_for() -> None:
    net, whole = Net(), describe(NAMES, 3)
    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole, network=Network(grace=20))
    centre.rounds(0, 1)
    lives["b"].stop = True
    lives["b"].end()
    began = time.monotonic()
    centre.rounds(1, 3)
    assert time.monotonic() - began < 5
    centre.finish()
    lives["a"].end()


def test_the_grace_of_an_agent_that_comes_and_goes_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("codistill.network.commands.time.monotonic", lambda: now[0])
    grace, waited = Grace(10.0), 0.0
    for _ in range(1000):  # rounds of 1 s; in each it disconnects, and is back after 3 s
        grace.disconnected("b")
        for _ in range(30):
            if not grace.covers("b"):
                break
            now[0] += 0.1
            grace.waited(["b"], 0.1)
            waited += 0.1
        grace.returned("b")
        now[0] += 1.0
        grace.completed(["b"], 1.0)
    assert waited < 10 + 0.2 * 1000  # its grace, and a tenth of the rounds' time up to the step of a check
    assert not grace.covers("a")


def test_missed_rounds_in_words() -> None:
    agent = AgentStatus()
    for number in (4, 5, 9):
        agent.miss(number)
    assert missed_text(*(agent.take_missed() or ())) == "missed 3 rounds from 4 to 9"
    assert agent.take_missed() is None
    assert missed_text(1, 7, 7) == "missed round 7"
    assert missed_text(55, 6, 60) == "missed 55 rounds: 6 to 60"


# --- what the operator sees -------------------------------------------------------------------------


def test_the_health_file_says_what_the_log_says_at_each_change(tmp_path: Path) -> None:
    net, whole, path = Net(), describe(NAMES, 3), tmp_path / "health.json"
    centre = Centre(net, whole, network=Network(grace=0, quorum=1.0))
    log = EventLog("hub", health=path, quiet=True)
    centre.runtime.on_state = log.state

    def health() -> dict[str, Any]:
        return dict(json.loads(path.read_text()))

    centre.runtime.start(0)
    assert (health()["status"], health()["here"], health()["round"]) == ("waiting", [], 0)
    lives = {name: Life(net, name, whole, tmp_path / name) for name in NAMES}
    centre.rounds(0, 1)
    assert (health()["status"], health()["here"], health()["round"]) == ("running", ["a", "b", "c"], 1)
    moved = health()["moved"]
    net.cut("b", "hub")
    until(lambda: (centre.runtime.pump(0.01), health()["here"] == ["a", "c"])[1])
    seen: list[dict[str, Any]] = []
    centre.lines.tell = lambda text: seen.append({"told": text, **health()})
    threading.Timer(1.5, lambda: net.heal("b", "hub")).start()
    centre.rounds(1, 2)
    told = [state["told"] for state in seen]
    joined = seen[told.index("'b' joined")]
    assert told.index("waiting for b (2 of 3 joined)") < told.index("'b' joined")
    assert (joined["status"], joined["here"], joined["moved"]) == ("waiting", ["a", "c"], moved)
    assert (health()["status"], health()["here"], health()["round"]) == ("running", ["a", "b", "c"], 2)
    assert health()["moved"] > moved
    centre.rounds(2, 3)
    centre.runtime.finish(complete=True)
    assert health()["status"] == "done"
    centre.runtime.close()
    log.closed()
    assert (health()["status"], health()["here"]) == ("done", [])
    lives["a"].end()


def test_the_thread_of_the_health_file_changes_nothing_but_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("codistill.network.log._EVERY", 0.05)
    path = tmp_path / "health.json"
    log = EventLog("hub", health=path, quiet=True)
    time.sleep(0.2)
    assert not path.exists()  # nothing is written before the folder is this process's own
    log.closed()
    assert not path.exists()
    log = EventLog("hub", health=path, quiet=True)
    log.state(status="running", moved="then")
    first = json.loads(path.read_text())
    until(lambda: json.loads(path.read_text())["time"] > first["time"])
    assert {**json.loads(path.read_text()), "time": first["time"]} == first
    log.closed()


def test_a_normal_end_names_no_round_after_the_last() -> None:
    net, whole = Net(), describe(NAMES, 2)
    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole)
    centre.rounds(0, 2)
    centre.runtime.finish(complete=True)
    assert [life.end() for life in lives.values()] == [True] * 3
    until(lambda: (centre.runtime.pump(0.01), sum("disconnected" in text for text in centre.told) == 3)[1])
    assert not [text for text in centre.told if "round 3" in text]
    assert "'a' disconnected" in centre.told
    centre.runtime.close()


# --- agents that take part and do not complete ---------------------------------------------------------


def test_an_agent_that_fails_again_and_again_is_left_out_for_longer_each_time() -> None:
    """After k failed rounds in a row: 2^(k-1) - 1 rounds; a completed one makes up for all of them."""
    unreliable, number = Unreliable(), 0
    for rounds in (0, 1, 3, 7):
        assert unreliable.ended(number, NAMES, ("a", "c")) == ({"b": rounds} if rounds else {})
        assert all(unreliable.among(NAMES, number + ahead) == ["b"] for ahead in range(1, rounds + 1))
        assert unreliable.among(NAMES, number + rounds + 1) == []
        number += rounds + 1
    assert unreliable.ended(number, NAMES, NAMES) == {}
    assert unreliable.ended(number + 1, NAMES, ("a",)) == {}


def test_an_agent_that_joins_and_is_silent_costs_the_others_few_rounds() -> None:
    """It joins anew whenever it is late: of eleven rounds it delays four."""
    net, whole = Net(), describe(NAMES, 11)
    lives = {name: Life(net, name, whole) for name in ("a", "b")}
    centre = Centre(net, whole, network=Network(deadline=1.0, grace=0.0))  # so long that a and b are never late
    silent = FakeTransport(net, "c", ("hub",))
    hello = {"do": "hello", **hello_of(agent("c"), None)}
    for number in range(11):
        silent.send(("hub",), FrameKind.HELLO, Turn(0), encode({}, {"json": json.dumps(hello)}))
        silent.send(("hub",), FrameKind.CONTROL, Turn(0), encode({}, {"json": json.dumps({"do": "ready"})}))
        until(lambda: (centre.runtime.pump(0.01), centre.runtime.is_free("c"))[1])
        assert centre.runtime.run(number, NAMES).present == ("a", "b")
    rounds = [text.partition(":")[0] for text in centre.told if "continues without 'c'" in text]
    assert rounds == ["round 1", "round 2", "round 4", "round 8"]
    assert sum("'c' has not completed its last rounds" in text for text in centre.told) == 3
    centre.finish()
    assert lives["a"].end() is True


# --- the columns of data frames -----------------------------------------------------------------------------------


def order_of(
    said: dict[str, Any], hub: tuple[str, ...] = (), **changes: Any
) -> tuple[ColumnOrder, dict[str, str | None]]:
    """What a hub settles when agents of a roster a, b, c say which columns they have, in this order, twice."""
    protocol = changes.get("protocol", cd.FedAvg())
    description = replace(describe(("a", "b", "c"), 2), columns=hub, protocol=protocol)
    order, why = ColumnOrder(description), {}
    for _ in range(2):  # each asks again until it is answered
        for name, columns in said.items():
            why[name] = order.heard(name, columns, ())
    return order, why


@pytest.mark.parametrize("first", ["abc", "bca", "cab", "cba"])
def test_neither_columns_nor_their_order_depend_on_who_comes_first(first: str) -> None:
    said = {"a": ("y", "x"), "b": ("x", "y"), "c": ("x", "z")}
    order, why = order_of({name: said[name] for name in first})
    assert order.order_for(("y", "x")) == ["y", "x"]  # one each: that of the first of the roster
    assert (why["a"], why["b"]) == (None, None)
    assert why["c"] == "its columns differ from those of the federation: missing: 'y'; extra: 'z'"
    said = {"a": ("y", "x"), "b": ("x", "y"), "c": ("x", "y")}
    assert order_of({name: said[name] for name in first})[0].order_for(("y", "x")) == ["x", "y"]


def test_agents_may_have_columns_of_their_own_where_only_predictions_are_exchanged() -> None:
    order, why = order_of({"a": ("y", "x"), "b": ("x",), "c": ("x", "z")}, protocol=cd.FedMD())
    assert why == {"a": None, "b": None, "c": None}
    assert order.may_join(("x",))
    assert order.order_for(("x",)) is None
    same = {"a": ("y", "x"), "b": ("x", "y"), "c": ("x", "y")}
    order, _ = order_of(same, protocol=cd.FedMD())
    assert order.order_for(("y", "x")) == ["x", "y"]
    order = ColumnOrder(replace(describe(("a", "b"), 2), protocol=cd.FedMD()))
    order.heard("a", ("x", "y"), (), is_coded=True)  # some of its columns hold no numbers
    order.heard("b", ("y", "x"), ())
    assert order.order_for(("y", "x")) is None


def test_agents_with_data_frames_wait_for_all_others() -> None:
    order, why = order_of({"a": ("x", "y"), "b": None})
    assert why == {"a": None, "b": None}
    assert order.may_join(None)
    assert not order.may_join(("x", "y"))
    order.heard("c", None, ())
    assert order.heard("a", ("x", "y"), ()) is None
    assert order.may_join(("x", "y"))
    assert (order.order_for(("x", "y")), order.order_for(None)) == (["x", "y"], None)
    assert [note.split(":")[0] for note in order.notes] == ["agent 'b'", "agent 'c'"]
    order, _ = order_of({"a": ("x", "y")})
    order.waits = False  # patience has ended
    assert order.heard("a", ("x", "y"), ()) is None
    assert order.order_for(("x", "y")) == ["x", "y"]
    order, _ = order_of({"a": ("x", "y"), "b": ("y", "x")})
    assert order.heard("a", ("x", "y"), ("c",)) is None  # who is excluded is not waited for
    assert order.order_for(("y", "x")) == ["x", "y"]


def test_columns_of_the_hub_are_those_of_all() -> None:
    order, why = order_of({"a": ("x", "z"), "b": ("y", "x"), "c": ("y", "x")}, hub=("x", "y"))
    assert why["a"] == "its columns differ from those of the federation: missing: 'y'; extra: 'z'"
    assert not order.may_join(("y", "x"))  # until the first comes again with the right ones
    assert order.heard("a", ("x", "y"), ()) is None
    assert order.heard("b", ("y", "x"), ()) is None
    assert order.order_for(("x", "y")) == ["y", "x"]


def test_an_array_beside_frames_in_different_orders_may_not_join() -> None:
    _, why = order_of({"a": ("x", "y"), "b": ("y", "x"), "c": None})
    assert all("must have the same column order" in str(why[name]) for name in "ab")
    order, _ = order_of({"a": ("x", "y"), "b": ("y", "x")})
    order.waits = False
    order.heard("a", ("x", "y"), ())
    assert "different orders" in str(order.heard("c", None, ()))


def test_very_many_columns_are_compared_by_a_digest() -> None:
    names = tuple(f"gene {number}" for number in range(20_000))
    told = describe_columns(names)
    assert told == columns_digest(names)
    assert isinstance(told, str)
    other = columns_digest(names[::-1])
    order, why = order_of({"a": told, "b": other, "c": told})
    assert (why["a"], why["c"]) == (None, None)
    assert "other names, or another order" in str(why["b"])
    assert order.order_for(told) is None


def test_peers_need_the_same_columns_in_the_same_order() -> None:
    def terms(*names: str) -> dict[str, Any]:
        return terms_of(replace(describe(("a", "b"), 2, topology=Topology.ring(("a", "b"))), columns=names))

    assert difference(terms("x", "y"), terms("x", "y")) is None
    assert difference(terms("x", "y"), terms()) is None  # a plain array
    assert "in another order there" in str(difference(terms("x", "y"), terms("y", "x")))
    assert difference(terms("x", "y"), terms("x", "z")) == "columns: missing: 'y'; extra: 'z'"
    assert difference(terms("x", "y"), terms() | {"columns": 7}) == "columns: other names, or another order"
