"""Every protocol of the paper is one affine iteration on labels; with its powers, limit and rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from codistill.errors import RecipeError

ON_CIRCLE = 1e-9  # eigenvalues this near to the unit circle count as on it
EQUAL = 1e-6  # eigenvalues this near to each other count as one: rounding splits a defective pair by 1e-8


@dataclass(frozen=True, eq=False)
class Iteration:
    """u_{t+1} = G u_t + h, from u_0: all agents' labels, one below the other."""

    operator: np.ndarray
    offset: np.ndarray
    start: np.ndarray

    def after(self, t: int) -> np.ndarray:
        """u_t = G^t u_0 + Σ_{i<t} G^i h, by repeated squaring of [[G, h], [0, I]]."""
        at_least(t, 0)
        return self._apply(np.linalg.matrix_power(self._affine, t))

    def steps(self) -> Iterator[np.ndarray]:
        """u_0, u_1, u_2, ... one by one; cheaper than `after` where all are wanted."""
        labels = self.start
        while True:
            yield labels
            labels = self.operator @ labels + self.offset

    def limit(self) -> np.ndarray | None:
        """u_∞, or None where u_t does not converge for these labels."""
        if self.rate < 1 - ON_CIRCLE:
            return np.asarray(scipy.linalg.solve(np.eye(len(self.operator)) - self.operator, self.offset))
        projector = limit_of_powers(self._affine)
        return None if projector is None else self._apply(projector)

    @property
    def rate(self) -> float:
        """ρ(G): the factor per step by which the distance from the limit shrinks (or grows) in the end."""
        return spectral_radius(self.operator)

    @property
    def _affine(self) -> np.ndarray:
        offset = self.offset.reshape(len(self.offset), -1)
        outputs = offset.shape[1]
        return np.block([[self.operator, offset], [np.zeros((outputs, len(offset))), np.eye(outputs)]])

    def _apply(self, affine: np.ndarray) -> np.ndarray:
        start = self.start.reshape(len(self.start), -1)
        moved = affine @ np.concatenate([start, np.eye(start.shape[1])])
        return np.asarray(moved[: len(start)].reshape(self.start.shape))


def spectral_radius(matrix: np.ndarray) -> float:
    """ρ: the largest absolute value of an eigenvalue."""
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def eigenprojector(matrix: np.ndarray, value: float) -> np.ndarray | None:
    """The projector on the eigenspace of a value along all others; None if the value is defective.

    With R and L the right and left eigenvectors, Π = R (LᵀR)⁻¹ Lᵀ.
    """
    shifted = matrix - value * np.eye(len(matrix))
    multiplicity = int((np.abs(np.linalg.eigvals(matrix) - value) < EQUAL).sum())
    if multiplicity == 0:
        return np.zeros_like(matrix)
    left, singular, right = np.linalg.svd(shifted)
    if singular[-multiplicity] > 1e-7 * max(1.0, singular[0]):
        return None
    r, l = right[-multiplicity:].T, left[:, -multiplicity:]  # noqa: E741
    if np.linalg.cond(l.T @ r) > 1e7:
        return None
    return np.asarray(r @ np.linalg.solve(l.T @ r, l.T))


def limit_of_powers(matrix: np.ndarray) -> np.ndarray | None:
    """lim G^t: 0, or the projector on what G leaves as it is; None if the powers do not converge."""
    values = np.linalg.eigvals(matrix)
    fixed = np.abs(values - 1) < EQUAL
    if (np.abs(values[~fixed]) >= 1 - ON_CIRCLE).any():
        return None
    return eigenprojector(matrix, 1.0)


def at_least(count: int, smallest: int) -> None:
    """Raise `RecipeError` unless a number of rounds is an integer of at least `smallest`."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < smallest:
        raise RecipeError(f"Rounds must be an integer of at least {smallest}.", repr(count), "Choose another.")
