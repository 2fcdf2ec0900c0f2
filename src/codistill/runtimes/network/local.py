"""All of a federation on this machine: one process for each node, real sockets and mutual TLS."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from codistill.certs.authority import Authority
from codistill.certs.credentials import Credentials, read_credentials
from codistill.files import subfolder
from codistill.results.outputs import View
from codistill.results.records import Baseline, Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.forked import Channel, ForkedProcess, ForkedRuntime
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.event_log import EventLog
from codistill.runtimes.network.opening import neighbours, open_hub, open_peer, run_name
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.remote_agent import RemoteAgent
from codistill.runtimes.network.terms import hello_of
from codistill.runtimes.network.transport import Transport
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, ShouldStop, Stopped, load_nodes, never, save_nodes, warm_up
from codistill.topology import HUB

_LAST_STATE = 10.0  # seconds that an agent has to hand over its model at the end


class LocalNetwork(Runtime):
    """A runtime whose nodes are processes of this machine that speak over the network.

    With a hub, the agents do as the hub tells them and keep their states in `folder`; without, every peer is told
    what to do from here. `logs`: "text" or "json", if every node is to tell on standard error what happens.
    """

    def __init__(
        self,
        description: RunDescription,
        *,
        folder: Path | None = None,
        network: Network | None = None,
        logs: str | None = None,
    ) -> None:
        super().__init__(description)
        self._network, self._logs = network or Network(), logs
        self._closing = ExitStack()
        self._members: dict[str, ForkedProcess] = {}  # agents under the hub
        self._handed_over: dict[str, dict[str, bytes]] = {}  # their states at the end
        self._killed: set[str] = set()
        try:
            self._folder = self._temporary() if folder is None else folder
            self._certs = self._certificates()
            warm_up(description.agents)  # once here, instead of in every process
            self._runtimes = self._start_with_hub() if description.topology.hub else self._start_peers()
        except BaseException:
            self._closing.close()
            raise

    @property
    def saved_nodes(self) -> tuple[str, ...]:
        """The hub, whose agents keep their states themselves; or all peers."""
        return tuple(self._runtimes)

    # --- starting -----------------------------------------------------------------------------------

    def _temporary(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="codistill-"))
        self._closing.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _certificates(self) -> Path:
        """Certificates for this run alone, which are removed at its end."""
        folder = self._temporary()
        authority = Authority(folder)
        authority.create(days=30, list_days=30)
        for name in (HUB, *self.description.topology.names):
            authority.issue("hub" if name == HUB else "agent", name, days=30)
        return folder

    def _credentials(self, name: str) -> Credentials:
        return read_credentials(self._certs / name, "hub" if name == HUB else "agent")

    def _log(self, name: str) -> EventLog:
        return EventLog(name, form=self._logs or "text", quiet=self._logs is None)

    def _start_with_hub(self) -> dict[str, ForkedRuntime]:
        address = f"127.0.0.1:{_free_ports(1)[0]}"
        run = run_name(self._folder)
        for agent in self.description.agents:
            home = self._folder / "agents" / agent.name
            subfolder(home)
            self._members[agent.name] = ForkedProcess(agent.name, partial(self._be_agent, agent.name, home, address))
            self._closing.callback(self._members[agent.name].end)
        own = self.description.of_hub()
        return {HUB: self._fork(HUB, own, partial(self._make_hub, own, address, run))}

    def _make_hub(self, own: RunDescription, address: str, run: str) -> Runtime:
        return open_hub(own, self._network, self._credentials(HUB), address, self._log(HUB), run)

    def _be_agent(self, name: str, home: Path, address: str, channel: Channel, should_stop: ShouldStop) -> None:
        """What an agent's process does: take part until the run is over, then hand over what it has learnt."""
        description = self.description.of_agent(name)
        log = self._log(name)
        own = self._credentials(name)
        limit = self._network.message_limit
        transport = Transport(name, (HUB,), self._network, own, dial={HUB: address}, limit=limit, tell=log.tell)
        connections = Connections(transport, self._network, log.tell)
        hello = hello_of(description.agents[0], description.public)
        try:
            RemoteAgent(connections, hello, lambda _: description, home, should_stop).run()
            channel.send(saved=save_nodes(description.agents))
        finally:
            transport.close()

    def _start_peers(self) -> dict[str, ForkedRuntime]:
        names = self.description.topology.names
        addresses = {name: f"127.0.0.1:{port}" for name, port in zip(names, _free_ports(len(names)), strict=True)}
        runtimes = {}
        for agent in self.description.agents:
            own = self.description.of_agent(agent.name)
            runtimes[agent.name] = self._fork(agent.name, own, partial(self._make_peer, agent.name, own, addresses))
        return runtimes

    def _make_peer(self, name: str, own: RunDescription, addresses: Mapping[str, str]) -> Runtime:
        names = own.topology.names
        # One link for each edge: the one who is later in the roster dials.
        earlier = [other for other in neighbours(own.topology, name) if names.index(other) < names.index(name)]
        dial = {other: addresses[other] for other in earlier}
        return open_peer(own, self._network, self._credentials(name), addresses[name], dial, self._log(name))

    def _fork(self, name: str, own: RunDescription, make: Callable[[], Runtime]) -> ForkedRuntime:
        runtime = ForkedRuntime(name, own, make)
        runtime.look = self._look
        self._closing.callback(runtime.close)
        return runtime

    # --- the runtime --------------------------------------------------------------------------------

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Let every node get ready."""
        for runtime in self._runtimes.values():
            runtime.should_stop = should_stop
        self._ask("start", done=done)

    def measure_baseline(self) -> Baseline | None:
        """Let every agent train a copy of its model alone; None without rounds, where there is no baseline."""
        if self.description.asynchronous:
            return None
        told = [answer["measured"] for answer in self._ask("measure_baseline")]
        scores = {name: values for each in told for name, values in each["scores"].items()}
        steps = {name: counts for each in told for name, counts in each["steps"].items()}
        return Baseline({name: scores.get(name, {}) for name in self.description.names}, steps)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Let every node run the phase."""
        reports = [Report(**answer["report"]) for answer in self._ask("run", phase=phase, present=present)]
        together = Report()
        for report in reports:
            together = together.add(report)
        if not self.description.topology.hub:
            together.waited = max(report.waited for report in reports)
            skipped = {name for name, one in zip(self._runtimes, reports, strict=True) if one.present == ()}
            together.present = tuple(name for name in present if name not in skipped) if skipped else None
        return together

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Let every agent evaluate itself."""
        scores: dict[str, Scores] = {}
        for answer in self._ask("evaluate", samples=samples, views=views is not None):
            scores.update(answer["scores"])
            if views is not None:
                views.update(answer["views"])
        return scores

    def save(self) -> dict[str, bytes]:
        """The state of the hub once every agent has kept its own, or those of all peers."""
        return {name: state for answer in self._ask("save") for name, state in answer["saved"].items()}

    def load(self, saved: dict[str, bytes]) -> None:
        """Return the hub, or all peers, to what was saved; agents under a hub return when they join."""
        for name, runtime in self._runtimes.items():
            runtime.ask("load", saved={name: saved[name]})
        self._answers()

    def finish(self, *, complete: bool) -> None:
        """End the run everywhere; the agents here get their trained models."""
        if not self._members:
            load_nodes(self.description.agents, self.save())
        self._ask("finish", complete=complete)
        if not complete:
            for process in self._members.values():
                process.stop()
        end = time.monotonic() + _LAST_STATE
        while len(self._handed_over) + len(self._killed) < len(self._members) and time.monotonic() < end:
            self._look()
            time.sleep(0.01)
        for agent in self.description.agents:
            if agent.name in self._handed_over:
                load_nodes([agent], self._handed_over[agent.name])

    def close(self) -> None:
        """End all processes, and remove what was made for them."""
        for process in self._members.values():
            process.stop()
        self._closing.close()

    def _ask(self, do: str, **content: Any) -> list[dict[str, Any]]:
        for runtime in self._runtimes.values():
            runtime.ask(do, **content)
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        """The answers of all; who was stopped while waiting is told when everybody has answered."""
        answers, stopped = [], False
        for runtime in self._runtimes.values():
            try:
                answers.append(runtime.answer())
            except Stopped:
                stopped = True
        if stopped:
            raise Stopped
        return answers

    def _look(self) -> None:
        """Hear the agents under the hub: one that has failed ends the run; without one that was killed it goes on."""
        for name, process in self._members.items():
            if name not in self._handed_over and name not in self._killed and process.channel.poll(0):
                content = process.receive()
                if content is None:
                    self._killed.add(name)
                else:
                    self._handed_over[name] = content["saved"]


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody uses now."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in taken]
