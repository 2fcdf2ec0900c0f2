"""Any scikit-learn classifier or regressor as a learner, wrapped as it is."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, clone, is_classifier, is_regressor
from sklearn.ensemble import BaggingRegressor
from sklearn.exceptions import DataConversionWarning
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags
from sklearn.utils.validation import has_fit_parameter

from codistill.errors import LearnerError
from codistill.learners.ability import Ability, Learner
from codistill.learners.missing_values import takes_missing
from codistill.message import Message


class SklearnLearner(Learner):
    """An estimator that learns soft targets.

    A regressor gets them as a multi-output fit. A classifier gets weighted copies of each row: row i with
    label c and sample weight targets[i, c]; for plain labels that is the data as it is.
    """

    def __init__(self, estimator: BaseEstimator) -> None:
        self.estimator = estimator
        self.classifies = self.probabilistic = bool(is_classifier(estimator))
        if not self.classifies and not is_regressor(estimator):
            raise LearnerError(
                "A scikit-learn model must be a classifier or a regressor.",
                type(estimator).__name__,
                "Choose one; a class of your own says so by ClassifierMixin or RegressorMixin.",
            )
        _use_one_thread(estimator)
        self.block: int | None = None  # rows to predict at a time, if this is a received model
        self._columns = 0
        self._seen: np.ndarray | None = None  # labels behind the estimator's codes, if it takes no gaps
        self._weight_name = _sample_weight_name(estimator)
        self.takes_missing = takes_missing(estimator)
        self.abilities = Ability.LABELS
        if self._takes_soft_targets():
            self.abilities |= Ability.PREDICT
        from codistill.learners.portable.sklearn_models import may_travel

        if may_travel(estimator):
            self.abilities |= Ability.PORTABLE

    def _takes_soft_targets(self) -> bool:
        if self.classifies:
            return self._weight_name is not None
        return _fits_many_columns(self.estimator)

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Fit anew on soft labels or real values."""
        rows = np.asarray(x).reshape(len(x), -1)
        self._columns = targets.shape[1]
        if not self.classifies:
            self._fit_regressor(rows, targets)
        elif _is_one_hot(targets):
            self._fit_labels(rows, targets.argmax(axis=1))
        else:
            self._fit_weighted_copies(rows, targets)

    def _fit_regressor(self, rows: np.ndarray, targets: np.ndarray) -> None:
        self._check_columns(targets)
        wanted = targets.astype(np.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataConversionWarning)  # a single column is meant to be one
            self.estimator.fit(rows, wanted if self._takes_soft_targets() else wanted[:, 0])

    def _check_columns(self, targets: np.ndarray) -> None:
        if targets.shape[1] > 1 and not self._takes_soft_targets():
            raise self._cannot("its fit takes one output column only")

    def _fit_labels(self, rows: np.ndarray, labels: np.ndarray, **weights: np.ndarray) -> None:
        self._seen = None
        try:
            self.estimator.fit(rows, labels, **weights)
        except ValueError:
            # Some (XGBoost) take no labels but 0 .. k-1, and a shard need not hold every class.
            seen, codes = np.unique(labels, return_inverse=True)
            if len(seen) == seen[-1] + 1:
                raise
            self.estimator.fit(rows, codes, **weights)
            self._seen = seen

    def _fit_weighted_copies(self, rows: np.ndarray, targets: np.ndarray) -> None:
        if self._weight_name is None:
            raise self._cannot("its fit takes no sample_weight")
        if targets.min() < 0:
            raise LearnerError(
                f"{self.describe()} is a classifier and needs targets of at least 0.",
                f"a target of {targets.min():.4g}",
                "Use a regressor for real-valued targets.",
            )
        row, label = np.nonzero(targets)
        weights = targets[row, label].astype(np.float64)
        self._fit_labels(rows[row], label, **{self._weight_name: weights})

    def _cannot(self, reason: str) -> LearnerError:
        must = "A model must be able to learn soft targets."
        return LearnerError(must, f"{self.describe()}: {reason}", self._way_out())

    @property
    def ready(self) -> bool:  # type: ignore[override]
        """Whether it has been fitted."""
        return self._columns > 0

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Class probabilities with a column for every class, seen or not; real values for a regressor."""
        rows = np.asarray(x).reshape(len(x), -1)
        if not self._columns:
            raise LearnerError(
                "A model must be fitted before it predicts.",
                f"{self.describe()} has not seen any data yet",
                "Run at least one round in which this agent is present.",
            )
        if self.block and len(rows) > self.block:
            return np.concatenate([self.predict(rows[i : i + self.block]) for i in range(0, len(rows), self.block)])
        if not self.classifies:
            values = np.asarray(self.estimator.predict(rows), dtype=np.float32)
            return values.reshape(len(rows), self._columns)
        answer = np.zeros((len(rows), self._columns), dtype=np.float32)
        classes = self._labels(self.estimator.classes_)
        if len(classes) == 1:
            answer[:, classes[0]] = 1.0  # it knows no other class
        elif hasattr(self.estimator, "predict_proba"):
            answer[:, classes] = self.estimator.predict_proba(rows)
        else:
            answer[np.arange(len(rows)), self._labels(self.estimator.predict(rows))] = 1.0
        return answer

    def _labels(self, codes: Any) -> np.ndarray:
        labels = np.asarray(codes).astype(int)
        return labels if self._seen is None else self._seen[labels]

    def state(self) -> dict[str, Any]:
        """The fitted estimator in a format made for safe loading."""
        from codistill.learners.portable.estimator_state import dump_estimator

        return {"columns": self._columns, "seen": self._seen, "estimator": dump_estimator(self.estimator)}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a fitted estimator of one's own checkpoint."""
        from codistill.learners.portable.estimator_state import load_own_estimator

        self.estimator = load_own_estimator(state["estimator"], self.estimator)
        self._columns, self._seen = state["columns"], state["seen"]

    def export(self) -> Message:
        """The fitted estimator, for those types that hold no training rows."""
        from codistill.learners.portable.sklearn_models import export_estimator

        return export_estimator(self)

    @property
    def columns(self) -> int:
        """Number of outputs it was fitted on."""
        return self._columns

    def describe(self) -> str:
        """The estimator's class; of a pipeline, its last step."""
        return type(_last_step(self.estimator)).__name__

    def check(self, x: np.ndarray, targets: np.ndarray, owner: str) -> None:
        """A shard with one class is fine for a forest, and an error for those that need two."""
        if not self.classifies:
            self._check_columns(targets)
            return
        labels = targets.argmax(axis=1)
        if _is_one_hot(targets) and len(np.unique(labels)) == 1:
            trial = SklearnLearner(clone(self.estimator))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a fit of a few rows need not converge
                    trial.fit(x[:8], targets[:8])
            except ValueError as error:
                raise LearnerError(
                    f"The shard of agent '{owner}' must hold at least two classes for {self.describe()}.",
                    f"only class {labels[0]} ({str(error)[:100]})",
                    "Choose another partition, or a model that can start from one class (a forest, a torch module).",
                ) from None

    def advice(self, missing: Ability) -> str:
        """What would work instead."""
        if Ability.PREDICT in missing:
            return self._way_out()
        if missing == Ability.PORTABLE:
            return (
                "Models that keep training rows inside (neighbours, support vectors, kernels, class means) must not "
                "travel: use a tree, forest, boosting or linear model."
            )
        return f"Use a torch module, or a protocol that needs no '{missing.words()}'."

    def _way_out(self) -> str:
        if self.classifies:
            return (
                "Use its regressor counterpart, or a classifier whose fit takes sample_weight "
                "(LogisticRegression, forests, boosting, SVC)."
            )
        return "Wrap it: sklearn.multioutput.MultiOutputRegressor(...), or use a forest or ridge regressor."


def _last_step(estimator: Any) -> Any:
    return estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator


def _use_one_thread(estimator: Any) -> None:
    """Agents compute with one thread each. For scikit-learn None means one thread, for others all of them."""
    parameters = estimator.get_params()
    for name, value in parameters.items():
        path, _, last = name.rpartition("__")
        if last == "n_jobs":
            owner = parameters[path] if path else estimator
            if value not in ({None, 1} if type(owner).__module__.startswith("sklearn.") else {1}):
                estimator.set_params(**{name: 1})


def _fits_many_columns(regressor: Any) -> bool:
    last = _last_step(regressor)
    # Two of scikit-learn's regressors can do more than their tags say.
    if isinstance(last, BaggingRegressor):
        return last.estimator is None or _fits_many_columns(last.estimator)
    return isinstance(last, MLPRegressor) or bool(get_tags(last).target_tags.multi_output)


def _sample_weight_name(estimator: Any) -> str | None:
    if isinstance(estimator, Pipeline):
        name, last = estimator.steps[-1]
        return f"{name}__sample_weight" if has_fit_parameter(last, "sample_weight") else None
    return "sample_weight" if has_fit_parameter(estimator, "sample_weight") else None


def _is_one_hot(targets: np.ndarray) -> bool:
    return bool(((targets == 0) | (targets == 1)).all() and (targets.sum(axis=1) == 1).all())
