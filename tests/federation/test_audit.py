"""What an agent of a real federation releases: all of it is in its audit log, and its policy holds against the hub."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.naive_bayes import GaussianNB
from sklearn.tree import DecisionTreeClassifier

import codistill as cd
from codistill.core.errors import NetworkError, PolicyError
from codistill.core.spec import RunSpec
from codistill.engine.description import RunDescription
from codistill.engine.runtime import ShouldStop
from codistill.federation.joining import PeerNode, with_agent
from codistill.federation.serving import BackgroundNode
from codistill.network.options import Network
from codistill.network.policy import ANYTHING, AUDIT, ChainReader, Policy
from codistill.nodes.faults import Faults
from codistill.runtimes.workers import Channel, ForkedProcess
from codistill.topology import Topology

ROUNDS, WAIT = 3, 60
FAST = Network(patience=30, lease=2, linger=1)
Digits = tuple[np.ndarray, np.ndarray]
Start = Callable[..., BackgroundNode]
pytestmark = pytest.mark.usefixtures("time_limit")


@pytest.fixture
def start(digits: Digits, tmp_path: Path) -> Iterator[Callable[..., dict[str, BackgroundNode]]]:
    """Starts a hub and two agents, the first of which has a policy; whatever still runs after the test is ended."""
    started: list[BackgroundNode] = []
    x, y = digits[0].reshape(-1, 64), digits[1]
    public, test = x[80:110], (x[120:160], y[120:160])

    def run(policy: dict[str, Any]) -> dict[str, BackgroundNode]:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{taken.getsockname()[1]}"
        common: dict[str, Any] = {"insecure": True, "network": FAST, "background": True, "log": False}
        nodes = {
            "hub": cd.serve(
                cd.FedMD(), ["north", "south"], classes=10, rounds=ROUNDS, listen=address, public=public, test=test,
                progress=False, **common,
            )
        }  # fmt: skip
        started.append(nodes["hub"])
        for name, part, rules in (("north", slice(40), policy), ("south", slice(40, 80), {})):
            own = (x[160:180], y[160:180])
            agent = cd.Agent(name, GaussianNB(), x[part], y[part], test=own)
            nodes[name] = cd.join(
                agent, address, public=public, test=test, policy=rules, folder=tmp_path / name, **common
            )
            started.append(nodes[name])
        return nodes

    yield run
    for node in started:
        node._process.stop()
        node._process.end()


def entries(folder: Path) -> list[dict[str, Any]]:
    return [entry for _, entry in ChainReader(folder / AUDIT)]


def test_all_that_is_sent_is_in_the_log_and_what_is_withheld_is_not(start: Any, tmp_path: Path) -> None:
    policy = {"protocols": ["fedmd"], "report": {"own_accuracy": False, "alone": False, "outputs": False}}
    nodes = start(policy)
    result = nodes["hub"].wait(WAIT)
    trained = nodes["north"].wait(WAIT)
    assert trained.predict(np.zeros((1, 64))).shape == (1,)
    rows = {name: [row for row in result.rows if row["agent"] == name] for name in ("north", "south")}
    # The hub counts the same bytes of protocol messages as both logs.
    logs = {name: entries(tmp_path / name) for name in rows}
    for name, found in logs.items():
        messages = [each for each in found if each.get("what") == "protocol message"]
        assert sum(each["bytes"] for each in messages) == sum(row["sent"] for row in rows[name])
        assert sorted({each["round"] for each in messages}) == [1, 2, 3]
    assert all("own_accuracy" in row for row in rows["south"])
    assert not any("own_accuracy" in row for row in rows["north"])
    assert all("accuracy" in row for row in (*rows["north"], *rows["south"]))
    assert {row["agent"] for row in result.alone_rows if "accuracy" in row} == {"south"}
    whats = {name: {each["what"] for each in found if each["event"] == "released"} for name, found in logs.items()}
    assert whats["south"] - whats["north"] == {"scores and outputs"}
    scores = [each["values"] for each in logs["north"] if each.get("what") == "scores"]
    assert {tuple(each) for each in scores} == {(), ("accuracy",)}
    first, hello, joined = logs["north"][:3]
    assert (first["event"], first["policy"]) == ("started", policy)
    assert (hello["what"], joined["event"]) == ("hello", "joined")
    assert joined["terms"]["protocol"]["name"] == "fedmd"
    assert joined["exchanges"] == cd.FedMD.exchanges


def test_terms_against_the_policy_get_a_hello_and_nothing_else(start: Any, tmp_path: Path) -> None:
    nodes = start({"settings": {"fedmd": {"aggregate": "median"}}})
    with pytest.raises(NetworkError, match="must keep to this agent's policy") as caught:
        nodes["north"].wait(WAIT)
    assert "settings.fedmd.aggregate must be 'median': 'mean'" in str(caught.value)
    found = entries(tmp_path / "north")
    assert {each["what"] for each in found if each["event"] == "released"} == {"hello", "leaving"}
    (refused,) = [each for each in found if each["event"] == "refused"]
    assert "aggregate" in refused["why"]


def test_an_agent_leaves_when_the_day_is_used_up_and_waits_when_it_is_started_again(start: Any, tmp_path: Path) -> None:
    nodes = start({"rounds_per_day": 2})
    with pytest.raises(NetworkError, match="rounds_per_day = 2"):
        nodes["north"].wait(WAIT)
    events = [each["event"] for each in entries(tmp_path / "north")]
    assert events[-2:] == ["stopped", "released"]  # the last one says that it leaves
    result = nodes["hub"].wait(WAIT)
    sent = {row["round"]: row["sent"] for row in result.rows if row["agent"] == "north"}
    assert (sent[1] > 0, sent[2] > 0, sent.get(3, 0)) == (True, True, 0)
    again = start({"rounds_per_day": 2})["north"]
    end = time.monotonic() + WAIT
    while len(entries(tmp_path / "north")) == len(events) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)
    assert [each["event"] for each in entries(tmp_path / "north")[len(events) :]] == ["started"]
    assert again.is_running
    again.stop()
    with pytest.raises(NetworkError, match="it was stopped before"):
        again.wait(WAIT)


# --- among peers ------------------------------------------------------------------------------------


def peer(digits: Digits, name: str, folder: Path, ports: dict[str, int], policy: Policy = ANYTHING) -> PeerNode:
    """One of two peers that send each other their models; the second one dials the first."""
    names = tuple(ports)
    x, y = digits[0].reshape(-1, 64)[:80], digits[1][:80]
    part = slice(0, 40) if name == names[0] else slice(40, 80)
    described = RunDescription(
        protocol=cd.AvgKD(), topology=Topology.complete(names), classes=10, seed=0,
        spec=RunSpec(rounds=2, evaluate_every=1), faults=Faults([], names, 0, 1.0),
    )  # fmt: skip
    own = with_agent(described, cd.Agent(name, DecisionTreeClassifier(max_depth=3), x[part], y[part]))
    dial = {} if name == names[0] else {names[0]: f"127.0.0.1:{ports[names[0]]}"}
    return PeerNode(own, f"127.0.0.1:{ports[name]}", dial, None, FAST, folder, progress=False, policy=policy)


def test_a_peer_logs_the_models_that_it_sends(digits: Digits, tmp_path: Path) -> None:
    with socket.socket() as one, socket.socket() as two:
        for taken in (one, two):
            taken.bind(("127.0.0.1", 0))
        ports = {"north": one.getsockname()[1], "south": two.getsockname()[1]}

    def work(name: str, channel: Channel, should_stop: ShouldStop) -> None:
        outcome = peer(digits, name, tmp_path / name, ports).run_here(should_stop)
        channel.send(complete=outcome.complete, sent=sum(row["sent"] for row in outcome.rows))

    processes = [ForkedProcess(name, partial(work, name)) for name in ports]
    try:
        for process in processes:
            assert process.channel.poll(WAIT)
            told = process.receive()
            assert told is not None
            assert told["complete"]
            found = entries(tmp_path / process.name)
            models = [each for each in found if each.get("what") == "model"]
            assert sum(each["bytes"] for each in models) == told["sent"] > 0
            assert {each["round"] for each in models} == {1, 2}
            assert [each["event"] for each in found[:2]] == ["started", "joined"]
            assert found[1]["terms"]["protocol"]["name"] == "avgkd"
    finally:
        for process in processes:
            process.stop()
            process.end()


def test_a_peer_with_a_policy_against_its_recipe_sends_nothing(digits: Digits, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="must keep to this agent's policy"):
        peer(digits, "north", tmp_path, {"north": 1, "south": 2}, Policy(least_agents=3))
