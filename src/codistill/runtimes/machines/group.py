"""The machines of a run after they have met: who has which nodes, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from codistill.agent import Agent
from codistill.base_node import Node
from codistill.errors import CodistillError, RuntimeFault
from codistill.runtimes.description import RunDescription
from codistill.runtimes.links import Links
from codistill.runtimes.machines.heartbeat import Heartbeat
from codistill.runtimes.machines.machine_options import Machines
from codistill.runtimes.machines.place import Place
from codistill.runtimes.machines.rendezvous import Met, meet
from codistill.runtimes.machines.shared_key import SharedKey
from codistill.runtimes.placement import devices_by_name, place_agents
from codistill.runtimes.runtime import ShouldStop, one_thread, warm_up
from codistill.runtimes.several_hosts import SeveralHosts, places_of, serve_host
from codistill.text import printable

_FAREWELL = 5.0  # seconds that rank 0 waits for the others to end


def shares_of(description: RunDescription, world: int) -> list[list[Node]]:
    """The nodes of each machine: agents in turn, the hub with rank 0."""
    agents = description.agents
    shares: list[list[Node]] = [[*agents[rank::world]] for rank in range(world)]
    shares[0] += [description.hub] if description.hub else []
    return shares


class Group:
    """All machines of a run, seen from one of them; left by rank 0, it ends the others."""

    def __init__(self, place: Place, description: RunDescription, options: Machines) -> None:
        self.place, self.complete = place, False
        self.devices: dict[str, str] = {}  # of all agents; rank 0 knows them when all have met
        self._description, self._options = description, options
        self._closing = ExitStack()

    def place_agents(self, device: str) -> None:
        """Choose a device for each agent of this machine or, if there are several processes on it, of this process."""
        place_agents(self._description, device, 1, self._own_agents(), self.place.local)

    def _own_agents(self) -> list[Agent]:
        return [node for node in self._share(self._description) if isinstance(node, Agent)]

    def _share(self, description: RunDescription) -> list[Node]:
        return shares_of(description, self.place.world)[self.place.rank]

    def meet(self, facts: Mapping[str, str], folder: Path | None, should_stop: ShouldStop) -> None:
        """Meet the other machines, which must have the same `facts`; the key may be in the `folder` of the run."""
        met, place = Met({}, {}, {}), self.place
        if place.world > 1:
            key = SharedKey(folder, place.meeting)
            if place.rank == 0:
                self._closing.enter_context(key.published())
            met = meet(place, key, facts, self._options.patience, should_stop)
        self._names = met.names
        heartbeat = Heartbeat(met.heartbeats, self._options.lease)
        self._closing.callback(heartbeat.close)
        places = places_of(self._description, shares_of(self._description, place.world))
        self.links = Links(place.rank, met.links, places, fault=self._lost, silent=heartbeat.silent)
        self._closing.callback(self.links.close)
        self._closing.callback(self.links.flush_quietly)
        self._tell_devices()

    def _tell_devices(self) -> None:
        """Tell rank 0 which devices the agents of this process have."""
        told = devices_by_name(self._own_agents())
        if self.place.rank > 0:
            self.links.command(0, devices=told)
            return
        for _ in range(1, self.place.world):
            told |= self.links.next_control()[1]["devices"]
        self.devices = {agent.name: told[agent.name] for agent in self._description.agents}

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        failed = None
        if kind is not None:
            failed = error.found if isinstance(error, CodistillError) else kind.__name__
        if self.place.rank == 0 and hasattr(self, "links"):
            tell(self.links, self.place.world, do="end", failed=failed, complete=self.complete)
            if failed is None:
                self.links.wait_for_ends(_FAREWELL)
        self._closing.close()

    def serve(self) -> bool:
        """On other ranks: do as rank 0 tells until the run ends; whether all rounds were done."""
        with one_thread():
            warm_up()
            try:
                while True:
                    _, command = self.links.next_control()
                    if command["do"] == "end":
                        break
                    self._serve_run(baseline=command["baseline"])
            except RuntimeFault:
                # Rank 0 may have said why it ends while this machine was waiting for another one.
                ends = [content for content in self.links.last_controls() if content["do"] == "end"]
                if not ends:
                    raise
                command = ends[0]
        if command["failed"] is not None:
            found = printable(str(command["failed"]), 500)
            raise RuntimeFault("The run has ended at rank 0.", found, "See the output of rank 0.")
        return bool(command["complete"])

    def _serve_run(self, *, baseline: bool) -> None:
        description = self._description.baseline() if baseline else self._description
        assert description is not None  # rank 0 has the same
        if not baseline:
            for agent in description.agents:
                agent.learned = True
        self.links.command(0, opened=True)
        serve_host(self.links, self._share(description), description)

    def _lost(self, rank: int, told_by: int) -> RuntimeFault:
        by = "" if told_by == self.place.rank else f", says {self._names[told_by]}"
        return RuntimeFault(
            "Every machine must stay until the run ends.",
            f"{self._names[rank]} ended, is frozen or cannot be reached{by}",
            "See its output. 'codistill resume' of the run's folder, or the same command again, goes on from the last "
            "checkpoint, with these machines or others.",
        )


class MachinesRuntime(SeveralHosts):
    """On rank 0: the run, or the baseline before it, on all machines."""

    def __init__(self, description: RunDescription, group: Group, *, baseline: bool) -> None:
        warm_up()
        super().__init__(description, group.links, shares_of(description, group.place.world))
        try:
            self._tell(do="open", baseline=baseline)
            self._answers()
        except BaseException:
            super().close()
            raise

    def close(self) -> None:
        """Let the other machines wait for what comes next."""
        tell(self._links, len(self._shares), do="stop")
        super().close()


def tell(links: Links, world: int, **content: object) -> None:
    """Tell all other machines that can still be told."""
    for rank in range(1, world):
        with suppress(RuntimeFault):
            links.command(rank, **content)
