"""What must hold of a run's clock before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from codistill.clock import Clock
from codistill.errors import RecipeError
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS


def as_clock(given: Any, protocol: Protocol, names: Sequence[str]) -> Clock | None:
    """The clock of a run of these agents by this protocol, if it has one."""
    if given is None:
        return None
    if not isinstance(given, Clock):
        raise RecipeError("clock must be a Clock.", f"{given!r}"[:80], "Write clock=codistill.Clock(...).")
    given.check_names(names)
    if given.asynchronous and not protocol.asynchronous:
        able = ", ".join(name for name, other in PROTOCOLS.items() if other.asynchronous)
        raise RecipeError(
            "A run without rounds needs a protocol that can use what others sent some time ago.",
            f"clock.asynchronous with {protocol.name}, which waits for the others of its round",
            f"Use one of {able}; or leave out 'asynchronous'. A protocol of your own says asynchronous = True.",
        )
    return given


def check_clock_runtime(clock: Clock | None, runtime: str) -> None:
    """Where a run with a clock can be computed."""
    if clock is None or runtime == "simulation":
        return
    if runtime in ("processes", "ray"):
        raise RecipeError(
            "A run with a clock cannot be computed in worker processes, nor in a Ray cluster.",
            f"a clock, in the runtime '{runtime}'",
            "Use the runtime 'simulation' or, without rounds, 'network'.",
        )
    if clock.offline:
        raise RecipeError(
            "Over the network, agents are offline when they are.",
            f"clock.offline of '{clock.offline[0].agent}', in the runtime '{runtime}'",
            "Leave it out, or use the runtime 'simulation'.",
        )
