"""Hyper-parameters as fields of frozen dataclasses: documented once, checked in one place.

`setting` declares a field with its help text and its bounds; `check_settings` validates an instance against
them. Recipes, the command line and the documentation read the same metadata. Classes that derive from `Settings`,
and functions decorated by `clear_argument_errors`, name the argument that was probably meant.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, ParamSpec, TypeVar

from codistill.core.errors import ArgumentError, RecipeError, nearest

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
LARGEST = (1 << 63) - 1  # integer that arrays and libraries can count with
_evaluated: dict[type[Any], dict[str, Any]] = {}


class _FieldSignature:
    """The signature of a class of settings: its fields."""

    def __get__(self, instance: Any, owner: type[Any]) -> Signature | None:
        is_own = owner.__init__ is not _initialise or not dataclasses.is_dataclass(owner)
        return None if is_own else _signature(owner)


class Settings:
    """Base of dataclasses of settings: an unknown argument is refused with the name that was probably meant."""

    __slots__ = ()
    __signature__ = _FieldSignature()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" not in vars(cls):
            cls.__init__ = _initialise  # type: ignore[method-assign]  # dataclass() keeps an __init__ that is there


def _initialise(self: Any, *values: Any, **named: Any) -> None:
    """Set the fields of a dataclass of settings: what is given, or else the default."""
    cls = type(self)
    given = bound_arguments(cls.__name__, _signature(cls), values, named)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for field in dataclasses.fields(cls):
        other, instead = field.metadata.get("with_other") or (None, None)
        if field.name in given:
            value = given[field.name]
        elif other in given and given[other] != defaults[other]:
            value = instead
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            value = field.default
        object.__setattr__(self, field.name, value)
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _signature(cls: type[Any]) -> Signature:
    parameters = [_parameter(field) for field in dataclasses.fields(cls) if field.init]
    return Signature(sorted(parameters, key=lambda each: each.kind))  # those by place come first


def _parameter(field: dataclasses.Field[Any]) -> Parameter:
    kind = Parameter.KEYWORD_ONLY if field.kw_only else Parameter.POSITIONAL_OR_KEYWORD
    default = Parameter.empty if _is_required(field) else field.default
    return Parameter(field.name, kind, default=default, annotation=field.type)


def _hints(cls: type[Any]) -> dict[str, Any]:
    """The types of a class's fields, evaluated once: that takes half a millisecond, and there may be many agents."""
    if cls not in _evaluated:
        _evaluated[cls] = typing.get_type_hints(cls)
    return _evaluated[cls]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    factory: Any = dataclasses.MISSING,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: Sequence[str] | None = None,
    with_other: tuple[str, Any] | None = None,
) -> Any:
    """Declare a field: its default, one line of help, and its bounds.

    `with_other`: the name of another field, and the default instead where that one is not its own default.
    """
    bounds = {"help": help, "at_least": at_least, "above": above, "at_most": at_most, "choices": choices}
    metadata = {**bounds, "with_other": with_other}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def check_settings(instance: Any, owner: str = "") -> None:
    """Check the type and the bounds of every field of a dataclass instance; the error names the field."""
    hints = _hints(type(instance))
    for field in dataclasses.fields(instance):
        name = f"{owner}.{field.name}" if owner else field.name
        _check_value(field, hints[field.name], getattr(instance, field.name), name)


def read_setting(cls: type[Any], key: str, value: Any, name: str) -> Any:
    """A value for the field `key` of a dataclass, written as in a recipe and checked; errors call it `name`."""
    field = next(field for field in dataclasses.fields(cls) if field.name == key)
    value = _widen(value, _hints(cls)[key])
    _check_value(field, _hints(cls)[key], value, name)
    return value


def _check_value(field: dataclasses.Field[Any], hint: Any, value: Any, name: str) -> None:
    allowed = _alternatives(hint)
    if not _is_kind(value, allowed):
        found = next((item for kind in allowed for item in _wrong_items(value, kind)), value)
        raise RecipeError(f"{name} must be {_names(allowed)}.", f"{found!r}", f"Change its value ({_help(field)}).")
    each = "a list of numbers, each " if isinstance(value, tuple) else ""
    for item in value if isinstance(value, tuple) else (value,):  # a bound of a list is one of its items
        must = _broken_bound(item, field.metadata)
        if must:
            raise RecipeError(f"{name} must be {each}{must}.", f"{item!r}", f"Change its value ({_help(field)}).")


def kinds_of(cls: type[Any], key: str) -> tuple[Any, ...]:
    """The types that the field `key` of a dataclass takes."""
    return _alternatives(_hints(cls)[key])


def from_table(cls: type[Any], table: Mapping[str, Any], owner: str) -> Any:
    """Build the dataclass `cls` from a recipe table; the error for an unknown key names the most similar one."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in table:
        if key not in fields:
            do = nearest(key, fields) if fields else "Remove it."
            raise RecipeError(f"Unknown option '{key}' for [{owner}].", "", do)
    for name, field in fields.items():
        if _is_required(field) and name not in table:
            raise RecipeError(f"[{owner}] needs '{name}'.", "", f"Add it: {_help(field)}.")
    hints = _hints(cls)
    return cls(**{key: _widen(value, hints[key]) for key, value in table.items()})


def replaced(instance: S, values: Mapping[str, Any]) -> S:
    """A dataclass instance with other values of some fields, written as in a recipe."""
    hints = _hints(type(instance))
    made: S = dataclasses.replace(instance, **{key: _widen(value, hints[key]) for key, value in values.items()})  # type: ignore[type-var]
    return made


def _widen(value: Any, hint: Any) -> Any:
    """TOML writes 1 for the float 1.0, and lists for tuples."""
    kinds = _alternatives(hint)
    if type(value) is int and float in kinds and int not in kinds and abs(value) < 1 << 1023:  # what a float can hold
        return float(value)
    if isinstance(value, list) and any(typing.get_origin(kind) is tuple for kind in kinds):
        return tuple(value)
    return value


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _is_kind(value: Any, kinds: tuple[Any, ...]) -> bool:
    if Any in kinds or object in kinds:
        return True
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int) and float in kinds:
        return True
    fitting = [kind for kind in kinds if isinstance(value, typing.get_origin(kind) or kind)]
    return any(not _wrong_items(value, kind) for kind in fitting)


def _wrong_items(value: Any, kind: Any) -> list[Any]:
    """Items of a list `tuple[kind, ...]`, or values of a table `dict[str, kind]`, that are not of their kind."""
    inner = typing.get_args(kind)
    if isinstance(value, dict) and typing.get_origin(kind) is dict and len(inner) == 2:
        return [each for each in value.values() if not _is_kind(each, _alternatives(inner[1]))]
    if isinstance(value, tuple) and Ellipsis in inner:
        return [each for each in value if not _is_kind(each, _alternatives(inner[0]))]
    return []


def _broken_bound(value: Any, bounds: Mapping[str, Any]) -> str:
    if bounds.get("choices") is not None and value is not None and value not in bounds["choices"]:
        return "one of " + ", ".join(bounds["choices"])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"at most {LARGEST} in absolute value"
    if bounds.get("at_least") is not None and value < bounds["at_least"]:
        return f"at least {bounds['at_least']}"
    if bounds.get("above") is not None and value <= bounds["above"]:
        return f"above {bounds['above']}"
    if bounds.get("at_most") is not None and value > bounds["at_most"]:
        return f"at most {bounds['at_most']}"
    return ""


def _help(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("help") or "no description")


def _names(kinds: Sequence[Any]) -> str:
    words: dict[Any, str] = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "true or false",
        type(None): "unset",
        dict: "a table",
        list: "a list",
        tuple: "a list",
        tuple[str, ...]: "a list of strings",
        tuple[float, ...]: "a list of numbers",
        tuple[int, ...]: "a list of integers",
        tuple[list[str], ...]: "a list of lists of strings",
        tuple[list[float], ...]: "a list of lists of numbers",
        dict[str, str]: "a table of strings",
        dict[str, float]: "a table of numbers",
    }
    return " or ".join(
        words.get(kind) or words.get(typing.get_origin(kind)) or str(getattr(kind, "__name__", kind)) for kind in kinds
    )


# Arguments of classes and functions: an unknown or missing one is an error that says what to write.

OF_THE_MODEL = ("lr", "optimiser", "weight_decay", "momentum", "precision")
_OF_THE_PROTOCOL = ("local_epochs", "local_steps", "temperature", "aggregate")
_OF_THE_FEDERATION = (
    "seed", "public", "test", "scores", "topology", "faults", "compression", "participation", "safeguard", "clock",
)  # fmt: skip


def clear_argument_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function, or an `__init__`, name the argument that was probably meant if it gets an unknown one."""
    name = function.__qualname__.removesuffix(".__init__")
    of_method = 1 if "." in function.__qualname__ else 0  # its object comes first
    signature = inspect.signature(function)
    checked = signature.replace(parameters=[*signature.parameters.values()][of_method:])

    @wraps(function)
    def call(*values: P.args, **named: P.kwargs) -> T:
        bound_arguments(name, checked, values[of_method:], named)
        return function(*values, **named)

    return call


def takes_fields(cls: type[Any], leave_out: Iterable[str] = ()) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function whose `**options` are the fields of a dataclass: they are in its signature and its help."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        own = inspect.signature(function)
        kept = [each for each in own.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        fields = [each for each in dataclasses.fields(cls) if each.name not in {*leave_out, *own.parameters}]
        options = [_parameter(field).replace(kind=Parameter.KEYWORD_ONLY) for field in fields]
        function.__signature__ = own.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
        shown = "".join(
            f"\n        {each.name}: {each.metadata['help']} (default: {each.default!r})." for each in fields
        )
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n    Options:{shown}\n"
        return clear_argument_errors(function)

    return decorate


def bound_arguments(name: str, signature: Signature, values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; the error for one that does not fit says what to write."""
    with suppress(TypeError):
        return signature.bind(*values, **named).arguments
    parameters = list(signature.parameters.values())
    names = [each.name for each in parameters]
    open_ended = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)
    unknown = [key for key in named if key not in names and not open_ended]
    if unknown:
        do = _elsewhere(unknown[0]) or (nearest(unknown[0], names) if names else "Remove it.")
        raise ArgumentError(f"{name} got an unexpected argument '{unknown[0]}'.", "", do)
    by_place = [each for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    if len(values) > len(by_place):
        others = ", ".join([f"{each.name}=..." for each in parameters if each not in by_place][:3])
        count = f"at most {len(by_place)}" if by_place else "no"
        found = f"{values[len(by_place)]!r}"[:80]
        raise ArgumentError(
            f"{name} takes {count} positional argument{'s' if len(by_place) != 1 else ''}.",
            found,
            f"Write {name}({', '.join(['...'] * len(by_place) + [others])})." if others else "Remove it.",
        )
    placed = [each.name for each in by_place[: len(values)]]
    twice = [key for key in placed if key in named]
    if twice:
        raise ArgumentError(f"{name} got the argument '{twice[0]}' twice.", "", "Remove one.")
    empty, var = Parameter.empty, Parameter.VAR_KEYWORD
    needed = [each for each in parameters if each.default is empty and each.kind is not var]
    missing = next(each.name for each in needed if each.name not in {*named, *placed})
    form = ", ".join(each.name + "=..." * (each.kind is Parameter.KEYWORD_ONLY) for each in needed)
    raise ArgumentError(f"{name} needs the argument '{missing}'.", "", f"Write {name}({form}).")


def _elsewhere(key: str) -> str | None:
    """Where to pass an argument that people look for in another place."""
    from codistill.core.spec import OPTIONS

    if key == "device":
        return (
            "Pass it to one model: codistill.TorchLearner(module, device=...); or to all: federation.run(device=...)."
        )
    if key == "epochs":
        return "Of a fit: codistill.TorchLearner(module, epochs=...); of a round: codistill.FedMD(local_epochs=...)."
    if key in OF_THE_MODEL:
        return f"Pass it to the model: codistill.TorchLearner(module, {key}=...)."
    if key in _OF_THE_PROTOCOL:
        return f"Pass it to the protocol, as in codistill.FedMD({key}=...)."
    if key in _OF_THE_FEDERATION:
        return f"Pass it to Federation(..., {key}=...)."
    if key in OPTIONS or key in ("folder", "resume", "progress", "observers"):
        return f"Pass it to federation.run({key}=...)."
    return None
