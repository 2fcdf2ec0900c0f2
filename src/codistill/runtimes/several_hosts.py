"""A run on several hosts: host 0 owns it and tells the others what to do; each of them does so for its own nodes."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.base_node import Node
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score_some
from codistill.runtimes.feature_samples import features_of
from codistill.runtimes.idle import IdleStates, load_with, save_with
from codistill.runtimes.links import Links
from codistill.runtimes.remote_errors import describe_error
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, one_thread
from codistill.runtimes.stored_state import Saved, StoredState, packed


def places_of(description: RunDescription, shares: Sequence[Sequence[Node]]) -> dict[str, int]:
    """The host of each node, in the order of the description's nodes."""
    hosts = {node.name: host for host, share in enumerate(shares) for node in share}
    return {node.name: hosts[node.name] for node in description.nodes}


class SeveralHosts(Runtime):
    """The owner's side: nodes of `shares[0]` are here, those of the others with their hosts."""

    def __init__(
        self,
        description: RunDescription,
        links: Links,
        shares: Sequence[Sequence[Node]],
        idle: IdleStates | None = None,
    ) -> None:
        """`idle`: where the other hosts keep states of agents that are not at work; None: in memory."""
        super().__init__(description)
        self._links, self._shares, self._idle = links, shares, idle
        self._host = description.host(list(shares[0]), links)
        self._agents = [node for node in shares[0] if isinstance(node, Agent)]
        self._single = ExitStack()
        self._single.enter_context(one_thread())

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Let all hosts run their nodes through the phase, and this one its own."""
        self._tell(do="run", phase=phase, present=list(present))
        report = self._host.run(phase, present)
        self._links.flush()
        for answer in self._answers():
            report = report.add(Report(**answer["report"]))
        return report

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Let all hosts evaluate their agents."""
        return self.evaluate_some(self.description.names, samples, views)

    def evaluate_some(
        self, names: Collection[str], samples: int | None, views: dict[str, View] | None = None
    ) -> dict[str, Scores]:
        """Let all hosts evaluate those of their agents that are named."""
        wanted = {"names": list(names), "samples": samples, "views": views is not None}
        self._tell(do="evaluate", **wanted)
        answers = [_evaluated(self.description, self._agents, wanted, None), *self._answers()]
        scores = {name: values for answer in answers for name, values in answer["scores"].items()}
        if views is not None:
            seen = {name: view for answer in answers for name, view in answer["views"].items()}
            views.update({agent.name: seen[agent.name] for agent in self.description.agents if agent.name in seen})
        return {agent.name: scores[agent.name] for agent in self.description.agents if agent.name in scores}

    def features(self) -> dict[str, np.ndarray]:
        """Let all hosts compute those of their agents."""
        self._tell(do="features")
        found = features_of(self.description, self._agents)
        for answer in self._answers():
            found |= answer["features"]
        return {agent.name: found[agent.name] for agent in self.description.agents if agent.name in found}

    def save(self) -> dict[str, bytes | StoredState]:
        """Collect what every host has packed, or in which files it is."""
        self._tell(do="save")
        saved = save_with(None, self._shares[0])
        for answer in self._answers():
            saved.update(_received(answer["saved"], self._idle))
        return {node.name: saved[node.name] for node in self.description.nodes}

    def load(self, saved: Saved) -> None:
        """Send every host what is its nodes'."""
        load_with(None, self._shares[0], saved)
        for host, share in enumerate(self._shares[1:], 1):
            self._links.command(host, do="load", saved=_sendable({node.name: saved[node.name] for node in share}))
        self._answers()

    def load_saved(self, saved: Saved) -> None:
        """The same: states in files stay there, if agents that are not at work are kept on disk."""
        if self._idle is None:
            super().load_saved(saved)
        else:
            self.load(saved)

    def finish(self, *, complete: bool) -> None:
        """Bring what the agents have learnt into this process."""
        load_with(self._idle, self.description.nodes, self.save())

    def close(self) -> None:
        """Return to the threads there were before."""
        self._single.close()

    def _tell(self, **content: Any) -> None:
        self._links.command(*range(1, len(self._shares)), **content)

    def _answers(self) -> list[dict[str, Any]]:
        answers = dict(self._links.next_control() for _ in self._shares[1:])
        return [answers[host] for host in sorted(answers)]


def serve_host(links: Links, nodes: Sequence[Any], description: RunDescription, idle: IdleStates | None = None) -> None:
    """The work of another host: do as told until told to stop; an error of a node is told to the owner."""
    host = description.host(list(nodes), links)
    host.idle = idle
    while True:
        _, command = links.next_control()
        if command["do"] == "stop":
            return
        try:
            match command["do"]:
                case "run":
                    report = host.run(command["phase"], tuple(command["present"]))
                    links.command(0, report=vars(report))
                    links.flush()
                case "evaluate":
                    links.command(0, **_evaluated(description, nodes, command, idle))
                case "features":
                    links.command(0, features=features_of(description, nodes, idle))
                case "save":
                    links.command(0, saved=_sendable(save_with(idle, nodes)))
                case "unsaved":
                    links.command(0, unsaved=_sizes_of(idle))
                case "fetch":
                    links.command(0, fetched=_fetched(idle, command["names"]))
                case "keep":
                    _keep(idle, nodes, command["states"])
                    links.command(0, kept=True)
                case "load":
                    load_with(idle, nodes, _received(command["saved"], idle))
                    links.command(0, loaded=True)
            links.drain()
        except Exception as error:
            links.command(0, error=describe_error(error, traceback.format_exc()))
            links.drain()


def _evaluated(
    description: RunDescription, agents: Sequence[Agent], wanted: Mapping[str, Any], idle: IdleStates | None
) -> dict[str, Any]:
    views: dict[str, View] | None = {} if wanted["views"] else None
    scores = score_some(description, agents, wanted["names"], wanted["samples"], views, idle)
    return {"scores": scores, "views": views}


# --- states on a disk that the owner does not see -------------------------------------------------


def _sizes_of(idle: IdleStates | None) -> dict[str, int]:
    """States that were written since they were fetched, by their size in bytes."""
    return {} if idle is None else {name: idle.stored[name].size for name in sorted(idle.unsaved)}


def _fetched(idle: IdleStates | None, names: Sequence[str]) -> dict[str, bytes]:
    assert idle is not None
    idle.unsaved -= set(names)
    return {name: packed(idle.stored[name]) for name in names}


def _keep(idle: IdleStates | None, nodes: Sequence[Any], states: Mapping[str, bytes]) -> None:
    assert idle is not None
    for node in nodes:
        if node.name in states:
            idle.take(node, states[node.name])


def _sendable(saved: Saved) -> dict[str, Any]:
    """States as a link carries them: bytes, or a file's path and size."""
    return {name: state if isinstance(state, bytes) else (str(state.path), state.size) for name, state in saved.items()}


def _received(sent: dict[str, Any], idle: IdleStates | None) -> dict[str, bytes | StoredState]:
    if idle is None:  # then no host may name a file of another one
        return sent
    return {
        name: state if isinstance(state, bytes) else StoredState(Path(state[0]), state[1])
        for name, state in sent.items()
    }
