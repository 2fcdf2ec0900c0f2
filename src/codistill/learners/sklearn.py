"""Any scikit-learn classifier or regressor as a learner, wrapped as it is."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, clone, is_classifier, is_regressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import BaggingRegressor
from sklearn.exceptions import DataConversionWarning
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection._search import BaseSearchCV
from sklearn.neighbors import KNeighborsClassifier, RadiusNeighborsClassifier
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags

from codistill.core.errors import CodistillError, LearnerError
from codistill.data.frame_encoding import FrameEncoding
from codistill.data.frames import Naming, by_number, check_names, takes_frame
from codistill.learners.ability import Ability, Learner, not_fitted
from codistill.learners.portable.estimators import export_estimator, may_travel, why_not_to_travel
from codistill.learners.portable.models import class_frequencies, export_constant
from codistill.learners.portable.skops_archive import dump_estimator, load_own_estimator
from codistill.learners.portable.trees import is_boosted
from codistill.wire.message import Message

_COPIES = 10  # of each row, for a classifier that takes no weights
_TRIAL_ROWS = 20  # of each class: enough for the folds of cross-validation and for early stopping
_FRAME_ROWS = 200  # of a data frame, for a trial before the run


class SklearnLearner(Learner):
    """An estimator that learns soft targets.

    A regressor gets them as a multi-output fit. A classifier gets weighted copies of each row: row i with
    label c and sample weight targets[i, c]; for plain labels that is the data as it is. Where its fit takes no
    sample_weight, it gets ten copies of each row, whose labels are shared out by targets[i]. A search of options, such
    as GridSearchCV, is done on the likeliest labels, and the model that it finds is fitted to the soft ones: copies of
    one row must not be on both sides of a split. A classifier that cannot be fitted to what there is of each class (one
    class only, or one sample of a class where folds need more) answers with the class frequencies until it is fitted to
    targets that suffice.

    Samples with columns that hold no numbers are given to it as the data frame they were, and so is any data frame if
    it has transformers of its owner's making. An estimator that gets frames is not sent to others.
    """

    takes_frames = True

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
        self.columns = 0  # outputs it was fitted on
        self._seen: np.ndarray | None = None  # labels behind the estimator's codes, if it takes no gaps
        self._frequencies: np.ndarray | None = None  # the answer in place of an estimator that could not be fitted
        last = _last_step(estimator)
        self._takes_soft_targets = (
            has_sample_weight(last) or not _compares_rows(estimator) if self.classifies else _fits_many_columns(last)
        )
        self._naming = Naming()
        self.takes_missing = takes_missing(estimator)
        self.abilities = Ability.PREDICT if self._takes_soft_targets else Ability.LABELS
        if may_travel(estimator):
            self.abilities |= Ability.PORTABLE

    def take_names(self, naming: Naming, x: np.ndarray) -> None:
        """Take the names that its options may use: of columns, and of classes in `class_weight`."""
        if not self.ready:  # else it has taken them before
            decoded = takes_frame(self.estimator, naming.frame)
            self._naming = replace(naming, decoded=decoded)
            check_names(self.estimator, self._naming, x)
            if decoded:
                self.take_frames(naming.frame)

    def take_frames(self, frame: FrameEncoding | None) -> None:
        """Get samples as data frames from now on."""
        self.frame = frame
        self.abilities &= ~Ability.PORTABLE

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        array = self._without_empty_columns(np.asarray(x).reshape(len(x), -1))
        self.columns = targets.shape[1]
        self._frequencies = None
        rows = self._inputs(array)
        with by_number(self.estimator, self._naming, array), self._named_errors("learn from"):
            if not self.classifies:
                self._fit_regressor(rows, targets)
                return
            try:
                if _is_one_hot(targets):
                    self._fit_labels(self.estimator, rows, targets.argmax(axis=1))
                else:
                    self._fit_soft_labels(rows, targets)
            except (LearnerError, Warning):  # a warning, if Python turns these into errors
                raise
            except Exception:
                # Could it be fitted to these rows if they had more classes, with enough samples of each?
                if not any(self._fits(rows, classes) for classes in sorted({2, min(self.columns, 10)} - {1})):
                    raise  # not for want of classes
                self._frequencies = class_frequencies(targets)

    def _inputs(self, rows: np.ndarray) -> Any:
        """Rows as the estimator gets them: an array or a data frame (of texts a series)."""
        return rows if self.frame is None else self.frame.decode(rows)

    @contextmanager
    def _named_errors(self, doing: str) -> Iterator[None]:
        """What its own steps say of a data frame, such as of a category that they have not met, as a sentence."""
        try:
            yield
        except CodistillError:
            raise
        except Exception as error:  # of any library, or its owner's own code
            if self.frame is None:
                raise
            raise LearnerError(
                f"{self.describe()} of {self._naming.owner} must be able to {doing} all rows of its data frames.",
                f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                "Encode text, categories and dates in its pipeline, or by prepare=, in a way that accepts what it has "
                'not met and what is missing, such as OneHotEncoder(handle_unknown="ignore").',
            ) from error

    def _without_empty_columns(self, rows: np.ndarray) -> np.ndarray:
        if self.frame is None or not self.frame.coded:
            return without_empty_columns(rows)
        filled = without_empty_columns(rows)
        return np.where(self.frame.is_coded, rows, filled) if filled is not rows else rows

    @property
    def is_constant(self) -> bool:  # type: ignore[override]
        return self._frequencies is not None

    def _fits(self, rows: Any, classes: int) -> bool:
        labels = np.arange(classes * _TRIAL_ROWS) % classes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fit of a few rows need not converge
            try:
                trial = taken(rows, np.arange(len(labels)) % len(rows))
                trial = trial if self.frame is not None else without_empty_columns(trial)
                clone(self.estimator).fit(trial, labels)  # with what its options name by number, as in fit
            except Exception:  # the estimator may be its owner's code
                return False
        return True

    def _fit_regressor(self, rows: Any, targets: np.ndarray) -> None:
        self._check_columns(targets)
        wanted = targets.astype(np.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataConversionWarning)  # a single column is meant to be one
            self.estimator.fit(rows, wanted if self._takes_soft_targets else wanted[:, 0])

    def _check_columns(self, targets: np.ndarray) -> None:
        if targets.shape[1] > 1 and not self._takes_soft_targets:
            raise self._cannot()

    def _fit_labels(self, estimator: Any, rows: Any, labels: np.ndarray, **weights: np.ndarray) -> None:
        self._seen = None
        try:
            estimator.fit(rows, labels, **weights)
        except ValueError:
            # Some (XGBoost) take no labels but 0 .. k-1, and a shard need not hold every class.
            seen, codes = np.unique(labels, return_inverse=True)
            if len(seen) == seen[-1] + 1:
                raise
            estimator.fit(rows, codes, **weights)
            self._seen = seen

    def _fit_soft_labels(self, rows: Any, targets: np.ndarray) -> None:
        if not self._takes_soft_targets:
            raise self._cannot()
        if targets.min() < 0:
            raise LearnerError(
                f"{self.describe()} is a classifier and needs targets of at least 0.",
                f"a target of {targets.min():.4g}",
                "Use a regressor for real-valued targets.",
            )
        estimator, last = self.estimator, _last_step(self.estimator)
        if isinstance(last, BaseSearchCV):
            self._fit_labels(estimator, rows, targets.argmax(axis=1))
            rows = rows if last is estimator else estimator[:-1].transform(rows)
            estimator, last = last.best_estimator_, _last_step(last.best_estimator_)
        if has_sample_weight(last):
            row, label = np.nonzero(targets)
            name = "sample_weight" if last is estimator else f"{estimator.steps[-1][0]}__sample_weight"
            self._fit_labels(estimator, taken(rows, row), label, **{name: targets[row, label].astype(np.float64)})
        else:
            row, label = labelled_copies(targets)
            self._fit_labels(estimator, taken(rows, row), label)

    def _cannot(self) -> LearnerError:
        must = "A model must be able to learn soft targets."
        return LearnerError(must, f"{self.describe()}: {self._why_not_soft()}", self._way_out())

    def _why_not_soft(self) -> str:
        if not self.classifies:
            return "its fit takes one output column only"
        nearest = next(part for part in _parts(self.estimator) if isinstance(part, _NEAREST))
        return (
            f"{type(nearest).__name__} answers with the labels of the nearest rows, and soft labels are learnt by "
            "copies of a row, one for each of its labels, which would be its nearest neighbours"
        )

    @property
    def ready(self) -> bool:  # type: ignore[override]
        return self.columns > 0

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Class probabilities with a column for every class, seen or not; real values for a regressor."""
        if not len(x) and self.columns:
            return np.zeros((0, self.columns), dtype=np.float32)
        rows = np.asarray(x).reshape(len(x), -1)
        if not self.columns:
            raise not_fitted(self)
        if self.block and len(rows) > self.block:
            return np.concatenate([self.predict(rows[i : i + self.block]) for i in range(0, len(rows), self.block)])
        if self._frequencies is not None:
            return np.tile(self._frequencies, (len(rows), 1))
        with warnings.catch_warnings() if self._is_lightgbm else nullcontext():
            if self._is_lightgbm:  # it gives names to the columns of arrays, which scikit-learn misses in the next ones
                warnings.filterwarnings("ignore", "X does not have valid feature names", UserWarning)
            with self._named_errors("answer"):
                return self._predict(self._inputs(rows))

    def _predict(self, rows: Any) -> np.ndarray:
        if not self.classifies:
            values = np.asarray(self.estimator.predict(rows), dtype=np.float32)
            return values.reshape(len(rows), self.columns)
        answer = np.zeros((len(rows), self.columns), dtype=np.float32)
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
        state = {"columns": self.columns, "seen": self._seen, "estimator": dump_estimator(self.estimator)}
        return state if self._frequencies is None else state | {"frequencies": self._frequencies}

    def restore(self, state: dict[str, Any]) -> None:
        self.take(load_own_estimator(state["estimator"], self.estimator), state)

    def take(self, estimator: BaseEstimator, state: dict[str, Any]) -> None:
        self.estimator = estimator
        self.columns, self._seen = state["columns"], state["seen"]
        self._frequencies = state.get("frequencies")

    def export(self) -> Message:
        return export_estimator(self) if self._frequencies is None else export_constant(self._frequencies)

    @property
    def seen_classes(self) -> np.ndarray:
        """The classes that a fitted classifier knows, in the order of its probabilities."""
        return self._labels(self.estimator.classes_)

    def describe(self) -> str:
        """The estimator's class; of a pipeline, its last step."""
        return type(_last_step(self.estimator)).__name__

    def check(self, x: np.ndarray, targets: np.ndarray, owner: str) -> None:
        """An estimator must be able to learn from such rows; of a shard with one class that shows only later."""
        if not self.classifies:
            self._check_columns(targets)
        else:
            self._check_kind(targets, owner)
        if self.frame is not None:
            self._check_frame(x, targets, owner)
        elif not self.classifies:
            return
        elif _is_one_hot(targets) and len(np.unique(targets.argmax(axis=1))) == 1:
            try:
                self._trial(x[: 2 * _TRIAL_ROWS], targets[: 2 * _TRIAL_ROWS])
            except Exception as error:  # the estimator may be its owner's code
                raise self._failed(error, owner) from None

    def _check_kind(self, targets: np.ndarray, owner: str) -> None:
        """A classifier must be of a kind that can learn such labels, whatever the samples."""
        found, do = self._hindrance(targets)
        if found:
            must = f"{self.describe()} of agent '{owner}' must be able to learn from its samples."
            raise LearnerError(must, found, do)

    def _hindrance(self, targets: np.ndarray) -> tuple[str, str]:
        last, classes = _last_step(self.estimator), targets.shape[1]
        tags = get_tags(last)
        if isinstance(last, FrozenEstimator):
            return "a frozen estimator, which stays as it is when it is fitted", "Pass the estimator itself."
        if isinstance(last, BaseSearchCV) and not last.refit:
            return "refit=False: it finds options and fits no model with them", "Write refit=True, the default."
        if classes > 2 and tags.classifier_tags is not None and not tags.classifier_tags.multi_class:
            one = f"sklearn.multiclass.OneVsRestClassifier({self.describe()}(...))"
            return f"{classes} classes for a classifier of two", f"Wrap it: {one}."
        if not tags.target_tags.single_output and _is_one_hot(targets):
            return "one label per sample for a classifier of several", "Use the estimator in it alone."
        return "", ""

    def takes_missing_in_frames(self, x: np.ndarray, targets: np.ndarray) -> bool:
        """Whether its steps accept data frames with missing numbers: a trial shows it."""
        assert self.frame is not None
        rows = x[:_FRAME_ROWS].copy()
        rows[0, ~self.frame.is_coded] = np.nan
        try:
            self._trial(rows, targets[:_FRAME_ROWS]).predict(rows)
        except LearnerError:
            return False
        return True

    def _check_frame(self, x: np.ndarray, targets: np.ndarray, owner: str) -> None:
        """It must be able to learn from its data frame: from a few rows or, if those do not suffice, from all."""
        for count in (_FRAME_ROWS, len(x)):
            try:
                self._trial(x[:count], targets[:count]).predict(x[:count])
                return
            except LearnerError as error:
                failed = error
        text = self.frame is not None and self.frame.text
        data = "texts" if text else "data frame"
        must = f"{self.describe()} of agent '{owner}' must be able to learn from its {data}."
        do = failed.do
        if text:
            missing = "could not convert string" in failed.found
            vectoriser = "Put a vectoriser before it: make_pipeline(TfidfVectorizer(), ...)."
            do = vectoriser if missing else "Change the options of its steps, or the texts."
        raise LearnerError(must, failed.found, do)

    def check_travel(self, x: np.ndarray, owner: str) -> None:
        """Boosting of other libraries must have no option that plain trees do not say; a trial on few rows shows it."""
        if not is_boosted(self.estimator):
            return
        rows = np.arange(2 * _TRIAL_ROWS)
        classes = 3 if "multi" in str(self.estimator.get_params().get("objective")) else 2
        targets = np.eye(classes)[rows % classes] if self._takes_soft_targets else rows[:, None].astype(np.float64)
        try:
            self._trial(x[rows % len(x)], targets).export()
        except LearnerError as error:
            must = f"{self.describe()} of agent '{owner}' {error.must}"
            raise LearnerError(must, error.found, error.do) from None
        except Exception as error:
            raise self._failed(error, owner) from None

    def _trial(self, x: np.ndarray, targets: np.ndarray) -> SklearnLearner:
        """A copy that was fitted to a few rows, which need not converge."""
        trial = SklearnLearner(clone(self.estimator))
        trial._naming, trial.frame = self._naming, self.frame
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial.fit(x, targets)
        return trial

    def _failed(self, error: Exception, owner: str) -> LearnerError:
        return LearnerError(
            f"{self.describe()} of agent '{owner}' must be able to learn from its samples.",
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            "Change its options, or the data.",
        )

    def advice(self, missing: Ability) -> str:
        if Ability.PREDICT in missing:
            return f"The reason: {self._why_not_soft()}. {self._way_out()}"
        if missing == Ability.PORTABLE and self.frame is not None and may_travel(self.estimator):
            return (
                "A model that gets data frames is not sent, since others cannot tell what its columns hold: encode "
                "them beforehand, by codistill.Columns."
            )
        if missing == Ability.PORTABLE:
            return why_not_to_travel(self.estimator)
        return f"Use a torch module, or a protocol that needs no '{missing.words()}'."

    def _way_out(self) -> str:
        if self.classifies:
            return "Use KNeighborsRegressor, which learns soft labels as they are, or another classifier."
        return "Wrap it: sklearn.multioutput.MultiOutputRegressor(...), or use a forest or ridge regressor."


def taken(rows: Any, places: np.ndarray) -> Any:
    """Rows of an array, a sparse matrix, a data frame or a series by their places."""
    return rows.iloc[places] if hasattr(rows, "iloc") else rows[places]


def labelled_copies(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ten copies of each row with hard labels, as its soft label shares them out: (n,) the rows, (n,) their labels.

    Each class gets the whole number below ten times its share, and what is left goes to the largest remainders.
    """
    shares = _COPIES * targets.astype(np.float64)
    counts = np.floor(shares)
    left = np.rint(shares.sum(axis=1)) - counts.sum(axis=1)
    place = np.argsort(np.argsort(counts - shares, axis=1, kind="stable"), axis=1)  # 0: the largest remainder
    counts = (counts + (place < left[:, None])).astype(int)
    row, label = np.nonzero(counts)
    return np.repeat(row, counts[row, label]), np.repeat(label, counts[row, label])


def _last_step(estimator: Any) -> Any:
    return estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator


_NEAREST = (KNeighborsClassifier, RadiusNeighborsClassifier)


def _parts(estimator: Any) -> list[Any]:
    return [estimator, *options_of(estimator).values()]


def _compares_rows(estimator: Any) -> bool:
    """Whether it answers, or some part of it, with the labels of the nearest rows."""
    return any(isinstance(part, _NEAREST) for part in _parts(estimator))


def _fits_many_columns(regressor: Any) -> bool:
    last = _last_step(regressor)
    # Two of scikit-learn's regressors can do more than their tags say.
    if isinstance(last, BaggingRegressor):
        return last.estimator is None or _fits_many_columns(last.estimator)
    return isinstance(last, MLPRegressor) or bool(get_tags(last).target_tags.multi_output)


def _is_one_hot(targets: np.ndarray) -> bool:
    return bool(((targets == 0) | (targets == 1)).all() and (targets.sum(axis=1) == 1).all())


# --- Options and signatures of estimators, of scikit-learn and of others: threads, log lines, sample weights.

_LOG_OPTIONS = ("verbosity", "verbose", "verbose_eval")  # of LightGBM


def options_of(estimator: Any) -> dict[str, Any]:
    """The options of an estimator and of its parts, by scikit-learn's names for them."""
    try:
        return dict(estimator.get_params())
    except (RuntimeError, AttributeError) as error:  # an __init__(self, *args, **options), or one that keeps nothing
        raise LearnerError(
            f"{type(estimator).__name__} must name its options in __init__ and keep each as an attribute of that name.",
            " ".join(str(error).split())[:200],
            "Write them out: def __init__(self, C=1.0, ...).",
        ) from None


def use_one_thread(estimator: Any) -> None:
    """Agents compute with one thread each. For scikit-learn None means one thread, for others all of them."""
    parameters = options_of(estimator)
    for name, value in parameters.items():
        path, _, last = name.rpartition("__")
        if last == "n_jobs":
            owner = parameters[path] if path else estimator
            of_options = next(base for base in type(owner).__mro__ if "__init__" in vars(base))
            if value not in ({None, 1} if of_options.__module__.startswith("sklearn.") else {1}):
                estimator.set_params(**{name: 1})


def silence_lightgbm(estimator: Any) -> bool:
    """Have LightGBM log errors only, unless its owner chose otherwise; returns whether there is any LightGBM in it."""
    parts = {"": estimator} | {f"{name}__": part for name, part in options_of(estimator).items()}
    found = {
        prefix: part
        for prefix, part in parts.items()
        if hasattr(part, "get_params")
        and any(base.__module__.split(".")[0] == "lightgbm" for base in type(part).__mro__)
    }
    for prefix, part in found.items():
        if not any(name in part.get_params() for name in _LOG_OPTIONS):
            estimator.set_params(**{f"{prefix}verbosity": -1})
    return bool(found)


def has_sample_weight(estimator: Any) -> bool:
    """Whether `fit` takes sample_weight; a fit(self, *args, **options) takes what the one that it overrides takes."""
    bases: tuple[Any, ...] = type(estimator).__mro__
    overridden = [base.fit for base in bases if "fit" in vars(base)]
    if isinstance(estimator, CalibratedClassifierCV) and estimator.estimator is not None:
        return has_sample_weight(estimator.estimator)  # without them it would fit that one to unweighted copies
    for function in (estimator.fit, *overridden):
        parameters = inspect.signature(function).parameters
        if "sample_weight" in parameters:
            return True
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return False
    return False


# --- Which scikit-learn estimators take samples with missing values (NaN), and columns without any value.


def takes_missing(estimator: Any) -> bool:
    """Whether an estimator takes NaN, by its tags; a pipeline does if a step fills it in before one that does not."""
    for step in _steps(estimator):
        if _fills_in(step):
            return True
        if not get_tags(step).input_tags.allow_nan:
            return False
    return True


def without_empty_columns(rows: np.ndarray) -> np.ndarray:
    """Rows to fit to, with 0 in each column that has no value: nothing can be learnt from it, but some fits fail."""
    empty = np.isnan(rows).all(axis=0)
    return np.where(empty, rows.dtype.type(0), rows) if empty.any() else rows


def _steps(estimator: Any) -> list[Any]:
    """The steps of a pipeline, and of the pipelines in it."""
    if not isinstance(estimator, Pipeline):
        return [] if estimator is None or estimator == "passthrough" else [estimator]
    return [inner for _, step in estimator.steps for inner in _steps(step)]


def _fills_in(step: Any) -> bool:
    """Whether no NaN is left after this step."""
    if isinstance(step, ColumnTransformer):
        parts = [part for _, part, _ in step.transformers] + [step.remainder]
        return all(part == "drop" or any(map(_fills_in, _steps(part))) for part in parts)
    return type(step).__module__.startswith("sklearn.impute")
