"""Virtual time of runs with rounds: when a round ends, derived by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import codistill as cd
from codistill.nodes.agent import Hub

QUIET: dict[str, Any] = {"runtime": "simulation", "progress": False, "alone": False}
# Steps of 1 s, ten times as long for b; 3 s for each message.
CLOCK = cd.Clock(step=1.0, slowness={"b": 10.0, "c": 2.0}, delay=3.0, delays="constant")


class Silent:
    """A model that learns nothing; to fit it takes one gradient step of time."""

    def fit(self, x: Any, targets: Any) -> None: ...

    def predict(self, x: Any) -> Any:
        return np.zeros((len(x), 2))


@dataclass(frozen=True, kw_only=True)
class Star(cd.Protocol):
    """One step, then everybody asks the hub, which waits for all; and one more step."""

    needs = cd.Ability.LABELS

    async def round(self, me: cd.Agent, t: int) -> None:
        me.learner.fit(me.shard.x, me.shard.targets)
        await me.ask_hub(x=1)
        me.learner.fit(me.shard.x, me.shard.targets)

    async def hub(self, me: Hub, t: int) -> None:
        await me.gather()
        await me.broadcast(x=1)

    def alone(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Peers(cd.Protocol):
    """One step, then an exchange."""

    topology = "complete"
    needs = cd.Ability.LABELS

    async def round(self, me: cd.Agent, t: int) -> None:
        me.learner.fit(me.shard.x, me.shard.targets)
        await me.exchange(x=1)

    def alone(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Quiet(Peers):
    """Everybody waits for a, which sends nothing."""

    async def round(self, me: cd.Agent, t: int) -> None:
        if me.name != "a":
            await me.receive("a")
        me.learner.fit(me.shard.x, me.shard.targets)


def make(protocol: cd.Protocol, names: str, clock: cd.Clock | None, **options: Any) -> cd.Federation:
    members = [cd.Agent(name, Silent(), [[1.0], [2.0]], [0, 1]) for name in names]
    if clock is not None:
        clock = replace(clock, slowness={name: factor for name, factor in clock.slowness.items() if name in names})
    return cd.Federation(members, protocol, clock=clock, **options)


def times(result: cd.Result, agent: str = "a") -> list[float]:
    return [row["time"] for row in result.rows if row["agent"] == agent]


@pytest.mark.parametrize(
    ("protocol", "names", "length"),
    [
        (Star(), "ab", 10 + 3 + 3 + 10),  # the hub has b's message at 13, b its answer at 16
        (Star(), "ac", 2 + 3 + 3 + 2),
        (Peers(), "ab", 10 + 3),  # a waits for b
        (Peers(), "a", 1),
        (Quiet(), "ab", 1 + 10),  # b goes on when a has ended
    ],
)
def test_a_round_ends_when_the_last_has_ended_it(protocol: cd.Protocol, names: str, length: float) -> None:
    result = make(protocol, names, CLOCK).run(3, **QUIET)
    assert times(result) == times(result, names[-1]) == [length, 2 * length, 3 * length]
    assert "own_rounds" not in result.rows[0]


def test_lost_messages_are_waited_for_as_long() -> None:
    result = make(Star(), "ab", CLOCK, faults=[cd.Fault(kind="drop")]).run(1, **QUIET)
    assert times(result) == [26]


def test_whoever_is_absent_is_not_waited_for() -> None:
    """Without b a round takes 1 + 3 + 3 + 1 = 8; b is gone in round 2."""
    result = make(Star(), "ab", CLOCK, faults=[cd.Fault(kind="gone", agent="b", first=2, last=2)]).run(3, **QUIET)
    assert times(result) == [26, 26 + 8, 26 + 8 + 26]
    everybody = [cd.Fault(kind="gone", agent=name, first=1, last=1) for name in "ab"]
    assert times(make(Star(), "ab", CLOCK, faults=everybody).run(2, **QUIET)) == [0, 26]


def test_whoever_is_offline_at_the_start_of_a_round_misses_it() -> None:
    """b is offline until 20: two rounds of 8 without it, and a third from 16 to 24; then one with it."""
    clock = replace(CLOCK, offline=(cd.Offline(agent="b", last=20.0),))
    result = make(Star(), "ab", clock).run(4, **QUIET)
    assert times(result) == [8, 16, 24, 24 + 26]
    assert [row["present"] for row in result.rows if row["agent"] == "b"] == [False, False, False, True]
    nobody = replace(CLOCK, offline=tuple(cd.Offline(agent=name, last=20.0) for name in "ab"))
    assert times(make(Star(), "ab", nobody).run(1, **QUIET)) == [20 + 26]


def test_resumed_it_has_the_same_times(tmp_path: Path) -> None:
    clock = replace(CLOCK, delays="exponential")
    whole = make(Star(), "abc", clock).run(3, **QUIET)
    for done in (1, 2, 3):
        make(Star(), "abc", clock).run(done, folder=tmp_path, resume=done > 1, **QUIET)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == len(whole.rows)
    parts = make(Star(), "abc", clock).run(3, folder=tmp_path, resume=True, **QUIET)
    assert parts.rows == whole.rows
    assert times(make(Star(), "abc", clock, seed=1).run(3, **QUIET)) != times(whole)


def test_the_clock_changes_nothing_of_what_is_learnt(digits: Any) -> None:
    from codistill.learners.zoo import build

    x, y = digits

    def rows(clock: cd.Clock | None) -> list[dict[str, Any]]:
        import torch

        torch.manual_seed(0)
        members = [
            cd.Agent(f"a{i}", cd.TorchLearner(build("mlp", (1, 8, 8), 10)), x[40 * i :][:40], y[40 * i :][:40])
            for i in range(3)
        ]
        federation = cd.Federation(members, cd.FedMD(batch_size=16), public=x[500:530], test=(x[600:], y[600:]),
                                   classes=10, clock=clock)  # fmt: skip
        return federation.run(2, **QUIET).rows

    timed = rows(cd.Clock(slowest=3, delay=0.1))
    assert all(row.pop("time") > 0 for row in timed)
    assert timed == rows(None)
