"""A network in memory: wires that behave as real ones do, links that can be cut, and nodes in threads."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.dummy import DummyClassifier

import codistill as cd
from codistill.core.spec import RunSpec
from codistill.engine.description import RunDescription
from codistill.network.agent import RemoteAgent
from codistill.network.connections import Connections
from codistill.network.frames import (
    MESSAGES,
    Event,
    FrameHeader,
    FrameKind,
    Oversized,
    Presence,
    ReceivedFrame,
    Refusal,
    Turn,
)
from codistill.network.hub import HubRuntime
from codistill.network.options import Network
from codistill.network.terms import hello_of
from codistill.nodes.agent import Hub
from codistill.nodes.faults import Faults
from codistill.protocol import Protocol
from codistill.topology import HUB, Topology


class Net:
    """Who can reach whom."""

    def __init__(self) -> None:
        self.wires: dict[str, list[FakeTransport]] = {}
        self._cuts: set[frozenset[str]] = set()
        self.spoil: Callable[[str, str, FrameHeader, bytes], tuple[FrameHeader, bytes]] | None = None

    def joined(self, a: str, b: str) -> bool:
        return frozenset((a, b)) not in self._cuts

    def cut(self, a: str, b: str) -> None:
        """As when a cable is pulled: both ends see that the other is gone."""
        self._cuts.add(frozenset((a, b)))
        self._show(a, b, here=False)

    def heal(self, a: str, b: str) -> None:
        self._cuts.discard(frozenset((a, b)))
        self._show(a, b, here=True)

    def _show(self, a: str, b: str, *, here: bool) -> None:
        for one, other in ((a, b), (b, a)):
            for wire in self.wires.get(one, ()):
                for far in self.wires.get(other, ()):
                    wire.inbox.put(Presence(other, far.session_id, here))


class FakeTransport:
    """A wire in memory: what is sent is in the other's inbox at once."""

    def __init__(self, net: Net, me: str, others: Sequence[str], limit: int = 1 << 26) -> None:
        self.net, self.me, self.others = net, me, tuple(others)
        self.session_id = secrets.randbits(64)
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.revoked_names: list[str] = []
        self._numbers = dict.fromkeys(others, 0)
        self.dead = False
        self.limit = limit
        self.barred: dict[str, str] = {}
        for name in others:
            for far in net.wires.get(name, ()):
                if net.joined(me, name):
                    self.inbox.put(Presence(name, far.session_id, True))
                    far.inbox.put(Presence(me, self.session_id, True))
        net.wires.setdefault(me, []).append(self)

    def revoked(self) -> list[str]:
        return self.revoked_names

    def limit_of(self, name: str) -> int:
        return min((far.limit for far in self.net.wires.get(name, ())), default=self.limit)

    def is_behind(self, name: str) -> bool:
        return False

    def untaken(self, name: str) -> int | None:
        return 0

    def accept(self, limit: int) -> None:
        self.limit = limit

    def bar(self, name: str, why: str) -> None:
        """Its links are closed, and it is told why."""
        self.barred[name] = why
        self.net.cut(self.me, name)
        for far in self.net.wires.get(name, ()):
            far.inbox.put(Refusal(self.me, why, final=True))

    def take(self, timeout: float) -> Event | None:
        if self.dead:
            raise Killed
        try:
            return self.inbox.get(timeout=min(timeout, 0.05)) if timeout > 0 else self.inbox.get_nowait()
        except queue.Empty:
            return None

    def send(self, receivers: Sequence[str], kind: FrameKind, turn: Turn, payload: bytes = b"") -> None:
        if self.dead:
            raise Killed
        for name in receivers:
            self._numbers[name] += 1
            self.deliver(name, FrameHeader(kind, self.session_id, self._numbers[name], turn), payload)

    def deliver(self, name: str, head: FrameHeader, payload: bytes) -> None:
        if self.net.spoil is not None:
            head, payload = self.net.spoil(self.me, name, head, payload)
        if self.net.joined(self.me, name):
            for far in self.net.wires.get(name, ()):
                limit = far.limit
                small = len(payload) <= limit or head.kind not in MESSAGES
                frame = ReceivedFrame(self.me, head, payload)
                far.inbox.put(frame if small else Oversized(self.me, head, len(payload), limit))

    def kill(self) -> None:
        """As by kill -9: nothing more is said, and the others see that it is gone."""
        self.dead = True
        self.close()

    def close(self, seconds: float = 0.0) -> None:
        if self in self.net.wires.get(self.me, ()):
            self.net.wires[self.me].remove(self)
            for name in self.others:
                for far in self.net.wires.get(name, ()):
                    far.inbox.put(Presence(self.me, self.session_id, False))


class Killed(BaseException):
    """The end of a thread that stands for a process."""


@dataclass(frozen=True, kw_only=True)
class Sum(Protocol):
    """Everyone sends its number, the hub adds them up and tells the sum; each keeps count of what it heard."""

    name = "sum"
    topology = "star"

    async def begin(self, me: Any) -> None:
        me.state["sums"] = []

    async def round(self, me: Any, t: int) -> None:
        hook = HOOKS.get((me.name, t))
        if hook:
            hook(me)
        answer = await me.ask_hub(x=np.full(3, float(len(me.shard) + t)))
        me.state["sums"] = [*me.state["sums"], None if answer is None else float(answer["x"][0])]

    async def hub(self, me: Any, t: int) -> None:
        heard = await me.gather(expect={"x": (3,)})
        me.state["rounds"] = [*me.state.get("rounds", []), t]
        hook = HOOKS.get((HUB, t))
        if hook:
            hook(me)
        await me.broadcast(x=np.sum([message["x"] for message in heard.values()], axis=0))


@dataclass(frozen=True, kw_only=True)
class Gossip(Protocol):
    """Everyone sends its round to its neighbours twice, and keeps whom it heard."""

    name = "gossip"
    topology = "ring"

    async def begin(self, me: Any) -> None:
        me.state["heard"] = []

    async def round(self, me: Any, t: int) -> None:
        for step in range(2):
            hook = HOOKS.get((me.name, t, step))
            if hook:
                hook(me)
            heard = await me.exchange(x=np.full(2, float(10 * t + step)))
            assert all(message["x"][0] == 10 * t + step for message in heard.values())
            me.state["heard"] = [*me.state["heard"], [t, *heard]]


HOOKS: dict[Any, Callable[[Any], None]] = {}


def agent(name: str, samples: int = 4) -> cd.Agent:
    x = np.arange(2.0 * samples, dtype=np.float32).reshape(samples, 2)
    return cd.Agent(name, DummyClassifier(), x, np.arange(samples) % 2)


def describe(
    names: Sequence[str], rounds: int, protocol: Protocol | None = None, topology: Any = None, seed: int = 0
) -> RunDescription:
    """A run without its agents, which are elsewhere."""
    return RunDescription(
        protocol=protocol or Sum(),
        topology=topology or Topology.star(names),
        classes=2,
        seed=seed,
        spec=RunSpec(rounds=rounds, alone=False),
        faults=Faults((), names, seed),
        shape=(2,),
    )


def with_node(whole: RunDescription, node: Any) -> RunDescription:
    """The same run with one node at hand."""
    at_hand: dict[str, Any] = {"hub": node} if isinstance(node, Hub) else {"agents": (node,), "reported": (node.name,)}
    return replace(whole, **at_hand).bind_nodes()


class Life(threading.Thread):
    """A member in a thread: it can be killed, and started again with what it has stored."""

    def __init__(
        self,
        net: Net,
        name: str,
        whole: RunDescription,
        folder: Path | None = None,
        *,
        network: Network | None = None,
        **changed: Any,
    ) -> None:
        super().__init__(daemon=True, name=name)
        self.told: list[str] = []
        self.agent = agent(name)
        self.stop = False
        self.result: Any = None
        self.wire = FakeTransport(net, name, (HUB,))
        lines = Connections(self.wire, network or Network(), self.told.append)  # type: ignore[arg-type]
        own = with_node(whole, self.agent)
        hello = hello_of(self.agent, None) | changed
        self.member = RemoteAgent(lines, hello, lambda _: own, folder, stopping=lambda: self.stop)
        self.start()

    def run(self) -> None:
        try:
            self.result = self.member.run()
        except Killed:
            self.result = "killed"
        except Exception as error:
            self.result = error
        finally:
            self.wire.close()

    def end(self) -> Any:
        self.join(timeout=20)
        assert not self.is_alive(), f"{self.name} has not ended: {self.told}"
        return self.result


@dataclass(frozen=True, kw_only=True)
class CheckpointsAfter(RunSpec):
    """A plan with checkpoints after some rounds only."""

    some: tuple[int, ...] = ()

    def has_checkpoint(self, done: int) -> bool:
        return done in self.some


class Centre:
    """A hub in this thread."""

    def __init__(
        self,
        net: Net,
        whole: RunDescription,
        *,
        network: Network | None = None,
        done: int = 0,
        checkpoints: tuple[int, ...] | None = None,
    ) -> None:
        if checkpoints is not None:
            whole = replace(whole, spec=CheckpointsAfter(rounds=whole.spec.rounds, some=checkpoints))
        self.told: list[str] = []
        self.node = Hub()
        network = network or Network()
        self.wire = FakeTransport(net, HUB, whole.topology.names, network.message_limit or 1 << 26)
        self.lines = Connections(self.wire, network, self.told.append, deadline=network.deadline, leads=True)  # type: ignore[arg-type]
        self.names = whole.topology.names
        self.runtime = HubRuntime(with_node(whole, self.node), self.lines, run="run1")
        self.runtime.done = done

    def rounds(self, first: int, last: int) -> list[Any]:
        return [self.runtime.run(t, self.names) for t in range(first, last)]

    def finish(self) -> None:
        self.lines.command(*self.names, do="stop", why="done", number=0)
        self.runtime.close()
