"""Advice before anybody commits: which protocol, if any, is expected to help these agents, and how sure that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from codistill.agent import Agent
from codistill.arguments import checked_arguments
from codistill.errors import RecipeError
from codistill.experiments.advice_candidates import ALONE, Setting, copy_of, find_candidates
from codistill.experiments.advice_gains import NOTHING, Gain, Gains, combined_gains
from codistill.experiments.advice_prior import AgentFacts, expected_gains, facts_of
from codistill.experiments.advice_search import Findings, Search, Tell, silent
from codistill.experiments.recipe import Recipe
from codistill.experiments.recipe_federation import build, topology_of
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS, Alone

SECONDS = 300.0
TOLERATED = 0.01  # an expected loss of an agent up to this, plus its standard error, rules no protocol out


@dataclass(frozen=True)
class Option:
    """One protocol that these agents can run."""

    name: str
    exchanges: str
    gains: Gains
    sent: float | None = None  # bytes that an agent sends in a round; None: not measured
    seconds: float | None = None  # of a round of all agents in one process
    folds: int = 0  # probing runs; 0: the expectation is from the facts alone

    @property
    def harms(self) -> list[str]:
        """Agents that are expected to lose, by more than is tolerated and more than the uncertainty."""
        return [name for name, gain in self.gains.agents.items() if gain.below(-TOLERATED)]


@dataclass(frozen=True)
class Advice:
    """Options, the best first; `alone` is always one of them."""

    options: tuple[Option, ...]
    left_out: dict[str, str]  # protocols that these agents cannot run, or that could not be probed, with the reason
    facts: dict[str, AgentFacts]
    recommended: str
    has_labels: bool
    rounds: int
    findings: Findings | None  # None: from summaries alone

    def __getitem__(self, name: str) -> Option:
        return {option.name: option for option in self.options}[name]

    @property
    def sentence(self) -> str:
        """The recommendation."""
        from codistill.experiments.advice_table import recommendation

        return recommendation(self)

    def __str__(self) -> str:
        from codistill.experiments.advice_table import as_text

        return as_text(self)


@checked_arguments
def advise(
    agents: Sequence[Agent],
    *,
    public: Any = None,
    rounds: int = 10,
    like: Protocol | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
    tell: Tell = silent,
) -> Advice:
    """Which protocol these agents, which have not been in a run, shall choose; they stay as they are.

    Every agent holds out a part of its own training samples in turn, and short runs in a simulation show how well it
    answers there. `like`: a protocol from which the amount of local training is taken.
    """
    from codistill.federation import Federation

    copies = [agent.twin() for agent in agents]
    checked = Federation(copies, Alone(), public=public, seed=seed)
    shared = None if checked.public is None else checked.public.x
    setting = Setting(
        agents=tuple(checked.agents), classes=checked.classes, rounds=rounds, seed=checked.seed, public=shared
    )
    return _advise(setting, like, seconds, tell)


def advise_recipe(
    recipe: Recipe, *, data_dir: str | None = None, seconds: float = SECONDS, tell: Tell = silent
) -> Advice:
    """The same for the agents of a recipe; its test set is not used."""
    if recipe.data.held_by_agents:
        raise RecipeError(
            "Probing runs need the data, or at least a summary of each agent's.",
            "[data] held_by_agents",
            "Give a file of summaries in place of the recipe: see docs/how-to/choose-a-protocol.md.",
        )
    plain = dataclasses.replace(recipe, protocol=Alone(), topology=None, faults=(), participation=1.0)
    federation, _ = build(plain, data_dir)
    setting = Setting(
        agents=federation.agents,
        classes=federation.classes,
        rounds=recipe.rounds,
        seed=recipe.seed,
        public=None if federation.public is None else federation.public.x,
        topology=None if recipe.topology is None else topology_of(recipe),
        compression=recipe.compression,
    )
    return _advise(setting, recipe.protocol, seconds, tell)


def _advise(setting: Setting, like: Protocol | None, seconds: float, tell: Tell) -> Advice:
    agents = [copy_of(agent) for agent in setting.agents]
    for agent in agents:
        agent.settle(setting.classes)
    setting = dataclasses.replace(setting, agents=tuple(agents))
    tell("checking which protocols these agents can run")
    candidates, facts = find_candidates(setting, like), facts_of(setting)
    priors = {name: expected_gains(name, facts) for name in candidates.protocols}
    findings = Search(setting, candidates, priors, seconds, tell).run()
    options = [
        Option(
            name,
            candidates.protocols[name].exchanges,
            gains,
            findings.sent(name),
            findings.seconds_per_round(name),
            len(findings.runs.get(name, [])),
        )
        for name, gains in findings.gains.items()
    ]
    left_out = {**candidates.left_out, **findings.failed}
    return _ranked([*options, _alone(facts, findings)], left_out, facts, setting.has_labels, setting.rounds, findings)


def advise_by_facts(
    facts: Mapping[str, AgentFacts], protocols: Sequence[str], left_out: dict[str, str], rounds: int
) -> Advice:
    """From what the agents tell of their data alone; with a wide uncertainty, since nothing was run."""
    options = [
        Option(name, PROTOCOLS[name].exchanges, combined_gains({}, expected_gains(name, facts))) for name in protocols
    ]
    has_labels = all(each.counts is not None for each in facts.values())
    return _ranked([*options, _alone(facts, None)], left_out, dict(facts), has_labels, rounds, None)


def _alone(facts: Mapping[str, AgentFacts], findings: Findings | None) -> Option:
    gains = Gains(dict.fromkeys(facts, NOTHING), NOTHING)
    seconds = None if findings is None else findings.seconds_per_round(ALONE)
    return Option(ALONE, Alone.exchanges, gains, 0.0, seconds, 0 if findings is None else len(findings.runs[ALONE]))


def _ranked(
    options: list[Option],
    left_out: dict[str, str],
    facts: dict[str, AgentFacts],
    has_labels: bool,
    rounds: int,
    findings: Findings | None,
) -> Advice:
    ranked = sorted(options, key=lambda option: -_lower(option.gains.mean))
    return Advice(tuple(ranked), left_out, facts, choose(ranked), has_labels, rounds, findings)


def choose(options: Sequence[Option]) -> str:
    """The best lower bound of the mean gain among options that are expected to harm nobody; else `alone`.

    Where there were probing runs, only what was probed is chosen.
    """
    probed = any(option.folds for option in options)
    harmless = [
        option
        for option in options
        if not option.harms and option.gains.mean.above(0.0) and (option.folds or not probed)
    ]
    return max(harmless, key=lambda option: _lower(option.gains.mean)).name if harmless else ALONE


def _lower(gain: Gain) -> float:
    return gain.mean - gain.error
