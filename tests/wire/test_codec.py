"""The encoding of messages: round trips, equal bytes for equal content, and any bytes at all as input."""

import json
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from codistill.core.errors import MessageError
from codistill.wire.codec import decode, encode, is_sendable

DTYPES = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]

names = st.text(max_size=8).filter(
    lambda name: name != "__metadata__" and not any("\ud800" <= c <= "\udfff" for c in name)
)
finite = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        dtype,
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
        elements={"allow_nan": False, "allow_infinity": False} if dtype[0] == "f" else None,
    )
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
plain = st.dictionaries(names, st.one_of(scalars, st.lists(scalars, max_size=3)), max_size=4)


repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=35)


def raw(header, body=b""):
    """A message by hand: header length, header, array bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def tensor(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# --- round trips ----------------------------------------------------------------------------------


@repeatable
@given(arrays=st.dictionaries(names, finite, max_size=4), values=plain)
def test_what_goes_in_comes_out(arrays, values):
    found, told = decode(encode(arrays, values))
    assert told == values
    assert {type(value) for value in told.values()} == {type(value) for value in values.values()}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
        assert not found[name].flags.writeable


@repeatable
@given(arrays=st.dictionaries(names, finite, max_size=5), order=st.randoms(use_true_random=False))
def test_equal_content_gives_equal_bytes(arrays, order):
    shuffled = list(arrays.items())
    order.shuffle(shuffled)
    assert encode(dict(shuffled), {"a": 1}) == encode(arrays, {"a": 1})


def test_layout_in_memory_does_not_travel():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    for other in (np.asfortranarray(array), array.repeat(2, axis=1)[:, ::2], array.astype(">f4")):
        assert encode({"a": other}, {}) == encode({"a": array}, {})
    assert np.array_equal(decode(encode({"a": array[::-1, ::2]}, {}))[0]["a"], array[::-1, ::2])


def test_the_size_of_a_message_is_its_arrays_and_a_short_header():
    empty = len(encode({"z": np.zeros((0, 10), np.float32)}, {}))
    assert len(encode({"z": np.zeros((100, 10), np.float32)}, {})) - empty in range(4000, 4010)
    assert empty < 100


def test_tuples_arrive_as_lists():
    assert decode(encode({}, {"shape": (1, 28)}))[1] == {"shape": [1, 28]}


def test_what_is_sendable():
    assert all(is_sendable(np.dtype(dtype)) for dtype in [*DTYPES, ">i8"])
    assert not any(is_sendable(np.dtype(dtype)) for dtype in ["O", "U3", "S3", "c8", "M8[s]", "V4", np.longdouble])


# --- what may not be sent -------------------------------------------------------------------------


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["a"]), np.array([1j]), np.zeros(1, "f4,i4")])
def test_arrays_must_hold_numbers(array):
    with pytest.raises(MessageError, match=r"must be numeric.*'picture' of dtype"):
        encode({"picture": array}, {})


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), {"a": 1}, [[1]], object(), 1j, b"bytes", np.int64(3), 2**64, -(2**63) - 1, 10**500],
)
def test_plain_values_must_be_plain(value):
    with pytest.raises(MessageError, match=r"must be finite numbers, strings, booleans, or lists"):
        encode({}, {"note": value})


@pytest.mark.parametrize("name", ["__metadata__", "\ud800", 7, None, b"a"])
def test_names_must_be_text(name):
    for arrays, values in [({name: np.zeros(1)}, {}), ({}, {name: 1})]:
        with pytest.raises(MessageError, match="Names in a message must be valid text"):
            encode(arrays, values)


# --- what may not be received ---------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_arrays_must_be_finite_unless_asked_for(bad, dtype):
    data = encode({"good": np.ones(2), "z": np.array([1, bad], dtype=dtype)}, {})
    with pytest.raises(MessageError, match=r"must be finite.*'z'"):
        decode(data)
    assert np.array_equal(decode(data, finite=False)[0]["z"], np.array([1, bad], dtype=dtype), equal_nan=True)


def test_a_message_that_is_too_long_is_not_looked_at():
    data = encode({"a": np.zeros(100)}, {})
    assert decode(data, limit=len(data))
    with pytest.raises(MessageError, match=rf"at most {len(data) - 1} bytes.*{len(data)} bytes"):
        decode(data, limit=len(data) - 1)
    with pytest.raises(MessageError, match="at most"):
        decode(b"\xff" * 50, limit=10)


HOSTILE = {
    "nothing": b"",
    "no header": b"\x05\0\0\0\0\0\0\0",
    "short length": b"\x01\0\0",
    "giant header": struct.pack("<Q", 2**63) + b"{}",
    "largest header": b"\xff" * 8 + b"{}",
    "header longer than the message": struct.pack("<Q", 1000) + b"{}",
    "not JSON": raw(b"pickle"),
    "not UTF-8": raw(b'{"\xff\xfe": 1}'),
    "UTF-16": raw('{"a": 1}'.encode("utf-16")),
    "a list": raw([]),
    "null": raw(b"null"),
    "a string": raw(b'"__metadata__"'),
    "deep list": raw(b"[" * 100_000),
    "deep table": raw(b'{"a":' * 100_000),
    "an array that is a number": raw({"a": 1}),
    "an array without shape": raw({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"0000"),
    "negative shape": raw({"a": tensor(shape=[-1])}, b"0000"),
    "giant shape": raw({"a": tensor(shape=[2**62, 2**62])}, b"0000"),
    "overflowing shape": raw({"a": tensor(shape=[2**63])}, b"0000"),
    "shape beyond integers": raw({"a": tensor(shape=[2**70])}, b"0000"),
    "empty but giant": raw({"a": tensor(shape=[0, 2**62], offsets=[0, 0])}),
    "empty but overflowing": raw({"a": tensor(shape=[0, 2**63], offsets=[0, 0])}),
    "too many sides": raw({"a": tensor(shape=[0] * 100, offsets=[0, 0])}),
    "fractional shape": raw({"a": tensor(shape=[1.5])}, b"0000"),
    "negative offset": raw({"a": tensor(offsets=[-4, 0])}, b"0000"),
    "offsets backwards": raw({"a": tensor(offsets=[4, 0])}, b"0000"),
    "offset beyond the end": raw({"a": tensor(offsets=[4, 8])}, b"0000"),
    "overlapping arrays": raw({"a": tensor(), "b": tensor()}, b"0000"),
    "partly overlapping": raw({"a": tensor(), "b": tensor(offsets=[2, 6])}, b"000000"),
    "a hole": raw({"a": tensor(), "b": tensor(offsets=[8, 12])}, b"0" * 12),
    "left over bytes": raw({"a": tensor()}, b"0" * 8),
    "too few bytes": raw({"a": tensor()}, b"00"),
    "shape and bytes disagree": raw({"a": tensor(shape=[2])}, b"0000"),
    "unknown dtype": raw({"a": tensor("F128")}, b"0000"),
    "bfloat16": raw({"a": tensor("BF16", [2])}, b"0000"),
    "eight bits": raw({"a": tensor("F8_E4M3", [4])}, b"0000"),
    "odd booleans": raw({"a": tensor("BOOL", [4])}, b"\x00\x01\x02\xff"),
    "NaN by hand": raw({"a": tensor()}, b"\xff\xff\xff\xff"),
    "two metadata": raw(b'{"__metadata__":{"v":"{}"},"__metadata__":{"v":"{}"}}'),
    "metadata is a number": raw({"__metadata__": 1}),
    "values are a number": raw({"__metadata__": {"v": 1}}),
    "values are null": raw({"__metadata__": {"v": "null"}}),
    "values are a list": raw({"__metadata__": {"v": "[1]"}}),
    "values are not JSON": raw({"__metadata__": {"v": "__import__('os')"}}),
    "values are nested": raw({"__metadata__": {"v": '{"a":{"b":1}}'}}),
    "values are nested deep": raw({"__metadata__": {"v": '{"a":' + "[" * 100_000}}),
    "value NaN": raw({"__metadata__": {"v": '{"a":NaN}'}}),
    "value infinite": raw({"__metadata__": {"v": '{"a":1e999}'}}),
    "value of many digits": raw({"__metadata__": {"v": '{"a":' + "9" * 5000 + "}"}}),
    "value of some digits": raw({"__metadata__": {"v": '{"a":' + "9" * 500 + "}"}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_anything_but_a_valid_message_is_a_message_error(name):
    with pytest.raises(MessageError):
        decode(HOSTILE[name])


@pytest.mark.parametrize("header", [b'{"__metadata__":null}', b'{"__metadata__":{}}', b"{}", b"{}      "])
def test_an_empty_message_is_a_message(header):
    assert decode(raw(header)) == ({}, {})


def test_of_duplicate_names_one_stands():
    one = json.dumps(tensor()).encode()
    try:
        arrays, _ = decode(raw(b'{"a":' + one + b',"a":' + one + b"}", b"0000"))
    except MessageError:
        return
    assert {name: array.shape for name, array in arrays.items()} == {"a": (1,)}


def check_any_bytes(data):
    try:
        arrays, values = decode(data)
    except MessageError:
        return False
    assert all(isinstance(name, str) and is_sendable(array.dtype) for name, array in arrays.items())
    assert all(np.isfinite(array).all() and not array.flags.writeable for array in arrays.values())
    assert sum(array.nbytes for array in arrays.values()) <= len(data)
    assert isinstance(values, dict)
    return True


@repeatable
@given(st.binary(max_size=200))
def test_random_bytes(data):
    check_any_bytes(data)
    check_any_bytes(raw(data, data))


def test_thousands_of_mutations():
    rng = random.Random(0)
    valid = encode(
        {"f": np.ones((2, 3), np.float32), "b": np.array([True, False]), "i": np.arange(3), "e": np.zeros((0, 2))},
        {"samples": 3, "names": ["a", "b"], "x": 0.5},
    )
    header = 8 + int.from_bytes(valid[:8], "little")
    survived = 0
    for _ in range(5_000):
        data = bytearray(valid)
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            where = rng.randrange(header if rng.random() < 0.8 else len(data))
            match rng.randrange(4):
                case 0:
                    data[where] = rng.randrange(256)
                case 1:
                    data[where] ^= 1 << rng.randrange(8)
                case 2:
                    del data[where]
                case 3:
                    data[where] = ord(rng.choice('0123456789-{}[]",:eE.'))
            header = min(header, len(data))
        survived += check_any_bytes(bytes(data))
        header = 8 + int.from_bytes(valid[:8], "little")
    assert 0 < survived < 5_000
