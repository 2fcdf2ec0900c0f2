"""The clock of a run: speeds, delays and spells offline, in a recipe and in Python."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import codistill as cd
from codistill.core.errors import ArgumentError, RecipeError
from codistill.experiments.recipe import make_recipe
from codistill.nodes.clock import SECOND, clock_from_table

NAMES = ("a", "b", "c", "d", "e")
RECIPE: dict[str, Any] = {
    "data": {"name": "digits", "samples": 100},
    "agents": [{"learner": "mlp", "name": "a"}, {"learner": "mlp", "name": "b"}],
    "protocol": {"name": "crs", "rounds": 1},
}


def test_the_fastest_has_1_the_slowest_its_factor_and_others_are_between() -> None:
    clock = cd.Clock(slowest=10)
    factors = {name: clock.factor(name, NAMES, 0) for name in NAMES}
    assert sorted(factors.values())[0] == 1
    assert sorted(factors.values())[-1] == 10
    assert len(set(factors.values())) == 5
    assert factors == {name: clock.factor(name, NAMES, 0) for name in NAMES}
    assert factors != {name: clock.factor(name, NAMES, 1) for name in NAMES}


def test_factors_are_log_uniform() -> None:
    """log10 of the factors between is uniform between 0 and 1: a third of them in each third."""
    names = [f"n{i}" for i in range(400)]
    clock = cd.Clock(slowest=10)
    logs = np.log10(list(clock.factors(names, 3).values()))
    shares = np.histogram(logs, bins=[0, 1 / 3, 2 / 3, 1.0001])[0] / 400
    assert np.abs(shares - 1 / 3).max() < 0.08


def test_factors_by_name_stand_for_themselves() -> None:
    clock = cd.Clock(slowest=10, slowness={"a": 3.0, "b": 0.5})
    assert (clock.factor("a", NAMES, 0), clock.factor("b", NAMES, 0)) == (3, 0.5)
    assert {clock.factor(name, NAMES, 0) for name in "cde"} >= {1.0, 10.0}
    assert cd.Clock(slowest=10).factor("a", ("a",), 0) == 1
    assert cd.Clock(step=0.02, slowness={"a": 3.0}).step_times(NAMES, 0)["a"] == 60_000_000


def test_delays_are_constant_or_exponential() -> None:
    assert cd.Clock(delay=0.25, delays="constant").delay_of("a", "b", 1, 0) == SECOND // 4
    assert cd.Clock().delay_of("a", "b", 1, 0) == 0
    clock = cd.Clock(delay=2.0)
    drawn = np.array([clock.delay_of("a", "b", number, 0) for number in range(2000)]) / SECOND
    # An exponential distribution of mean 2 has the standard deviation 2, and a share of exp(-1) above its mean.
    assert abs(drawn.mean() - 2) < 0.15
    assert abs(drawn.std() - 2) < 0.25
    assert abs((drawn > 2).mean() - np.exp(-1)) < 0.04
    assert clock.delay_of("a", "b", 7, 0) == clock.delay_of("a", "b", 7, 0) != clock.delay_of("b", "a", 7, 0)


def test_spells_offline_are_until_their_end() -> None:
    spells = (cd.Offline(agent="a", first=1, last=2), cd.Offline(agent="a", first=2, last=3), cd.Offline(agent="b"))
    clock = cd.Clock(offline=spells)
    assert clock.online_from("a", 0) == 0
    assert clock.online_from("a", SECOND) == 3 * SECOND
    assert clock.online_from("a", 3 * SECOND) == 3 * SECOND
    assert clock.online_from("b", 0) is None
    assert clock.online_from("c", SECOND) == SECOND


def test_a_recipe_has_a_clock_with_its_spells() -> None:
    table = {"asynchronous": True, "slowness": {"a": 10}, "offline": [{"agent": "b", "first": 20, "last": 40}]}
    assert make_recipe({**RECIPE, "clock": table}, Path()).clock == cd.Clock(
        asynchronous=True, slowness={"a": 10.0}, offline=(cd.Offline(agent="b", first=20.0, last=40.0),)
    )
    assert make_recipe(RECIPE, Path()).clock is None


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"periods": 2}, "'periods'"),
        ({"period": 0}, "clock.period must be above 0"),
        ({"slowest": 0.5}, "clock.slowest must be at least 1"),
        ({"slowness": {"a": -1}}, "slowness of 'a' must be above 0"),
        ({"delays": "normal"}, "one of constant, exponential"),
        ({"offline": {"agent": "a"}}, r"\[\[clock.offline\]\] tables"),
        ({"offline": [{"first": 1.0}]}, "needs 'agent'"),
        ({"offline": [{"agent": "a", "first": 2.0, "last": 1.0}]}, "must end after it begins"),
        ({"step": 1e-12}, "at least a nanosecond"),
    ],
)
def test_a_clock_that_cannot_be_says_why(table: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        clock_from_table(table)


def federation(protocol: cd.Protocol, **options: Any) -> cd.Federation:
    rng = np.random.default_rng(0)
    from torch import nn

    agents = [
        cd.Agent(
            name,
            cd.TorchLearner(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))),
            rng.normal(size=(8, 4)),
            [0, 1] * 4,
        )
        for name in ("a", "b")
    ]
    return cd.Federation(agents, protocol, **options)


def test_what_is_not_possible_is_said_before_the_run() -> None:
    free = cd.Clock(asynchronous=True)
    with pytest.raises(RecipeError, match="alone, crs, fedmd|alone, fedmd, crs") as caught:
        federation(cd.FedAvg(), clock=free)
    assert "fedavg" in str(caught.value)
    with pytest.raises(RecipeError, match="clock must be a Clock"):
        federation(cd.CRS(), clock={"asynchronous": True})
    with pytest.raises(RecipeError, match="'c'"):
        federation(cd.CRS(), clock=cd.Clock(slowness={"c": 2.0}))
    with pytest.raises(RecipeError, match="'c'"):
        federation(cd.CRS(), clock=cd.Clock(offline=(cd.Offline(agent="c"),)))
    for clock, runtime in product((free, cd.Clock(delay=1.0)), ("processes", "ray")):
        with pytest.raises(RecipeError, match=f"in the runtime '{runtime}'. Use the runtime 'simulation' or, without"):
            federation(cd.CRS(), clock=clock).run(1, runtime=runtime)
    away = cd.Clock(asynchronous=True, offline=(cd.Offline(agent="a", last=3.0),))
    with pytest.raises(RecipeError, match="clock.offline is not supported over the network"):
        federation(cd.CRS(), clock=away).run(1, runtime="network")
    with pytest.raises(ArgumentError, match="Federation"):
        cd.CRS(clock=free)  # type: ignore[call-arg]
