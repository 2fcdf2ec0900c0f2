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

from codistill.data.named_options import Naming, by_number, check_names
from codistill.errors import LearnerError
from codistill.learners.ability import Ability, Learner
from codistill.learners.estimator_options import (
    has_sample_weight,
    ignoring_feature_names,
    silence_lightgbm,
    use_one_thread,
)
from codistill.learners.missing_values import takes_missing, without_empty_columns
from codistill.learners.portable.constant_models import ConstantModel, class_frequencies, export_constant
from codistill.message import Message

_TRIAL_ROWS = 20  # of each class: enough for the folds of cross-validation and for early stopping


class SklearnLearner(Learner):
    """An estimator that learns soft targets.

    A regressor gets them as a multi-output fit. A classifier gets weighted copies of each row: row i with
    label c and sample weight targets[i, c]; for plain labels that is the data as it is. A classifier that cannot be
    fitted to what there is of each class (one class only, or one sample of a class where folds need more) answers
    with the class frequencies until it is fitted to targets that suffice.
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
        use_one_thread(estimator)
        self._is_lightgbm = silence_lightgbm(estimator)
        self.block: int | None = None  # rows to predict at a time, if this is a received model
        self._columns = 0
        self._seen: np.ndarray | None = None  # labels behind the estimator's codes, if it takes no gaps
        self._constant: ConstantModel | None = None  # answers in place of an estimator that could not be fitted
        self._weight_name = _sample_weight_name(estimator)
        self._naming = Naming()
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

    def take_names(self, naming: Naming, x: np.ndarray) -> None:
        """Take the names that its options may use: of columns, and of classes in `class_weight`."""
        self._naming = naming
        check_names(self.estimator, naming, x)

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Fit anew on soft labels or real values."""
        rows = without_empty_columns(np.asarray(x).reshape(len(x), -1))
        self._columns = targets.shape[1]
        self._constant = None
        with by_number(self.estimator, self._naming, rows):
            self._fit(rows, targets)

    def _fit(self, rows: np.ndarray, targets: np.ndarray) -> None:
        if not self.classifies:
            self._fit_regressor(rows, targets)
            return
        try:
            if _is_one_hot(targets):
                self._fit_labels(rows, targets.argmax(axis=1))
            else:
                self._fit_weighted_copies(rows, targets)
        except (LearnerError, Warning):  # a warning, where Python is told to raise these
            raise
        except Exception:
            if not self._fits_more_classes(rows):
                raise  # not for want of classes
            self._constant = ConstantModel(class_frequencies(targets))

    @property
    def is_constant(self) -> bool:  # type: ignore[override]
        """Whether it answers with class frequencies, since the last targets were too poor in classes to be fitted."""
        return self._constant is not None

    def _fits_more_classes(self, rows: np.ndarray) -> bool:
        """Whether the estimator could be fitted to these rows if they had more classes, with enough samples of each."""
        return any(self._fits(rows, classes) for classes in sorted({2, min(self._columns, 10)} - {1}))

    def _fits(self, rows: np.ndarray, classes: int) -> bool:
        labels = np.arange(classes * _TRIAL_ROWS) % classes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fit of a few rows need not converge
            try:
                trial = without_empty_columns(rows[np.arange(len(labels)) % len(rows)])
                clone(self.estimator).fit(trial, labels)  # with what its options name by number, as in fit
            except Exception:  # the estimator may be its owner's code
                return False
        return True

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
        if not len(x) and self._columns:
            return np.zeros((0, self._columns), dtype=np.float32)
        rows = np.asarray(x).reshape(len(x), -1)
        if not self._columns:
            raise LearnerError(
                "A model must be fitted before it predicts.",
                f"{self.describe()} has not seen any data yet",
                "Run at least one round in which this agent is present.",
            )
        if self.block and len(rows) > self.block:
            return np.concatenate([self.predict(rows[i : i + self.block]) for i in range(0, len(rows), self.block)])
        if self._constant is not None:
            return self._constant.predict(rows)
        with ignoring_feature_names(self._is_lightgbm):
            return self._predict(rows)

    def _predict(self, rows: np.ndarray) -> np.ndarray:
        if not self.classifies:
            values = np.asarray(self.estimator.predict(rows), dtype=np.float32)
            return values.reshape(len(rows), self._columns)
        answer = np.zeros((len(rows), self._columns), dtype=np.float32)
        classes = self.seen_classes
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

        state = {"columns": self._columns, "seen": self._seen, "estimator": dump_estimator(self.estimator)}
        return state if self._constant is None else state | {"frequencies": self._constant.frequencies}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a fitted estimator of one's own checkpoint."""
        from codistill.learners.portable.estimator_state import load_own_estimator

        self.take(load_own_estimator(state["estimator"], self.estimator), state)

    def take(self, estimator: BaseEstimator, state: dict[str, Any]) -> None:
        """Answer by a fitted estimator, with what its state says besides."""
        self.estimator = estimator
        self._columns, self._seen = state["columns"], state["seen"]
        self._constant = ConstantModel(state["frequencies"]) if "frequencies" in state else None

    def export(self) -> Message:
        """The fitted estimator, for those types that hold no training rows."""
        from codistill.learners.portable.sklearn_models import export_estimator

        return export_estimator(self) if self._constant is None else export_constant(self._constant)

    @property
    def seen_classes(self) -> np.ndarray:
        """The classes that a fitted classifier knows, in the order of its probabilities."""
        return self._labels(self.estimator.classes_)

    @property
    def columns(self) -> int:
        """Number of outputs it was fitted on."""
        return self._columns

    def describe(self) -> str:
        """The estimator's class; of a pipeline, its last step."""
        return type(_last_step(self.estimator)).__name__

    def check(self, x: np.ndarray, targets: np.ndarray, owner: str) -> None:
        """An estimator must be able to learn from such rows; of a shard with one class that shows only later."""
        if not self.classifies:
            self._check_columns(targets)
            return
        if _is_one_hot(targets) and len(np.unique(targets.argmax(axis=1))) == 1:
            trial = SklearnLearner(clone(self.estimator))
            trial._naming = self._naming
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a fit of a few rows need not converge
                    trial.fit(x[: 2 * _TRIAL_ROWS], targets[: 2 * _TRIAL_ROWS])
            except Exception as error:  # the estimator may be its owner's code
                raise self._unfitted(error, owner) from None

    def check_travel(self, x: np.ndarray, owner: str) -> None:
        """Boosting of other libraries must have no option that plain trees do not say; a trial on few rows shows it."""
        from codistill.learners.portable.boosted_models import is_boosted

        if not is_boosted(self.estimator):
            return
        trial, rows = SklearnLearner(clone(self.estimator)), np.arange(2 * _TRIAL_ROWS)
        trial._naming = self._naming
        classes = 3 if "multi" in str(self.estimator.get_params().get("objective")) else 2
        targets = np.eye(classes)[rows % classes] if self._takes_soft_targets() else rows[:, None].astype(np.float64)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trial.fit(x[rows % len(x)], targets)
            trial.export()
        except LearnerError as error:
            must = f"{self.describe()} of agent '{owner}' {error.must}"
            raise LearnerError(must, error.found, error.do) from None
        except Exception as error:
            raise self._unfitted(error, owner) from None

    def _unfitted(self, error: Exception, owner: str) -> LearnerError:
        return LearnerError(
            f"{self.describe()} of agent '{owner}' must be able to learn from its samples.",
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            "Change its options, or the data.",
        )

    def advice(self, missing: Ability) -> str:
        """What would work instead."""
        if Ability.PREDICT in missing:
            return self._way_out()
        if missing == Ability.PORTABLE:
            from codistill.learners.portable.sklearn_models import why_not_to_travel

            return why_not_to_travel(self.estimator)
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


def _fits_many_columns(regressor: Any) -> bool:
    last = _last_step(regressor)
    # Two of scikit-learn's regressors can do more than their tags say.
    if isinstance(last, BaggingRegressor):
        return last.estimator is None or _fits_many_columns(last.estimator)
    return isinstance(last, MLPRegressor) or bool(get_tags(last).target_tags.multi_output)


def _sample_weight_name(estimator: Any) -> str | None:
    if isinstance(estimator, Pipeline):
        name, last = estimator.steps[-1]
        return f"{name}__sample_weight" if has_sample_weight(last) else None
    return "sample_weight" if has_sample_weight(estimator) else None


def _is_one_hot(targets: np.ndarray) -> bool:
    return bool(((targets == 0) | (targets == 1)).all() and (targets.sum(axis=1) == 1).all())
