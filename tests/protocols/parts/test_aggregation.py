"""Aggregates of the others, against a plain loop that leaves one agent out at a time."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from pathlib import Path

import numpy as np
import pytest

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
            # k = ⌈m/5⌉ at each end, fewer than half. Rounded down, as before, it was 0 up to four values: no trimming.
            k = min(-(-len(f) // 5), (len(f) - 1) // 2)
            return np.asarray(np.sort(log_p, axis=0)[k : len(f) - k].mean(axis=0))
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


def _stated(kind: str, trim: Fraction, m: int) -> int:
    """For how many Byzantine agents of m a rule is said to hold: min(⌈trim m⌉, ⌈m/2⌉ - 1), or ⌈m/2⌉ - 1."""
    half = ceil(Fraction(m, 2)) - 1
    return half if kind == "median" else min(ceil(trim * m), half)


@pytest.mark.parametrize("kind", ["trimmed", "median"])
@pytest.mark.parametrize("percent", [1, 7, 10, 20, 34, 49])
@pytest.mark.parametrize("sign", [-1, 1])
def test_it_holds_for_exactly_as_many_byzantine_agents_as_stated(kind: str, percent: int, sign: int) -> None:
    """With f huge values every entry stays between the honest ones, with f + 1 it does not: of all, and of the others.

    The values are distinct and shuffled, so that no entry leaves the range or stays in it by its place.
    """
    rng, trim = np.random.default_rng(percent), Fraction(percent, 100)
    way = Aggregation(kind=kind, trim=float(trim), outputs=False)
    for m in [*range(1, 16), 100]:
        f = _stated(kind, trim, m)
        for byzantine in {f, f + 1} - {m}:
            honest = rng.normal(size=(m - byzantine, 2, 3))
            lies = sign * rng.uniform(1e10, 1e20, size=(byzantine, 2, 3))
            mixed = rng.permuted(np.concatenate([honest, lies]), axis=0)
            # Of others: an honest agent, with any value, hears the m others.
            own = rng.normal(size=(1, 2, 3))
            for found in (way.of_all(mixed), way.of_others(np.concatenate([own, mixed]))[0]):
                inside = (honest.min(axis=0) - 1e-9 <= found) & (found <= honest.max(axis=0) + 1e-9)
                assert inside.all() if byzantine == f else not inside.any(), (m, byzantine)


def test_the_table_of_the_documentation_and_the_share_of_all_agents() -> None:
    """n agents, of which each hears n - 1 others: docs/how-to/faults.md; and ⌊trim n⌋ of n are always tolerated."""
    trimmed, median = Aggregation(kind="trimmed"), Aggregation(kind="median")
    others = {n: (trimmed.tolerated(n - 1), median.tolerated(n - 1)) for n in (2, 3, 4, 5, 6, 7, 8, 10, 11, 20, 21)}
    assert others == {
        2: (0, 0), 3: (0, 0), 4: (1, 1), 5: (1, 1), 6: (1, 2), 7: (2, 2), 8: (2, 3), 10: (2, 4), 11: (2, 4),
        20: (4, 9), 21: (4, 9),
    }  # fmt: skip
    together = {n: (trimmed.tolerated(n), median.tolerated(n)) for n in (2, 3, 4, 5, 6, 7, 8, 10, 11, 20, 21)}
    assert together == {
        2: (0, 0), 3: (1, 1), 4: (1, 1), 5: (1, 2), 6: (2, 2), 7: (2, 3), 8: (2, 3), 10: (2, 4), 11: (3, 5),
        20: (4, 9), 21: (5, 10),
    }  # fmt: skip
    page = (Path(__file__).parents[3] / "docs/how-to/faults.md").read_text("utf-8")
    rows = {
        "of the others, `trimmed`": [each[0] for each in others.values()],
        "of the others, `median`": [each[1] for each in others.values()],
        "of all, `trimmed`": [each[0] for each in together.values()],
        "of all, `median`": [each[1] for each in together.values()],
    }
    assert f"| agents n | {' | '.join(map(str, others))} |" in page
    for name, counts in rows.items():
        assert f"| {name} | {' | '.join(map(str, counts))} |" in page
    for percent in range(1, 50):
        for n in range(2, 60):
            way, share = Aggregation(kind="trimmed", trim=percent / 100), percent * n // 100
            assert way.tolerated(n) >= min(share, (n - 1) // 2)
            assert way.tolerated(n - 1) >= min(share, (n - 2) // 2)


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
