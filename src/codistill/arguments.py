"""Arguments of the classes and functions that users call: an unknown or missing one is an error with a way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from codistill.errors import ArgumentError, nearest

P = ParamSpec("P")
T = TypeVar("T")
OF_THE_MODEL = ("lr", "optimiser", "weight_decay", "momentum", "precision")
_OF_THE_PROTOCOL = ("local_epochs", "local_steps", "temperature", "aggregate")
_OF_THE_FEDERATION = (
    "seed", "public", "test", "scores", "topology", "faults", "compression", "participation", "safeguard", "clock",
)  # fmt: skip
_OF_THE_RUN = (
    "rounds", "runtime", "workers", "evaluate_every", "features_at", "alone", "folder", "resume", "progress",
    "observers",
)  # fmt: skip
# Where that is said what people look for in another place.
_ELSEWHERE = {
    **{key: f"It belongs to the model: codistill.TorchLearner(module, {key}=...)." for key in OF_THE_MODEL},
    **{key: f"It belongs to the protocol, as in codistill.FedMD({key}=...)." for key in _OF_THE_PROTOCOL},
    **{key: f"Say it to the federation: Federation(..., {key}=...)." for key in _OF_THE_FEDERATION},
    **{key: f"Say it where the protocol is run: federation.run({key}=...)." for key in _OF_THE_RUN},
    "device": "Of one model: codistill.TorchLearner(module, device=...); of all others: federation.run(device=...).",
    "epochs": "Of a fit: codistill.TorchLearner(module, epochs=...); of a round: codistill.FedMD(local_epochs=...).",
}


def checked_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function, or an `__init__`, refuse arguments that it does not take, with what was probably meant."""
    name = function.__qualname__.removesuffix(".__init__")
    bound = 1 if "." in function.__qualname__ else 0  # a method: its object comes first

    @wraps(function)
    def call(*values: P.args, **named: P.kwargs) -> T:
        check_call(name, _parameters(function)[bound:], values[bound:], named)
        return function(*values, **named)

    return call


def check_call(
    name: str,
    parameters: Sequence[Parameter],
    values: Sequence[Any],
    named: Mapping[str, Any],
    helps: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise unless these values and named values are what the parameters take; `helps` say what some of them are."""
    names = [each.name for each in parameters if each.kind is not Parameter.VAR_KEYWORD]
    for key in named:
        if key not in names and len(names) == len(parameters):
            do = _ELSEWHERE.get(key) or (nearest(key, names) if names else "Leave it out.")
            raise ArgumentError(f"{name} takes only arguments that it has.", f"'{key}'", do)
    by_place = [each for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    if len(values) > len(by_place):
        some = ", ".join(f"{each.name}=..." for each in parameters if each not in by_place[: len(values)])
        raise ArgumentError(_by_place(name, len(by_place)), f"{values[len(by_place)]!r}"[:80], _write(name, some))
    placed = [each.name for each in by_place[: len(values)]]
    for key in placed:
        if key in named:
            raise ArgumentError(f"{name} takes each argument once.", f"'{key}' twice", "Remove one.")
    for each in _needed(parameters):
        if each.name not in {*named, *placed}:
            do = f"Add it. It is: {helps[each.name]}." if helps.get(each.name) else _write(name, _form(parameters))
            raise ArgumentError(f"{name} must be given '{each.name}'.", "no such argument", do)


@cache
def _parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())


def _by_place(name: str, count: int) -> str:
    if not count:
        return f"{name} takes its arguments by name."
    return f"{name} takes at most {count} argument{'s' if count > 1 else ''} by place."


def _form(parameters: Sequence[Parameter]) -> str:
    """Arguments that must be given, as one writes them."""
    named = Parameter.KEYWORD_ONLY
    return ", ".join(each.name + ("=..." if each.kind is named else "") for each in _needed(parameters))


def _needed(parameters: Sequence[Parameter]) -> list[Parameter]:
    return [each for each in parameters if each.default is Parameter.empty and each.kind is not Parameter.VAR_KEYWORD]


def _write(name: str, arguments: str) -> str:
    shown = arguments.split(", ")
    return f"Write {name}({', '.join(shown[:3])}{', ...' if len(shown) > 3 else ''})."
