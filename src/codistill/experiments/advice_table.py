"""Advice for a person: a table, and one sentence."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from codistill.experiments.advice_candidates import ALONE
from codistill.experiments.advice_prior import AgentFacts, label_skew
from codistill.text import bytes_text

if TYPE_CHECKING:
    from codistill.experiments.advice import Advice
    from codistill.experiments.advice_gains import Gain

_SHOWN_AGENTS = 8  # with more, only the mean and the worst agent are shown
_WIDTH = 140


def tables(advice: Advice) -> list[Table]:
    """The options, each agent's gain, and why other protocols are no options."""
    found = [_options(advice)]
    if 1 < len(advice.facts) <= _SHOWN_AGENTS and len(advice.options) > 1:
        found.append(_agents(advice))
    if advice.left_out:
        found.append(_left_out(advice))
    return found


def _options(advice: Advice) -> Table:
    table = Table(title=f"expected gain over staying alone, {_unit(advice)}", title_justify="left")
    table.add_column("protocol")
    for heading in ("mean", "worst agent"):
        table.add_column(heading, justify="right")
    table.add_column("what is revealed")
    for heading in ("sent by an agent per round", "time per round"):
        table.add_column(heading, justify="right")
    for option in advice.options:
        worst, gain = option.gains.worst
        table.add_row(
            option.name + ("" if option.folds or advice.findings is None else " *"),
            "0" if option.name == ALONE else gain_text(option.gains.mean),
            "0" if option.name == ALONE else escape(f"{gain_text(gain)} ({worst})"),
            option.exchanges,
            "-" if option.sent is None else bytes_text(option.sent),
            "-" if option.seconds is None else f"{option.seconds:.2f} s",
            style="bold" if option.name == advice.recommended else None,
        )
    table.caption, table.caption_justify = _caption(advice), "left"
    return table


def _agents(advice: Advice) -> Table:
    table = Table(title="the same for each agent", title_justify="left")
    table.add_column("")
    for name in advice.facts:
        table.add_column(escape(name), justify="right")
    for label, values in _facts(advice).items():
        table.add_row(label, *values)
    table.add_section()
    for option in advice.options:
        if option.name != ALONE:
            style = "bold" if option.name == advice.recommended else None
            table.add_row(option.name, *(gain_text(option.gains.agents[name]) for name in advice.facts), style=style)
    table.caption = "label skew, input shift: 0 as the others, 1 nothing in common"
    table.caption_justify = "left"
    return table


def _facts(advice: Advice) -> dict[str, list[str]]:
    """What is known of the agents' data, from which part of the expectation comes."""
    rows = {"samples": [f"{each.samples}" for each in advice.facts.values()]}
    if advice.has_labels:
        rows["label skew"] = [f"{label_skew(each, _others(advice, name)):.2f}" for name, each in advice.facts.items()]
    if all(each.shift is not None for each in advice.facts.values()):
        rows["input shift"] = [f"{each.shift:.2f}" for each in advice.facts.values()]
    return rows


def _others(advice: Advice, name: str) -> list[AgentFacts]:
    return [each for other, each in advice.facts.items() if other != name]


def _left_out(advice: Advice) -> Table:
    table = Table(title="left out", title_justify="left")
    table.add_column("protocol")
    table.add_column("why", overflow="fold")
    by_reason: dict[str, list[str]] = {}
    for name, reason in advice.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        table.add_row(", ".join(names), escape(reason))
    return table


def gain_text(gain: Gain) -> str:
    """0.031 with error 0.009 -> '+3.1 ± 0.9'."""
    return f"{100 * gain.mean:+.1f} ± {100 * gain.error:.1f}"


def _unit(advice: Advice) -> str:
    if advice.has_labels:
        return "in points of accuracy on its own data (± standard error)"
    return "as fall of the RMSE on its own data in % of the targets' standard deviation (± standard error)"


def _caption(advice: Advice) -> str:
    findings = advice.findings
    if findings is None:
        return "from the summaries alone, nothing was run: probing runs on the data are far more certain"
    runs = sum(len(each) for each in findings.runs.values())
    largest = max(facts.samples for facts in advice.facts.values())
    words = f"{runs} probing runs of {findings.rounds} of {advice.rounds} rounds in {findings.seconds:.0f} s, "
    words += "on held-out training samples"
    if findings.samples < largest:
        words += f"; at most {findings.samples} of up to {largest} samples of an agent were used"
    if any(not option.folds for option in advice.options):
        words += "\n* no probing run, since the facts alone tell against it or time (--seconds) ran out"
    return words + ("\ninterrupted: more time makes it more certain" if findings.interrupted else "")


def recommendation(advice: Advice) -> str:
    """One sentence."""
    if advice.recommended == ALONE:
        best = next((option for option in advice.options if option.name != ALONE), None)
        if best is None:
            return "Stay alone: these agents can run no protocol, see the reasons above."
        why = f"{best.name} comes closest, with an expected {gain_text(best.gains.mean)} {_word(advice)} on average"
        if best.harms and best.gains.mean.above(0):
            why += f", but {_named(best.harms)} would be expected to lose"
        return f"Stay alone: {why}."
    option = advice[advice.recommended]
    name, worst = option.gains.worst
    words = f"Use {option.name}: expected {gain_text(option.gains.mean)} {_word(advice)} on average"
    if worst.mean < 0:
        return f"{words}, and {gain_text(worst)} for {name}, the agent that is expected to gain least."
    return f"{words}, and no agent is expected to lose."


def _word(advice: Advice) -> str:
    return "points" if advice.has_labels else "% of the targets' standard deviation"


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def as_text(advice: Advice) -> str:
    """Both, for a terminal."""
    out = io.StringIO()
    console = Console(file=out, width=_WIDTH)
    for table in tables(advice):
        console.print(table)
    return f"{out.getvalue()}{advice.sentence}"


def as_plain(advice: Advice) -> dict[str, Any]:
    """Everything as plain values, for JSON."""

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
            name: {
                "samples": each.samples,
                "label_skew": label_skew(each, _others(advice, name)),
                "input_shift": each.shift,
            }
            for name, each in advice.facts.items()
        },
    }
