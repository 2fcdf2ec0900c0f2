"""A federation on this machine over real sockets and mutual TLS: one process for each agent, the hub in this one."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from codistill.certs.authority import Authority
from codistill.certs.credentials import Credentials
from codistill.core.files import subfolder
from codistill.engine.description import RunDescription
from codistill.engine.exchange import Report
from codistill.engine.runtime import Runtime, ShouldStop, load_nodes, never, save_nodes, warm_up
from codistill.network.agent import RemoteAgent
from codistill.network.connections import Connections
from codistill.network.hub import open_hub, run_name
from codistill.network.log import EventLog
from codistill.network.options import Network
from codistill.network.peer import neighbours, open_peer
from codistill.network.terms import hello_of
from codistill.network.transport import Transport
from codistill.results.outputs import View
from codistill.results.records import Baseline, Scores
from codistill.runtimes.service import STOP, DistributedRuntime, NodeService, serve
from codistill.runtimes.workers import Channel, ForkedProcess, Pipes
from codistill.topology import HUB

_LAST_STATE = 10.0  # seconds that an agent has to hand over its model at the end
_LOOK = 0.1  # seconds between two looks at the agents' processes


def local_network(
    description: RunDescription, *, folder: Path | None = None, network: Network | None = None, logs: str | None = None
) -> Runtime:
    """The runtime 'network'. `logs`: "text" or "json", if every node is to log to standard error."""
    warm_up(description.agents)  # once here, instead of in every process
    make = LocalHub if description.topology.hub else LocalPeers
    return make(description, _Site(description, folder, network or Network(), logs))


class _Site:
    """What the nodes of a run on this machine need: folders, certificates for this run alone, options, logs."""

    def __init__(self, description: RunDescription, folder: Path | None, network: Network, logs: str | None) -> None:
        self.closing = ExitStack()
        self.network, self._logs = network, logs
        try:
            self.folder = self._temporary() if folder is None else folder
            self._certs = self._temporary()
            authority = Authority(self._certs)
            authority.create(days=30, list_days=30)
            for name in (HUB, *description.topology.names):
                authority.issue("hub" if name == HUB else "agent", name, days=30)
        except BaseException:
            self.closing.close()
            raise

    def _temporary(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="codistill-"))
        self.closing.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def credentials(self, name: str) -> Credentials:
        return Credentials(self._certs / name, "hub" if name == HUB else "agent")

    def log(self, name: str) -> EventLog:
        return EventLog(name, form=self._logs or "text", quiet=self._logs is None)

    def fork(self, name: str, work: Callable[[Channel, ShouldStop], None]) -> ForkedProcess:
        """Start the process of a node; it ends with the run."""
        process = ForkedProcess(name, work)
        self.closing.callback(process.end)
        return process


class LocalHub(Runtime):
    """The hub of a run in this process. Its agents are processes that join it, and keep their states in a folder."""

    def __init__(self, description: RunDescription, site: _Site) -> None:
        super().__init__(description)
        self._site = site
        self._members: dict[str, ForkedProcess] = {}
        self._handed_over: dict[str, dict[str, bytes]] = {}  # states of agents at the end
        self._killed: set[str] = set()
        self._looked = 0.0
        try:
            address = f"127.0.0.1:{_free_ports(1)[0]}"
            for agent in description.agents:
                home = site.folder / "agents" / agent.name
                subfolder(home)
                self._members[agent.name] = site.fork(agent.name, partial(self._be_agent, agent.name, home, address))
            # Last: a process that is forked later would hold the hub's sockets open.
            name, own = run_name(site.folder), description.of_hub()
            self._hub = open_hub(own, site.network, site.credentials(HUB), address, site.log(HUB), name)
            site.closing.callback(self._hub.close)
        except BaseException:
            self.close()
            raise

    def _be_agent(self, name: str, home: Path, address: str, channel: Channel, should_stop: ShouldStop) -> None:
        """What an agent's process does: take part until the run is over, then hand over what it has learnt."""
        description, network, log = self.description.of_agent(name), self._site.network, self._site.log(name)
        own, limit = self._site.credentials(name), network.message_limit
        transport = Transport(name, (HUB,), network, own, dial={HUB: address}, limit=limit, tell=log.tell)
        connections = Connections(transport, network, log.tell)
        hello = hello_of(description.agents[0], description.public)
        try:
            RemoteAgent(connections, hello, lambda _: description, home, should_stop).run()
            channel.send(saved=save_nodes(description.agents))
        finally:
            transport.close()

    @property
    def saved_nodes(self) -> tuple[str, ...]:
        """The hub, whose agents keep their states themselves."""
        return self._hub.saved_nodes

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Get ready; whenever the hub asks whether to stop, it is seen whether an agent has failed."""

        def asked() -> bool:
            self._look()
            return should_stop()

        self._hub.start(done, asked)

    def measure_baseline(self) -> Baseline | None:
        return self._hub.measure_baseline()

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        self._look()
        return self._hub.run(phase, present)

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        return self._hub.evaluate(samples, views)

    def save(self) -> dict[str, bytes]:
        return self._hub.save()

    def load(self, saved: dict[str, bytes]) -> None:
        self._hub.load(saved)

    def finish(self, *, complete: bool) -> None:
        self._hub.finish(complete=complete)
        if not complete:
            for process in self._members.values():
                process.stop()
        end = time.monotonic() + _LAST_STATE
        while len(self._handed_over) + len(self._killed) < len(self._members) and time.monotonic() < end:
            self._looked = 0.0
            self._look()
            time.sleep(0.01)
        for agent in self.description.agents:
            if agent.name in self._handed_over:
                load_nodes([agent], self._handed_over[agent.name])

    def close(self) -> None:
        for process in self._members.values():
            process.stop()
        self._site.closing.close()

    def _look(self) -> None:
        """Take what agents hand over. One that has failed ends the run; without one that was killed it goes on."""
        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        for name, process in self._members.items():
            if name not in self._handed_over and name not in self._killed and process.channel.poll(0):
                content = process.receive()
                if content is None:
                    self._killed.add(name)
                else:
                    self._handed_over[name] = content["saved"]


class LocalPeers(DistributedRuntime):
    """Peers in processes of their own, which exchange messages over the network and are commanded through pipes."""

    def __init__(self, description: RunDescription, site: _Site) -> None:
        self._site = site
        try:
            names = description.names
            addresses = {name: f"127.0.0.1:{port}" for name, port in zip(names, _free_ports(len(names)), strict=True)}
            forked = [site.fork(name, partial(self._be_peer, description.of_agent(name), addresses)) for name in names]
        except BaseException:
            site.closing.close()
            raise
        self._pipes = Pipes(forked)
        super().__init__(description, self._pipes, [[], *([agent] for agent in description.agents)])

    def _be_peer(
        self, own: RunDescription, addresses: Mapping[str, str], channel: Channel, should_stop: ShouldStop
    ) -> None:
        """What a peer's process does: execute commands until told to stop."""
        (name,), names, site = own.names, own.topology.names, self._site
        # One link for each edge: the one who is later in the roster dials.
        earlier = [other for other in neighbours(own.topology, name) if names.index(other) < names.index(name)]
        dial = {other: addresses[other] for other in earlier}
        runtime = open_peer(own, site.network, site.credentials(name), addresses[name], dial, site.log(name))
        try:
            with suppress(EOFError):  # the owner of the run has ended
                serve(NodeService(runtime, should_stop=should_stop), channel.receive, channel.send)
        finally:
            runtime.close()

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        self._pipes.should_stop = should_stop
        self._tell("start", done=done)
        self._answers()

    def measure_baseline(self) -> Baseline | None:
        """Let every peer train a copy of its model alone; None without rounds, where there is no baseline."""
        if self.description.asynchronous:
            return None
        self._tell("alone")
        measured = [answer["measured"] for answer in self._answers()]
        scores = {name: values for each in measured for name, values in each["scores"].items()}
        steps = {name: counts for each in measured for name, counts in each["steps"].items()}
        return Baseline({name: scores.get(name, {}) for name in self.description.names}, steps)

    def finish(self, *, complete: bool) -> None:
        super().finish(complete=complete)
        self._tell("finish", complete=complete)
        self._answers()

    def close(self) -> None:
        self._tell(STOP)
        self._site.closing.close()
        super().close()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in taken]
