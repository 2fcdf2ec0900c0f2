"""What must hold before anything runs: each check raises an error that names a way out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.data.labels import LabelEncoding, agree_on_labels, has_several_labels, several_labels
from codistill.data.shard import PublicData
from codistill.data.validation import check_shape, plain_samples
from codistill.errors import DataError, LearnerError, RecipeError, nearest
from codistill.learners.ability import Ability
from codistill.learners.plain import PlainLearner
from codistill.learners.torch import TorchLearner
from codistill.protocol import Protocol
from codistill.topology import Topology
from codistill.wire.compression import Compression


def as_agents(agents: Sequence[Agent]) -> list[Agent]:
    """A list of agents, each with a name and a model of its own."""
    if isinstance(agents, Agent):
        raise RecipeError("Agents must be given as a list.", f"the agent '{agents.name}' alone", "Write [agent].")
    try:
        given = list(agents)
    except TypeError:
        raise RecipeError("Agents must be given as a list.", _shown(agents), "Write [agent, ...].") from None
    _check_agents(given)
    return given


def _check_agents(agents: list[Agent]) -> None:
    if not agents:
        raise RecipeError("A federation must have at least one agent.", "none", "Add agents.")
    for agent in agents:
        if not isinstance(agent, Agent):
            raise RecipeError(
                "Every agent must be an Agent.", _shown(agent), "Write codistill.Agent(name, model, x, y)."
            )
    names = [agent.name for agent in agents]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RecipeError("Every agent must have a name of its own.", f"'{twice[0]}' more than once", "Rename one.")
    owners: dict[int, str] = {}
    for agent in agents:
        for part in (agent.learner, _wrapped(agent.learner)):
            other = owners.setdefault(id(part), agent.name)
            if other != agent.name:
                raise LearnerError(
                    "Every agent must have a model of its own.",
                    f"agents '{other}' and '{agent.name}' share one",
                    "Make one for each, or give each a copy.deepcopy(model).",
                )


def _shown(given: Any) -> str:
    """Whatever was given, in one line."""
    line = " ".join(repr(given).split())
    return line if len(line) <= 80 else f"{line[:76]} ..."


def _wrapped(learner: Any) -> Any:
    from codistill.learners.sklearn import SklearnLearner

    match learner:
        case TorchLearner():
            return learner.module
        case SklearnLearner():
            return learner.estimator
        case PlainLearner():
            return learner.model
    return learner


def as_protocol(given: Any) -> Protocol:
    """A protocol with its settings."""
    if not isinstance(given, Protocol):
        raise RecipeError(
            "The protocol must be an instance of a Protocol.", _shown(given), "Write for example codistill.FedMD()."
        )
    return given


def as_names(given: Any) -> tuple[str, ...]:
    """Names of agents, each once."""
    if isinstance(given, str) or not all(isinstance(name, str) for name in given) or len(set(given)) < len(given):
        raise RecipeError("Agents must be named in a list, each once.", _shown(given), 'Write ["north", "south"].')
    if not given:
        raise RecipeError("A federation must have at least one agent.", "none", "Name its agents.")
    return tuple(given)


def as_compression(given: Any) -> Compression | None:
    """How messages are compressed, if at all."""
    if given is not None and not isinstance(given, Compression):
        raise RecipeError(
            "compression must be a Compression.", _shown(given), "Write compression=codistill.Compression(bits=8)."
        )
    return given


def as_seed(seed: Any) -> int:
    """A seed as a Python integer."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise RecipeError("seed must be an integer of at least 0.", repr(seed), "Choose another seed.")
    return int(seed)  # numpy's integers are other keys of randomness than Python's


def as_count(count: Any, name: str) -> int:
    """A positive Python integer."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise RecipeError(f"{name} must be an integer of at least 1.", repr(count), "Change it, or leave it out.")
    return int(count)


def as_public_data(public: Any, seed: int) -> PublicData:
    """Public data from samples."""
    try:
        len(plain_samples(public, "the public data"))  # a sparse matrix has no length
    except TypeError:
        raise DataError(
            "The public data must be samples.", _shown(public), "Pass the samples themselves as public=..."
        ) from None
    return PublicData(public, seed)


def check_pair(test: Any, owner: str) -> None:
    """Test data are samples and labels."""
    if test is not None and not (isinstance(test, tuple | list) and len(test) == 2):
        raise DataError(
            f"{owner} must be a pair of samples and labels.",
            f"{type(test).__name__} of {len(test)}" if hasattr(test, "__len__") else type(test).__name__,
            "Write test=(x, y).",
        )


def as_classes(given: Any) -> int | list[Any] | None:
    """How many classes there are, or their names; None: as the labels say."""
    if given is None or isinstance(given, int | np.integer):
        return None if given is None else as_count(given, "classes")
    if isinstance(given, str) or not isinstance(given, Iterable):
        return as_count(given, "classes")
    return list(given)


def agree_on_all_labels(
    agents: Sequence[Agent], test: tuple[Any, Any] | None, classes: Any, task: str | None
) -> LabelEncoding:
    """One encoding for the labels of all agents and of all tests."""
    said = {agent.task: agent.name for agent in agents if agent.task is not None}
    said |= {} if task is None else {task: "the federation"}
    if len(said) > 1:
        raise RecipeError(
            "All agents of a federation must have one task.",
            " and ".join(f"{name} for '{owner}'" for name, owner in said.items()),
            "Say it once: Federation(..., task=...).",
        )
    given = [(f"agent '{agent.name}'", agent._data[1]) for agent in agents]
    given += [(f"the test data of agent '{agent.name}'", agent._test[1]) for agent in agents if agent._test is not None]
    given += [] if test is None else [("the test set", test[1])]
    return agree_on_labels(
        given,
        task=next(iter(said), None),
        classes=as_classes(classes),
        regressors=regressors(agents),
        has_classifier=any(agent.learner.probabilistic for agent in agents),
    )


def regressors(agents: Sequence[Agent]) -> list[str]:
    """The agents whose models predict real values, in words."""
    from codistill.learners.kernel_ridge import KernelRidge

    return [
        f"agent '{agent.name}' ({agent.learner.describe()})"
        for agent in agents
        if isinstance(agent.learner, KernelRidge) or getattr(agent.learner, "classifies", None) is False
    ]


def _abilities(agent: Agent) -> Ability:
    """What an agent's model can do with its targets: any regressor can learn one column of real values."""
    single = agent.shard.targets.shape[1] == 1 and getattr(agent.learner, "classifies", None) is False
    return agent.learner.abilities | (Ability.PREDICT if single else Ability.LABELS)


def check_targets(agents: Sequence[Agent]) -> None:
    """A model that predicts class probabilities is given labels, or soft labels."""
    from codistill.learners.sklearn import SklearnLearner

    for agent in agents:
        targets, learner = agent.shard.targets, agent.learner
        if not learner.probabilistic or agent.shard.labels is not None:
            continue
        if has_several_labels(targets):
            raise several_labels(f"agent '{agent.name}'", targets)
        if targets.shape[1] > 1 and targets.min() >= 0 and targets.max() <= 1:
            continue  # soft labels
        name = learner.describe()
        if isinstance(learner, SklearnLearner):
            other = name.replace("Classifier", "Regressor")
            do = f"Use {other}." if other != name else "Use a regressor, such as Ridge."
        else:
            do = 'Train it by the squared error: loss = "squared".'
        raise LearnerError(
            f"The model of agent '{agent.name}' must be one for real values, as its targets are.",
            f"{name}, which predicts class probabilities",
            f"{do} If the targets are classes, give one label per sample, e.g. y.ravel().",
        )


def check_choices(agents: Sequence[Agent], protocol: Protocol) -> None:
    """What an agent chooses for itself must be a setting that the protocol leaves to agents, and a valid one."""
    for agent in agents if not protocol.is_baseline else ():  # a baseline takes of them what it has
        for name in agent.choices:
            if name not in protocol.chosen_by_agents:
                raise RecipeError(
                    f"Agent '{agent.name}' may choose only what {protocol.name} leaves to its agents.",
                    f"'{name}'",
                    nearest(name, protocol.chosen_by_agents) if protocol.chosen_by_agents else "Remove its choices.",
                )
        protocol.chosen(agent.choices)


def check_topology(topology: Topology, names: Sequence[str], protocol: Protocol) -> None:
    """A topology of one's own must join these agents in a way that the protocol can use."""
    if not isinstance(topology, Topology):
        raise RecipeError(
            "The topology must be a Topology.", repr(topology), "Write for example codistill.Topology.ring(names)."
        )
    if sorted(topology.names) != sorted(names):
        raise RecipeError(
            "The topology must have the federation's agents, each once.",
            f"a topology of {', '.join(topology.names) or 'nobody'}; agents {', '.join(names)}",
            "Make it from the agents' names.",
        )
    if protocol.topology == "star" and not topology.hub and not protocol.hub_is_optional:
        raise RecipeError(
            f"{protocol.name} needs a topology with a hub.",
            "a topology without",
            "Use a star, or leave it out.",
        )
    linked = any(topology.neighbours(name) for name in names)
    if protocol.topology in ("complete", "ring") and topology.hub and not linked:
        raise RecipeError(
            f"Agents of {protocol.name} speak to one another, so its topology needs links between them.",
            "a star, with links to the hub only",
            "Use complete or ring, or leave it out.",
        )


def check_shapes(
    agents: Sequence[Agent], test: tuple[np.ndarray, np.ndarray] | None, public: PublicData | None
) -> None:
    """All samples of a federation have one shape."""
    first = agents[0]
    for agent in agents[1:]:
        check_shape(np.empty((0, *agent.shape)), first.shape, f"agent '{agent.name}'", f"agent '{first.name}'")
    shared = ([("the test set", test[0])] if test else []) + ([("the public data", public.x)] if public else [])
    for owner, x in shared:
        check_shape(x, first.shape, owner, f"agent '{first.name}'")


def check_abilities(agents: Sequence[Agent], protocol: Protocol, public: PublicData | None) -> None:
    """Every learner can do what the protocol needs; the error names a way out."""
    if protocol.needs_public and public is None:
        raise RecipeError(
            f"{protocol.name} needs unlabelled public data that all agents share.",
            "none",
            "Pass public=..., or set [data] public in the recipe; or use a protocol without: avgkd, fedavg.",
        )
    check_targets(agents)
    check_choices(agents, protocol)
    for agent in agents:
        _check_needs(agent, protocol)
        agent.learner.check(agent.shard.x, agent.shard.targets, agent.name)
        _check_needs(agent, protocol)  # once more: a pass of samples has shown whether it has features
        if Ability.PORTABLE in protocol.needs:
            agent.learner.check_travel(agent.shard.x, agent.name)
    protocol.check(agents)


def _check_needs(agent: Agent, protocol: Protocol) -> None:
    """An agent's learner has the abilities that the protocol needs."""
    has = _abilities(agent)
    missing = protocol.needs & ~has
    if missing:
        from codistill.protocols import PROTOCOLS

        fitting = [name for name, other in PROTOCOLS.items() if other.needs in has and not other.pools_data]
        raise LearnerError(
            f"{protocol.name} needs learners with the ability '{protocol.needs.words()}'.",
            f"agent '{agent.name}' has {agent.learner.describe()}, which lacks '{missing.words()}'",
            f"{agent.learner.advice(missing)} Protocols that work with it as it is: {', '.join(fitting)}.",
        )
