"""The best round of a run by validation: by the samples that each agent holds out of its own, never by test samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from codistill.results.agents import MOST_LINES, MOST_ON_PAGE, mean_of_known, metric_name, score_cell, score_text
from codistill.results.records import Row
from codistill.results.scores import VALIDATION, Score
from codistill.results.tables import AnyCell, Cell, Table


@dataclass(frozen=True)
class ScoredRound:
    """What was measured in a round: of one agent, or on average of the honest agents that were evaluated."""

    round: int
    """Rounds done, from 1."""
    validation: float
    """The score on the samples that agents hold out of their own."""
    test: float | None
    """The score on the common test set or, without one, on the agents' own test data; None: there are none."""
    own: float | None
    """The score on own data: own test data, or the common test set weighted by the agent's class counts."""
    test_samples: int
    """The number of common test samples behind it."""


@dataclass(frozen=True)
class BestRound:
    """The evaluated round whose mean validation score is best; of equal ones the first."""

    score: Score
    """What was measured: the first score of the run."""
    own_test: bool
    """Whether test scores are those on the agents' own test data, as there is no common test set."""
    best: ScoredRound
    """The means of the best round."""
    last: ScoredRound
    """The means of the last evaluated round."""
    agents: Mapping[str, tuple[ScoredRound, ScoredRound]]
    """Of each honest agent its own best round by its own validation samples, and its last one."""

    def sentence(self) -> str:
        """Both rounds in words."""
        best = f"best round by validation: {self.best.round} ({self._words(self.best)})"
        if self.best.round == self.last.round:
            return f"{best}, the last one that was evaluated"
        return f"{best}; the last one: {self.last.round} ({self._words(self.last)})"

    def _words(self, scored: ScoredRound) -> str:
        values = {"validation": scored.validation, self.test_word: scored.test}
        values |= {} if self.own_test else {"own data": scored.own}
        known = {what: value for what, value in values.items() if value is not None}
        return ", ".join(f"{what} {score_text(self.score.name, value)}" for what, value in known.items())

    @property
    def test_word(self) -> str:
        """What test scores are called in tables."""
        return "own test" if self.own_test else "test"


def find_best_round(rows: Sequence[Row], score: Score) -> BestRound | None:
    """The best round by validation; None where nobody has validation samples, or was evaluated."""
    own_test = not any(score.name in row for row in rows)
    of_agents: dict[str, list[ScoredRound]] = {}
    means: list[ScoredRound] = []
    for t, some in groupby(rows, key=itemgetter("round")):
        scored = {}
        for row in some:
            if f"{VALIDATION}{score.name}" in row and not row.get("lies"):
                validation, own = row[f"{VALIDATION}{score.name}"], row.get(f"own_{score.name}")
                test = own if own_test else row.get(score.name)
                scored[row["agent"]] = ScoredRound(int(t), validation, test, own, row.get("test_samples", 0))
        for name, one in scored.items():
            of_agents.setdefault(name, []).append(one)
        if scored:
            several = list(scored.values())
            validation = sum(one.validation for one in several) / len(several)
            test, own = (mean_of_known([getattr(one, key) for one in several]) for key in ("test", "own"))
            means.append(ScoredRound(int(t), validation, test, own, several[0].test_samples))
    if not means:
        return None
    agents = {name: (_best(score, rounds), rounds[-1]) for name, rounds in of_agents.items()}
    return BestRound(score, own_test, _best(score, means), means[-1], agents)


def _best(score: Score, rounds: Sequence[ScoredRound]) -> ScoredRound:
    """The first of the best: `max` and `min` return the first of equal ones."""
    return (max if score.greater_is_better else min)(rounds, key=lambda each: each.validation)


def best_round_table(rows: Sequence[Row], score: Score, *, page: bool = False) -> Table | None:
    """Each agent in the last round, in the best one of the mean, and in its own best one; None without validation."""
    found = find_best_round(rows, score)
    if found is None:
        return None
    at_best = {row["agent"]: row for row in rows if row["round"] == found.best.round}
    test, together = found.test_word, f"round {found.best.round}"
    headings = [
        "agent", "last: validation", test, f"{together}: validation", test, "own best round", "validation", test,
    ]  # fmt: skip

    def cells(*values: float | None) -> list[Cell]:
        return [score_cell(score.name, value) for value in values]

    shown = list(found.agents.items())[: MOST_ON_PAGE if page else MOST_LINES]
    table: list[list[AnyCell]] = []
    for name, (best, last) in shown:
        row = at_best.get(name, {})
        then = row.get(f"{VALIDATION}{score.name}"), row.get(f"own_{score.name}" if found.own_test else score.name)
        number = Cell(str(best.round), best.round)
        table.append(
            [name, *cells(last.validation, last.test), *cells(*then), number, *cells(best.validation, best.test)]
        )
    own = [best for best, _ in found.agents.values()]
    of_own = mean_of_known([best.validation for best in own]), mean_of_known([best.test for best in own])
    last, best = found.last, found.best
    mean: list[AnyCell] = ["mean", *cells(last.validation, last.test, best.validation, best.test), "", *cells(*of_own)]
    notes = [
        f"{metric_name(score.name)} on samples that each agent holds out of its own, and never learns from; a round is "
        "chosen by them alone",
        "the validation score of a chosen round is optimistic, its test score is not",
    ]
    if not found.own_test and best.test is not None:
        notes.append(
            'validation samples have the classes of the agent\'s own data, as "own data"; test samples may not'
        )
    if len(shown) < len(found.agents):
        notes.append(f"the first {len(shown)} of {len(found.agents):,} agents; the mean is of all")
    if best.test is not None and best.test_samples != last.test_samples:
        notes.append(
            f"round {best.round} was measured on {best.test_samples:,} random test samples, the last one on "
            f"{last.test_samples:,}"
        )
    align = "l" + "r" * (len(headings) - 1)
    if page:
        return Table(headings, align, table, [mean], notes=[found.sentence(), *notes])
    return Table(headings, align, table, [mean], "best round by validation", found.sentence(), notes)
