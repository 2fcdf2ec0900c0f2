"""Architectures by name, so that a model can be rebuilt elsewhere from plain values and its weights.

An architecture is a builder `(shape, classes, **options) -> nn.Module`: `shape` is the shape of one sample,
`(channels, height, width)` or `(d,)`, and every option has a default and a plain value.
"""

from __future__ import annotations

import inspect
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from codistill.core.errors import LearnerError, nearest

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


@dataclass(frozen=True)
class Architecture:
    """What it takes to build a module again: plain values only, so it may travel in a message."""

    name: str
    shape: tuple[int, ...]
    classes: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Entry:
    builder: Callable[..., nn.Module]
    smallest_image: int | None
    options: Mapping[str, inspect.Parameter]

    def takes(self, shape: tuple[int, ...]) -> bool:
        if self.smallest_image is None:
            return True
        return len(shape) == 3 and min(shape[1:]) >= self.smallest_image


_entries: dict[str, _Entry] = {}


def register_architecture(name: str, *, smallest_image: int | None = None) -> Callable[[Builder], Builder]:
    """Register the decorated builder as `name`.

    `smallest_image` is the least height and width of the images that it takes; without it, the builder is
    given any shape. A builder raises ValueError for an option whose value it cannot use.
    """

    def register(builder: Builder) -> Builder:
        known = _entries.get(name)
        if known and known.builder is not builder:
            raise LearnerError(
                "An architecture's name must stand for one builder.",
                f"'{name}' is already {known.builder.__module__}.{known.builder.__qualname__}",
                "Choose another name.",
            )
        _entries[name] = _Entry(builder, smallest_image, _options_of(name, builder))
        return builder

    return register


def names() -> list[str]:
    return sorted(_entries)


def describe(name: str) -> str:
    """The first line of an architecture's docstring."""
    return (_entry(name).builder.__doc__ or "").strip().partition("\n")[0]


def defaults(name: str) -> dict[str, Any]:
    return _checked_options(name, {})


def build(name: str, shape: Sequence[int], classes: int, **options: Any) -> nn.Module:
    """Build `name` for samples of `shape`; the module's `architecture` says how to build it again."""
    entry, sides, numbers = _entry(name), _sizes(shape), _sizes((classes,))
    if not sides:
        raise LearnerError(
            f"'{name}' needs the shape of one sample, in positive integers.",
            repr(shape),
            "Give (channels, height, width) for images or (d,) for tables.",
        )
    if not numbers:
        must = f"'{name}' needs the number of classes, a positive integer."
        raise LearnerError(must, repr(classes), "Give at least 1.")
    recipe = Architecture(name, sides, numbers[0], _checked_options(name, options))
    if not entry.takes(recipe.shape):
        raise LearnerError(
            f"'{name}' takes images (channels, height, width) of at least "
            f"{entry.smallest_image} x {entry.smallest_image}.",
            f"samples of shape {recipe.shape}",
            f"This shape suits: {', '.join(n for n in names() if _entries[n].takes(recipe.shape))}.",
        )
    try:
        module = entry.builder(recipe.shape, recipe.classes, **recipe.options)
    except ValueError as reason:
        raise LearnerError(
            f"'{name}' must be able to use what it is given.",
            _written({"shape": recipe.shape, "classes": recipe.classes, **recipe.options}),
            f"The builder says: {reason}.",
        ) from reason
    if not isinstance(module, nn.Module):
        raise LearnerError(
            f"The builder of '{name}' must return a torch.nn.Module.",
            type(module).__name__,
            "Return the module from the function that is registered.",
        )
    # torch's stub allows tensors and modules only; any other attribute is kept as it is.
    module.architecture = recipe  # type: ignore[assignment]
    return module


def _entry(name: str) -> _Entry:
    if name not in _entries:
        raise LearnerError("An architecture must be registered.", repr(name), nearest(str(name), _entries))
    return _entries[name]


def _options_of(name: str, builder: Callable[..., nn.Module]) -> dict[str, inspect.Parameter]:
    try:
        signature = inspect.signature(builder, eval_str=True)
    except NameError:  # an annotation that only a type checker can see: its option stays unchecked
        signature = inspect.signature(builder)
    parameters = list(signature.parameters.values())
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    usable = all(p.kind in named and _is_plain(p.default) for p in parameters[2:])
    if len(parameters) < 2 or not usable:
        raise LearnerError(
            f"The builder of '{name}' must take (shape, classes) and named options with plain defaults.",
            str(signature),
            "Write it as: def builder(shape, classes, width=16).",
        )
    return {p.name: p for p in parameters[2:]}


def _sizes(values: Sequence[int]) -> tuple[int, ...]:
    """The values as integers, or nothing unless all of them are positive integers."""
    try:
        sizes = tuple(operator.index(value) for value in values)
    except TypeError:
        return ()
    return sizes if all(size >= 1 for size in sizes) else ()


def _checked_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    known = _entry(name).options
    values = {option: parameter.default for option, parameter in known.items()}
    for option, value in given.items():
        if option not in known:
            do = nearest(option, known) if known else f"Leave '{option}' out."
            raise LearnerError(_options_line(name), f"'{option}'", do)
        values[option] = _without_lists(value)
        if not (_is_plain(values[option]) and _fits(values[option], known[option].annotation)):
            raise LearnerError(_options_line(name), _written({option: value}), f"Give '{option}' a value of its type.")
    return values


def _options_line(name: str) -> str:
    options = ", ".join(str(parameter) for parameter in _entry(name).options.values())
    return f"'{name}' takes these options: {options}." if options else f"'{name}' takes no options."


def _written(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{option}={value!r}" for option, value in options.items())


def _without_lists(value: Any) -> Any:
    """TOML and JSON write lists where a builder takes tuples."""
    return tuple(_without_lists(item) for item in value) if isinstance(value, list | tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value has the annotated type; an annotation unknown here fits everything."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, kind) for kind in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if hint in (Any, inspect.Parameter.empty) or not isinstance(hint, type):
        return True
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)
