"""The devices of this machine: what there is, what a name stands for, and which agent computes where.

Nothing here starts CUDA in this process: after that, it could not be forked any more.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch

from codistill.errors import RecipeError, RuntimeFault

AUTO, CPU = "auto", "cpu"
DEVICE_HELP = (
    "where torch modules compute: cpu, cuda (spread over all GPUs), cuda:1, mps; auto: a GPU where there is one"
)
_PREFERRED = ("cuda", "mps")  # by "auto", in this order
_ROOM = 0.5  # share of a device's free memory for weights and what belongs to them; the rest is for activations
_CONTEXT = 512 << 20  # bytes that each process takes on a device before it computes anything


@dataclass(frozen=True)
class Wish:
    """Where an agent is to compute, and how many bytes its model takes there."""

    agent: str
    device: str
    bytes: int = 0


Free = Callable[[str, int], "list[int | None]"]


def check_name(device: Any) -> None:
    """Raise unless this can be the name of a device, here or on another machine."""
    with suppress(RuntimeError, TypeError):
        if device in (AUTO, CPU) or (isinstance(device, str) and torch.device(device).type != "meta"):
            return
    raise RecipeError(
        'device must be "auto", "cpu", "cuda", "cuda:1", "mps", or the name of another device of torch.',
        f"{device!r}"[:80],
        "Change it.",
    )


def check_device(device: Any) -> None:
    """Raise unless there is such a device on this machine."""
    check_name(device)
    if device == AUTO:
        return
    named = torch.device(device)
    if (named.index or 0) < device_count(named.type):
        return
    there = [CPU, *(name for kind in dict.fromkeys((*_PREFERRED, named.type)) for name in _names(kind) if name != CPU)]
    built = " (this torch is built without CUDA)" if named.type == "cuda" and torch.version.cuda is None else ""
    raise RecipeError(
        f'device = "{device}" must be on this machine.',
        f"torch has here: {', '.join(there)}{built}",
        'Choose one of these, or device = "auto": a GPU where there is one, and else the CPU.',
    )


def device_count(kind: str) -> int:
    """How many devices of a kind there are."""
    if kind == CPU:
        return 1
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    try:
        return int(torch.get_device_module(kind).device_count())  # of CUDA by its driver, which starts nothing
    except (RuntimeError, AttributeError):
        return 0


def _names(kind: str) -> list[str]:
    return [f"{kind}:{i}" for i in range(device_count(kind))] if kind != "mps" else ["mps"] * device_count(kind)


def resolved(device: str | None) -> torch.device:
    """The device of a name, for a model that no run has assigned to one; None: the CPU."""
    if device is None or device == CPU:
        return torch.device(CPU)
    check_device(device)
    named = torch.device(_best_kind() if device == AUTO else device)
    return named if named.index is not None or named.type in (CPU, "mps") else torch.device(named.type, 0)


@cache
def has_mixed_precision(device: torch.device) -> bool:
    """Whether a device multiplies in bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return torch.amp.is_autocast_available(device.type)


def _best_kind() -> str:
    return next((kind for kind in _PREFERRED if device_count(kind)), CPU)


# --- which agent computes where -----------------------------------------------------------------------------


def assign(wishes: Sequence[Wish], processes: int = 1, free: Free | None = None, sharing: int = 1) -> list[str]:
    """A device for each agent. Those that name a kind, such as "cuda", are spread over all devices of it.

    An agent is put where there are fewest so far, among those devices whose memory has room for its model. Where none
    has, "auto" is the CPU, and any other name an error. `processes`: how many there are, each of which takes memory.
    `sharing`: processes that share a device, each of which places its own agents only, as these are.
    """
    for device in dict.fromkeys(wish.device for wish in wishes):
        check_device(device)
    named = [torch.device(_best_kind() if wish.device == AUTO else wish.device) for wish in wishes]
    found = [CPU] * len(wishes)
    for kind in dict.fromkeys(device.type for device in named if device.type != CPU):
        mine = [i for i, device in enumerate(named) if device.type == kind]
        names = _names(kind)
        has = (free or free_memory)(kind, len(names))
        there = max(sharing, -(-min(processes, len(mine)) // len(names)))  # processes on each device
        room = [None if each is None else _ROOM / sharing * max(0, each - there * _CONTEXT) for each in has]
        fixed = [named[i].index for i in mine]
        for i, place in zip(mine, spread([wishes[i].bytes for i in mine], room, fixed), strict=True):
            if place is None and wishes[i].device != AUTO:
                raise _no_room(wishes[i], [wishes[k] for k in mine], names, has)
            found[i] = CPU if place is None else names[place]
    return found


def spread(
    needs: Sequence[int], room: Sequence[float | None], fixed: Sequence[int | None] | None = None
) -> list[int | None]:
    """For each need the number of a device, or None where none has room; room of None is unknown, and unbounded.

    `fixed`: needs that are for one device; they are met before all others.
    """
    left, agents = list(room), [0] * len(room)
    places: list[int | None] = [None] * len(needs)
    fixed = fixed or [None] * len(needs)
    for i in sorted(range(len(needs)), key=lambda i: fixed[i] is None):
        own = fixed[i]
        fitting = [k for k in (range(len(left)) if own is None else [own]) if _fits(needs[i], left[k])]
        if not fitting:
            continue
        place = min(fitting, key=lambda k: agents[k])
        places[i], agents[place] = place, agents[place] + 1
        before = left[place]
        left[place] = None if before is None else before - needs[i]
    return places


def _fits(need: int, room: float | None) -> bool:
    return room is None or need <= room


def _no_room(wish: Wish, all_wishes: Sequence[Wish], names: Sequence[str], free: Sequence[int | None]) -> RuntimeFault:
    need = sum(each.bytes for each in all_wishes)
    there = ", ".join(f"{name} has {_size(each)} free" for name, each in zip(names, free, strict=True))
    return RuntimeFault(
        f'The models on "{wish.device}" must fit into half of the memory that is free there.',
        f"no room for agent '{wish.agent}': {len(all_wishes)} models take {_size(need)}, and {there}",
        'Give some agents device = "cpu" or "auto", take smaller models, or free memory of the device.',
    )


def _size(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{count / (1 << 30):.2f} GiB"


# --- memory -------------------------------------------------------------------------------------------------


def free_memory(kind: str, count: int) -> list[int | None]:
    """Bytes that are free on each device of a kind; None where the library does not say."""
    module = None if kind == "mps" else torch.get_device_module(kind)
    if not hasattr(module, "mem_get_info"):
        return [None] * count
    if kind != "cuda" or _cuda_is_started() or sys.platform == "win32":
        return _ask(kind, count)
    # Where it fails, what is wrong is told when an agent gets there.
    answer: list[int | None] | None = _in_another_process(lambda: _ask(kind, count))
    return answer or [None] * count


def _ask(kind: str, count: int) -> list[int | None]:
    return [int(torch.get_device_module(kind).mem_get_info(i)[0]) for i in range(count)]


def _cuda_is_started() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _in_another_process(ask: Callable[[], Any]) -> Any:
    """What a function returns in a process that is forked for it; None where it fails there."""
    near, far = multiprocessing.Pipe(duplex=False)

    def tell(pipe: Connection) -> None:
        with suppress(Exception):
            pipe.send_bytes(json.dumps(ask()).encode())
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=tell, args=(far,), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks that copy only one thread
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
    """In a process whose agents are on `devices`: leave to the others, whose devices `shares` has, their part."""
    for device in dict.fromkeys(devices):
        kind = torch.device(device).type
        bound = None if kind in (CPU, "mps") else getattr(torch.get_device_module(kind), _BOUND, None)
        if bound is not None:
            bound(1 / sum(device in share for share in shares), torch.device(device))


_BOUND = "set_per_process_memory_fraction"


def shares_of(devices: Sequence[str], workers: int) -> list[list[int]]:
    """Which agents each worker process has: dealt out, or those of one device together, where there are several.

    A process takes memory on every device that it uses.
    """
    if len(set(devices)) < 2:
        return [list(range(worker, len(devices), workers)) for worker in range(workers)]
    order = sorted(range(len(devices)), key=lambda i: devices[i])
    sizes = [len(order) // workers + (worker < len(order) % workers) for worker in range(workers)]
    return [sorted(order[sum(sizes[:worker]) : sum(sizes[: worker + 1])]) for worker in range(workers)]


def check_fork(devices: Sequence[str], runtime: str) -> None:
    """Raise if processes that are forked from this one could not use these devices."""
    kinds = {torch.device(device).type for device in devices} - {CPU}
    if "mps" in kinds:
        found = "the device mps, which does not survive a fork"
    elif "cuda" in kinds and _cuda_is_started():
        found = "CUDA has been used in this process"
    elif any(map(device_count, {*_PREFERRED, *kinds})):
        # Where there is a GPU, torch differentiates in threads, also on the CPU; threads do not survive a fork.
        told = _in_another_process(lambda: _trouble({CPU, *devices}))
        found = "a forked process ended when it tried to compute" if told is None else str(told)
    else:
        return
    if not found:
        return
    raise RuntimeFault(
        f"The runtime '{runtime}' forks processes, which torch allows only before it has used the device.",
        found,
        'Use runtime="simulation"; or run it in a new process, as codistill run does.',
    )


def _trouble(devices: Iterable[str]) -> str:
    """What torch says when it is asked to differentiate on these devices; empty: nothing is wrong."""
    for device in sorted(devices):
        try:
            torch.ones(1, device=device, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            return f"a forked process cannot compute on {device}: {str(error).partition('. ')[0][:200]}"
    return ""
