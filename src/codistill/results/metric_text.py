"""Scores as a person reads them: shares in percent, errors as they are; a gain is positive when it is better."""

from __future__ import annotations

from codistill.results.scores import find_score
from codistill.text import percent_text


def metric_name(metric: str) -> str:
    """The metric as it is written in a sentence."""
    score = find_score(metric)
    return metric.replace("_", " ") if score is None else score.words


def in_percent(metric: str) -> bool:
    """Whether a metric is shown in percent, and its gains in percentage points."""
    score = find_score(metric)
    return score is not None and score.percent


def score_text(metric: str, value: float | None) -> str:
    """0.956 -> '95.6 %'; an error as it is."""
    if value is None:
        return "-"
    return percent_text(value) if in_percent(metric) else f"{value:.4g}"


def gain_text(metric: str, value: float | None) -> str:
    """0.0123 -> '+1.2', in percentage points; the gain in an error as it is."""
    if value is None:
        return "-"
    return f"{100 * value:+.1f}" if in_percent(metric) else f"{value:+.3g}"


def spread_text(metric: str, value: float | None) -> str:
    """0.0123 -> '± 1.2', in percentage points; the spread of an error as it is."""
    if value is None:
        return "-"
    return f"± {100 * value:.1f}" if in_percent(metric) else f"± {value:.3g}"
