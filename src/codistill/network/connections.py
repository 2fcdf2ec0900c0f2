"""The connections of one node: frames of the protocol for its host, and the runtime's own commands.

A turn is over for a sender when it says so, when it disconnects, when it is late, or when a frame of a later turn
arrives from it: between two nodes the order of frames is kept. A node that waits for it then continues without it.
Every frame's session and number are checked before its content is read. A bad message costs its sender a strike; with
the last strike the sender is excluded from the run.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from codistill.core.errors import MessageError
from codistill.core.text import printable
from codistill.engine.exchange import EACH, Frame, Waiting
from codistill.network.frames import (
    MESSAGES,
    FrameHeader,
    FrameKind,
    Malformed,
    Oversized,
    Presence,
    ReceivedFrame,
    Refusal,
    Turn,
)
from codistill.network.link import CONTROL_LIMIT
from codistill.network.log import LineLimit
from codistill.network.options import COMMANDS, MESSAGES_PER_SECOND, OWN_MESSAGES, Allowance, Network, join_allowance
from codistill.network.transport import Tell, Transport, ignore
from codistill.wire.codec import Arrays, decode, encode, read_json

_POLL = 0.5  # seconds between checks of the clock while waiting
ROOM = 4  # messages of the largest size that one sender may have here
_LATE = 1000  # messages of one sender that may come too late in a turn
_COMMANDS = 100  # of one sender that may be queued
_UNREAD = 10_000  # messages of one sender in a run without rounds that may be read at once
_WORDS, _EVENTS = 600, 1000  # characters of an event, and events of a round: parts are written by other nodes


class Connections:
    """Frames and commands to and from other nodes, sorted into turns."""

    def __init__(
        self, transport: Transport, network: Network, tell: Tell, *, deadline: float | None = None, leads: bool = False
    ) -> None:
        """`leads`: no other node can enter a turn before this node."""
        self.transport, self.network, self.tell = transport, network, LineLimit(tell)
        self.sessions = Sessions(network.strikes, self.tell, transport.bar)
        self._events: list[str] = []  # of this round, for its log
        self.visible: dict[str, set[int]] = {}  # sessions that are on the network now, by node
        self.dropped: dict[str, str] = {}  # who was dropped from this turn, and why
        self.newest_turn: dict[str, Turn] = {}  # the newest turn that something arrived for, by sender
        self.meeting_turn: dict[str, Turn] = {}  # the first turn in which a node that came back is waited for
        self.on_hello: Callable[[Control], None] = ignore
        self.on_presence: Callable[[str], None] = ignore
        self.on_refusal: Callable[[Refusal], None] = ignore
        self._deadline = deadline
        self.turn = Turn(-2)
        self._leads = leads
        self.backlog: Callable[[str], int] = lambda _: 0  # bytes of a sender that the host holds and has not used
        self._over = True  # this node waits for nothing more of this turn
        self._has_turns = True  # False: a run without rounds, see `without_turns`
        # In such a run a node that trains reads its messages late; one that leads does not.
        self._messages = Allowance(_UNREAD if leads else 10 * _UNREAD, MESSAGES_PER_SECOND)
        self.own_messages = Allowance(*OWN_MESSAGES)  # to each receiver; beyond it, this node waits a moment
        self._held: dict[str, int] = {}  # bytes of early frames and of this turn's, by sender
        self._late: Counter[str] = Counter()  # frames of this turn that came too late, by sender
        self.commands, self._joins = Allowance(*COMMANDS), join_allowance(network.silence)
        self.waited: defaultdict[str, float] = defaultdict(float)  # seconds that this turn has waited for each node
        self._frames: list[Frame] = []
        self._early: list[tuple[Turn, Frame]] = []
        self._ended: set[str] = set()
        self._expected: tuple[str, ...] = ()
        self._control: deque[Control] = deque()

    # --- a turn ---------------------------------------------------------------------------------

    def begin(self, turn: Turn, expected: Sequence[str]) -> None:
        """Enter a turn in which these other nodes are waited for."""
        self.turn, self._expected = turn, tuple(expected)
        self._ended, self.dropped, self._frames, self._held = set(), {}, [], {}
        self._over, self._late, self.waited = False, Counter(), defaultdict(float)
        early, self._early = self._early, []
        for at, frame in early:
            self._sort(at, frame)
        for name in self._expected:
            self._drop_if_absent(name)

    def finish(self) -> None:
        """This node waits for no more frames of this turn."""
        self._over, self._frames = True, []

    def post(self, phase: int, sender: str, receivers: Sequence[str], data: bytes | None) -> None:
        """Send a message; None stands for one that an injected fault has dropped."""
        small = [] if data is None else [name for name in receivers if len(data) <= self.transport.limit_of(name)]
        lost = [name for name in receivers if name not in small]
        if data is not None:
            for name in lost:
                self._refuse_to_send(name, len(data))
            self.transport.send(small, FrameKind.MESSAGE, self.turn, data)
        self.transport.send(lost, FrameKind.LOST, self.turn)

    def _refuse_to_send(self, receiver: str, length: int) -> None:
        """Log that a message is too large for its receiver, which is told that it is lost."""
        self.note(
            f"a message of {length:,} bytes was not sent to '{receiver}', which accepts at most "
            f"{self.transport.limit_of(receiver):,}: raise network.message_limit there",
            self.turn.phase + 1,
        )

    def post_end(self, phase: int, sender: str, listeners: Iterable[str]) -> None:
        self.transport.send([name for name in listeners if name in self.transport.others], FrameKind.END, self.turn)

    def flush(self) -> None:
        """Nothing is queued here: the transport sends what it is given."""

    def arrived(self) -> list[Frame]:
        """Frames of this turn that have arrived, without waiting."""
        for _ in range(self.transport.inbox.qsize()):  # bounded: a fast sender must not keep this loop running
            self._take(0)
        return self._handed()

    def wait(self, host: Waiting) -> list[Frame]:
        """Frames of this turn; waits for the next if there is none.

        The deadline is a node's share of the whole turn: what it has sent before does not make it wait anew.
        """
        names, deadline = set[str](), self._deadline or 0.0
        if self._deadline is not None and not self._frames:
            names = {name for senders in host.waits().values() for name in senders}
        while not self._frames:
            before = time.monotonic()
            left = min((deadline - self.waited[name] for name in names - self._ended), default=_POLL)
            self._take(min(_POLL, max(left, 0.0)))
            # Not more than it was to wait for: time in which this process was stopped is nobody's fault.
            spent = min(time.monotonic() - before, 2 * _POLL)
            for name in names:
                self.waited[name] += spent
                if self.waited[name] >= deadline:
                    self.drop(name, f"this round has waited {deadline:g} s for it")
        return self._handed()

    # --- a run without rounds -------------------------------------------------------------------

    def without_turns(self) -> None:
        """From now on every message is handed over when it arrives, whichever round its sender is in."""
        self._has_turns, self.turn = False, Turn(0)

    def take_event(self, timeout: float) -> list[Frame]:
        """Wait for the next event and handle it; the messages that have arrived. Commands wait for `next_control`."""
        self._take(timeout)
        return self._handed()

    def send_now(self, receiver: str, data: bytes | None, *, asks: bool = False) -> bool:
        """Send a message, or None in place of an answer; False if the receiver would not accept it."""
        if data is None:
            self.transport.send([receiver], FrameKind.LOST, self.turn)
        elif len(data) > self.transport.limit_of(receiver):
            self._refuse_to_send(receiver, len(data))
            return False
        else:
            self.transport.send([receiver], FrameKind.ASK if asks else FrameKind.MESSAGE, self.turn, data)
        return True

    def takes_answers(self, sender: str, number: int) -> bool:
        """Whether a node that asks has read the answers before; an honest one asks again only then."""
        untaken = self.transport.untaken(sender)
        if untaken is None:
            return False  # it asked before it disconnected
        if untaken <= CONTROL_LIMIT:  # commands may be queued for it
            return True
        self.note(f"'{sender}' asks again and does not read the answers: no more are sent until it does", number)
        return False

    def _keep(self, frame: Frame) -> None:
        if not self._messages.take(frame.sender):
            self.sessions.strike(frame.sender, "more messages per second than a run without rounds allows")
        elif not self._has_room(frame):
            self.sessions.strike(frame.sender, "more messages than this node can hold")
        else:
            self._frames.append(frame)

    def _handed(self) -> list[Frame]:
        frames, self._frames = self._frames, []
        for frame in frames:
            # The end of a dropped node was never counted.
            self._held[frame.sender] = max(0, self._held.get(frame.sender, 0) - _size(frame))
        return frames

    def _sort(self, at: Turn, frame: Frame) -> None:
        if not self._has_turns:
            self._keep(frame)
        elif at < self.turn or (at == self.turn and (self._over or frame.sender in self._ended)):
            self._late[frame.sender] += 1  # from a node that was dropped, or of an earlier attempt
            if self._late[frame.sender] > _LATE:
                self._late[frame.sender] = 0
                self.sessions.strike(frame.sender, f"more than {_LATE} messages that came too late")
        elif at > self.turn and self._leads:
            self.sessions.strike(frame.sender, "a message for a turn that has not begun")
        elif not self._has_room(frame):
            self.sessions.strike(frame.sender, "more messages than this node can hold")
        elif at > self.turn:
            self._early.append((at, frame))
            self._drop_if_absent(frame.sender)
        else:
            if frame.is_end:
                self._ended.add(frame.sender)
            self._frames.append(frame)

    def _has_room(self, frame: Frame) -> bool:
        """Whether the bytes of a sender, held here and by the host, stay within bounds."""
        held = self._held.get(frame.sender, 0) + _size(frame)
        if held + self.backlog(frame.sender) > ROOM * self.transport.limit:
            return False
        self._held[frame.sender] = held
        return True

    def _drop_if_absent(self, name: str) -> None:
        """Do not wait for a node that is excluded, disconnected, in another turn, or already further."""
        if name in self.sessions.excluded:
            self.drop(name, "it is excluded")
        elif not self.is_connected(name):
            self.drop(name, "it disconnected")
        elif self.meeting_turn.get(name, self.turn) > self.turn or self.newest_turn.get(name, self.turn) > self.turn:
            self.drop(name, "")

    def drop(self, name: str, why: str) -> None:
        """Continue this turn without a node."""
        if self._has_turns and name not in self._ended:  # without turns nobody waits for an end
            self._ended.add(name)
            self._frames.append(Frame(self.turn.phase, name, [], b"", is_end=True))
            if why and name in self._expected:
                self.dropped[name] = why

    def open_session(self, name: str, session_id: int, number: int) -> None:
        """Open a session of a node, and discard what is left of an earlier one."""
        if self.sessions.current.get(name) != session_id:
            self.newest_turn.pop(name, None)
            self._early = [(at, frame) for at, frame in self._early if frame.sender != name]
            self._control = deque(control for control in self._control if control.sender != name)
        self.sessions.open(name, session_id, number)

    # --- events for the operator ----------------------------------------------------------------

    def note(self, text: str, number: int) -> None:
        """Log an event, and add it to the events of a round; 0: before the first."""
        text = printable(text, _WORDS)
        if text not in self._events:  # repeated events are logged once in a round
            self._events = [*self._events[-_EVENTS:], text]
            self.tell(f"round {number}: {text}" if number else text)

    def take_events(self) -> list[str]:
        events, self._events = self._events, []
        return events

    # --- commands -------------------------------------------------------------------------------

    def command(
        self,
        *receivers: str,
        kind: FrameKind = FrameKind.CONTROL,
        reached: Turn | None = None,
        arrays: Mapping[str, Any] | None = None,
        **content: Any,
    ) -> None:
        """Send a command or an answer; `reached`: the turn that this node goes to, if it is not in it yet.

        Only a command with a number may be answered. Otherwise a node could earn its next command by what its last one
        made this node send.
        """
        payload = encode_control(content, arrays or {})
        if kind is FrameKind.CONTROL and "number" in content:
            for name in receivers:
                self.commands.grant(name)
        self.transport.send(receivers, kind, reached or self.turn, payload)

    def next_control(self, timeout: float) -> Control | None:
        end = time.monotonic() + timeout
        while self._control and self._control[0].sender in self.sessions.excluded:
            self._control.popleft()  # sent before its exclusion
        while not self._control:
            left = end - time.monotonic()
            if left <= 0 or not (self._take(min(left, _POLL)) or time.monotonic() < end):
                break
        return self._control.popleft() if self._control else None

    # --- incoming frames ------------------------------------------------------------------------

    def is_connected(self, name: str) -> bool:
        """Whether the open session of a node is on the network."""
        return self.sessions.current.get(name) in self.visible.get(name, ())

    def _take(self, timeout: float) -> bool:
        """Handle one event; False if there was none."""
        event = self.transport.take(timeout)
        match event:
            case None:
                return False
            case ReceivedFrame():
                if self.sessions.admit(event.sender, event.header):
                    self._receive(event)
            case Malformed():
                self.sessions.strike(event.sender, f"not a valid frame: {event.why}")
            case Presence():
                self._presence_changed(event)
            case Refusal():
                self.on_refusal(event)
            case Oversized():
                self._receive_oversized(event)
        if not isinstance(event, Presence) and event.sender in self.sessions.excluded:
            self.drop(event.sender, "it is excluded")
        return True

    def _receive(self, received: ReceivedFrame) -> None:
        sender, header = received.sender, received.header
        if header.kind is FrameKind.HELLO and not self._joins.take(sender, received.at):
            self.sessions.strike(sender, "more join requests than a node needs")
            return
        if header.kind is FrameKind.CONTROL and not self.commands.take(sender, received.at):
            self.sessions.strike(sender, "more commands than were asked for")
            return
        if header.kind is FrameKind.HELLO:
            hello = self._read(received)
            if hello is not None:
                self.on_hello(hello)
            return
        if not self._leads:  # no node is ahead of the one that leads, whatever turn of an earlier hub it has seen
            self.newest_turn[sender] = max(header.turn, self.newest_turn.get(sender, header.turn))
        if header.kind is FrameKind.CONTROL:
            control = self._read(received)
            if control is not None and sum(waiting.sender == sender for waiting in self._control) >= _COMMANDS:
                self.sessions.strike(sender, f"more than {_COMMANDS} unread commands")
            elif control is not None:
                self._control.append(control)
            self._drop_if_absent(sender)
            return
        frame = Frame(
            header.turn.phase, sender, [self.transport.me], received.payload,
            lost=header.kind is FrameKind.LOST, is_end=header.kind is FrameKind.END, asks=header.kind is FrameKind.ASK,
        )  # fmt: skip
        self._sort(header.turn, frame)

    def _receive_oversized(self, event: Oversized) -> None:
        """A frame above the limit was discarded: for the node that waits for it, it is lost."""
        header, sender = event.header, event.sender
        is_open = self.sessions.admit(sender, header)
        self.sessions.strike(sender, f"a message of {event.length:,} bytes, above the limit of {event.limit:,}")
        if is_open and header.kind in MESSAGES:
            asks = header.kind is FrameKind.ASK
            self._sort(header.turn, Frame(header.turn.phase, sender, [self.transport.me], b"", lost=True, asks=asks))

    def _read(self, received: ReceivedFrame) -> Control | None:
        try:
            return read_control(received)
        except ValueError as error:
            self.sessions.strike(received.sender, f"a malformed command: {error}"[:300])
            return None

    def _presence_changed(self, presence: Presence) -> None:
        name, before = presence.sender, self.is_connected(presence.sender)
        visible = self.visible.setdefault(name, set())
        (visible.add if presence.here else visible.discard)(presence.session_id)
        if before and not self.is_connected(name):
            self.sessions.current.pop(name, None)
            self.drop(name, "it disconnected")
        self.on_presence(name)


def _size(frame: Frame) -> int:
    return len(frame.payload) + EACH


# --- Sessions: one process of a node each, known by a random number that the process draws when it starts.

_IGNORED = 1000  # frames that may be left over from sessions that have ended
_REASON = 300  # characters of why a message is bad: parts of it were written by the sender


class Sessions:
    """The open session of each node, the number of its newest frame, its strikes, and who is excluded."""

    def __init__(self, strikes: int, tell: Tell, bar: Callable[[str, str], None]) -> None:
        """`bar`: closes the links of a node that is excluded, and tells it why."""
        self._most, self._tell, self._bar = strikes, tell, bar
        self.current: dict[str, int] = {}  # the open session of each node that has one
        self._numbers: dict[str, int] = {}  # of the newest frame of the open session
        self._strikes: dict[str, int] = {}
        self._ignored: dict[str, int] = {}  # frames of sessions that are not open
        self.excluded: dict[str, str] = {}  # nodes excluded from the run, and why

    def open(self, name: str, session_id: int, number: int) -> None:
        """Open a session of a node: from now on, frames of any other session of it are ignored."""
        self.current[name], self._numbers[name] = session_id, number

    def admit(self, sender: str, header: FrameHeader) -> bool:
        if sender in self.excluded:
            return False  # sent before its links were closed
        is_open = self.current.get(sender) == header.session_id
        if is_open and header.number <= self._numbers[sender]:
            self.strike(sender, f"frame {header.number} received after frame {self._numbers[sender]}: a replay")
            return False
        if not is_open:
            # A hello opens a new session; any other frame is left over from a session that has ended.
            if header.kind is FrameKind.HELLO:
                return True
            self._ignored[sender] = self._ignored.get(sender, 0) + 1
            if self._ignored[sender] > _IGNORED:
                self._ignored[sender] = 0
                self.strike(sender, f"more than {_IGNORED} frames of a session that is not open")
            return False
        self._numbers[sender] = header.number
        return True

    def exclude(self, sender: str, reason: str) -> None:
        if sender not in self.excluded:
            self.excluded[sender] = reason
            self._tell(f"'{sender}' is excluded from the rest of the run: {reason}")
            self._bar(sender, f"it is excluded from the run: {reason}")

    def strike(self, sender: str, reason: str) -> None:
        if sender in self.excluded:
            return
        count = self._strikes[sender] = self._strikes.get(sender, 0) + 1
        self._tell(f"'{sender}': strike {count} of {self._most}: {printable(reason, _REASON)}")
        if count >= self._most:
            self.exclude(sender, f"{count} bad messages")


# --- Commands between nodes, and the answers to them: plain values as JSON, and arrays, in one payload.

_TEXT_LIMIT = 1 << 22  # characters of the text of a command


class Control:
    """A command or an answer: plain values, and arrays if it has any."""

    def __init__(self, sender: str, content: dict[str, Any], arrays: Arrays, header: FrameHeader) -> None:
        self.sender, self.content, self.arrays, self.header = sender, content, arrays, header

    @property
    def do(self) -> str:
        return str(self.content["do"])


def encode_control(content: Mapping[str, Any], arrays: Mapping[str, Any]) -> bytes:
    return encode(arrays, {"json": json.dumps(content, separators=(",", ":"))})


def read_control(received: ReceivedFrame) -> Control:
    """The command or answer in a frame; raises `ValueError` if it is malformed."""
    try:
        arrays, values = decode(
            received.payload, finite=False, limit=CONTROL_LIMIT, header_limit=2 * _TEXT_LIMIT, packed=False
        )
        content = read_json(values["json"], _TEXT_LIMIT)
        if not isinstance(content, dict) or not isinstance(content.get("do"), str):
            raise ValueError("it has no 'do'")
    except (MessageError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return Control(received.sender, content, arrays, received.header)
