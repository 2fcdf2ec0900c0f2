"""Advice from summaries: what organisations may tell one another of their data before they share anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.errors import RecipeError
from codistill.experiments.advice import Advice, advise_by_facts
from codistill.experiments.advice_candidates import Setting, find_candidates
from codistill.experiments.advice_prior import AgentFacts
from codistill.learners.ability import Ability
from codistill.learners.catalogue import make_learner
from codistill.randomness import generator, seed_libraries
from codistill.settings import check_settings, from_table, setting
from codistill.text import parse_json, parse_toml

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
                f"The summary of '{self.name}' must say how many samples it has.",
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
            raise RecipeError(
                "A model's table must say its kind, a string.", f"{self.model}", 'Write kind = "name" in it.'
            )


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


def is_summary(tables: Mapping[str, Any]) -> bool:
    """Whether a file holds summaries, and not a recipe."""
    agents = tables.get("agents")
    entries = agents if isinstance(agents, list) else []
    told = any(isinstance(entry, dict) and ("counts" in entry or "samples" in entry) for entry in entries)
    return "data" not in tables and (told or "protocol" not in tables)


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML or JSON file."""
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


def make_summaries(tables: Mapping[str, Any]) -> Summaries:
    """Check a file of summaries."""
    entries = tables.get("agents")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise RecipeError(
            "A file of summaries must have an [[agents]] table for each agent.", f"{entries!r}"[:80], "Add them."
        )
    agents = tuple(from_table(AgentSummary, entry, "agents") for entry in entries)
    made: Summaries = from_table(Summaries, {**tables, "agents": agents}, "summaries")
    names = [agent.name for agent in agents]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RecipeError("Every agent must have a name of its own.", f"'{twice}' more than once", "Rename one.")
    if len({None if agent.counts is None else len(agent.counts) for agent in agents}) > 1:
        said = ", ".join(f"{each.name}: {'none' if each.counts is None else len(each.counts)}" for each in agents)
        raise RecipeError(
            "The counts of all agents must be of the same classes.", said, "Write 0 for a class that an agent lacks."
        )
    return made


def advise_summaries(tables: Mapping[str, Any]) -> Advice:
    """A table of protocols that such agents can run, with what is to be expected from the facts alone."""
    summaries = make_summaries(tables)
    made = Setting(
        agents=tuple(_agent(summary, summaries) for summary in summaries.agents),
        classes=_classes(summaries),
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
    return advise_by_facts(facts, list(candidates.protocols), candidates.left_out, summaries.rounds)


def _classes(summaries: Summaries) -> int:
    counts = summaries.agents[0].counts
    return 1 if counts is None else max(len(counts), 2)


def _agent(summary: AgentSummary, summaries: Summaries) -> Agent:
    """An agent with a few made-up samples, to check what its model can do."""
    table = summary.model if isinstance(summary.model, dict) else {"kind": summary.model}
    options = {key: value for key, value in table.items() if key != "kind"}
    seed_libraries(0, summary.name, "model")
    learner = make_learner(table["kind"], options, summaries.shape, _classes(summaries))
    x = _inputs(_ROWS, summaries, summary.name)
    y: np.ndarray = np.arange(_ROWS) % _classes(summaries)
    if summary.counts is None:
        y = generator(0, summary.name, "targets").standard_normal((_ROWS, 1))
    agent = Agent(summary.name, learner, x, y)
    agent.settle(_classes(summaries))
    return agent


def _inputs(rows: int, summaries: Summaries, owner: str) -> np.ndarray:
    return generator(0, owner, "inputs").standard_normal((rows, *summaries.shape)).astype(np.float32)
