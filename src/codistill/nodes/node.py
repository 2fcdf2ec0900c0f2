"""What an agent and the hub have in common: state across rounds, randomness, and how their verbs talk.

A verb does not communicate. It yields an effect (`Send`, `Receive`) to the driver of the coroutine, and is resumed with
the answer; see `codistill.engine.host`.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import numpy as np

from codistill.core.errors import MessageError, ProtocolError, calling_line, nearest, show_line
from codistill.core.rng import Key, generator, seed_libraries
from codistill.core.text import printable
from codistill.data.shard import PublicData
from codistill.nodes.record import NodeRecord, record_of
from codistill.topology import HUB, Topology
from codistill.wire.message import Expectation, Message

# --- Effects: what a verb yields to the driver of its coroutine, which resumes it with the answer.


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver each message to its receiver; the same object to many is encoded once."""

    messages: Mapping[str, Message]
    asks: bool = False  # the sender waits for an answer at once: what it receives next


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the next message of each sender; those who will send none this round are left out."""

    senders: tuple[str, ...]
    expect: Expectation = field(default_factory=dict)


Effect = Send | Receive

# --- Verbs of agents and of the hub: what a call of one must be, and that it is awaited.

P = ParamSpec("P")
T = TypeVar("T")
N = TypeVar("N", bound="Node")
_COLUMNS = frozenset({
    "round", "agent", "present", "lies", "sent", "received", "steps", "exchanges", "time", "own_rounds", "test_samples",
})  # fmt: skip
_PLAIN = (int, float, str, bool, list, type(None))  # what a plain value of a received message can be


class Call(Generic[T]):
    """A call of a verb, which begins when it is awaited."""

    def __init__(self, node: Node, start: partial[Coroutine[Any, Any, T]]) -> None:
        frame = sys._getframe(2)
        self._record, self._start, self._name = record_of(node), start, start.func.__name__
        self._code, self._line = frame.f_code, frame.f_lineno
        self._record.calls.append(self)

    def __await__(self) -> Generator[Any, Any, T]:
        calls = self._record.calls
        if self not in calls:
            raise misuse(f"A call of me.{self._name} can be awaited once.", "a second 'await'", "Call it again.")
        if calls[0] is not self:  # one before this was forgotten
            self._record.check_awaited()
        calls.remove(self)
        try:
            coroutine = self._start()
        except TypeError as error:  # nothing of it has run yet: these are not its arguments
            raise wrong_arguments(self._start.func, error) from None
        return coroutine.__await__()

    def refuse(self, found: str) -> NoReturn:
        line = show_line(self._code, self._line)
        raise ProtocolError(
            f"me.{self._name} must be awaited, where it is called.",
            f"{found}, at {line}",
            f"Write: await me.{self._name}(...).",
        )

    def _refuse_use(self, *_: Any) -> NoReturn:
        self.refuse("its result used without 'await'")

    __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = __call__ = _refuse_use

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse_use()


def verb(function: Callable[Concatenate[N, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[N, P], Call[T]]:
    """Make a coroutine method a verb: a call that is not awaited, or has other arguments, is an error with its line."""

    @wraps(function)
    def call(node: N, /, *values: P.args, **named: P.kwargs) -> Call[T]:
        return Call(node, partial(function, node, *values, **named))

    return call


def plain_verb(function: Callable[P, T]) -> Callable[P, T]:
    """Make a method that is not awaited a verb: a call with other arguments is an error with its line."""

    @wraps(function)
    def call(*values: P.args, **named: P.kwargs) -> T:
        try:
            return function(*values, **named)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # of what it does: these are its arguments
            raise wrong_arguments(function, error) from None

    return call


def wrong_arguments(function: Callable[..., Any], error: TypeError) -> ProtocolError:
    """The error for a call of a verb that it does not take, with its form: me.send(to, message=None, /, **items)."""
    _self, *others = inspect.signature(function).parameters.values()
    return misuse(
        f"me.{function.__name__} is called as me.{function.__name__}{without_types(others)}.",
        str(error).partition("() ")[2] or str(error),
        "Change the call.",
    )


def without_types(parameters: Iterable[inspect.Parameter]) -> inspect.Signature:
    return inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])


def misuse(must: str, found: str, do: str) -> ProtocolError:
    """The error for a wrong call; it names the line of the protocol's own file."""
    return ProtocolError(must, f"{found}, at {calling_line()}", do)


def as_message(name: str, given: Any, items: Mapping[str, Any]) -> Message:
    """What a verb sends: a ready message, a table of items, or the items that it was given by name."""
    if given is None:
        return Message.of(**items)
    if items:
        raise misuse(
            f"me.{name} takes a message or items by name, not both.",
            f"a {type(given).__name__} beside {', '.join(items)}",
            f"Write me.{name}(..., name=value).",
        )
    if isinstance(given, Message):
        return given
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return Message.of(**given)
    raise misuse(
        f"me.{name} takes items by name: arrays, or numbers, strings and lists of them.",
        shown(given),
        f"Write me.{name}(..., name=value), with any name.",
    )


def as_messages(given: Any) -> dict[str, Message]:
    """What `scatter` sends: to each name a message, or a table of items."""
    if not isinstance(given, Mapping):
        raise misuse("me.scatter takes a table: for each agent a table of items.", shown(given), _SCATTER)
    for name, items in given.items():
        if not isinstance(items, Mapping):
            raise misuse(f"What is scattered to '{name}' must be a table of items.", shown(items), _SCATTER)
    return {name: as_message("scatter", items, {}) for name, items in given.items()}


def as_measures(agents: Any, values: Mapping[str, Any], roster: Sequence[str]) -> list[tuple[str, str, float]]:
    """The (agent, figure, value) of a call of `measure`: a value for one agent, or one for each of several."""
    if not isinstance(agents, Iterable):
        raise misuse("me.measure takes an agent's name, or several.", shown(agents), _MEASURE)
    names = [agents] if isinstance(agents, str) else list(agents)
    for name in names:
        if name not in roster:
            raise misuse("me.measure takes names of agents.", shown(name), nearest(str(name), roster))
    measures: list[tuple[str, str, float]] = []
    for figure, given in values.items():
        if figure in _COLUMNS:
            raise misuse("A figure must not have the name of a column that every run has.", f"'{figure}'", "Rename it.")
        try:
            each = [float(value) for value in ([given] if isinstance(agents, str) else given)]
        except (TypeError, ValueError):
            raise misuse(f"'{figure}' must be one number for each agent.", shown(given), _MEASURE) from None
        if len(each) != len(names):
            found = f"{len(each)} numbers for {len(names)} agents"
            raise misuse(f"'{figure}' must be one number for each agent.", found, _MEASURE)
        measures += [(name, figure, value) for name, value in zip(names, each, strict=True)]
    return measures


def as_expectation(expect: Any) -> Expectation:
    """What a message must hold; {}: anything."""
    if expect is None:
        return {}
    if not isinstance(expect, Mapping):
        raise misuse("expect must be a table.", shown(expect), _EXPECT)
    return {name: _as_expected(name, like) for name, like in expect.items()}


def _as_expected(name: Any, like: Any) -> Any:
    if hasattr(like, "detach"):  # a torch tensor
        like = like.detach().cpu().numpy()
    if isinstance(like, type):
        if not any(issubclass(kind, like) for kind in _PLAIN):
            must = f"expect['{name}'] must be a shape, an array, or one of the types int, float, str, bool, list."
            raise misuse(must, f"the type {like.__name__}", _EXPECT)
        return like
    if isinstance(like, np.ndarray):
        return like
    if isinstance(like, tuple) and all(size is None or isinstance(size, int | np.integer) for size in like):
        return like
    raise misuse(f"expect['{name}'] must be a shape as a tuple, an array, or a type.", shown(like), _EXPECT)


def shown(given: Any) -> str:
    """Whatever was given, in one short line with its type."""
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        return f"an array of shape {tuple(given.shape)}"
    line = " ".join(repr(given).split())
    return f"{line if len(line) <= 60 else line[:56] + ' ...'} ({type(given).__name__})"


_SCATTER = 'Example: me.scatter({name: {"mean": mean} for name in heard}).'
_MEASURE = "Example: me.measure(me.name, distance=0.5), or me.measure(names, distance=[0.5, 0.1])."
_EXPECT = (
    'Example: expect={"p": (len(me.public), me.classes), "z": z, "samples": int}; None in a shape: any length, '
    "an array: its shape and dtype."
)

_REASON = 500  # characters that are kept of why a message was refused


class Node:
    """What an agent and the hub have in common: a name, state across rounds, randomness, and messages."""

    _record: NodeRecord  # what the engine keeps of it

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: dict[str, Any] = {}  # kept in the checkpoint
        self.memo: dict[Any, Any] = {}  # what can be computed again: not kept
        self.public: PublicData = None  # type: ignore[assignment]  # absent unless the federation has one
        self.topology = Topology.silent(())
        self.present: tuple[str, ...] = ()  # agents of this round, in the order of the roster
        self.seed = 0
        self.classes = 0  # of the federation: columns of an output
        self.time = 0.0  # the number of the round; in a run without rounds, seconds since its start
        self.asynchronous = False  # whether it is a run without rounds
        self.sampled = False  # whether only a share of the agents takes part in a round (participation below 1)
        self.diverged = False  # whether its model, or what the hub makes, diverged in this round

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}'>"

    def rng(self, *keys: Key) -> np.random.Generator:
        """A generator for (seed, name, round, keys), the same whenever it is asked for in this round."""
        return generator(self.seed, *self._record.moment[:2], *keys)

    def seed_alike(self, *keys: Key) -> None:
        """Seed the libraries equally on every node, so that all draw the same next numbers."""
        seed_libraries(self.seed, "alike", *keys)

    @property
    def roster(self) -> tuple[str, ...]:
        """All agents of the federation, present or not."""
        return self.topology.names

    @verb
    async def send(self, to: str, message: Message | Mapping[str, Any] | None = None, /, **items: Any) -> None:
        """Send named arrays and plain values, or a ready message."""
        await self._yield(Send({to: as_message("send", message, items)}))

    @verb
    async def receive(self, sender: str, *, expect: Expectation | None = None) -> Message | None:
        """The next message of a sender; None if none arrives in this round."""
        self._check_name(sender, "A sender")
        if not self.topology.may_send(sender, self.name):
            raise misuse(
                "A message may only come along a link of the topology.",
                f"'{self.name}' waits for '{sender}', who has no link to it",
                "Receive from the hub or from a neighbour, or choose another topology.",
            )
        return (await self._yield(Receive((sender,), as_expectation(expect)))).get(sender)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say what there is instead; called only for what there is not."""
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(self._no_attribute(name))

    def _no_attribute(self, name: str) -> str:
        """Why it does not have an attribute, or which one was meant."""
        known = [each for each in {*dir(type(self)), *vars(self)} if each[0] != "_"]
        return f"'me' has no '{name}'. {nearest(name, known)}"

    def refuse(self, sender: str, error: MessageError) -> None:
        """Record a message that cannot be used; the round continues without it."""
        self._record.rejected.append((sender, reason_of(error)))

    @plain_verb
    def accepts(self, sender: str, message: Message, expect: Expectation) -> bool:
        """Whether a message is as expected; if not, it is refused by name."""
        try:
            message.check(expect)
        except MessageError as error:
            self.refuse(sender, error)
            return False
        return True

    @plain_verb
    def remark(self, text: str) -> None:
        """Log, for the operator, something that the protocol met and handled, in a few words."""
        if not isinstance(text, str):
            raise misuse("me.remark takes a text.", shown(text), 'Write me.remark(f"...").')
        self._record.remarks.append(text)

    @plain_verb
    def measure(self, agents: str | Iterable[str], **values: Any) -> None:
        """Add figures that only the protocol knows to this round's rows: a value for one agent, or one for each.

        Where a figure is given several times in a round, its mean is what the row holds.
        """
        self._record.measures += as_measures(agents, values, self.roster)

    def _check_links(self, messages: Mapping[str, Message]) -> None:
        strangers = messages.keys() - {*self.roster, HUB} if self.name == HUB else set()  # the hub has no list of links
        for name in strangers:
            self._check_name(name, "A receiver")
        if HUB in messages and self._record.moment[1:2] == ("begin",):
            raise misuse(
                "The hub takes part from the first round on.", f"'{self.name}' asks it in begin", "Ask it in round."
            )
        for receiver in messages:
            if not self.topology.may_send(self.name, receiver):
                self._check_name(receiver, "A receiver")
                raise misuse(
                    "A message may only go along a link of the topology.",
                    f"'{self.name}' tried to send to '{receiver}'",
                    "Send to the hub or to a neighbour, or choose another topology.",
                )

    def _check_name(self, name: Any, what: str) -> None:
        known = (*self.roster, HUB)
        if not isinstance(name, str) or name not in known:
            raise misuse(f"{what} must be the name of an agent, or 'hub'.", shown(name), nearest(str(name), known))

    @types.coroutine
    def _yield(self, *effects: Effect) -> Generator[Effect, Any, dict[str, Message]]:
        """One effect after the other; returns the answer to the last, for `Receive` the messages by sender."""
        answer: dict[str, Message] = {}
        for effect in effects:
            if isinstance(effect, Send):
                self._check_links(effect.messages)
            self._record.count(effect.senders if isinstance(effect, Receive) else None)
            answer = yield effect
        # Every effect is a step, but between effects that are yielded together nobody draws.
        self._record.step(len(effects))
        return answer


def reason_of(error: MessageError) -> str:
    """Why a message was refused, in a few words: its sender has chosen some of them."""
    return printable(str(error), _REASON)
