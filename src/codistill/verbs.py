"""Verbs of agents and of the hub: what a call of one must be, and that it is awaited."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import numpy as np

from codistill.errors import ProtocolError, nearest
from codistill.message import Expectation, Message
from codistill.source_lines import calling_line, show_line

P = ParamSpec("P")
T = TypeVar("T")
N = TypeVar("N", bound="HasCalls")
_COLUMNS = frozenset({
    "round", "agent", "present", "lies", "sent", "received", "steps", "exchanges", "time", "own_rounds", "test_samples",
})  # fmt: skip
_PLAIN = (int, float, str, bool, list, type(None))  # what a plain value of a received message can be


class HasCalls:
    """Whatever has verbs: it keeps those calls that were not awaited yet."""

    def __init__(self) -> None:
        self.calls: list[Call[Any]] = []

    def check_awaited(self) -> None:
        """Raise if a verb was called, and not awaited."""
        if self.calls:
            call, self.calls = self.calls[0], []
            call.refuse("a call without 'await'")


class Call(Generic[T]):
    """A call of a verb, which begins when it is awaited."""

    def __init__(self, node: HasCalls, name: str, start: Callable[[], Coroutine[Any, Any, T]]) -> None:
        frame = sys._getframe(2)
        self._node, self._name, self._start = node, name, start
        self._code, self._line = frame.f_code, frame.f_lineno
        node.calls.append(self)

    def __await__(self) -> Generator[Any, Any, T]:
        calls = self._node.calls
        if self not in calls:
            raise misuse(f"A call of me.{self._name} can be awaited once.", "a second 'await'", "Call it again.")
        if calls[0] is not self:  # one before this was forgotten
            self._node.check_awaited()
        calls.remove(self)
        return self._start().__await__()

    def refuse(self, found: str) -> NoReturn:
        """Raise the error for a call that was not awaited."""
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
    name = function.__name__

    @wraps(function)
    def call(node: N, /, *values: P.args, **named: P.kwargs) -> Call[T]:
        return Call(node, name, partial(start, node, *values, **named))

    def start(node: N, /, *values: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        try:
            return function(node, *values, **named)
        except TypeError as error:  # nothing of it has run yet: these are not its arguments
            raise misuse(
                f"me.{name} is called as {form_of(function)}.",
                str(error).partition("() ")[2] or str(error),
                "Change the call.",
            ) from None

    return call


def plain_verb(function: Callable[P, T]) -> Callable[P, T]:
    """Make a method that is not awaited a verb: a call with other arguments is an error with its line."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*values: P.args, **named: P.kwargs) -> T:
        try:
            signature.bind(*values, **named)
        except TypeError as error:
            raise misuse(
                f"me.{function.__name__} is called as {form_of(function)}.", str(error), "Change it."
            ) from None
        return function(*values, **named)

    return call


def form_of(function: Callable[..., Any]) -> str:
    """A method as it is called: me.send(to, message=None, /, **items)."""
    _self, *others = inspect.signature(function).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in others]
    return f"me.{function.__name__}{inspect.Signature(bare)}"


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
            raise misuse("A figure must have a name that is no column of every run.", f"'{figure}'", "Rename it.")
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
