"""Features by agent as a file, and as a file that is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from codistill.core.errors import MessageError
from codistill.results.outputs import FeatureSpace
from codistill.wire.codec import encode

SAMPLES = np.array([3, 5, 8])


@pytest.mark.parametrize("labels", [np.array([0, 1, 1]), None])
def test_a_file_holds_all_of_it(labels: np.ndarray | None) -> None:
    by_agent = {"a / b": np.array([[1.0], [np.nan], [np.inf]]), "c": np.ones((3, 4), np.float32)}
    found = FeatureSpace.decode(FeatureSpace(7, SAMPLES, labels, by_agent).encode())
    assert (found.round, list(found.by_agent)) == (7, list(by_agent))
    assert np.array_equal(found.samples, SAMPLES)
    assert (found.labels is None) == (labels is None)
    assert labels is None or np.array_equal(found.labels, labels)
    assert all(np.array_equal(found.by_agent[name], by_agent[name], equal_nan=True) for name in by_agent)
    assert found.by_agent["c"].dtype == np.float32


GOOD_ARRAYS = {"samples": SAMPLES, "agent-0": np.ones((3, 2))}
GOOD_VALUES = {"round": 1, "agents": ["a"]}


@pytest.mark.parametrize(
    ("arrays", "values"),
    [
        ({"samples": SAMPLES[:2]}, {}),
        ({"samples": np.ones((3, 1))}, {}),
        ({"labels": np.zeros(2)}, {}),
        ({"agent-0": np.ones(3)}, {}),
        ({"agent-1": np.ones((3, 2))}, {}),
        ({}, {"agents": ["a", "b"]}),
        ({}, {"agents": [1]}),
        ({}, {"agents": None}),
        ({}, {"round": "1"}),
    ],
)
def test_other_arrays_are_refused(arrays: dict[str, Any], values: dict[str, Any]) -> None:
    assert FeatureSpace.decode(encode(GOOD_ARRAYS, GOOD_VALUES)).round == 1
    with pytest.raises(MessageError, match="matching shapes"):
        FeatureSpace.decode(encode(GOOD_ARRAYS | arrays, GOOD_VALUES | values))
