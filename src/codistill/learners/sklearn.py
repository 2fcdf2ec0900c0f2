"""Any scikit-learn classifier or regressor as a learner, wrapped as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, clone, is_classifier
from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags
from sklearn.utils.validation import has_fit_parameter

from codistill.errors import LearnerError
from codistill.learners.ability import Ability, Learner
from codistill.message import Message


class SklearnLearner(Learner):
    """An estimator that learns soft targets.

    A regressor gets them as a multi-output fit. A classifier gets weighted copies of each row: row i with
    label c and sample weight targets[i, c]; for plain labels that is the data as it is.
    """

    def __init__(self, estimator: BaseEstimator) -> None:
        self.estimator = estimator
        # Agents compute with one thread each. For scikit-learn None means one thread, for others all of them.
        own = {None, 1} if type(estimator).__module__.startswith("sklearn.") else {1}
        if estimator.get_params(deep=False).get("n_jobs", 1) not in own:
            estimator.set_params(n_jobs=1)
        self.classifies = bool(is_classifier(estimator))
        self._columns = 0
        self._weight_name = _sample_weight_name(estimator)
        self.abilities = Ability.LABELS
        if self._takes_soft_targets():
            self.abilities |= Ability.PREDICT
        from codistill.learners.portable import may_travel

        if may_travel(estimator):
            self.abilities |= Ability.PORTABLE

    def _takes_soft_targets(self) -> bool:
        if self.classifies:
            return self._weight_name is not None
        return bool(get_tags(self.estimator).target_tags.multi_output)

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Fit anew on soft labels or real values."""
        rows = np.asarray(x).reshape(len(x), -1)
        self._columns = targets.shape[1]
        if not self.classifies:
            self._fit_regressor(rows, targets)
        elif _is_one_hot(targets):
            self.estimator.fit(rows, targets.argmax(axis=1))
        else:
            self._fit_weighted_copies(rows, targets)

    def _fit_regressor(self, rows: np.ndarray, targets: np.ndarray) -> None:
        if not self._takes_soft_targets():
            raise self._cannot("its fit takes one output column only")
        self.estimator.fit(rows, targets.astype(np.float64))

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
        self.estimator.fit(rows[row], label, **{self._weight_name: weights})

    def _cannot(self, reason: str) -> LearnerError:
        return LearnerError("A model must be able to learn soft targets.", f"{self.describe()}: {reason}", self._way_out())

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
        if not self.classifies:
            values = np.asarray(self.estimator.predict(rows), dtype=np.float32)
            return values.reshape(len(rows), self._columns)
        answer = np.zeros((len(rows), self._columns), dtype=np.float32)
        if hasattr(self.estimator, "predict_proba"):
            answer[:, self.estimator.classes_.astype(int)] = self.estimator.predict_proba(rows)
        else:
            answer[np.arange(len(rows)), self.estimator.predict(rows).astype(int)] = 1.0
        return answer

    def state(self) -> dict[str, Any]:
        """The fitted estimator in a format made for safe loading."""
        from codistill.learners.portable import dump_estimator

        return {"columns": self._columns, "estimator": dump_estimator(self.estimator)}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a fitted estimator of one's own checkpoint."""
        from codistill.learners.portable import load_own_estimator

        self.estimator = load_own_estimator(state["estimator"], self.estimator)
        self._columns = state["columns"]

    def export(self) -> Message:
        """The fitted estimator, for those types that hold no training rows."""
        from codistill.learners.portable import export_estimator

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
        labels = targets.argmax(axis=1)
        if self.classifies and _is_one_hot(targets) and len(np.unique(labels)) == 1:
            try:
                clone(self.estimator).fit(np.asarray(x[:8]).reshape(len(x[:8]), -1), labels[:8])
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
                "Models that keep training rows inside (neighbours, support vectors, kernels) must not travel: "
                "use a tree, forest, boosting or linear model."
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


def _sample_weight_name(estimator: Any) -> str | None:
    if isinstance(estimator, Pipeline):
        name, last = estimator.steps[-1]
        return f"{name}__sample_weight" if has_fit_parameter(last, "sample_weight") else None
    return "sample_weight" if has_fit_parameter(estimator, "sample_weight") else None


def _is_one_hot(targets: np.ndarray) -> bool:
    return bool(((targets == 0) | (targets == 1)).all() and (targets.sum(axis=1) == 1).all())
