"""The connections of one node: frames of the protocol for its host, and the runtime's own commands.

A turn is over for a sender when it says so, when it disconnects, when it is late, or when something of a later turn
arrives from it: between two nodes the order of frames is kept. A node that waits for it then continues without it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from codistill.runtimes.carrier import Frame, Waiting
from codistill.runtimes.message_in_transit import EACH
from codistill.runtimes.network.allowance import CommandAllowance, JoinAllowance, LineLimit, MessageAllowance
from codistill.runtimes.network.control import Control, encode_control, read_control
from codistill.runtimes.network.frame_header import MESSAGES, FrameHeader, FrameKind, Turn
from codistill.runtimes.network.inbox import Oversized, Presence, ReceivedFrame, Refusal
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.sessions import Sessions, Tell
from codistill.runtimes.network.stream import CONTROL_LIMIT
from codistill.runtimes.network.transport import Transport
from codistill.text import printable

_POLL = 0.5  # seconds between checks of the clock while waiting
ROOM = 4  # messages of the largest size that one sender may have here
_LATE = 1000  # messages of one sender in a turn that are not wanted any more
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
        self.on_hello: Callable[[Control], None] = _ignore
        self.on_presence: Callable[[str], None] = _ignore
        self.on_refusal: Callable[[Refusal], None] = _ignore
        self._deadline = deadline
        self.turn = Turn(-2)
        self._leads = leads
        self.backlog: Callable[[str], int] = _nothing  # bytes of a sender that the host holds and has not used
        self._over = True  # this node waits for nothing more of this turn
        self._has_turns = True  # False: a run without rounds, see `without_turns`
        # Of such a run: a node that trains reads its messages late, one that leads does not.
        self.messages = MessageAllowance(_UNREAD if leads else 10 * _UNREAD)
        self._held: dict[str, int] = {}  # bytes of early frames and of this turn's, by sender
        self._late: Counter[str] = Counter()  # frames of this turn that came too late, by sender
        self._allowance, self._joins = CommandAllowance(), JoinAllowance(network.silence)
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
        small = receivers
        if data is not None:
            small = [name for name in receivers if len(data) <= self.transport.limit_of(name)]
            for name in receivers:
                if name not in small:
                    self._refuse_to_send(name, len(data))
            self.transport.send(small, FrameKind.MESSAGE, self.turn, data)
        lost = receivers if data is None else [name for name in receivers if name not in small]
        self.transport.send(lost, FrameKind.LOST, self.turn)

    def _refuse_to_send(self, receiver: str, length: int) -> None:
        """What the receiver would discard is not sent: it hears at once that the message is lost."""
        self.note(
            f"a message of {length:,} bytes was not sent to '{receiver}', which accepts at most "
            f"{self.transport.limit_of(receiver):,}: raise network.message_limit there",
            self.turn.phase + 1,
        )

    def post_end(self, phase: int, sender: str, listeners: Iterable[str]) -> None:
        """Tell the listeners that this node's turn is over."""
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
        if self._deadline is None:
            while not self._frames:
                self._take(_POLL)
        elif not self._frames:
            self._wait_for({name for names in host.waits().values() for name in names}, self._deadline)
        return self._handed()

    def _wait_for(self, names: set[str], deadline: float) -> None:
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
        """Whether a node that asks has taken the answers before; an honest one asks again only when it has."""
        untaken = self.transport.untaken(sender)
        if untaken is None:
            return False  # it asked before it was disconnected
        if untaken <= CONTROL_LIMIT:  # commands may be on their way to it
            return True
        self.note(f"'{sender}' asks again and does not take the answers: no more are sent to it until it does", number)
        return False

    def allow_command(self, sender: str) -> None:
        """Let a node send a command that it was not asked for: its report of a period."""
        self._allowance.grant(sender)

    def _keep(self, frame: Frame) -> None:
        if not self.messages.take(frame.sender):
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
            self._late[frame.sender] += 1  # of a node that was dropped, or of an earlier attempt
            if self._late[frame.sender] > _LATE:
                self._late[frame.sender] = 0
                self.sessions.strike(frame.sender, f"more than {_LATE} messages that are not wanted any more")
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
        """Open a session of a node; what is left of an earlier one is discarded."""
        if self.sessions.current(name) != session_id:
            self.newest_turn.pop(name, None)
            self._early = [(at, frame) for at, frame in self._early if frame.sender != name]
            self._control = deque(control for control in self._control if control.sender != name)
        self.sessions.open(name, session_id, number)

    # --- events for the operator ----------------------------------------------------------------

    def note(self, text: str, number: int) -> None:
        """Tell the operator something and add it to the log of a round; 0: before the first."""
        text = printable(text, _WORDS)
        if text not in self._events:  # what a node causes again and again is told once in a round
            self._events = [*self._events[-_EVENTS:], text]
            self.tell(f"round {number}: {text}" if number else text)

    def take_events(self) -> list[str]:
        """The events since the last call."""
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

        What has a number may be answered. Nothing else entitles to an answer: otherwise a node could pay for its next
        command by what its last one made this node send.
        """
        payload = encode_control(content, arrays or {})
        if kind is FrameKind.CONTROL and "number" in content:
            for name in receivers:
                self._allowance.grant(name)
        self.transport.send(receivers, kind, reached or self.turn, payload)

    def next_control(self, timeout: float) -> Control | None:
        """The next command or answer; None if there is none in time."""
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
        return self.sessions.current(name) in self.visible.get(name, ())

    def _take(self, timeout: float) -> bool:
        """Handle one event; False if there was none."""
        event = self.transport.take(timeout)
        match event:
            case None:
                return False
            case ReceivedFrame():
                header = self.sessions.admit(event.sender, event.header)
                if header is not None:
                    self._receive(event, header)
            case Presence():
                self._presence_changed(event)
            case Refusal():
                self.on_refusal(event)
            case Oversized():
                self._receive_oversized(event)
        if not isinstance(event, Presence) and event.sender in self.sessions.excluded:
            self.drop(event.sender, "it is excluded")
        return True

    def _receive(self, received: ReceivedFrame, header: FrameHeader) -> None:
        sender = received.sender
        if header.kind is FrameKind.HELLO and not self._joins.take(sender, received.at):
            self.sessions.strike(sender, "more join requests than a node needs")
            return
        if header.kind is FrameKind.CONTROL and not self._allowance.take(sender, received.at):
            self.sessions.strike(sender, "more commands than were asked for")
            return
        if header.kind is FrameKind.HELLO:
            hello = self._read(received, header)
            if hello is not None:
                self.on_hello(hello)
            return
        if not self._leads:  # no node is ahead of the one that leads, whatever turn of an earlier hub it has seen
            self.newest_turn[sender] = max(header.turn, self.newest_turn.get(sender, header.turn))
        if header.kind is FrameKind.CONTROL:
            control = self._read(received, header)
            if control is not None:
                self._queue(control)
            self._drop_if_absent(sender)
            return
        frame = Frame(
            header.turn.phase, sender, [self.transport.me], received.payload,
            lost=header.kind is FrameKind.LOST, is_end=header.kind is FrameKind.END, asks=header.kind is FrameKind.ASK,
        )  # fmt: skip
        self._sort(header.turn, frame)

    def _receive_oversized(self, event: Oversized) -> None:
        """The content of a frame above the limit was discarded: for whoever waits for it, it is lost."""
        header, sender = event.header, event.sender
        is_open = self.sessions.admit(sender, header.encode()) is not None
        self.sessions.strike(sender, f"a message of {event.length:,} bytes, above the limit of {event.limit:,}")
        if is_open and header.kind in MESSAGES:
            asks = header.kind is FrameKind.ASK
            self._sort(header.turn, Frame(header.turn.phase, sender, [self.transport.me], b"", lost=True, asks=asks))

    def _queue(self, control: Control) -> None:
        if sum(waiting.sender == control.sender for waiting in self._control) >= _COMMANDS:
            self.sessions.strike(control.sender, f"more than {_COMMANDS} unread commands")
            return
        self._control.append(control)

    def _read(self, received: ReceivedFrame, header: FrameHeader) -> Control | None:
        try:
            return read_control(received, header)
        except ValueError as error:
            self.sessions.strike(received.sender, f"a malformed command: {error}"[:300])
            return None

    def _presence_changed(self, presence: Presence) -> None:
        name, before = presence.sender, self.is_connected(presence.sender)
        visible = self.visible.setdefault(name, set())
        (visible.add if presence.here else visible.discard)(presence.session_id)
        if before and not self.is_connected(name):
            self.sessions.close(name)
            self.drop(name, "it disconnected")
        self.on_presence(name)


def _size(frame: Frame) -> int:
    return len(frame.payload) + EACH


def _nothing(sender: str) -> int:
    return 0


def _ignore(_: Any) -> None:
    pass
