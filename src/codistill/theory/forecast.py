"""What the theory predicts for two agents before a run: limits, rates, divergence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from codistill.errors import DataError
from codistill.theory.averages import avgkd_limit, pkd_limit
from codistill.theory.baselines import alone, centralised
from codistill.theory.chains import akd_limit, ekd_limit
from codistill.theory.iteration import EQUAL, ON_CIRCLE
from codistill.theory.kernels import KernelFunction
from codistill.theory.operators import angle_cosine
from codistill.theory.problem import Model, Problem
from codistill.theory.propositions import spectrum

if TYPE_CHECKING:
    from rich.table import Table

ZERO, CLOSED, CENTRAL, NONE = "zero", "closed form", "the centralised model", "none"
COMMON, AGREED = "what both agents can represent", "centralised, where labels agree"


@dataclass(frozen=True)
class Outlook:
    """The predicted limit and rate of one method. A round is one fit of every chain (AKD, EKD) or of every agent."""

    method: str
    limit: str
    rate: float  # the factor per round on the distance from the limit, in the end
    needs: str  # what the limit depends on
    diverges: bool
    error: float | None = None  # of the limit, if labels were given

    @property
    def halving(self) -> float | None:
        """Rounds in which the distance from the limit halves; None where it does not shrink."""
        if self.rate <= 0:
            return 0.0
        return math.log(0.5) / math.log(self.rate) if self.rate < 1 else None


@dataclass(frozen=True)
class Forecast:
    """The prediction for two agents; printed as a table."""

    samples: tuple[int, int]
    c: float
    one_kernel: bool
    rho: float  # of B, what two rounds of AKD do
    cosine: float  # of the minimal angle, in agent 1's kernel
    outlooks: tuple[Outlook, ...]
    errors: dict[str, float] | None = None  # of each agent alone and the centralised model, if labels were given

    def __getitem__(self, method: str) -> Outlook:
        return {outlook.method: outlook for outlook in self.outlooks}[method]

    def table(self) -> Table:
        """For the terminal."""
        from rich.table import Table

        angle = math.degrees(math.acos(min(self.cosine, 1.0)))
        table = Table(
            title=f"{self.samples[0]} + {self.samples[1]} samples, c = {self.c:g}, "
            f"{'one kernel' if self.one_kernel else 'two kernels'}: "
            f"rho(B) = {self.rho:.4g}, minimal angle {angle:.1f}° (cosine {self.cosine:.4g})",
            title_justify="left",
        )
        known = self.errors is not None
        for heading in ("method", "limit", "needs"):
            table.add_column(heading)
        for heading in ("per round", "halves in", *(("error of the limit",) if known else ())):
            table.add_column(heading, justify="right")
        for each in self.outlooks:
            error = ["-" if each.error is None else f"{each.error:.4g}"] if known else []
            limit = "none: it diverges" if each.diverges else each.limit
            table.add_row(each.method, limit, each.needs, f"x {each.rate:.4g}", _rounds(each), *error)
        table.caption = "a round: one fit of every chain or agent; μ: the eigenvalues of B"
        if self.errors:
            said = ", ".join(f"{name} {error:.4g}" for name, error in self.errors.items())
            table.caption += f"\nrelative errors on all training inputs: {said}"
        table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        out = StringIO()
        Console(file=out, width=110).print(self.table())
        return out.getvalue().rstrip()


def forecast(
    x1: np.ndarray,
    x2: np.ndarray,
    kernel1: str | KernelFunction = "linear",
    kernel2: str | KernelFunction | None = None,
    c: float = 1e-3,
    y1: np.ndarray | None = None,
    y2: np.ndarray | None = None,
) -> Forecast:
    """The limits of AKD, AvgKD, PKD and EKD, and how fast they converge, for two agents with these inputs.

    For agents that are not kernel machines, give the features of their trained models in place of inputs,
    with the linear kernel. With labels, the errors of the limits are given too. The time grows with the
    cube of the samples: a few thousand are enough to see the angle.
    """
    if (y1 is None) != (y2 is None):
        raise DataError("Labels must be given for both agents or for neither.", "one agent's", "Give y1 and y2.")
    labelled = y1 is not None and y2 is not None
    y1, y2 = (y1, y2) if labelled else (np.zeros(len(x1)), np.zeros(len(x2)))
    return forecast_of(Problem.pair(x1, y1, x2, y2, kernel1, kernel2, c), labelled=labelled)  # type: ignore[arg-type]


def forecast_of(problem: Problem, *, labelled: bool = True) -> Forecast:
    """The forecast of a problem of two agents."""
    root = np.sqrt(spectrum(problem).astype(complex))
    if problem.same_kernel:
        root = np.clip(root.real, 0, 1)  # they are cosines of angles; rounding must not say otherwise
    # At c = 0 with one kernel, what both agents can represent has μ = 1: AKD and PKD keep it.
    fixed = (np.abs(root**2 - 1) < EQUAL) & (problem.c == 0 and problem.same_kernel)
    moving, common = root[~fixed], bool(fixed.any())
    kept = COMMON if common else ZERO
    summed = AGREED if common else CENTRAL if problem.same_kernel else CLOSED
    chain = _largest(moving)
    parallel = _largest(np.concatenate([1 + moving, 1 - moving])) / 2  # eigenvalues of (I + T_off)/2
    lines: tuple[tuple[str, str, float, str, Callable[[], Model | None]], ...] = (
        ("AKD", kept, chain, "rho(B) < 1", lambda: akd_limit(problem)),
        ("AvgKD", CLOSED, _largest(root) / 2, "rho(B) < 4", lambda: _first(avgkd_limit(problem))),
        ("PKD", kept, parallel, "|1 ± √μ| < 2", lambda: _first(pkd_limit(problem))),
        ("EKD", summed, _largest(root), "rho(B) < 1", lambda: ekd_limit(problem)),
        ("EKD half-term", summed, chain, "rho(B) < 1", lambda: ekd_limit(problem, half=True)),
    )
    outlooks = []
    for method, limit, rate, needs, find in lines:
        converges = rate < 1 - (ON_CIRCLE if problem.c == 0 else 0)
        model = find() if labelled and converges else None
        error = None if model is None else _error(model, problem)
        outlooks.append(Outlook(method, limit if converges else NONE, rate, needs, rate > 1 + ON_CIRCLE, error))
    errors = None
    if labelled:
        baselines = {"agent 1 alone": alone(problem, 0), "agent 2 alone": alone(problem, 1)}
        errors = {name: _error(g, problem) for name, g in {**baselines, "centralised": centralised(problem)}.items()}
    return Forecast(
        (len(problem.inputs[0]), len(problem.inputs[1])),
        problem.c,
        problem.same_kernel,
        _largest(root) ** 2,
        angle_cosine(problem),
        tuple(outlooks),
        errors,
    )


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max()) if len(values) else 0.0


def _first(models: list[Model] | None) -> Model | None:
    return models[0] if models else None


def _error(model: Model, problem: Problem) -> float:
    """‖f(X) - y‖ / ‖y‖ over all training inputs."""
    y = problem.labels
    return float(np.linalg.norm(model(np.concatenate(list(problem.inputs))) - y) / (np.linalg.norm(y) or 1.0))


def _rounds(outlook: Outlook) -> str:
    halving = outlook.halving
    if halving is None:
        return "never"
    return "1 round" if halving <= 1 else f"{math.ceil(halving):,} rounds"
