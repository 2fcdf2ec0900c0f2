"""The results of a run: the trained agents, every round's metrics, a table and a report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.data.labels import CLASSIFICATION
from codistill.data.named_columns import Names, column_names, listed
from codistill.data.validation import as_floats, check_finite, plain_samples
from codistill.errors import DataError
from codistill.results.feature_space import FeatureSpace
from codistill.results.html_table import html_table
from codistill.results.outputs import Outputs, are_probabilities
from codistill.results.records import Row
from codistill.results.summary import Summary

if TYPE_CHECKING:
    import pandas as pd

    from codistill.agent import Agent
    from codistill.learners.ability import AnyLearner
    from codistill.runtimes.description import RunDescription

ELSEWHERE = "on its own machine"  # in the place of a model that this process does not see


class TrainedAgent:
    """An agent after the run: it predicts as its protocol says, with the methods of scikit-learn."""

    def __init__(self, agent: Agent, description: RunDescription) -> None:
        self.name = agent.name
        self._kept, self._description = agent, description
        self._noted = False  # that columns are taken by position

    @property
    def _agent(self) -> Agent:
        """The agent, with its state in memory: until it is first asked for, that may be in a file."""
        if self._kept.recall is not None:
            self._kept.recall()
        return self._kept

    @property
    def learner(self) -> AnyLearner:
        """Its model."""
        return self._agent.learner

    @property
    def is_classifier(self) -> bool:
        """Whether the targets are classes: some agent or some test set at hand has labels."""
        if self._description.encoding is not None:
            return self._description.encoding.task == CLASSIFICATION
        agents = self._description.agents or (self._kept,)
        tests = [self._description.test, *(agent.test for agent in agents)]
        return any(agent.shard.labels is not None for agent in agents) or any(
            test is not None and test[1].ndim == 1 for test in tests
        )

    def predict(self, x: Any) -> np.ndarray:
        """(n,) the class of each sample, as the labels were given; for real-valued targets (n, outputs) the values.

        Labels 0, 1, 2 and so on are answered by such integers, any others (strings, booleans, 1 to 3) as they are.
        """
        answers = self.decision_function(x)
        if not self.is_classifier:
            return answers
        encoding, chosen = self._description.encoding, answers.argmax(axis=1)
        return chosen if encoding is None else encoding.decode(chosen)

    @property
    def classes_(self) -> np.ndarray:
        """(C,) the classes in the order of the columns of `predict_proba`, as the labels were given."""
        encoding, codes = self._description.encoding, np.arange(self._description.classes)
        return codes if encoding is None else encoding.decode(codes)

    @property
    def feature_names_in_(self) -> np.ndarray:
        """(d,) the names of the columns in their order; no such attribute where samples were plain arrays."""
        if not self._agent.column_names:
            raise AttributeError(f"Agent '{self.name}' has no feature_names_in_: it was trained on a plain array.")
        return np.array(self._agent.column_names, dtype=object)

    def predict_proba(self, x: Any) -> np.ndarray:
        """(n, C) class probabilities.

        A model without probabilities, such as a regressor on labels, has none here either: an error says so, and
        `decision_function` gives what it answers.
        """
        if not self.is_classifier:
            raise DataError(
                "Probabilities are for classes.",
                f"agent '{self.name}' predicts real values",
                "Use predict(x).",
            )
        answers = self.decision_function(x)
        if not are_probabilities(answers):
            raise DataError(
                "Probabilities must be at least 0 and add up to 1.",
                f"agent '{self.name}' ({self.learner.describe()}) answers otherwise",
                "Use predict(x) for classes, or decision_function(x) for what it answers.",
            )
        return answers

    def decision_function(self, x: Any) -> np.ndarray:
        """(n, C) what the protocol answers, as it is: probabilities, scores or real values."""
        wanted, what = self._agent.shape, f"the samples for agent '{self.name}'"
        known, given = self._agent.column_names, column_names(x, what)
        if len(wanted) == 1 and set(given) == set(map(str, range(wanted[0]))):
            known = known or tuple(map(str, range(wanted[0])))  # columns of arrays by their numbers
        self._note_positions(known, given)
        try:
            samples = as_floats(np.asarray(plain_samples(x, what, known, leave_out=True)))
        except (TypeError, ValueError) as error:
            raise DataError("Samples must be numbers.", f"{error}", "Convert them to an array of numbers.") from None
        if samples.ndim != len(wanted) + 1 or samples.shape[1:] != wanted:
            raise DataError(
                f"Samples for agent '{self.name}' must have the shape {wanted} each, one per row.",
                f"an array of shape {np.shape(x)}",
                "Bring them to that shape; a single sample x is x[None].",
            )
        check_finite(samples, "the samples", missing=samples.ndim == 2)
        if not len(samples):  # models need a row to answer: the answer to one of its own says the form of all others
            return self._description.answer(self._agent, self._agent.shard.x[:1])[:0]
        return self._description.answer(self._agent, self._agent.prepared(samples))

    def _note_positions(self, known: Names, given: Names) -> None:
        """Say once that columns are taken by position, where an array meets a data frame."""
        if bool(known) != bool(given) and not self._noted:
            self._noted = True
            met = (
                f"a plain array, taken as {listed(known)}" if known else "a data frame, but it was trained on an array"
            )
            print(f"note: agent '{self.name}' predicts columns by position: {met}", file=sys.stderr)

    def save(self, path: str | Path) -> Path:
        """Write the model with which it predicts to a file, which `codistill.load` opens; returns the file's path."""
        from codistill.federation.trained_model import save_model

        return save_model(self, path)


class Result:
    """The outcome of `Federation.run` or `serve`. On a hub `agents` is empty: their models stay with them."""

    def __init__(
        self,
        description: RunDescription,
        rows: Sequence[Row],
        alone_rows: Sequence[Row] | None,
        outputs: Outputs | None,
        seconds: float,
        *,
        interrupted: bool,
        events: Sequence[str] = (),
        features: Sequence[FeatureSpace] = (),
    ) -> None:
        self.agents = {agent.name: TrainedAgent(agent, description) for agent in description.agents}
        self.rows = list(rows)
        self.alone_rows = None if alone_rows is None else list(alone_rows)
        self.events = list(events)  # of the rounds that were run now: refused messages, absent agents, remarks
        self.outputs = outputs  # the agents' answers on average, after the last round
        self.features = {each.round: each for each in features}  # by round of `features_at`
        self.seconds = seconds
        self.interrupted = interrupted  # not all rounds are done: stopped by an observer or an operator
        self._description = description

    def frame(self) -> pd.DataFrame:
        """One row per round and agent."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def summary(self) -> Summary:
        """Everything that is shown of a run."""
        description = self._description
        mixes = [agent.class_mix for agent in description.agents]
        known = [mix for mix in mixes if mix is not None]
        models = {agent.name: agent.learner.describe() for agent in description.agents}
        return Summary(
            title=description.protocol.name,
            protocol=description.protocol.name,
            agents={name: models.get(name, ELSEWHERE) for name in description.names},
            rows=self.rows,
            alone_rows=self.alone_rows,
            counts=np.stack(known) if known and len(known) == len(mixes) else None,
            class_names=description.class_names,
            seconds=self.seconds,
            test_samples=0 if description.test is None else len(description.test[0]),
            outputs=self.outputs,
            features=tuple(self.features.values()),
            topology=description.topology,
            faults=description.faults.injected,
            scores=description.task_scores,
        )

    def report(self, path: str | Path) -> Path:
        """Write a self-contained HTML page."""
        from codistill.reports.pages import write_report

        return write_report(self.summary(), Path(path))

    def __repr__(self) -> str:
        return self.summary().table_text()

    def _repr_html_(self) -> str:
        """The table of all agents, for a notebook."""
        return html_table(self.summary().table())
