"""A run on several hosts: host 0 owns it and tells the others what to do; each of them does so for its own nodes."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.base_node import Node
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score
from codistill.runtimes.feature_samples import features_of
from codistill.runtimes.links import Links
from codistill.runtimes.remote_errors import describe_error
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, load_nodes, one_thread, save_nodes


def places_of(description: RunDescription, shares: Sequence[Sequence[Node]]) -> dict[str, int]:
    """The host of each node, in the order of the description's nodes."""
    hosts = {node.name: host for host, share in enumerate(shares) for node in share}
    return {node.name: hosts[node.name] for node in description.nodes}


class SeveralHosts(Runtime):
    """The owner's side: nodes of `shares[0]` are here, those of the others with their hosts."""

    def __init__(self, description: RunDescription, links: Links, shares: Sequence[Sequence[Node]]) -> None:
        super().__init__(description)
        self._links, self._shares = links, shares
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
        self._tell(do="evaluate", samples=samples, views=views is not None)
        answers = [_evaluated(self.description, self._agents, samples, views is not None), *self._answers()]
        scores = {name: values for answer in answers for name, values in answer["scores"].items()}
        if views is not None:
            seen = {name: view for answer in answers for name, view in answer["views"].items()}
            views.update({agent.name: seen[agent.name] for agent in self.description.agents if agent.name in seen})
        return {agent.name: scores[agent.name] for agent in self.description.agents}

    def features(self) -> dict[str, np.ndarray]:
        """Let all hosts compute those of their agents."""
        self._tell(do="features")
        found = features_of(self.description, self._agents)
        for answer in self._answers():
            found |= answer["features"]
        return {agent.name: found[agent.name] for agent in self.description.agents if agent.name in found}

    def save(self) -> dict[str, bytes]:
        """Collect what every host has packed."""
        self._tell(do="save")
        saved = save_nodes(self._shares[0])
        for answer in self._answers():
            saved.update(answer["saved"])
        return {node.name: saved[node.name] for node in self.description.nodes}

    def load(self, saved: dict[str, bytes]) -> None:
        """Send every host what is its nodes'."""
        load_nodes(self._shares[0], saved)
        for host, share in enumerate(self._shares[1:], 1):
            self._links.command(host, do="load", saved={node.name: saved[node.name] for node in share})
        self._answers()

    def finish(self, *, complete: bool) -> None:
        """Bring what the agents have learnt into this process."""
        load_nodes(self.description.nodes, self.save())

    def close(self) -> None:
        """Return to the threads there were before."""
        self._single.close()

    def _tell(self, **content: Any) -> None:
        self._links.command(*range(1, len(self._shares)), **content)

    def _answers(self) -> list[dict[str, Any]]:
        answers = dict(self._links.next_control() for _ in self._shares[1:])
        return [answers[host] for host in sorted(answers)]


def serve_host(links: Links, nodes: Sequence[Any], description: RunDescription) -> None:
    """The work of another host: do as told until told to stop; an error of a node is told to the owner."""
    host = description.host(list(nodes), links)
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
                    links.command(0, **_evaluated(description, nodes, command["samples"], command["views"]))
                case "features":
                    links.command(0, features=features_of(description, nodes))
                case "save":
                    links.command(0, saved=save_nodes(nodes))
                case "load":
                    load_nodes(nodes, command["saved"])
                    links.command(0, loaded=True)
            links.drain()
        except Exception as error:
            links.command(0, error=describe_error(error, traceback.format_exc()))
            links.drain()


def _evaluated(
    description: RunDescription, agents: Sequence[Agent], samples: int | None, with_views: bool
) -> dict[str, Any]:
    views: dict[str, View] | None = {} if with_views else None
    return {"scores": {agent.name: score(description, agent, samples, views) for agent in agents}, "views": views}
