"""Injected faults: lost and late messages, absent and Byzantine agents. Deterministic in the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from codistill.core.errors import RecipeError, nearest
from codistill.core.rng import generator
from codistill.core.settings import Settings, check_settings, setting
from codistill.wire.message import Message

_BYZANTINE = ("invert", "random")


@dataclass(frozen=True, kw_only=True)
class Fault(Settings):
    """One kind of fault, for all agents or one, in some rounds or in all.

    `drop`: a share `rate` of the messages is lost. `late`: a share arrives after the deadline and is not used.
    `gone`: the agent is absent. `split`: no message passes between `agents` and all others, until after the last
    round. `invert`, `random`: the agent is Byzantine. In a share of its messages it sends every floating-point
    array with the opposite sign, or Gaussian noise around 0 of the array's standard deviation instead; integers
    and plain values stay, and so does a model that travels as bytes (scikit-learn). Rounds are counted from 1,
    both ends included.
    """

    kind: str = setting("drop", "what goes wrong", choices=("drop", "late", "gone", "split", *_BYZANTINE))
    agent: str | None = setting(None, "whose messages, who is gone, or who is Byzantine; unset: everyone's messages")
    agents: tuple[str, ...] = setting((), "one side of a split")
    rate: float = setting(1.0, "share of messages affected", at_least=0, at_most=1)
    first: int = setting(1, "first round with the fault", at_least=1)
    last: int | None = setting(None, "last round with the fault; unset: to the end", at_least=1)
    strength: float = setting(1.0, "factor on the arrays of a Byzantine agent; random with 1000 is garbage", above=0)

    def __post_init__(self) -> None:
        check_settings(self, "faults")
        if self.kind in ("gone", *_BYZANTINE) and self.agent is None:
            raise RecipeError(f"A fault '{self.kind}' must name its agent.", "no agent", 'Add agent = "name".')
        if (self.kind == "split") != bool(self.agents):
            raise RecipeError(
                "A fault 'split' must name the agents of one side, and no other fault may.",
                f"kind = '{self.kind}', agents = {list(self.agents)}",
                'Write kind = "split" and agents = ["name", ...].',
            )
        if self.kind == "gone" and self.rate < 1:
            raise RecipeError(
                "A fault 'gone' is for whole rounds, so it has no rate.",
                f"rate = {self.rate:g}",
                "Remove it, or use 'drop' with a rate, or the federation's participation.",
            )
        if self.kind == "split" and self.agent is not None:
            raise RecipeError("A fault 'split' has 'agents', not 'agent'.", f"agent = '{self.agent}'", "Remove it.")
        if self.last is not None and self.last < self.first:
            raise RecipeError(
                "A fault's last round must not be before its first.",
                f"first = {self.first}, last = {self.last}",
                "Change one of them.",
            )

    def covers(self, t: int) -> bool:
        """Whether the fault is active in round t (from 0)."""
        return self.first <= t + 1 and (self.last is None or t + 1 <= self.last)

    @property
    def words(self) -> str:
        """The fault in a few words, for plots and logs."""
        some = ", ".join(self.agents[:3]) + (", …" if len(self.agents) > 3 else "")
        what = {"gone": "absent", "split": "cut off", "drop": "messages lost", "late": "messages late"}
        share = "" if self.rate == 1 else f" ({100 * self.rate:.3g} %)"
        return f"{self.agent or some or 'all'}: {what.get(self.kind, 'Byzantine')}{share}"

    @property
    def is_byzantine(self) -> bool:
        """Whether it changes the content of messages."""
        return self.kind in _BYZANTINE and self.rate > 0


class Faults:
    """All faults of a run, and who takes part in a round."""

    def __init__(self, faults: Sequence[Fault], names: Sequence[str], seed: int, participation: float = 1.0) -> None:
        if isinstance(faults, Fault) or not all(isinstance(fault, Fault) for fault in faults):
            raise RecipeError("Faults must be a list of Fault.", repr(faults)[:80], "Write faults=[Fault(...), ...].")
        number = isinstance(participation, int | float) and not isinstance(participation, bool)
        if not number or not 0 < participation <= 1:
            raise RecipeError(
                "participation must be above 0 and at most 1.",
                repr(participation),
                "Set the share of agents that take part in a round, such as 0.5.",
            )
        for fault in faults:
            for named in (*([] if fault.agent is None else [fault.agent]), *fault.agents):
                if named not in names:
                    raise RecipeError("A fault must name an agent.", f"'{named}'", nearest(named, names))
            if fault.kind == "split" and set(fault.agents) >= set(names):
                raise RecipeError(
                    "A split must leave at least one agent on the other side.",
                    "all agents on one side",
                    "Name fewer agents.",
                )
        self.injected, self._names, self._seed, self.participation = tuple(faults), tuple(names), seed, participation

    def present(self, t: int) -> tuple[str, ...]:
        """Who takes part in round t: sampled and not gone, in the order of the federation's agents."""
        gone = {fault.agent for fault in self.injected if fault.kind == "gone" and fault.covers(t)}
        count = max(1, round(self.participation * len(self._names)))
        if count == len(self._names):
            sampled = set(self._names)
        else:
            sampled = set(generator(self._seed, "participation", t).choice(self._names, count, replace=False).tolist())
        return tuple(name for name in self._names if name in sampled and name not in gone)

    def strikes(self, t: int, sender: str, receiver: str, number: int) -> str | None:
        """What happens to the sender's message of this number to the receiver: None, "drop", "late" or "split"."""
        for place, fault in enumerate(self.injected):
            if fault.kind == "split" and (sender in fault.agents) == (receiver in fault.agents):
                continue
            if (
                fault.kind in ("gone", *_BYZANTINE)
                or not fault.covers(t)
                or fault.agent not in (None, sender, receiver)
            ):
                continue
            chance = generator(self._seed, "fault", place, t, sender, receiver, number).random()
            if chance < fault.rate:
                return fault.kind
        return None

    def news(self, t: int) -> list[str]:
        """Splits that begin or end in round t (from 0), in words: logged once, not for each message."""
        splits = [fault for fault in self.injected if fault.kind == "split"]
        begun = [f"{', '.join(fault.agents)} cut off (injected fault)" for fault in splits if fault.first == t + 1]
        return begun + [f"{', '.join(fault.agents)} joined again" for fault in splits if fault.last == t]

    def byzantine(self, rounds: int) -> dict[str, Fault]:
        """The agents that are Byzantine in one of the first `rounds` rounds, each with its earliest such fault."""
        found: dict[str, Fault] = {}
        for fault in sorted(self.injected, key=lambda fault: fault.first):
            if fault.is_byzantine and fault.first <= rounds:
                found.setdefault(str(fault.agent), fault)
        return found

    def is_byzantine(self, t: int, sender: str) -> bool:
        return any(fault.is_byzantine and fault.agent == sender and fault.covers(t) for fault in self.injected)

    def as_sent(self, t: int, sender: str, number: int, message: Message) -> Message:
        """What the sender sends instead of its message of this number: a Byzantine one, or the message itself."""
        for place, fault in enumerate(self.injected):
            if not fault.is_byzantine or fault.agent != sender or not fault.covers(t):
                continue
            rng = generator(self._seed, "lie", place, t, sender, number)
            if rng.random() < fault.rate:
                arrays = {name: _falsified(fault, message.arrays[name], rng) for name in sorted(message.arrays)}
                return Message(arrays, message.plain)
        return message

    def __bool__(self) -> bool:
        return any(fault.kind != "gone" for fault in self.injected)


def _falsified(fault: Fault, honest: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A Byzantine array of the same shape and dtype."""
    if honest.dtype.kind != "f" or not honest.size:
        return honest
    largest = np.finfo(honest.dtype).max
    with np.errstate(over="ignore"):
        if fault.kind == "invert":
            false = -fault.strength * honest.astype(np.float64)
        else:
            false = fault.strength * honest.std(dtype=np.float64) * rng.standard_normal(honest.shape)
        # Clipped, since a receiver rejects any message that is not finite.
        return np.asarray(np.clip(false, -largest, largest), dtype=honest.dtype)
