"""Advice before anybody commits: which protocol, if any, is expected to help these agents, and how sure that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from codistill.core.errors import RecipeError
from codistill.core.rng import generator, seed_libraries
from codistill.core.settings import check_settings, clear_argument_errors, from_table, setting
from codistill.core.text import bytes_text, parse_json, parse_toml
from codistill.experiments.advice_prior import (
    ALONE,
    NOTHING,
    AgentFacts,
    Candidates,
    Gain,
    Gains,
    Setting,
    combined_gains,
    copy_of,
    expected_gains,
    facts_of,
    find_candidates,
    label_skew,
)
from codistill.experiments.advice_probe import Findings, Search, Tell, silent
from codistill.experiments.building import build, topology_of
from codistill.experiments.recipe import AgentEntry, Recipe
from codistill.learners.ability import Ability
from codistill.learners.catalogue import make_learner
from codistill.nodes.agent import Agent, twin_of
from codistill.nodes.record import record_of
from codistill.protocol import Protocol
from codistill.protocols import Alone
from codistill.results.tables import AnyCell, Cell, Table, plain_text

SECONDS = 300.0
_SHOWN_AGENTS = 8  # with more, only the mean and the worst agent are shown
_WIDTH = 140
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
        return [name for name, gain in self.gains.agents.items() if gain.mean + gain.error < -TOLERATED]


@dataclass(frozen=True)
class Advice:
    """Options, the best first; `alone` is always one of them."""

    options: tuple[Option, ...]
    left_out: dict[str, str]  # protocols that these agents cannot run, or that could not be probed, with the reason
    facts: dict[str, AgentFacts]
    recommended: str
    rounds: int
    findings: Findings | None  # None: from summaries alone

    def __getitem__(self, name: str) -> Option:
        return {option.name: option for option in self.options}[name]

    @property
    def has_labels(self) -> bool:
        """Whether gains are in points of accuracy; otherwise they are reductions of an error."""
        return all(each.counts is not None for each in self.facts.values())

    @property
    def sentence(self) -> str:
        """The recommendation."""
        unit = "points" if self.has_labels else "% of the targets' standard deviation"
        if self.recommended == ALONE:
            best = next((option for option in self.options if option.name != ALONE), None)
            if best is None:
                return "Stay alone: these agents can run no protocol, see the reasons above."
            why = f"{best.name} comes closest, with an expected {gain_text(best.gains.mean)} {unit} on average"
            if best.harms and best.gains.mean.lowest > 0:
                *others, last = best.harms
                named = f"{', '.join(others)} and {last}" if others else last
                why += f", but {named} would be expected to lose"
            return f"Stay alone: {why}."
        option = self[self.recommended]
        name, worst = option.gains.worst
        words = f"Use {option.name}: expected {gain_text(option.gains.mean)} {unit} on average"
        if worst.mean < 0:
            return f"{words}, and {gain_text(worst)} for {name}, the agent that is expected to gain least."
        return f"{words}, and no agent is expected to lose."

    def __str__(self) -> str:
        return plain_text(tables(self), _WIDTH) + self.sentence

    def skew_of(self, name: str) -> float:
        """How far an agent's mix of classes is from that of all others: 0 as the others, 1 nothing in common."""
        return label_skew(self.facts[name], [each for other, each in self.facts.items() if other != name])


@clear_argument_errors
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

    copies = [twin_of(agent) for agent in agents]
    checked = Federation(copies, Alone(), public=public, seed=seed)
    setting = Setting(
        agents=tuple(checked.agents),
        classes=checked.classes,
        rounds=rounds,
        seed=checked.seed,
        public=None if checked.public is None else checked.public.given,
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
        rounds=recipe.spec.rounds,
        seed=recipe.seed,
        public=None if federation.public is None else federation.public.given,
        topology=None if recipe.topology is None else topology_of(recipe),
        compression=recipe.compression,
    )
    return _advise(setting, recipe.protocol, seconds, tell)


def _advise(setting: Setting, like: Protocol | None, seconds: float, tell: Tell) -> Advice:
    agents = [copy_of(agent) for agent in setting.agents]
    for agent in agents:
        record_of(agent).encode_labels(setting.classes)
    setting = dataclasses.replace(setting, agents=tuple(agents))
    tell("checking which protocols these agents can run")
    candidates, facts = find_candidates(setting, like), facts_of(setting)
    priors = {name: expected_gains(name, facts) for name in candidates.protocols}
    findings = Search(setting, candidates, priors, seconds, tell).run()
    return _ranked(findings.gains, candidates, facts, setting.rounds, findings)


def advise_by_facts(facts: dict[str, AgentFacts], candidates: Candidates, rounds: int) -> Advice:
    """From what the agents tell of their data alone; with a wide uncertainty, since nothing was run."""
    gains = {name: combined_gains({}, expected_gains(name, facts)) for name in candidates.protocols}
    return _ranked(gains, candidates, facts, rounds, None)


def _ranked(
    gains: dict[str, Gains],
    candidates: Candidates,
    facts: dict[str, AgentFacts],
    rounds: int,
    findings: Findings | None,
) -> Advice:
    options = []
    for name, expected in {**gains, ALONE: Gains(dict.fromkeys(facts, NOTHING), NOTHING)}.items():
        exchanges = (candidates.baselines if name == ALONE else candidates.protocols)[name].exchanges
        runs = findings.runs.get(name, []) if findings is not None else []
        sent = float(np.mean([run.sent for run in runs])) if runs else None
        seconds = float(np.mean([run.seconds / run.rounds for run in runs])) if runs else None
        options.append(Option(name, exchanges, expected, 0.0 if name == ALONE else sent, seconds, len(runs)))
    options.sort(key=lambda option: -option.gains.mean.lowest)
    left_out = candidates.left_out if findings is None else {**candidates.left_out, **findings.failed}
    return Advice(tuple(options), left_out, facts, choose(options), rounds, findings)


def choose(options: Sequence[Option]) -> str:
    """The best lower bound of the mean gain among options that are expected to harm nobody; else `alone`.

    Where there were probing runs, only what was probed is chosen.
    """
    options = [option for option in options if option.folds] or options
    harmless = [option for option in options if not option.harms and option.gains.mean.lowest > 0]
    return max(harmless, key=lambda option: option.gains.mean.lowest).name if harmless else ALONE


def tables(advice: Advice) -> list[Table]:
    """The options, each agent's gain, and why other protocols are no options."""
    found = [_options(advice)]
    if 1 < len(advice.facts) <= _SHOWN_AGENTS and len(advice.options) > 1:
        found.append(_agents(advice))
    by_reason: dict[str, list[str]] = {}
    for name, reason in advice.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    rows = [[", ".join(names), reason] for reason, names in by_reason.items()]
    return [*found, Table(("protocol", "why"), "ll", rows, title="left out")] if rows else found


def _options(advice: Advice) -> Table:
    headings = ("protocol", "mean", "worst agent", "what is revealed", "sent by an agent per round", "time per round")
    rows = []
    for option in advice.options:
        worst, gain = option.gains.worst
        texts = (
            option.name + ("" if option.folds or advice.findings is None else " *"),
            "0" if option.name == ALONE else gain_text(option.gains.mean),
            "0" if option.name == ALONE else f"{gain_text(gain)} ({worst})",
            option.exchanges,
            "-" if option.sent is None else bytes_text(option.sent),
            "-" if option.seconds is None else f"{option.seconds:.2f} s",
        )
        rows.append([Cell(text, bold=option.name == advice.recommended) for text in texts])
    unit = "in points of accuracy on its own data (± standard error)"
    if not advice.has_labels:
        unit = "as fall of the RMSE on its own data in % of the targets' standard deviation (± standard error)"
    title = f"expected gain over staying alone, {unit}"
    return Table(headings, "lrrlrr", rows, title=title, notes=_notes(advice))


def _agents(advice: Advice) -> Table:
    """What is known of the agents' data, from which part of the expectation comes, and their gains."""
    facts = advice.facts
    rows = [["samples", *(f"{each.samples}" for each in facts.values())]]
    if advice.has_labels:
        rows.append(["label skew", *(f"{advice.skew_of(name):.2f}" for name in facts)])
    if all(each.shift is not None for each in facts.values()):
        rows.append(["input shift", *(f"{each.shift:.2f}" for each in facts.values())])
    gains: list[list[AnyCell]] = []
    for option in advice.options:
        if option.name != ALONE:
            texts = option.name, *(gain_text(option.gains.agents[name]) for name in facts)
            gains.append([Cell(text, bold=option.name == advice.recommended) for text in texts])
    note = "label skew, input shift: 0 as the others, 1 nothing in common"
    return Table(["", *facts], "l" + "r" * len(facts), rows, gains, "the same for each agent", notes=[note])


def gain_text(gain: Gain) -> str:
    """0.031 with error 0.009 -> '+3.1 ± 0.9'."""
    return f"{100 * gain.mean:+.1f} ± {100 * gain.error:.1f}"


def _notes(advice: Advice) -> list[str]:
    findings = advice.findings
    if findings is None:
        return ["from the summaries alone, nothing was run: probing runs on the data are far more certain"]
    runs = sum(len(each) for each in findings.runs.values())
    largest = max(facts.samples for facts in advice.facts.values())
    words = f"{runs} probing runs of {findings.rounds} of {advice.rounds} rounds in {findings.seconds:.0f} s, "
    words += "on held-out training samples"
    if findings.samples < largest:
        words += f"; at most {findings.samples} of up to {largest} samples of an agent were used"
    notes = [words]
    if any(not option.folds for option in advice.options):
        notes.append("* no probing run: the facts alone speak against it, or the time (--seconds) ran out")
    if findings.interrupted:
        notes.append("interrupted: more time makes the advice more certain")
    return notes


def as_plain(advice: Advice) -> dict[str, Any]:
    def plain(gain: Gain) -> dict[str, float]:
        return {"mean": gain.mean, "standard_error": gain.error}

    return {
        "recommended": advice.recommended,
        "sentence": advice.sentence,
        "score": "accuracy" if advice.has_labels else "rmse",
        "rounds": advice.rounds,
        "probed_rounds": None if advice.findings is None else advice.findings.rounds,
        "probed_seconds": None if advice.findings is None else advice.findings.seconds,
        "options": [
            {
                "protocol": option.name,
                "gain": plain(option.gains.mean),
                "agents": {name: plain(gain) for name, gain in option.gains.agents.items()},
                "exchanges": option.exchanges,
                "bytes_sent_per_agent_and_round": option.sent,
                "seconds_per_round": option.seconds,
                "probing_runs": option.folds,
            }
            for option in advice.options
        ],
        "left_out": advice.left_out,
        "facts": {
            name: {"samples": each.samples, "label_skew": advice.skew_of(name), "input_shift": each.shift}
            for name, each in advice.facts.items()
        },
    }


# --- Advice from summaries: what organisations may tell one another of their data before they share anything.

_ROWS = 12  # made-up samples of an agent, by which it is checked what its model can do
_PUBLIC_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class AgentSummary:
    """[[agents]] of a file of summaries."""

    name: str = setting(help="the agent's name")
    model: str | dict[str, Any] = setting(help="a learner's name, or a table with kind and options, as in a recipe")
    samples: int | None = setting(None, "how many training samples it has; unset: the sum of counts", at_least=1)
    counts: tuple[int, ...] | None = setting(
        None, "how many of each class, in an order common to all; unset: real-valued targets", at_least=0
    )

    def __post_init__(self) -> None:
        check_settings(self, "agents")
        if (self.counts is None and self.samples is None) or (self.counts is not None and not sum(self.counts)):
            raise RecipeError(
                f"The summary of '{self.name}' needs the number of samples.",
                "neither counts nor samples" if self.counts is None else "no sample of any class",
                "Add counts = [60, 40], the samples of each class; or samples = 100 for real-valued targets.",
            )
        if self.counts is not None and self.samples not in (None, sum(self.counts)):
            raise RecipeError(
                f"The counts of '{self.name}' must add up to its samples.",
                f"{sum(self.counts)} and {self.samples}",
                "Leave samples out.",
            )
        if isinstance(self.model, dict) and not isinstance(self.model.get("kind"), str):
            raise RecipeError("A model's table needs 'kind', a string.", f"{self.model}", 'Write kind = "name" in it.')


@dataclass(frozen=True, kw_only=True)
class Summaries:
    """A file of summaries: TOML or JSON."""

    agents: tuple[AgentSummary, ...]
    public: int = setting(0, "unlabelled public samples that all agents would share", at_least=0)
    shape: tuple[int, ...] = setting(
        (10,), "the shape of a sample: [features], or [channels, height, width]", at_least=1
    )
    rounds: int = setting(10, "rounds of a run", at_least=1)

    def __post_init__(self) -> None:
        check_settings(self, "summaries")

    @property
    def classes(self) -> int:
        """How many there are; 1 for real-valued targets."""
        counts = self.agents[0].counts
        return 1 if counts is None else max(len(counts), 2)


def is_summary(tables: Mapping[str, Any]) -> bool:
    agents = tables.get("agents")
    entries = agents if isinstance(agents, list) else []
    told = any(isinstance(entry, dict) and ("counts" in entry or "samples" in entry) for entry in entries)
    return "data" not in tables and (told or "protocol" not in tables)


def read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8-sig")
        tables = parse_json(text) if path.suffix == ".json" else parse_toml(text)
    except OSError as error:
        raise RecipeError(
            "The recipe or the file of summaries must be readable.", f"{path}: {error.strerror}", "Check the path."
        ) from None
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise RecipeError(f"{path} must be valid {kind}.", f"{error}", "Fix the line it names.") from None
    if not isinstance(tables, dict):
        raise RecipeError(f"{path} must hold a table.", f"a {type(tables).__name__}", 'Write {"agents": [...]}.')
    return tables


def advise_summaries(tables: Mapping[str, Any]) -> Advice:
    """A table of protocols that such agents can run, with what is to be expected from the facts alone."""
    entries = tables.get("agents")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise RecipeError(
            "A file of summaries must have an [[agents]] table for each agent.", f"{entries!r}"[:80], "Add them."
        )
    agents = tuple(from_table(AgentSummary, entry, "agents") for entry in entries)
    summaries: Summaries = from_table(Summaries, {**tables, "agents": agents}, "summaries")
    names = [agent.name for agent in agents]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RecipeError("Every agent must have a name of its own.", f"'{twice}' more than once", "Rename one.")
    if len({None if agent.counts is None else len(agent.counts) for agent in agents}) > 1:
        said = ", ".join(f"{each.name}: {'none' if each.counts is None else len(each.counts)}" for each in agents)
        raise RecipeError(
            "The counts of all agents must be of the same classes.", said, "Write 0 for a class that an agent lacks."
        )
    made = Setting(
        agents=tuple(_agent(summary, summaries) for summary in summaries.agents),
        classes=summaries.classes,
        rounds=summaries.rounds,
        public=_inputs(_PUBLIC_ROWS, summaries, "public") if summaries.public else None,
    )
    candidates = find_candidates(made)
    facts = {
        summary.name: AgentFacts(
            samples=sum(summary.counts) if summary.counts is not None else int(summary.samples or 0),
            counts=summary.counts,
            gradients=Ability.GRADIENTS in agent.learner.abilities,
        )
        for summary, agent in zip(summaries.agents, made.agents, strict=True)
    }
    return advise_by_facts(facts, candidates, summaries.rounds)


def _agent(summary: AgentSummary, summaries: Summaries) -> Agent:
    """An agent with a few made-up samples, to check what its model can do."""
    entry = AgentEntry(learner=summary.model)
    seed_libraries(0, summary.name, "model")
    learner = make_learner(entry.kind, entry.options, summaries.shape, summaries.classes)
    x = _inputs(_ROWS, summaries, summary.name)
    y: np.ndarray = np.arange(_ROWS) % summaries.classes
    if summary.counts is None:
        y = generator(0, summary.name, "targets").standard_normal((_ROWS, 1))
    agent = Agent(summary.name, learner, x, y)
    record_of(agent).encode_labels(summaries.classes)
    return agent


def _inputs(rows: int, summaries: Summaries, owner: str) -> np.ndarray:
    return generator(0, owner, "inputs").standard_normal((rows, *summaries.shape)).astype(np.float32)
