"""What every runtime can do, and the one way to run a description: from its last checkpoint on, round by round."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from codistill.core.errors import CheckpointError, CodistillError
from codistill.core.spec import features_stay, present_only
from codistill.engine.description import RunDescription, settings_of, summary_of
from codistill.engine.evaluation import feature_space
from codistill.engine.exchange import Report
from codistill.engine.host import BEGIN
from codistill.engine.observers import History, Observers, TimeLimit
from codistill.engine.placement import IdleStates
from codistill.engine.store import RunFolder, Saved, StoredState, content_of, packed, read_features, read_outputs
from codistill.learners.ability import Ability
from codistill.nodes.agent import Agent
from codistill.nodes.node import Node
from codistill.nodes.record import record_of
from codistill.results.outputs import FeatureSpace, Outputs, View, collect
from codistill.results.records import Baseline, Evaluated, RoundEnded, Row, RunFinished, RunStarted, Scores
from codistill.results.summary import Summary
from codistill.topology import HUB
from codistill.wire.state import pack

_MOST_NAMED = 100  # absent agents that an event names; the metrics say of each whether it was present

ShouldStop = Callable[[], bool]


class Stopped(Exception):
    """A runtime was asked to stop while it was waiting for other nodes."""


def never() -> bool:
    return False


class Runtime(ABC):
    """Runs the nodes' coroutines and carries their messages."""

    def __init__(self, description: RunDescription) -> None:
        self.description = description

    @property
    def saved_nodes(self) -> tuple[str, ...]:
        """The nodes whose states `save` returns."""
        return tuple(node.name for node in self.description.nodes)

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Get ready for the round after the `done` that are done; `should_stop` ends any later wait."""

    def measure_baseline(self) -> Baseline | None:
        """What every agent reaches alone, where its data are; None: it is measured as a run of its own."""
        return None

    @abstractmethod
    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Run one phase (-1: begin; otherwise the round) to its end."""

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Every agent's scores on the common test set, or on a seeded part of it; `views`, if given, is filled."""
        return self.evaluate_some(None, samples, views)

    def evaluate_some(
        self, names: Collection[str] | None, samples: int | None, views: dict[str, View] | None = None
    ) -> dict[str, Scores]:
        """Evaluate some agents, or all (None); only in runtimes that reach all agents."""
        raise present_only(f"the runtime {type(self).__name__}")

    def features(self) -> dict[str, np.ndarray]:
        """Features (n, d) of the chosen test samples, by agent that has any; only where all agents are at hand."""
        raise features_stay(f"the runtime {type(self).__name__}")

    @abstractmethod
    def save(self) -> Saved:
        """What lives across rounds, by node."""

    @abstractmethod
    def load(self, saved: dict[str, bytes]) -> None:
        """Return the nodes to what was saved."""

    def load_saved(self, saved: Saved) -> None:
        """The same from what a checkpoint holds: some states may be in files."""
        self.load({name: packed(state) for name, state in saved.items()})

    def finish(self, *, complete: bool) -> None:
        """End the rounds: the agents at hand get their trained models, other machines are told."""

    def close(self) -> None:
        """Release all resources."""


def save_nodes(nodes: Sequence[Node]) -> dict[str, bytes]:
    return {node.name: pack(record_of(node).dump()) for node in nodes}


def load_nodes(nodes: Sequence[Node], saved: Saved, idle: IdleStates | None = None) -> None:
    """Return nodes to what was saved, by name; with `idle`, states of agents that are in files stay there."""
    for node in nodes:
        state = saved[node.name]
        if idle is not None and isinstance(node, Agent) and isinstance(state, StoredState):
            idle.adopt(node, state, in_checkpoint=True)
        else:
            record_of(node).resume(content_of(state))


def warm_up(agents: Sequence[Agent] | None = None) -> None:
    """Import now what takes seconds, and not in the first round, nor in every process that is forked.

    That is what torch's first optimiser imports, and skops, in whose format models other than torch's are saved and
    sent: unless all `agents` of the federation are known to have torch models.
    """
    torch.optim.SGD([torch.zeros(1)], lr=1.0)
    if agents is None or any(Ability.GRADIENTS not in agent.learner.abilities for agent in agents):
        importlib.import_module("skops.io")


@contextmanager
def one_thread() -> Iterator[None]:
    """Agents compute with one thread each: faster side by side, and equal to the bit everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)


# --- Running a description.


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
    alone_rows: list[Row] | None = None,
) -> Outcome:
    """Run the rounds that are left; `alone_rows`: the baseline's, where it was a run of its own.

    With a `store` it goes on from the latest checkpoint there, and writes metrics and checkpoints. Observers are told
    of everything, see `codistill.engine.observers`; a true value from `round_ended` stops the run after that
    round, as `should_stop` does, and a checkpoint is written. The runtime is closed in any case.
    """
    plan, history, began = description.spec, History(), time.monotonic()
    limit = [] if plan.max_minutes is None else [TimeLimit(plan.max_minutes)]
    told = Observers([*([store] if store else []), history, *limit, *observers])
    done, outcome = 0, "failed"
    baseline: list[Row] | None = None

    def summary() -> Summary:
        alone = baseline if alone_rows is None else alone_rows
        seconds = time.monotonic() - began
        return summary_of(description, history.rows, alone, history.outputs, history.features, seconds)

    def finished() -> RunFinished:
        seconds, asked = time.monotonic() - began, outcome == "stopped" and should_stop()
        return RunFinished(done, plan.rounds, outcome, seconds, asked, summary)

    with ExitStack() as closing:
        closing.callback(runtime.close)
        closing.callback(lambda: told.finished(finished()))
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
        complete = done == plan.rounds
        runtime.finish(complete=complete)
        outcome = "complete" if complete else "stopped"
    seconds = time.monotonic() - began
    features, events = tuple(history.features), tuple(history.events)
    return Outcome(done, complete, history.rows, history.outputs, baseline, seconds, events, features)


def _start(
    description: RunDescription, runtime: Runtime, store: RunFolder | None, told: Observers
) -> tuple[int, Saved | None]:
    start, saved, rows = store.latest(runtime.saved_nodes) if store else (0, None, [])
    outputs = read_outputs(store.folder, start) if store and start == description.spec.rounds else None
    notes = (*description.notes, *(store.notes if store else ()))
    features = read_features(store.folder, start) if store else ()
    scores = tuple(score.name for score in description.task_scores)
    name, names, rounds = description.protocol.name, description.names, description.spec.rounds
    begun = RunStarted(name, names, rounds, start, tuple(rows), outputs, notes, scores, features)
    told.tell("started", replace(begun, settings=settings_of(description), folder=store.folder if store else None))
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
    if not description.spec.alone or description.baseline_protocol is None:
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
    rounds, tested = description.spec.rounds, 0 if description.test is None else len(description.test[0])
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
    plan, began = description.spec, time.monotonic()
    report = _phases(description, runtime, t)
    took_part = description.faults.present(t) if report.present is None else report.present
    scores: dict[str, Scores] = {}
    outputs = None
    tested = 0 if description.test is None else len(description.test[0])
    samples = min(plan.samples(t) or tested, tested)  # that the round is evaluated on
    if plan.is_evaluated(t):
        views: dict[str, View] | None = {} if plan.is_last(t) else None
        if plan.evaluate_agents == "present":
            scores = runtime.evaluate_some(took_part, plan.samples(t), views)
        else:
            scores = runtime.evaluate(plan.samples(t), views)
        if views and description.test is not None:
            byzantine = description.faults.byzantine(plan.rounds)
            honest = {name: view for name, view in views.items() if name not in byzantine}
            outputs = collect(t + 1, honest, description.test[1])
        told.tell("evaluated", Evaluated(t + 1, scores, samples, outputs))
    features = feature_space(description, t + 1, runtime.features()) if plan.keeps_features(t) else None
    present = set(took_part)
    rows = _rows(description, t, report, scores, present, samples)
    events = _events(description, t, report, present)
    seconds = time.monotonic() - began - report.waited
    ended = RoundEnded(t + 1, rows, events, seconds, outputs, features)
    return any(told.tell("round_ended", ended))  # any true value: comparisons of numpy give np.True_, not True


def _phases(description: RunDescription, runtime: Runtime, t: int) -> Report:
    report = Report()
    if t == 0:
        report = runtime.run(BEGIN, description.names)
        report.present = None
    present = description.faults.present(t)
    return report.add(runtime.run(t, present)) if present or description.clock is not None else report


def _rows(
    description: RunDescription, t: int, report: Report, scores: dict[str, Scores], present: set[str], samples: int
) -> list[Row]:
    byzantine = description.faults.byzantine(description.spec.rounds)
    measured: dict[str, dict[str, list[float]]] = {}
    for about, name, value in report.measures:
        measured.setdefault(about, {}).setdefault(name, []).append(value)
    counted = {"sent": report.sent, "received": report.received, "steps": report.steps, "exchanges": report.exchanges}
    rows: list[Row] = []
    for agent in description.names:
        row: Row = {"round": t + 1, "agent": agent, "present": agent in present}
        if agent in byzantine:
            row["lies"] = True
        for name, counts in counted.items():
            row[name] = counts.get(agent, 0)
        if agent in measured:
            row.update({name: fmean(values) for name, values in measured[agent].items()})
        if scores.get(agent):
            row.update(scores[agent], test_samples=samples)
        rows.append(row)
    return rows


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
