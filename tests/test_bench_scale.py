"""The model behind docs/scale.md: its fits and limits, the tables of the page, and the mean of a tree of relays."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
TREES = [(1, 2, 0), (2, 2, 1), (7, 7, 1), (8, 7, 2), (100, 10, 2), (101, 10, 3), (729, 9, 3), (1000, 3, 7)]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    from bench import scale_model

    return scale_model


def drawn(n: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, 2)).astype(dtype), rng.integers(1, 10_000, n)


def exact_means(x: np.ndarray, counts: np.ndarray) -> tuple[list[Fraction], list[Fraction]]:
    """Σ n_k x_k / Σ n_k and Σ n_k |x_k| / Σ n_k of each column, without rounding."""
    total, weights = int(counts.sum()), [int(count) for count in counts]
    columns = [[Fraction(float(value)) for value in column] for column in x.T]
    means = [sum((w * v for w, v in zip(weights, c, strict=True)), Fraction()) / total for c in columns]
    sizes = [sum((w * abs(v) for w, v in zip(weights, c, strict=True)), Fraction()) / total for c in columns]
    return means, sizes


def error(found: np.ndarray, x: np.ndarray, counts: np.ndarray) -> float:
    """The largest error of a column, in parts of its Σ n_k |x_k| / Σ n_k."""
    means, sizes = exact_means(x, counts)
    return max(
        float(abs(Fraction(float(value)) - mean) / size) for value, mean, size in zip(found, means, sizes, strict=True)
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "fan_out", "depth"), TREES)
def test_the_mean_of_a_tree_is_the_mean_to_rounding(
    model: ModuleType, n: int, fan_out: int, depth: int, dtype: type
) -> None:
    """Within the derived bound, for a depth of ⌈log_f n⌉; so is the flat mean, within its own."""
    x, counts = drawn(n, dtype)
    found, reached = model.tree_mean(x, counts, fan_out)
    assert reached == model.levels(n, fan_out) == depth
    assert found.dtype == dtype
    assert error(found, x, counts) <= model.tree_bound(fan_out, depth, dtype)
    flat, _ = model.tree_mean(x, counts, max(n, 2))
    assert error(flat, x, counts) <= model.tree_bound(n, 1, dtype)


def test_the_bound_tells_a_wrong_tree_from_a_right_one(model: ModuleType) -> None:
    """Relays that pass on means without counts give another mean: off by far more than rounding."""
    x, counts = drawn(1000, np.float32)
    groups, weights = np.split(x, 10), np.split(counts.astype(np.float32), 10)
    of_means = np.mean([np.average(g, axis=0, weights=w) for g, w in zip(groups, weights, strict=True)], axis=0)
    assert error(of_means, x, counts) > 100 * model.tree_bound(100, 2, np.float32)


def test_the_bound_is_that_of_the_additions(model: ModuleType) -> None:
    """Three levels of ten children: 3 · 9 sums, two roundings of n_k x_k and two of the quotient."""
    u, m = 2.0**-24, 3 * 9 + 4
    assert model.tree_bound(10, 3, np.float32) == pytest.approx(m * u / (1 - m * u), rel=1e-12)


def test_a_fit_finds_what_the_values_were_made_of(model: ModuleType) -> None:
    counts = (10, 30, 100, 300)
    values = [2e-3 + 4e-4 * n + 9e-7 * n**2 for n in counts]
    assert model.fit(counts, values, (0, 1, 2)) == pytest.approx([2e-3, 4e-4, 9e-7], rel=1e-6)
    assert model.at([2e-3, 4e-4, 9e-7], 300) == pytest.approx(values[-1])


def test_saturation_is_the_last_number_of_agents_that_fits(model: ModuleType) -> None:
    made = json.loads(model.KEPT.read_text("utf-8"))
    for name in model.PROTOCOLS:
        for what, n in model.saturation(made, name).items():
            assert model.load(made, name, n).shares[what] <= 1 < model.load(made, name, n + 1).shares[what]


def test_the_page_has_the_tables_of_the_model(model: ModuleType) -> None:
    text = model.PAGE.read_text("utf-8")
    assert model.page(text, json.loads(model.KEPT.read_text("utf-8"))) == text, "run: python -m bench.scale_model"
