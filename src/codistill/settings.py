"""Hyper-parameters as fields of frozen dataclasses: documented once, checked in one place.

`setting` declares a field with its help text and its bounds; `check_settings` validates an instance against
them. Recipes, the command line and the documentation read the same metadata. A class that derives from
`Settings` says which arguments it takes when it is given others.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from codistill.arguments import check_call
from codistill.errors import RecipeError, nearest

S = TypeVar("S")
LARGEST = (1 << 63) - 1  # integer that arrays and libraries can count with
_evaluated: dict[type[Any], dict[str, Any]] = {}


class SettingsType(ABCMeta):
    """The type of classes of settings: their arguments are checked before an instance is made."""

    if not TYPE_CHECKING:  # for type checkers the arguments are those of the dataclass

        def __call__(cls, *values: Any, **named: Any) -> Any:
            """Make an instance, unless an argument is unknown or missing."""
            if dataclasses.is_dataclass(cls):
                _check_arguments(cls, values, named)
                named = _other_defaults(cls, named) | named
            return super().__call__(*values, **named)

        @property
        def __signature__(cls) -> inspect.Signature:
            """The signature of the dataclass, for help texts."""
            _self, *others = inspect.signature(cls.__init__).parameters.values()
            return inspect.Signature(others)


class Settings(metaclass=SettingsType):
    """Base of dataclasses of settings: an unknown argument is refused with the name that was probably meant."""

    __slots__ = ()


def _check_arguments(cls: type[Any], values: Sequence[Any], named: Mapping[str, Any]) -> None:
    helps = {field.name: field.metadata.get("help", "") for field in dataclasses.fields(cls)}
    parameters = tuple(cls.__signature__.parameters.values())
    check_call(cls.__name__, parameters, values, named, helps)


def _other_defaults(cls: type[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that another setting changes, where that one is given and is not its own default."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    rules = {name: field.metadata.get("with_other") for name, field in fields.items()}
    return {
        name: rule[1]
        for name, rule in rules.items()
        if rule is not None and rule[0] in named and named[rule[0]] != fields[rule[0]].default
    }


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
    bounds |= {"with_other": with_other}
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=bounds)
    return dataclasses.field(default=default, metadata=bounds)


def check_settings(instance: Any, owner: str = "") -> None:
    """Check the type and the bounds of every field of a dataclass instance; the error names the field."""
    hints = _hints(type(instance))
    for field in dataclasses.fields(instance):
        name = f"{owner}.{field.name}" if owner else field.name
        _check_value(field, hints[field.name], getattr(instance, field.name), name)


def check_setting(cls: type[Any], key: str, value: Any, name: str) -> None:
    """Check a value for the field `key` of a dataclass; the error calls it `name`."""
    field = next(field for field in dataclasses.fields(cls) if field.name == key)
    _check_value(field, _hints(cls)[key], value, name)


def _check_value(field: dataclasses.Field[Any], hint: Any, value: Any, name: str) -> None:
    allowed = _alternatives(hint)
    if not _is_kind(value, allowed):
        found = next((item for kind in allowed for item in _wrong_items(value, kind)), value)
        raise RecipeError(f"{name} must be {_names(allowed)}.", f"{found!r}", f"Change it. It is: {_help(field)}")
    each = "a list of numbers, each " if isinstance(value, tuple) else ""
    for item in value if isinstance(value, tuple) else (value,):  # a bound of a list is one of its items
        must = _broken_bound(item, field.metadata)
        if must:
            raise RecipeError(f"{name} must be {each}{must}.", f"{item!r}", f"Change it. It is: {_help(field)}")


def from_table(cls: type[Any], table: Mapping[str, Any], owner: str) -> Any:
    """Build the dataclass `cls` from a recipe table; the error for an unknown key names the most similar one."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in table:
        if key not in fields:
            raise RecipeError(f"[{owner}] may only hold known keys.", f"'{key}'", nearest(key, fields))
    for name, field in fields.items():
        if _is_required(field) and name not in table:
            raise RecipeError(f"[{owner}] must say '{name}'.", "no such key", f"Add it. It is: {_help(field)}")
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
    return any(_is_one_kind(value, kind) for kind in kinds)


def _is_one_kind(value: Any, kind: Any) -> bool:
    return isinstance(value, typing.get_origin(kind) or kind) and not _wrong_items(value, kind)


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
    return str(field.metadata.get("help") or "no description") + "."


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
