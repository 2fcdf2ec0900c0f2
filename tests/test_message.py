"""Messages: arrays and plain values, their bytes, and what a receiver holds them to."""

import numpy as np
import pytest
import torch

from codistill.core.errors import MessageError
from codistill.wire.message import Message


def test_items_are_sorted_into_arrays_and_plain_values():
    message = Message.of(z=np.ones((2, 3)), t=torch.zeros(2), n=3, name="Ann", sizes=[1, 2], share=np.float32(0.5))
    assert set(message.arrays) == {"z", "t", "share"}
    assert message.plain == {"n": 3, "name": "Ann", "sizes": [1, 2]}
    assert all(isinstance(array, np.ndarray) for array in message.arrays.values())
    assert message["share"].shape == ()


def test_a_message_reads_like_a_dictionary():
    message = Message.of(z=np.ones(2), n=3)
    assert dict(message) == {"z": message.arrays["z"], "n": 3}
    assert len(message) == 2
    assert "z" in message
    assert "q" not in message
    assert message.get("q") is None
    with pytest.raises(KeyError):
        message["q"]
    assert repr(message) == "Message(z(2); {'n': 3})"
    assert len(Message()) == 0


def test_tensors_leave_their_graph_behind():
    weight = torch.ones(2, 2, requires_grad=True)
    message = Message.of(w=weight * 3)
    assert np.array_equal(message["w"], np.full((2, 2), 3.0))
    assert Message({"w": torch.nn.Parameter(weight)})["w"].dtype == np.float32


def test_it_travels_as_bytes():
    sent = Message.of(z=np.arange(6, dtype=np.float32).reshape(2, 3), n=3)
    assert sent.encoded is sent.encoded  # encoded once, however many receive it
    arrived = Message.decode(sent.encoded)
    assert dict(arrived.plain) == {"n": 3}
    assert np.array_equal(arrived["z"], sent["z"])
    assert not arrived["z"].flags.writeable
    assert arrived.encoded == sent.encoded
    assert arrived.signature == sent.signature


def test_only_a_sound_message_is_decoded():
    for data in (b"", b"noise", Message.of(z=np.array([np.nan])).encoded):
        with pytest.raises(MessageError):
            Message.decode(data)


def test_what_is_expected_must_be_there():
    message = Message.of(z=np.zeros((4, 10), np.float32), ids=np.arange(4))
    message.check({})
    message.check({"z": (4, 10), "ids": (4,)})
    message.check({"z": (None, 10), "ids": (None,)})
    message.check({"z": np.ones((4, 10), np.float32), "ids": np.arange(4)})


def test_what_was_not_asked_for_is_refused():
    message = Message.of(z=np.zeros(2), extra=np.zeros(1), n=1)
    message.check({"z": (2,), "extra": (1,), "n": int})
    for left_out in ("extra", "n"):
        expect = {"z": (2,), "extra": (1,), "n": int}
        del expect[left_out]
        with pytest.raises(MessageError, match=f"unexpected content.*'{left_out}'"):
            message.check(expect)


@pytest.mark.parametrize(
    ("expect", "said"),
    [
        ({"mean": (4, 10)}, r"must have an array 'mean'.*\['n', 'z'\]"),
        ({"n": ()}, r"must have an array 'n'"),
        ({"z": (5, 10)}, r"'z' must have shape \(5, 10\).*\(4, 10\)"),
        ({"z": (None, 9)}, r"'z' must have shape \(any, 9\)"),
        ({"z": (4,)}, r"'z' must have shape \(4\)"),
        ({"z": (4, 10, None)}, r"'z' must have shape \(4, 10, any\)"),
        ({"z": np.zeros((4, 9), np.float32)}, r"'z' must have shape \(4, 9\)"),
        ({"z": np.zeros((4, 10))}, r"'z' must have dtype float64.*float32"),
    ],
)
def test_anything_else_is_a_message_error_that_says_what(expect, said):
    with pytest.raises(MessageError, match=said):
        Message.of(z=np.zeros((4, 10), np.float32), n=1).check(expect)


def test_a_signature_is_names_shapes_and_dtypes():
    one = Message.of(b=np.zeros(2), a=np.ones((1, 3), np.int32), n=1)
    two = Message.of(a=np.zeros((1, 3), np.int32), b=np.ones(2), n=2)
    assert one.signature == two.signature == (("a", (1, 3), "<i4"), ("b", (2,), "<f8"))
    assert one.signature != Message.of(a=np.zeros((1, 3)), b=np.ones(2)).signature
    assert one.signature != Message.of(a=np.zeros((1, 3), np.int32)).signature
