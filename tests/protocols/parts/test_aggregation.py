"""Aggregates of the others, against a plain loop that leaves one agent out at a time."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import trim_mean

from codistill.protocols.parts.aggregation import KINDS, Aggregation


def _log_softmax(f: np.ndarray) -> np.ndarray:
    return f - np.log(np.exp(f).sum(axis=-1, keepdims=True))


def _expected(kind: str, f: np.ndarray, coverage: np.ndarray, temperature: float) -> np.ndarray:
    """The aggregate of all of f (N, samples, K), written out."""
    log_p = _log_softmax(f)
    match kind:
        case "mean":
            return f.mean(axis=0)
        case "trimmed":
            return np.asarray(trim_mean(log_p, 0.2, axis=0))
        case "median":
            return np.asarray(np.median(log_p, axis=0))
        case "probabilities":
            return temperature * np.log(np.exp(_log_softmax(f / temperature)).mean(axis=0))
        case "confidence":
            certainty = 1 + (np.exp(log_p) * log_p).sum(axis=-1) / np.log(f.shape[-1])
            return np.asarray([np.average(log_p[:, i], axis=0, weights=certainty[:, i]) for i in range(f.shape[1])])
    return np.stack([np.average(log_p[:, :, k], axis=0, weights=coverage[:, k]) for k in range(f.shape[2])], axis=1)


@pytest.mark.parametrize("agents", [2, 3, 5, 6, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_each_gets_the_aggregate_of_the_others(kind: str, agents: int) -> None:
    rng = np.random.default_rng(agents)
    f, coverage = rng.normal(size=(agents, 4, 3)), rng.uniform(0.1, 1, size=(agents, 3))
    way = Aggregation(kind=kind, temperature=2.0)
    found = way.of_others(f, coverage)
    for n in range(agents):
        rest = np.arange(agents) != n
        np.testing.assert_allclose(found[n], _expected(kind, f[rest], coverage[rest], 2.0), atol=1e-9)
    np.testing.assert_allclose(way.of_all(f, coverage), _expected(kind, f, coverage, 2.0), atol=1e-9)


def test_equal_values_are_ranked_once() -> None:
    """Ties: without the 7, the others of the first are 1, 1, 1; without a 1 they are 7, 1, 1."""
    values = np.array([7.0, 1.0, 1.0, 1.0])[:, None, None]
    found = Aggregation(kind="median", outputs=False).of_others(values)
    np.testing.assert_array_equal(found.ravel(), [1, 1, 1, 1])


@pytest.mark.parametrize("kind", ["trimmed", "median"])
@pytest.mark.parametrize("lie", [-1.0, 1e20, -1e20])
def test_three_of_ten_byzantine_agents_keep_a_robust_aggregate_in_the_honest_range(kind: str, lie: float) -> None:
    honest = np.random.default_rng(0).normal(size=(7, 5, 3)) + np.array([4.0, 0.0, 0.0])
    lies = lie * honest[:3]
    found = Aggregation(kind=kind, trim=0.34).of_others(np.concatenate([honest, lies]))[:7]
    log_p = _log_softmax(honest)
    assert (found >= log_p.min(axis=0) - 1e-9).all()
    assert (found <= log_p.max(axis=0) + 1e-9).all()
    plain = Aggregation(kind="mean").of_others(np.concatenate([honest, lies]))[:7]
    assert lie == -1 or not np.isclose(plain, honest.mean(axis=0), atol=10).all()


def test_a_constant_per_sample_changes_no_kind() -> None:
    """Outputs before the softmax are known up to a constant: a black box states log p, a network anything."""
    rng = np.random.default_rng(2)
    f = rng.normal(size=(5, 4, 3))
    shifted = f + rng.normal(size=(5, 4, 1)) * 10
    for kind in KINDS:
        way = Aggregation(kind=kind)
        np.testing.assert_allclose(
            _log_softmax(way.of_others(f)), _log_softmax(way.of_others(shifted)), atol=1e-9, err_msg=kind
        )


def test_float32_stays_float32() -> None:
    f = np.random.default_rng(3).normal(size=(4, 2, 3)).astype(np.float32)
    assert {Aggregation(kind=kind).of_others(f).dtype for kind in KINDS} == {np.dtype(np.float32)}
