"""What an agent computes, on the device of its learner: protocols are written for one memory, and know of no device.

While an agent computes, `OnDevice` stands around torch. Tensors that are made are made on the device; a tensor in host
memory that meets one on the device is copied there; `.numpy()` copies to host memory. What is drawn is drawn by torch's
generator in host memory, so batches, initial weights and samples are the same on every device. An agent on the CPU
computes without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from codistill.errors import LearnerError

HOST = torch.device("cpu")

_MADE = {
    torch.tensor, torch.as_tensor, torch.asarray, torch.empty, torch.zeros, torch.ones, torch.full, torch.arange,
    torch.linspace, torch.logspace, torch.eye, torch.empty_strided, torch.tril_indices, torch.triu_indices,
}  # fmt: skip
_DRAWN = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.rand_like, torch.randn_like,
    torch.randint_like, torch.bernoulli, torch.multinomial, torch.poisson, torch.Tensor.bernoulli,
    torch.Tensor.multinomial,
}  # fmt: skip
_FILLED = {
    torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.bernoulli_,
    torch.Tensor.exponential_, torch.Tensor.geometric_, torch.Tensor.cauchy_, torch.Tensor.log_normal_,
    *(given for name, given in vars(torch.nn.init).items() if name[0] != "_" and name.endswith("_")),
}  # fmt: skip
_TO_HOST: set[Callable[..., Any]] = {torch.Tensor.numpy, torch.Tensor.__array__}
# These take tensors of two devices as they are: they copy, or go along a graph in which a copy is no leaf.
_APART = {
    torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.type_as, torch.Tensor.set_, torch.Tensor.backward,
    torch.autograd.grad, torch.autograd.backward,
}  # fmt: skip


class _Active(threading.local):
    mode: OnDevice | None = None


_active = _Active()


class OnDevice(TorchFunctionMode):
    """While it is entered, this thread computes on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._before: list[OnDevice | None] = []

    def __enter__(self) -> OnDevice:
        self._before.append(_active.mode)
        super().__enter__()  # type: ignore[no-untyped-call]
        _active.mode = self
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _active.mode = self._before.pop()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if isinstance(error, torch.OutOfMemoryError):
            raise LearnerError(
                f"What an agent computes must fit into the memory of {self.device}.",
                str(error).partition(". ")[0][:200],
                "Take smaller batches or a smaller model, let fewer agents share the device, or give some of them "
                'device = "cpu".',
            ) from None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function of torch as this module says."""
        kwargs = kwargs or {}
        if _active.mode is not self:
            return func(*args, **kwargs)
        if func in _MADE:
            return func(*args, **({"device": self.device} | kwargs if kwargs.get("device") is None else kwargs))
        if func in _DRAWN:
            return self._draw(func, args, kwargs)
        if func in _FILLED and args and args[0].device != HOST:
            return _fill(func, args, kwargs)
        if func in _TO_HOST:
            return func(args[0].cpu(), *args[1:], **kwargs)
        if len(args) + len(kwargs) > 1 or any(isinstance(each, list | tuple) for each in args):
            args, kwargs = self._together(func, args, kwargs)
        return func(*args, **kwargs)

    def _draw(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("device") is not None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)  # whoever says so much has chosen
        if func in (torch.rand_like, torch.randn_like, torch.randint_like):
            kwargs = {**kwargs, "device": HOST}
        args, kwargs = _mapped(args, lambda each: each.cpu()), _mapped(kwargs, lambda each: each.cpu())
        return func(*args, **kwargs).to(self.device)

    def _together(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments on one device: this one, or that of the tensor that is changed in place."""
        devices = {each.device for each in _tensors((args, kwargs))}
        if len(devices) < 2 or func in _APART:
            return args, kwargs
        name = getattr(func, "__name__", "")
        if name == "__set__":  # of an attribute, such as .data
            return args, kwargs
        changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        target = args[0].device if changes and isinstance(args[0], torch.Tensor) else self.device

        def moved(each: torch.Tensor) -> torch.Tensor:
            return each.to(target) if each.device != target and HOST in (each.device, target) else each

        return _mapped(args, moved), _mapped(kwargs, moved)


def current_device() -> torch.device | None:
    """The device on which this thread computes for an agent; None: in host memory."""
    return None if _active.mode is None else _active.mode.device


@contextmanager
def in_host_memory() -> Iterator[None]:
    """For a while, torch does in this thread as if no agent computed on a device."""
    before, _active.mode = _active.mode, None
    try:
        yield
    finally:
        _active.mode = before


def uploaded(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the device on which this thread computes for an agent; in host memory, the tensor itself."""
    return tensor if _active.mode is None else tensor.to(_active.mode.device)


def seed_device(number: int) -> None:
    """Seed the device on which this thread computes: layers draw there, such as dropout."""
    if _active.mode is None:
        return
    device, module = _active.mode.device, torch.get_device_module(_active.mode.device)
    generators = getattr(module, "default_generators", None)
    if generators is not None:
        generators[device.index or 0].manual_seed(number)
    else:
        module.manual_seed(number)


def _fill(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    target: torch.Tensor = args[0]
    with torch.no_grad():
        draft = target.detach().cpu()
        func(draft, *args[1:], **kwargs)
        return target.copy_(draft)


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {name: _mapped(each, change) for name, each in tree.items()}
    if isinstance(tree, list) or type(tree) is tuple:
        return type(tree)(_mapped(each, change) for each in tree)
    return tree
