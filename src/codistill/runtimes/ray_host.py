"""A host of a run on Ray: an actor that makes its agents, or is sent them, and does as the owner of the run says."""

from __future__ import annotations

import copy
import os
import platform
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import method
from ray.exceptions import RaySystemError

from codistill.agent import Agent
from codistill.errors import RecipeError
from codistill.learners.ability import Ability
from codistill.protocol import Protocol
from codistill.runtimes.agent_facts import facts_of_agents
from codistill.runtimes.description import RunDescription
from codistill.runtimes.host import BEGIN
from codistill.runtimes.idle import IdleStates, remove_left_behind, return_memory
from codistill.runtimes.placement import devices_by_name, place_agents
from codistill.runtimes.ray_cluster import GPU
from codistill.runtimes.ray_links import HostLinks, as_arrays, pack_batch, unpack_batch
from codistill.runtimes.remote_errors import describe_error
from codistill.runtimes.runtime import one_thread, warm_up
from codistill.runtimes.several_hosts import serve_host
from codistill.version import versions


class HostProcess:
    """An actor: some agents of a run, and the mail that reaches it while it computes."""

    def __init__(self) -> None:
        self._inbox: Any = queue.SimpleQueue()
        self._outbox: Any = queue.SimpleQueue()
        self._idle: IdleStates | None = None  # of the agents of the run, or of the baseline
        self._resting: IdleStates | None = None  # of the agents of the run, which have rested since they came
        self._removing = threading.Lock()
        self._run: RunDescription | None = None  # without agents
        self._agents: dict[str, Agent] = {}  # those that were sent

    @method(concurrency_group="deliver")
    def deliver(self, head: bytes, *apart: Any) -> None:
        """A batch of frames has arrived: in bytes, with large payloads in a list, or each as an argument."""
        self._take(head, apart)

    def _take(self, head: bytes, apart: Sequence[Any]) -> None:
        payloads = [part for each in apart for part in (each if isinstance(each, list) else [each])]
        self._inbox.put(unpack_batch(head, payloads))

    @method(concurrency_group="swap")
    def swap(self, head: bytes = b"", *apart: Any) -> Any:
        """A batch of the owner has arrived, or none; batches for the owner, when there are some."""
        if head:
            self._take(head, apart)
        batches = [self._outbox.get()]
        with suppress(queue.Empty):
            while True:
                batches.append(self._outbox.get_nowait())
        packed = [pack_batch(me, number, frames)[:2] for me, number, frames in batches]
        if len(packed) == 1 and not packed[0][1]:
            return packed[0][0]
        return [(head, as_arrays(large)) for head, large in packed]

    def _shared(self, given: Given) -> RunDescription:
        """What all agents share, once for all of them."""
        if self._run is None:
            self._run = given.shared()
        return self._run

    def take_agents(self, given: Given, sent: Sequence[Any]) -> dict[str, Any]:
        """Some agents that the owner has made, as references; the error, if there is one.

        Where states are to be on disk they are so at once: the host never has all of them in memory.
        """
        try:
            (agents,) = copy.deepcopy(_fetched(sent))  # as the run's other parts: see there
            replace(self._shared(given), agents=tuple(agents)).introduce()
            if given.rests and self._resting is None:
                self._resting = _states_of(given.names)
            for agent in agents:
                self._agents[agent.name] = agent
                if self._resting is not None:
                    self._resting.rest(agent, BEGIN)
            return_memory()
            return {}
        except Exception as error:
            return {"error": describe_error(error, "")}

    def open(self, me: int, actors: Sequence[Any], places: Mapping[str, int], given: Given) -> dict[str, Any]:
        """Make the agents that were not sent; what the owner compares, or the error."""
        if not ray.get_runtime_context().get_accelerator_ids().get(GPU):
            # Ray leaves all GPUs of its node visible to an actor that has asked for none.
            os.environ |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
        try:
            run = self._shared(given)
            if given.build is None:
                self._description = replace(run, agents=tuple(self._agents[name] for name in given.names))
            else:
                self._description = given.built(run)
            place_agents(self._description, given.device, 1, given.sharing)
        except Exception as error:
            return {"error": describe_error(error, "")}
        self._links = HostLinks(me, actors, places, self._inbox, self._outbox)
        agents = self._description.agents
        warm_up(agents)
        return {
            "versions": versions(),
            "facts": facts_of_agents(agents) if given.build is not None else {},
            "devices": devices_by_name(agents),
            "node": f"{platform.node()} ({ray.util.get_node_ip_address()})",  # type: ignore[no-untyped-call]
            "node_id": ray.get_runtime_context().get_node_id(),
        }

    def serve(self, *, baseline: bool, on_disk: bool) -> None:
        """Do as the owner says until it says stop."""
        description = self._description.baseline() if baseline else self._description
        assert description is not None  # the owner has the same
        for agent in description.agents if not baseline else ():
            agent.learned = True
        if on_disk:
            resting = None if baseline else self._resting
            self._idle = resting or _states_of([agent.name for agent in description.agents])
            for agent in description.agents:
                if agent.recall is None:  # its state is in memory
                    self._idle.rest(agent, BEGIN)
        with one_thread():
            serve_host(self._links, description.agents, description, self._idle)
        self._remove_states()
        self._idle = None

    @method(concurrency_group="deliver")
    def end(self) -> None:
        """Remove what is on the node's disk, while the agents may be at work; it is removed when this returns."""
        self._remove_states()
        if self._resting is not None:
            self._resting.close()

    def _remove_states(self) -> None:
        with self._removing:  # else the owner ends this process while another thread still removes thousands of files
            if self._idle is not None:
                self._idle.close()


def _states_of(names: Sequence[str]) -> IdleStates:
    """Where states of agents are on this node, if not in memory."""
    remove_left_behind()
    return IdleStates(None, names)


def _fetched(references: Sequence[Any]) -> list[Any]:
    """What is in the object store; an error that names a module which is not on this node."""
    try:
        return list(ray.get(references))
    except RaySystemError as error:
        missing = re.search(r"ModuleNotFoundError: No module named '([^']+)'", str(error))
        if missing is None:
            raise
        raise RecipeError(
            "What agents and protocols are made of must be importable on every node.",
            f"no module '{missing[1]}' on {platform.node()}",
            "Install it there; or keep it in the folder of the script, on a file system that all nodes see; or call "
            'ray.init(runtime_env={"working_dir": "."}) before the run, which copies this folder to the nodes.',
        ) from None


@dataclass(frozen=True)
class Given:
    """What a host makes its agents from. Parts in the object store are fetched where they are used, once per node."""

    run: Any  # a reference to a description without agents and shared data
    names: tuple[str, ...]  # of its agents, which are sent beside this, or built in place
    public: Any
    test: Any
    build: Callable[[Sequence[str]], tuple[Protocol, list[Agent]]] | None
    device: str
    sharing: int  # hosts that share one GPU
    rests: bool  # whether agents that were sent have their states on disk from the beginning

    def shared(self) -> RunDescription:
        """The run without its agents."""
        run, public, test = _fetched([self.run, self.public, self.test])
        # Arrays in the object store cannot be written to, and a model or a protocol may well write to its own.
        without: RunDescription = replace(copy.deepcopy(run), public=public, test=test)
        return without

    def built(self, run: RunDescription) -> RunDescription:
        """The run with agents that are built in place."""
        assert self.build is not None
        protocol, agents = self.build(self.names)
        run = replace(run, protocol=protocol, agents=tuple(agents)).introduce()
        for agent in agents:
            # As where the recipe was read: a pass of samples shows a model what they look like.
            agent.learner.check(agent.shard.x, agent.shard.targets, agent.name)
            if Ability.PORTABLE in run.protocol.needs:
                agent.learner.check_travel(agent.shard.x, agent.name)
        return run
