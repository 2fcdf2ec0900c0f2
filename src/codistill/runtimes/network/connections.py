"""The lines of one node: what its host needs to talk to nodes elsewhere, and the runtime's own commands.

A turn is over for a sender when it says so, when it is gone, when it is late, or when something of a later
turn comes from it: between two nodes nothing overtakes. Whoever waits for it then goes on without.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from codistill.errors import MessageError
from codistill.runtimes.links import Frame, Waiting
from codistill.runtimes.network.frame_header import FrameHeader, FrameKind, Turn
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.sessions import Sessions, Tell
from codistill.runtimes.network.transport import EACH, ROOM, Heard, Overflow, Presence, Transport
from codistill.text import printable
from codistill.wire.codec import Arrays, decode, encode

_LOOK = 0.5  # seconds between looks at the clock while waiting
_CONTROL_LIMIT = 1 << 26  # bytes of a command or an answer
_TEXT_LIMIT = 1 << 23  # characters of its text
_COMMANDS = 100  # of one sender that wait to be looked at
_WORDS, _EVENTS = 600, 1000  # characters of an event, and events of a round: others have a say in them


class Control:
    """A command or an answer: plain values, and arrays where it has any."""

    def __init__(self, sender: str, content: dict[str, Any], arrays: Arrays, head: FrameHeader) -> None:
        self.sender, self.content, self.arrays, self.head = sender, content, arrays, head

    @property
    def do(self) -> str:
        """What it is."""
        return str(self.content["do"])


class Connections:
    """Frames and commands to and from other nodes, in turns."""

    def __init__(
        self, wire: Transport, network: Network, tell: Tell, *, deadline: float | None = None, leads: bool = False
    ) -> None:
        """`leads`: nobody can be in a turn before this node is."""
        self.wire, self.network, self.tell = wire, network, tell
        self.sessions = Sessions(network.strikes, tell)
        self._events: list[str] = []  # of this round, for its log
        self.lives: dict[str, set[int]] = {}  # that can be seen, by node
        self.fell: dict[str, str] = {}  # who fell out of this turn, and why
        self.seen: dict[str, Turn] = {}  # the newest turn that something came from a node for
        self.meet: dict[str, Turn] = {}  # from which turn on a node that came back is waited for
        self.on_hello: Callable[[Control], None] = _ignore
        self.on_presence: Callable[[str], None] = _ignore
        self._deadline = deadline
        self.turn = Turn(-2)
        self._leads = leads
        self.backlog: Callable[[str], int] = _nothing  # bytes of a sender that the host holds and nobody has asked for
        self._over = True  # nothing of this turn is waited for any more
        self._held: dict[str, int] = {}  # bytes of early frames and of this turn's, by sender
        self._since, self._waits = 0.0, {}  # type: float, dict[str, list[str]]
        self._frames: list[Frame] = []
        self._early: list[tuple[Turn, Frame]] = []
        self._ended: set[str] = set()
        self._expected: tuple[str, ...] = ()
        self._control: deque[Control] = deque()

    # --- a turn ---------------------------------------------------------------------------------

    def begin(self, turn: Turn, expected: Sequence[str]) -> None:
        """Enter a turn, in which these nodes elsewhere are waited for."""
        self.turn, self._expected = turn, tuple(expected)
        self._ended, self.fell, self._frames, self._held = set(), {}, [], {}
        self._over = False
        early, self._early = self._early, []
        for at, frame in early:
            self._sort(at, frame)
        for name in self._expected:
            self._end_if_over(name)

    def finish(self) -> None:
        """Nobody here waits for a frame of this turn any more."""
        self._over, self._frames, self._waits = True, [], {}

    def post(self, phase: int, sender: str, receivers: Sequence[str], data: bytes | None) -> None:
        """Send a message; None stands for one that an injected fault has hit."""
        kind = FrameKind.LOST if data is None else FrameKind.MESSAGE
        self.wire.send(receivers, kind, self.turn, data or b"")

    def post_end(self, phase: int, sender: str, listeners: Iterable[str]) -> None:
        """Say that this node's turn is over."""
        self.wire.send([name for name in listeners if name in self.wire.others], FrameKind.END, self.turn)

    def arrived(self) -> list[Frame]:
        """Frames of this turn that have arrived, without waiting."""
        for _ in range(self.wire.inbox.qsize()):  # what came until now: a sender must not keep us here
            self._take(0)
        return self._handed()

    def wait(self, host: Waiting) -> list[Frame]:
        """Frames of this turn; waits for the next if there is none."""
        if self._deadline and (waits := host.waits()) != self._waits:  # a frame that helps nobody on gives no more time
            self._since, self._waits = time.monotonic(), waits
        while not self._frames:
            self._take(_LOOK)
            if self._deadline and time.monotonic() - self._since > self._deadline:
                for name in {name for names in host.waits().values() for name in names}:
                    self.drop(name, f"nothing came from it for {self._deadline:g} s")
        return self._handed()

    def _handed(self) -> list[Frame]:
        frames, self._frames = self._frames, []
        for frame in frames:
            # An end that nobody sent was never held.
            self._held[frame.sender] = max(0, self._held.get(frame.sender, 0) - _size(frame))
        return frames

    def _sort(self, at: Turn, frame: Frame) -> None:
        if at < self.turn or (at == self.turn and (self._over or frame.sender in self._ended)):
            return  # too late
        if at > self.turn and self._leads:
            self.sessions.strike(frame.sender, "a message of a turn that has not begun")
        elif not self._has_room(frame):
            self.sessions.strike(frame.sender, "more messages than this node can hold")
        elif at > self.turn:
            self._early.append((at, frame))
            self._end_if_over(frame.sender)
        else:
            if frame.is_end:
                self._ended.add(frame.sender)
            self._frames.append(frame)

    def _has_room(self, frame: Frame) -> bool:
        """Whether what is held of a sender, here and by the host, stays within bounds."""
        held = self._held.get(frame.sender, 0) + _size(frame)
        if held + self.backlog(frame.sender) > ROOM * self.network.message_limit:
            return False
        self._held[frame.sender] = held
        return True

    def _end_if_over(self, name: str) -> None:
        """Nobody waits for a node that is out, gone, elsewhere, or already further."""
        if name in self.sessions.out:
            self.drop(name, "it is out")
        elif not self.is_here(name):
            self.drop(name, "it is gone")
        elif self.meet.get(name, self.turn) > self.turn or self.seen.get(name, self.turn) > self.turn:
            self.drop(name, "")

    def drop(self, name: str, why: str) -> None:
        """Go on without a node in this turn."""
        if name not in self._ended:
            self._ended.add(name)
            self._frames.append(Frame(self.turn.phase, name, [], b"", is_end=True))
            if why and name in self._expected:
                self.fell[name] = why

    def let_in(self, name: str, life: int, number: int) -> None:
        """Let a life of a node in; what is left of another one, or from before the link was cut, does not count."""
        if self.sessions.life(name) != life:
            self.seen.pop(name, None)
            self._early = [(at, frame) for at, frame in self._early if frame.sender != name]
            self._control = deque(control for control in self._control if control.sender != name)
        self.sessions.open(name, life, number)

    # --- what an operator is told ---------------------------------------------------------------

    def note(self, text: str, number: int) -> None:
        """Say something to the operator, and into the log of a round; 0: before the first."""
        text = printable(text, _WORDS)
        self._events = [*self._events[-_EVENTS:], text]
        self.tell(f"round {number}: {text}" if number else text)

    def noted(self) -> list[str]:
        """What has been noted since the last time."""
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
        """Send a command or an answer; `reached`: the turn that this node goes to, if it is not in it yet."""
        text = json.dumps(content, separators=(",", ":"))
        self.wire.send(receivers, kind, reached or self.turn, encode(arrays or {}, {"json": text}))

    def next_control(self, timeout: float) -> Control | None:
        """The next command or answer; None if there is none in time."""
        end = time.monotonic() + timeout
        while not self._control:
            left = end - time.monotonic()
            if left <= 0 or not (self._take(min(left, _LOOK)) or time.monotonic() < end):
                break
        return self._control.popleft() if self._control else None

    # --- what comes in --------------------------------------------------------------------------

    def is_here(self, name: str) -> bool:
        """Whether the life of a node that was let in can be seen."""
        return self.sessions.life(name) in self.lives.get(name, ())

    def _take(self, timeout: float) -> bool:
        """Look at one event; False if there was none."""
        event = self.wire.take(timeout)
        match event:
            case None:
                return False
            case Heard():
                head = self.sessions.admit(event.sender, event.head)
                if head is not None:
                    self._hear(event, head)
            case Presence():
                self._see(event)
            case Overflow():
                self.sessions.strike(event.sender, "it sent more than this node can hold")
        if not isinstance(event, Presence) and event.sender in self.sessions.out:
            self.drop(event.sender, "it is out")
        return True

    def _hear(self, heard: Heard, head: FrameHeader) -> None:
        sender = heard.sender
        if len(heard.payload) > self.network.message_limit:
            self.sessions.strike(sender, f"a message of {len(heard.payload)} bytes, above the limit")
            return
        if head.kind is FrameKind.HELLO:
            hello = self._read(heard, head)
            if hello is not None:
                self.on_hello(hello)
            return
        if not self._leads:  # nobody is further than who leads, whatever turn of an earlier hub it has seen
            self.seen[sender] = max(head.turn, self.seen.get(sender, head.turn))
        if head.kind is FrameKind.CONTROL:
            control = self._read(heard, head)
            if control is not None:
                self._queue(control)
            self._end_if_over(sender)
            return
        frame = Frame(
            head.turn.phase, sender, [self.wire.me], heard.payload,
            lost=head.kind is FrameKind.LOST, is_end=head.kind is FrameKind.END,
        )  # fmt: skip
        self._sort(head.turn, frame)

    def _queue(self, control: Control) -> None:
        if sum(waiting.sender == control.sender for waiting in self._control) >= _COMMANDS:
            self.sessions.strike(control.sender, f"more than {_COMMANDS} commands that nobody asked for")
            return
        self._control.append(control)

    def _read(self, heard: Heard, head: FrameHeader) -> Control | None:
        try:
            arrays, values = decode(heard.payload, finite=False, limit=_CONTROL_LIMIT)
            if len(values["json"]) > _TEXT_LIMIT:
                raise ValueError(f"a text of {len(values['json'])} characters")
            content = json.loads(values["json"])
            if not isinstance(content, dict) or not isinstance(content.get("do"), str):
                raise ValueError("no command")
        except (MessageError, KeyError, ValueError, TypeError, RecursionError) as error:
            self.sessions.strike(heard.sender, f"a command that cannot be read: {error}"[:300])
            return None
        return Control(heard.sender, content, arrays, head)

    def _see(self, presence: Presence) -> None:
        name, before = presence.name, self.is_here(presence.name)
        lives = self.lives.setdefault(name, set())
        (lives.add if presence.here else lives.discard)(presence.life)
        if before and not self.is_here(name):
            self.sessions.close(name)
            self.drop(name, "it is gone")
        self.on_presence(name)


def _size(frame: Frame) -> int:
    return len(frame.payload) + EACH


def _nothing(sender: str) -> int:
    return 0


def _ignore(_: Any) -> None:
    pass
