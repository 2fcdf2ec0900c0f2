"""Agents pinned to worker processes, one thread each; the hub lives with the owner of the run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import warnings
from contextlib import suppress
from typing import Any

import torch

from codistill.base_node import Node
from codistill.devices import bound_memory, shares_of
from codistill.errors import RuntimeFault
from codistill.runtimes.cores import compute_in_the_background, own_core
from codistill.runtimes.description import RunDescription
from codistill.runtimes.idle import IdleStates, set_aside
from codistill.runtimes.links import SocketLinks
from codistill.runtimes.parent import Parent
from codistill.runtimes.placement import devices_of
from codistill.runtimes.runtime import one_thread, warm_up
from codistill.runtimes.several_hosts import SeveralHosts, places_of, serve_host
from codistill.runtimes.shared_memory import SharedMemory, shared_by

_BUFFER = 4 << 20  # bytes a link holds: the weights of several small models


def default_workers(agents: int) -> int:
    """One worker per core that this process may use, and no more than there are agents."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, agents))


class Processes(SeveralHosts):
    """Worker processes that are forked from this one, so they have the agents without any copying."""

    def __init__(self, description: RunDescription, workers: int | None = None, idle: IdleStates | None = None) -> None:
        if sys.platform == "win32" or "fork" not in multiprocessing.get_all_start_methods():
            raise RuntimeFault(
                "The runtime 'processes' needs a system that can fork.",
                sys.platform,
                'Use runtime="simulation": the result is the same to the bit.',
            )
        agents = description.agents
        count = min(workers or default_workers(len(agents)), len(agents))
        devices = devices_of(agents)
        parts = shares_of(devices, count)
        shares: list[list[Node]] = [[node for node in description.nodes if node not in agents]]
        shares.extend([agents[i] for i in part] for part in parts)
        used = [[devices[i] for i in part] for part in parts]
        places = places_of(description, shares)
        warm_up(agents)  # once here, instead of in every worker
        ends = _socket_pairs(count + 1)
        memory = shared_by(count + 1)
        self._processes = [
            _start(worker, shares[worker], description, ends, memory, places, used, idle)
            for worker in range(1, count + 1)
        ]
        if idle is not None:  # the workers have them
            set_aside(agents)
        _close_others(ends, 0)
        self._ends = SocketLinks(0, ends[0], places, memory=memory)
        super().__init__(description, self._ends, shares, idle)

    def close(self) -> None:
        """End the workers; one that does not listen is ended by force."""
        with suppress(RuntimeFault):  # a worker may have ended already; the others see the links close
            self._tell(do="stop")
        self._ends.flush_quietly()
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._ends.close()
        super().close()


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
    memory: list[SharedMemory],
    places: dict[str, int],
    used: list[list[str]],
    idle: IdleStates | None,
) -> multiprocessing.process.BaseProcess:
    parent = Parent.here()

    def work() -> None:
        parent.end_with()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner of the run, who tells us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # what was inherited is not ours to collect: keeps its pages shared
        torch.set_num_threads(1)
        compute_in_the_background()
        bound_memory(used[worker - 1], used)
        if idle is not None:
            set_aside([agent for agent in description.agents if places[agent.name] != worker])
        _close_others(ends, worker)
        links = SocketLinks(worker, ends[worker], places, memory=memory, waiting=own_core(worker, len(ends) - 1))
        with one_thread(), suppress(RuntimeFault):  # the owner of the run has ended
            serve_host(links, nodes, description, idle)

    process = multiprocessing.get_context("fork").Process(target=work, name=f"codistill-{worker}", daemon=True)
    with warnings.catch_warnings():
        # Python warns that a fork copies only one thread; the workers use none of the others.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process
