"""All of a federation on this machine: one process for each node, real sockets and mutual TLS."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from codistill.agent import Agent
from codistill.certs.authority import Authority
from codistill.certs.credentials import read_credentials
from codistill.errors import CodistillError, RuntimeFault
from codistill.federation import Federation
from codistill.files import writing
from codistill.runtimes.drive import Plan
from codistill.runtimes.interrupt import GentleInterrupt
from codistill.runtimes.links import describe_error, rebuild_error
from codistill.runtimes.network.answers import SCORES
from codistill.runtimes.network.charter import Charter
from codistill.runtimes.network.conduct import conduct, write_alone
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.event_log import HEALTH, EventLog
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.peers import Gathering, align, walk
from codistill.runtimes.network.remote_agent import RemoteAgent
from codistill.runtimes.network.stopping import never
from codistill.runtimes.network.terms import hello_of
from codistill.runtimes.network.transport import Transport
from codistill.runtimes.observers import Observer
from codistill.runtimes.observers.progress import Progress
from codistill.runtimes.runtime import Scores, warm_up
from codistill.runtimes.store import METRICS, Keeper, read_rows
from codistill.topology import HUB

TROUBLE = "trouble.json"
_GRACE = 5.0  # seconds for a process to end by itself
_STOPPED, _FAILED = 3, 4  # exit codes of a node's process


@dataclass(frozen=True)
class Trial:
    """A federation that is tried on this machine, and how."""

    federation: Federation
    plan: Plan
    folder: Path
    network: Network = field(default_factory=Network)
    checkpoint_every: int = 1
    alone: bool = True
    progress: bool = True
    form: str = "text"  # of the journal
    verbose: bool = False  # whether agents tell what happens, too

    def run(self, stopping: Callable[[], bool] = never) -> bool:
        """Start every node and wait for the end; True if all rounds are done."""
        charter = Charter.of(self.federation, self.plan.rounds)
        warm_up()  # once here, instead of in every process
        for name in charter.topology.names:
            with writing(self.folder):
                self._home(name).mkdir(parents=True, exist_ok=True)
        with _certificates([HUB, *charter.topology.names]) as certs:
            return (self._with_hub if charter.topology.hub else self._among_peers)(charter, certs, stopping)

    # --- a hub and its agents -----------------------------------------------------------------------

    def _with_hub(self, charter: Charter, certs: Path, stopping: Callable[[], bool]) -> bool:
        port = _free_ports(1)[0]
        members = {
            agent.name: _fork(agent.name, partial(self._member, charter, agent, certs, port), self._home(agent.name))
            for agent in self.federation.agents
        }
        hub = _fork(HUB, partial(self._hub, charter, certs, port), self.folder)
        try:
            asked = False
            while hub.is_alive():
                hub.join(timeout=0.2)
                broken = any(process.exitcode == _FAILED for process in members.values())
                if not asked and (stopping() or broken):
                    asked = True
                    hub.terminate()
            if hub.exitcode != 0:
                for process in members.values():
                    process.terminate()
        finally:
            _end([hub, *members.values()])
        failed = [name for name, process in {HUB: hub, **members}.items() if process.exitcode == _FAILED]
        if failed:
            raise _failure(failed[0], self.folder if failed[0] == HUB else self._home(failed[0]))
        return hub.exitcode == 0

    def _hub(self, charter: Charter, certs: Path, port: int) -> bool:
        journal = EventLog(HUB, form=self.form, health=self.folder / HEALTH, quiet=not self.verbose)
        with GentleInterrupt(quiet=True, signals=(signal.SIGTERM,)) as interrupt:
            own = read_credentials(certs / HUB, HUB)
            wire = Transport(HUB, charter.topology.names, self.network, own, listen=f"127.0.0.1:{port}")
            return conduct(
                charter, self.plan, wire, self.network, self.folder, journal, checkpoint_every=self.checkpoint_every,
                alone=self.alone, stopping=lambda: interrupt.asked, progress=self.progress,
            )  # fmt: skip

    def _member(self, charter: Charter, agent: Agent, certs: Path, port: int) -> bool:
        journal = EventLog(agent.name, form=self.form, quiet=not self.verbose)
        own = read_credentials(certs / agent.name, "agent")
        wire = Transport(agent.name, (HUB,), self.network, own, dial=[f"127.0.0.1:{port}"])
        lines = Connections(wire, self.network, journal.tell)
        stage = charter.stage(agent)
        hello = hello_of(agent, charter.public, agent.shard.x.shape[1:], len(agent.shard))
        try:
            return RemoteAgent(lines, hello, lambda _: stage, self._home(agent.name)).run()
        finally:
            wire.close()

    # --- peers --------------------------------------------------------------------------------------

    def _among_peers(self, charter: Charter, certs: Path, stopping: Callable[[], bool]) -> bool:
        names = charter.topology.names
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        align([self._home(name) for name in names], self.plan.rounds)
        peers = {
            agent.name: _fork(agent.name, partial(self._peer, charter, agent, certs, ports), self._home(agent.name))
            for agent in self.federation.agents
        }
        keeper = Keeper(self.folder, self.plan.rounds, 0)
        observers: list[Observer] = [keeper]
        if self.progress:
            observers.append(Progress(charter.protocol.name, self.plan.rounds, len(names), 0))
        gathering = Gathering({name: self._home(name) for name in names}, self.plan, charter.test)
        try:
            keeper.begin(resume=True)
            keeper.latest()
            asked, alive = False, True
            while alive:
                alive = any(process.is_alive() for process in peers.values())
                for record in gathering.rounds():
                    if record.round == self.plan.rounds:
                        record = gathering.with_outputs(record)
                    for observer in observers:
                        observer.round_ended(record, dict)
                if stopping() and not asked:
                    asked = True
                    for process in peers.values():
                        process.terminate()
                time.sleep(0.2)
            self._gather_alone(names, charter)
        finally:
            _end(list(peers.values()))
            for observer in observers:
                observer.closed()
        failed = [name for name, process in peers.items() if process.exitcode == _FAILED]
        if failed:
            raise _failure(failed[0], self._home(failed[0]))
        return gathering.done == self.plan.rounds

    def _gather_alone(self, names: Sequence[str], charter: Charter) -> None:
        scores: dict[str, Scores] = {}
        for name in names:
            path = self._home(name) / "alone" / METRICS
            last = read_rows(path)[-1] if path.exists() else {}
            scores[name] = {key: value for key, value in last.items() if key in SCORES}
        if self.alone and charter.has_yardstick:
            write_alone(self.folder, names, self.plan.rounds, scores, charter.test)

    def _peer(self, charter: Charter, agent: Agent, certs: Path, ports: Mapping[str, int]) -> bool:
        me, topology = agent.name, charter.topology
        linked = {*topology.neighbours(me), *topology.sources(me)}
        others = [name for name in topology.names if name in linked]
        # One link for each edge: the one who is later in the roster dials.
        dialled = others[: sum(topology.names.index(name) < topology.names.index(me) for name in others)]
        journal = EventLog(me, form=self.form, quiet=not self.verbose)
        with GentleInterrupt(quiet=True, signals=(signal.SIGTERM,)) as interrupt:
            wire = Transport(
                me, others, self.network, read_credentials(certs / me, "agent"),
                listen=f"127.0.0.1:{ports[me]}", dial=[f"127.0.0.1:{ports[name]}" for name in dialled],
            )  # fmt: skip
            return walk(
                charter, agent, self.plan, wire, self.network, self._home(me), journal,
                checkpoint_every=self.checkpoint_every, alone=self.alone, stopping=lambda: interrupt.asked,
                progress=False, kept=(topology.diameter or 0) + 2,  # who is furthest apart differs by so many rounds
            )  # fmt: skip

    def _home(self, name: str) -> Path:
        return self.folder / "agents" / name


@contextmanager
def _certificates(names: Sequence[str]) -> Iterator[Path]:
    """Certificates for this trial alone, which end with it."""
    folder = Path(tempfile.mkdtemp(prefix="codistill-"))
    try:
        authority = Authority(folder)
        authority.create(days=30)
        for name in names:
            authority.issue("hub" if name == HUB else "agent", name, days=30)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody uses now."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in taken]


def _fork(name: str, life: Callable[[], bool], home: Path) -> BaseProcess:
    """A process for a node. It is forked before any link is open here: links do not survive a fork."""

    def work() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who asks the others
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        try:
            code = 0 if life() else _STOPPED
        except KeyboardInterrupt:
            code = _STOPPED
        except Exception as error:  # a mistake of a user's or a defect: kept where the parent finds it
            with suppress(OSError):
                text = "" if isinstance(error, CodistillError) else traceback.format_exc()
                (home / TROUBLE).write_text(json.dumps(describe_error(error, text)), "utf-8")
            code = _FAILED
        os._exit(code)  # at once: Zenoh's threads need not be waited for

    (home / TROUBLE).unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=work, name=f"codistill-{name}", daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks that copy only one thread
        process.start()
    return process


def _end_with(parent: int) -> None:
    """No node stays behind when whoever started it is killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(_STOPPED)


def _end(processes: Sequence[BaseProcess]) -> None:
    """Wait a little for everybody to end, then end them."""
    end = time.monotonic() + _GRACE
    for process in processes:
        process.join(timeout=max(0.1, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _failure(name: str, home: Path) -> Exception:
    """What a node's process has written down before it ended."""
    try:
        error = rebuild_error(json.loads((home / TROUBLE).read_text("utf-8")))
    except (OSError, ValueError, KeyError):
        return RuntimeFault("Every node must go on to the end.", f"'{name}' ended unexpectedly", "See its folder.")
    error.add_note(f"This happened at '{name}'.")
    return error
