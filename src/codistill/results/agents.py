"""One line per agent: its scores alone and together, and whether it is better off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from codistill.core.text import percent_text
from codistill.results.scores import Score, find_score
from codistill.results.tables import Cell


def metric_name(metric: str) -> str:
    """The metric as it is written in a sentence."""
    score = find_score(metric)
    return metric.replace("_", " ") if score is None else score.words


def in_percent(metric: str) -> bool:
    """Whether a metric is shown in percent, and its gains in percentage points."""
    score = find_score(metric)
    return score is not None and score.percent


def score_text(metric: str, value: float | None) -> str:
    """0.956 -> '95.6 %'; an error as it is."""
    if value is None:
        return "-"
    return percent_text(value) if in_percent(metric) else f"{value:.4g}"


def gain_text(metric: str, value: float | None) -> str:
    """0.0123 -> '+1.2', in percentage points; the gain in an error as it is."""
    if value is None:
        return "-"
    return f"{100 * value:+.1f}" if in_percent(metric) else f"{value:+.3g}"


def score_cell(metric: str, value: float | None) -> Cell:
    return Cell(score_text(metric, value), value)


def gain_cell(metric: str, value: float | None) -> Cell:
    """A gain in a table; a loss stands out."""
    return Cell(gain_text(metric, value), value, worse=value is not None and value < 0)


@dataclass(frozen=True)
class AgentLine:
    """One agent's line in the final table; scores are None where they were not measured."""

    name: str
    model: str
    score: Score  # whose values these are
    alone: float | None
    together: float | None
    own_alone: float | None
    own_together: float | None
    sent: int
    received: int
    byzantine: bool = False  # in some round, by an injected fault; such agents are left out of means
    rounds: int = 0  # in which it took part
    scored: int | None = None  # the round of its scores, if it was not evaluated with the others at the end

    @property
    def described(self) -> str:
        """The model, marked where the agent is Byzantine or was not there at the end."""
        marks = ["Byzantine"] if self.byzantine else []
        marks += [self.scores_of] if self.scored is not None else []
        return f"{self.model} ({', '.join(marks)})" if marks else self.model

    @property
    def scores_of(self) -> str:
        """Of which round its scores are, where it was not evaluated at the end."""
        return f"scores of round {self.scored}" if self.has_scores else "not evaluated"

    @property
    def gain(self) -> float | None:
        """By how much it is better together than alone: positive is better, also where a lower score is."""
        return self.score.gain(self.alone, self.together)

    @property
    def has_scores(self) -> bool:
        return self.together is not None or self.own_together is not None

    @property
    def on_own_data(self) -> AgentLine:
        """The same line, with the scores on the agent's own data as its scores."""
        return replace(self, alone=self.own_alone, together=self.own_together)


def honest_lines(lines: Sequence[AgentLine]) -> list[AgentLine]:
    return [line for line in lines if not line.byzantine]


def counted_lines(lines: Sequence[AgentLine]) -> list[AgentLine]:
    """Those that count in a mean: of honest agents that were evaluated at the end."""
    at_end = [line for line in honest_lines(lines) if line.scored is None]
    return [line for line in at_end if line.has_scores] or at_end


def mean_label(lines: Sequence[AgentLine]) -> str:
    """What a mean is of, where it is not of all agents."""
    counted, honest = len(counted_lines(lines)), len(honest_lines(lines))
    if counted == len(lines):
        return "mean"
    kind = " honest" if honest < len(lines) else ""
    end = " at the end" if counted < honest else ""
    return f"mean of the {counted:,}{kind} agent{'' if counted == 1 else 's'}{end}"


def left_out_text(lines: Sequence[AgentLine], most: int = 3) -> str:
    """Who does not count in the means because it was not evaluated at the end; empty if there is nobody."""
    away = [line for line in honest_lines(lines) if line.scored is not None]
    if any(line.has_scores for line in lines):
        away += [line for line in honest_lines(lines) if not line.has_scores]
    if not away:
        return ""
    named = some_text([f"{line.name} ({line.scores_of})" for line in away], most)
    return f"not evaluated at the end, left out of all means: {len(away):,} of {len(lines):,} agents: {named}"


def some_text(words: Sequence[str], most: int) -> str:
    """'a, b, c, and 1,234 more'."""
    return ", ".join(words[:most]) + (f", and {len(words) - most:,} more" if len(words) > most else "")


def mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class AgainstAlone:
    """The honest agents after the run beside the same agents trained alone, each on its own data."""

    metric: str
    better: list[AgentLine]
    unchanged: list[AgentLine]
    worse: list[AgentLine]  # the largest loss first
    unmeasured: int = 0  # honest agents that lack a score
    byzantine: bool = False  # whether some agents were left out

    @classmethod
    def of(cls, metric: str, lines: Sequence[AgentLine]) -> AgainstAlone | None:
        """Compare all honest agents of which both scores on their own data are known; None if there are none."""
        honest = honest_lines(lines)
        counted = [line.on_own_data for line in counted_lines(lines)]
        verdicts = [(_verdict(metric, line), line) for line in counted if line.gain is not None]
        if not verdicts:
            return None
        better, unchanged, worse = ([line for found, line in verdicts if found == sign] for sign in (1, 0, -1))
        worse.sort(key=lambda line: -abs(line.gain or 0) if math.isfinite(line.gain or 0) else -math.inf)
        return cls(metric, better, unchanged, worse, len(honest) - len(verdicts), len(honest) < len(lines))

    @property
    def share(self) -> str:
        """'4 of 5': how many agents are better off."""
        return f"{len(self.better):,} of {len(self.better) + len(self.unchanged) + len(self.worse):,}"

    def losses(self, most: int) -> str:
        """'lab (-1.2 points), and 2 more': who is worse off than alone; 'none'."""
        unit = " points" if in_percent(self.metric) else ""
        named = [f"{line.name} ({gain_text(self.metric, line.gain)}{unit})" for line in self.worse]
        return some_text(named, most) or "none"

    def sentence(self, most: int = 3) -> str:
        """Whether every agent is better off, and who is not."""
        honest = "honest agents" if self.byzantine else "agents"
        parts = [f"better than alone on their own data: {self.share} {honest}", f"worse: {self.losses(most)}"]
        if self.unchanged:
            parts.insert(1, f"unchanged: {len(self.unchanged):,}")
        if self.unmeasured:
            parts.append(f"not measured: {self.unmeasured:,}")
        return "; ".join(parts)


def _verdict(metric: str, line: AgentLine) -> int:
    """1: better than alone, 0: the same as far as the shown digits tell, -1: worse."""
    gain = line.gain
    assert gain is not None
    if not math.isfinite(gain):  # a model that diverged is worse than any that did not
        return 1 if line.together is not None and math.isfinite(line.together) else -1
    if float(gain_text(metric, gain)) == 0:
        return 0
    return -1 if gain < 0 else 1


MOST_LINES, FEW_LINES = 40, 5  # a terminal shows all agents up to MOST_LINES; of more, the FEW_LINES best and worst
MOST_ON_PAGE, FEW_ON_PAGE = 500, 50  # the same on a page


def shown_lines(lines: Sequence[AgentLine], *, page: bool = False) -> tuple[list[AgentLine], str]:
    """All lines in their order or, of too many, the best and then the worst that count in the means.

    And in words which agents are shown; empty if all are.
    """
    most, few = (MOST_ON_PAGE, FEW_ON_PAGE) if page else (MOST_LINES, FEW_LINES)
    if len(lines) <= most:
        return list(lines), ""
    rest = f"the metrics have all {len(lines):,}"
    if not any(line.has_scores for line in lines):
        return list(lines[: 2 * few]), f"agents shown: the first {2 * few}; {rest}"
    ranked, which = sorted(counted_lines(lines), key=_badness), ""
    if len(ranked) > 2 * few:
        which = f"the {few} best and the {few} worst of {len(ranked):,}"
        ranked = [*ranked[:few], *ranked[-few:]]
    which = which or f"all {len(ranked):,}"
    return ranked, f"agents shown: {which} that were evaluated at the end, by their scores; {rest}"


def _badness(line: AgentLine) -> float:
    """The larger, the worse; a score that is not a number is the worst."""
    score = line.together if line.together is not None else line.own_together
    if score is None or math.isnan(score):
        return math.inf
    return -score if line.score.greater_is_better else score
