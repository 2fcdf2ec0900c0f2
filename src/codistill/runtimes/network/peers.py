"""A peer's run from its start to its end, in a folder of its own; and many such folders as one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from codistill.agent import Agent
from codistill.errors import MessageError
from codistill.files import write_atomically
from codistill.results.outputs import View, collect
from codistill.results.records import Record, Row
from codistill.runtimes.drive import Plan, drive
from codistill.runtimes.network.charter import Charter
from codistill.runtimes.network.conduct import write_alone
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.event_log import EventLog
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.peer_runtime import PeerRuntime
from codistill.runtimes.network.solitude import train_alone
from codistill.runtimes.network.stopping import Stopped, never
from codistill.runtimes.network.transport import Transport
from codistill.runtimes.observers import Observer
from codistill.runtimes.observers.progress import Progress
from codistill.runtimes.store import METRICS, TIMES, Keeper, read_rows, whole_lines
from codistill.wire.codec import decode, encode

VIEW = "view.safetensors"


def walk(
    charter: Charter,
    agent: Agent,
    plan: Plan,
    wire: Transport,
    network: Network,
    folder: Path,
    journal: EventLog,
    *,
    checkpoint_every: int = 1,
    alone: bool = True,
    stopping: Callable[[], bool] = never,
    progress: bool = True,
    kept: int = 2,
) -> bool:
    """Take part as a peer, for the rounds that are left; True if all are done. `kept`: checkpoints at a time."""
    keeper = Keeper(folder, plan.rounds, checkpoint_every, kept)
    observers: list[Observer] = [journal, keeper]
    stage = charter.stage(agent)
    peer: PeerRuntime | None = None
    try:
        keeper.begin(resume=True)
        start, saved, _ = keeper.latest()
        for note in keeper.notes:
            journal.tell(note)
        if alone and charter.has_yardstick and start == 0 and not (folder / "alone" / METRICS).exists():
            scores = train_alone(stage, agent, plan.rounds, stopping)
            if not stopping():
                write_alone(folder, (agent.name,), plan.rounds, {agent.name: scores}, charter.test)
        lines = Connections(wire, network, journal.tell, deadline=network.deadline)
        peer = PeerRuntime(
            stage, lines, charter.terms(), done=start, stopping=stopping,
            keep_view=lambda view: write_atomically(folder / VIEW, encode(view, {})),
        )  # fmt: skip
        if saved is not None:
            peer.load(saved)
        journal.state(status="waiting", round=start, rounds=plan.rounds)
        if progress:
            observers.append(Progress(f"{agent.name}: {charter.protocol.name}", plan.rounds, 1, start))
        done = start
        with suppress(Stopped):
            done = drive(stage, peer, plan, observers, start=start, should_stop=stopping)
        if done == plan.rounds:
            peer.finish()
        return done == plan.rounds
    finally:
        for observer in observers:
            observer.closed()
        if peer is not None:
            peer.close()
        else:
            wire.close()


def align(folders: Iterable[Path], rounds: int) -> None:
    """Bring peers that were all stopped back to a round that each of them has a checkpoint of: they go on exactly."""
    keepers = [Keeper(folder, rounds) for folder in folders]
    try:
        reached = [keeper.reached() for keeper in keepers]
        common = set.intersection(*reached)
        if not common and all(reached):
            return  # too far apart, after faults: those behind skip rounds to meet the others
        for keeper in keepers:
            keeper.forget_after(max(common, default=0))  # without any checkpoint of one, from the beginning
    finally:
        for keeper in keepers:
            keeper.closed()


class Gathering:
    """The rounds that all peers of a machine have ended, read from their folders."""

    def __init__(self, folders: Mapping[str, Path], plan: Plan, test: tuple[np.ndarray, np.ndarray] | None) -> None:
        self._folders, self._plan, self._test = folders, plan, test
        self.done = 0

    def rounds(self) -> list[Record]:
        """Records of rounds that nobody is missing from any more."""
        rows = {name: _by_round(folder) for name, folder in self._folders.items()}
        seconds = {name: _seconds(folder) for name, folder in self._folders.items()}
        records = []
        while all(self.done + 1 in mine for mine in rows.values()):
            self.done += 1
            slowest = max(times.get(self.done, 0.0) for times in seconds.values())
            records.append(Record(self.done, [rows[name][self.done] for name in self._folders], [], slowest))
        return records

    def views(self) -> dict[str, View]:
        """What the peers answered at the end."""
        found: dict[str, View] = {}
        for name, folder in self._folders.items():
            with suppress(OSError, MessageError):
                found[name] = decode((folder / VIEW).read_bytes(), finite=False)[0]
        return found

    def with_outputs(self, record: Record) -> Record:
        """The last record, with what the peers answered."""
        views = self.views()
        if not views or self._test is None or record.round != self._plan.rounds:
            return record
        return Record(
            record.round, record.rows, record.events, record.seconds, collect(record.round, views, self._test[1])
        )


def _by_round(folder: Path) -> dict[int, Row]:
    return {row["round"]: row for row in read_rows(folder / METRICS)} if (folder / METRICS).exists() else {}


def _seconds(folder: Path) -> dict[int, float]:
    with suppress(OSError, ValueError, KeyError):
        lines = [json.loads(line) for line in whole_lines(folder / TIMES)]
        return {line["round"]: float(line["seconds"]) for line in lines}
    return {}
