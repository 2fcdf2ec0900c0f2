"""Kernel ridge regression with the scaling of the federated kernel theory."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import scipy.linalg
from sklearn.metrics.pairwise import pairwise_kernels

from codistill.core.errors import LearnerError
from codistill.core.settings import clear_argument_errors
from codistill.learners.ability import Ability, Learner, not_fitted
from codistill.learners.portable.models import BLOCK, export_kernel
from codistill.wire.message import Message


class KernelRidge(Learner):
    """g(x) = k_xᵀ (K + c N I)⁻¹ y, with N the samples of the *whole federation*.

    Afonin & Karimireddy, eq. (5): every agent's loss is divided by N₁ + N₂, not by its own count; with
    its own count the ensemble EKD misses the centralised solution. At c = 0 the minimum-norm solution is
    taken. A fitted model holds its training inputs, so it may not travel unless its owner says
    `reveal_inputs=True`.
    """

    @clear_argument_errors
    def __init__(
        self,
        kernel: str = "rbf",
        c: float = 1e-3,
        *,
        samples: int | None = None,
        reveal_inputs: bool = False,
        **kernel_options: Any,
    ) -> None:
        if isinstance(c, bool) or not isinstance(c, int | float | np.number) or c < 0:
            must = "c, the regularisation, must be a number of at least 0."
            raise LearnerError(must, repr(c), "Choose 0 for minimum norm.")
        self.kernel, self.c, self.kernel_options = kernel, c, kernel_options
        self._federation_samples = samples
        self.reveal_inputs = reveal_inputs
        self._inputs: np.ndarray | None = None
        self._coefficients: np.ndarray | None = None
        self.abilities = Ability.PREDICT | (Ability.PORTABLE if reveal_inputs else Ability.LABELS)

    def join(self, federation_samples: int) -> None:
        """N of the formula, unless given at construction."""
        if self._federation_samples is None:
            self._federation_samples = federation_samples

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Solve (K + c N I) a = y; by pseudo-inverse at c = 0."""
        # A copy: a product of samples with themselves is computed otherwise, and with other last digits, where both are
        # the same memory, as they would not be after a resume.
        inputs = np.array(x, dtype=np.float64).reshape(len(x), -1)
        gram = self._gram(inputs, inputs)
        wanted = np.asarray(targets, dtype=np.float64)
        if self.c == 0:
            coefficients = scipy.linalg.pinvh(gram) @ wanted
        else:
            ridge = self.c * (self._federation_samples or len(inputs))
            matrix = gram + ridge * np.eye(len(inputs))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", scipy.linalg.LinAlgWarning)
                    coefficients = scipy.linalg.solve(matrix, wanted, assume_a="pos")
            except (scipy.linalg.LinAlgError, scipy.linalg.LinAlgWarning):
                # The matrix is not safely positive definite (a sigmoid kernel, a tiny c).
                coefficients = scipy.linalg.pinvh(matrix) @ wanted
        self._inputs, self._coefficients = inputs, np.ascontiguousarray(coefficients)

    @property
    def ready(self) -> bool:  # type: ignore[override]
        return self._inputs is not None

    def predict(self, x: np.ndarray) -> np.ndarray:
        """k_xᵀ a, in double precision: the theory is checked to more digits than float32 has.

        Rows are taken in blocks, so that memory is bounded however many inputs a received model has.
        """
        if self._inputs is None or self._coefficients is None:
            raise not_fitted(self)
        if not len(x):
            return np.zeros((0, self._coefficients.shape[1]))
        rows = np.asarray(x, dtype=np.float64).reshape(len(x), -1)
        block = max(1, BLOCK // max(len(self._inputs), rows.shape[1]))
        parts = [
            self._gram(rows[i : i + block], self._inputs) @ self._coefficients
            for i in range(0, max(len(rows), 1), block)
        ]
        return np.asarray(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def _gram(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        try:
            return np.asarray(pairwise_kernels(left, right, metric=self.kernel, **self.kernel_options))
        except (ValueError, TypeError) as error:
            raise LearnerError(
                "The kernel and its options must be known to sklearn.metrics.pairwise.pairwise_kernels.",
                f"kernel={self.kernel!r} with {self.kernel_options}: {str(error)[:150]}",
                "Choose rbf, laplacian, polynomial, linear, sigmoid, cosine or a function.",
            ) from None

    def check(self, x: np.ndarray, targets: np.ndarray, owner: str) -> None:
        first = np.asarray(x[:1], dtype=np.float64).reshape(1, -1)
        self._gram(first, first)

    def state(self) -> dict[str, Any]:
        return {"inputs": self._inputs, "coefficients": self._coefficients, "samples": self._federation_samples}

    def restore(self, state: dict[str, Any]) -> None:
        self._inputs, self._coefficients = state["inputs"], state["coefficients"]
        self._federation_samples = state["samples"]

    def export(self) -> Message:
        """Inputs and coefficients, if the owner agreed to reveal the inputs."""
        return export_kernel(self)

    def describe(self) -> str:
        return f"kernel ridge ({self.kernel if isinstance(self.kernel, str) else 'own kernel'})"

    def advice(self, missing: Ability) -> str:
        if missing == Ability.PORTABLE:
            return (
                "A kernel model holds its owner's training inputs, so it does not travel "
                "unless its owner sets reveal_inputs."
            )
        return super().advice(missing)
