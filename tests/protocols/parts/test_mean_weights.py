"""The mean of models that lie in memory alike is taken at once: to the bit as weight by weight."""

import numpy as np
import pytest

from codistill.protocols import parts
from codistill.wire.codec import AdjacentArrays
from codistill.wire.message import Message

SHAPES = {"w": (40, 30), "b": (30,), "scale": ()}


def _heard(dtype=np.float32, order=tuple(SHAPES)):
    rng = np.random.default_rng(0)
    return {
        f"a{k}": Message({name: rng.normal(size=SHAPES[name]).astype(dtype) for name in order}, {"samples": 3 + k})
        for k in range(5)
    }


def _received(heard):
    """As they arrive: decoded twice, so that the second time their layout is known."""
    for message in heard.values():
        Message.decode(message.encoded)
    return {name: Message.decode(message.encoded) for name, message in heard.items()}


def _mean(heard):
    return parts.combined_weights(heard, "mean", 0.2, np.inf)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_at_once_as_one_by_one(dtype):
    heard = _heard(dtype)
    received = _received(heard)
    assert all(isinstance(message.arrays, AdjacentArrays) for message in received.values())
    at_once, one_by_one = _mean(received), _mean(heard)
    assert isinstance(at_once, AdjacentArrays)
    assert not isinstance(one_by_one, AdjacentArrays)
    assert at_once.keys() == one_by_one.keys()
    for name, mean in one_by_one.items():
        assert at_once[name].dtype == dtype
        np.testing.assert_array_equal(at_once[name], mean)
    shares = np.array([3, 4, 5, 6, 7]) / 25
    expected = sum(share * message["w"] for share, message in zip(shares, heard.values(), strict=True))
    np.testing.assert_allclose(at_once["w"], expected, rtol=1e-5, atol=1e-6)


def test_huge_weights_stay_finite():
    heard = {name: Message({"w": np.full(4, np.finfo(np.float32).max)}, {"samples": 1}) for name in "ab"}
    mean = _mean(_received(heard))
    assert isinstance(mean, AdjacentArrays)
    assert np.isfinite(mean["w"]).all()


def test_models_of_different_layouts_are_taken_weight_by_weight():
    one, other = _received(_heard()), _received(_heard(np.float64))
    mixed = {"a0": one["a0"], "a1": other["a1"]}
    mean = _mean(mixed)
    assert not isinstance(mean, AdjacentArrays)
    np.testing.assert_allclose(mean["b"], (3 * one["a0"]["b"] + 4 * other["a1"]["b"]) / 7, rtol=1e-6)


def test_a_known_layout_has_the_digest_of_its_signature():
    message = next(iter(_heard().values()))
    received = next(iter(_received({"a": message}).values()))
    assert isinstance(received.arrays, AdjacentArrays)
    assert received.layout == message.layout
    other = Message({**message.arrays, "b": np.zeros(31, np.float32)})
    assert next(iter(_received({"a": other}).values())).layout == other.layout != message.layout
