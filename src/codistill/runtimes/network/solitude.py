"""The yardstick: how far an agent gets by itself, measured where its data are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from codistill.agent import Agent
from codistill.protocols.alone import baseline_of
from codistill.runtimes.host import BEGIN
from codistill.runtimes.runtime import Scores, Stage, score
from codistill.topology import Topology


def train_alone(stage: Stage, agent: Agent, rounds: int, stopping: Callable[[], bool] = lambda: False) -> Scores:
    """Train a twin of the agent for as many rounds, without any message; its scores at the end."""
    protocol = baseline_of(stage.protocol)
    if protocol is None:
        return {}
    twin = agent.twin()
    twin.settle(agent.classes)
    twin.seed, twin.classes, twin.topology = agent.seed, agent.classes, Topology.silent(agent.roster)
    twin.shard.seed = agent.shard.seed
    alone = replace(stage, nodes=[twin], protocol=protocol, roster=(), watchers=(), compression=None)
    host = alone.host([twin])
    host.run(BEGIN, agent.roster)
    for t in range(rounds):
        if stopping():
            return {}
        host.run(t, agent.roster)
    return score(alone, twin, None)
