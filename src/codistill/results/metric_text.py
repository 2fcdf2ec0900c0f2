"""Scores as a person reads them: accuracy in percent, RMSE as it is."""

from __future__ import annotations

from codistill.text import percent_text


def metric_name(metric: str) -> str:
    """The metric as it is written in a sentence."""
    return "RMSE" if metric == "rmse" else metric


def score_text(metric: str, value: float | None) -> str:
    """0.956 -> '95.6 %'; an error as it is."""
    if value is None:
        return "-"
    return percent_text(value) if metric == "accuracy" else f"{value:.4g}"


def gain_text(metric: str, value: float | None) -> str:
    """0.0123 -> '+1.2', in percentage points; the change of an error as it is."""
    if value is None:
        return "-"
    return f"{100 * value:+.1f}" if metric == "accuracy" else f"{value:+.3g}"


def is_worse(metric: str, gain: float) -> bool:
    """Whether a gain is a loss: of an error, lower is better."""
    return gain > 0 if metric == "rmse" else gain < 0
