"""A federation over the network against bare Zenoh: on loopback, with mutual TLS, every node in its own process."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import socket
import statistics
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import codistill as cd
from bench import bare_network
from bench.measure import Figure, ratio
from codistill.certs.authority import Authority
from codistill.certs.credentials import Credentials
from codistill.core.settings import setting
from codistill.core.spec import RunSpec
from codistill.engine.description import RunDescription
from codistill.engine.host import BEGIN
from codistill.learners.zoo import build
from codistill.network.agent import RemoteAgent
from codistill.network.connections import Connections
from codistill.network.hub import HubRuntime
from codistill.network.options import Network
from codistill.network.terms import hello_of
from codistill.network.transport import Transport
from codistill.topology import HUB
from codistill.wire.message import Message

AGENTS, REPEATS = 10, 7
CROWD, TOGETHER = (10, 20, 50, 100), 10  # light agents, and how many of them share a process
PATIENCE = 120  # seconds after which a side that says nothing has failed

Life = Callable[..., None]  # what a process does


def network() -> list[Figure]:
    """Latency of an exchange, throughput of weights, and what many agents cost."""
    return [*exchanging("4 KB", 1 << 12, 100, 4), *exchanging("1 MB", 1 << 20, 12, 4), *averaging(), *crowds()]


# --- what is measured -------------------------------------------------------------------------------


def exchanging(label: str, size: int, steps: int, turns: int) -> list[Figure]:
    """An exchange: the hub hears each of ten agents and answers all."""
    protocol = Exchange(size=size, steps=steps)
    ours = idlers(AGENTS, protocol)
    encoded = len(protocol.message().encoded)
    with certificates(ours) as certs, ExitStack() as stack:
        sides = [
            stack.enter_context(federation_side(ours, certs, 1, by_exchange=True)),
            stack.enter_context(bare_side(AGENTS, certs, encoded, steps)),
            stack.enter_context(bare_side(AGENTS, certs, encoded, steps, by_get=True)),
        ]
        spent = taking_turns(sides, turns)
    name = f"network: exchange of {label} with 10 agents"
    middles = [[statistics.median(repeat) for repeat in side] for side in spent]
    ours, puts, gets = middles
    figures = [
        ratio(f"{name}, against bare Zenoh, put both ways", ours, puts, 1.3),
        ratio(f"{name}, against bare Zenoh, get from each", ours, gets, 1.3),
    ]
    for side, repeats, middle in zip(("codistill", "bare put", "bare get"), spent, middles, strict=True):
        late = float(np.quantile(np.concatenate(repeats), 0.99))
        figures.append(Figure(f"  {side}, median", [1e3 * value for value in middle], "ms", "", True))
        figures.append(Figure(f"  {side}, 99th percentile of all repeats", [1e3 * late], "ms", "", True))
    return figures


def averaging() -> list[Figure]:
    """A round of FedAvg without training, ten models of 10 MB, against the same bytes by bare Zenoh."""
    rng = np.random.default_rng(0)
    x, y = rng.random((10, 784), dtype=np.float32), np.arange(10)
    agents = [cd.Agent(f"a{i}", build("mlp", (784,), 10, hidden=(1250, 1250)), x, y) for i in range(AGENTS)]
    ours = cd.Federation(agents, cd.FedAvg(local_epochs=0), classes=10)
    size = len(Message(agents[0].learner.weights()).encoded)
    rounds = 3
    with certificates(ours) as certs, ExitStack() as stack:
        sides = [
            stack.enter_context(federation_side(ours, certs, rounds)),
            stack.enter_context(bare_side(AGENTS, certs, size, rounds)),
        ]
        spent = taking_turns(sides, 1)
    means = [[statistics.fmean(repeat) for repeat in side] for side in spent]
    name = f"network: a round of fedavg without training, 10 models of {size / 1e6:.1f} MB"
    figures = [Figure(f"{name}, against bare Zenoh", ratio("", *means, 1).values, "x", "", True)]
    for side, values in zip(("codistill", "bare Zenoh"), means, strict=True):
        figures.append(Figure(f"  {side}", values, "s", "", True))
        through = [2 * AGENTS * size / 1e6 / value for value in values]
        figures.append(Figure(f"  {side}, through the hub", through, "MB/s", "", True))
    return figures


def crowds() -> list[Figure]:
    """Memory of a hub with 100 agents, and the time of a round by their number."""
    figures = []
    most = max(CROWD)
    ours = idlers(most, Exchange(size=1 << 12, steps=1))
    with certificates(ours) as certs:
        for side, start in (
            ("codistill", partial(federation_side, ours, certs, 1)),
            ("bare Zenoh", partial(bare_side, most, certs, 1 << 12, 1)),
        ):
            with start(together=TOGETHER, fresh=True) as group:
                for when, megabytes in (("before anybody joined", group.empty), (f"with {most} agents", group.full)):
                    name = f"network: memory of an idle hub {when}, {side}"
                    figures.append(Figure(name, [megabytes], "MB", "", True))
    with ExitStack() as stack:
        sides = []
        for count in CROWD:
            ours = idlers(count, Exchange(size=1 << 12, steps=1))
            certs = stack.enter_context(certificates(ours))
            rounds = 1 + max(4, 200 // count)
            sides.append(stack.enter_context(federation_side(ours, certs, rounds, together=TOGETHER)))
        spent = taking_turns(sides, 1)
    each = {}
    for count, repeats in zip(CROWD, spent, strict=True):
        means = [1e3 * statistics.fmean(repeat) for repeat in repeats]
        each[count] = [value / count for value in means]
        name = f"network: a round with one exchange of 4 KB, {count} light agents"
        figures.append(Figure(name, means, "ms", "", True))
        figures.append(Figure("  per agent", each[count], "ms", "", True))
    fewest = min(CROWD)
    figures.append(ratio(f"  time per agent, {most} against {fewest} (1: linear)", each[most], each[fewest], 1.25))
    return figures


# --- federations without work -----------------------------------------------------------------------


STAMPS: list[float] = []  # when the hub of this process began a round, and when it had answered each exchange


@dataclass(frozen=True, kw_only=True)
class Exchange(cd.Protocol):
    """Arrays to the hub and back, and nothing else."""

    name = "exchange"
    needs = cd.Ability.LABELS
    size: int = setting(1 << 12, "bytes of the array", at_least=4)
    steps: int = setting(1, "exchanges per round", at_least=1)

    def message(self) -> Message:
        return Message.of(x=np.zeros(self.size // 4, dtype=np.float32))

    async def round(self, me: cd.Agent, t: int) -> None:
        for _ in range(self.steps):
            await me.ask_hub(self.message(), expect={"x": (self.size // 4,)})

    async def hub(self, me: cd.Hub, t: int) -> None:
        STAMPS.append(time.perf_counter())
        for _ in range(self.steps):
            await me.gather(expect={"x": (self.size // 4,)})
            await me.broadcast(self.message())
            STAMPS.append(time.perf_counter())


class Idle(cd.Learner):
    """Learns nothing."""

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        pass

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.zeros((len(x), 2), dtype=np.float32)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def idlers(count: int, protocol: cd.Protocol) -> cd.Federation:
    x, y = np.zeros((2, 1), dtype=np.float32), np.arange(2)
    return cd.Federation([cd.Agent(f"a{i}", Idle(), x, y) for i in range(count)], protocol, classes=2)


# --- sides ------------------------------------------------------------------------------------------


class Side:
    """A hub and its agents in processes of their own; a call lets them work, and returns the seconds that each took."""

    def __init__(self, hub: Life, lives: Sequence[Life], order: int, *, together: int = 1, fresh: bool = False) -> None:
        self._order = order
        self._pipe, end = multiprocessing.Pipe()
        self._processes = [process(partial(hub, end), fresh=fresh)]
        end.close()
        self.empty = self._hear()  # MB of the hub
        groups = [lives[i : i + together] for i in range(0, len(lives), together)]
        self._processes += [process(partial(all_of, group)) for group in groups]
        self.full = self._hear()

    def __call__(self) -> list[float]:
        self._pipe.send(self._order)
        # The first is left out: some of it may have been done before it was asked for.
        return [float(value) for value in np.diff(self._hear())[1:]]

    def _hear(self) -> Any:
        if not self._pipe.poll(PATIENCE):
            raise TimeoutError(f"The hub's process has said nothing for {PATIENCE} s.")
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        for one in self._processes:
            one.kill()
            one.join()


@contextmanager
def federation_side(
    federation: cd.Federation, certs: Path, rounds: int, *, by_exchange: bool = False, **how: Any
) -> Iterator[Side]:
    """A federation, measured by its rounds or by the exchanges in them."""
    port = free_port()
    # No checkpoints: the disk is not what is measured.
    description = replace(federation.description, spec=RunSpec(rounds=1_000_000, checkpoint_every=0))
    lives = [partial(live_as_agent, description.of_agent(agent.name), certs, port) for agent in federation.agents]
    side = Side(partial(live_as_hub, description.of_hub(), certs, port, by_exchange), lives, rounds, **how)
    try:
        yield side
    finally:
        side.close()


@contextmanager
def bare_side(
    count: int, certs: Path, size: int, exchanges: int, *, by_get: bool = False, **how: Any
) -> Iterator[Side]:
    """Bare Zenoh with as many processes."""
    names, port = [f"a{i}" for i in range(count)], free_port()
    agent, hub = (bare_network.asked, bare_network.asking) if by_get else (bare_network.agent, bare_network.hub)
    lives = [partial(agent, name, certs / name, port, size) for name in names]
    side = Side(partial(hub, names, certs / HUB, port, size), lives, exchanges, **how)
    try:
        yield side
    finally:
        side.close()


def taking_turns(sides: Sequence[Side], turns: int) -> list[list[list[float]]]:
    """For each side, in each repeat: seconds of every exchange."""
    for side in sides:
        side()
    spent: list[list[list[float]]] = [[] for _ in sides]
    for _ in range(REPEATS):
        for repeats in spent:
            repeats.append([])
        for _ in range(turns):
            for side, repeats in zip(sides, spent, strict=True):
                repeats[-1] += side()
    return spent


def live_as_hub(description: RunDescription, certs: Path, port: int, by_exchange: bool, pipe: Connection) -> None:
    names = description.topology.names
    wire = Transport(HUB, names, Network(), Credentials(certs / HUB, HUB), listen=f"127.0.0.1:{port}", limit=1 << 26)
    runtime = HubRuntime(description, Connections(wire, Network(), quiet, leads=True), run=secrets.token_hex(8))
    pipe.send(bare_network.resident())
    runtime.run(BEGIN, names)
    runtime.wait_for(names)
    pipe.send(bare_network.resident())
    t = 0
    while True:
        rounds = pipe.recv()
        STAMPS.clear()
        ended = [time.perf_counter()]
        for _ in range(rounds):
            runtime.run(t, names)
            ended.append(time.perf_counter())
            t += 1
        pipe.send(STAMPS if by_exchange else ended)


def live_as_agent(description: RunDescription, certs: Path, port: int) -> None:
    agent = description.agents[0]
    own = Credentials(certs / agent.name, "agent")
    wire = Transport(agent.name, (HUB,), Network(), own, dial={HUB: f"127.0.0.1:{port}"})
    hello = hello_of(agent, description.public)
    RemoteAgent(Connections(wire, Network(), quiet), hello, lambda _: description).run()


def quiet(text: str) -> None:
    pass


# --- processes --------------------------------------------------------------------------------------


def process(life: Callable[[], None], *, fresh: bool = False) -> Any:
    """A process, forked from this one (which never opens a link) or a fresh one."""
    made = multiprocessing.get_context("spawn" if fresh else "fork").Process(target=work, args=(life,), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking with several threads
        made.start()
    return made


def work(life: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        life()
    except EOFError:
        pass  # the parent needs no more
    except Exception:
        traceback.print_exc()
    os._exit(0)


def all_of(lives: Sequence[Callable[[], None]]) -> None:
    """Several lives in one process; links of their own, a thread each."""
    threads = [threading.Thread(target=life, daemon=True) for life in lives[1:]]
    for thread in threads:
        thread.start()
    lives[0]()
    for thread in threads:
        thread.join()


@contextmanager
def certificates(federation: cd.Federation) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="codistill-bench-") as folder:
        authority = Authority(Path(folder))
        authority.create(days=30)
        authority.issue("hub", HUB, days=30)
        for agent in federation.agents:
            authority.issue("agent", agent.name, days=30)
        yield Path(folder)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
