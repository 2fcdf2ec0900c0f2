"""The loop over rounds: drive, evaluate, tell the observers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from codistill.results.outputs import View, collect
from codistill.results.records import Record, Row
from codistill.runtimes.host import BEGIN, Report
from codistill.runtimes.observers import Observer
from codistill.runtimes.runtime import Runtime, Scores, Stage
from codistill.settings import check_settings, setting
from codistill.topology import HUB


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many rounds, and what is measured when."""

    rounds: int = setting(10, "number of rounds", at_least=1)
    evaluate_every: int = setting(1, "rounds between evaluations; the last round is always evaluated", at_least=1)
    evaluate_samples: int | None = setting(
        None, "test samples per evaluation, the full test set in the last round; absent: all", at_least=1
    )

    def __post_init__(self) -> None:
        check_settings(self, "plan")

    def is_due(self, t: int) -> bool:
        """Whether round t (from 0) is evaluated."""
        return (t + 1) % self.evaluate_every == 0 or self.is_last(t)

    def is_last(self, t: int) -> bool:
        """Whether round t is the last."""
        return t + 1 == self.rounds

    def samples(self, t: int) -> int | None:
        """How many test samples round t is evaluated on; None for all."""
        return None if self.is_last(t) else self.evaluate_samples


def drive(
    stage: Stage,
    runtime: Runtime,
    plan: Plan,
    observers: Sequence[Observer],
    *,
    start: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Run the rounds from `start` on; returns how many are done."""
    for t in range(start, plan.rounds):
        began = time.monotonic()
        report = _round(stage, runtime, t)
        views: dict[str, View] | None = {} if plan.is_last(t) else None
        scores = runtime.evaluate(plan.samples(t), views) if plan.is_due(t) else {}
        record = _record(stage, t, report, scores, plan, time.monotonic() - began - report.waited)
        if views and stage.test is not None:
            honest = {name: view for name, view in views.items() if name not in stage.faults.byzantine(plan.rounds)}
            record = replace(record, outputs=collect(t + 1, honest, stage.test[1]))
        for observer in observers:
            observer.round_ended(record, runtime.save)
        if should_stop():
            return t + 1
    return plan.rounds


def _round(stage: Stage, runtime: Runtime, t: int) -> Report:
    report = Report()
    if t == 0:
        report = runtime.run(BEGIN, stage.names)
        report.present = None
    present = stage.faults.present(t)
    return report.add(runtime.run(t, present)) if present else report


def _record(stage: Stage, t: int, report: Report, scores: dict[str, Scores], plan: Plan, seconds: float) -> Record:
    present = set(stage.faults.present(t) if report.present is None else report.present)
    tested = 0 if stage.test is None else len(stage.test[0])
    samples = min(plan.samples(t) or tested, tested)
    byzantine = stage.faults.byzantine(plan.rounds)
    rows: list[Row] = []
    measured: dict[str, dict[str, list[float]]] = {}
    for about, name, value in report.measures:
        measured.setdefault(about, {}).setdefault(name, []).append(value)
    for agent in stage.names:
        row: dict[str, Any] = {"round": t + 1, "agent": agent, "present": agent in present}
        if agent in byzantine:
            row["lies"] = True
        row["sent"], row["received"] = report.sent.get(agent, 0), report.received.get(agent, 0)
        row.update({name: fmean(values) for name, values in measured.get(agent, {}).items()})
        if scores.get(agent):
            row.update(scores[agent], test_samples=samples)
        rows.append(row)
    return Record(t + 1, rows, _events(stage, t, report, present), seconds)


def _events(stage: Stage, t: int, report: Report, present: set[str]) -> list[str]:
    absent = [name for name in stage.names if name not in present]
    events = [f"round {t + 1}: absent: {', '.join(absent)}"] if absent else []
    events += [f"round {t + 1}: {event}" for event in report.events]
    events += [f"round {t + 1}: {news}" for news in stage.faults.news(t)]
    for name, fault in stage.faults.byzantine(t + 1).items():
        if fault.first == t + 1:  # once, not for each message
            events.append(f"round {t + 1}: '{name}' begins to send Byzantine messages (injected fault: {fault.kind})")
    # In an order that does not depend on who was faster.
    place = {name: number for number, name in enumerate((*stage.nodes[0].roster, HUB))}
    refused = sorted(report.refused, key=lambda item: (place[item[0]], place[item[1]], item[2]))
    for (receiver, sender, reason), times in Counter(refused).items():  # in the order in which they stand
        messages = "a message" if times == 1 else f"{times} messages"
        events.append(f"round {t + 1}: '{receiver}' goes on without {messages} of '{sender}': {reason}")
    remarks = sorted(report.remarks, key=lambda item: place[item[0]])
    return events + [f"round {t + 1}: '{node}': {text}" for node, text in remarks]
