"""A clock for a run: how fast agents compute, how long messages take, who is offline when; and runs without rounds.

In a simulation time is virtual: a gradient step takes a given time, whatever this machine needs for it. It is kept
in whole nanoseconds, so that sums of times are exact, and all of it is deterministic in the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from codistill.core.errors import RecipeError, nearest
from codistill.core.rng import generator
from codistill.core.settings import Settings, check_settings, from_table, setting

SECOND = 1_000_000_000  # nanoseconds


@dataclass(frozen=True, kw_only=True)
class Offline(Settings):
    """A period in which an agent is offline: it starts no round of its own."""

    agent: str = setting(help="who is offline")
    first: float = setting(0.0, "from when on, in seconds since the start of the run", at_least=0)
    last: float | None = setting(None, "until when; unset: to the end", above=0)

    def __post_init__(self) -> None:
        check_settings(self, "clock.offline")
        if self.last is not None and self.last <= self.first:
            raise RecipeError(
                "An offline spell must end after it begins.",
                f"first = {self.first:g}, last = {self.last:g}",
                "Change one of them.",
            )


@dataclass(frozen=True, kw_only=True)
class Clock(Settings):
    """How fast agents compute, how long messages take, and whether there are rounds at all.

    With `asynchronous` every agent starts its next round when it has ended the one before, and nobody waits for
    anybody; a "round" of the metrics is then a period of time. Without, rounds are as ever, and the metrics say at
    which virtual time each has ended.
    """

    asynchronous: bool = setting(False, "every agent goes on at its own pace, without rounds")
    period: float = setting(
        1.0, "seconds between two rows of the metrics in a run without rounds: what its 'rounds' count", above=0
    )
    step: float = setting(0.01, "virtual seconds of one gradient step of the fastest agent; in simulation", above=0)
    slowest: float = setting(
        1.0, "how many times longer a step takes at the slowest agent; others between, log-uniform by seed", at_least=1
    )
    slowness: dict[str, float] = setting(factory=dict, help="the same factor for agents by name, instead")
    delay: float = setting(0.0, "mean virtual seconds that a message is on its way", at_least=0)
    delays: str = setting("exponential", "how delays are distributed", choices=("constant", "exponential"))
    offline: tuple[Offline, ...] = setting((), "spells in which agents are offline")

    def __post_init__(self) -> None:
        check_settings(self, "clock")
        for name, factor in self.slowness.items():
            if not 0 < factor < float("inf"):
                raise RecipeError(
                    f"clock.slowness of '{name}' must be above 0.", f"{factor}", "1 is the speed of the fastest agent."
                )
        for key in ("step", "period"):
            if nanoseconds(getattr(self, key)) < 1:
                raise RecipeError(
                    f"clock.{key} must be at least a nanosecond.", f"{getattr(self, key)}", "Choose a larger one."
                )

    def check_names(self, names: Sequence[str]) -> None:
        """Whoever is named must be an agent."""
        for name in (*self.slowness, *(spell.agent for spell in self.offline)):
            if name not in names:
                raise RecipeError("A clock must name agents.", f"'{name}'", nearest(name, names))

    def factors(self, names: Sequence[str], seed: int) -> dict[str, float]:
        """For each agent, how many times longer than at the fastest one a step takes.

        Of the agents that have no factor of their own, the fastest has 1, the slowest `slowest`, and the others
        slowest^u with u uniform between 0 and 1.
        """
        drawn = {name: generator(seed, "slowness", name).random() for name in names if name not in self.slowness}
        lowest, highest = min(drawn.values(), default=0), max(drawn.values(), default=0)
        made = {name: self.slowest ** (1.0 if u == highest else u) for name, u in drawn.items()}
        made |= {name: 1.0 for name, u in drawn.items() if u == lowest}
        return {name: float(self.slowness.get(name, made.get(name, 1.0))) for name in names}

    def factor(self, name: str, names: Sequence[str], seed: int) -> float:
        """The factor of one of these agents."""
        return self.factors(names, seed)[name]

    def step_times(self, names: Sequence[str], seed: int) -> dict[str, int]:
        """Nanoseconds of one gradient step of each agent."""
        return {name: max(1, nanoseconds(self.step * f)) for name, f in self.factors(names, seed).items()}

    def delay_of(self, sender: str, receiver: str, number: int, seed: int) -> int:
        """Nanoseconds that the sender's message of this number to the receiver is on its way."""
        if not self.delay or self.delays == "constant":
            return nanoseconds(self.delay)
        return nanoseconds(generator(seed, "delay", sender, receiver, number).exponential(self.delay))

    def online_from(self, name: str, now: int) -> int | None:
        """The first nanosecond from `now` on at which an agent is online; None: it never is again."""
        spells = [spell for spell in self.offline if spell.agent == name]
        while covering := [spell for spell in spells if nanoseconds(spell.first) <= now < _end(spell)]:
            end = max(_end(spell) for spell in covering)
            if end == float("inf"):
                return None
            now = int(end)
        return now


def nanoseconds(seconds: float) -> int:
    return round(seconds * SECOND)


def clock_from_table(table: Mapping[str, Any]) -> Clock:
    """A recipe's [clock], with its [[clock.offline]]."""
    spells = table.get("offline", [])
    if not isinstance(spells, list) or not all(isinstance(spell, dict) for spell in spells):
        raise RecipeError(
            "'clock.offline' must be [[clock.offline]] tables.",
            f"{spells!r}"[:80],
            "Write [[clock.offline]] on a line, and its keys below.",
        )
    made = tuple(from_table(Offline, spell, "clock.offline") for spell in spells)
    slowness = table.get("slowness", {})
    if isinstance(slowness, dict):  # TOML writes 10 for 10.0
        slowness = {name: float(f) if type(f) is int else f for name, f in slowness.items()}
    return from_table(Clock, {**table, "slowness": slowness, "offline": made}, "clock")  # type: ignore[no-any-return]


def _end(spell: Offline) -> float:
    return float("inf") if spell.last is None else nanoseconds(spell.last)
