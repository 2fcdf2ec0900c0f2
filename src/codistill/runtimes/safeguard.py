"""The safeguard: an agent's answer is formed from its own model and what it was taught, by its own held-out samples.

It stands around every protocol. Before the first round a part of the agent's shard is held out. A copy of its model
is trained alone, on all of its samples, exactly as the baseline. After each of its rounds the agent weighs both models
on the held-out samples. Nothing of this is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.data.shard import Shard
from codistill.data.split import hold_out
from codistill.errors import DataError, RecipeError
from codistill.faults import Faults
from codistill.protocol import Protocol
from codistill.randomness import derive, seed_libraries
from codistill.runtimes.answer_weight import (
    adapted,
    class_factors,
    log_losses,
    mixture,
    posterior_mean,
    squared_losses,
    unseen_threshold,
    with_unseen,
)
from codistill.runtimes.host import BEGIN, Host
from codistill.settings import Settings, check_settings, setting
from codistill.topology import Topology

_NEGLIGIBLE = 0.005  # a weight below is 0: the agent answers with its own model, to the bit


@dataclass(frozen=True, kw_only=True)
class Safeguard(Settings):
    """[safeguard]: how an agent weighs what it was taught against its own model."""

    share: float = setting(
        0.25, "share of an agent's samples that is held out from the protocol, to judge by", above=0, at_most=0.5
    )
    shrinkage: float = setting(
        1.0,
        "how strongly few held-out samples draw the answer to the agent's own model; 1: all weights above 0 alike",
        at_least=1,
        at_most=100,
    )
    unseen: float = setting(
        0.01,
        "share of its held-out samples that an agent may lose for knowledge of classes it does not hold; 0: none",
        at_least=0,
        at_most=1,
    )

    def __post_init__(self) -> None:
        check_settings(self, "safeguard")


def as_safeguard(given: Any) -> Safeguard | None:
    """What a user may write: true, false, or the settings."""
    if given is None or isinstance(given, Safeguard):
        return given
    if isinstance(given, bool):
        return Safeguard() if given else None
    raise RecipeError("safeguard must be true, false, or its settings.", f"{given!r}"[:80], "Write safeguard = true.")


class SafeguardedAnswer:
    """An agent's answer from its own model and what it was taught: all that is needed of a safeguard to predict."""

    def __init__(
        self, own: Agent, weight: float, threshold: float | None, seen: np.ndarray, factors: np.ndarray | None = None
    ) -> None:
        self.own, self.weight, self.seen = own, weight, seen
        self.factors = factors  # of the classes, by which taught answers are adapted; None: they are as they are
        self.threshold = threshold  # of a taught answer that names a class which the agent does not hold

    @property
    def ready(self) -> bool:
        """Whether there is an own model to answer with."""
        return True

    def answer(self, taught: np.ndarray, alone: Protocol, x: np.ndarray) -> np.ndarray:
        """What the agent answers, from what the protocol answers."""
        with self.own.computing():
            own = alone.predict(self.own, x)
        answers = mixture(own, adapted(taught, self.factors), self.weight)
        return with_unseen(answers, taught, self.seen, self.threshold)


class AgentSafeguard(SafeguardedAnswer):
    """The safeguard of one agent: its own model, its held-out samples, and the weight that they chose."""

    def __init__(self, settings: Safeguard, agent: Agent) -> None:
        whole = agent.shard
        kept, held = _split(whole, settings.share, agent)
        self.settings = settings
        self.held = whole.part(held)
        agent.shard = whole.part(kept)
        seen = np.ones(whole.classes, bool) if whole.labels is None else _counts(whole) > 0
        # Two models that learn alone: one from all samples, and one to judge by, from those that are not held out.
        super().__init__(_copy(agent, whole), 0.0, None, seen)
        self._judged = _copy(agent, agent.shard)
        self._phase = BEGIN  # the next one in which they learn

    @property
    def ready(self) -> bool:
        """Whether there is an own model to answer with."""
        return self._phase > BEGIN

    def join(self, samples: int) -> None:
        """Tell the models how many private samples the federation holds, as the agent's learner is told."""
        self.own.learner.join(samples)
        self._judged.learner.join(samples)

    @property
    def learners(self) -> tuple[Any, Any]:
        """The two models that learn alone."""
        return self.own.learner, self._judged.learner

    def place(self) -> None:
        """Move the models to their device, as the agent's own."""
        self.own.place()
        self._judged.place()

    def end_round(self, agent: Agent, t: int, protocol: Protocol, alone: Protocol) -> None:
        """Let the own model catch up with round t, as the baseline does; then choose the weight anew."""
        names = (agent.name,)
        hosts = [Host([model], alone, Faults((), names, agent.seed)) for model in (self.own, self._judged)]
        for phase in range(self._phase, t + 1):
            for host in hosts:
                host.run(phase, names)
        self._phase = t + 1
        if agent.learner.ready and len(self.held):
            own, taught = self._predict(alone, self._judged, self.held.x), self._predict(protocol, agent, self.held.x)
            self._weigh(own, taught, agent.shard)

    def _weigh(self, own: np.ndarray, taught: np.ndarray, shard: Shard) -> None:
        if self.held.labels is None:
            losses = squared_losses(own, taught, self.held.targets)
        else:
            self.factors = class_factors(taught, _counts(shard) / len(shard))
            losses = log_losses(own, adapted(taught, self.factors), self.held.labels)
            self.threshold = unseen_threshold(taught, self.seen, self.settings.unseen)
        weight = posterior_mean(losses, self.settings.shrinkage)
        self.weight = weight if weight >= _NEGLIGIBLE else 0.0

    def _predict(self, protocol: Protocol, agent: Agent, x: np.ndarray) -> np.ndarray:
        seed_libraries(agent.seed, agent.name, "safeguard")
        with agent.computing():
            return protocol.predict(agent, x)

    def dump(self) -> dict[str, Any]:
        """What lives across rounds."""
        return {
            "phase": self._phase, "weight": self.weight, "threshold": self.threshold, "factors": self.factors,
            "own": self.own.dump(), "judged": self._judged.dump(),
        }  # fmt: skip

    def set_aside(self) -> None:
        """Free the memory of its models and their states."""
        self.own.set_aside()
        self._judged.set_aside()
        self.held.set_aside()

    def resume(self, saved: dict[str, Any]) -> None:
        """Return to what was dumped."""
        self._phase, self.weight, self.threshold = saved["phase"], saved["weight"], saved["threshold"]
        self.factors = saved["factors"]
        self.own.resume(saved["own"])
        self._judged.resume(saved["judged"])


def _split(shard: Shard, share: float, agent: Agent) -> tuple[np.ndarray, np.ndarray]:
    """Rows for the protocol, and rows to judge by: of every class in proportion, and at least one for the protocol."""
    strata = np.zeros(len(shard), dtype=int) if shard.labels is None else shard.labels
    try:
        return hold_out(strata, share, derive(agent.seed, agent.name, "safeguard") >> 1, agent.name)
    except DataError:  # too few samples to hold any out
        return np.arange(len(shard)), np.arange(0)


def _counts(shard: Shard) -> np.ndarray:
    """How many samples there are of each class."""
    assert shard.labels is not None
    return np.bincount(shard.labels, minlength=shard.classes)


def _copy(agent: Agent, shard: Shard) -> Agent:
    """An agent for training alone, with an untouched copy of the model."""
    twin = agent.twin()
    twin.seed, twin.classes, twin.topology = agent.seed, agent.classes, Topology.silent((agent.name,))
    twin.shard, twin.class_mix = shard, None
    return twin
