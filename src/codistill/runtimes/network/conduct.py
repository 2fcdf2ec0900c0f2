"""A run as its hub conducts it: rounds, figures, checkpoints, and what the agents would have reached alone."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from codistill.agent import Hub
from codistill.errors import CheckpointError
from codistill.files import write_atomically, writing
from codistill.runtimes.drive import Plan, drive
from codistill.runtimes.host import BEGIN
from codistill.runtimes.network.charter import Charter
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.event_log import EventLog
from codistill.runtimes.network.hub_runtime import HubRuntime
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.stopping import Stopped, never
from codistill.runtimes.network.transport import Transport
from codistill.runtimes.observers import Observer
from codistill.runtimes.observers.progress import Progress
from codistill.runtimes.runtime import Scores
from codistill.runtimes.store import METRICS, Keeper

RUN = "network.json"  # in the folder of a run: its name


def conduct(
    charter: Charter,
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
) -> bool:
    """Run the rounds that are left; True if all are done."""
    keeper = Keeper(folder, plan.rounds, checkpoint_every)
    observers: list[Observer] = [journal, keeper]
    stage = charter.stage(Hub())
    hub: HubRuntime | None = None
    try:
        keeper.begin(resume=True)
        start, saved, _ = keeper.latest()
        for note in keeper.notes:
            journal.tell(note)
        lines = Connections(wire, network, journal.tell, deadline=network.deadline, leads=True)
        hub = HubRuntime(
            stage, lines, charter.terms(), run=_run_id(folder), done=start, stopping=stopping,
            stores=lambda done: bool(checkpoint_every) and (done % checkpoint_every == 0 or done == plan.rounds),
        )  # fmt: skip
        if saved is not None:
            hub.load(saved)
        journal.hub_started(charter.topology.names, start, plan.rounds, hub)
        done = start
        with suppress(Stopped):
            if alone and charter.has_yardstick and start == 0 and not (folder / "alone" / METRICS).exists():
                scores = hub.measure_alone(plan.rounds)
                if not stopping():
                    write_alone(folder, charter.topology.names, plan.rounds, scores, charter.test)
            if start < plan.rounds:
                hub.run(BEGIN, charter.topology.names)  # everybody, also those whom the next round leaves out
            if progress:
                observers.append(Progress(charter.protocol.name, plan.rounds, len(charter.topology.names), start))
            done = drive(stage, hub, plan, observers, start=start, should_stop=stopping)
        if done == plan.rounds:
            hub.send_done()
        else:
            hub.send_stop("paused")
        return done == plan.rounds
    finally:
        for observer in observers:
            observer.closed()
        if hub is not None:
            hub.close()
        else:
            wire.close()


def _run_id(folder: Path) -> str:
    """The name of this run, by which agents know their states of it; made once."""
    path = folder / RUN
    if not path.exists():
        write_atomically(path, json.dumps({"run": secrets.token_hex(16)}).encode())
    try:
        return str(json.loads(path.read_text("utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} must be as it was written.", f"{error}", "Start in another folder.") from None


def write_alone(
    folder: Path,
    names: Sequence[str],
    rounds: int,
    scores: Mapping[str, Scores],
    test: tuple[np.ndarray, np.ndarray] | None,
) -> None:
    """As if the agents had been watched alone: they say nothing, and are measured at the end."""
    lines = []
    for t in range(1, rounds + 1):
        for name in names:
            row: dict[str, Any] = {"round": t, "agent": name, "present": True, "sent": 0, "received": 0}
            if t == rounds and scores[name]:
                row.update(scores[name], test_samples=0 if test is None else len(test[0]))
            lines.append(json.dumps(row) + "\n")
    with writing(folder):
        (folder / "alone").mkdir(exist_ok=True)
    write_atomically(folder / "alone" / METRICS, "".join(lines).encode())
