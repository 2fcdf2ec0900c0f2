"""The devices of this machine: which exist, which agent uses which, and running torch code on one of them.

Nothing here initialises CUDA in this process, which could not be forked afterwards.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from codistill.core.errors import LearnerError, RecipeError, RuntimeFault

AUTO, CPU = "auto", "cpu"
DEVICE_HELP = "where torch modules compute: cpu, cuda (spread over all GPUs), cuda:1, mps; auto: a GPU if there is one"
_PREFERRED = ("cuda", "mps")  # by "auto", in this order
_ROOM = 0.5  # share of a device's free memory for weights, gradients and optimiser state; the rest is for activations
_CONTEXT = 512 << 20  # bytes that each process takes on a device before it computes anything
_BOUND = "set_per_process_memory_fraction"


@dataclass(frozen=True)
class DeviceRequest:
    """The device that an agent asks for, and the bytes that its model takes there."""

    agent: str
    device: str
    bytes: int = 0


Free = Callable[[str, int], "list[int | None]"]


def check_name(device: Any) -> None:
    """Raise unless this is the name of a device, on this machine or another."""
    with suppress(RuntimeError, TypeError):
        if device in (AUTO, CPU) or (isinstance(device, str) and torch.device(device).type != "meta"):
            return
    raise RecipeError(
        "device must be the name of a torch device.",
        f"{device!r}"[:80],
        'Use "auto", "cpu", "cuda", "cuda:1" or "mps".',
    )


def check_device(device: Any) -> None:
    check_name(device)
    if device == AUTO:
        return
    named = torch.device(device)
    if (named.index or 0) < device_count(named.type):
        return
    there = [CPU, *(name for kind in dict.fromkeys((*_PREFERRED, named.type)) for name in _names(kind) if name != CPU)]
    built = " (this torch is built without CUDA)" if named.type == "cuda" and torch.version.cuda is None else ""
    raise RecipeError(
        f'This machine must have the device "{device}".',
        f"torch has {', '.join(there)}{built}",
        'Choose one of these, or "auto": a GPU if there is one, otherwise the CPU.',
    )


def device_count(kind: str) -> int:
    if kind == CPU:
        return 1
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    try:
        return int(torch.get_device_module(kind).device_count())  # asks CUDA's driver, without initialising CUDA
    except (RuntimeError, AttributeError):
        return 0


def _names(kind: str) -> list[str]:
    return [f"{kind}:{i}" for i in range(device_count(kind))] if kind != "mps" else ["mps"] * device_count(kind)


def resolved(device: str | None) -> torch.device:
    """The device of a name, for a model outside of a run; None: the CPU."""
    if device is None or device == CPU:
        return torch.device(CPU)
    check_device(device)
    named = torch.device(_best_kind() if device == AUTO else device)
    return named if named.index is not None or named.type in (CPU, "mps") else torch.device(named.type, 0)


@cache
def has_mixed_precision(device: torch.device) -> bool:
    """Whether a device supports bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return torch.amp.is_autocast_available(device.type)


def _best_kind() -> str:
    return next((kind for kind in _PREFERRED if device_count(kind)), CPU)


# --- assigning agents to devices


def assign(
    requests: Sequence[DeviceRequest], processes: int = 1, free: Free | None = None, sharing: int = 1
) -> list[str]:
    """A device for each agent. Agents that ask for a kind, such as "cuda", are spread over all its devices.

    An agent goes to the device with the fewest agents so far that has enough memory for its model. If none has,
    "auto" falls back to the CPU, and any other name is an error. `processes`: how many processes take memory.
    `sharing`: how many processes share a device while each places only its own agents.
    """
    for device in dict.fromkeys(request.device for request in requests):
        check_device(device)
    named = [torch.device(_best_kind() if request.device == AUTO else request.device) for request in requests]
    found = [CPU] * len(requests)
    for kind in dict.fromkeys(device.type for device in named if device.type != CPU):
        mine = [i for i, device in enumerate(named) if device.type == kind]
        names = _names(kind)
        has = (free or free_memory)(kind, len(names))
        there = max(sharing, -(-min(processes, len(mine)) // len(names)))  # processes on each device
        room = [None if each is None else _ROOM / sharing * max(0, each - there * _CONTEXT) for each in has]
        fixed = [named[i].index for i in mine]
        for i, place in zip(mine, spread([requests[i].bytes for i in mine], room, fixed), strict=True):
            if place is None and requests[i].device != AUTO:
                need = sum(requests[k].bytes for k in mine)
                there_is = ", ".join(f"{name} has {_size(each)} free" for name, each in zip(names, has, strict=True))
                raise RuntimeFault(
                    f'The models on "{requests[i].device}" must fit into half of its free memory.',
                    f"no room for agent '{requests[i].agent}': {len(mine)} models take {_size(need)}, and {there_is}",
                    'Set device = "cpu" or "auto" for some agents, use smaller models, or free memory on the device.',
                )
            found[i] = CPU if place is None else names[place]
    return found


def spread(
    needs: Sequence[int], room: Sequence[float | None], fixed: Sequence[int | None] | None = None
) -> list[int | None]:
    """For each need the index of a device, or None if none has room; a room of None is unknown and unbounded.

    `fixed`: the device that a need is bound to, if any; these are placed first.
    """
    left, agents = [math.inf if each is None else each for each in room], [0] * len(room)
    places: list[int | None] = [None] * len(needs)
    fixed = fixed or [None] * len(needs)
    for i in sorted(range(len(needs)), key=lambda i: fixed[i] is None):
        own = fixed[i]
        fitting = [k for k in (range(len(left)) if own is None else [own]) if needs[i] <= left[k]]
        if fitting:
            place = min(fitting, key=lambda k: agents[k])
            places[i] = place
            agents[place] += 1
            left[place] -= needs[i]
    return places


def _size(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{count / (1 << 30):.2f} GiB"


# --- memory and forked processes


def free_memory(kind: str, count: int) -> list[int | None]:
    """Free bytes on each device of a kind; None if torch cannot tell."""
    module = None if kind == "mps" else torch.get_device_module(kind)
    if not hasattr(module, "mem_get_info"):
        return [None] * count
    if kind != "cuda" or _cuda_is_started() or sys.platform == "win32":
        return _ask(kind, count)
    # If this fails, the error is reported when an agent first uses the device.
    answer: list[int | None] | None = _in_another_process(lambda: _ask(kind, count))
    return answer or [None] * count


def _ask(kind: str, count: int) -> list[int | None]:
    return [int(torch.get_device_module(kind).mem_get_info(i)[0]) for i in range(count)]


def _cuda_is_started() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _in_another_process(ask: Callable[[], Any]) -> Any:
    """The result of a function in a forked process; None if it fails there."""
    near, far = multiprocessing.Pipe(duplex=False)

    def reply(pipe: Connection) -> None:
        with suppress(Exception):
            pipe.send_bytes(json.dumps(ask()).encode())
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=reply, args=(far,), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking with several threads
        process.start()
    far.close()
    try:
        return json.loads(near.recv_bytes())
    except EOFError:
        return None
    finally:
        near.close()
        process.join()


def bound_memory(devices: Sequence[str], shares: Sequence[Sequence[str]]) -> None:
    """Limit this process, whose agents are on `devices`, to its part of their memory; `shares`: devices by process."""
    for device in dict.fromkeys(devices):
        kind = torch.device(device).type
        bound = None if kind in (CPU, "mps") else getattr(torch.get_device_module(kind), _BOUND, None)
        if bound is not None:
            bound(1 / sum(device in share for share in shares), torch.device(device))


def shares_of(devices: Sequence[str], workers: int) -> list[list[int]]:
    """The agents of each worker process: in turn, or grouped by device if there are several devices.

    A process takes memory on every device that it uses.
    """
    if len(set(devices)) < 2:
        return [list(range(worker, len(devices), workers)) for worker in range(workers)]
    order = sorted(range(len(devices)), key=lambda i: devices[i])
    sizes = [len(order) // workers + (worker < len(order) % workers) for worker in range(workers)]
    return [sorted(order[sum(sizes[:worker]) : sum(sizes[: worker + 1])]) for worker in range(workers)]


def check_fork(devices: Sequence[str], runtime: str) -> None:
    """Raise if processes forked from this one could not use these devices."""
    kinds = {torch.device(device).type for device in devices} - {CPU}
    if "mps" in kinds:
        found = "the device mps, which cannot be used after a fork"
    elif "cuda" in kinds and _cuda_is_started():
        found = "CUDA has been used in this process"
    elif any(map(device_count, {*_PREFERRED, *kinds})):
        # With a GPU, torch differentiates in threads, even on the CPU; threads do not survive a fork.
        answer = _in_another_process(lambda: _trouble({CPU, *devices}))
        found = "a forked process crashed when it computed a gradient" if answer is None else str(answer)
    else:
        found = ""
    if found:
        raise RuntimeFault(
            f"The runtime '{runtime}' must fork before torch uses the device.",
            found,
            'Use runtime="simulation", or start a new process, as codistill run does.',
        )


def _trouble(devices: Iterable[str]) -> str:
    """The error of torch when it differentiates on these devices, or an empty text."""
    for device in sorted(devices):
        try:
            torch.ones(1, device=device, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            return f"a forked process cannot compute on {device}: {str(error).partition('. ')[0][:200]}"
    return ""


# --- computing on the device of an agent's learner: protocols are written as if there were only host memory

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
# These accept tensors of two devices: they copy, or follow a graph in which a copy would not be a leaf.
_APART = {
    torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.type_as, torch.Tensor.set_, torch.Tensor.backward,
    torch.autograd.grad, torch.autograd.backward,
}  # fmt: skip


class _Active(threading.local):
    mode: OnDevice | None = None


_active = _Active()


class OnDevice(TorchFunctionMode):
    """A context in which this thread computes on a device: new tensors are made there, operands are moved there."""

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
                f"An agent's computation must fit into the memory of {self.device}.",
                str(error).partition(". ")[0][:200],
                'Use smaller batches or a smaller model, or set device = "cpu" for some of the agents.',
            ) from None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function of torch with its arguments on one device."""
        kwargs = kwargs or {}
        if _active.mode is not self:
            return func(*args, **kwargs)
        if func in _MADE:
            return func(*args, **({"device": self.device} | kwargs if kwargs.get("device") is None else kwargs))
        if func in _DRAWN:
            return self._draw(func, args, kwargs)
        if func in _FILLED and args and args[0].device != HOST:
            with torch.no_grad():
                draft = args[0].detach().cpu()
                func(draft, *args[1:], **kwargs)
                return args[0].copy_(draft)
        if func in _TO_HOST:
            return func(args[0].cpu(), *args[1:], **kwargs)
        if len(args) + len(kwargs) > 1 or any(isinstance(each, list | tuple) for each in args):
            args, kwargs = self._together(func, args, kwargs)
        return func(*args, **kwargs)

    def _draw(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("device") is not None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)  # an explicit choice
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
    """The device of the `OnDevice` that this thread has entered; None: host memory."""
    return None if _active.mode is None else _active.mode.device


@contextmanager
def in_host_memory() -> Iterator[None]:
    """Suspend the `OnDevice` that this thread has entered."""
    before, _active.mode = _active.mode, None
    try:
        yield
    finally:
        _active.mode = before


def uploaded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the current device; in host memory, the tensor itself."""
    return tensor if _active.mode is None else tensor.to(_active.mode.device)


def seed_device(number: int) -> None:
    """Seed the current device, where layers such as dropout draw."""
    if _active.mode is None:
        return
    device, module = _active.mode.device, torch.get_device_module(_active.mode.device)
    generators = getattr(module, "default_generators", None)
    if generators is not None:
        generators[device.index or 0].manual_seed(number)
    else:
        module.manual_seed(number)


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
