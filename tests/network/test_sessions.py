"""Frame headers and sessions: which session, which number, what size."""

from __future__ import annotations

import json
from functools import partial

import pytest
from tests.network.fakes import Centre, FakeTransport, Net, agent, describe

from codistill.network.connections import Connections, Sessions
from codistill.network.frames import FrameHeader, FrameKind, Malformed, ReceivedFrame, Turn
from codistill.network.log import LineLimit
from codistill.network.options import Network, join_allowance
from codistill.network.terms import hello_of
from codistill.wire.codec import encode


def header(number: int, session_id: int = 7, kind: FrameKind = FrameKind.MESSAGE) -> FrameHeader:
    return FrameHeader(kind, session_id, number, Turn(3, 1))


def sessions_of_a() -> tuple[Sessions, list[str]]:
    told: list[str] = []
    made = Sessions(3, told.append, lambda name, why: told.append(f"barred {name}: {why}"))
    made.open("a", 7, 1)
    return made, told


def test_a_header_survives_encoding_and_decoding() -> None:
    for kind in FrameKind:
        sent = FrameHeader(kind, (1 << 64) - 1, 12345, Turn(-1, 65535))
        assert FrameHeader.decode(sent.encode()) == sent
    assert Turn(2, 9) < Turn(3, 0) < Turn(3, 1)


@pytest.mark.parametrize("data", [b"", bytes(22), bytes(24), b"\x08" + bytes(22), b"\xff" * 23])
def test_a_malformed_header_costs_a_strike(data: bytes) -> None:
    with pytest.raises(ValueError, match="header of|unknown frame kind") as raised:
        FrameHeader.decode(data)
    connections, _, told = connected()
    connections.transport.inbox.put(Malformed("a", str(raised.value)))
    assert connections.arrived() == []
    assert told[0].startswith("'a': strike 1 of 3: not a valid frame")


def test_numbers_only_grow_and_frames_of_other_sessions_are_ignored() -> None:
    made, told = sessions_of_a()
    assert made.admit("a", header(2))
    assert made.admit("a", header(5))  # what is lost between is lost
    assert not made.admit("a", header(9, session_id=8))  # a message of another session: ignored, no strike
    assert not told
    assert not made.admit("a", header(5))
    assert "a replay" in told[0]
    assert made.admit("a", header(1, session_id=8, kind=FrameKind.HELLO))  # another session begins with a hello
    made.open("a", 8, 1)
    assert not made.admit("a", header(6))  # its first session has ended
    assert len(told) == 1


def test_frames_of_a_session_that_is_not_open_are_not_free() -> None:
    made, told = sessions_of_a()
    for number in range(1001):
        assert not made.admit("a", header(number, session_id=8))
    assert told == ["'a': strike 1 of 3: more than 1000 frames of a session that is not open"]


def test_an_excluded_node_is_ignored_and_its_links_are_closed() -> None:
    made, told = sessions_of_a()
    made.exclude("a", "3 bad messages")
    assert not made.admit("a", header(2))
    assert not made.admit("a", header(1, session_id=8, kind=FrameKind.HELLO)), "sent before its links were closed"
    made.strike("a", "again")
    assert told == [
        "'a' is excluded from the rest of the run: 3 bad messages",
        "barred a: it is excluded from the run: 3 bad messages",
    ]


def connected(limit: int = 1 << 16) -> tuple[Connections, FakeTransport, list[str]]:
    """A hub in turn 0 that waits for agent 'a', whose wire is given too."""
    net, told = Net(), list[str]()
    transport, other = FakeTransport(net, "hub", ("a",), limit), FakeTransport(net, "a", ("hub",))
    connections = Connections(transport, Network(), told.append, leads=True)  # type: ignore[arg-type]
    connections.arrived()
    connections.open_session("a", other.session_id, 0)
    connections.begin(Turn(0), ("a",))
    return connections, other, told


def test_a_message_above_the_limit_is_lost_for_whoever_waits_for_it() -> None:
    connections, other, told = connected()
    other.send(("hub",), FrameKind.MESSAGE, Turn(0), bytes(1 << 16))
    other.send(("hub",), FrameKind.MESSAGE, Turn(0), bytes((1 << 16) + 1))
    assert [(len(frame.payload), frame.lost) for frame in connections.arrived()] == [(1 << 16, False), (0, True)]
    assert told == ["'a': strike 1 of 3: a message of 65,537 bytes, above the limit of 65,536"]


def test_a_message_above_the_receivers_limit_is_not_sent() -> None:
    """An honest sender tells its operator; the receiver hears at once that the message is lost."""
    connections, other, told = connected(limit=1 << 20)
    other.limit = 1 << 16
    connections.post(0, "hub", ["a"], bytes((1 << 16) + 1))
    connections.post(0, "hub", ["a"], bytes(1 << 16))
    frames = [event for event in iter(lambda: other.take(0), None) if isinstance(event, ReceivedFrame)]
    kinds = [(frame.header.kind, len(frame.payload)) for frame in frames]
    assert kinds == [(FrameKind.LOST, 0), (FrameKind.MESSAGE, 1 << 16)]
    assert told == [
        "round 1: a message of 65,537 bytes was not sent to 'a', which accepts at most 65,536: "
        "raise network.message_limit there"
    ]


@pytest.mark.parametrize("kind", ["of one session", "each of a new session", "refused"])
def test_join_requests_are_not_free_whatever_a_hub_answers(kind: str) -> None:
    """Some are let pass; then each one is a strike, and the third ends it. Over TLS: see `test_attacks.py`."""
    net, whole = Net(), describe(("a",), 1)
    centre = Centre(net, whole)
    said = {"do": "hello", **hello_of(agent("a"), None)} | ({"version": "0.0.1"} if kind == "refused" else {})
    answers = 0
    wire = FakeTransport(net, "a", ("hub",))
    for _ in range(400):
        wire.send(("hub",), FrameKind.HELLO, Turn(0), encode({}, {"json": json.dumps(said)}))
        centre.lines.arrived()
        answers += sum(isinstance(event, ReceivedFrame) for event in iter(partial(wire.take, 0), None))
        if kind == "each of a new session" and net.joined("a", "hub"):
            wire.kill()
            wire = FakeTransport(net, "a", ("hub",))
    # 300: one for each second of `network.silence`, which this process may have been stopped for.
    assert 300 <= answers < 320, "as many as the bucket holds, and those that it gets meanwhile"
    bad = [text for text in centre.told if "strike" in text or "excluded" in text]
    assert bad == [
        *(f"'a': strike {number} of 3: more join requests than a node needs" for number in (1, 2, 3)),
        "'a' is excluded from the rest of the run: 3 bad messages",
    ]
    assert len(centre.told) < 20
    assert centre.wire.barred == {"a": "it is excluded from the run: 3 bad messages"}
    centre.runtime.close()


def test_the_time_at_which_join_requests_arrived_counts_and_not_the_time_at_which_they_are_read() -> None:
    """A hub that has computed for ten minutes reads 600 requests: of an agent that has repeated its own each second."""
    joins = join_allowance(silence=10.0, clock=lambda: 600.0)
    assert all(joins.take("a", float(second)) for second in range(600))
    at_once = join_allowance(silence=10.0, clock=lambda: 600.0)
    assert sum(at_once.take("a", 600.0) for _ in range(600)) == 60
    stopped = join_allowance(silence=600.0, clock=lambda: 600.0)  # its links were read late, too
    assert all(stopped.take("a", 600.0) for _ in range(600))


def test_commands_of_a_node_that_was_excluded_meanwhile_are_not_handled() -> None:
    connections, other, _ = connected()
    other.send(("hub",), FrameKind.CONTROL, Turn(0), encode({}, {"json": '{"do": "ready"}'}))
    connections.arrived()
    connections.sessions.exclude("a", "3 bad messages")
    assert connections.next_control(0.0) is None


def test_commands_are_not_free() -> None:
    connections, other, told = connected()
    for _ in range(1000):
        other.send(("hub",), FrameKind.CONTROL, Turn(0), encode({}, {"json": '{"do": "answer"}'}))
    connections.arrived()
    assert told[:3] == [f"'a': strike {number} of 3: more commands than were asked for" for number in (1, 2, 3)]
    assert told[3] == "'a' is excluded from the rest of the run: 3 bad messages"
    assert len(told) == 4


@pytest.mark.parametrize(
    ("kind", "do"),
    [
        (FrameKind.HELLO, "welcome"),
        (FrameKind.HELLO, "refused"),
        (FrameKind.CONTROL, "go"),
        (FrameKind.CONTROL, "jump"),
    ],
)
def test_what_a_node_makes_others_send_entitles_it_to_nothing(kind: FrameKind, do: str) -> None:
    """A node that is sent something after each of its commands has as many of them as one that is sent nothing."""
    connections, other, told = connected()
    for _ in range(100):
        other.send(("hub",), FrameKind.CONTROL, Turn(0), encode({}, {"json": '{"do": "ready"}'}))
        connections.arrived()
        if connections.next_control(0.0) is not None:
            connections.command("a", kind=kind, do=do)
    assert told[-1] == "'a' is excluded from the rest of the run: 3 bad messages"


def test_each_command_entitles_to_answers() -> None:
    connections, other, told = connected()
    for number in range(300):
        connections.command("a", do="evaluate", number=number)
        other.send(("hub",), FrameKind.CONTROL, Turn(0), encode({}, {"json": '{"do": "answer"}'}))
        assert connections.next_control(1.0) is not None
    assert not told


def test_messages_that_nobody_wants_are_not_free() -> None:
    connections, other, told = connected()
    connections.begin(Turn(1), ("a",))
    for _ in range(1001):
        other.send(("hub",), FrameKind.MESSAGE, Turn(0), b"x")
    assert connections.arrived() == []
    assert told == ["'a': strike 1 of 3: more than 1000 messages that came too late"]


def test_lines_of_one_cause_are_counted() -> None:
    now, told = [0.0], list[str]()
    limit = LineLimit(told.append, lambda: now[0])
    for number in range(500):
        limit(f"'a' tried {number} times")
    limit("something else")
    assert told == [f"'a' tried {number} times" for number in range(10)] + ["something else"]
    now[0] = 60.0
    limit("'a' tried 501 times")
    assert told[-1] == "'a' tried 501 times (and 490 more of this kind before)"
    for number in range(2000):  # many causes: all of them together are bounded, too
        limit("x" * (number % 100) + "y" * (number // 100))
    assert len(told) < 400


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
