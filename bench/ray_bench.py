"""The runtime `ray` in a cluster of three nodes, all of them on loopback addresses of this machine.

`python -m bench.ray_bench PART` measures one part in a process of its own, which joins the cluster, and prints the
figures as JSON. The process that has started both ends both, in any case; it does not join, so it may fork.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import codistill as cd
from bench.many import PER_ROUND, ROUNDS, SAMPLES, Times, kilobytes, lenets_at_rest, run
from bench.measure import Figure, alternate, ratio
from bench.network import Exchange, Idle
from bench.running import Rounds, started
from bench.workloads import lenets
from codistill.core.settings import setting
from codistill.engine.host import BEGIN
from codistill.engine.runtime import Runtime, one_thread
from codistill.wire.message import Message

# Ray takes 127.0.0.1 for the address by which others reach this machine. The owner of a run is on the first node.
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
CORES, STORE = 2, 200_000_000  # logical cores of a node; bytes of its object store
AWAY = "away"  # a resource of all nodes but that of the owner
REPEATS = 7
PATIENCE = 60.0  # seconds after which a cluster that has not started has failed


def ray() -> list[Figure]:
    """An exchange against bare calls of actors, and a W1 round against `processes`."""
    with Nodes() as nodes:
        return [*nodes.measure("exchange"), *nodes.measure("rounds")]


def ray_many() -> list[Figure]:
    """Time per agent and round, start-up and memory of 100, 1,000 and 10,000 agents, 100 in a round, on three nodes."""
    figures = []
    for count in (100, 1000, 10_000):
        owner, nodes_at = [0.0], [[0.0], [0.0], [0.0]]
        with Nodes() as nodes:

            def watch(process: int, nodes: Nodes = nodes, owner: Any = owner, nodes_at: Any = nodes_at) -> None:
                owner.append(kilobytes(process) / 1024)
                for peaks, hosts in zip(nodes_at, nodes.hosts(), strict=True):
                    peaks.append(sum(map(kilobytes, hosts)) / 1024)

            figures += nodes.measure("many", str(count), watch=watch)
        name = f"ray: {count:,} agents with LeNet-5 at rest on the disks of three nodes"
        figures += [
            Figure(f"{name}: peak memory of the hosts of a node", [max(peaks) for peaks in nodes_at], "MB", "", True),
            Figure(f"{name}: peak memory of the owner", [max(owner)], "MB", "", True),
        ]
    return figures


# --- a cluster ----------------------------------------------------------------------------------------


class Nodes:
    """Three Ray nodes with a token and folders of their own; all of their processes end with this."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self._part: subprocess.Popen[str] | None = None

    def __enter__(self) -> Nodes:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends what was started, too
        self._folder = Path(tempfile.mkdtemp(prefix="cr", dir="/tmp"))  # short, for the paths of sockets
        port = free_port(ADDRESSES[0])
        self.environment = {
            **os.environ,
            "RAY_ADDRESS": f"{ADDRESSES[0]}:{port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)]),  # what actors are made of
        }
        try:
            self._start(0, "--head", f"--port={port}", "--include-dashboard=false")
            self._wait_for(port)
            for number in (1, 2):
                self._start(number, f"--address={ADDRESSES[0]}:{port}", f'--resources={{"{AWAY}": 1}}')
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, number: int, *role: str) -> None:
        """As a user starts a node; a session of its own, so that all of its processes can be ended."""
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", *role, "--block", f"--num-cpus={CORES}",
            f"--node-ip-address={ADDRESSES[number]}", f"--object-store-memory={STORE}",
            f"--temp-dir={self._folder / str(number)}",
        ]  # fmt: skip
        with (self._folder / f"{number}.log").open("wb") as log:
            self._started.append(
                subprocess.Popen(
                    command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )  # fmt: skip

    def _wait_for(self, port: int) -> None:
        until = time.monotonic() + PATIENCE
        while True:
            with suppress(OSError), socket.create_connection((ADDRESSES[0], port), timeout=1):
                return
            if time.monotonic() > until or self._started[0].poll() is not None:
                raise TimeoutError(f"No Ray node has started:\n{(self._folder / '0.log').read_text()[-2000:]}")
            time.sleep(0.2)

    def measure(self, part: str, *about: str, watch: Callable[[int], None] | None = None) -> list[Figure]:
        """The figures of a part; `watch` is called with its process now and then."""
        command = [sys.executable, "-m", "bench.ray_bench", part, *about]
        self._part = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)
        while watch is not None and self._part.poll() is None:
            watch(self._part.pid)
            time.sleep(0.5)
        printed, _ = self._part.communicate()
        if self._part.returncode:
            raise ChildProcessError(f"{part} {' '.join(about)}: exit code {self._part.returncode}")
        return [Figure(**each) for each in json.loads(printed.splitlines()[-1])]

    def hosts(self) -> list[list[int]]:
        """The processes of hosts, by node."""
        return [[each for each in family(node.pid) if is_host(each)] for node in self._started]

    def __exit__(self, *_: object) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        try:
            if self._part is not None and self._part.poll() is None:
                self._part.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._part.wait(10)
                self._part.kill()
            families = [family(process.pid) for process in self._started]
            for process in self._started:
                process.terminate()
            for process, members in zip(self._started, families, strict=True):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                for member in members:  # those that have not ended with it
                    with suppress(ProcessLookupError):
                        os.kill(member, signal.SIGKILL)
                process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            signal.signal(signal.SIGINT, before)


def family(process: int) -> list[int]:
    """A process and all that descend from it."""
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return [process, *(each for child in children for each in family(child))]


def is_host(process: int) -> bool:
    with suppress(OSError):
        return b"HostProcess" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def free_port(address: str) -> int:
    with socket.socket() as one:
        one.bind((address, 0))
        return int(one.getsockname()[1])


@contextmanager
def joined() -> Iterator[None]:
    """As a driver on the first node, when all nodes are there."""
    import ray

    ray.init(
        address=os.environ["RAY_ADDRESS"], _node_ip_address=ADDRESSES[0], logging_level="ERROR", log_to_driver=False
    )
    try:
        until = time.monotonic() + PATIENCE
        while sum(node["Alive"] for node in ray.nodes()) < len(ADDRESSES):
            if time.monotonic() > until:
                raise TimeoutError(f"{len(ADDRESSES)} Ray nodes must start within {PATIENCE:g} s.")
            time.sleep(0.2)
        yield
    finally:
        ray.shutdown()


@contextmanager
def on_ray(federation: cd.Federation, workers: int, **options: Any) -> Iterator[tuple[Runtime, tuple[str, ...]]]:
    """A federation in actors of the cluster, past its first phase."""
    from codistill.runtimes.ray_runtime import RayHosts

    description = federation.description
    names = tuple(agent.name for agent in federation.agents)
    with RayHosts(description, cd.RayCluster(**options), workers=workers) as hosts:
        hosts.open()
        runtime = hosts.runtime(description, None)
        try:
            runtime.run(BEGIN, names)
            yield runtime, names
        finally:
            runtime.close()


# --- an exchange --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asking(cd.Protocol):
    """The first agent sends an array to the second, which answers with one, and nothing else."""

    name = "asking"
    topology = "ring"
    needs = cd.Ability.LABELS
    size: int = setting(1 << 12, "bytes of the array", at_least=4)
    steps: int = setting(1, "exchanges per round", at_least=1)

    async def round(self, me: cd.Agent, t: int) -> None:
        message = Message.of(x=np.zeros(self.size // 4, dtype=np.float32))
        other = next(name for name in me.roster if name != me.name)
        for _ in range(self.steps):
            if me.name == me.roster[0]:
                await me.send(other, message)
            await me.receive(other, expect={"x": (self.size // 4,)})
            if me.name != me.roster[0]:
                await me.send(other, message)


class Echo:
    """A bare actor: answers with as many bytes, or asks another one; by a call there and back, or a call each way."""

    def __init__(self, size: int) -> None:
        self._answer, self._inbox = bytes(size), queue.SimpleQueue[bytes]()

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def echo(self, x: bytes) -> bytes:
        return self._answer

    def ask(self, other: Any, steps: int) -> None:
        import ray

        for _ in range(steps):
            ray.get(other.echo.remote(self._answer))

    def deliver(self, x: bytes) -> None:
        self._inbox.put(x)

    def play(self, other: Any, steps: int, begins: bool) -> None:
        for _ in range(steps):
            if begins:
                other.deliver.remote(self._answer)
            self._inbox.get()
            if not begins:
                other.deliver.remote(self._answer)


def idlers(count: int, protocol: cd.Protocol) -> cd.Federation:
    x, y = np.zeros((2, 1), dtype=np.float32), np.arange(2)
    agents = [cd.Agent(f"a{i}", Idle(), x, y) for i in range(count)]
    return cd.Federation(agents, protocol, classes=2)


def exchange() -> list[Figure]:
    """An exchange with the hub, and between two agents, each with a host on a node of its own."""
    with joined():
        return [
            figure
            for label, size, steps, turns in (("4 KB", 1 << 12, 100, 5), ("1 MB", 1 << 20, 20, 4))
            for measured in (with_hub, between_hosts)
            for figure in measured(label, size, steps, turns)
        ]


def away() -> list[str]:
    """The nodes that are not the owner's."""
    import ray

    return [node["NodeID"] for node in ray.nodes() if AWAY in node["Resources"]]


@contextmanager
def bare_actors(size: int) -> Iterator[list[Any]]:
    """A bare actor on each node that is not the owner's."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    kind = ray.remote(num_cpus=1, max_concurrency=2)(Echo)
    actors = [
        kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(size)
        for node in away()
    ]
    try:
        assert len(set(ray.get([actor.node.remote() for actor in actors]))) == 2
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


def with_hub(label: str, size: int, steps: int, turns: int) -> list[Figure]:
    """An agent's message to the hub, in the owner's process, and the answer."""
    import ray

    protocol = Exchange(size=size, steps=steps)
    sent = bytes(len(protocol.message().encoded))
    with on_ray(idlers(1, protocol), 1, resources={AWAY: 0.6}) as (runtime, names), bare_actors(len(sent)) as actors:

        def bare() -> None:
            for _ in range(steps):
                ray.get(actors[0].echo.remote(sent))

        with one_thread():
            ours, bares = alternate(REPEATS, Rounds(runtime, names, 1), bare, turns=turns)
    name = f"ray: exchange of {label} between an agent and the hub on different nodes"
    return against(name, steps * turns, ours, {"a bare call there and back": bares})


def between_hosts(label: str, size: int, steps: int, turns: int) -> list[Figure]:
    """A message from one agent to another, and the answer."""
    import ray

    protocol = Asking(size=size, steps=steps)
    encoded = len(Message.of(x=np.zeros(size // 4, dtype=np.float32)).encoded)
    federation = idlers(2, protocol)
    with on_ray(federation, 2, resources={AWAY: 0.6}) as (runtime, names), bare_actors(encoded) as actors:

        def ask() -> None:
            ray.get(actors[0].ask.remote(actors[1], steps))

        def play() -> None:
            ray.get([actors[i].play.remote(actors[1 - i], steps, i == 0) for i in (0, 1)])

        ours, asked, played = alternate(REPEATS, Rounds(runtime, names, 1), ask, play, turns=turns)
    name = f"ray: exchange of {label} between agents of two hosts on different nodes"
    return against(name, steps * turns, ours, {"a bare call there and back": asked, "a bare call each way": played})


def against(name: str, exchanges: int, ours: list[float], bares: dict[str, list[float]]) -> list[Figure]:
    figures = [ratio(f"{name}, against {what}", ours, bare, 1.3) for what, bare in bares.items()]
    for side, spent in {"codistill": ours, **bares}.items():
        figures.append(Figure(f"  {side}", [1e3 * value / exchanges for value in spent], "ms", "", True))
    return figures


# --- a round ------------------------------------------------------------------------------------------


def rounds() -> list[Figure]:
    """A W1 round on two hosts against two worker processes. Without an aim: what Ray's calls cost is not ours."""
    figures = []
    protocols = (cd.FedAvg(), cd.FedMD(transfer_steps=4))
    with ExitStack() as stack:
        workers = [stack.enter_context(started(lenets(protocol))) for protocol in protocols]  # forked before Ray starts
        stack.enter_context(joined())
        for protocol, (runtime, names) in zip(protocols, workers, strict=True):
            with on_ray(lenets(protocol), 2) as (on_nodes, _):
                sides = alternate(REPEATS, Rounds(on_nodes, names, 1), Rounds(runtime, names, 1), turns=10)
            name = f"ray: W1 round of {protocol.name} on 2 hosts of different nodes, against 2 worker processes"
            figures.append(Figure(name, ratio("", *sides, 1).values, "x", "", True))
            for side, spent in zip(("ray", "processes"), sides, strict=True):
                figures.append(Figure(f"  {side}", [1e3 * value / 10 for value in spent], "ms", "", True))
    return figures


# --- many agents --------------------------------------------------------------------------------------


def many(count: str) -> list[Figure]:
    """The workload of `bench.many`; the last round is evaluated, and not counted."""
    times = Times()
    with joined():
        began = time.perf_counter()
        run(lenets_at_rest(int(count), SAMPLES, PER_ROUND, cd.FedAvg()), ROUNDS + 1, times, "ray")
        ended = time.perf_counter()
    name = f"ray: {int(count):,} agents with LeNet-5 at rest on the disks of three nodes"
    per_agent = [1e3 * each / PER_ROUND for each in times.rounds[1:-1]]
    return [
        Figure(f"{name}: time per agent and round", per_agent, "ms", "", True),
        Figure(f"{name}: start-up", [times.began - began], "s", "", True),
        Figure(f"{name}: the first round, before which each agent is prepared", times.rounds[:1], "s", "", True),
        Figure(f"{name}: from start to end", [ended - began], "s", "", True),
    ]


PARTS: dict[str, Callable[..., list[Figure]]] = {"exchange": exchange, "rounds": rounds, "many": many}


if __name__ == "__main__":
    print(json.dumps([asdict(figure) for figure in PARTS[sys.argv[1]](*sys.argv[2:])]))
