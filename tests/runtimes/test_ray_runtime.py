"""A run in a Ray cluster: what it asks for, equal bits, and what happens when a host is lost."""

from __future__ import annotations

import copy
import importlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from torch import nn

import codistill as cd
from codistill.core.errors import NetworkError, RecipeError, RuntimeFault
from codistill.engine.placement import _PREFIX as STATES
from codistill.engine.placement import IdleStates, remove_left_behind
from codistill.experiments.recipe import read_recipe
from codistill.experiments.run import execute
from codistill.nodes.agent import Agent
from codistill.nodes.record import record_of
from codistill.runtimes import ray_cluster
from codistill.runtimes.ray_cluster import (
    Demand,
    RayCluster,
    demand_of,
    found_address,
    joined,
    less_demanding,
    room,
    too_little,
)
from codistill.wire.state import unpack

X = np.random.default_rng(0).normal(size=(400, 4)).astype(np.float32)
Y = (X[:, 0] + X[:, 1] > 0).astype(int)
QUIET: dict[str, Any] = {"progress": False}
TWO_NODES = [{"CPU": 4.0, "GPU": 1.0, "memory": 1e9}, {"CPU": 2.0, "disk": 1.0}]

pytestmark = pytest.mark.usefixtures("time_limit")


# --- what a run asks for, without a cluster ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "agents", "workers", "hosts", "each"),
    [
        ({}, 20, None, 6, {"CPU": 1}),  # one per core
        ({}, 4, None, 4, {"CPU": 1}),  # but not more than agents
        ({}, 20, 3, 3, {"CPU": 1}),
        ({"cpus_per_host": 2}, 20, None, 3, {"CPU": 2}),  # 2 on the node with 4 cores, 1 on that with 2
        ({"cpus_per_agent": 0.25}, 10, None, 3, {"CPU": 1}),  # 4 agents share a core: 10 / 4, rounded up
        ({"cpus_per_agent": 1 / 3}, 6, None, 2, {"CPU": 1}),
        ({"cpus_per_agent": 2}, 3, None, 3, {"CPU": 2}),
        ({"cpus_per_agent": 0.1}, 4, 2, 2, {"CPU": 0.2}),  # two agents on each host
        ({"gpus_per_agent": 0.5}, 2, None, 1, {"CPU": 1, "GPU": 1}),
        ({"gpus_per_agent": 0.4}, 3, 1, 1, {"CPU": 1, "GPU": 2}),  # 1.2 GPUs: Ray has whole ones beyond one
        ({"resources": {"disk": 0.5}}, 9, None, 2, {"CPU": 1, "disk": 0.5}),  # the node with a disk has room for two
    ],
)  # fmt: skip
def test_what_a_run_asks_for(
    options: dict[str, Any], agents: int, workers: int | None, hosts: int, each: Mapping[str, float]
) -> None:
    demand = demand_of(RayCluster(**options), agents, workers, TWO_NODES)
    assert demand.hosts == hosts
    assert dict(demand.each) == pytest.approx(each)


def test_fewer_hosts_where_nodes_are_left() -> None:
    """Twelve agents at a quarter of a core ask for three cores; of two hosts with six agents each, for 1.5, so 2."""
    options = RayCluster(cpus_per_agent=0.25)
    assert less_demanding(options, 12, None, [{"CPU": 4.0}]) == Demand(3, {"CPU": 1.0})
    assert less_demanding(options, 12, 3, [{"CPU": 2.0}, {"CPU": 2.0}]) == Demand(3, {"CPU": 1.0})
    assert less_demanding(RayCluster(), 12, 6, [{"CPU": 2.0}]) == Demand(2, {"CPU": 1.0})
    assert less_demanding(options, 12, None, [{"CPU": 1.0}]).hosts == 3  # no room at all: what was asked for


def test_too_little_room_is_a_sentence_with_both_sides() -> None:
    demand = Demand(8, {"CPU": 1.0, "GPU": 0.5})
    assert room(TWO_NODES, demand.each) == 2
    found = str(too_little(demand, TWO_NODES))
    assert "room for 8 hosts at least" in found
    assert "asked: 8 hosts with 1 core, 0.5 GPUs each; there is room for 2: " in found
    assert "1 node with 4 cores, 1 GPU; 1 node with 2 cores, 0 GPUs." in found
    many = [{"CPU": float(cores)} for cores in range(1, 8)]
    job = Demand(1, {"CPU": 8.0, "memory": 1.5 * 2**30}, "job")
    assert "asked: 1 job with 8 cores, 1.5 GB of memory; there is room for 0: 1 node with 1 core, 0 GB of memory; " in (
        found := str(too_little(job, many, do="Add a node."))
    )
    assert found.endswith("1 node with 5 cores, 0 GB of memory; and 2 other kinds. Add a node.")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"cpus_per_agent": 1, "cpus_per_host": 1}, "cpus_per_host or cpus_per_agent, not both"),
        ({"gpus_per_agent": 0}, "ray.gpus_per_agent must be above 0"),
        ({"resources": {"CPU": 1.0}}, "CPU = 1.0"),
        ({"resources": {"disk": 0.0}}, "disk = 0.0"),
        ({"resources": {"disk": "one"}}, "ray.resources must be"),
    ],
)
def test_settings_that_cannot_be_meant(options: dict[str, Any], found: str) -> None:
    with pytest.raises(RecipeError, match=found):
        RayCluster(**options)


def test_which_cluster_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an address says; or RAY_ADDRESS; or the one that 'ray start' has left the address of; or a new one."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    started = tmp_path / "ray" / "ray_current_cluster"
    started.parent.mkdir()
    assert found_address(None) == found_address("local") == "local"
    with pytest.raises(NetworkError, match="a Ray cluster must run on this machine"):
        found_address("auto")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        mine, theirs = (f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other))
        started.write_text(mine)
        assert found_address(None) == found_address("auto") == mine
        assert (found_address(theirs), found_address("local")) == (theirs, "local")
        monkeypatch.setenv("RAY_ADDRESS", theirs)
        assert (found_address(None), found_address("auto")) == (theirs, mine)
        monkeypatch.setenv("RAY_ADDRESS", "local")
        assert found_address(None) == "local"
    # Nobody listens there any more.
    for address in (None, theirs):
        monkeypatch.setenv("RAY_ADDRESS", theirs)
        with pytest.raises(NetworkError, match=f"'{theirs}': .*refused"):
            found_address(address)
    monkeypatch.delenv("RAY_ADDRESS")
    assert found_address(None) == "local"
    for wrong in ("ray://127.0.0.1:10001", "127.0.0.1", "host:99999"):
        with pytest.raises(RecipeError, match="host:port"):
            found_address(wrong)


def test_a_new_cluster_has_the_cores_of_this_process_and_its_handlers_go(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    begun: list[dict[str, Any]] = []

    def init(address: str, **options: Any) -> None:
        begun.append(options)
        signal.signal(signal.SIGTERM, lambda *_: None)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    before = signal.getsignal(signal.SIGTERM)
    with joined("local", store=5):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert (begun[0]["num_cpus"], begun[0]["object_store_memory"], begun[0]["log_to_driver"]) == (3, 5, False)
    with socket.create_server(("127.0.0.1", 0)) as server, joined(f"127.0.0.1:{server.getsockname()[1]}", store=5):
        assert not {"num_cpus", "object_store_memory"} & begun[1].keys()  # of somebody else's cluster
    monkeypatch.setattr(ray, "init", lambda *_, **__: 1 / 0)
    with pytest.raises(NetworkError, match="'local': division by zero"), joined("local"):
        pass


def test_a_token_is_used_before_ray_is_imported_and_not_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(variable, "")  # so that it is restored
        monkeypatch.delenv(variable)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray")
    ray_cluster._set_environment()
    assert "RAY_AUTH_MODE" not in os.environ
    (tmp_path / "token").touch()
    with monkeypatch.context() as imported:
        imported.setitem(sys.modules, "ray", None)
        ray_cluster._set_environment()
        assert "RAY_AUTH_MODE" not in os.environ
    ray_cluster._set_environment()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    alive = IdleStates(None, ["a"])
    dead = tmp_path / f"{STATES}dead"
    dead.mkdir()
    (dead / ".lock").touch()
    (tmp_path / f"{STATES}new").mkdir()  # not locked yet: it may be about to be
    remove_left_behind()
    assert {path.name for path in tmp_path.iterdir()} == {alive.folder.name, f"{STATES}new"}
    alive.close()
    assert not alive.folder.exists()


def test_a_batch_arrives_as_it_was_sent() -> None:
    """Small payloads go in its bytes, large ones beside them, and those in the object store as arguments of theirs."""
    from codistill.runtimes import ray_host
    from codistill.runtimes import ray_host as ray_links

    large, larger = (bytes([number]) * (ray_links._APART + number) for number in (1, 2))
    in_store = ["first", "second"]  # any object that is not bytes stands for a reference
    frames = [
        (0, -1, 7, [1, 2], b"small"), (0, 3, 8, [], in_store[0]), (2, 0, 9, [4], large), (1, 0, 9, [4], b""),
        (0, 3, 8, [5], in_store[1]), (0, 3, 8, [70_000], large), (0, 3, 8, [6], larger), (0, 3, 8, [6], in_store[0]),
    ]  # fmt: skip
    sent: list[Any] = []

    class Method:
        def remote(self, *arguments: Any) -> None:
            sent.extend(arguments)

    ray_links._call(Method(), 3, 5, frames)
    assert [type(part) for part in sent] == [bytes, list, str, str]
    assert len(sent[0]) < 1000
    assert [len(view) for view in sent[1]] == [len(large), len(larger)]  # each once
    assert sent[2:] == in_store
    found = {"first": b"1" * 10, "second": b"2"}
    host = ray_host.HostProcess()
    host.deliver(sent[0], sent[1], *(found[name] for name in sent[2:]))
    whole = [(*frame[:4], frame[4] if isinstance(frame[4], bytes) else found[frame[4]]) for frame in frames]
    assert host._inbox.get() == (3, 5, whole)


class Group:
    """What was asked of Ray for the hosts of a run, and whether it has given it."""

    def __init__(self, bundles: list[Any], strategy: str, bundle_label_selector: Any) -> None:
        self.bundles, self.where = bundles, bundle_label_selector

    def wait(self, timeout_seconds: float) -> bool:
        return self.where is None or len(self.bundles) < 3


@pytest.mark.parametrize(
    ("cut_off", "workers", "hosts", "without"),
    [
        ([], None, 4, None),
        (["b"], None, 2, "!in(b)"),  # one host on each core that is left
        (["b", "c"], 4, 1, "!in(b,c)"),  # the run has to do with fewer
        (["a", "b", "c"], 4, 4, None),  # nothing is left: one of them is tried again
        (["c"], None, 4, None),  # others use the nodes that are left
    ],
)
def test_a_node_that_another_cannot_reach_is_left_out_if_the_others_have_room(
    cut_off: list[str], workers: int | None, hosts: int, without: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from codistill.runtimes import ray_runtime

    nodes = {"a": {"CPU": 1.0}, "b": {"CPU": 2.0}, "c": {"CPU": 1.0}}
    monkeypatch.setattr(
        ray_runtime, "alive_nodes", lambda without=(): [nodes[name] for name in nodes if name not in without]
    )
    monkeypatch.setattr(ray_runtime, "placement_group", Group)
    monkeypatch.setattr(ray_runtime, "remove_placement_group", lambda _: None)
    made = ray_runtime.RayHosts(federation(count=4).description, RayCluster(), workers=workers)
    made._cut_off, made._losses = {name: f"node {name}" for name in cut_off}, len(cut_off)
    demand, group = made._place()
    assert (demand.hosts, len(group.bundles)) == (hosts, hosts)
    assert group.where == (None if without is None else [{"ray.io/node-id": without}] * hosts)
    assert list(made._cut_off) == (cut_off if without else [])


def test_a_host_says_whether_another_has_died_or_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    from codistill.runtimes import ray_host as ray_links

    calls = {"fine": None, "dead": ActorDiedError(), "away": ActorUnavailableError("no route", None)}

    def get(asked: list[str]) -> None:
        for failure in filter(None, map(calls.get, asked)):
            raise failure

    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls, []))
    monkeypatch.setattr(ray, "get", get)
    outbox: Any = queue.SimpleQueue()
    links = ray_links.HostLinks(1, [None] * 4, {"a": 1}, queue.SimpleQueue(), outbox)
    links._calls = {"fine": 2, "dead": 3, "away": 4}
    links._check_calls()
    told = [unpack(frame[4]) for _ in range(2) for frame in outbox.get()[2]]
    assert (told, links._calls) == ([{"lost": 3}, {"cut_off": 4}], {})
    hosts = [ray_links.HostActor(i, None, (f"a{i}",), f"n{i}", f"id{i}") for i in range(1, 5)]
    owner = ray_links.OwnerLinks(hosts, {"a": 1})
    for content, node in zip(told, (None, hosts[3]), strict=True):
        with pytest.raises(ray_links.HostLost, match="cannot be reached, says host 1 on n1 with a1") as caught:
            owner._take_control(1, content)
        assert caught.value.cut_off is node


def test_the_owner_asks_ray_once_for_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask for all answers that have come makes Ray wait for the others, if only for a moment: at every exchange."""
    from codistill.runtimes import ray_host as ray_links

    asked: list[int] = []

    def wait(calls: list[str], *, num_returns: int, timeout: float, fetch_local: bool) -> tuple[list[str], list[str]]:
        asked.append(num_returns)
        return calls[:num_returns], calls[num_returns:]

    answers = {call: ray_links.pack_batch(host, 1, [(2, 0, 0, [], b"")])[0] for host, call in ((1, "one"), (2, "two"))}
    monkeypatch.setattr(ray_links.ray, "wait", wait)
    monkeypatch.setattr(ray_links.ray, "get", answers.__getitem__)
    links = ray_links.OwnerLinks([ray_links.HostActor(number, None, ()) for number in (1, 2)], {"hub": 0})
    links._calls = {"one": 1, "two": 2}
    links._pump(1.0)
    assert (asked, list(links._calls), len(links.arrived())) == ([1], ["two"], 1)


@pytest.mark.parametrize(("failed", "times"), [(set(), 1), ({"call 7"}, 11)])
def test_a_host_asks_once_whether_its_calls_have_failed(
    monkeypatch: pytest.MonkeyPatch, failed: set[str], times: int
) -> None:
    """One by one only if one has: then the owner is told which host it was."""
    from codistill.runtimes import ray_host as ray_links

    asked: list[list[str]] = []

    def get(calls: list[str]) -> None:
        asked.append(calls)
        if failed & set(calls):
            raise ray_links.RayError

    monkeypatch.setattr(ray_links.ray, "wait", lambda calls, **_: (calls, []))
    monkeypatch.setattr(ray_links.ray, "get", get)
    told: Any = queue.SimpleQueue()
    links = ray_links.HostLinks(1, [None] * 10, {"hub": 0}, queue.SimpleQueue(), told)
    links._calls = {f"call {i}": i for i in range(10)}
    links._check_calls()
    assert len(asked) == times
    assert not links._calls
    assert told.qsize() == len(failed)
    if failed:
        _, _, [(kind, *_, content)] = told.get()
        assert (kind, unpack(content)) == (ray_links.CONTROL, {"lost": 7})


def test_agents_go_in_parts_but_what_they_share_does_not_go_often(monkeypatch: pytest.MonkeyPatch) -> None:
    from codistill.runtimes import ray_runtime

    monkeypatch.setattr(ray_runtime, "_BATCH", 100_000)
    x = np.zeros((2000, 4), dtype=np.float32)  # 32 KB
    own = [cd.Agent(f"a{i}", nn.Linear(4, 2), x.copy(), np.arange(2000) % 2) for i in range(10)]
    lengths = [len(part) for part in ray_runtime._parts(own)]
    assert sum(lengths) == 10
    assert 1 < lengths[0] < 4
    sharing = [cd.Agent(f"a{i}", nn.Linear(4, 2), x[:2], np.arange(2)) for i in range(10)]
    everything = np.zeros((100_000, 4), dtype=np.float32)  # 1.6 MB: more than ten agents have of their own
    for agent in sharing:
        agent.learner.all_samples = everything  # type: ignore[attr-defined]
    assert [len(part) for part in ray_runtime._parts(sharing)] == [10]
    assert [len(part) for part in ray_runtime._parts(own[:2])] == [2]
    assert not list(ray_runtime._parts([]))


def test_a_host_has_removed_its_states_when_it_says_so() -> None:
    """It is ended then. Its other thread may be at it, and a second removal returns at once."""
    from codistill.runtimes import ray_host

    begun, go_on, removed = threading.Event(), threading.Event(), list[bool]()

    class Slow:
        def close(self) -> None:
            if not begun.is_set():
                begun.set()
                go_on.wait(60)
                removed.append(True)

    host = ray_host.HostProcess()
    host._idle = Slow()  # type: ignore[assignment]
    found: list[bool] = []
    threads = [
        threading.Thread(target=host._remove_states),
        threading.Thread(target=lambda: (host.end(), found.append(bool(removed)))),
    ]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join()
    assert found == [True]


def test_agents_rest_on_disk_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a host never has the models of all of its agents in memory."""
    from codistill.runtimes import ray_host

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ray_host, "_fetched", lambda references: [copy.deepcopy(each) for each in references])
    described = federation(cd.FedMD(), 2).description
    names = tuple(agent.name for agent in described.agents)
    run = replace(described, agents=(), hub=None, public=None, test=None)
    given = ray_host.Given(run, names, described.public, described.test, None, "cpu", 1, rests=True)
    host = ray_host.HostProcess()
    for agent in reversed(described.agents):
        assert host.take_agents(given, [[agent]]) == {}
    assert all(record_of(agent).reload is not None for agent in host._agents.values())
    assert all(agent.public is host._agents["a0"].public for agent in host._agents.values())
    assert len(list(tmp_path.glob(f"{STATES}*/*.state"))) == 2
    host.end()
    assert not list(tmp_path.glob(f"{STATES}*"))


def test_a_host_that_ran_out_of_memory_ends_the_run_and_its_agents_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no lost host: on another node it would run out of memory again."""
    from codistill.runtimes import ray_host as ray_links

    def get(values: Any) -> None:
        raise ray_links.OutOfMemoryError("5 GB of 4 GB")

    monkeypatch.setattr(ray_links.ray, "get", get)
    hosts = [ray_links.HostActor(number, None, (f"a{number}", f"b{number}"), f"n{number}") for number in (1, 2)]
    links = ray_links.OwnerLinks(hosts, {"hub": 0})
    with pytest.raises(RuntimeFault, match="host 2 on n2 with a2, b2 ran out of memory") as caught:
        links._returned(["call"], 2)
    assert not isinstance(caught.value, ray_links.HostLost)


# --- with a cluster on this machine --------------------------------------------------------------------------


class OwnLearner(cd.Learner):
    """Writes to an array of its own, as people's models do: what Ray keeps in its store cannot be written to."""

    def __init__(self) -> None:
        self.means = np.zeros((2, 4))

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        self.means[:] = targets.T @ x / np.maximum(targets.sum(axis=0), 1)[:, None]

    def predict(self, x: np.ndarray) -> np.ndarray:
        near: np.ndarray = np.exp(-((x[:, None] - self.means) ** 2).sum(axis=2))
        return near / near.sum(axis=1, keepdims=True)

    def state(self) -> dict[str, Any]:
        return {"means": self.means}

    def restore(self, state: dict[str, Any]) -> None:
        self.means = state["means"].copy()


def agents(count: int = 4) -> list[cd.Agent]:
    torch.manual_seed(0)
    models = [
        cd.TorchLearner(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), lr=0.1) if i % 2 == 0
        else OwnLearner() if i == 1 else RandomForestClassifier(3, random_state=0)
        for i in range(count)
    ]  # fmt: skip
    return [
        cd.Agent(f"a{i}", model, X[40 * i : 40 * i + 40], Y[40 * i : 40 * i + 40]) for i, model in enumerate(models)
    ]


def federation(protocol: Any = None, count: int = 4) -> cd.Federation:
    return cd.Federation(agents(count), protocol or cd.FedMD(), public=X[300:330], test=(X[330:], Y[330:]))


class KillsAHost:
    """Kills a host process after a round, once."""

    def __init__(self, after: int) -> None:
        self.after, self.killed = after, 0

    def round_ended(self, record: Any) -> None:
        if record.round == self.after and not self.killed:
            # Of the cluster that this process has started: other tests may run beside this one.
            (raylet,) = self._found("-P", str(os.getpid()), "raylet")
            self.killed = int(self._found("-P", raylet, "-f", "^ray::HostProcess")[-1])
            os.kill(self.killed, signal.SIGKILL)

    @staticmethod
    def _found(*options: str) -> list[str]:
        return subprocess.run(["pgrep", *options], capture_output=True, text=True).stdout.split()


@pytest.mark.usefixtures("ray_here")
def test_a_lost_host_costs_the_rounds_since_the_last_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two checkpoints apart: rounds 3 and 4 are computed once more; the files are those of an undisturbed run."""
    plan = {"checkpoint_every": 2, **QUIET}
    federation().run(5, runtime="simulation", folder=tmp_path / "whole", **plan)
    killer, done = KillsAHost(after=3), []

    class Rounds:
        def round_ended(self, record: Any) -> None:
            done.append(record.round)

    result = federation().run(
        5, runtime="ray", workers=3, folder=tmp_path / "ray", observers=[killer, Rounds()], **plan
    )
    assert killer.killed
    assert done[:3] == [1, 2, 3]
    assert done[-3:] == [3, 4, 5]
    assert not result.interrupted
    for name in ("metrics.jsonl", "alone/metrics.jsonl", "outputs.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "ray" / name).read_bytes(), name
    told = capfd.readouterr().err
    assert "3 hosts with 1 core each" in told
    assert "the run goes back to its last checkpoint" in told
    assert "goes back to its last checkpoint" in (tmp_path / "ray" / "log.txt").read_text()


@pytest.mark.long
def test_a_run_goes_on_without_the_node_that_another_cannot_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three nodes on this machine; after round 2 the host on the first says that it cannot reach that on the second."""
    import ray
    from ray.cluster_utils import Cluster

    from codistill.runtimes import ray_runtime

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    placed: list[list[str]] = []

    class Watched(ray_runtime.RayHosts):
        def open(self) -> None:
            super().open()
            placed.append([host.node_id for host in self._hosts])
            if len(placed) == 1:
                Says.links = self.links

    class Says:
        """Stands for a host: what it says arrives with the next message of any."""

        links: Any

        def round_ended(self, record: Any) -> None:
            if record.round == 2 and len(placed) == 1:
                pump = self.links._pump
                self.links._pump = lambda timeout: pump(timeout) or self.links._take_control(1, {"cut_off": 2})

    monkeypatch.setattr(ray_runtime, "RayHosts", Watched)
    federation().run(4, runtime="simulation", folder=tmp_path / "whole", **QUIET)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        ray.init(cluster.address, logging_level="CRITICAL", log_to_driver=False)
        federation().run(4, runtime="ray", folder=tmp_path / "ray", observers=[Says()], **QUIET)
    finally:
        ray.shutdown()
        cluster.shutdown()
    first, second = placed
    assert len(set(first)) == 3
    assert sorted(second) == sorted(set(first) - {first[1]})
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "ray/metrics.jsonl").read_bytes()
    told = capfd.readouterr().err
    assert "cannot be reached, says host 1 on" in told
    assert "2 hosts with 1 core each; without node" in told


@pytest.mark.usefixtures("ray_here")
def test_a_graph_with_states_on_the_disks_of_nodes(tmp_path: Path) -> None:
    """Resumed after a part in another runtime that kept them in memory; some agents take part in each round."""

    def made() -> cd.Federation:
        net = [cd.Agent(f"n{i}", nn.Linear(4, 2), X[30 * i : 30 * i + 30], Y[30 * i : 30 * i + 30]) for i in range(4)]
        for agent in net:
            nn.init.zeros_(agent.learner.module.weight)  # type: ignore[attr-defined]
            nn.init.zeros_(agent.learner.module.bias)  # type: ignore[attr-defined]
        return cd.Federation(net, cd.DDistillation(), public=X[300:330], test=(X[330:], Y[330:]), participation=0.5)

    whole = made().run(4, runtime="simulation", folder=tmp_path / "whole", **QUIET)
    made().run(2, runtime="simulation", folder=tmp_path / "ray", **QUIET)
    result = made().run(4, runtime="ray", idle="disk", workers=2, resume=True, folder=tmp_path / "ray", **QUIET)
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "ray/metrics.jsonl").read_bytes()
    for name, agent in whole.agents.items():
        np.testing.assert_array_equal(agent.decision_function(X), result.agents[name].decision_function(X))


@pytest.mark.usefixtures("ray_here")
def test_agents_that_go_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To two hosts, on which they rest; the baseline wakes them, and the run finds them as they were."""
    from codistill.runtimes import ray_runtime

    sendable, lengths = ray_runtime._sendable, list[int]()

    def counted(part: Any, put: Any) -> Any:
        if put is ray_runtime.ray.put:  # otherwise their size is estimated
            lengths.append(len(part))
        return sendable(part, put)

    monkeypatch.setattr(ray_runtime, "_BATCH", 1)
    monkeypatch.setattr(ray_runtime, "_sendable", counted)
    federation(count=7).run(2, runtime="simulation", folder=tmp_path / "here", **QUIET)
    federation(count=7).run(2, runtime="ray", idle="disk", workers=2, folder=tmp_path / "there", **QUIET)
    assert lengths == [1] * 7
    for name in ("metrics.jsonl", "alone/metrics.jsonl", "outputs.safetensors"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes(), name


@pytest.mark.usefixtures("ray_here", "no_report")
def test_the_agents_of_a_recipe_are_built_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was made here is sent: neither a model nor a sample, nor the class of a protocol."""
    (tmp_path / "own.py").write_text("import codistill as cd\n\n\nclass Mine(cd.FD):\n    pass\n")
    (tmp_path / "recipe.toml").write_text(
        "safeguard = true\n"
        '[data]\nname = "wine"\n[[agents]]\nlearner = "mlp"\ncount = 3\n'
        '[protocol]\nname = "own.py:Mine"\nrounds = 2\n[partition]\nkind = "dirichlet"\nalpha = 1.0\n'
        '[[faults]]\nkind = "drop"\nrate = 0.3\n[compression]\nbits = 8\n'
        "[network]\npatience = 5\n[runtime]\nparticipation = 0.7\n"
    )
    here, there = (
        read_recipe(tmp_path / "recipe.toml", [f"runtime.kind={kind}", "runtime.workers=2"])
        for kind in ("simulation", "ray")
    )
    monkeypatch.setattr(Agent, "__reduce__", lambda self: pytest.fail(f"agent '{self.name}' was sent"))
    execute(here, tmp_path / "here", progress=False)
    execute(there, tmp_path / "there", progress=False)
    metrics = (tmp_path / "here/metrics.jsonl").read_bytes()
    assert metrics == (tmp_path / "there/metrics.jsonl").read_bytes()
    assert b'"present": false' in metrics
    assert b'"safeguard_weight"' in metrics


@pytest.mark.usefixtures("ray_here")
def test_what_cannot_be_right_is_said_before_round_1(capfd: pytest.CaptureFixture[str]) -> None:
    for options, found in [
        (
            {"ray": RayCluster(cpus_per_agent=1.5)},
            "asked: 4 hosts with 2 cores each; there is room for 2: 1 node with 4 cores",
        ),
        ({"ray": RayCluster(resources={"wine": 1.0})}, "asked: 1 host with 1 core, 1 wine; there is room for 0"),
        ({"ray": RayCluster(address="10.0.0.1:1")}, "A process can be connected to one Ray cluster."),
        ({"device": "cuda"}, "agents that compute on a GPU must ask for one"),
    ]:
        with pytest.raises((RuntimeFault, RecipeError)) as caught:
            federation().run(1, runtime="ray", **options, **QUIET)  # type: ignore[arg-type]
        assert found in str(caught.value)
    address = importlib.import_module("ray").get_runtime_context().gcs_address
    with joined(), joined("auto"), joined(address):  # the one that this process has joined, and stays in
        pass
    assert importlib.import_module("ray").is_initialized()
    with pytest.raises(RecipeError, match="ray is for the runtime 'ray'"):
        federation().run(1, runtime="simulation", ray=RayCluster(), **QUIET)


class Breaks(cd.FedMD):
    """Fails at one agent, on its node."""

    async def round(self, me: Agent, t: int) -> None:
        if me.name == "a2":
            raise ValueError(f"of my own, with GPUs: {os.environ.get('CUDA_VISIBLE_DEVICES')}.")
        await super().round(me, t)


@pytest.mark.usefixtures("ray_here")
def test_an_error_at_an_agent_names_it() -> None:
    """And it sees no GPU, as it has asked for none."""
    with pytest.raises(Exception, match=r"of my own, with GPUs: \.") as caught:
        federation(Breaks()).run(1, runtime="ray", alone=False, **QUIET)
    assert "This happened at 'a2' in round 1." in caught.value.__notes__


@pytest.mark.usefixtures("ray_here")
def test_what_cannot_travel_is_named() -> None:
    made = federation()
    made.agents[1].learner.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(RecipeError, match="Ray must be able to send agent 'a1' to another machine"):
        made.run(1, runtime="ray", alone=False, **QUIET)


@pytest.mark.usefixtures("ray_here")
def test_a_module_that_a_node_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("import codistill as cd\n\n\nclass Mine(cd.FedMD):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("only_here").Mine
    with pytest.raises(RecipeError, match="no module 'only_here'"):
        federation(mine()).run(1, runtime="ray", workers=1, alone=False, **QUIET)
