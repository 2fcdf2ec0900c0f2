"""Faults on purpose: lost and late messages, absent agents. Deterministic in the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codistill.errors import RecipeError, nearest
from codistill.randomness import generator
from codistill.settings import check_settings, setting


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault, for all agents or one, in some rounds or in all.

    `drop`: messages are lost at a rate. `late`: messages arrive at a rate after the deadline, and are not
    used. `gone`: the agent is absent. Rounds are counted from 1, as people do, both ends included.
    """

    kind: str = setting("drop", "what goes wrong", choices=("drop", "late", "gone"))
    agent: str | None = setting(None, "whose messages, or who is gone; absent: everyone's messages")
    rate: float = setting(1.0, "share of messages hit", at_least=0, at_most=1)
    first: int = setting(1, "first round with the fault", at_least=1)
    last: int | None = setting(None, "last round with the fault; absent: to the end", at_least=1)

    def __post_init__(self) -> None:
        check_settings(self, "faults")
        if self.kind == "gone" and self.agent is None:
            raise RecipeError("A fault 'gone' must name its agent.", "no agent", 'Add agent = "name".')
        if self.last is not None and self.last < self.first:
            raise RecipeError(
                "A fault's last round must not be before its first.",
                f"first = {self.first}, last = {self.last}",
                "Change one of them.",
            )

    def covers(self, t: int) -> bool:
        """Whether round t (from 0) is hit."""
        return self.first <= t + 1 and (self.last is None or t + 1 <= self.last)


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
                "Change it. It is: the share of agents that take part in a round.",
            )
        for fault in faults:
            if fault.agent is not None and fault.agent not in names:
                raise RecipeError("A fault must name an agent.", f"'{fault.agent}'", nearest(fault.agent, names))
        self._faults, self._names, self._seed, self._participation = tuple(faults), tuple(names), seed, participation

    def present(self, t: int) -> tuple[str, ...]:
        """Who takes part in round t: sampled and not gone, in the order of the roster."""
        gone = {fault.agent for fault in self._faults if fault.kind == "gone" and fault.covers(t)}
        count = max(1, round(self._participation * len(self._names)))
        if count == len(self._names):
            sampled = set(self._names)
        else:
            sampled = set(generator(self._seed, "participation", t).choice(self._names, count, replace=False).tolist())
        return tuple(name for name in self._names if name in sampled and name not in gone)

    def strikes(self, t: int, sender: str, receiver: str, number: int) -> str | None:
        """What happens to the sender's message of this number to the receiver: None, "drop" or "late"."""
        for place, fault in enumerate(self._faults):
            if fault.kind == "gone" or not fault.covers(t) or fault.agent not in (None, sender, receiver):
                continue
            chance = generator(self._seed, "fault", place, t, sender, receiver, number).random()
            if chance < fault.rate:
                return fault.kind
        return None

    def __bool__(self) -> bool:
        return any(fault.kind != "gone" for fault in self._faults)
