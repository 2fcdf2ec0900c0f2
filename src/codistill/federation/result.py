"""The results of a run: the trained agents, every round's metrics, a table and a report."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import update_wrapper
from html import escape
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from codistill.core import versions
from codistill.core.devices import CPU
from codistill.core.errors import DataError
from codistill.core.files import write_atomically
from codistill.core.settings import from_table
from codistill.core.text import parse_json
from codistill.data.frames import Names, column_names, listed
from codistill.data.labels import CLASSIFICATION, LabelEncoding
from codistill.data.validation import as_floats, check_finite, plain_samples
from codistill.engine.description import RunDescription, models_of, summary_of
from codistill.engine.runtime import Outcome
from codistill.engine.store import RunFolder
from codistill.network.terms import describe_public
from codistill.nodes.faults import Fault
from codistill.nodes.record import record_of
from codistill.results.best_round import BestRound
from codistill.results.outputs import are_probabilities
from codistill.results.records import Row
from codistill.results.scores import Score, find_score
from codistill.results.summary import Summary
from codistill.topology.graphs import as_plain

if TYPE_CHECKING:
    import pandas as pd

    from codistill.learners.ability import AnyLearner
    from codistill.nodes.agent import Agent

NOT_BEGUN = Outcome(0, complete=False, rows=[], outputs=None, baseline_rows=None, seconds=0.0)


_CODES = threading.RLock()  # held while an agent answers for values that it forgets afterwards


class _ForClasses(DataError, AttributeError):
    """There is no such attribute, as scikit-learn expects it of a regressor; in the words of codistill."""


class _OfClasses:
    """A method of agents that predict classes; one that predicts real values has no such attribute."""

    def __init__(self, method: Callable[[TrainedAgent, Any], np.ndarray]) -> None:
        self._method = method
        update_wrapper(cast(Any, self), method)

    def __get__(self, agent: TrainedAgent | None, kind: Any = None) -> Callable[[Any], np.ndarray]:
        if agent is None:
            return cast(Callable[[Any], np.ndarray], self._method)
        agent._check_has_classes(self._method.__name__)
        return cast(Callable[[Any], np.ndarray], MethodType(self._method, agent))


class TrainedAgent:
    """An agent after the run: it predicts as its protocol says, and is a fitted estimator to scikit-learn.

    Like `sklearn.frozen.FrozenEstimator` it stays as it is: `fit` trains nothing, and a clone of it is itself. So
    scores, displays, `permutation_importance` and `cross_val_predict` take it, and each of them only predicts.
    """

    _kind = "trained"

    def __init__(self, agent: Agent, description: RunDescription) -> None:
        self.name = agent.name
        self._kept, self._description = agent, description
        self._encoding = description.encoding or LabelEncoding(description.task, description.classes)
        self._noted: set[str] = set()  # what was said once

    @property
    def _agent(self) -> Agent:
        """The agent, with its state in memory: until it is first asked for, that may be in a file."""
        reload = record_of(self._kept).reload
        if reload is not None:
            reload()
        return self._kept

    @property
    def learner(self) -> AnyLearner:
        """Its model."""
        return self._agent.learner

    @property
    def is_classifier(self) -> bool:
        """Whether the targets are classes, not real values."""
        return self._encoding.task == CLASSIFICATION

    def predict(self, x: Any) -> np.ndarray:
        """(n,) the class of each sample, as the labels were given; (n,) or (n, outputs) values for real-valued targets.

        Labels 0, 1, 2 and so on are answered by such integers, any others (strings, booleans, 1 to 3) as they are.
        """
        answers = self.answers(x)
        if not self.is_classifier:
            return answers[:, 0] if answers.shape[1] == 1 else answers
        return self._encoding.decode(answers.argmax(axis=1))

    @property
    def classes_(self) -> np.ndarray:
        """(C,) the classes in the order of the columns of `predict_proba`, as the labels were given."""
        self._check_has_classes("classes_")
        return self._encoding.decode(np.arange(self._description.classes))

    def _check_has_classes(self, attribute: str) -> None:
        if not self.is_classifier:
            what = "Probabilities are" if attribute == "predict_proba" else f"{attribute} is"
            raise _ForClasses(f"{what} for classes.", f"agent '{self.name}' predicts real values", "Use predict(x).")

    @property
    def feature_names_in_(self) -> np.ndarray:
        """(d,) the names of the columns in their order; no such attribute where samples were plain arrays."""
        if not record_of(self._agent).column_names:
            raise AttributeError(f"Agent '{self.name}' has no feature_names_in_: it was trained on a plain array.")
        return np.array(record_of(self._agent).column_names, dtype=object)

    @_OfClasses
    def predict_proba(self, x: Any) -> np.ndarray:
        """(n, C) class probabilities.

        A model without probabilities, such as a regressor on labels, has none here either: an error says so, and
        `answers` gives what it answers.
        """
        answers = self.answers(x)
        if not are_probabilities(answers):
            raise DataError(
                "Probabilities must be at least 0 and add up to 1.",
                f"agent '{self.name}' ({self.learner.describe()}) answers otherwise",
                "Use predict(x) for classes, or answers(x) for what it answers.",
            )
        return answers

    @_OfClasses
    def decision_function(self, x: Any) -> np.ndarray:
        """(n, C) the answers for each class; for two classes (n,) those for the second less those for the first."""
        answers = self.answers(x)
        return answers[:, 1] - answers[:, 0] if answers.shape[1] == 2 else answers

    def answers(self, x: Any) -> np.ndarray:
        """(n, C) what the protocol answers, as it is: probabilities, scores or real values."""
        wanted, what = record_of(self._agent).shape, f"the samples for agent '{self.name}'"
        known, given = record_of(self._agent).column_names, column_names(x, what)
        if len(wanted) == 1 and set(given) == set(map(str, range(wanted[0]))):
            known = known or tuple(map(str, range(wanted[0])))  # columns of arrays by their numbers
        record = record_of(self._agent)
        if record.frame is None or not record.frame.text:
            self._note_positions(known, given)
        if record.is_coded and record.frame is not None:
            with _CODES:
                mark = record.frame.mark()
                try:
                    return self._answers(record.own_columns(x, what), x)
                finally:
                    record.frame.forget(mark)
        try:
            samples = as_floats(np.asarray(plain_samples(x, what, known, leave_out=True)))
        except (TypeError, ValueError) as error:
            raise DataError("Samples must be numbers.", f"{error}", "Convert them to an array of numbers.") from None
        return self._answers(samples, x)

    def _answers(self, samples: np.ndarray, x: Any) -> np.ndarray:
        """The same for samples as an array; `x`: as they were given."""
        wanted = record_of(self._agent).shape
        if samples.ndim != len(wanted) + 1 or samples.shape[1:] != wanted:
            raise DataError(
                f"Samples for agent '{self.name}' must have the shape {wanted} each, one per row.",
                f"an array of shape {np.shape(x)}",
                "Bring them to that shape; a single sample x is x[None].",
            )
        check_finite(samples, "the samples", missing=samples.ndim == 2)
        if not len(samples) and record_of(self._agent).is_coded:
            return np.zeros((0, self._description.classes), np.float32)
        if not len(samples):  # models need a row to answer: the answer to one of its own says the form of all others
            return self._description.answer(self._agent, self._agent.shard.x[:1])[:0]
        return self._description.answer(self._agent, record_of(self._agent).prepared(samples))

    def _note_positions(self, known: Names, given: Names) -> None:
        """Say once that columns are taken by position, where an array meets a data frame."""
        if bool(known) != bool(given):
            met = (
                f"a plain array, taken as {listed(known)}" if known else "a data frame, but it was trained on an array"
            )
            self._note(f"agent '{self.name}' predicts columns by position: {met}")

    def _note(self, text: str) -> None:
        """Say something once."""
        if text not in self._noted:
            self._noted.add(text)
            print(f"note: {text}", file=sys.stderr)

    # --- as an estimator of scikit-learn --------------------------------------------------------------

    def score(self, x: Any, y: Any, sample_weight: Any = None) -> float:
        """The accuracy; for real values R². As of any estimator of scikit-learn, `y` as the labels were given."""
        from sklearn.metrics import accuracy_score, r2_score

        function = accuracy_score if self.is_classifier else r2_score
        return float(function(y, self.predict(x), sample_weight=sample_weight))

    @property
    def n_features_in_(self) -> int:
        """The number of columns of a table; no such attribute where samples have another shape, such as images."""
        shape = record_of(self._kept).shape
        if len(shape) != 1:
            raise AttributeError(f"Agent '{self.name}' has no n_features_in_: its samples have the shape {shape}.")
        return shape[0]

    def fit(self, x: Any, y: Any = None, **options: Any) -> TrainedAgent:
        """Nothing: it is trained, and stays as it is."""
        self._note(f"agent '{self.name}' is trained and stays as it is: fit does nothing")
        return self

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """None: how it was trained is in its run."""
        return {}

    def set_params(self, **options: Any) -> TrainedAgent:
        """Refused, but for no options: a trained agent has none."""
        if options:
            raise DataError(
                "A trained agent has no options.",
                listed(list(options)),
                "Change them before the run, and run it again.",
            )
        return self

    def __sklearn_clone__(self) -> TrainedAgent:
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return self._kept.learner.ready

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, RegressorTags, Tags, TargetTags

        record = record_of(self._kept)
        is_table, is_text = len(record.shape) == 1, record.frame is not None and record.frame.text
        return Tags(
            estimator_type="classifier" if self.is_classifier else "regressor",
            target_tags=TargetTags(required=False),
            classifier_tags=ClassifierTags() if self.is_classifier else None,
            regressor_tags=None if self.is_classifier else RegressorTags(),
            input_tags=InputTags(
                two_d_array=is_table and not is_text,
                string=record.is_coded,
                sparse=is_table and not record.is_coded,
                allow_nan=is_table and not is_text,
            ),
        )

    def __repr__(self) -> str:
        return f"<{self._kind} agent '{self.name}' ({self._description.protocol.name}): {self._described}>"

    @property
    def _described(self) -> str:
        kind = f"{self._description.classes} classes" if self.is_classifier else "real values"
        return f"{self._kept.learner.describe()}, {kind}"

    def _repr_html_(self) -> str:
        shape, frame = record_of(self._kept).shape, record_of(self._kept).frame
        columns = "1 feature" if shape == (1,) else f"{shape[0]} features" if len(shape) == 1 else f"shape {shape}"
        rows = {
            "agent": self.name,
            "protocol": self._description.protocol.name,
            "model": self._kept.learner.describe(),
            "samples": "texts" if frame is not None and frame.text else columns,
            "predicts": listed([str(name) for name in self.classes_]) if self.is_classifier else "real values",
        }
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
        return f"<table>{cells}</table>"

    def save(self, path: str | Path) -> Path:
        """Write the model with which it predicts to a file, which `codistill.load` opens; returns the file's path."""
        from codistill.federation.trained_model import save_model

        return save_model(self, path)


class Result:
    """The outcome of `Federation.run` or `serve`. On a hub `agents` is empty: their models stay with them."""

    def __init__(self, description: RunDescription, outcome: Outcome, alone_rows: Sequence[Row] | None) -> None:
        self.agents = {agent.name: TrainedAgent(agent, description) for agent in description.agents}
        self.rows = list(outcome.rows)
        self.alone_rows = None if alone_rows is None else list(alone_rows)
        self.events = list(outcome.events)  # of the rounds that were run now: refused messages, absent agents, remarks
        self.outputs = outcome.outputs  # the agents' answers on average, after the last round
        self.features = {each.round: each for each in outcome.features}  # by round of `features_at`
        self.seconds = outcome.seconds
        self.interrupted = not outcome.complete  # not all rounds are done: stopped by an observer or an operator
        self._description = description

    def frame(self) -> pd.DataFrame:
        """One row per round and agent."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def per_class(self) -> pd.DataFrame:
        """One row per agent and class: recall, precision, f1 and support (test samples) on the common test set.

        Of the predictions after the last round. Recall is the accuracy on the samples of the class. NaN where a class
        has no test samples (recall) or is never predicted (precision).
        """
        from codistill.results.per_class import per_class_frame

        return per_class_frame(self.summary(), self._labels)

    def confusion_matrix(self, agent: str) -> pd.DataFrame:
        """Test samples of the common test set by true class (rows) and predicted class (columns), of one agent."""
        from codistill.results.per_class import confusion_frame

        return confusion_frame(self.summary(), agent, self._labels)

    @property
    def _labels(self) -> list[Any]:
        """The classes, as the labels were given."""
        description = self._description
        encoding = description.encoding or LabelEncoding(description.task, description.classes)
        return list(encoding.decode(np.arange(description.classes)).tolist())

    def summary(self) -> Summary:
        """Everything that is shown of a run."""
        features = tuple(self.features.values())
        return summary_of(self._description, self.rows, self.alone_rows, self.outputs, features, self.seconds)

    @property
    def best_round(self) -> BestRound | None:
        """The best round by validation, beside the last one; None for a run without validation samples."""
        return self.summary().best_round()

    def report(self, path: str | Path) -> Path:
        """Write a self-contained HTML page."""
        from codistill.report.pages import write_report

        return write_report(self.summary(), Path(path))

    def __repr__(self) -> str:
        return self.summary().table_text()

    def _repr_html_(self) -> str:
        """The table of all agents, for a notebook."""
        return self.summary().table().html()


# The file run.json in a run's folder: agents, data, protocol and versions.

FACTS = "run.json"
_OF_A_SCORE = ("name", "greater_is_better", "task", "title", "percent")


def open_store(
    folder: Path | None, stack: ExitStack, description: RunDescription | None = None, *, resume: bool = True
) -> RunFolder | None:
    """The folder of a run, if it has one, locked until the stack is closed.

    With a `description` it gets run.json, by which it is compared and reported on, unless a recipe has written that.
    """
    if folder is None:
        return None
    store = RunFolder(folder)
    stack.callback(store.close)
    store.open(resume=resume)
    if description is not None and not (folder / FACTS).exists():
        write_atomically(folder / FACTS, json.dumps(facts_of(description), indent=1, default=str).encode())
    return store


def write_devices(folder: Path, devices: Mapping[str, str]) -> None:
    """Write on which device each agent computes, unless all use the CPU; a resume does not change it."""
    if set(devices.values()) <= {CPU}:
        return
    with suppress(ValueError, TypeError):  # that the file is damaged is said by those who need what is in it
        facts = parse_json((folder / FACTS).read_bytes())
        if "devices" not in facts:
            write_atomically(folder / FACTS, json.dumps({**facts, "devices": devices}, indent=1).encode())


def faults_in(facts: dict[str, Any]) -> tuple[Fault, ...]:
    """The faults that were injected into a run that was made in Python."""
    return tuple(
        from_table(Fault, {key: value for key, value in table.items() if value is not None}, "faults")
        for table in facts.get("faults", [])
    )


def scores_in(facts: dict[str, Any]) -> tuple[Score, ...]:
    """The scores of a run that was made in Python; functions of one's own are in no file."""
    return tuple(
        find_score(table["name"]) or Score(function=_not_here, **{key: table[key] for key in _OF_A_SCORE})
        for table in facts.get("scores", [])
    )


def _not_here(y: np.ndarray, answers: np.ndarray) -> None:
    """In the place of a function of one's own: rows hold what it returned."""


def facts_of(description: RunDescription, of_recipe: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What run.json says of a run.

    `of_recipe`: what the run of a recipe says besides, or otherwise; without, the facts hold what a recipe would say.
    """
    models, counts = models_of(description)
    protocol, compression, clock = description.protocol, description.compression, description.clock
    facts = {
        "agents": models,
        "samples": {agent.name: len(agent.shard) for agent in description.agents},
        "counts": None if counts is None else counts.tolist(),
        "class_names": list(description.class_names),
        "task": description.task,
        "test_samples": 0 if description.test is None else len(description.test[0]),
        "public": describe_public(description.public),
        "topology": None if description.topology.hub else as_plain(description.topology),
        "compression": None if compression is None else dataclasses.asdict(compression),
        "seed": description.seed,
        "versions": versions(),
    }
    if of_recipe is not None:
        return {**facts, **of_recipe}
    return {
        **facts,
        "scores": [{key: getattr(score, key) for key in _OF_A_SCORE} for score in description.task_scores],
        "faults": [dataclasses.asdict(fault) for fault in description.faults.injected],
        "clock": None if clock is None else dataclasses.asdict(clock),
        "protocol": {"name": protocol.name or type(protocol).__name__, "settings": dataclasses.asdict(protocol)},
    }
