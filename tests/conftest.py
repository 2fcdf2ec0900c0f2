"""Small federations that many tests share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """All 1,797 digits as (n, 1, 8, 8) in 0..1."""
    x, y = load_digits(return_X_y=True)
    return (x.reshape(-1, 1, 8, 8) / 16).astype(np.float32), y.astype(np.int64)
