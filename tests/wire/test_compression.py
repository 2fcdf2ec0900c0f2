"""Compression of messages: what arrives, how far from what was sent, in how many bytes; and hostile bytes."""

import json
import struct
import tracemalloc
import zlib
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mutations import SETTINGS, try_many, try_one

from codistill.core.errors import MessageError, RecipeError
from codistill.wire.codec import decode, encode, encode_packed
from codistill.wire.compression import Compression
from codistill.wire.message import Message
from codistill.wire.packing import BODY, EXPANSION, Form, dequantise, groups, probability_rows, quantise

repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=35)
FLOATS = [np.dtype(kind) for kind in "efd"]


def floats(dtype, shapes):
    limit = min(float(np.finfo(dtype).max), 1e300)
    wide = st.floats(-limit, limit, width=8 * dtype.itemsize)  # denormals and all
    near = st.integers(-40, 40).map(lambda n: n / 8)
    return hnp.arrays(dtype, shapes, elements=st.one_of(wide, near))


shapes = st.one_of(
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=6),
    st.tuples(st.integers(1, 3), st.sampled_from([127, 128, 255, 256, 257])),  # where rows get steps of their own
)
arrays = st.sampled_from(FLOATS).flatmap(lambda dtype: floats(dtype, shapes))
tables = st.sampled_from(FLOATS).flatmap(lambda dtype: floats(dtype, st.tuples(st.integers(1, 5), st.integers(2, 9))))


def there_and_back(x, bits=0, k=0):
    form = Form(x.dtype, x.shape, bits, k, bool(probability_rows(x).all()))
    data = form.pack(x)
    assert len(data) == form.length
    with np.errstate(all="ignore"):
        found = form.unpack(np.frombuffer(data, np.uint8))
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    assert np.isfinite(found).all()
    return found


def rounding(x):
    """One place in the last digit of x, in float64."""
    about = np.finfo(x.dtype)
    return np.maximum(np.abs(x).astype(np.float64) * float(about.eps), float(about.smallest_subnormal))


def half_step(x):
    """(largest - smallest) / 255 / 2 of the group that a number is in; the step is rounded up to a number."""
    parts = x.reshape(groups(x.shape, x.dtype), -1).astype(np.float64)
    half = np.ptp(parts, axis=1) / 255 / 2
    tiny = np.finfo(np.float64 if x.dtype == np.float64 else np.float32).smallest_subnormal
    return np.broadcast_to((half * (1 + 1e-6) + tiny)[:, None], parts.shape).reshape(x.shape)


# --- numbers in fewer bits ------------------------------------------------------------------------


@repeatable
@given(arrays)
def test_eight_bits_are_at_most_half_a_step_off(x):
    assume(x.size > 1 and not probability_rows(x).all())
    found = there_and_back(x, bits=8)
    error = np.abs(found.astype(np.float64) - x.astype(np.float64))
    assert (error <= half_step(x) + np.maximum(rounding(x), rounding(found))).all()


@repeatable
@given(arrays)
def test_sixteen_bits_are_off_by_a_share_of_the_number_or_a_tiny_one_of_the_largest(x):
    assume(x.size > 1 and not probability_rows(x).all())
    error = np.abs(there_and_back(x, bits=16).astype(np.float64) - x.astype(np.float64))
    size = np.abs(x).astype(np.float64)
    assert (error <= np.maximum(2.0**-11 * size, 2.0**-39 * size.max()) + rounding(x)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.0, -0.1, 5e-324, 1e-45, 6e-8, 3e4, 1e38, -3.4e38, 1e300])
def test_constant_rows_are_exact_in_eight_bits(dtype, value):
    if abs(value) > float(np.finfo(dtype).max):
        return
    narrow, wide = np.full((3, 4), value, dtype), np.full((3, 300), value, dtype) * np.array([[1], [0], [0.5]], dtype)
    assert np.array_equal(there_and_back(narrow, bits=8), narrow)
    assert np.array_equal(there_and_back(wide, bits=8), wide)  # each row has a step of its own


def test_rows_have_steps_of_their_own_where_these_cost_at_most_a_sixteenth():
    """Two float32 per row are 8 bytes: a 16th of 128 codes. Two float64: of 256."""
    assert [groups((5, n), np.dtype("f")) for n in (127, 128)] == [1, 5]
    assert [groups((5, n), np.dtype("d")) for n in (255, 256)] == [1, 5]
    assert groups((2, 3, 128), np.dtype("f")) == 6
    x = np.array([[0.0, 1.0] * 64, [0.0, 1000.0] * 64], np.float32)
    x[:, 3] = 0.5
    assert np.abs(there_and_back(x, bits=8) - x)[0].max() <= 1 / 510 * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_step_of_denormals_still_reaches_the_largest(dtype):
    """357 times the smallest number in 255 steps: a step of 1.4 of it can only be 2, and half of that is 1."""
    tiny = np.finfo(dtype).smallest_subnormal
    x = np.array([0, 100, 255, 256, 357], dtype) * tiny
    assert np.abs(there_and_back(x, bits=8) - x).max() <= tiny


def test_by_hand():
    """Smallest -1, largest 1.55, step 0.01: codes 0, 255 and 100."""
    x = np.array([-1.0, 1.55, 0.004])
    data = Form(x.dtype, x.shape, 8).pack(x)
    assert list(data[-3:]) == [0, 255, 100]
    np.testing.assert_allclose(there_and_back(x, bits=8), [-1, 1.55, 0.0], atol=1e-12)


# --- the largest of each row ----------------------------------------------------------------------


@repeatable
@given(tables, st.integers(1, 8), st.sampled_from([0, 16, 8]))
def test_the_k_largest_stay_and_the_others_get_their_mean(x, k, bits):
    assume(k < x.shape[1] and not probability_rows(x).any())
    largest = np.argsort(-x, axis=1, kind="stable")[:, :k]
    exact = there_and_back(x, k=k)
    for row, found, kept in zip(x, exact, largest, strict=True):
        others = np.setdiff1d(np.arange(len(row)), kept)
        assert np.array_equal(found[kept], row[kept])
        mean = row[others].astype(np.float64).mean()
        assert np.abs(found[others].astype(np.float64) - mean).max() <= rounding(row).max()
        assert found[others].max() <= row[kept].min() + rounding(row).max()
    if bits:
        # In fewer bits: the same as kept and fill in one array of k + 1 columns.
        whole = np.column_stack([np.take_along_axis(x, np.sort(largest), 1), exact.min(axis=1)])
        size = np.abs(whole).astype(np.float64).max()
        bound = np.ptp(whole.astype(np.float64)) / 508 + 1e-44 if bits == 8 else size * 2.0**-11
        found = there_and_back(x, bits=bits, k=k)
        error = np.abs(found.astype(np.float64) - exact.astype(np.float64))
        assert error.max() <= bound * (1 + 1e-6) + rounding(x).max()


def test_of_equal_entries_the_first_are_kept():
    x = np.array([[1.0, 5, 5, 5, 1]])
    assert list(Form(x.dtype, x.shape, 0, 2).pack(x)[:2]) == [1, 2]
    assert np.array_equal(there_and_back(x, k=2), [[7 / 3, 5, 5, 7 / 3, 7 / 3]])


def test_columns_are_counted_in_two_bytes_from_257_on():
    for width, size in ((256, 1), (257, 2)):
        form = Form(np.dtype("f"), (3, width), 0, 2)
        assert form.length == 3 * 2 * size + 3 * 3 * 4
        x = np.zeros((3, width), np.float32)
        x[:, [7, width - 1]] = [2, 1]
        assert np.array_equal(there_and_back(x, k=2), x)
    assert not Form(np.dtype("f"), (3, 65537)).can_keep(2)


def test_a_kept_logit_keeps_its_rank_and_its_ratio_to_the_others():
    """Outputs before the softmax: where K entries are kept, softmax over them alone is unchanged."""
    x = np.random.default_rng(0).normal(0, 3, (50, 10)).astype(np.float32)
    found = there_and_back(x, k=3)
    kept = np.argsort(-x, axis=1)[:, :3]
    assert np.array_equal(np.argsort(-found, axis=1, kind="stable")[:, :3], kept)
    assert np.array_equal(np.take_along_axis(found, kept, 1), np.take_along_axis(x, kept, 1))
    np.testing.assert_allclose(found.mean(axis=1), x.mean(axis=1), atol=1e-5)


# --- probabilities --------------------------------------------------------------------------------


def simplex(rng, rows, columns, dtype):
    p = rng.dirichlet(np.full(columns, rng.choice([0.05, 0.5, 5.0])), rows).astype(dtype)
    p[0] = np.arange(columns) == rng.integers(columns)
    p[-1] = 1 / columns
    return p


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bits", [0, 8, 16])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_probabilities_stay_probabilities(dtype, bits, k):
    """Rows sum to 1 again, to the rounding of their dtype; the k largest as they were, and 1 - Σ kept over the others.

    In 8 bits each is within a step s ≤ 1/255, and their sum within s/2 of 1 before it is made 1; the sum of the k
    kept is at most a step too low, and the others share that. In 16 bits each that is kept is within 2^-11 of its
    magnitude, and so is their sum, which the n - k others share.
    |(xᵢ + eᵢ)/(1 + d) - xᵢ| ≤ (|eᵢ| + xᵢ·|d|)/(1 - |d|).
    """
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(max(2, k + 1), 12))
        p = simplex(rng, int(rng.integers(1, 9)), n, dtype)
        found = there_and_back(p, bits, k)
        assert (found >= 0).all()
        assert np.abs(found.sum(axis=1) - 1).max() <= 16 * np.finfo(dtype).eps
        expected, is_kept = spread_top(p, k)
        sixteen = 2.0**-11 * np.where(is_kept, expected, 1 / max(n - k, 1))
        e, d = {0: (0.0, 0.0), 8: (1 / 255, 1 / 510), 16: (sixteen, 2.0**-11)}[bits]
        assert (np.abs(found - expected) <= (e + expected * d) / (1 - d) + 1e-6).all()


def spread_top(p, k):
    """The k largest of each row (0: all), and the missing mass spread evenly over the others; which are kept."""
    kept = np.argsort(-p, axis=1, kind="stable")[:, : k or p.shape[1]]
    is_kept = np.zeros(p.shape, dtype=bool)
    np.put_along_axis(is_kept, kept, True, axis=1)
    missing = 1 - np.where(is_kept, p, 0).sum(axis=1, keepdims=True)
    return np.where(is_kept, p, missing / max(p.shape[1] - is_kept[0].sum(), 1)), is_kept


@pytest.mark.parametrize("bits", [0, 8, 16])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_makes_no_row_of_probabilities_more_confident(k, bits):
    """Sent on again and again, a flat row stays flat: 1/10 each, and 0.13, 0.12, 0.11 beside seven of 0.64/7.

    Renormalised, three kept entries of 1/10 would be 1/3 each.
    """
    flat = np.full((2, 10), 0.1, np.float32)
    flat[1] = [0.13, 0.12, 0.11, *[0.64 / 7] * 7]
    found = flat
    for _ in range(20):
        found = there_and_back(found, bits, k)
    expected, _ = spread_top(flat, k)
    np.testing.assert_allclose(found, expected, atol={0: 1e-6, 8: 1.5 * 0.04 / 255, 16: 2.0**-11}[bits])
    assert found.max(axis=1) == pytest.approx([0.1, 0.13], abs=1e-3)


@pytest.mark.parametrize("width", [4, 10, 300])
def test_eight_bits_of_kept_probabilities_never_exceed_one(width):
    """Codes of confident rows: Σ (low + code · step) of the kept ones is at most 1, so that nothing is cut off them."""
    rng, k = np.random.default_rng(0), 3
    for concentration in (0.01, 0.1, 1.0):
        p = rng.dirichlet(np.full(width, concentration), 200).astype(np.float32)
        kept = np.sort(p, axis=1)[:, -k:]
        steps, codes = quantise(kept, sums="not exceeded")
        sums = dequantise(steps, codes, kept.shape, np.dtype(np.float64)).sum(axis=1)
        true = kept.sum(axis=1, dtype=np.float64)
        assert (sums <= true + 1e-6).all()
        assert (sums >= true - steps[0, 1] * (1 + 1e-4)).all()
    one_hot = np.eye(10, dtype=np.float32)
    np.testing.assert_allclose(there_and_back(one_hot, bits=8, k=3), one_hot, atol=1e-6)


def test_many_small_probabilities_keep_their_mass():
    """0.8, 0, and 98 times 0.2/98, which is 0.65 steps of 0.8/255: 64 of 98 are one step, and the others 0."""
    p = np.full((3, 100), 0.2 / 98, np.float32)
    p[:, 7], p[:, 8] = 0.8, 0
    found = there_and_back(p, bits=8)
    assert np.abs(found[:, 7] - 0.8).max() < 0.002
    assert ((found > 0).sum(axis=1) == 65).all()


def test_what_counts_as_probabilities():
    rows = np.array([[0.5, 0.5], [0.5, 0.5009], [0.5, 0.502], [1.1, -0.1], [0.0, 1.0], [0, 0]])
    assert probability_rows(rows).tolist() == [True, True, False, False, True, False]
    assert not probability_rows(np.ones((3, 1))).any()  # a single column is no choice
    assert probability_rows(np.array([0.25, 0.75])).all()


def test_in_an_array_of_both_kinds_each_row_keeps_its_sum():
    """The mean of those left out is (0.1 + 0)/2 = (1 - 0.9)/2: probabilities need no rule of their own."""
    x = np.array([[0.6, 0.3, 0.1, 0.0], [4.0, 3.0, 1.0, -3.0]], np.float32)
    np.testing.assert_allclose(there_and_back(x, k=2), [[0.6, 0.3, 0.05, 0.05], [4, 3, -1, -1]], rtol=1e-6)


# --- whole messages -------------------------------------------------------------------------------


@settings(repeatable, max_examples=30)
@given(
    st.dictionaries(st.text("abc~", max_size=2).filter(lambda name: name != BODY), arrays, max_size=3),
    st.sampled_from(SETTINGS),
)
def test_every_combination_brings_back_names_shapes_and_dtypes(given_arrays, compression):
    others = {"ids": np.arange(5), "seen": np.array([True, False]), "one": np.array(0.1), "none": np.zeros((0, 4))}
    values = {"samples": 3, "name": 'a "b"'}
    data = compression.encode({**given_arrays, **others}, values, {})
    found, told = decode(data)
    assert told == values
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
        name: (x.shape, x.dtype) for name, x in {**given_arrays, **others}.items()
    }
    assert not any(x.flags.writeable for x in found.values())
    exact = given_arrays if not compression.is_lossy else {}
    for name, x in {**others, **exact}.items():
        assert found[name].tobytes() == np.ascontiguousarray(x).tobytes()
    assert len(data) <= len(encode({**given_arrays, **others}, values))


@pytest.mark.parametrize("compression", SETTINGS, ids=str)
def test_layout_in_memory_does_not_travel(compression):
    x = np.random.default_rng(0).normal(size=(30, 12)).astype(np.float32).round(1)
    data = compression.encode({"a": x}, {}, {})
    for other in (np.asfortranarray(x), x.repeat(2, axis=1)[:, ::2], x.astype(">f4")):
        assert compression.encode({"a": other}, {}, {}) == data


def test_without_settings_bytes_are_as_ever():
    x = {"a": np.ones((32, 10), np.float32)}
    assert Compression().encode(x, {"n": 1}, {}) == encode(x, {"n": 1})
    assert not Compression()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_travels_as_it_is_and_is_refused(bad):
    for compression in SETTINGS:
        with pytest.raises(MessageError, match=r"must be finite.*'z'"):
            decode(compression.encode({"z": np.full((32, 10), bad, np.float32), "w": np.ones((32, 10))}, {}, {}))


def test_what_is_beyond_the_arithmetic_travels_as_it_is():
    x = np.full((30, 30), 1e305)
    assert np.array_equal(decode(Compression(bits=8, top_k=2).encode({"x": x}, {}, {}))[0]["x"], x)


def test_what_would_not_get_smaller_is_let_be():
    """(2,) float32: 8 bytes, in 8 bits 2 + 8. Top 5 of 10 in 8 bits: 5 + 5 bytes per row, and all of them are 10."""
    small = {"b": np.array([1.0, 2.5], np.float32)}
    assert Compression(bits=8).encode(small, {}, {}) == encode(small, {})
    p = {"z": simplex(np.random.default_rng(0), 32, 10, np.float32)}
    assert Compression(bits=8, top_k=5).encode(p, {}, {}) == Compression(bits=8).encode(p, {}, {})


FRAME = 136  # bytes around the body of one packed array with a name of one letter
P = np.random.default_rng(0).dirichlet(np.full(10, 0.1), 32).astype(np.float32)
LOGITS = np.random.default_rng(0).normal(0, 3, (32, 10)).astype(np.float32)


@pytest.mark.parametrize(
    ("options", "columns", "steps", "number"),
    [
        ({"bits": 16}, 0, 2, 2),  # an exponent of 2 bytes, and 2 bytes per number
        ({"bits": 8}, 0, 8, 1),  # smallest and step for all, in float32
        ({"top_k": 3}, 3, 0, 4),  # a byte per column kept
        ({"top_k": 3, "bits": 16}, 3, 2, 2),
        ({"top_k": 3, "bits": 8}, 3, 8, 1),
    ],
)
def test_bytes_of_32_times_10_floats(options, columns, steps, number):
    """32 rows: of each the columns kept, and their numbers; of other than probabilities also the fill."""
    for array, fill in ((P, 0), (LOGITS, 1)):
        numbers = columns + fill if columns else 10
        expected = 32 * columns + steps + 32 * numbers * number
        data = Compression(**options).encode({"z": array}, {}, {})
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert header[BODY]["data_offsets"] == [0, expected]
        assert len(data) - expected <= FRAME
        deflated = Compression(**options, lossless=True).encode({"z": array}, {}, {})
        form = Form(np.dtype("f"), (32, 10), options.get("bits", 0), options.get("top_k", 0), not fill)
        shortest = min(expected, len(zlib.compress(form.pack(array))))
        assert len(deflated) - shortest <= FRAME
    assert len(encode({"z": P}, {})) == 1280 + 72


def test_lossless_is_exact_and_shorter_where_that_is_possible():
    x = {"z": P.round(2), "w": np.zeros((40, 40))}
    data = Compression(lossless=True).encode(x, {}, {})
    assert len(data) < 0.25 * len(encode(x, {}))
    assert all(np.array_equal(found, x[name]) for name, found in decode(data)[0].items())
    noise = {"n": np.random.default_rng(0).bytes(4096)}
    noise = {"n": np.frombuffer(noise["n"], np.uint16).astype(np.float64) ** 0.5}
    assert len(Compression(lossless=True).encode(noise, {}, {})) <= len(encode(noise, {}))


def test_an_array_that_would_grow_too_much_is_compressed_less():
    """Top 1 of 1,000 in 8 bits is 3 bytes for 4,000, beyond 1,024 times: the kept one travels in full, 6 bytes."""
    p = simplex(np.random.default_rng(0), 400, 1000, np.float32)
    data = Compression(bits=8, top_k=1).encode({"p": p}, {}, {})
    assert 400 * 6 <= len(data) <= 400 * 6 + FRAME + 8
    assert np.array_equal(decode(data)[0]["p"].argmax(axis=1), p.argmax(axis=1))
    zeros = {"w": np.zeros((1000, 1000))}  # deflates to a 1,000th, beyond 64 times
    assert decode(Compression(lossless=True).encode(zeros, {}, {}))[0]["w"].sum() == 0


def test_a_message_is_compressed_once_for_each_sender_and_phase():
    message, residue = Message.of(w=LOGITS), {}
    compression = Compression(bits=8, error_feedback=True)
    first = message.compressed(compression, residue, by=("a", 0))
    assert message.compressed(compression, residue, by=("a", 0)) is first
    assert message.compressed(compression, {}, by=("b", 0)) == first
    assert message.compressed(compression, residue, by=("a", 1)) != first  # now with what was lost
    assert message.encoded == encode({"w": LOGITS}, {})


def test_a_name_is_reserved():
    with pytest.raises(MessageError, match="'~' is reserved"):
        Compression(bits=8).encode({BODY: np.ones(10)}, {}, {})


@pytest.mark.parametrize(
    ("options", "must"),
    [
        ({"bits": 4}, "bits must be 8 or 16"),
        ({"bits": "8"}, "bits must be an integer"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"lossless": 1}, "lossless must be true or false"),
        ({"error_feedback": True, "lossless": True}, "error_feedback needs lossy compression"),
    ],
)
def test_settings_are_checked(options, must):
    with pytest.raises(RecipeError, match=must):
        Compression(**options)


# --- error feedback -------------------------------------------------------------------------------


def rounds(compression, meant):
    """The sum of what arrives, and the sum of what was meant."""
    residue = {}
    arrived = [decode(compression.encode({"w": x}, {}, residue))[0]["w"] for x in meant]
    return np.sum(arrived, axis=0, dtype=np.float64), np.sum(meant, axis=0, dtype=np.float64), residue


def test_in_eight_bits_the_sum_of_what_arrives_stays_near_the_sum_of_what_was_meant():
    """With rₜ₊₁ = xₜ + rₜ - C(xₜ + rₜ) the sums differ by r_T, at most half a step.

    The range of xₜ + rₜ is at most R + s, where R is that of x and s the step: s ≤ (R + s)/255, s ≤ R/254.
    """
    base = np.random.default_rng(0).normal(size=(20, 30))
    meant = [base] * 300
    received, wanted, residue = rounds(Compression(bits=8, error_feedback=True), meant)
    bound = np.ptp(base) / 508 * (1 + 1e-6)
    assert np.abs(received - wanted).max() <= bound
    np.testing.assert_allclose(wanted - received, residue["w", "d", 20, 30], atol=1e-9)
    without, _, _ = rounds(Compression(bits=8), meant)
    assert np.abs(without - wanted).max() > 50 * bound


def test_with_the_largest_of_each_row_what_is_carried_over_stays_bounded():
    """K kept of n, N = n - K others with the mean m: |x - C(x)|² = |x|² - |kept|² - N·m².

    If a ≥ 0 is the smallest kept, the others are ≤ a; given m their squares sum to at most (N-1)a² + (N|m| + (N-1)a)²
    ≤ (N-1)a² + 2N²m² + 2(N-1)²a². So |x - C(x)|² ≤ (1-δ)|x|² with δ = min(K/(K + N-1 + 2(N-1)²), 1/(2N)); if a < 0,
    all others have one sign and δ ≥ 1/N. Then |rₜ₊₁| ≤ q(|x| + |rₜ|), q = √(1-δ), and |r| ≤ q/(1-q)·max|x|.
    """
    k, n = 3, 6
    others = n - k
    delta = min(k / (k + others - 1 + 2 * (others - 1) ** 2), 1 / (2 * others))
    q = np.sqrt(1 - delta)
    base = np.array([[3.0, 2.0, 1.0, 0.5, -1.0, -5.0], [-1, -2, -3, -4, -5, -6], [0, 0, 0, 0, 0, -9]] * 40)
    received, wanted, _ = rounds(Compression(top_k=k, error_feedback=True), [base] * 300)
    bound = q / (1 - q) * np.linalg.norm(base, axis=1)
    assert (np.linalg.norm(received - wanted, axis=1) <= bound).all()
    without, _, _ = rounds(Compression(top_k=k), [base] * 300)
    assert (np.linalg.norm(without - wanted, axis=1) > 10 * bound)[:3].any()


def test_probabilities_carry_nothing_over():
    compression, residue = Compression(bits=8, top_k=3, error_feedback=True), {}
    for _ in range(3):
        found = decode(compression.encode({"z": P}, {}, residue))[0]["z"]
        assert np.array_equal(found, decode(Compression(bits=8, top_k=3).encode({"z": P}, {}, {}))[0]["z"])
    assert residue == {}
    both = np.concatenate([P, LOGITS])
    kept = there_and_back(both, k=3)
    for _ in range(3):
        found = decode(compression.encode({"z": both}, {}, residue))[0]["z"]
        assert np.abs(found - kept)[:32].max() <= np.ptp(found) / 508  # half a step, as in the first message
    (carried,) = residue.values()
    assert not carried[:32].any()
    assert carried[32:].any()


def test_each_name_shape_and_dtype_has_its_own_residue():
    compression, residue = Compression(bits=8, error_feedback=True), {}
    x = LOGITS
    compression.encode({"a": x, "b": x[:16], "c": x.astype("d"), "ids": np.arange(9)}, {}, residue)
    assert set(residue) == {("a", "f", 32, 10), ("b", "f", 16, 10), ("c", "d", 32, 10)}
    compression.encode({"a": np.full_like(x, np.nan)}, {}, residue)  # nothing to be learnt from that
    assert ("a", "f", 32, 10) not in residue


# --- hostile bytes --------------------------------------------------------------------------------


def packed(items, inflated, body, beside=None):
    return encode_packed(beside or {}, {}, [items, inflated], body)


def deflated(length):
    maker = zlib.compressobj(9)
    return b"".join(maker.compress(bytes(1 << 16)) for _ in range(length >> 16)) + maker.flush()


GOOD = ["z", "f", [2, 4], 0, 0, 0]
BODY_OF_GOOD = np.arange(8, dtype=np.float32).tobytes()
COLUMNS = ["z", "f", [2, 4], 0, 2, 1]
HOSTILE = {
    "a bomb": packed([["z", "f", [1 << 24], 0, 0, 0]], 1 << 26, deflated(1 << 26)),
    "a bomb that says it is small": packed([GOOD], 32, deflated(1 << 26)),
    "a body that is too short when inflated": packed([GOOD], 32, zlib.compress(bytes(31))),
    "bytes after the end": packed([GOOD], 32, zlib.compress(bytes(32)) + b"x"),
    "half a deflated body": packed([GOOD], 32, zlib.compress(bytes(range(32)))[:-8]),
    "no deflated body": packed([GOOD], 32, bytes(32)),
    "a giant shape": packed([["z", "f", [1 << 40, 1 << 40], 8, 0, 0]], 0, bytes(9)),
    "a giant row of which one is kept": packed([["z", "d", [40, 60000], 0, 1, 1]], 0, bytes(40 * 10)),
    "too many sides": packed([["z", "f", [1] * 40 + [8], 0, 0, 0]], 0, BODY_OF_GOOD),
    "a negative shape": packed([["z", "f", [-2, -4], 0, 0, 0]], 0, BODY_OF_GOOD),
    "a fractional shape": packed([["z", "f", [2.0, 4], 0, 0, 0]], 0, BODY_OF_GOOD),
    "a boolean shape": packed([["z", "f", [True, 8], 0, 0, 0]], 0, BODY_OF_GOOD),
    "no numbers": packed([["z", "f", [0, 4], 8, 0, 0]], 0, bytes(8)),
    "one number": packed([["z", "f", [], 0, 0, 0]], 0, bytes(4)),
    "an unknown dtype": packed([["z", "O", [2, 4], 0, 0, 0]], 0, BODY_OF_GOOD),
    "a list for a dtype": packed([["z", ["f"], [2, 4], 0, 0, 0]], 0, BODY_OF_GOOD),
    "unknown bits": packed([["z", "f", [2, 4], 4, 0, 0]], 0, BODY_OF_GOOD),
    "more kept than there are": packed([["z", "f", [2, 4], 0, 4, 0]], 0, bytes(48)),
    "kept of no rows": packed([["z", "f", [8], 0, 2, 0]], 0, bytes(14)),
    "columns beyond the last": packed([COLUMNS], 0, bytes([0, 4, 0, 1]) + bytes(16)),
    "a column twice": packed([COLUMNS], 0, bytes([1, 1, 0, 1]) + bytes(16)),
    "columns backwards": packed([COLUMNS], 0, bytes([1, 0, 0, 1]) + bytes(16)),
    "NaN": packed([GOOD], 0, b"\xff" * 32),
    "an infinite step": packed([["z", "f", [2, 4], 8, 0, 0]], 0, bytes(4) + b"\x80\x80\x7f\x7f" + bytes(8)),
    "a body that is too short": packed([GOOD], 0, bytes(31)),
    "a body that is too long": packed([GOOD], 0, bytes(33)),
    "two of one name": packed([GOOD, GOOD], 0, BODY_OF_GOOD * 2),
    "one beside of that name": packed([GOOD], 0, BODY_OF_GOOD, {"z": np.ones(3)}),
    "no description": packed([GOOD], 0, BODY_OF_GOOD).replace(b'\\"f\\",[2,4],0,0,0', b"                  "),
    "the length is a string": packed([GOOD], "32", zlib.compress(BODY_OF_GOOD)),
    "the length is true": packed([GOOD], True, BODY_OF_GOOD),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_anything_but_a_sound_body_is_a_message_error(name):
    tracemalloc.start()
    try:
        assert try_one(HOSTILE[name]) != "valid"
    finally:
        tracemalloc.stop()


def test_the_hostile_ones_are_hostile_in_one_respect_only():
    assert np.array_equal(
        decode(packed([GOOD], 0, Form(np.dtype("f"), (2, 4)).pack(LOGITS[:2, :4])))[0]["z"], LOGITS[:2, :4]
    )
    assert decode(packed([GOOD], 32, zlib.compress(bytes(32))))[0]["z"].sum() == 0
    assert decode(packed([COLUMNS], 0, bytes([0, 3, 0, 1]) + bytes(16)))[0]["z"].shape == (2, 4)
    assert "above the allowed ratio" in _refusal(HOSTILE["a bomb"])
    assert "does not match its description" in _refusal(HOSTILE["a bomb that says it is small"])
    assert len(HOSTILE["a bomb"]) < 1 << 17  # 64 MB in less than 128 kB


def _refusal(data):
    with pytest.raises(MessageError) as error:
        decode(data)
    return str(error.value)


def test_items_by_hand_that_are_no_items():
    texts = ["7", "[]", "{}", "[{},null]", "[{},[]]", "[{},[7,0]]", "[{},[[],0,1]]", "[{},[[[]],0]]", "[{},[[7],0]]"]
    texts += ['[{},["ab",0]]', "[7,[[],0]]", '[{},[{"a":1},0]]', '[{},[[["\\ud800","f",[2],0,0,0]],0]]', "[" * 5000]
    for text in texts:
        header = json.dumps(
            {"__metadata__": {"p": text}, BODY: {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}
        ).encode()
        with pytest.raises(MessageError):
            decode(struct.pack("<Q", len(header)) + header + bytes(8))


def test_bounds_hold_for_honest_messages_at_their_edge():
    """The longest row of which one is kept: whatever `encode` makes, `decode` takes, within the bound."""
    for bits, k, width in product((None, 8), (1, 2), (700, 3000, 65536)):
        p = simplex(np.random.default_rng(0), 3, width, np.float64)
        for lossless in (False, True):
            data = Compression(bits=bits, top_k=k, lossless=lossless).encode({"p": p}, {}, {})
            assert decode(data)[0]["p"].nbytes <= EXPANSION * len(data)


def test_thousands_of_mutations():
    outcomes, _ = try_many(1_500)
    assert 0 < outcomes["valid"] < 1_100
    assert len(outcomes) > 15  # refused for many reasons
