"""Which protocols these agents can run, with equal local training, and why the others cannot."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.data.validation import validate_samples
from codistill.errors import CodistillError
from codistill.federation import Federation
from codistill.learners.ability import Ability
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS, Alone
from codistill.protocols.alone import baseline_of
from codistill.randomness import generator, seed_libraries
from codistill.topology import Topology
from codistill.wire.compression import Compression

ALONE = Alone.name
FITTED = "alone, fitted"  # the baseline of protocols that fit a model to the end in every round
_LOCAL_TRAINING = ("local_epochs", "local_steps", "batch_size")


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """The agents that ask for advice, untouched, and what they share."""

    agents: tuple[Agent, ...]
    classes: int
    rounds: int
    seed: int = 0
    public: np.ndarray | None = None
    topology: Topology | None = None  # None: that of each protocol
    compression: Compression | None = None

    @property
    def has_labels(self) -> bool:
        """Whether the targets are classes, so that accuracy is measured; otherwise errors are."""
        return self.agents[0].shard.labels is not None

    def limited_to(self, samples: int) -> Setting:
        """With at most so many samples of each agent, chosen by the seed; single samples of a class are kept."""
        return dataclasses.replace(self, agents=tuple(_limited(agent, samples, self) for agent in self.agents))

    def federation(self, agents: Sequence[Agent], protocol: Protocol, seed: int | None = None) -> Federation:
        """A federation of copies of the agents, checked."""
        for agent in agents:  # what they choose for themselves, as far as this protocol leaves it to them
            agent.choices = {key: agent.choices[key] for key in agent.choices if key in protocol.chosen_by_agents}
        return Federation(
            agents,
            protocol,
            public=self.public,
            seed=self.seed if seed is None else seed,
            classes=self.classes,
            topology=None if protocol.is_baseline else self.topology,
            compression=None if protocol.is_baseline else self.compression,
        )


@dataclass(frozen=True)
class Candidates:
    """Protocols that can run, by name; what the agents do alone; and the reasons why other protocols cannot run."""

    protocols: dict[str, Protocol]
    baselines: dict[str, Protocol]  # ALONE, and FITTED where that is other training
    left_out: dict[str, str]

    def baseline_of(self, name: str) -> str:
        """The baseline with as much training as a candidate."""
        baseline = baseline_of(self.protocols[name])
        return FITTED if FITTED in self.baselines and isinstance(baseline, Alone) and baseline.refit else ALONE


def find_candidates(setting: Setting, like: Protocol | None = None) -> Candidates:
    """Every protocol that these agents can run, trained locally as `like` says, the protocol of a recipe.

    That protocol itself is a candidate as it is set there; all others have the defaults of their other settings.
    """
    effort = _local_training(setting, like)
    steps = _steps(setting, effort)
    baselines: dict[str, Protocol] = {ALONE: _with_training(Alone, effort, steps)}
    if any(_trains_otherwise(agent, setting, effort) for agent in setting.agents):
        baselines[FITTED] = Alone(refit=True)
    found: dict[str, Protocol] = {}
    left_out: dict[str, str] = {}
    known: dict[str, Protocol | type[Protocol]] = {**PROTOCOLS}
    if like is not None and not like.is_baseline and not like.pools_data:
        known[like.name or type(like).__name__] = like
    for name, protocol in known.items():
        if protocol.is_baseline or protocol.pools_data:
            continue
        made = protocol if isinstance(protocol, Protocol) else _with_training(protocol, effort, steps)
        reason = _why_not(setting, made)
        if reason is None:
            found[name] = made
        else:
            left_out[name] = reason
    return Candidates(found, baselines, left_out)


def copy_of(agent: Agent, rows: Any = slice(None)) -> Agent:
    """An agent with some of the samples, which it prepares as in a run, and an untouched copy of the model."""
    twin = agent.twin()
    copied = Agent(
        agent.name, twin.learner, raw_samples(agent)[rows], targets_of(agent)[rows], prepare=agent._prepare,
        choices=agent.choices,
    )  # fmt: skip
    return copied.named_as(agent)


def raw_samples(agent: Agent) -> np.ndarray:
    """The samples of an agent before it prepares them: missing values are still missing."""
    return validate_samples(agent._data[0], targets_of(agent), agent.shard.classes, f"agent '{agent.name}'")[0]


def targets_of(agent: Agent) -> np.ndarray:
    """The labels of an agent's samples, or the real values to predict."""
    return agent.shard.targets if agent.shard.labels is None else agent.shard.labels


def _limited(agent: Agent, samples: int, setting: Setting) -> Agent:
    if len(agent.shard) <= samples:
        return agent
    rows = generator(setting.seed, agent.name, "advice").permutation(len(agent.shard))
    if agent.shard.labels is not None:
        _, first = np.unique(agent.shard.labels[rows], return_index=True)  # one of each class comes first
        rows = np.concatenate([rows[first], np.delete(rows, first)])
    made = copy_of(agent, np.sort(rows[:samples]))
    made.settle(setting.classes)
    return made


def _why_not(setting: Setting, protocol: Protocol) -> str | None:
    """The reason why these agents cannot run a protocol; None if they can."""
    missing = _what_is_missing(setting, protocol)
    if missing is not None:
        return missing
    try:
        # Some checks fit a small model, which draws from the libraries' generators.
        seed_libraries(setting.seed, "advice", protocol.name)
        setting.federation([copy_of(agent) for agent in setting.agents], protocol)
    except CodistillError as error:
        return error.must.rstrip(".") + f": {error.found}"
    return None


def _what_is_missing(setting: Setting, protocol: Protocol) -> str | None:
    if len(setting.agents) < 2:
        return "a single agent has nobody to learn from"
    if protocol.needs_public and setting.public is None:
        return "it needs unlabelled public data that all agents share"
    needs_hub = protocol.topology == "star" and not protocol.hub_is_optional
    if needs_hub and setting.topology is not None and not setting.topology.hub:
        return "it needs a hub, which the topology of the recipe does not have"
    lacking = [agent for agent in setting.agents if protocol.needs not in agent.learner.abilities]
    if not lacking:
        return None
    missing = protocol.needs & ~lacking[0].learner.abilities
    others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    model = lacking[0].learner.describe()
    return f"it needs the ability '{missing.words()}': lacking in {model} of '{lacking[0].name}'{others}"


def _local_training(setting: Setting, like: Protocol | None) -> dict[str, Any]:
    """How much agents train on their own data in a round: equal for all candidates, so that they can be compared."""
    if like is not None and hasattr(like, "local_steps"):
        return {name: getattr(like, name) for name in _LOCAL_TRAINING if hasattr(like, name)}
    # Protocols whose models travel fit a model to the end in every round: the others get as many epochs in all rounds.
    epochs = [int(getattr(agent.learner, "epochs", 1)) for agent in setting.agents if _has_gradients(agent)]
    return {"local_epochs": max(1, math.ceil(max(epochs, default=1) / setting.rounds)), "local_steps": None}


def _has_gradients(agent: Agent) -> bool:
    """Whether a model is trained step by step."""
    return Ability.GRADIENTS in agent.learner.abilities


def _trains_otherwise(agent: Agent, setting: Setting, effort: dict[str, Any]) -> bool:
    """Whether the rounds train a model with gradients for other than the epochs that a fit of it takes."""
    if not _has_gradients(agent):
        return False
    epochs = effort["local_epochs"] * setting.rounds if effort.get("local_steps") is None else None
    return bool(epochs != getattr(agent.learner, "epochs", None))


def _steps(setting: Setting, effort: dict[str, Any]) -> int:
    """The same training in gradient steps, for protocols that count only these: those of the average agent."""
    if effort.get("local_steps") is not None:
        return int(effort["local_steps"])
    sizes = [len(agent.shard) for agent in setting.agents]
    batches = math.ceil(sum(sizes) / len(sizes) / effort.get("batch_size", 32))
    return int(max(1, batches * effort.get("local_epochs", 1)))


def _with_training(protocol: type[Protocol], effort: dict[str, Any], steps: int) -> Protocol:
    names = {field.name for field in dataclasses.fields(protocol)}
    chosen = {name: value for name, value in effort.items() if name in names}
    if chosen.get("local_steps", 0) is None and typing.get_type_hints(protocol)["local_steps"] is int:
        chosen["local_steps"] = steps
    return protocol(**chosen)
