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

from codistill.errors import RecipeError, nearest
from codistill.results import score_formulas as formulas
from codistill.results.score_formulas import WORST
from codistill.results.sklearn_scorers import is_scorer, of_scorer, of_scorer_name, sklearn_names
from codistill.settings import Settings

PREFIXES = ("", "own_", "taught_", "taught_own_")  # of a score's name in a row: on the common test set, on the agent's
# own data; and, under a safeguard, both of what the protocol taught, before it is weighed against the own model.
SAFEGUARD_WEIGHT = "safeguard_weight"  # the key of that weight
MOST_SCORES = 20
_TRIED_CLASSES = 1000  # beyond, whether a score can be computed shows when it is
_RESERVED = (
    "round", "agent", "present", "lies", "sent", "received", "steps", "exchanges", "from_hub", "test_samples", "seed",
    SAFEGUARD_WEIGHT,
)  # fmt: skip


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
        if self.name in _RESERVED or self.name.startswith(("own_", "taught_")):
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
ACCURACY = _share("accuracy", formulas.accuracy)
RMSE = Score("rmse", formulas.rmse, False, "regression", "RMSE", lowest=0.0)
DEFAULT_SCORES = (ACCURACY, RMSE)  # each where it fits: labels, real values
_KNOWN = {
    score.name: score
    for score in (
        *DEFAULT_SCORES,
        _share("balanced_accuracy", formulas.balanced_accuracy),
        _share("f1_macro", formulas.f1_macro, "macro F1"),
        Score(
            "roc_auc", formulas.roc_auc, title="AUC", lowest=0.0, highest=1.0, weighted=True,
            needs="test samples of at least two classes",
        ),
        Score(
            "log_loss", formulas.log_loss, False, title="log loss", lowest=0.0, weighted=True, needs=_PROBABILITIES
        ),
        Score(
            "calibration_error", formulas.calibration_error, False, title="calibration error", lowest=0.0, highest=1.0,
            percent=True, weighted=True, needs=_PROBABILITIES,
        ),
        Score("mae", formulas.mae, False, "regression", "MAE", lowest=0.0),
        Score("r2", formulas.r2, True, "regression", "R2", highest=1.0, needs="at least two test samples"),
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
    """The score of this name, codistill's or scikit-learn's; None if there is none."""
    name = _ALIASES.get(name, name)
    if name in _KNOWN:
        return _KNOWN[name]
    made = of_scorer_name(name)
    return None if made is None else Score(**made)


def as_score(given: Any, classes: Sequence[Any] | None = None) -> Score:
    """A score from its name, a function (y, answers), a `Score`, or a result of scikit-learn's `make_scorer`.

    `classes`: the classes as the user named them, for a scorer that is told one of them (`pos_label`).
    """
    if isinstance(given, Score):
        return given
    if isinstance(given, str):
        found = find_score(given)
        if found is None:
            names = [*_KNOWN, *sklearn_names()]
            raise RecipeError(
                f"A score must be one of {', '.join(_KNOWN)}, or another of scikit-learn's names.",
                f"'{given}'",
                nearest(given, names),
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
    """A score for this task."""
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
