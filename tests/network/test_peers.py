"""Peers without a hub: in step in quiet, and in step again after a fault."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.tree import DecisionTreeClassifier
from tests.network.fakes import HOOKS, FakeTransport, Gossip, Killed, Net, agent, describe, with_node

from codistill.core.errors import NetworkError
from codistill.engine.runtime import run
from codistill.engine.store import RunFolder
from codistill.learners.sklearn import SklearnLearner
from codistill.network.connections import Connections
from codistill.network.frames import FrameKind
from codistill.network.log import EventLog
from codistill.network.options import Network
from codistill.network.peer import PeerRuntime
from codistill.nodes.agent import Agent
from codistill.protocol import Protocol
from codistill.protocols.avgkd import AvgKD
from codistill.topology import Topology
from codistill.wire.message import Message

NAMES = ("a", "b", "c", "d")
SAMPLES = (np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8) % 2)


@pytest.fixture(autouse=True)
def no_hooks() -> Any:
    HOOKS.clear()
    yield
    HOOKS.clear()


class Peer(threading.Thread):
    """A peer in a thread."""

    def __init__(
        self,
        net: Net,
        name: str,
        rounds: int,
        folder: Path,
        *,
        network: Network | None = None,
        names: tuple[str, ...] = NAMES,
        topology: Topology | None = None,
        seed: int = 0,
        protocol: Protocol | None = None,
        model: Any = None,
    ) -> None:
        super().__init__(daemon=True, name=name)
        self.agent: Agent = agent(name) if model is None else Agent(name, model, *SAMPLES)
        whole = describe(names, rounds, protocol or Gossip(), topology or Topology.ring(names), seed)
        self.whole = with_node(whole, self.agent)
        self.told: list[str] = []
        self.journal = EventLog(name, quiet=True)
        self.journal.tell = lambda text, *_, **__: self.told.append(text)  # type: ignore[method-assign,assignment]
        self.wire = FakeTransport(net, name, self.whole.topology.neighbours(name))
        self.folder, self.rounds = folder / name, rounds
        self.network = network or Network(patience=5)
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            store = RunFolder(self.folder)
            store.open(resume=True)
            lines = Connections(self.wire, self.network, self.journal.tell, deadline=self.network.deadline)  # type: ignore[arg-type]
            try:
                runtime = PeerRuntime(self.whole, lines)
                self.result = run(self.whole, runtime, store=store, observers=[self.journal]).complete
            finally:
                store.close()
        except Killed:
            self.result = "killed"
        except Exception as error:
            self.result = error
        finally:
            self.wire.close()

    def end(self) -> Any:
        self.join(timeout=30)
        assert not self.is_alive(), f"{self.name} has not ended: {self.told}"
        return self.result

    @property
    def heard(self) -> list[list[Any]]:
        return [list(item) for item in self.agent.state["heard"]]


def test_in_quiet_everyone_hears_its_neighbours_in_every_step(tmp_path: Path) -> None:
    net = Net()
    peers = {name: Peer(net, name, 3, tmp_path) for name in NAMES}
    assert [peer.end() for peer in peers.values()] == [True] * 4
    # In a ring of four, a has b and d; two steps in each of three rounds.
    assert peers["a"].heard == [[t, "b", "d"] for t in range(3) for _ in range(2)]
    assert peers["c"].heard == [[t, "b", "d"] for t in range(3) for _ in range(2)]


def test_neighbours_of_a_peer_that_dies_go_on_and_it_meets_them_when_it_is_back(tmp_path: Path) -> None:
    net, rounds = Net(), 60
    HOOKS["b", 2, 1] = lambda me: peers["b"].wire.kill()
    for t in range(rounds):
        for name in ("a", "c", "d"):
            HOOKS[name, t, 0] = lambda me: time.sleep(0.01)  # so that the others are not done before it is back
    peers = {name: Peer(net, name, rounds, tmp_path) for name in NAMES}
    assert peers["b"].end() == "killed"
    del HOOKS["b", 2, 1]
    back = Peer(net, "b", rounds, tmp_path)
    assert [back.end(), *(peers[name].end() for name in ("a", "c", "d"))] == [True] * 4
    skipped = [text for text in back.told if "skips rounds to meet" in text][-1]  # on a busy machine more than once
    met = int(skipped.rpartition("round ")[2]) - 1  # from 0
    assert met >= 3
    # It has its state of two rounds, and then hears both neighbours from the meeting on, in step to the end.
    assert [item[0] for item in back.heard][:4] == [0, 0, 1, 1]
    assert [item for item in back.heard if item[0] > met] == [
        [t, "a", "c"] for t in range(met + 1, rounds) for _ in range(2)
    ]
    heard_of_b = {t for t, *names in peers["a"].heard if "b" in names}
    assert heard_of_b >= set(range(met + 1, rounds))
    assert not heard_of_b & set(range(3, met))
    # Among the others nothing was lost.
    assert {t for t, *names in peers["d"].heard if {"a", "c"} <= set(names)} == set(range(rounds))


def test_two_sides_of_a_cut_go_on_and_meet_when_it_is_healed(tmp_path: Path) -> None:
    net, rounds = Net(), 80
    for t in range(rounds):
        for name in NAMES:  # one side is faster than the other
            HOOKS[name, t, 0] = lambda me: time.sleep(0.005 if me.name in ("a", "b") else 0.02)

    def cut(me: Any) -> None:
        net.cut("b", "c")
        net.cut("a", "d")

    def heal(me: Any) -> None:
        net.heal("b", "c")
        net.heal("a", "d")

    HOOKS["a", 10, 1] = cut
    HOOKS["a", 40, 1] = heal
    peers = {name: Peer(net, name, rounds, tmp_path) for name in NAMES}
    assert [peer.end() for peer in peers.values()] == [True] * 4
    apart = {t for t, *names in peers["a"].heard if "d" not in names}
    assert set(range(12, 39)) <= apart
    together = [t for t, *names in peers["a"].heard if set(names) == {"b", "d"} and t > 12]
    assert together
    assert together[-1] == rounds - 1
    assert len(together) >= 2 * (rounds - 1 - together[0])  # from then on in both steps of every round
    assert any("skips rounds" in text for text in peers["c"].told + peers["d"].told)


def test_a_peer_that_is_late_is_not_waited_for_beyond_the_deadline(tmp_path: Path) -> None:
    net = Net()
    HOOKS["b", 1, 0] = lambda me: time.sleep(1.0)
    network = Network(deadline=0.3, patience=5)
    peers = {name: Peer(net, name, 6, tmp_path, network=network) for name in NAMES}
    assert [peer.end() for peer in peers.values()] == [True] * 4
    assert any("continues without 'b': this round has waited 0.3 s for it" in text for text in peers["a"].told)
    assert ["b" in item for item in peers["a"].heard][:4] == [True, True, False, False]


def test_a_peer_that_sends_one_message_after_the_other_is_not_waited_for_beyond_the_deadline(tmp_path: Path) -> None:
    """Two messages in a round, each after 0.7 of the deadline: with the second one it has used up its share."""
    net = Net()
    for step in range(2):
        HOOKS["b", 1, step] = lambda me: time.sleep(1.4)
    network = Network(deadline=2.0, patience=5)
    peers = {name: Peer(net, name, 3, tmp_path, network=network, names=("a", "b")) for name in ("a", "b")}
    assert [peer.end() for peer in peers.values()] == [True] * 2
    assert any("round 2: continues without 'b': this round has waited 2 s for it" in text for text in peers["a"].told)
    assert "b" not in peers["a"].heard[3]


def test_peers_with_other_terms_are_told_and_do_not_start(tmp_path: Path) -> None:
    net = Net()
    peers = [Peer(net, "a", 2, tmp_path, names=("a", "b")), Peer(net, "b", 2, tmp_path, names=("a", "b"), seed=1)]
    results = [peer.end() for peer in peers]
    assert any(isinstance(result, NetworkError) and "seed: " in result.found for result in results)
    assert all(peer.agent.state == {} for peer in peers)


class Stranger:
    """A neighbour that is on the network and says what a test lets it say."""

    def __init__(self, net: Net, name: str, other: str, rounds: int, **content: Any) -> None:
        self.wire = FakeTransport(net, name, (other,))
        self.lines = Connections(self.wire, Network(), lambda text: None)  # type: ignore[arg-type]
        if content:
            self.lines.command(other, kind=FrameKind.HELLO, **content)


def test_the_refusal_of_one_neighbour_does_not_end_a_peer(tmp_path: Path) -> None:
    """In a ring of four, b refuses a; a starts with d, and says once that b refuses it."""
    net = Net()
    first = Peer(net, "a", 3, tmp_path)
    for _ in range(3):
        Stranger(net, "b", "a", 3, do="refused", why="the moon is full")
    others = [Peer(net, name, 3, tmp_path, network=Network(patience=1)) for name in ("c", "d")]
    assert first.end() is True
    assert first.heard == [[t, "d"] for t in range(3) for _ in range(2)]
    assert [text for text in first.told if "refuses" in text] == ["'b' refuses this peer: the moon is full"]
    assert all(peer.end() is True for peer in others)


def test_a_peer_that_all_neighbours_refuse_ends_with_their_reasons(tmp_path: Path) -> None:
    net = Net()
    first = Peer(net, "a", 3, tmp_path)
    Stranger(net, "b", "a", 3, do="refused", why="the moon is full")
    Stranger(net, "d", "a", 3, do="refused", why="another seed")
    result = first.end()
    assert isinstance(result, NetworkError)
    assert "'b' says: the moon is full; 'd' says: another seed" in result.found


def test_a_neighbour_that_never_joins_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    """b is on the network and says nothing; without patience, only the deadline ends the wait for it."""
    net = Net()
    Stranger(net, "b", "a", 3)
    network = Network(deadline=0.5)
    peers = [Peer(net, name, 3, tmp_path, network=network, names=("a", "b", "d")) for name in ("a", "d")]
    Stranger(net, "b", "d", 3)
    assert [peer.end() for peer in peers] == [True, True]
    assert peers[0].heard == [[t, "d"] for t in range(3) for _ in range(2)]


def test_the_quorum_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    """b leaves for good in round 1; a has no other neighbour, and ends alone."""
    net = Net()
    HOOKS["b", 1, 0] = lambda me: peers[1].wire.kill()
    network = Network(deadline=0.3)
    peers = [Peer(net, name, 4, tmp_path, network=network, names=("a", "b")) for name in ("a", "b")]
    assert peers[1].end() == "killed"
    assert peers[0].end() is True
    assert [len(item) - 1 for item in peers[0].heard] == [1, 1, 0, 0, 0, 0, 0, 0]


def test_a_peer_alone_runs_alone(tmp_path: Path) -> None:
    peer = Peer(Net(), "a", 2, tmp_path, names=("a",), topology=Topology.silent(("a",)))
    assert peer.end() is True
    assert peer.heard == [[t] for t in range(2) for _ in range(2)]


# --- a model that would end its receiver -----------------------------------------------------------------------


class EvilTree(SklearnLearner):
    """It sends a tree whose nodes have no dimension."""

    def export(self) -> Message:
        sound = super().export()
        with zipfile.ZipFile(io.BytesIO(sound.arrays["model"].tobytes())) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        nodes = next(name for name in files if b"left_child" in files[name])
        one, out = io.BytesIO(), io.BytesIO()
        np.save(one, np.load(io.BytesIO(files[nodes]))[0])
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in {**files, nodes: one.getvalue()}.items():
                archive.writestr(name, data)
        return Message({"model": np.frombuffer(out.getvalue(), np.uint8)}, dict(sound.plain))


def exchange_with_an_evil_tree(folder: Path) -> None:
    """Five rounds of AvgKD of two honest peers and one that sends such a tree; prints what the honest ones say."""
    net, names = Net(), ("a", "b", "mallory")
    models = {name: DecisionTreeClassifier() for name in names} | {"mallory": EvilTree(DecisionTreeClassifier())}
    peers = [
        Peer(net, name, 5, folder, names=names, topology=Topology.complete(names), protocol=AvgKD(), model=model)
        for name, model in models.items()
    ]
    for peer in peers[:2]:
        print(json.dumps([peer.end() is True, peer.told]))


def test_a_peer_that_sends_an_evil_tree_is_refused_struck_and_excluded(tmp_path: Path) -> None:
    """In a process of its own, which such a tree ended by a signal. Three bad messages, and its sender is excluded."""
    root = Path(__file__).parents[2]
    code = "import pathlib, tests.network.test_peers as t; t.exchange_with_an_evil_tree(pathlib.Path('.'))"
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, (ended.returncode, ended.stderr[-500:])
    for line in ended.stdout.splitlines():
        finished, told = json.loads(line)
        strikes = [text for text in told if text.startswith("'mallory': strike")]
        assert finished
        assert [text[:24] for text in strikes] == [f"'mallory': strike {n} of 3" for n in (1, 2, 3)]
        assert all("a tree of the wrong size" in text for text in strikes)
        assert any("'mallory'" in text and "excluded" in text for text in told)
    assert len(ended.stdout.splitlines()) == 2
