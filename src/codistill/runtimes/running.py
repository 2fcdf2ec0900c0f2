"""The one way to run a description: from the last checkpoint on, round by round, on any runtime."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from codistill.errors import CheckpointError, CodistillError
from codistill.results.feature_space import FeatureSpace
from codistill.results.outputs import Outputs, View, collect
from codistill.results.records import Baseline, Evaluated, RoundEnded, Row, RunFinished, RunStarted, Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.feature_samples import feature_space
from codistill.runtimes.host import BEGIN
from codistill.runtimes.observers import Observers
from codistill.runtimes.observers.history import History
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, ShouldStop, Stopped, never
from codistill.runtimes.simulation import Simulation
from codistill.runtimes.stored_state import Saved
from codistill.topology import HUB

if TYPE_CHECKING:
    from codistill.runtimes.store import RunFolder


_MOST_NAMED = 100  # absent agents that an event names; the metrics say of each whether it was present


@dataclass(frozen=True)
class Outcome:
    """How far a run has come, with all rows of its metrics."""

    done: int  # rounds
    complete: bool
    rows: list[Row]
    outputs: Outputs | None
    baseline_rows: list[Row] | None  # where the runtime has measured the baseline
    seconds: float
    events: tuple[str, ...] = ()  # of the rounds that were run now: refused messages, absent agents, remarks
    features: tuple[FeatureSpace, ...] = ()  # of the rounds at which they were kept


def run(
    description: RunDescription,
    runtime: Runtime,
    *,
    store: RunFolder | None = None,
    observers: Sequence[Any] = (),
    should_stop: ShouldStop = never,
) -> Outcome:
    """Run the rounds that are left.

    With a `store` it goes on from the latest checkpoint there, and writes metrics and checkpoints. Observers are told
    of everything, see `codistill.runtimes.observers`; a true value from `round_ended` stops the run after that
    round, as `should_stop` does, and a checkpoint is written. The runtime is closed in any case.
    """
    plan, history, began = description.plan, History(), time.monotonic()
    told = Observers([*([store] if store else []), history, *observers])
    done, outcome = 0, "failed"
    baseline: list[Row] | None = None
    with ExitStack() as closing:
        closing.callback(runtime.close)
        closing.callback(lambda: told.finished(RunFinished(done, plan.rounds, outcome, time.monotonic() - began)))
        start, saved = _start(description, runtime, store, told)
        done = start
        if saved is not None:
            _load(runtime, saved)
        with suppress(Stopped):
            runtime.start(start, should_stop)
            baseline = _baseline(description, runtime, store, start, should_stop)
            for t in range(start, plan.rounds):
                if should_stop():
                    break
                stop = _run_round(description, runtime, t, told) or should_stop()
                done = t + 1
                if store is not None and (plan.has_checkpoint(done) or (stop and plan.checkpoint_every)):
                    store.write_checkpoint(done, runtime.save())
                if stop:
                    break
        runtime.finish(complete=done == plan.rounds)
        outcome = "complete" if done == plan.rounds else "stopped"
    seconds = time.monotonic() - began
    features, events = tuple(history.features), tuple(history.events)
    complete = done == plan.rounds
    return Outcome(done, complete, history.rows, history.outputs, baseline, seconds, events, features)


def measure_alone(
    description: RunDescription, should_stop: ShouldStop = never, observers: Sequence[Any] = ()
) -> Baseline:
    """Train copies of the agents at hand alone, as the baseline; what they have reached, nothing if stopped."""
    baseline, last = description.baseline(), _LastScores()
    if baseline is not None:
        outcome = run(baseline, Simulation(baseline), observers=[last, *observers], should_stop=should_stop)
        if outcome.complete:
            rows = {name: [row["steps"] for row in outcome.rows if row["agent"] == name] for name in baseline.names}
            return Baseline(last.scores, rows)
    return Baseline({}, {})


class _LastScores:
    """Keeps the scores of the only evaluation, which is the last."""

    def __init__(self) -> None:
        self.scores: dict[str, Scores] = {}

    def evaluated(self, record: Evaluated) -> None:
        self.scores = record.scores


def _start(
    description: RunDescription, runtime: Runtime, store: RunFolder | None, told: Observers
) -> tuple[int, Saved | None]:
    """Where the run goes on, and from what."""
    start, saved, rows = store.latest(runtime.saved_nodes) if store else (0, None, [])
    outputs = store.outputs(start) if store and start == description.plan.rounds else None
    notes = (*description.notes, *(store.notes if store else ()))
    features = store.features(start) if store else ()
    scores = tuple(score.name for score in description.task_scores)
    name, names, rounds = description.protocol.name, description.names, description.plan.rounds
    told.started(RunStarted(name, names, rounds, start, tuple(rows), outputs, notes, scores, features))
    return start, saved


def _load(runtime: Runtime, saved: Saved) -> None:
    if set(saved) == set(runtime.saved_nodes):
        try:
            return runtime.load_saved(saved)
        except CodistillError:
            raise
        except Exception as error:  # a state of another model: each library has its own way to say so
            found = f"{type(error).__name__}: {error}"[:200]
    else:
        found = f"a run of {', '.join(sorted(saved))}"
    raise CheckpointError(
        "A run must be resumed with the agents and models that it began with.",
        found,
        "Use the same agents, models and runtime, or another folder.",
    )


def _baseline(
    description: RunDescription, runtime: Runtime, store: RunFolder | None, start: int, should_stop: ShouldStop
) -> list[Row] | None:
    """The baseline's rows, where the runtime has to measure it; measured once, before the first round."""
    if not description.plan.baseline or description.baseline_protocol is None:
        return None
    kept = store.baseline_rows() if store else None
    if start > 0 or kept is not None:
        return kept
    measured = runtime.measure_baseline()
    if measured is None or should_stop():
        return None
    rows = _baseline_rows(description, measured)
    if store is not None:
        store.write_baseline(rows)
    return rows


def _baseline_rows(description: RunDescription, measured: Baseline) -> list[Row]:
    """As a run of its own writes them: agents alone send nothing, and are evaluated at the end."""
    rounds, tested = description.plan.rounds, 0 if description.test is None else len(description.test[0])
    rows: list[Row] = []
    for t in range(1, rounds + 1):
        for name in description.names:
            row: Row = {"round": t, "agent": name, "present": True, "sent": 0, "received": 0}
            if name in measured.steps:
                row["steps"] = measured.steps[name][t - 1]
            row["exchanges"] = 0
            if t == rounds and measured.scores.get(name):
                row.update(measured.scores[name], test_samples=tested)
            rows.append(row)
    return rows


def _run_round(description: RunDescription, runtime: Runtime, t: int, told: Observers) -> bool:
    """Run round t and tell of it; True if an observer wants to stop."""
    plan, began = description.plan, time.monotonic()
    report = _phases(description, runtime, t)
    scores: dict[str, Scores] = {}
    outputs = None
    samples = _tested(description, t)
    if plan.is_evaluated(t):
        views: dict[str, View] | None = {} if plan.is_last(t) else None
        if plan.evaluate_agents == "present":
            scores = runtime.evaluate_some(_took_part(description, t, report), plan.samples(t), views)
        else:
            scores = runtime.evaluate(plan.samples(t), views)
        if views and description.test is not None:
            byzantine = description.faults.byzantine(plan.rounds)
            honest = {name: view for name, view in views.items() if name not in byzantine}
            outputs = collect(t + 1, honest, description.test[1])
        told.evaluated(Evaluated(t + 1, scores, samples, outputs))
    features = feature_space(description, t + 1, runtime.features()) if plan.keeps_features(t) else None
    present = set(_took_part(description, t, report))
    rows = _rows(description, t, report, scores, present, samples)
    events = _events(description, t, report, present)
    seconds = time.monotonic() - began - report.waited
    return told.round_ended(RoundEnded(t + 1, rows, events, seconds, outputs, features))


def _took_part(description: RunDescription, t: int, report: Report) -> tuple[str, ...]:
    """Who took part in round t."""
    return description.faults.present(t) if report.present is None else report.present


def _phases(description: RunDescription, runtime: Runtime, t: int) -> Report:
    report = Report()
    if t == 0:
        report = runtime.run(BEGIN, description.names)
        report.present = None
    present = description.faults.present(t)
    return report.add(runtime.run(t, present)) if present or description.clock is not None else report


def _tested(description: RunDescription, t: int) -> int:
    """How many common test samples round t is evaluated on."""
    all_of_them = 0 if description.test is None else len(description.test[0])
    return min(description.plan.samples(t) or all_of_them, all_of_them)


def _rows(
    description: RunDescription, t: int, report: Report, scores: dict[str, Scores], present: set[str], samples: int
) -> list[Row]:
    byzantine = description.faults.byzantine(description.plan.rounds)
    measured: dict[str, dict[str, list[float]]] = {}
    for about, name, value in report.measures:
        measured.setdefault(about, {}).setdefault(name, []).append(value)
    counted = _counts(report).items()
    rows: list[Row] = []
    for agent in description.names:
        row: Row = {"round": t + 1, "agent": agent, "present": agent in present}
        if agent in byzantine:
            row["lies"] = True
        for name, counts in counted:
            row[name] = counts.get(agent, 0)
        if agent in measured:
            row.update({name: fmean(values) for name, values in measured[agent].items()})
        if scores.get(agent):
            row.update(scores[agent], test_samples=samples)
        rows.append(row)
    return rows


def _counts(report: Report) -> dict[str, dict[str, int]]:
    """What is counted of every agent in every round, in the order of the columns."""
    return {"sent": report.sent, "received": report.received, "steps": report.steps, "exchanges": report.exchanges}


def _events(description: RunDescription, t: int, report: Report, present: set[str]) -> list[str]:
    absent = [name for name in description.names if name not in present]
    names = ", ".join(absent) if len(absent) <= _MOST_NAMED else f"{len(absent):,} of {len(description.names):,} agents"
    events = [f"round 1: {note}" for note in description.notes] if t == 0 else []
    events += [f"round {t + 1}: absent: {names}"] if absent else []
    events += [f"round {t + 1}: {event}" for event in report.events]
    events += [f"round {t + 1}: {news}" for news in description.faults.news(t)]
    for name, fault in description.faults.byzantine(t + 1).items():
        if fault.first == t + 1:  # once, not for each message
            events.append(f"round {t + 1}: '{name}' begins to send Byzantine messages (injected fault: {fault.kind})")
    # In an order that does not depend on who was faster.
    place = {name: number for number, name in enumerate((*description.topology.names, HUB))}
    refused = sorted(report.refused, key=lambda item: (place[item[0]], place[item[1]], item[2]))
    for (receiver, sender, reason), times in Counter(refused).items():  # in the order in which they stand
        messages = "a message" if times == 1 else f"{times} messages"
        events.append(f"round {t + 1}: '{receiver}' continues without {messages} of '{sender}': {reason}")
    remarks = sorted(report.remarks, key=lambda item: place[item[0]])
    return events + [f"round {t + 1}: '{node}': {text}" for node, text in remarks]
