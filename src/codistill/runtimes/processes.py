"""Agents pinned to worker processes, one thread each; the hub lives with the owner of the run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from codistill.agent import Agent
from codistill.base_node import Node
from codistill.errors import RuntimeFault
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score_some
from codistill.runtimes.feature_samples import features_of
from codistill.runtimes.idle import IdleStates, load_with, return_memory, save_with
from codistill.runtimes.links import Links
from codistill.runtimes.parent import Parent
from codistill.runtimes.remote_errors import describe_error
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, one_thread, warm_up
from codistill.runtimes.stored_state import Saved, StoredState

_BUFFER = 4 << 20  # bytes a link holds: the weights of several small models


def default_workers(agents: int) -> int:
    """One worker per core that this process may use, and no more than there are agents."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, agents))


class Processes(Runtime):
    """Worker processes that are forked from this one, so they have the agents without any copying."""

    def __init__(self, description: RunDescription, workers: int | None = None, idle: IdleStates | None = None) -> None:
        if sys.platform == "win32" or "fork" not in multiprocessing.get_all_start_methods():
            raise RuntimeFault(
                "The runtime 'processes' needs a system that can fork.",
                sys.platform,
                'Use runtime="simulation": the result is the same to the bit.',
            )
        super().__init__(description)
        self._idle = idle
        agents = description.agents
        count = min(workers or default_workers(len(agents)), len(agents))
        here: list[Node] = [description.hub] if description.hub else []
        shares: list[list[Node]] = [here]
        shares.extend([*agents[worker::count]] for worker in range(count))
        places = {node.name: host for host, share in enumerate(shares) for node in share}
        places = {node.name: places[node.name] for node in description.nodes}
        warm_up()  # once here, instead of in every worker
        ends = _socket_pairs(count + 1)
        self._processes = [
            _start(worker, shares[worker], description, ends, places, idle) for worker in range(1, count + 1)
        ]
        if idle is not None:  # the workers have them
            _set_aside(agents)
        _close_others(ends, 0)
        self._links = Links(0, ends[0], places)
        self._host = description.host(here, self._links)
        self._single = ExitStack()
        self._single.enter_context(one_thread())

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Let all workers run their agents through the phase, and the hub here."""
        self._tell(do="run", phase=phase, present=list(present))
        report = self._host.run(phase, present)
        self._links.flush()
        for answer in self._answers():
            report = report.add(Report(**answer["report"]))
        return report

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Let all workers evaluate their agents."""
        return self.evaluate_some(self.description.names, samples, views)

    def evaluate_some(
        self, names: Collection[str], samples: int | None, views: dict[str, View] | None = None
    ) -> dict[str, Scores]:
        """Let all workers evaluate those of their agents that are named."""
        self._tell(do="evaluate", names=list(names), samples=samples, views=views is not None)
        answers = self._answers()
        scores = {name: values for answer in answers for name, values in answer["scores"].items()}
        if views is not None:
            seen = {name: view for answer in answers for name, view in answer["views"].items()}
            views.update({agent.name: seen[agent.name] for agent in self.description.agents if agent.name in seen})
        return {agent.name: scores[agent.name] for agent in self.description.agents if agent.name in scores}

    def features(self) -> dict[str, np.ndarray]:
        """Let all workers compute those of their agents."""
        self._tell(do="features")
        found = {name: each for answer in self._answers() for name, each in answer["features"].items()}
        return {agent.name: found[agent.name] for agent in self.description.agents if agent.name in found}

    def save(self) -> dict[str, bytes | StoredState]:
        """Collect what every worker has packed, or in which files it is."""
        self._tell(do="save")
        saved = save_with(None, list(self._host.nodes.values()))
        for answer in self._answers():
            saved.update(_received(answer["saved"]))
        return {node.name: saved[node.name] for node in self.description.nodes}

    def load(self, saved: Saved) -> None:
        """Send every worker what is its agents'."""
        load_with(None, list(self._host.nodes.values()), saved)
        for worker in range(1, len(self._processes) + 1):
            mine = {
                agent.name: saved[agent.name] for agent in self.description.agents[worker - 1 :: len(self._processes)]
            }
            self._links.command(worker, do="load", saved=_sendable(mine))
        self._answers()

    def load_saved(self, saved: Saved) -> None:
        """The same: states in files stay there, if agents that are not at work are kept on disk."""
        self.load(saved)

    def finish(self, *, complete: bool) -> None:
        """Bring what the agents have learnt into this process."""
        load_with(self._idle, self.description.nodes, self.save())

    def close(self) -> None:
        """End the workers; one that does not listen is ended by force."""
        with suppress(RuntimeFault):  # a worker may have ended already; the others see the links close
            self._tell(do="stop")
        self._links.flush_quietly()
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._links.close()
        self._single.close()

    def _tell(self, **content: Any) -> None:
        self._links.command(*range(1, len(self._processes) + 1), **content)

    def _answers(self) -> list[dict[str, Any]]:
        answers = dict(self._links.next_control() for _ in self._processes)
        return [answers[worker] for worker in sorted(answers)]


def _socket_pairs(hosts: int) -> list[dict[int, socket.socket]]:
    """A socket for every pair of hosts: ends[a][b] is a's end of the link to b."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(hosts)]
    for a in range(hosts):
        for b in range(a + 1, hosts):
            ends[a][b], ends[b][a] = socket.socketpair()
            for end in (ends[a][b], ends[b][a]):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return ends


def _close_others(ends: list[dict[int, socket.socket]], me: int) -> None:
    """Close the ends of other hosts, so that a link is seen to break when its owner dies."""
    for host, others in enumerate(ends):
        if host != me:
            for end in others.values():
                end.close()


def _start(
    worker: int,
    nodes: list[Any],
    description: RunDescription,
    ends: list[dict[int, socket.socket]],
    places: dict[str, int],
    idle: IdleStates | None,
) -> multiprocessing.process.BaseProcess:
    parent = Parent.here()

    def work() -> None:
        parent.end_with()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner of the run, who tells us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # what was inherited is not ours to collect: keeps its pages shared
        torch.set_num_threads(1)
        if idle is not None:
            _set_aside([agent for agent in description.agents if places[agent.name] != worker])
        _close_others(ends, worker)
        links = Links(worker, ends[worker], places)
        with one_thread():
            _serve(links, nodes, description, idle)

    process = multiprocessing.get_context("fork").Process(target=work, name=f"codistill-{worker}", daemon=True)
    with warnings.catch_warnings():
        # Python warns that a fork copies only one thread; the workers use none of the others.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _set_aside(agents: Sequence[Agent]) -> None:
    """Free the memory of agents that another process computes with."""
    for agent in agents:
        agent.set_aside()
    return_memory()


def _sendable(saved: Saved) -> dict[str, Any]:
    """States as a link carries them: bytes, or a file's path and size."""
    return {name: state if isinstance(state, bytes) else (str(state.path), state.size) for name, state in saved.items()}


def _received(sent: dict[str, Any]) -> dict[str, bytes | StoredState]:
    return {
        name: state if isinstance(state, bytes) else StoredState(Path(state[0]), state[1])
        for name, state in sent.items()
    }


def _serve(links: Links, nodes: list[Any], description: RunDescription, idle: IdleStates | None) -> None:
    """A worker's work: do as told until told to stop, or until the owner of the run has ended."""
    host = description.host(nodes, links)
    host.idle = idle
    while True:
        try:
            _, command = links.next_control()
        except RuntimeFault:
            return
        try:
            match command["do"]:
                case "run":
                    report = host.run(command["phase"], tuple(command["present"]))
                    links.command(0, report=vars(report))
                    links.flush()
                case "evaluate":
                    views: dict[str, View] | None = {} if command["views"] else None
                    names, samples = command["names"], command["samples"]
                    scores = score_some(description, nodes, names, samples, views, idle)
                    links.command(0, scores=scores, views=views)
                case "features":
                    links.command(0, features=features_of(description, nodes, idle))
                case "save":
                    links.command(0, saved=_sendable(save_with(idle, nodes)))
                case "load":
                    load_with(idle, nodes, _received(command["saved"]))
                    links.command(0, loaded=True)
                case "stop":
                    return
            links.drain()
        except Exception as error:
            try:
                links.command(0, error=describe_error(error, traceback.format_exc()))
                links.drain()
            except RuntimeFault:
                return  # the owner of the run has ended
