"""A second device for torch on a machine that has none: its memory is apart, and it computes as the CPU does.

torch lets a device be written in Python (the backend PrivateUse1). A tensor on it wraps one in host memory. As on a
GPU, an operation that gets tensors of two devices is refused, `.numpy()` is refused, and what is drawn there comes from
a generator of its own. Otherwise it computes with the kernels of the CPU: so a run on it must equal one on the CPU to
the bit, and every difference is a defect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

KIND, COUNT = "second", 1
_aten = torch.ops.aten


class Counted:
    """What has happened on the devices in this process."""

    operations = 0
    to_host: list[int] = []  # elements of each tensor that was copied to host memory  # noqa: RUF012


class Source:
    """A generator of the device; from one seed it draws other numbers than that of the CPU, as a GPU's does."""

    def __init__(self) -> None:
        self.state = torch.Generator().get_state()

    def manual_seed(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed ^ 0x5EC0).get_state()


class Device:
    """torch.second: what torch and codistill ask of a device."""

    default_generators = [Source() for _ in range(COUNT)]  # noqa: RUF012

    @classmethod
    def device_count(cls) -> int:
        return len(cls.default_generators)

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        for each in cls.default_generators:
            each.manual_seed(seed)


_setup_privateuseone_for_python_backend(KIND, backend_module=Device())


class SecondTensor(torch.Tensor):
    """A tensor on the second device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, index: int) -> Any:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=torch.device(KIND, index),
        )  # fmt: skip

    def __init__(self, inner: torch.Tensor, index: int) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{KIND}:{self.device.index}({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _inner(given: Any) -> Any:
    if isinstance(given, SecondTensor):
        return given.inner
    return torch.device("cpu") if isinstance(given, torch.device) else given


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    Counted.operations += 1
    if func is _aten.copy_.default:
        _count(args[1], args[0].device)
        _inner(args[0]).copy_(_inner(args[1]))
        return args[0]
    flat, form = tree_flatten((args, kwargs))
    devices = [each for each in flat if isinstance(each, torch.device)]
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    places = {each.device for each in tensors if each.dim() or isinstance(each, SecondTensor)}
    if func is _aten._to_copy.default:
        places = {devices[0] if devices else args[0].device}
        _count(args[0], *places)
    elif devices:
        places = set(devices)
    if len(places) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {places} ({func})")
    place = next(iter(places))
    inner_args, inner_kwargs = tree_unflatten([_inner(each) for each in flat], form)
    with _own_generator(place, drawn=torch.Tag.nondeterministic_seeded in func.tags):
        answer = func(*inner_args, **inner_kwargs)
    if place.type != KIND:
        return answer
    answer = tree_map(lambda each: SecondTensor(each, place.index or 0) if type(each) is torch.Tensor else each, answer)
    return return_and_correct_aliasing(func, args, kwargs, answer)


def _count(source: torch.Tensor, target: torch.device) -> None:
    if isinstance(source, SecondTensor) and target.type == "cpu":
        Counted.to_host.append(source.numel())


@contextmanager
def _own_generator(place: torch.device, *, drawn: bool) -> Iterator[None]:
    if not drawn or place.type != KIND:
        yield
        return
    own, host = Device.default_generators[place.index or 0], torch.default_generator
    before = host.get_state()
    host.set_state(own.state)
    try:
        yield
    finally:
        own.state = host.get_state()
        host.set_state(before)


def _implementation(operation: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(operation, args, kwargs)


_library = torch.library.Library("aten", "IMPL")  # kept: what it registers ends with it
for _name, _operation in {
    "empty.memory_format": _aten.empty.memory_format,
    "empty_strided": _aten.empty_strided.default,
    "copy_": _aten.copy_.default,
    "_to_copy": _aten._to_copy.default,
}.items():
    _library.impl(_name, _implementation(_operation), "PrivateUse1")
