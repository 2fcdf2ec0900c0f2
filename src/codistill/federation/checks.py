"""What must hold before anything runs: each check raises an error that names a way out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from codistill.core.errors import DataError, LearnerError, RecipeError, nearest
from codistill.core.spec import RunSpec, features_stay, present_only
from codistill.data.frames import as_frame
from codistill.data.labels import LabelEncoding, agree_on_labels, has_several_labels, several_labels
from codistill.data.shard import PublicData
from codistill.data.validation import check_shape, plain_samples
from codistill.engine.description import RunDescription
from codistill.engine.evaluation import check_features
from codistill.learners import PlainLearner
from codistill.learners.ability import Ability
from codistill.learners.torch import TorchLearner
from codistill.nodes.agent import Agent
from codistill.nodes.clock import Clock
from codistill.nodes.record import record_of
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.topology import KINDS, Topology
from codistill.wire.compression import Compression

T = TypeVar("T")


def as_agents(agents: Sequence[Agent]) -> list[Agent]:
    """A list of agents, each with a name and a model of its own."""
    if isinstance(agents, Agent):
        raise RecipeError("Agents must be given as a list.", f"the agent '{agents.name}' alone", "Write [agent].")
    try:
        given = list(agents)
    except TypeError:
        raise RecipeError("Agents must be given as a list.", _shown(agents), "Write [agent, ...].") from None
    if not given:
        raise RecipeError("A federation must have at least one agent.", "none", "Add agents.")
    for agent in given:
        of_class(Agent, agent, "Every agent must be an Agent.", "Write codistill.Agent(name, model, x, y).")
    twice = [name for name, times in Counter(agent.name for agent in given).items() if times > 1]
    if twice:
        raise RecipeError("Every agent must have a name of its own.", f"'{twice[0]}' more than once", "Rename one.")
    owners: dict[int, str] = {}
    for agent in given:
        for part in (agent.learner, _wrapped(agent.learner)):
            other = owners.setdefault(id(part), agent.name)
            if other != agent.name:
                raise LearnerError(
                    "Every agent must have a model of its own.",
                    f"agents '{other}' and '{agent.name}' share one",
                    "Make one for each, or give each a copy.deepcopy(model).",
                )
    return given


def of_class(kind: type[T], given: Any, must: str, do: str) -> T:
    """The given object, if it is of this class."""
    if not isinstance(given, kind):
        raise RecipeError(must, _shown(given), do)
    return given


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
    must = "The protocol must be an instance of a Protocol."
    return of_class(Protocol, given, must, "Write for example codistill.FedMD().")


def as_names(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not all(isinstance(name, str) for name in given) or len(set(given)) < len(given):
        raise RecipeError("Agents must be named in a list, each once.", _shown(given), 'Write ["north", "south"].')
    if not given:
        raise RecipeError("A federation must have at least one agent.", "none", "Name its agents.")
    return tuple(given)


def as_compression(given: Any) -> Compression | None:
    do = "Write compression=codistill.Compression(bits=8)."
    return None if given is None else of_class(Compression, given, "compression must be a Compression.", do)


def as_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise RecipeError("seed must be an integer of at least 0.", repr(seed), "Choose another seed.")
    return int(seed)  # numpy's integers are other keys of randomness than Python's


def as_validation(share: Any) -> float:
    if isinstance(share, bool) or not isinstance(share, int | float | np.number) or not 0 <= share <= 0.9:
        raise RecipeError(
            "validation must be a share of each agent's samples, from 0 to 0.9.", _shown(share), "Write validation=0.2."
        )
    return float(share)


def as_public_data(public: Any, seed: int) -> PublicData:
    try:
        if as_frame(public) is None:
            len(plain_samples(public, "the public data"))  # a sparse matrix has no length
    except TypeError:
        raise DataError(
            "The public data must be samples.", _shown(public), "Pass the samples themselves as public=..."
        ) from None
    return PublicData(public, seed)


def check_pair(test: Any, owner: str) -> None:
    if test is not None and not (isinstance(test, tuple | list) and len(test) == 2):
        raise DataError(
            f"{owner} must be a pair of samples and labels.",
            f"{type(test).__name__} of {len(test)}" if hasattr(test, "__len__") else type(test).__name__,
            "Write test=(x, y).",
        )


def as_classes(given: Any) -> int | list[Any]:
    """How many classes there are, or their names."""
    if isinstance(given, Iterable) and not isinstance(given, str):
        return list(given)
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 1:
        raise RecipeError(
            "classes must be an integer of at least 1, or names.", repr(given), "Write classes=3, or leave it out."
        )
    return int(given)


def agree_on_all_labels(
    agents: Sequence[Agent], test: tuple[Any, Any] | None, classes: Any, task: str | None
) -> LabelEncoding:
    said = {record_of(agent).task: agent.name for agent in agents if record_of(agent).task is not None}
    said |= {} if task is None else {task: "the federation"}
    if len(said) > 1:
        raise RecipeError(
            "All agents of a federation must have one task.",
            " and ".join(f"{name} for '{owner}'" for name, owner in said.items()),
            "Say it once: Federation(..., task=...).",
        )
    given = [(f"agent '{agent.name}'", record_of(agent).data[1]) for agent in agents]
    tests = [(f"the test data of agent '{agent.name}'", record_of(agent).given_test) for agent in agents]
    given += [(owner, pair[1]) for owner, pair in tests if pair is not None]
    given += [] if test is None else [("the test set", test[1])]
    return agree_on_labels(
        given,
        task=next(iter(said), None),
        classes=None if classes is None else as_classes(classes),
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


def _check_targets(agents: Sequence[Agent]) -> None:
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


def as_topology(given: Any, names: Sequence[str], protocol: Protocol) -> Topology:
    """A topology of these agents that the protocol can use: the given one, or that of the protocol."""
    if given is None:
        return KINDS[protocol.topology](names)
    do = "Write for example codistill.Topology.ring(names)."
    topology = of_class(Topology, given, "The topology must be a Topology.", do)
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
    return topology


def check_shapes(
    agents: Sequence[Agent], test: tuple[np.ndarray, np.ndarray] | None, public: PublicData | None
) -> None:
    shapes = [(f"agent '{agent.name}'", record_of(agent).shape) for agent in agents]
    shapes += [("the test set", test[0].shape[1:])] if test else []
    shapes += [("the public data", public.x.shape[1:])] if public else []
    first, wanted = shapes[0]
    for owner, shape in shapes[1:]:
        check_shape(shape, wanted, owner, first)


def check_abilities(agents: Sequence[Agent], protocol: Protocol, public: PublicData | None) -> None:
    if protocol.needs_public and public is None:
        raise RecipeError(
            f"{protocol.name} needs unlabelled public data that all agents share.",
            "none",
            "Pass public=..., or set [data] public in the recipe; or use a protocol without: avgkd, fedavg.",
        )
    _check_targets(agents)
    for agent in agents if not protocol.is_baseline else ():  # a baseline takes of their choices what it has
        for name in agent.choices:
            if name not in protocol.chosen_by_agents:
                raise RecipeError(
                    f"Agent '{agent.name}' may choose only what {protocol.name} leaves to its agents.",
                    f"'{name}'",
                    nearest(name, protocol.chosen_by_agents) if protocol.chosen_by_agents else "Remove its choices.",
                )
        protocol.chosen(agent.choices)
    for agent in agents:
        _check_needs(agent, protocol)
        agent.learner.check(agent.shard.x, agent.shard.targets, agent.name)
        _check_needs(agent, protocol)  # once more: a pass of samples has shown whether it has features
        if Ability.PORTABLE in protocol.needs:
            agent.learner.check_travel(agent.shard.x, agent.name)
    protocol.check(agents)


def _check_needs(agent: Agent, protocol: Protocol) -> None:
    # Any regressor can learn one column of real values.
    single = agent.shard.targets.shape[1] == 1 and getattr(agent.learner, "classifies", None) is False
    has = agent.learner.abilities | (Ability.PREDICT if single else Ability.LABELS)
    missing = protocol.needs & ~has
    if missing:
        fitting = [name for name, other in PROTOCOLS.items() if other.needs in has and not other.pools_data]
        raise LearnerError(
            f"{protocol.name} needs learners with the ability '{protocol.needs.words()}'.",
            f"agent '{agent.name}' has {agent.learner.describe()}, which lacks '{missing.words()}'",
            f"{agent.learner.advice(missing)} Protocols that work with it as it is: {', '.join(fitting)}.",
        )


def as_clock(given: Any, protocol: Protocol, names: Sequence[str]) -> Clock | None:
    if given is None:
        return None
    clock = of_class(Clock, given, "clock must be a Clock.", "Write clock=codistill.Clock(...).")
    clock.check_names(names)
    if clock.asynchronous and not protocol.asynchronous:
        able = ", ".join(name for name, other in PROTOCOLS.items() if other.asynchronous)
        raise RecipeError(
            "A run without rounds needs a protocol that can use what others sent some time ago.",
            f"clock.asynchronous with {protocol.name}, which waits for the others of its round",
            f"Use one of {able}; or leave out 'asynchronous'. A protocol of your own says asynchronous = True.",
        )
    return clock


def checked_run(description: RunDescription, spec: RunSpec) -> RunDescription:
    """The run with these options, which must suit its agents, its protocol and its clock."""
    runtime, protocol, clock = spec.runtime, description.protocol, description.clock
    description = replace(description, spec=spec)
    # Between machines nobody collects features, and every agent evaluates itself.
    if runtime == "network" and spec.evaluate_agents != "all":
        raise present_only(f"evaluate_agents = '{spec.evaluate_agents}'")
    if runtime == "network" and spec.features_at:
        raise features_stay(f"features_at = {list(spec.features_at)}")
    check_features(description)
    if runtime in ("network", "ray") and protocol.pools_data:
        raise RecipeError(
            f"{protocol.name} pools the data of all agents, which never leave their processes here.",
            protocol.name,
            "Run it in the runtime 'simulation', as a baseline; a recipe by 'codistill run'.",
        )
    if runtime == "ray" and description.watchers:
        raise RecipeError(
            "watchers are called where messages are sent: in a Ray cluster in other processes, mostly elsewhere.",
            f"{len(description.watchers)} of them, in the runtime 'ray'",
            "Use the runtime 'simulation', where all messages pass this process; the messages are the same.",
        )
    if clock is not None and runtime in ("processes", "ray"):
        raise RecipeError(
            "A run with a clock cannot be computed in worker processes, nor in a Ray cluster.",
            f"a clock, in the runtime '{runtime}'",
            "Use the runtime 'simulation' or, without rounds, 'network'.",
        )
    if clock is not None and runtime == "network" and clock.offline:
        raise RecipeError(
            "clock.offline is not supported over the network.",
            f"clock.offline of '{clock.offline[0].agent}', in the runtime '{runtime}'",
            "Remove it, or use the runtime 'simulation'.",
        )
    return description
