"""Faults on purpose: who is hit, when, and that the others go on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_wine
from sklearn.naive_bayes import GaussianNB

import codistill as cd
from codistill.core.errors import RecipeError
from codistill.nodes.faults import Fault, Faults

NAMES = ("a", "b", "c", "d")
X, Y = load_wine(return_X_y=True)
ORDER = np.random.default_rng(0).permutation(len(X))
X, Y = ((X - X.mean(axis=0)) / X.std(axis=0))[ORDER].astype(np.float32), Y[ORDER]


def federation(faults=(), participation=1.0, seed=0):
    agents = [
        cd.Agent(name, GaussianNB(), X[20 * i : 20 * i + 20], Y[20 * i : 20 * i + 20]) for i, name in enumerate(NAMES)
    ]
    return cd.Federation(
        agents, cd.FedMD(batch_size=10), public=X[80:100], test=(X[100:], Y[100:]), seed=seed, faults=faults,
        participation=participation,
    )  # fmt: skip


def run(rounds=3, runtime="simulation", folder=None, **options):
    return federation(**options).run(rounds, runtime=runtime, alone=False, progress=False, folder=folder)


# --- when a fault strikes -----------------------------------------------------------------------


def test_rounds_are_counted_from_one_both_ends_included():
    fault = Fault(first=2, last=3)
    assert [fault.covers(t) for t in range(4)] == [False, True, True, False]
    assert [Fault(first=2).covers(t) for t in range(4)] == [False, True, True, True]


def test_who_is_gone_is_not_present():
    faults = Faults([Fault(kind="gone", agent="b", first=2, last=2)], NAMES, seed=0)
    assert [faults.present(t) for t in range(3)] == [NAMES, ("a", "c", "d"), NAMES]
    assert not faults, "nobody's messages are hit"


def test_a_fault_of_one_agent_hits_what_it_sends_and_gets():
    faults = Faults([Fault(kind="late", agent="b")], NAMES, seed=0)
    assert faults
    assert faults.strikes(0, "b", "hub", 1) == "late"
    assert faults.strikes(0, "hub", "b", 1) == "late"
    assert faults.strikes(0, "a", "hub", 1) is None


def test_a_rate_is_the_share_of_messages():
    faults = Faults([Fault(rate=0.3)], NAMES, seed=0)
    struck = [faults.strikes(0, "a", "hub", number) == "drop" for number in range(2000)]
    # Four standard deviations of a binomial: 4 sqrt(0.3 · 0.7 / 2000) = 0.041.
    assert np.mean(struck) == pytest.approx(0.3, abs=0.041)


def test_strikes_derive_from_the_seed_and_the_message():
    def fates(seed):
        faults = Faults([Fault(rate=0.5)], NAMES, seed)
        return [faults.strikes(t, sender, "hub", n) for t in range(3) for sender in NAMES for n in range(3)]

    assert fates(1) == fates(1)
    assert fates(1) != fates(2)


def test_rates_of_zero_and_one():
    assert Faults([Fault(rate=0.0)], NAMES, 0).strikes(0, "a", "hub", 1) is None
    assert all(Faults([Fault(rate=1.0)], NAMES, 0).strikes(0, "a", "hub", n) == "drop" for n in range(50))


@pytest.mark.parametrize(("share", "count"), [(1.0, 4), (0.75, 3), (0.5, 2), (0.01, 1)])
def test_participation_is_a_share_of_the_roster_in_its_order(share, count):
    faults = Faults((), NAMES, seed=3, participation=share)
    chosen = [faults.present(t) for t in range(20)]
    assert all(len(names) == count and list(names) == sorted(names) for names in chosen)
    assert chosen == [faults.present(t) for t in range(20)]
    if count < 4:
        assert len(set(chosen)) > 1
        assert set().union(*chosen) == set(NAMES), "everyone has a turn"


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan"), "half", True, None])
def test_a_participation_that_is_no_share(share):
    with pytest.raises(RecipeError, match=r"participation must be above 0 and at most 1"):
        Faults((), NAMES, 0, share)


@pytest.mark.parametrize(
    ("fields", "must"),
    [
        ({"kind": "lost"}, "faults.kind must be one of drop, late, gone, split, invert, random."),
        ({"rate": 1.5}, "faults.rate must be at most 1."),
        ({"rate": -0.1}, "faults.rate must be at least 0."),
        ({"first": 0}, "faults.first must be at least 1."),
        ({"kind": "gone"}, "A fault 'gone' must name its agent."),
        ({"first": 3, "last": 2}, "A fault's last round must not be before its first."),
    ],
)
def test_a_fault_that_cannot_be(fields, must):
    with pytest.raises(RecipeError) as caught:
        Fault(**fields)
    assert caught.value.must == must


@pytest.mark.parametrize("faults", [Fault(), [{"kind": "drop"}], ["drop"]])
def test_faults_are_a_list_of_faults(faults):
    with pytest.raises(RecipeError, match=r"Faults must be a list of Fault"):
        Faults(faults, NAMES, 0)


def test_an_unknown_agent_names_the_nearest():
    with pytest.raises(RecipeError, match=r"A fault must name an agent.*'clinik'.*Did you mean 'clinic'"):
        Faults([Fault(agent="clinik")], ("clinic", "lab"), 0)


# --- what a run makes of it -----------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["simulation", "processes"])
def test_who_loses_all_messages_stops_nobody(runtime, tmp_path):
    result = run(faults=[Fault(kind="drop", agent="b", rate=1.0)], runtime=runtime, folder=tmp_path / "run")
    clean = run()
    assert len(result.rows) == 3 * len(NAMES)
    for row in result.rows:
        # Two public batches per round: what b sends is lost on the way, and it hears nothing.
        assert row["present"]
        assert row["sent"] > 0
        assert (row["received"] > 0) == (row["agent"] != "b")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert (
        "round 1: 'hub' continues without 2 messages of 'b': The message was lost on the way (injected fault)." in log
    )
    assert "without a message of 'a'" not in log
    assert [row["sent"] for row in result.rows] == [row["sent"] for row in clean.rows]


def test_the_agent_cut_off_is_as_if_alone():
    """Its labels are all it learns from, so its accuracy is that of the first fit."""
    cut_off = {row["agent"]: row for row in run(faults=[Fault(agent="b")]).rows}["b"]
    model = GaussianNB().fit(X[20:40], Y[20:40])
    assert cut_off["accuracy"] == pytest.approx(np.mean(model.predict(X[100:]) == Y[100:]))


def test_late_is_as_good_as_lost():
    kinds = [run(faults=[Fault(kind=kind, rate=0.4)]).rows for kind in ("drop", "late")]
    assert kinds[0] == kinds[1]


def test_gone_agents_send_nothing_and_the_log_says_so(tmp_path):
    result = run(faults=[Fault(kind="gone", agent="c", first=2, last=2)], folder=tmp_path / "run")
    there = {row["round"]: row for row in result.rows if row["agent"] == "c"}
    assert [there[done]["present"] for done in (1, 2, 3)] == [True, False, True]
    assert (there[2]["sent"], there[2]["received"]) == (0, 0)
    assert there[2]["accuracy"] == there[1]["accuracy"], "evaluated all the same"
    assert (tmp_path / "run" / "log.txt").read_text().splitlines() == ["round 2: absent: c"]


def test_when_all_is_lost_everyone_goes_on_alone():
    result = run(1, faults=[Fault(rate=1.0)])
    assert [row["received"] for row in result.rows] == [0] * 4


def test_nobody_left_is_a_round_without_messages():
    result = run(1, faults=[Fault(kind="gone", agent=name) for name in NAMES])
    assert [row["sent"] for row in result.rows] == [0] * 4


def test_faults_and_participation_are_the_same_every_time_and_everywhere():
    options = {"faults": [Fault(rate=0.3)], "participation": 0.75, "seed": 5}
    rows = run(**options).rows
    assert rows == run(**options).rows
    assert rows == run(**options, runtime="processes").rows
    assert rows != run(**{**options, "seed": 7}).rows
    assert {sum(row["present"] for row in rows if row["round"] == done) for done in (1, 2, 3)} == {3}


@dataclass(frozen=True, kw_only=True)
class Listen(cd.Protocol):
    """Everyone remembers whom it heard in each round."""

    name = "listen"
    needs = cd.Ability.LABELS
    topology = "complete"

    def alone(self) -> None: ...

    async def round(self, me: cd.Agent, t: int) -> None:
        me.state.setdefault("heard", []).append("".join(await me.exchange(n=t)))


@pytest.mark.parametrize("runtime", ["simulation", "processes"])
def test_a_split_lets_nothing_through_and_heals(runtime: str, tmp_path: Path) -> None:
    agents = [cd.Agent(name, GaussianNB(), [[0.0], [1.0]], [0, 1]) for name in "abcd"]
    split = cd.Fault(kind="split", agents=("a", "c"), first=2, last=3)
    cd.Federation(agents, Listen(), faults=[split]).run(
        4, runtime=runtime, workers=2, folder=tmp_path / "run", progress=False
    )
    heard = {agent.name: agent.state["heard"] for agent in agents}
    assert heard == {
        "a": ["bcd", "c", "c", "bcd"], "b": ["acd", "d", "d", "acd"],
        "c": ["abd", "a", "a", "abd"], "d": ["abc", "b", "b", "abc"],
    }  # fmt: skip
    log = (tmp_path / "run" / "log.txt").read_text()
    assert [line for line in log.splitlines() if "a, c" in line] == [
        "round 2: a, c cut off (injected fault)",
        "round 4: a, c joined again",
    ]
    assert "lost on the way" not in log


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"kind": "split"}, "must name the agents of one side"),
        ({"kind": "drop", "agents": ("a",)}, "must name the agents of one side"),
        ({"kind": "split", "agents": ("a",), "agent": "b"}, "has 'agents', not 'agent'"),
        ({"kind": "gone", "agent": "a", "rate": 0.5}, "for whole rounds, so it has no rate"),
    ],
)
def test_a_split_has_sides(fault: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        cd.Fault(**fault)


def test_a_side_of_a_split_has_agents_of_the_federation() -> None:
    agents = [cd.Agent(name, GaussianNB(), [[0.0], [1.0]], [0, 1]) for name in "ab"]
    with pytest.raises(RecipeError, match="A fault must name an agent.*'z'"):
        cd.Federation(agents, Listen(), faults=[cd.Fault(kind="split", agents=("z",))])
    with pytest.raises(RecipeError, match="must leave at least one agent on the other side"):
        cd.Federation(agents, Listen(), faults=[cd.Fault(kind="split", agents=("a", "b"))])
