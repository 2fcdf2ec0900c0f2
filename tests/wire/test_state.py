"""State as bytes and back: what it may be made of, where it may not, and damaged files."""

import collections
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codistill.core.errors import CheckpointError
from codistill.wire.codec import decode, encode
from codistill.wire.state import pack, unpack

keys = st.one_of(
    st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text(max_size=3))
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), st.binary(max_size=8)
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def typed(tree):
    """A tree with the types of its leaves, so that True is not 1 and (1,) is not [1]."""
    if isinstance(tree, dict):
        return [(typed(key), typed(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return type(tree).__name__, [typed(item) for item in tree]
    return type(tree).__name__, tree


@settings(derandomize=True, database=None, deadline=None, max_examples=35)
@given(trees)
def test_plain_trees_come_back_as_they_were(tree):
    assert typed(unpack(pack(tree))) == typed(tree)


@pytest.mark.parametrize("dtype", ["bool", "u1", "i2", "u4", "i8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_arrays_and_tensors_of_any_kind(dtype, shape):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    tensor = torch.from_numpy(array.copy())
    found = unpack(pack({"array": array, "tensor": tensor}))
    assert isinstance(found["array"], np.ndarray)
    assert (found["array"].dtype, found["array"].shape) == (array.dtype, shape)
    assert np.array_equal(found["array"], array)
    assert isinstance(found["tensor"], torch.Tensor)
    assert (found["tensor"].dtype, found["tensor"].shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found["tensor"], tensor)


def test_what_comes_back_is_fresh_and_writable():
    array = np.zeros(3)
    found = unpack(pack([array, torch.zeros(3)]))
    found[0][:] = 1
    found[1][:] = 1
    assert array.sum() == 0


def test_not_a_number_is_a_number_here():
    found = unpack(pack({"a": np.array([np.nan, np.inf]), "b": float("nan"), "c": float("-inf")}))
    assert np.isnan(found["a"][0])
    assert np.isnan(found["b"])
    assert found["c"] == float("-inf")


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.int64(-3), np.bool_(True), np.float64(0.1), np.uint8(7)])
def test_numpy_scalars_stay_scalars_also_as_keys(scalar):
    found = unpack(pack({"value": scalar, scalar: "key"}))
    assert type(found["value"]) is type(scalar)
    assert found["value"] == scalar
    assert found[scalar] == "key"


def test_relatives_of_plain_types():
    pair = collections.namedtuple("pair", "a b")
    found = unpack(pack({"text": np.str_("é\ud800"), "order": collections.OrderedDict(b=1, a=2), "pair": pair(1, 2)}))
    assert found == {"text": "é\ud800", "order": {"b": 1, "a": 2}, "pair": (1, 2)}
    assert list(found["order"]) == ["b", "a"]


def test_tensors_with_a_graph_and_in_any_layout():
    weight = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    found = unpack(pack({"w": weight * 2, "p": torch.nn.Parameter(weight)}))
    assert torch.equal(found["w"], weight.detach() * 2)
    assert not found["w"].requires_grad
    assert torch.equal(found["p"], weight.detach())


def test_the_memory_of_an_optimiser():
    layer = torch.nn.Linear(2, 2)
    optimiser = torch.optim.Adam(layer.parameters(), betas=(0.8, 0.9))
    layer(torch.ones(1, 2)).sum().backward()
    optimiser.step()
    state = optimiser.state_dict()
    found = unpack(pack(state))
    assert found["param_groups"] == state["param_groups"]
    assert list(found["state"]) == [0, 1]
    assert torch.equal(found["state"][0]["exp_avg"], state["state"][0]["exp_avg"])


def test_equal_state_gives_equal_bytes():
    def state():
        return {"z": np.arange(6.0).reshape(2, 3), 3: [torch.ones(2), b"abc"], "t": (1, None)}

    assert pack(state()) == pack(state())


# --- what it may not be made of -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (1j, "complex"),
        (len, "builtin_function_or_method"),
        (np.array([object()]), "ndarray of object"),
        (np.array(["a"]), "ndarray of <U1"),
        (np.array([1j]), "ndarray of complex128"),
        (np.datetime64("2020-01-01"), r"datetime64 of datetime64\[D\]"),
        (np.longdouble(1), "longdouble of float128"),
        (torch.ones(1, dtype=torch.bfloat16), "Tensor of torch.bfloat16"),
        (torch.ones(2, 2).to_sparse(), "Tensor of torch.float32"),
    ],
)
def test_the_error_names_the_thing_and_its_place(thing, said):
    with pytest.raises(CheckpointError, match=rf"{said} at 'state\.prototypes\.3\[1\]'.*Keep such objects out"):
        pack({"prototypes": {3: [0, thing]}})


def test_a_key_may_not_be_an_object_either():
    with pytest.raises(CheckpointError, match=r"object at 'state\.a'"):
        pack({"a": {object(): 1}})


def test_a_state_that_contains_itself_is_refused():
    state = {}
    state["me"] = state
    with pytest.raises(CheckpointError, match="contains itself"):
        pack(state)


# --- damaged files --------------------------------------------------------------------------------


def outlined(outline, **arrays):
    text = outline if isinstance(outline, bytes) else json.dumps(outline).encode()
    return encode({"outline": np.frombuffer(text, np.uint8), **arrays}, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a checkpoint",
        encode({"a0": np.zeros(2)}, {}),
        outlined(b"\xff\xfe"),
        outlined(b"["),
        outlined(b"[" * 100_000),
        outlined(b'{"list":[' * 50_000),
        outlined({"array": "a0"}),
        outlined({"array": ["a0"]}),
        outlined({"array": "a0", "tensor": "a0"}, a0=np.zeros(1)),
        outlined({}),
        outlined({"object": "os.system"}),
        outlined({"dict": [["a"]]}),
        outlined({"dict": [[{"list": []}, 1]]}),
        outlined({"dict": [[{"array": "a0"}, 1]]}, a0=np.zeros(1)),
        outlined({"dict": 7}),
        outlined({"list": 7}),
        outlined({"bytes": None}),
    ],
    ids=lambda data: str(data[-30:]),
)
def test_an_unreadable_state_says_so(data):
    with pytest.raises(CheckpointError, match=r"The checkpoint is corrupted.*resume from the one before"):
        unpack(data)


def test_mutations_are_checkpoint_errors_or_trees():
    rng = random.Random(0)
    valid = pack({"z": np.ones((2, 2)), 3: [torch.ones(2), b"abc", np.int64(3)], "t": (1, None, "x")})
    outline = decode(valid, finite=False)[0]["outline"].tobytes()
    start = valid.index(outline)
    refused = 0
    for i in range(1000):
        data = bytearray(valid)
        for _ in range(rng.choice([1, 2, 5])):
            where = rng.randrange(len(data)) if i % 2 else start + rng.randrange(len(outline))
            data[where] = rng.choice([rng.randrange(256), ord(rng.choice('0123456789-{}[]",:'))])
        try:
            unpack(bytes(data))
        except CheckpointError:
            refused += 1
    assert 0 < refused < 1000


@pytest.mark.parametrize("kept", [0, 7, 8, 50, -1])
def test_a_file_that_was_cut_off_is_unreadable(kept):
    with pytest.raises(CheckpointError):
        unpack(pack({"z": np.ones((20, 2))})[:kept])
