"""Frame headers and sessions: which session, which number, what size."""

from __future__ import annotations

import pytest
from tests.runtimes.network.fakes import FakeTransport, Net

from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.frame_header import FrameHeader, FrameKind, Turn
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.sessions import Sessions


def header(number: int, session_id: int = 7, kind: FrameKind = FrameKind.MESSAGE) -> bytes:
    return FrameHeader(kind, session_id, number, Turn(3, 1)).encode()


def sessions_of_a() -> tuple[Sessions, list[str]]:
    told: list[str] = []
    made = Sessions(3, told.append)
    made.open("a", 7, 1)
    return made, told


def test_a_header_survives_encoding_and_decoding() -> None:
    for kind in FrameKind:
        sent = FrameHeader(kind, (1 << 64) - 1, 12345, Turn(-1, 65535))
        assert FrameHeader.decode(sent.encode()) == sent
    assert Turn(2, 9) < Turn(3, 0) < Turn(3, 1)


@pytest.mark.parametrize("data", [b"", bytes(22), bytes(24), b"\x05" + bytes(22), b"\xff" * 23])
def test_a_malformed_header_costs_a_strike(data: bytes) -> None:
    made, told = sessions_of_a()
    assert made.admit("a", data) is None
    assert told[0].startswith("'a': strike 1 of 3: not a valid frame")


def test_numbers_only_grow_and_frames_of_other_sessions_are_ignored() -> None:
    made, told = sessions_of_a()
    assert made.admit("a", header(2)) is not None
    assert made.admit("a", header(5)) is not None  # what is lost between is lost
    assert made.admit("a", header(9, session_id=8)) is None  # a message of another session: ignored, no strike
    assert not told
    assert made.admit("a", header(5)) is None
    assert "a replay" in told[0]
    assert (
        made.admit("a", header(1, session_id=8, kind=FrameKind.HELLO)) is not None
    )  # another session begins with a hello
    made.open("a", 8, 1)
    assert made.admit("a", header(6)) is None  # its first session has ended
    assert len(told) == 1


def test_an_excluded_node_is_ignored_but_its_hello_is_answered() -> None:
    made, told = sessions_of_a()
    made.exclude("a", "3 bad messages")
    assert made.admit("a", header(2)) is None
    assert made.admit("a", header(1, session_id=8, kind=FrameKind.HELLO)) is not None
    made.strike("a", "again")
    assert told == ["'a' is excluded from the rest of the run: 3 bad messages"]


def test_a_message_above_the_limit_is_not_opened() -> None:
    net, told = Net(), list[str]()
    transport, other = FakeTransport(net, "hub", ("a",)), FakeTransport(net, "a", ("hub",))
    connections = Connections(transport, Network(message_limit=1 << 16), told.append)  # type: ignore[arg-type]
    connections.arrived()
    connections.open_session("a", other.session_id, 0)
    connections.begin(Turn(0), ("a",))
    other.send(("hub",), FrameKind.MESSAGE, Turn(0), bytes(1 << 16))
    other.send(("hub",), FrameKind.MESSAGE, Turn(0), bytes((1 << 16) + 1))
    assert [len(frame.payload) for frame in connections.arrived()] == [1 << 16]
    assert told == ["'a': strike 1 of 3: a message of 65537 bytes, above the limit"]


def test_frames_of_an_ended_session_do_not_count() -> None:
    net, told = Net(), list[str]()
    transport, first = FakeTransport(net, "a", ("hub",)), FakeTransport(net, "hub", ("a",))
    connections = Connections(transport, Network(), told.append)  # type: ignore[arg-type]
    connections.arrived()
    connections.open_session("hub", first.session_id, 0)
    connections.begin(Turn(1), ("hub",))
    first.send(("a",), FrameKind.MESSAGE, Turn(2), b"early")  # of a turn that this hub will not come to
    connections.arrived()
    first.kill()
    second = FakeTransport(net, "hub", ("a",))
    connections.arrived()
    connections.open_session("hub", second.session_id, 0)
    connections.begin(Turn(1), ("hub",))
    assert connections.arrived() == []  # it is waited for, though the earlier session was further
    connections.begin(Turn(2), ("hub",))
    second.send(("a",), FrameKind.MESSAGE, Turn(2), b"new")
    assert [frame.payload for frame in connections.arrived()] == [b"new"]
    assert not told
