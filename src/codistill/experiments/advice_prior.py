"""What to expect of a protocol before anything is run: from what the agents may tell of their data and models.

The coefficients in `advice_prior.toml` are those of a ridge regression of true gains on the facts below, over the
settings of `python -m trials.regret`, which also writes the file.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from codistill.core.errors import CodistillError
from codistill.core.rng import generator, seed_libraries
from codistill.data.validation import validate_samples
from codistill.federation import Federation
from codistill.learners.ability import Ability
from codistill.nodes.agent import Agent, twin_of
from codistill.nodes.record import record_of
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS, Alone
from codistill.protocols.alone import baseline_of
from codistill.topology import Topology
from codistill.wire.compression import Compression

FEATURES = ("intercept", "own samples", "others' samples", "label skew", "input shift", "gradients", "real targets")
# `python -m trials.regret` has not been run with these: they are expected to bring what the protocol does that they are
# made of, as uncertain as a protocol of one's own.
LIKE = {
    "crs": "fedproto", "fedbn": "fedavg", "feddistill": "fedavg", "feddkd": "fedavg", "fedgen": "fedavg",
    "fedmax": "fedavg", "fedprox": "fedavg",
}  # fmt: skip
UNKNOWN = {"coefficients": [0.0] * len(FEATURES), "setting": 0.1, "agent": 0.1}  # of a protocol of one's own


@dataclass(frozen=True)
class AgentFacts:
    """What is known of an agent: its number of samples, those of each class, and its model's kind."""

    samples: int
    counts: tuple[int, ...] | None  # None: real-valued targets
    gradients: bool
    shift: float | None = None  # 0: inputs like the others'; 1: they can be told apart without error; None: not known


@dataclass(frozen=True)
class Prior:
    """Expected gains of the agents with one protocol, and how far off such expectations are."""

    gains: dict[str, float]
    setting: float  # standard deviation of the mean gain of a setting around what is expected
    agent: float  # of an agent's gain around that of its setting


def facts_of(setting: Setting) -> dict[str, AgentFacts]:
    shifts = input_shifts(setting)
    return {
        agent.name: AgentFacts(
            samples=len(agent.shard),
            counts=None if (mix := record_of(agent).class_mix) is None else tuple(int(count) for count in mix),
            gradients=Ability.GRADIENTS in agent.learner.abilities,
            shift=shifts[agent.name],
        )
        for agent in setting.agents
    }


def expected_gains(protocol: str, facts: Mapping[str, AgentFacts], table: Mapping[str, Any] | None = None) -> Prior:
    priors = read_prior() if table is None else table
    known = priors.get(protocol, UNKNOWN)
    if protocol not in priors and LIKE.get(protocol) in priors:
        known = UNKNOWN | {"coefficients": priors[LIKE[protocol]]["coefficients"]}
    coefficients = np.asarray(known["coefficients"])
    gains = {name: float(row @ coefficients) for name, row in features(facts).items()}
    return Prior(gains, float(known["setting"]), float(known["agent"]))


@cache
def read_prior() -> dict[str, Any]:
    return tomllib.loads((resources.files("codistill.experiments") / "advice_prior.toml").read_text("utf-8"))


def features(facts: Mapping[str, AgentFacts]) -> dict[str, np.ndarray]:
    """For every agent the numbers that its expected gain depends on."""
    rows = {}
    for name, mine in facts.items():
        others = [each for other, each in facts.items() if other != name]
        theirs = sum(each.samples for each in others)
        classes = 1 if mine.counts is None else max(len(mine.counts), 1)
        rows[name] = np.array(
            [
                1.0,
                math.log10(max(mine.samples, 1) / classes) - 1,  # samples of a class: 0 for ten
                math.log10(max(theirs, 1) / max(mine.samples, 1)) - 0.5,
                label_skew(mine, others),
                0.0 if mine.shift is None else mine.shift - 0.5,  # unknown: as in an average setting
                float(mine.gradients),
                float(mine.counts is None),
            ]
        )
    return rows


def label_skew(mine: AgentFacts, others: list[AgentFacts]) -> float:
    """Total variation distance between an agent's mix of classes and that of all others: 0 equal, 1 disjoint."""
    theirs = [each.counts for each in others if each.counts is not None]
    if mine.counts is None or not theirs:
        return 0.0
    own, pooled = np.asarray(mine.counts, dtype=float), np.sum(theirs, axis=0, dtype=float)
    return float(np.abs(own / max(own.sum(), 1) - pooled / max(pooled.sum(), 1)).sum() / 2)


def input_shifts(setting: Setting, most: int = 200) -> dict[str, float | None]:
    """How well a small forest tells an agent's inputs from those of the others; in a simulation only.

    2 AUC - 1 on samples that a tree has not seen: 0 for equal distributions, 1 for disjoint ones. None, unknown, where
    agents have columns of their own.
    """
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.metrics import roc_auc_score

    samples = [raw_samples(agent)[:most] for agent in setting.agents]
    records = [record_of(agent) for agent in setting.agents]
    if any(each.is_coded for each in records) or len({each.shape for each in records}) > 1:
        return {agent.name: None for agent in setting.agents}
    x = np.concatenate([each.reshape(len(each), -1) for each in samples])
    owner = np.concatenate([[agent.name] * len(agent.shard.x[:most]) for agent in setting.agents])
    if len(setting.agents) < 2:
        return {agent.name: 0.0 for agent in setting.agents}
    forest = ExtraTreesClassifier(
        100, min_samples_leaf=3, bootstrap=True, oob_score=True, random_state=0, class_weight="balanced"
    )
    shifts: dict[str, float | None] = {}
    for name in dict.fromkeys(owner):
        mine = owner == name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a sample that every tree has seen: it counts as undecided
            seen = np.nan_to_num(forest.fit(x, mine).oob_decision_function_[:, 1], nan=0.5)
        shifts[str(name)] = float(np.clip(2 * roc_auc_score(mine, seen) - 1, 0, 1))
    return shifts


# --- Expected gains with their uncertainty: what the probing runs say, and what was to be expected before.

Losses = Mapping[str, np.ndarray]  # of each agent and held-out sample: 0-1 loss, or squared error for real values

_POOLED = 4  # samples that the variance over all agents counts for in that of one agent
_LARGEST_ERROR = 4.0  # of one sample, in standard deviations of the targets: a single one must not hide the others


@dataclass(frozen=True)
class Gain:
    """An expected gain and its standard error, as a share: 0.01 is a point."""

    mean: float
    error: float

    @property
    def lowest(self) -> float:
        """Less by a standard error."""
        return self.mean - self.error


NOTHING = Gain(0.0, 0.0)


@dataclass(frozen=True)
class Gains:
    """What the agents are expected to gain with one protocol over staying alone."""

    agents: dict[str, Gain]
    mean: Gain

    @property
    def worst(self) -> tuple[str, Gain]:
        return min(self.agents.items(), key=lambda item: item[1].mean)


def differences(alone: Losses, together: Losses, deviation: float | None) -> dict[str, np.ndarray]:
    """For every agent and held-out sample what it contributes to the gain; the mean over samples is the gain.

    For classes the difference of the 0-1 losses. For real values the gain is (RMSE alone - RMSE together) / deviation
    of the targets, and a - b = (a² - b²) / (a + b).
    """
    found = {}
    for name in alone:
        a, b = alone[name], together[name]
        if deviation is None:
            found[name] = a - b
            continue
        most = (_LARGEST_ERROR * deviation) ** 2
        a, b = np.minimum(a, most), np.minimum(b, most)
        both = math.sqrt(a.mean()) + math.sqrt(b.mean()) if len(a) else 0.0
        found[name] = (a - b) / (both * deviation) if both else np.zeros(len(a))
    return found


def measured_gains(found: Mapping[str, np.ndarray], done: int, of: int, shortened: float = 1.0) -> dict[str, Gain]:
    """Of each agent the mean and its standard error after some folds; without held-out samples the error is infinite.

    Folds share most of their training samples, so their mean varies more than that of independent runs. Nadeau and
    Bengio (2003): the variance of the mean of J folds is (1/J + held out / trained on) times that of one. A run that is
    `shortened` to a part of its rounds tells less of the whole: its variance counts as many times.

    With few samples that hardly differ, their variance says little: that of an agent is drawn towards the variance
    over all agents, and that one counts a difference of +1 and one of -1 that were not seen.
    """
    overlap = shortened * (1 + done / (of - 1))  # J (1/J + 1/(k - 1)) for J of k folds
    means = {name: float(d.mean()) if len(d) else 0.0 for name, d in found.items()}
    squares = {name: float(((d - means[name]) ** 2).sum()) for name, d in found.items()}
    pooled = (sum(squares.values()) + 2) / (sum(len(d) for d in found.values()) + 2)
    gains = {}
    for name, d in found.items():
        variance = (squares[name] + _POOLED * pooled) / (len(d) + _POOLED)
        gains[name] = Gain(means[name], math.sqrt(overlap * variance / len(d)) if len(d) else math.inf)
    return gains


def combined_gains(measured: Mapping[str, Gain], prior: Prior) -> Gains:
    """The posterior of a normal model in two levels: the mean gain of all agents, then each agent around it.

    mean ~ N(m, setting²), m the mean of the prior gains m_i; gain_i ~ N(mean + m_i - m, agent²); what is measured of
    agent i ~ N(gain_i, error_i²).
    """
    before = float(np.mean(list(prior.gains.values())))
    seen = {name: measured[name] for name in prior.gains if name in measured and math.isfinite(measured[name].error)}
    mean = Gain(before, prior.setting)
    if seen:
        # What was measured of some agents only tells of the mean of all up to the spread between agents.
        missing = 1 - len(seen) / len(prior.gains)
        variance = sum(gain.error**2 for gain in seen.values()) / len(seen) ** 2 + missing * prior.agent**2 / len(seen)
        offset = float(np.mean([gain.mean - prior.gains[name] + before for name, gain in seen.items()]))
        mean = _product(mean, Gain(offset, math.sqrt(variance)))
    agents = {}
    for name, gain in prior.gains.items():
        around = Gain(mean.mean + gain - before, math.hypot(prior.agent, mean.error))
        agents[name] = _product(around, seen[name]) if name in seen else around
    return Gains(agents, Gain(float(np.mean([gain.mean for gain in agents.values()])), mean.error))


def _product(first: Gain, second: Gain) -> Gain:
    a, b = max(first.error, 1e-9) ** -2, max(second.error, 1e-9) ** -2
    return Gain((a * first.mean + b * second.mean) / (a + b), (a + b) ** -0.5)


# --- Which protocols these agents can run, with equal local training, and why the others cannot.

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
    public: Any = None
    topology: Topology | None = None  # None: that of each protocol
    compression: Compression | None = None

    @property
    def has_labels(self) -> bool:
        """Whether the targets are classes, so that accuracy is measured; otherwise errors are."""
        return self.agents[0].shard.labels is not None

    def limited_to(self, samples: int) -> Setting:
        """With at most so many samples of each agent, chosen by the seed; single samples of a class are kept."""
        made = []
        for agent in self.agents:
            if len(agent.shard) > samples:
                rows = generator(self.seed, agent.name, "advice").permutation(len(agent.shard))
                if agent.shard.labels is not None:
                    _, first = np.unique(agent.shard.labels[rows], return_index=True)  # one of each class comes first
                    rows = np.concatenate([rows[first], np.delete(rows, first)])
                agent = copy_of(agent, np.sort(rows[:samples]))
                record_of(agent).encode_labels(self.classes)
            made.append(agent)
        return dataclasses.replace(self, agents=tuple(made))

    def federation(self, agents: Sequence[Agent], protocol: Protocol, seed: int | None = None) -> Federation:
        for agent in agents:  # what they choose for themselves, as far as this protocol leaves it to them
            agent.choices = {key: agent.choices[key] for key in agent.choices if key in protocol.chosen_by_agents}
        made = Federation(
            agents,
            protocol,
            public=self.public,
            seed=self.seed if seed is None else seed,
            classes=self.classes,
            topology=None if protocol.is_baseline else self.topology,
            compression=None if protocol.is_baseline else self.compression,
        )
        made.description = dataclasses.replace(made.description, notes=())  # on data: for the user's own run
        return made


@dataclass(frozen=True)
class Candidates:
    """Protocols that can run, by name; what the agents do alone; and the reasons why other protocols cannot run."""

    protocols: dict[str, Protocol]
    baselines: dict[str, Protocol]  # ALONE, and FITTED where that is other training
    left_out: dict[str, str]

    def baseline_of(self, name: str) -> str:
        baseline = baseline_of(self.protocols[name])
        return FITTED if FITTED in self.baselines and isinstance(baseline, Alone) and baseline.refit else ALONE


def find_candidates(setting: Setting, like: Protocol | None = None) -> Candidates:
    """Every protocol that these agents can run, trained locally as `like` says, the protocol of a recipe.

    That protocol itself is a candidate as it is set there; all others have the defaults of their other settings.
    """
    # What a fit of each model that is trained step by step takes.
    learners = [agent.learner for agent in setting.agents if Ability.GRADIENTS in agent.learner.abilities]
    fitted = [getattr(learner, "epochs", None) for learner in learners]
    if like is not None and hasattr(like, "local_steps"):
        effort = {name: getattr(like, name) for name in _LOCAL_TRAINING if hasattr(like, name)}
    else:
        # Protocols whose models travel fit a model to the end in every round: the others get as many epochs in all.
        most = max((1 if each is None else int(each) for each in fitted), default=1)
        effort = {"local_epochs": max(1, math.ceil(most / setting.rounds)), "local_steps": None}
    steps = effort.get("local_steps")
    in_all = None
    if steps is None:  # the same in gradient steps, for protocols that count only these: those of the average agent
        epochs = effort.get("local_epochs", 1)
        in_all = epochs * setting.rounds
        samples = sum(len(agent.shard) for agent in setting.agents) / len(setting.agents)
        steps = max(1, math.ceil(samples / effort.get("batch_size", 32)) * epochs)
    baselines: dict[str, Protocol] = {ALONE: _with_training(Alone, effort, steps)}
    if any(each != in_all for each in fitted):
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
    twin = twin_of(agent)
    copied = Agent(
        agent.name, twin.learner, raw_samples(agent)[rows], targets_of(agent)[rows], prepare=record_of(agent).prepare,
        choices=agent.choices,
    )  # fmt: skip
    record_of(copied).named = record_of(agent).naming  # its samples have no names, and numbered labels
    if record_of(agent).has_names:
        record_of(copied).use_columns_of(record_of(agent))
    return copied


def raw_samples(agent: Agent) -> np.ndarray:
    """The samples of an agent before it prepares them, as an array: missing values are still missing."""
    x = record_of(agent).data[0]
    return validate_samples(x, targets_of(agent), agent.shard.classes, f"agent '{agent.name}'")[0]


def targets_of(agent: Agent) -> np.ndarray:
    """The labels of an agent's samples, or the real values to predict."""
    return agent.shard.targets if agent.shard.labels is None else agent.shard.labels


def _why_not(setting: Setting, protocol: Protocol) -> str | None:
    """The reason why these agents cannot run a protocol; None if they can."""
    if len(setting.agents) < 2:
        return "a single agent has nobody to learn from"
    if protocol.needs_public and setting.public is None:
        return "it needs unlabelled public data that all agents share"
    needs_hub = protocol.topology == "star" and not protocol.hub_is_optional
    if needs_hub and setting.topology is not None and not setting.topology.hub:
        return "it needs a hub, which the topology of the recipe does not have"
    lacking = [agent for agent in setting.agents if protocol.needs not in agent.learner.abilities]
    if lacking:
        missing = protocol.needs & ~lacking[0].learner.abilities
        others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        model = lacking[0].learner.describe()
        return f"it needs the ability '{missing.words()}': lacking in {model} of '{lacking[0].name}'{others}"
    try:
        # Some checks fit a small model, which draws from the libraries' generators.
        seed_libraries(setting.seed, "advice", protocol.name)
        setting.federation([copy_of(agent) for agent in setting.agents], protocol)
    except CodistillError as error:
        return error.must.rstrip(".") + f": {error.found}"
    return None


def _with_training(protocol: type[Protocol], effort: dict[str, Any], steps: int) -> Protocol:
    names = {field.name for field in dataclasses.fields(protocol)}
    chosen = {name: value for name, value in effort.items() if name in names}
    if chosen.get("local_steps", 0) is None and typing.get_type_hints(protocol)["local_steps"] is int:
        chosen["local_steps"] = steps
    return protocol(**chosen)
