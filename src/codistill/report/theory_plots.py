"""The paper's figures 1b, 2b and 3, computed and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from codistill.report.style import INK, MUTED, STYLE
from codistill.theory.problem import Kernel, Problem
from codistill.theory.protocols import (
    Iteration,
    akd_iteration,
    at_least,
    avgkd_iteration,
    baselines,
    centralised,
    ekd_iteration,
    pkd_iteration,
)

BLUE, GREEN, RED, ORANGE, PURPLE = "#0072b2", "#009e73", "#d55e00", "#e69f00", "#8a5a9e"

_STYLE: dict[Any, Any] = {**STYLE, "axes.titlesize": 10.5, "axes.grid": False, "legend.fontsize": "medium"}

_LINES: dict[str, dict[str, Any]] = {
    "AKD": {"color": RED, "linewidth": 2},
    "PKD": {"color": ORANGE, "linewidth": 2},
    "AvgKD": {"color": BLUE, "linewidth": 2},
    "EKD": {"color": INK, "linewidth": 2},
    "EKD half-term": {"color": PURPLE, "linewidth": 2},
    "agent 1 alone": {"color": BLUE, "linewidth": 1.3, "linestyle": "dashed"},
    "agent 2 alone": {"color": RED, "linewidth": 1.3, "linestyle": "dashed"},
    "centralised": {"color": GREEN, "linewidth": 1.6, "linestyle": "dashed"},
}


# --- Figure 3 and Appendix A, the toy: linear regression A x* = b, divided between two agents.

DIMENSION, SAMPLES, SHARE = 100, 150, 0.6  # d, n = 1.5 d, and agent 1's part


@dataclass(frozen=True)
class Setting:
    """One panel of the figure. The paper does not give c: these values reproduce its pictures."""

    title: str
    c: float
    sort: bool  # by b, before the data are divided


SETTINGS = (
    Setting("same data", 0.01, False),
    Setting("different data", 0.01, True),
    Setting("strong regularisation", 1.0, False),
)


@dataclass(frozen=True, eq=False)
class Toy:
    """The error of every method in rounds 0, 1, ..., as ‖f(A) - b‖ / ‖b‖ over *all* training inputs.

    The paper does not name its measure. With this one AKD climbs to 1 (a model that says 0) and EKD comes down
    to the centralised error, as in the figure; AvgKD, agent 1's, is worse than agent 1 alone, but at c = 0.01
    not worse than agent 2 alone.
    """

    setting: Setting
    problem: Problem
    errors: dict[str, np.ndarray]

    def first_within(self, method: str, share: float = 0.01) -> int | None:
        """The first round from which on a method stays within this share of the centralised error."""
        goal = self.errors["centralised"][0]
        outside = np.flatnonzero(np.abs(self.errors[method] - goal) > share * goal)
        first = 0 if len(outside) == 0 else int(outside[-1]) + 1
        return first if first < len(self.errors[method]) else None


def toy_problem(setting: Setting, seed: int = 0) -> Problem:
    """A and x* standard normal, b = A x*; the first 60 % of the rows are agent 1's."""
    random = np.random.default_rng(seed)
    a = random.standard_normal((SAMPLES, DIMENSION))
    b = a @ random.standard_normal(DIMENSION)
    order = np.argsort(b) if setting.sort else random.permutation(SAMPLES)
    mine, yours = np.split(order, [round(SHARE * SAMPLES)])
    return Problem.pair(a[mine], b[mine], a[yours], b[yours], "linear", c=setting.c)


def run_toy(setting: Setting, rounds: int = 250, seed: int = 0) -> Toy:
    """Every method's error in rounds 0 to `rounds`. A round of AKD is one hand-over, as in the paper."""
    at_least(rounds, 0)
    problem = toy_problem(setting, seed)
    errors = {
        name: np.full(rounds + 1, problem.error(model(problem.everything)))
        for name, model in baselines(problem).items()
    }
    first = problem.transfer[:, problem.blocks[0]]

    def everyone(labels: np.ndarray) -> np.ndarray:
        return np.asarray(problem.transfer @ labels)  # the sum of the models; of one chain, its only model

    def agent_1(labels: np.ndarray) -> np.ndarray:
        return np.asarray(first @ labels[problem.blocks[0]])

    methods: dict[str, tuple[Iteration, Callable[[np.ndarray], np.ndarray]]] = {
        "AKD": (akd_iteration(problem, 0), everyone),
        "AvgKD": (avgkd_iteration(problem), agent_1),
        "PKD": (pkd_iteration(problem), agent_1),
        "EKD": (ekd_iteration(problem), everyone),
        "EKD half-term": (ekd_iteration(problem, half=True), everyone),
    }
    for name, (iteration, predict) in methods.items():
        steps: Iterator[np.ndarray] = islice(iteration.steps(), rounds + 1)
        errors[name] = np.array([problem.error(predict(labels)) for labels in steps])
    return Toy(setting, problem, errors)


def draw_toy(toys: Sequence[Toy]) -> Figure:
    """Figure 3: every method's error per round, one panel per setting."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12, 4.4), layout="constrained", facecolor="white")
        panels = figure.subplots(1, len(toys), sharey=True, squeeze=False)[0]
        for axes, toy in zip(panels, toys, strict=True):
            for name, look in _LINES.items():
                axes.plot(toy.errors[name], label=name, **look)
            axes.set_title(f"{toy.setting.title}, c = {toy.setting.c:g}")
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.grid(axis="y", visible=True)
            axes.set_xlabel("round")
            axes.set_xlim(0, max(len(toy.errors["AKD"]) - 1, 1))
        panels[0].set_ylabel("relative error on all training inputs")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(_LINES))
    return figure


# --- Figures 1b and 2b: two agents with a sample or two each.


def draw_projections(strengths: Sequence[float] = (0.02, 0.3), rounds: int = 12) -> Figure:
    """Figure 1b: two agents with a sample each; oblique projections on their lines, in turn, go to 0.

    In the basis (V1, V2) the geometry G is cI + L, so agent 1 projects (a, b) to (a + b L12/(c + L11), 0).
    """
    similarity = np.array([[1.0, 0.85], [0.85, 1.0]])
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 4.9), layout="constrained", facecolor="white")
        figure.suptitle("Alternating oblique projections lead to 0, faster with more regularisation", fontsize=11)
        for axes, c in zip(figure.subplots(1, len(strengths), squeeze=False)[0], strengths, strict=True):
            geometry = similarity + c * np.eye(2)
            path = [np.array([0.45, 0.75])]
            for t in range(rounds):
                point = np.zeros(2)
                point[t % 2] = geometry[t % 2] @ path[-1] / geometry[t % 2, t % 2]
                path.append(point)
            _projection_panel(axes, path)
            kept = (geometry[0, 1] / geometry[0, 0]) ** 2
            axes.set_title(f"c = {c:g}: {100 * kept:.0f} % are left after every two rounds")
    return figure


def _projection_panel(axes: Axes, path: Sequence[np.ndarray]) -> None:
    for line in ("axhline", "axvline"):
        getattr(axes, line)(0, color=MUTED, linewidth=1.2, zorder=1)
    for t, (start, end) in enumerate(pairwise(path)):
        axes.add_patch(
            FancyArrowPatch(
                (start[0], start[1]), (end[0], end[1]), arrowstyle="-|>", mutation_scale=10,
                color=RED if t % 2 else BLUE, linewidth=1.3, shrinkA=0, shrinkB=0, zorder=3,
            )
        )  # fmt: skip
    axes.plot(*path[0], "o", color=INK, markersize=6, zorder=4)
    axes.annotate("x", (path[0][0], path[0][1]), xytext=(8, 4), textcoords="offset points", fontsize=12)
    axes.plot(0, 0, "o", color=GREEN, markersize=7, zorder=5)
    axes.annotate("0", (0, 0), xytext=(-14, -15), textcoords="offset points", fontsize=12, color=GREEN)
    axes.annotate("agent 1's line, span V$_1$", (1.24, 0), (0, -16), textcoords="offset points",
                  ha="right", color=BLUE)  # fmt: skip
    axes.annotate("agent 2's line, span V$_2$", (0, 1.04), (7, 0), textcoords="offset points", va="top", color=RED)
    axes.set(xlim=(-0.12, 1.28), ylim=(-0.12, 1.06), xticks=[], yticks=[], aspect="equal")
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_ensemble(rounds: int = 9) -> Figure:
    """Figure 2b: the partial sums of EKD at one input overshoot in turn and close in on the centralised value."""
    x1, x2 = np.array([[0.0], [1.0]]), np.array([[0.55], [1.7]])
    problem = Problem.pair(x1, np.array([0.8, 1.2]), x2, np.array([1.0, 0.6]), Kernel("rbf", gamma=1.0), c=0.05)
    here = np.array([[0.4]])
    goal = float(centralised(problem)(here)[0])
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8, 4.6), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        axes.axvline(goal, color=GREEN, linestyle="dashed", linewidth=1.6, label="centralised model", zorder=1)
        for half, name, colour in ((False, "EKD", INK), (True, "EKD, last term halved", PURPLE)):
            steps = islice(ekd_iteration(problem, half=half).steps(), rounds + 1)
            sums = [float(problem.ensemble(labels)(here)[0]) for labels in steps]
            axes.plot(sums, range(rounds + 1), "o-", color=colour, linewidth=1.4, markersize=5, label=name, zorder=3)
        axes.set(xlabel="prediction at one input", ylabel="round", yticks=range(rounds + 1))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=True)
        axes.set_title("Each term corrects the last one's excess", pad=26)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1), borderaxespad=0.2, ncols=3)
    return figure
