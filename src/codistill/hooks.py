"""The hooks of a protocol: what they must be, and how a runtime calls them."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from typing import Any

from codistill.errors import ProtocolError, nearest
from codistill.learners.ability import Ability
from codistill.source_lines import show_line
from codistill.topology import KINDS
from codistill.verbs import HasCalls, shown

# How each is called; those of the first line are coroutines.
_AWAITED = {"begin": "self, me", "round": "self, me, t", "hub": "self, me, t"}
_CALLED = {"serve": "self, me, sender, message", "predict": "self, me, x", "check": "self, agents", "alone": "self"}
_DECORATOR = "Write @dataclass(frozen=True, kw_only=True) above the class."


@cache
def check_hooks(cls: type[Any], base: type[Any]) -> None:
    """A class derived from `base`, the base of all protocols, has hooks that a runtime can call."""
    if cls is base:
        return
    _check_dataclass(cls)
    for name in (*_AWAITED, *_CALLED):
        hook = inspect.getattr_static(cls, name)
        if hook is not inspect.getattr_static(base, name):
            _check_hook(cls, name, hook)
    misspelt = [
        name for name, given in vars(cls).items() if inspect.iscoroutinefunction(given) and name not in _AWAITED
    ]
    if cls.round is base.round and misspelt:
        raise ProtocolError(
            f"{cls.__name__} must say what an agent does in a round.",
            f"no 'round', but '{misspelt[0]}', at {show_line(getattr(cls, misspelt[0]).__code__)}",
            "Write: async def round(self, me, t).",
        )
    if not isinstance(cls.needs, Ability):
        raise ProtocolError(
            f"{cls.__name__}.needs must be an ability.", shown(cls.needs), "Example: needs = cd.Ability.GRADIENTS."
        )
    if cls.topology not in KINDS:
        raise ProtocolError(
            f"{cls.__name__}.topology must be one of {', '.join(KINDS)}.",
            shown(cls.topology),
            f"{nearest(str(cls.topology), KINDS)} Any other graph is given to the federation: topology=...",
        )


def _check_dataclass(cls: type[Any]) -> None:
    own = vars(cls)
    declared = [name for name, given in own.items() if isinstance(given, dataclasses.Field)]
    if "__dataclass_fields__" not in own and declared:
        raise ProtocolError(
            f"{cls.__name__} must be a frozen dataclass, so that its settings are checked.",
            f"the setting '{declared[0]}' of a plain class, in {_place(cls)}",
            _DECORATOR,
        )


def _check_hook(cls: type[Any], name: str, hook: Any) -> None:
    is_awaited, parameters = name in _AWAITED, {**_AWAITED, **_CALLED}[name]
    form = f"{'async ' if is_awaited else ''}def {name}({parameters})"
    if not inspect.isfunction(hook):
        raise ProtocolError(f"{name} of {cls.__name__} must be a method.", shown(hook), f"Write: {form}.")
    place = show_line(hook.__code__)
    given = f"def {name}{inspect.Signature([_bare(each) for each in inspect.signature(hook).parameters.values()])}"
    found, do = "", f"Write: {form}."
    if inspect.isasyncgenfunction(hook) or inspect.isgeneratorfunction(hook):
        found, do = f"a 'yield' in it, at {place}", "Write 'await me. ...' instead of 'yield'."
    elif inspect.iscoroutinefunction(hook) and not is_awaited:
        found = f"async {given}, at {place}"
    elif is_awaited and not inspect.iscoroutinefunction(hook):
        found = f"{given}, at {place}"
    else:
        try:
            inspect.signature(hook).bind(*parameters.split(", "))
        except TypeError:
            found = f"{'async ' if is_awaited else ''}{given}, at {place}"
    if found:
        raise ProtocolError(f"{name} of {cls.__name__} must be: {form}.", found, do)


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(annotation=inspect.Parameter.empty)


def _place(cls: type[Any]) -> str:
    """The file of a class, or its module where it has none."""
    return str(getattr(sys.modules.get(cls.__module__), "__file__", None) or f"the module '{cls.__module__}'")


async def run_hook(me: HasCalls, hook: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> None:
    """Call a hook for a node; whatever the protocol leaves undone or returns is an error with its line."""
    returned = await hook(me, *arguments)
    me.check_awaited()
    if returned is not None:
        name, code = hook.__name__, getattr(hook, "__code__", None)
        where = "" if code is None else f", from {show_line(code)}"
        raise ProtocolError(
            f"{name} must return nothing.",
            f"{shown(returned)}{where}",
            "Keep it in me.state, or send it; me.measure and me.remark are for reports.",
        )


def run_serve(protocol: Any, me: Any, sender: str, message: Any) -> Mapping[str, Any] | None:
    """The relay's answer to one message; anything else is an error with its line."""
    answer = protocol.serve(me, sender, message)
    if answer is not None and not isinstance(answer, Mapping):
        raise ProtocolError(
            "serve must return a message, a table of items, or None.",
            f"{shown(answer)}, from {show_line(type(protocol).serve.__code__)}",
            "Write: return cd.Message.of(name=value).",
        )
    return answer


def own_files(protocol: Any) -> frozenset[str]:
    """The files that a protocol's own classes are written in."""
    classes = [cls for cls in type(protocol).__mro__ if not cls.__module__.startswith(("codistill.", "builtins"))]
    functions = [given for cls in classes for given in vars(cls).values() if inspect.isfunction(given)]
    return frozenset(function.__code__.co_filename for function in functions) - {"<string>"}
