"""Scores by scikit-learn's names, and scores of one's own: how good answers are, and which way is better.

An answer is a matrix (n, C): class probabilities or other outputs with a column per class, or real values. `y` holds
the numbers 0 .. C-1 of the true classes, or real values (n, outputs). A score that cannot be computed, such as an AUC
of test samples of a single class, is left out.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from codistill.core.errors import RecipeError, nearest
from codistill.core.settings import Settings
from codistill.results.outputs import are_probabilities
from codistill.results.records import ROW_KEYS

# --- The formulas of the scores: of labels y (n,) or real values y (n, outputs), answers (n, C), weights of samples.

BINS = 15  # of the calibration error, as in Guo et al. 2017
WORST = 1e100  # the largest magnitude that is reported: sums of many of them are still finite


def accuracy(y: np.ndarray, answers: np.ndarray, weights: np.ndarray | None = None) -> float:
    """The share of samples whose largest output is that of the true class."""
    return float(np.average(answers.argmax(axis=1) == y, weights=weights))


def balanced_accuracy(y: np.ndarray, answers: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    """The mean over the classes that occur of the share of their samples that are recognised."""
    y, answers, weights = _counted(y, answers, weights)
    right = answers.argmax(axis=1) == y
    return float(np.mean([np.average(right[y == c], weights=weights[y == c]) for c in np.unique(y)]))


def f1_macro(y: np.ndarray, answers: np.ndarray, weights: np.ndarray | None = None) -> float:
    """The mean over the classes that occur or are answered of F1 = 2 TP / (2 TP + FP + FN)."""
    y, answers, weights = _counted(y, answers, weights)
    chosen = answers.argmax(axis=1)
    found = []
    for c in np.union1d(y, chosen):
        both, either = weights[(y == c) & (chosen == c)].sum(), weights[y == c].sum() + weights[chosen == c].sum()
        found.append(2 * both / either)
    return float(np.mean(found))


def roc_auc(y: np.ndarray, answers: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    """The area under the ROC curve; of several classes the mean of each against the rest, over those that occur."""
    from sklearn.metrics import roc_auc_score

    y, answers, weights = _counted(y, answers, weights)
    there = np.unique(y)
    if len(there) < 2 or not np.isfinite(answers).all():
        return None
    chosen = [1] if answers.shape[1] == 2 else there
    return float(np.mean([roc_auc_score(y == c, answers[:, c], sample_weight=weights) for c in chosen]))


def log_loss(y: np.ndarray, answers: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    """-mean log p(true class), with p kept within the rounding error of its type from 0 and 1, as scikit-learn does."""
    if not are_probabilities(answers):
        return None
    y, answers, weights = _counted(y, answers, weights)
    least = np.finfo(answers.dtype).eps if answers.dtype.kind == "f" else np.finfo(float).eps
    sure = np.clip(answers[np.arange(len(y)), y], least, 1 - least).astype(np.float64)
    return float(np.average(-np.log(sure), weights=weights))


def calibration_error(y: np.ndarray, answers: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    """The expected calibration error over B = 15 equal bins of the confidence, the largest probability of a sample.

    ECE = sum_b n_b / n |accuracy(b) - mean confidence(b)|; Guo, Pleiss, Sun, Weinberger. On Calibration of Modern
    Neural Networks. ICML 2017, eq. (3).
    """
    if not are_probabilities(answers):
        return None
    y, answers, weights = _counted(y, answers, weights)
    confidence, right = answers.max(axis=1).astype(np.float64), answers.argmax(axis=1) == y
    # Bin b holds the confidences in ((b-1)/B, b/B].
    place = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    apart = np.bincount(place, weights=weights * (right - confidence), minlength=BINS)
    return float(np.abs(apart).sum() / weights.sum())


def rmse(y: np.ndarray, answers: np.ndarray) -> float:
    """The root of the mean squared error over samples and outputs."""
    error = float(np.sqrt(np.mean((answers - y) ** 2)))
    return error if error <= WORST else WORST  # also of a model whose predictions are not finite


def mae(y: np.ndarray, answers: np.ndarray) -> float:
    """The mean absolute error over samples and outputs."""
    error = float(np.mean(np.abs(answers - y)))
    return error if error <= WORST else WORST


def r2(y: np.ndarray, answers: np.ndarray) -> float | None:
    """1 - squared error / squared distance from the mean, mean over the outputs, as scikit-learn's r2_score."""
    from sklearn.metrics import r2_score

    if len(y) < 2:
        return None
    return float(r2_score(y, answers)) if np.isfinite(answers).all() else -WORST


def _counted(y: np.ndarray, answers: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """The samples with a weight above 0, and their weights; without weights all samples, each with weight 1."""
    if weights is None:
        return y, answers, np.ones(len(y))
    kept = weights > 0
    return y[kept], answers[kept], weights[kept]


VALIDATION = "validation_"  # of a score on the samples that an agent holds out of its own
# Of a score's name in a row: on the common test set, on the agent's own data, on what it holds out of its own samples;
# and, under a safeguard, the first two of what the protocol taught, before it is weighed against the own model.
PREFIXES = ("", "own_", VALIDATION, "taught_", "taught_own_")
SAFEGUARD_WEIGHT = "safeguard_weight"  # the key of that weight
MOST_SCORES = 20
_TRIED_CLASSES = 1000  # beyond, whether a score can be computed shows when it is
_RESERVED = ROW_KEYS | {"seed", SAFEGUARD_WEIGHT}


@dataclass(frozen=True)
class Score(Settings):
    """A score: `function(y, answers)` returns a number, or None where it cannot be computed.

    `name` is the score's key in the rows of a run. For one's own score `Score("cost", function,
    greater_is_better=False)` is enough; `task="regression"` where it is about real values.
    """

    name: str
    function: Callable[..., float | None]
    greater_is_better: bool = True
    task: str = "classification"
    title: str = ""  # in a sentence; unset: the name
    percent: bool = False  # shown in percent, and its gains in percentage points
    lowest: float = -WORST
    highest: float = WORST
    weighted: bool = False  # whether the function takes a weight of each sample as a third argument
    needs: str = "test data and answers for which it is defined"  # what must be there to compute it

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z]\w{0,59}", self.name):
            raise RecipeError(
                "A score's name must be a letter and up to 59 letters, digits or underscores.",
                f"{self.name!r}"[:80],
                'Write Score("name", function).',
            )
        if self.name in _RESERVED or self.name.startswith(("own_", VALIDATION, "taught_")):
            raise RecipeError("A score needs a name of its own.", f"'{self.name}' means another column", "Rename it.")
        if not callable(self.function) or self.task not in ("classification", "regression"):
            raise RecipeError(
                f"Score '{self.name}' must have a function of (y, answers), and be for classification or regression.",
                f"{self.function!r}, task {self.task!r}"[:120],
                'Write Score("name", function, task="classification").',
            )

    @property
    def words(self) -> str:
        """The score as it is written in a sentence."""
        return self.title or self.name.replace("_", " ")

    def of(self, y: np.ndarray, answers: np.ndarray, weights: np.ndarray | None = None) -> float | None:
        """The score of some answers; None where it cannot be computed."""
        if weights is not None and not self.weighted:
            return None
        given = (y, answers, weights) if self.weighted else (y, answers)
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")  # that it is not defined is told once, below the table
                value = self.function(*given)
                number = None if value is None else float(value)
        except ValueError:
            return None
        except Exception as error:  # a function of the user's own
            raise self._refusal(error, y, answers) from error
        if number is None or math.isnan(number):
            return None
        return min(max(number, self.lowest), self.highest)

    def check_computable(self, y: np.ndarray, answers: np.ndarray) -> None:
        """Raise unless the function itself takes such labels and answers, of which all classes occur."""
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                self.function(y, answers, *([np.ones(len(y))] if self.weighted else []))
        except Exception as error:
            raise self._refusal(error, y, answers) from error

    def _refusal(self, error: Exception, y: np.ndarray, answers: np.ndarray) -> RecipeError:
        return RecipeError(
            f"Score '{self.name}' must return a number for (y, answers).",
            f"{type(error).__name__}: {error}"[:200],
            f"It gets y {y.shape} and answers {answers.shape}: correct it. A metric of scikit-learn is "
            "named, or made a score by make_scorer.",
        )

    def gain(self, before: float | None, after: float | None) -> float | None:
        """By how much the score is better than before: positive is better, whichever way the score goes."""
        if before is None or after is None:
            return None
        return after - before if self.greater_is_better else before - after


def _share(name: str, function: Callable[..., float | None], title: str = "") -> Score:
    return Score(name, function, title=title, percent=True, lowest=0.0, highest=1.0, weighted=True)


_PROBABILITIES = "class probabilities as answers"
ACCURACY = _share("accuracy", accuracy)
RMSE = Score("rmse", rmse, False, "regression", "RMSE", lowest=0.0)
DEFAULT_SCORES = (ACCURACY, RMSE)  # each where it fits: labels, real values
_KNOWN = {
    score.name: score
    for score in (
        *DEFAULT_SCORES,
        _share("balanced_accuracy", balanced_accuracy),
        _share("f1_macro", f1_macro, "macro F1"),
        Score(
            "roc_auc", roc_auc, title="AUC", lowest=0.0, highest=1.0, weighted=True,
            needs="test samples of at least two classes",
        ),
        Score(
            "log_loss", log_loss, False, title="log loss", lowest=0.0, weighted=True, needs=_PROBABILITIES
        ),
        Score(
            "calibration_error", calibration_error, False, title="calibration error", lowest=0.0, highest=1.0,
            percent=True, weighted=True, needs=_PROBABILITIES,
        ),
        Score("mae", mae, False, "regression", "MAE", lowest=0.0),
        Score("r2", r2, True, "regression", "R2", highest=1.0, needs="at least two test samples"),
    )
}  # fmt: skip
# Other words for the same thing; what is shown has one.
_ALIASES = {
    "neg_log_loss": "log_loss",
    "roc_auc_ovr": "roc_auc",
    "expected_calibration_error": "calibration_error",
    "root_mean_squared_error": "rmse",
    "neg_root_mean_squared_error": "rmse",
    "mean_absolute_error": "mae",
    "neg_mean_absolute_error": "mae",
}


@lru_cache(maxsize=256)
def find_score(name: str) -> Score | None:
    """The score of this name, codistill's or scikit-learn's with or without `neg_`; None if there is none."""
    name = _ALIASES.get(name, name)
    if name in _KNOWN:
        return _KNOWN[name]
    from sklearn.metrics import get_scorer, get_scorer_names

    known = next((each for each in (name, f"neg_{name}") if each in get_scorer_names()), None)
    if known is None:
        return None
    task = "regression" if any(part in known for part in _OF_VALUES) else "classification"
    return Score(**of_scorer(get_scorer(known), None) | {"name": known.removeprefix("neg_"), "task": task})


def as_score(given: Any, classes: Sequence[Any] | None = None) -> Score:
    """A score from its name, a function (y, answers), a `Score`, or a result of scikit-learn's `make_scorer`.

    `classes`: the classes as the user named them, for a scorer that is told one of them (`pos_label`).
    """
    if isinstance(given, Score):
        return given
    if isinstance(given, str):
        found = find_score(given)
        if found is None:
            from sklearn.metrics import get_scorer_names

            raise RecipeError(
                f"A score must be one of {', '.join(_KNOWN)}, or another of scikit-learn's names.",
                f"'{given}'",
                nearest(given, [*_KNOWN, *get_scorer_names()]),
            )
        return found
    if is_scorer(given):
        return Score(**of_scorer(given, classes))
    if callable(given):
        name = str(getattr(given, "__name__", type(given).__name__))
        if name == "<lambda>":
            raise RecipeError("A score must have a name.", "a lambda", 'Write Score("name", lambda y, answers: ...).')
        return Score(name, given, greater_is_better=bool(getattr(given, "greater_is_better", True)))
    raise RecipeError(
        "A score must be a name, a Score, a function of (y, answers), or a result of make_scorer.",
        f"{given!r}"[:80],
        'Write scores=["accuracy", "log_loss"].',
    )


def as_scores(
    given: Sequence[Any],
    task: str,
    columns: int,
    classes: Sequence[Any] | None = None,
    y: np.ndarray | None = None,
) -> tuple[Score, ...]:
    """The scores of a run, checked to suit its task; none given: accuracy, or RMSE for real values.

    `columns`: of an answer. `classes`: see `as_score`. `y`: of test data, on which one's own functions are tried.
    """
    if isinstance(given, str) or callable(given):
        given = [given]
    try:
        given = list(given)
    except TypeError:
        raise RecipeError("scores must be a list.", f"{given!r}"[:80], 'Write scores=["accuracy"].') from None
    if not given:
        return DEFAULT_SCORES
    found = [_fitting(one, task, classes) for one in given]
    names = [score.name for score in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or len(found) > MOST_SCORES:
        raise RecipeError(
            f"Scores must be at most {MOST_SCORES}, each named once.",
            f"'{twice[0]}' more than once" if twice else f"{len(found)} scores",
            "Remove some.",
        )
    for one, score in zip(given, found, strict=True):
        _try(score, columns, None if isinstance(one, str) else y, known=isinstance(one, str))
    return tuple(found)


def _fitting(given: Any, task: str, classes: Sequence[Any] | None) -> Score:
    score = as_score(given, classes)
    if score.task == task:
        return score
    if not isinstance(given, str | Score) and not is_scorer(given):
        return replace(score, task=task)  # a plain function does not say what it is for
    fitting = [name for name, known in _KNOWN.items() if known.task == task]
    raise RecipeError(
        f"A score must suit the task, which is {task}.",
        f"'{score.name}', which is for {score.task}",
        f"Choose of {', '.join(fitting)}; or say the other task, if it is meant.",
    )


def _try(score: Score, columns: int, y: np.ndarray | None, *, known: bool) -> None:
    """Before anything runs: whether a score can be computed at all, which f1 cannot for three classes."""
    if score.task == "regression":
        if y is not None and y.ndim == 2:
            score.of(y, y.astype(np.float64))
        return
    if columns < 2 or columns > _TRIED_CLASSES:
        return
    if y is None and known:
        y = np.repeat(np.arange(columns), 4)
    if y is None or y.ndim == 2:
        return
    answered = np.where(np.arange(len(y)) % 4, y, (y + 1) % columns)  # three of four are right
    answers = np.full((len(y), columns), 0.4 / columns) + 0.6 * np.eye(columns)[answered]
    if not known and len(np.unique(y)) == columns:
        score.check_computable(y, answers)
    if score.of(y, answers) is None and known:
        raise RecipeError(
            f"A score must be defined for {columns} classes.",
            f"'{score.name}' is not",
            "Choose one that is averaged over the classes, such as f1_macro, balanced_accuracy or roc_auc.",
        )


def compute_scores(
    answers: np.ndarray,
    y: np.ndarray,
    scores: Sequence[Score | str] = DEFAULT_SCORES,
    weights: np.ndarray | None = None,
) -> dict[str, float]:
    """Every score of some answers that can be computed, by its name.

    `y` are labels (n,), or real values (n, outputs); scores of the other task are left out. With `weights` of the
    samples only scores that take weights are computed.
    """
    task = "regression" if y.ndim == 2 else "classification"
    found: dict[str, float] = {}
    for given in scores:
        score = as_score(given)
        value = score.of(y, answers, weights) if score.task == task else None
        if value is not None:
            found[score.name] = value
    return found


# --- scikit-learn's scorers, by name or from `make_scorer`, applied to answers in place of an estimator.

_OF_VALUES = ("error", "deviance", "explained_variance", "r2", "d2_absolute", "d2_pinball", "d2_tweedie")


def is_scorer(given: Any) -> bool:
    return all(hasattr(given, part) for part in ("_score_func", "_sign", "_kwargs", "_response_method"))


def of_scorer(scorer: Any, classes: Sequence[Any] | None) -> dict[str, Any]:
    """The fields of the score of a scorer; `classes`: as the user named them, None for their numbers."""
    function, options = scorer._score_func, dict(scorer._kwargs)
    method = scorer._response_method
    methods = {method} if isinstance(method, str) else set(method)
    name = str(getattr(function, "__name__", "own_score"))

    def value(y: np.ndarray, answers: np.ndarray) -> float | None:
        if y.ndim == 2:
            return float(function(y, answers, **options))
        names = np.arange(answers.shape[1]) if classes is None else np.asarray(classes)
        if methods <= {"predict"}:
            return float(function(names[y], names[answers.argmax(axis=1)], **options))
        if methods == {"predict_proba"} and not are_probabilities(answers):
            return None
        if answers.shape[1] == 2:
            positive = names.tolist().index(options["pos_label"]) if "pos_label" in options else 1
            return float(function(names[y], answers[:, positive], **options))
        return float(function(names[y], answers, **options))

    return {
        "name": name,
        "function": value,
        "greater_is_better": scorer._sign > 0,
        "task": "regression" if any(part in name for part in _OF_VALUES) else "classification",
    }
