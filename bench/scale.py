"""What an agent costs the hub in a round, measured with the real hub over TLS links.

`python -m bench scale` measures; `python -m bench.scale [REPEATS]` also keeps what was measured in docs/scale.json,
from which `scale_model` makes the tables of docs/scale.md. Agents are only played: two processes answer for
all of them with messages that were made before, so that the hub can be measured with more agents than this machine
could train. Processor time and memory are those of the hub's process.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import codistill as cd
from bench.measure import Figure
from bench.network import Exchange, process
from bench.scale_model import BARE, BATCH, CHECKED, FEW, FITTED, KEPT, PUBLIC, SAMPLED, WHOLE, constants, figures
from bench.workloads import lenets
from codistill.certs.authority import Authority
from codistill.certs.credentials import Credentials
from codistill.core.spec import RunSpec
from codistill.federation.serving import HubNode, describe_hub
from codistill.network.connections import encode_control, read_control
from codistill.network.frames import HEADER_SIZE, Event, FrameHeader, FrameKind, Preface, ReceivedFrame, Refusal, Turn
from codistill.network.link import Stream, keep_connected
from codistill.network.options import Network
from codistill.network.terms import hello_of
from codistill.results.records import RoundEnded, RunStarted
from codistill.topology import HUB
from codistill.wire.message import Message

PLAYERS, SKIPPED = 2, 2  # processes that play agents; first rounds that are left out
IDLE = 3.0  # seconds in which the hub has nothing to do but its links
PATIENCE = 600  # seconds after which a process that says nothing has failed: others may keep the machine busy
PORTS = range(21_000, 22_000)  # below those that the system gives to outgoing connections
CLASSES, FEATURES = 10, 84


def scale() -> list[Figure]:
    """Processor time, bytes and memory of the hub per agent and round; all once, in half an hour or more."""
    return figures(constants(measure(repeats=1)))


# --- workloads: a protocol, and what an agent says in a round ---------------------------------------


@dataclass(frozen=True)
class Workload:
    """A protocol, and an agent's part of a round: payloads that it sends, and None where it waits for a message."""

    name: str
    protocol: cd.Protocol
    part: tuple[bytes | None, ...]
    hello: Mapping[str, Any]
    public: np.ndarray | None = None
    fitted: tuple[int, ...] = FITTED
    checked: int | None = CHECKED
    participation: float = 1.0


def workloads() -> list[Workload]:
    """W1 of the benchmarks: LeNet-5, ten classes; and bare exchanges, which separate rounds, messages and bytes."""
    federation = lenets(cd.FedAvg(local_epochs=0), agents=1, samples=120)
    agent, public, rng = federation.agents[0], np.zeros((PUBLIC, 1, 28, 28), np.float32), np.random.default_rng(0)
    shared = describe_hub(cd.FedMD(), ["a"], classes=CLASSES, public=public, spec=RunSpec()).public
    hello = hello_of(agent, shared)

    def said(*arrays: Message) -> tuple[bytes | None, ...]:
        return tuple(each for message in arrays for each in (message.encoded, None))

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    steps = 4
    outputs = Message.of(f=drawn(BATCH, CLASSES))
    last = Message.of(f=drawn(PUBLIC % BATCH or BATCH, CLASSES))
    held = np.ones(CLASSES, dtype=bool)
    means = Message.of(means=drawn(CLASSES, CLASSES), seen=held)
    wish = Message({}, {"downloads": 1, "oldest": 0.0, "listen_to": []})
    upload = Message.of(representations=drawn(2, CLASSES, FEATURES), held=held).encoded
    weights = Message(agent.learner.weights(), {"samples": 120})
    bare = [Exchange(size=1 << 12), Exchange(size=1 << 12, steps=5), Exchange(size=1 << 18)]
    whole = ceil(PUBLIC / BATCH) - 1
    return [
        Workload("fd", cd.FD(), said(means), hello),
        Workload("crs", cd.CRS(), (*said(wish), upload), hello),
        Workload("fedmd", cd.FedMD(transfer_steps=steps), said(*[outputs] * steps), hello, public),
        Workload("fedavg", cd.FedAvg(), said(weights), hello),
        *[
            Workload(name, each, said(*[each.message()] * each.steps), hello, checked=None)
            for name, each in zip(BARE, bare, strict=True)
        ],
        Workload(WHOLE, cd.FedMD(), said(*[outputs] * whole, last), hello, public, (), FEW),
        Workload(SAMPLED, cd.FD(), said(means), hello, None, (), FITTED[-1], participation=FEW / FITTED[-1]),
    ]


# --- the hub ----------------------------------------------------------------------------------------


class Stamps:
    """Tells the parent after each round: processor seconds so far, bytes of messages, how many took part, events."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def started(self, record: RunStarted) -> None:
        self._pipe.send((time.process_time(), status()))

    def round_ended(self, record: RoundEnded) -> None:
        events = [event for event in record.events if ": absent: " not in event]
        present = sum(bool(row["present"] and row["own_accuracy"]) for row in record.rows)
        counted = [sum(row[which] for row in record.rows) for which in ("sent", "received")]
        self._pipe.send((time.process_time(), counted, present, events[:3]))


def live_as_hub(workload: Workload, names: list[str], certs: Path, port: int, rounds: int, pipe: Connection) -> None:
    """What `codistill hub` runs: rounds, evaluation, metrics and checkpoints in a folder."""
    description = describe_hub(
        workload.protocol, names, classes=CLASSES, public=workload.public, participation=workload.participation,
        spec=RunSpec(rounds=rounds, alone=False),
    )  # fmt: skip
    own, network = Credentials(certs / HUB, HUB), Network(quorum=1.0, linger=0.0)
    with tempfile.TemporaryDirectory(prefix="codistill-scale-") as folder:
        node = HubNode(
            description, f"127.0.0.1:{port}", own, network, Path(folder) / "run", (Stamps(pipe),),
            progress=False, quiet=True,
        )  # fmt: skip
        node.run_here()
    pipe.close()


def status(which: str = "VmRSS", process: int | str = "self") -> float:
    """Megabytes of a process in memory."""
    lines = Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
    return int(dict(line.split(":", 1) for line in lines)[which].split()[0]) / 1024


def processor_time(process: int) -> float:
    """Processor seconds of another process, all of its threads: Linux has a clock for each."""
    return time.clock_gettime((~process << 3) | 2)


def idling(process: int) -> float:
    """Processor seconds per second, while nothing is asked of a process."""
    before, since = processor_time(process), time.monotonic()
    time.sleep(IDLE)
    return (processor_time(process) - before) / (time.monotonic() - since)


# --- played agents ----------------------------------------------------------------------------------


class Player:
    """An agent that answers what its hub waits for, and computes nothing; the owner of its link."""

    def __init__(self, name: str, own: Credentials, workload: Workload, loop: asyncio.AbstractEventLoop) -> None:
        self.name, self.own, self.loop, self._workload = name, own, loop, workload
        self.lease = Network().lease
        self.preface = Preface(secrets.randbits(64), Network().silence, 1 << 28, name)
        self.stream: Stream | None = None
        self.turn, self._number, self._step, self._command = Turn(-1), 0, 0, 0
        self._sent = self._received = 0
        self.up, self.down = Counter[int](), Counter[int]()  # bytes of frames, by round
        self.has_joined = self.is_over = False
        self.holds = True  # it has not been allowed yet to begin its first round

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        assert self.stream is not None
        self._number += 1
        self.up[self.turn.phase] += 8 + HEADER_SIZE + len(payload)
        self.stream.send(FrameHeader(kind, self.preface.session_id, self._number, self.turn).encode(), payload)

    def tell(self, **content: Any) -> None:
        self.send(FrameKind.CONTROL, encode_control(content, {}))

    def go_on(self) -> None:
        """Send what comes next, up to where it waits for the hub."""
        part = self._workload.part
        while self._step < len(part):
            payload, self._step = part[self._step], self._step + 1
            if payload is None:
                return
            self._sent += len(payload)
            self.send(FrameKind.MESSAGE, payload)
        self.send(FrameKind.END)
        counts = {"sent": self._sent, "received": self._received, "steps": 0, "exchanges": len(part)}
        report: dict[str, Any] = {key: {self.name: count} for key, count in counts.items()}
        self.tell(do="answer", number=self._command, report={**report, "refused": [], "remarks": [], "measures": []})

    def command(self, content: dict[str, Any]) -> None:
        match content["do"]:
            case "welcome":
                self.tell(do="ready", at=0)
                self.has_joined = True
            case "run":
                self.turn, self._command = Turn(*content["turn"]), content["number"]
                self._step = self._sent = self._received = 0
                if not self.holds:
                    self.go_on()
            case "keep" | "store":
                self.tell(do="answer", number=content["number"], trouble=None)
            case "evaluate":
                self.tell(do="answer", number=content["number"], scores={"own_accuracy": 0.5})
            case "stop":
                self.is_over = True
            case other:
                raise RuntimeError(f"{self.name}: {other}, {content}")

    # what a link asks of its owner

    def identify(self, stream: Stream) -> None:
        stream.name = self.own.admitted_name(stream.certificate or b"")

    def opened(self, stream: Stream) -> None:
        if self._number:
            raise RuntimeError(f"{self.name} was disconnected")
        self.stream = stream
        self.send(FrameKind.HELLO, encode_control({"do": "hello", **self._workload.hello}, {}))

    def largest(self, kind: FrameKind) -> int:
        return self.preface.limit

    def arrived(self, stream: Stream, event: Event) -> bool:
        if isinstance(event, Refusal):
            raise RuntimeError(f"{self.name}: {event.why}")
        assert isinstance(event, ReceivedFrame)
        header = event.header
        self.down[header.turn.phase] += 8 + HEADER_SIZE + len(event.payload)
        if header.kind in (FrameKind.CONTROL, FrameKind.HELLO):
            self.command(read_control(event).content)
        elif header.kind is FrameKind.MESSAGE:
            self._received += len(event.payload)
            self.go_on()
        return True

    def refused(self, stream: Stream, why: str) -> None:
        raise RuntimeError(f"{self.name}: {why}")

    def closed(self, stream: Stream, why: str) -> None:
        pass


def play(workload: Workload, names: Sequence[str], certs: Path, port: int, pipe: Connection) -> None:
    """Some of the agents: say when all have been asked for their first round, wait, and take part to the end."""
    asyncio.run(_play(workload, names, certs, port, pipe))


async def _play(workload: Workload, names: Sequence[str], certs: Path, port: int, pipe: Connection) -> None:
    loop, players = asyncio.get_running_loop(), list[Player]()
    loop.set_exception_handler(_fail)
    tasks = [loop.create_task(_ping(players))]
    for name in names:
        player = Player(name, Credentials(certs / name, "agent"), workload, loop)
        players.append(player)
        opened = partial(Stream, player, expected=HUB)
        tasks.append(loop.create_task(keep_connected(f"127.0.0.1:{port}", player.own, loop, opened)))
        await asyncio.sleep(0.01)  # a hub begins at most 300 handshakes per second
    while not all(player.has_joined for player in players) or not any(player.turn.phase == 0 for player in players):
        await asyncio.sleep(0.05)
    pipe.send("joined")
    await loop.run_in_executor(None, pipe.recv)
    for player in players:
        player.holds = False
        if player.turn.phase == 0:  # it was sampled for the first round
            player.go_on()
    while not all(player.is_over for player in players):
        await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    pipe.send([sum((counts(player) for player in players), Counter()) for counts in (_up, _down)])


def _up(player: Player) -> Counter[int]:
    return player.up


def _down(player: Player) -> Counter[int]:
    return player.down


async def _ping(players: Sequence[Player]) -> None:
    """As every node does: after a quarter of its lease without a word, a ping."""
    while True:
        await asyncio.sleep(0.25)
        for player in players:
            stream, now = player.stream, player.loop.time()
            if stream is not None and not stream.is_closed and now - stream.said > player.preface.lease / 4:
                stream.send(FrameHeader(FrameKind.PING, player.preface.session_id, 0).encode())


def _fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    print("played agents:", context.get("message"), repr(context.get("exception")), file=sys.stderr, flush=True)
    os._exit(1)


# --- a measurement ----------------------------------------------------------------------------------


@contextmanager
def certificates(count: int) -> Iterator[tuple[Path, list[str]]]:
    """Certificates of a hub and of agents; all names have seven letters."""
    names = [f"a{i:06d}" for i in range(count)]
    with tempfile.TemporaryDirectory(prefix="codistill-scale-") as folder:
        authority = Authority(Path(folder))
        authority.create(days=30)
        authority.issue("hub", HUB, days=30)
        for name in names:
            authority.issue("agent", name, days=30)
        yield Path(folder), names


def one_run(workload: Workload, names: list[str], certs: Path, rounds: int) -> dict[str, Any]:
    """A hub with so many agents: what it takes per round, to let all join, and to do nothing."""
    port, pipes, made = unused_port(), [], []

    def start(life: Callable[..., None], *given: Any, fresh: bool = False) -> Connection:
        mine, end = multiprocessing.Pipe()
        made.append(process(partial(life, *given, end), fresh=fresh))
        end.close()
        pipes.append(mine)
        return mine

    try:
        hub = start(live_as_hub, workload, names, certs, port, rounds, fresh=True)
        at_start, empty = _heard(hub)
        players = [start(play, workload, names[i::PLAYERS], certs, port) for i in range(PLAYERS)]
        for player in players:
            assert _heard(player) == "joined"
        pid = made[0].pid
        time.sleep(1)  # until all have been asked for the first round
        joined, linked = processor_time(pid), status(process=pid)
        idle = min(idling(pid), idling(pid))  # Python's garbage collector may work in one of them
        for player in players:
            player.send("go on")
        stamps = [_heard(hub) for _ in range(rounds)]
        peak = status("VmHWM", pid)
        up, down = (sum(each, Counter()) for each in zip(*map(_heard, players), strict=True))
    finally:
        for pipe in pipes:
            pipe.close()
        for one in made:
            one.kill()
            one.join()
    wanted = ceil(workload.participation * len(names))
    troubles = [stamp[2:] for stamp in stamps if stamp[2] != wanted or stamp[3]]
    assert not troubles, troubles
    spent = np.diff([stamp[0] for stamp in stamps])[SKIPPED - 1 :]
    sent, received = stamps[-2][1]
    return {
        "workload": workload.name, "agents": len(names), "exchanges": sum(each is None for each in workload.part),
        "cpu": float(np.median(spent)), "sent": sent, "received": received, "up": up[rounds - 2],
        "down": down[rounds - 2], "empty": empty, "linked": linked, "peak": peak, "join": joined - at_start,
        "idle": idle,
    }  # fmt: skip


def unused_port() -> int:
    """A port that nobody listens at."""
    for port in PORTS:
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no port from {PORTS.start} to {PORTS.stop} is free")


def _heard(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE):
        raise TimeoutError(f"A process has said nothing for {PATIENCE} s.")
    return pipe.recv()


def measure(repeats: int) -> list[dict[str, Any]]:
    """All runs, in repeats of all."""
    runs, chosen = [], workloads()
    with certificates(max(count for each in chosen for count in (*each.fitted, each.checked or 0))) as (certs, names):
        for workload in chosen * repeats:
            for count in (*workload.fitted, *filter(None, [workload.checked])):
                rounds = 1 + SKIPPED + min(8, max(3, 600 // count))
                runs.append(one_run(workload, names[:count], certs, rounds))
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    return runs


if __name__ == "__main__":
    KEPT.write_text(json.dumps(constants(measure(int(sys.argv[1] if sys.argv[1:] else 1))), indent=1) + "\n", "utf-8")
