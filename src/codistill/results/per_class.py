"""Scores per class: recall, precision, F1 and the confusion matrix of each agent, on the common test set.

C[c, k] counts the test samples of class c that an agent predicts as class k, at the end of a run. Of a class c:

    recall     C[c, c] / Σ_k C[c, k]                      the accuracy on the samples of the class
    precision  C[c, c] / Σ_i C[i, c]
    F1         2 C[c, c] / (Σ_k C[c, k] + Σ_i C[i, c])
    support    Σ_k C[c, k]                                its test samples

NaN where the denominator is 0. There are no matrices of agents' own test data: their sums would be an agent's class
counts, which others need not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.core.errors import DataError, nearest
from codistill.core.text import percent_text
from codistill.results.agents import some_text
from codistill.results.outputs import MOST_CLASSES
from codistill.results.summary import Summary
from codistill.results.tables import AnyCell, Cell, Table

if TYPE_CHECKING:
    import pandas as pd

MOST_COLUMNS, MOST_ON_PAGE = 12, 30  # classes with a column of their own: on a terminal, on a page
MOST_ROWS = 100  # agents on a page
MOST_MAPS = 12
_MOST_NAMED = 3
_DO_IT = "Count them yourself: sklearn.metrics.confusion_matrix(y, result.agents[name].predict(x))."


def class_scores(confusion: np.ndarray) -> dict[str, np.ndarray]:
    """(K,) recall, precision, F1 and support of each class, from a confusion matrix (K, K)."""
    right, support, predicted = np.diag(confusion), confusion.sum(axis=1), confusion.sum(axis=0)
    return {
        "recall": _share(right, support),
        "precision": _share(right, predicted),
        "f1": _share(2 * right, support + predicted),
        "support": support,
    }


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    shares: np.ndarray = np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
    return shares


def row_shares(confusion: np.ndarray) -> np.ndarray:
    """(K, K) the share of each predicted class among the samples of a true class; NaN for a class without samples."""
    return np.stack([_share(row, np.full(len(row), row.sum())) for row in confusion])


def matrices(summary: Summary) -> dict[str, np.ndarray]:
    """The confusion matrix of each agent of which it is known."""
    outputs = summary.outputs
    if outputs is None or outputs.confusion is None:
        return {}
    return {name: counts for name, counts in zip(outputs.agents, outputs.confusion, strict=True) if counts.any()}


def lacking(summary: Summary, agent: str | None = None) -> tuple[str, str] | None:
    """Why there are no scores per class, of the run or of one agent, and what to do; None if there are."""
    outputs, classes = summary.outputs, len(summary.class_names)
    if summary.task != "classification":
        return "the targets are real values", "Use the scores in result.frame()."
    if not summary.test_samples:
        return (
            "there is no common test set, and what an agent answers on its own test data stays with it",
            f"Pass test=(x, y) to the federation. {_DO_IT}",
        )
    if classes > MOST_CLASSES:
        return f"{classes:,} classes; predictions are kept for at most {MOST_CLASSES}", _DO_IT
    if outputs is None:
        return (
            "no predictions of the last round: the run is not finished, or no agent gave any (a policy may withhold "
            "them)",
            "Finish the run; agents allow it by outputs = true under [report] of their policies.",
        )
    if outputs.confusion is None:
        return "too many predictions to keep, or a run of an older version", _DO_IT
    if agent is not None and agent not in matrices(summary):
        if any(row.get("lies") for row in summary.rows if row["agent"] == agent):
            return f"agent '{agent}' is Byzantine: it sent wrong values on purpose", _DO_IT
        return (
            f"agent '{agent}' gave no predictions after the last round: it was away, its policy withholds them, or it "
            "is another peer",
            "Keep it in the run to its end; its policy allows it by outputs = true under [report].",
        )
    return None


def left_out(summary: Summary) -> str:
    """Which agents have no scores per class, in a phrase; empty if all have."""
    away = [name for name in summary.agents if name not in matrices(summary)]
    reason = "Byzantine, not there at the end, withheld by a policy, or kept by another peer"
    return f"no scores per class of {some_text(away, _MOST_NAMED)}: {reason}" if away else ""


# --- As data frames, for `Result`.


def confusion_frame(summary: Summary, agent: str, labels: Sequence[Any]) -> pd.DataFrame:
    """One agent's confusion matrix: a row per true class, a column per predicted class."""
    import pandas as pd

    if agent not in summary.agents:
        raise DataError("The agent must be one of the run.", f"'{agent}'", nearest(agent, summary.agents))
    _check(summary, agent)
    rows, columns = (pd.Index(labels, name=f"{kind} class") for kind in ("true", "predicted"))
    return pd.DataFrame(matrices(summary)[agent].astype(np.int64), rows, columns)


def per_class_frame(summary: Summary, labels: Sequence[Any]) -> pd.DataFrame:
    """A row per agent and class with its scores."""
    import pandas as pd

    _check(summary)
    parts = [
        pd.DataFrame({"agent": name, "class": labels, **class_scores(confusion)})
        for name, confusion in matrices(summary).items()
    ]
    return pd.concat(parts, ignore_index=True).astype({"support": np.int64})


def _check(summary: Summary, agent: str | None = None) -> None:
    if (lack := lacking(summary, agent)) is not None:
        raise DataError("Scores per class need each agent's predictions on a common test set.", *lack)


# --- As tables and maps: the agents of a run, and several runs.

_HOW = "recall: of the test samples of a class, the share that is predicted as this class"


def agents_table(summary: Summary) -> Table | None:
    """For a page: the recall of each agent on each class; None if it is unknown."""
    found = matrices(summary)
    if not found:
        return None
    recalls = {name: class_scores(confusion)["recall"] for name, confusion in found.items()}
    shown = _extremes(found, MOST_ROWS)
    values = np.stack(list(recalls.values()))
    rows = {name: dict(zip(summary.class_names, recalls[name], strict=True)) for name in shown}
    footer = {
        "mean": dict(zip(summary.class_names, _mean(values), strict=True)),
        "worst": dict(zip(summary.class_names, np.nanmin(values, axis=0, initial=np.inf), strict=True)),
    }
    which = "" if len(shown) == len(found) else f"agents shown: the best and the worst of {len(found):,}"
    return _recall_table("agent", rows, MOST_ON_PAGE, footer if len(found) > 1 else {}, [which, left_out(summary)])


def runs_table(summaries: Sequence[Summary], most: int | None = MOST_COLUMNS) -> Table | None:
    """The recall on each class of several runs, mean over their agents; None if none has any. `most`: None: all."""
    rows: dict[str, dict[str, float]] = {}
    notes = ["means over the agents", *runs_lacking(summaries)]
    for summary in summaries:
        if not (found := matrices(summary)):
            continue
        values = np.stack([class_scores(confusion)["recall"] for confusion in found.values()])
        title = summary.title if summary.title not in rows else f"{summary.title} ({len(rows) + 1})"
        rows[title] = dict(zip(summary.class_names, _mean(values), strict=True))
        notes.append(f"{summary.title}: {away}" if (away := left_out(summary)) else "")
    return _recall_table("run", rows, most, {}, notes, "recall per class") if rows else None


def runs_lacking(summaries: Sequence[Summary]) -> list[str]:
    """Which runs on classes have no scores per class, and why, in phrases."""
    lacks = {summary.title: lacking(summary) for summary in summaries if summary.task == "classification"}
    return [f"no scores per class of {title}: {lack[0]}" for title, lack in lacks.items() if lack is not None]


def mean_shares(summary: Summary) -> np.ndarray:
    """(K, K) the mean over the agents of their confusion matrices, as shares of each true class."""
    return _mean(np.stack([row_shares(confusion) for confusion in matrices(summary).values()]))


def mapped_agents(summary: Summary) -> list[str]:
    """The agents whose confusion matrices are drawn: all or, of many, the best and the worst."""
    return _extremes(matrices(summary), MOST_MAPS)


def _mean(values: np.ndarray) -> np.ndarray:
    """Over the first axis, of what is known; NaN if nothing is."""
    known = np.isfinite(values)
    count, total = known.sum(axis=0), np.nan_to_num(values).sum(axis=0)
    means: np.ndarray = np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)
    return means


def _extremes(found: Mapping[str, np.ndarray], most: int) -> list[str]:
    """All agents in their order or, of too many, the half of `most` with the best and that with the worst accuracy."""
    if len(found) <= most:
        return list(found)
    ranked = sorted(found, key=lambda name: -int(np.trace(found[name])))
    return [*ranked[: most // 2], *ranked[-(most // 2) :]]


def _recall_table(
    first: str,
    rows: Mapping[str, Mapping[str, float]],
    most: int | None,
    footer: Mapping[str, Mapping[str, float]],
    notes: Sequence[str],
    title: str = "",
) -> Table:
    """A row per agent or run, a column per class; of too many classes those with the lowest mean recall."""
    classes = list(dict.fromkeys(name for recalls in rows.values() for name in recalls))
    which = ""
    if most is not None and len(classes) > most:
        means = _mean(np.array([[recalls.get(name, np.nan) for name in classes] for recalls in rows.values()]))
        lowest = set(np.argsort(np.nan_to_num(means, nan=np.inf), kind="stable")[:most].tolist())
        which = f"classes shown: the {most} of {len(classes)} with the lowest mean recall"
        classes = [name for place, name in enumerate(classes) if place in lowest]

    def cells(label: str, recalls: Mapping[str, float]) -> list[AnyCell]:
        values = [recalls.get(name, np.nan) for name in classes]
        return [label, *(Cell(percent_text(v), float(v)) if np.isfinite(v) else "-" for v in values)]

    return Table(
        [first, *classes],
        "l" + "r" * len(classes),
        [cells(label, recalls) for label, recalls in rows.items()],
        [cells(label, recalls) for label, recalls in footer.items()],
        title,
        notes=[note for note in (_HOW, which, *notes) if note],
    )
