"""The formulas of the scores: of labels y (n,) or real values y (n, outputs), answers (n, C), weights of samples."""

from __future__ import annotations

import numpy as np

from codistill.results.outputs import are_probabilities

BINS = 15  # of the calibration error, as in Guo et al. 2017
WORST = 1e100  # the largest magnitude that is reported: sums of many of them are still finite


def accuracy(y: np.ndarray, answers: np.ndarray, weights: np.ndarray | None = None) -> float:
    """The share of samples whose largest output is that of the true class."""
    right = answers.argmax(axis=1) == y
    return float(np.mean(right)) if weights is None else float(np.average(right, weights=weights))


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
