"""Layouts met before: what is remembered changes no byte and no answer, and lets nothing unsound through."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save

from codistill.core.errors import MessageError
from codistill.wire import codec
from codistill.wire.codec import decode, encode

shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
numbers = {dtype: st.integers(0, 1) if dtype != "bool" else st.booleans() for dtype in ("bool", "i8", "f2", "f4", "f8")}
arrays_of = st.one_of([hnp.arrays(dtype, shapes, elements=element) for dtype, element in numbers.items()])
some_values = st.dictionaries(
    st.sampled_from(["n", "ü", 'q"\n', "back\\slash"]),
    st.one_of(st.integers(-3, 3), st.floats(0, 1), st.none(), st.text(max_size=4), st.lists(st.booleans(), max_size=2)),
    max_size=3,
)
some_arrays = st.dictionaries(st.sampled_from(["a", "b", "w.é", 'q"\n']), arrays_of, max_size=4)


@pytest.fixture(autouse=True)
def _nothing_known():
    _forget()


def _forget():
    codec._layouts.clear()
    codec._headers.clear()


def _answer(data):
    """What becomes of some bytes, in a form that can be compared."""
    try:
        arrays, values = decode(data)
    except MessageError as error:
        return str(error)
    shown = {name: (a.dtype, a.shape, a.tobytes(), a.flags.writeable) for name, a in arrays.items()}
    return shown, values


@settings(derandomize=True, database=None, deadline=None, max_examples=70)
@given(arrays=some_arrays, values=some_values, others=some_values)
def test_a_known_layout_is_written_and_read_as_an_unknown_one(arrays, values, others):
    contiguous = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    _forget()
    data = encode(arrays, values)
    assert encode(arrays, values) == data == _saved(contiguous, values)
    assert _answer(data) == _answer(data)
    other = {name: np.zeros_like(array) for name, array in contiguous.items()}
    assert encode(other, others) == _saved(other, others)
    known = _answer(_saved(other, others))
    _forget()
    assert known == _answer(_saved(other, others))


def _saved(arrays, values):
    """As safetensors writes them."""
    text = json.dumps(values, separators=(",", ":"))
    return save(arrays, {"v": text} if values else None)


def test_weights_have_a_layout_whatever_values_they_come_with():
    weights = {"w": np.ones((3, 4), np.float32), "b": np.ones(3, np.float32)}
    data = encode(weights, {})
    assert codec._read_cached(data) is None
    decode(data)
    assert codec._read_cached(data) is not None
    assert codec._read_cached(encode(weights, {"n": 1, "names": ["é"]})) is not None
    _forget()
    decode(encode(weights, {"n": 12}))
    assert codec._read_cached(data) is not None
    for other in (encode({**weights, "n": np.arange(3)}, {}), encode({}, {}), encode({}, {"n": 1})):
        decode(other)
        assert codec._read_cached(other) is None


@pytest.mark.parametrize(
    "metadata",
    [
        b'{"v":""}',  # no text at all
        b'{"v":"[1]"}',  # no table
        b'{"v":"{\\"n\\":[[1]]}"}',  # a table that is not flat
        b'{"v":"{\\"n\\":1}","v":"{}"}',  # twice
        b'{"v":"{\\"n\\":\\"\\ud800\\"}"}',  # half of a character
        b'{"v":"{\\"n\\":\\"\xff\\"}"}',  # no text in UTF-8
        b'{"v":"{\\"n\\":1}","w":"1"}',
        b'{"w":"1"}',
        b'{"p":"[{},[]]"}',
        b"{}",
    ],
)
def test_values_as_nobody_writes_them_get_the_answer_of_an_unknown_layout(metadata):
    plain = encode({"a": np.ones(2)}, {})
    header = b'{"__metadata__":' + metadata + b"," + plain[9 : 8 + plain[0]].rstrip()
    header += b" " * (-len(header) % 8)
    data = len(header).to_bytes(8, "little") + header + plain[-16:]
    unknown = _answer(data)
    decode(plain)
    assert _answer(data) == unknown


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_of_a_known_layout_are_looked_at_every_time(bad):
    decode(encode({"a": np.ones(2), "z": np.ones(2)}, {}))
    data = encode({"a": np.ones(2), "z": np.array([1.0, bad])}, {})
    assert codec._read_cached(data) is not None
    with pytest.raises(MessageError, match=r"must be finite.*'z'"):
        decode(data)
    assert decode(data, finite=False)[0]["a"].tolist() == [1, 1]


def test_a_known_header_with_a_body_of_another_length_is_refused():
    data = encode({"z": np.ones((2, 3), np.float32)}, {})
    decode(data)
    for wrong in (data[:-4], data + bytes(4), data[:-24]):
        with pytest.raises(MessageError, match="valid safetensors encoding"):
            decode(wrong)


@pytest.mark.parametrize("values", [{}, {"n": 12, "t": "a"}])
def test_changed_bytes_get_the_same_answer_whatever_was_read_before(values):
    rng = random.Random(0)
    data = encode({"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)}, values)
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 2, 8))):
            changed[rng.randrange(len(changed))] = rng.choice((rng.randrange(256), *b'0123456789",:[]{}'))
        changed = bytes(changed[: rng.choice((len(data), rng.randrange(len(data))))])
        decode(data)
        before = _answer(changed)
        _forget()
        assert before == _answer(changed)


def test_no_more_than_some_layouts_are_remembered():
    for size in range(1, 3 * codec._MOST):
        decode(encode({"z": np.ones(size)}, {}))
    assert len(codec._layouts) <= codec._MOST
    assert len(codec._headers) <= codec._MOST
    decode(encode({"n" * codec._LONGEST: np.ones(1)}, {}))
    assert all(len(header) <= codec._LONGEST for header in codec._layouts)


def test_numbers_that_are_not_aligned_are_copied():
    data = encode({"a": np.arange(3.0)}, {})
    decode(data)
    header = data[8 : 8 + data[0]].rstrip() + b" "
    header += b" " * (len(header) % 8 == 0)
    shifted = len(header).to_bytes(8, "little") + header + data[-24:]
    assert codec._read_cached(shifted) is None
    found = decode(shifted)[0]["a"]
    assert found.flags.aligned
    assert found.tolist() == [0, 1, 2]
