"""Heads and the gate: whose life, which number, what size."""

from __future__ import annotations

import pytest
from tests.runtimes.network.fakes import FakeTransport, Net

from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.frame_header import FrameHeader, FrameKind, Turn
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.sessions import Sessions


def head(number: int, life: int = 7, kind: FrameKind = FrameKind.MESSAGE) -> bytes:
    return FrameHeader(kind, life, number, Turn(3, 1)).encode()


def gate() -> tuple[Sessions, list[str]]:
    told: list[str] = []
    made = Sessions(3, told.append)
    made.open("a", 7, 1)
    return made, told


def test_a_head_is_the_same_after_its_journey() -> None:
    for kind in FrameKind:
        sent = FrameHeader(kind, (1 << 64) - 1, 12345, Turn(-1, 65535))
        assert FrameHeader.decode(sent.encode()) == sent
    assert Turn(2, 9) < Turn(3, 0) < Turn(3, 1)


@pytest.mark.parametrize("data", [b"", bytes(22), bytes(24), b"\x05" + bytes(22), b"\xff" * 23])
def test_what_is_no_head_costs_a_strike(data: bytes) -> None:
    made, told = gate()
    assert made.admit("a", data) is None
    assert told[0].startswith("'a': strike 1 of 3: not a valid frame")


def test_numbers_only_grow_and_other_lives_are_not_heard() -> None:
    made, told = gate()
    assert made.admit("a", head(2)) is not None
    assert made.admit("a", head(5)) is not None  # what is lost between is lost
    assert made.admit("a", head(9, life=8)) is None  # a message of another life: left over, no strike
    assert not told
    assert made.admit("a", head(5)) is None
    assert "a replay" in told[0]
    assert made.admit("a", head(1, life=8, kind=FrameKind.HELLO)) is not None  # another life begins with a greeting
    made.open("a", 8, 1)
    assert made.admit("a", head(6)) is None  # and its first one is over
    assert len(told) == 1


def test_who_is_out_is_not_heard_but_may_greet_to_be_told() -> None:
    made, told = gate()
    made.bar("a", "3 bad messages")
    assert made.admit("a", head(2)) is None
    assert made.admit("a", head(1, life=8, kind=FrameKind.HELLO)) is not None
    made.strike("a", "again")
    assert told == ["'a' is excluded from the rest of the run: 3 bad messages"]


def test_a_message_above_the_limit_is_not_opened() -> None:
    net, told = Net(), list[str]()
    wire, other = FakeTransport(net, "hub", ("a",)), FakeTransport(net, "a", ("hub",))
    lines = Connections(wire, Network(message_limit=1 << 16), told.append)  # type: ignore[arg-type]
    lines.arrived()
    lines.open_session("a", other.life, 0)
    lines.begin(Turn(0), ("a",))
    other.send(("hub",), FrameKind.MESSAGE, Turn(0), bytes(1 << 16))
    other.send(("hub",), FrameKind.MESSAGE, Turn(0), bytes((1 << 16) + 1))
    assert [len(frame.payload) for frame in lines.arrived()] == [1 << 16]
    assert told == ["'a': strike 1 of 3: a message of 65537 bytes, above the limit"]


def test_what_is_left_of_a_life_that_is_over_does_not_count() -> None:
    net, told = Net(), list[str]()
    wire, first = FakeTransport(net, "a", ("hub",)), FakeTransport(net, "hub", ("a",))
    lines = Connections(wire, Network(), told.append)  # type: ignore[arg-type]
    lines.arrived()
    lines.open_session("hub", first.life, 0)
    lines.begin(Turn(1), ("hub",))
    first.send(("a",), FrameKind.MESSAGE, Turn(2), b"early")  # of a turn that this hub will not come to
    lines.arrived()
    first.kill()
    second = FakeTransport(net, "hub", ("a",))
    lines.arrived()
    lines.open_session("hub", second.life, 0)
    lines.begin(Turn(1), ("hub",))
    assert lines.arrived() == []  # it is waited for, though the other was further
    lines.begin(Turn(2), ("hub",))
    second.send(("a",), FrameKind.MESSAGE, Turn(2), b"new")
    assert [frame.payload for frame in lines.arrived()] == [b"new"]
    assert not told
