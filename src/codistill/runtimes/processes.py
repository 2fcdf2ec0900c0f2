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
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch

from codistill.base_node import Node
from codistill.devices import bound_memory, shares_of
from codistill.errors import RuntimeFault
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score
from codistill.runtimes.feature_samples import features_of
from codistill.runtimes.links import Links
from codistill.runtimes.parent import Parent
from codistill.runtimes.placement import devices_of
from codistill.runtimes.remote_errors import describe_error
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, load_nodes, one_thread, save_nodes, warm_up

_BUFFER = 4 << 20  # bytes a link holds: the weights of several small models


def default_workers(agents: int) -> int:
    """One worker per core that this process may use, and no more than there are agents."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, agents))


class Processes(Runtime):
    """Worker processes that are forked from this one, so they have the agents without any copying."""

    def __init__(self, description: RunDescription, workers: int | None = None) -> None:
        if sys.platform == "win32" or "fork" not in multiprocessing.get_all_start_methods():
            raise RuntimeFault(
                "The runtime 'processes' needs a system that can fork.",
                sys.platform,
                'Use runtime="simulation": the result is the same to the bit.',
            )
        super().__init__(description)
        agents = description.agents
        count = min(workers or default_workers(len(agents)), len(agents))
        here: list[Node] = [node for node in description.nodes if node not in agents]
        devices = devices_of(agents)
        self._shares = shares_of(devices, count)
        shares: list[list[Node]] = [here]
        shares.extend([agents[i] for i in share] for share in self._shares)
        used = [[devices[i] for i in share] for share in self._shares]
        places = {node.name: host for host, share in enumerate(shares) for node in share}
        places = {node.name: places[node.name] for node in description.nodes}
        warm_up()  # once here, instead of in every worker
        ends = _socket_pairs(count + 1)
        self._processes = [
            _start(worker, shares[worker], description, ends, places, used) for worker in range(1, count + 1)
        ]
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
        self._tell(do="evaluate", samples=samples, views=views is not None)
        answers = self._answers()
        scores = {name: values for answer in answers for name, values in answer["scores"].items()}
        if views is not None:
            seen = {name: view for answer in answers for name, view in answer["views"].items()}
            views.update({agent.name: seen[agent.name] for agent in self.description.agents if agent.name in seen})
        return {agent.name: scores[agent.name] for agent in self.description.agents}

    def features(self) -> dict[str, np.ndarray]:
        """Let all workers compute those of their agents."""
        self._tell(do="features")
        found = {name: each for answer in self._answers() for name, each in answer["features"].items()}
        return {agent.name: found[agent.name] for agent in self.description.agents if agent.name in found}

    def save(self) -> dict[str, bytes]:
        """Collect what every worker has packed."""
        self._tell(do="save")
        saved = save_nodes(list(self._host.nodes.values()))
        for answer in self._answers():
            saved.update(answer["saved"])
        return {node.name: saved[node.name] for node in self.description.nodes}

    def load(self, saved: dict[str, bytes]) -> None:
        """Send every worker what is its agents'."""
        load_nodes(list(self._host.nodes.values()), saved)
        names = [agent.name for agent in self.description.agents]
        for worker, share in enumerate(self._shares, start=1):
            self._links.command(worker, do="load", saved={names[i]: saved[names[i]] for i in share})
        self._answers()

    def finish(self, *, complete: bool) -> None:
        """Bring what the agents have learnt into this process."""
        load_nodes(self.description.nodes, self.save())

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
    used: list[list[str]],
) -> multiprocessing.process.BaseProcess:
    parent = Parent.here()

    def work() -> None:
        parent.end_with()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner of the run, who tells us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # what was inherited is not ours to collect: keeps its pages shared
        torch.set_num_threads(1)
        bound_memory(used[worker - 1], used)
        _close_others(ends, worker)
        links = Links(worker, ends[worker], places)
        with one_thread():
            _serve(links, nodes, description)

    process = multiprocessing.get_context("fork").Process(target=work, name=f"codistill-{worker}", daemon=True)
    with warnings.catch_warnings():
        # Python warns that a fork copies only one thread; the workers use none of the others.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _serve(links: Links, nodes: list[Any], description: RunDescription) -> None:
    """A worker's work: do as told until told to stop, or until the owner of the run has ended."""
    host = description.host(nodes, links)
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
                    scores = {agent.name: score(description, agent, command["samples"], views) for agent in nodes}
                    links.command(0, scores=scores, views=views)
                case "features":
                    links.command(0, features=features_of(description, nodes))
                case "save":
                    links.command(0, saved=save_nodes(nodes))
                case "load":
                    load_nodes(nodes, command["saved"])
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
