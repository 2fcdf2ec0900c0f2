"""Gradient steps and exchanges of each agent and round, counted by hand, and equal in every runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from torch import nn

import codistill as cd
from codistill.core.errors import ProtocolError
from codistill.nodes.agent import Hub
from codistill.nodes.record import record_of

QUIET: dict[str, Any] = {"progress": False, "alone": False}
runtimes = pytest.mark.parametrize("runtime", ["simulation", "processes", "network"])
SAMPLES = {"a": 33, "b": 20, "c": 65}  # 33 and 65 are one more than whole batches of 32


def members(forest: str = "") -> list[cd.Agent]:
    made = []
    for place, (name, samples) in enumerate(SAMPLES.items()):
        x = np.random.default_rng(place).normal(size=(samples, 4)).astype(np.float32)
        torch.manual_seed(place)
        learner = cd.TorchLearner(nn.Linear(4, 2), lr=0.01, epochs=3, batch_size=32)
        model = RandomForestClassifier(3, random_state=0) if name == forest else learner
        made.append(cd.Agent(name, model, x, (x[:, 0] > 0).astype(int)))
    return made


def counts(result: Any, name: str) -> dict[str, list[int]]:
    """The values of a column by agent, in the order of the rounds."""
    return {agent: [row[name] for row in result.rows if row["agent"] == agent] for agent in SAMPLES}


def of_all(values: list[int]) -> dict[str, list[int]]:
    """The same counts of every agent."""
    return dict.fromkeys(SAMPLES, values)


@dataclass(frozen=True, kw_only=True)
class Probe(cd.Protocol):
    """Base of the protocols below."""

    needs = cd.Ability.LABELS

    def alone(self) -> None: ...


# --- steps ------------------------------------------------------------------------------------------


def test_steps_of_a_fit_are_its_batches_and_a_forest_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 3 epochs of 33, 20 and 65 samples in batches of 32, where a single sample joins the batch before."""
    taken: list[int] = []
    descend = cd.TorchLearner.descend
    monkeypatch.setattr(cd.TorchLearner, "descend", lambda self, loss: (taken.append(1), descend(self, loss)))
    result = cd.Federation(members(), cd.AvgKD()).run(2, runtime="simulation", **QUIET)
    assert counts(result, "steps") == {"a": [3, 3], "b": [3, 3], "c": [6, 6]}
    assert len(taken) == 2 * (3 + 3 + 6)
    mixed = cd.Federation(members(forest="c"), cd.AvgKD()).run(2, runtime="simulation", **QUIET)
    assert counts(mixed, "steps") == {"a": [3, 3], "b": [3, 3], "c": [0, 0]}


@dataclass(frozen=True, kw_only=True)
class Steps(Probe):
    """In round t the agent takes t + 1 steps, and computes two gradients without a step."""

    needs = cd.Ability.GRADIENTS

    async def round(self, me: cd.Agent, t: int) -> None:
        x, y = torch.from_numpy(me.shard.x), torch.from_numpy(me.shard.targets).float()
        for _ in range(t + 1):
            me.learner.descend(me.learner.loss(me.learner(x), y))
        for _ in range(2):
            gradient = me.learner.gradient_at(me.learner.weights(), x, lambda outputs, own: me.learner.loss(outputs, y))
            assert all(gradient[name].any() for name in me.learner.parameters())
        if t == 1:
            me.learner.descend(me.learner.loss(1e12 * me.learner(x), y))  # left out, as its loss is too large


def test_gradients_count_as_steps_and_so_does_a_step_that_is_left_out() -> None:
    result = cd.Federation(members(), Steps()).run(3, runtime="simulation", **QUIET)
    assert counts(result, "steps") == of_all([1 + 2, 2 + 2 + 1, 3 + 2])
    assert counts(result, "exchanges") == of_all([0, 0, 0])


# --- exchanges --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ask(Probe):
    """The hub is asked once in the first round, twice in the second."""

    async def round(self, me: cd.Agent, t: int) -> None:
        for _ in range(t + 1):
            await me.ask_hub(x=1)

    async def hub(self, me: Hub, t: int) -> None:
        for _ in range(t + 1):
            await me.gather()
            await me.broadcast(x=1)


@dataclass(frozen=True, kw_only=True)
class Talk(Probe):
    """Neighbours exchange before the first round, and then talk in several ways."""

    topology = "complete"

    async def begin(self, me: cd.Agent) -> None:
        await me.exchange(x=1)  # 1, counted in the first round

    async def round(self, me: cd.Agent, t: int) -> None:
        for name in me.neighbours:
            await me.send(name, x=1)
        for name in me.neighbours:
            await me.receive(name)  # 1: one after the other, but waited for together
        await me.exchange(x=2)  # 1
        for name in me.neighbours:
            await me.send(name, x=3)
            await me.send(name, x=4)
        for name in me.neighbours:
            await me.receive(name)  # 1
        for name in me.neighbours:
            await me.receive(name)  # 1: a second time from the same sender
        for name in me.neighbours:
            await me.send(name, x=5)
            await me.receive(name)  # 1 for each: what it sends next may depend on it
        for name in me.roster:
            if name not in (*me.present, me.name):
                await me.receive(name)  # 0: nobody waits for who is absent


@runtimes
def test_exchanges_through_a_hub(runtime: str) -> None:
    result = cd.Federation(members(), Ask()).run(2, runtime=runtime, **QUIET)
    assert counts(result, "exchanges") == of_all([1, 2])


@runtimes
def test_exchanges_between_neighbours(runtime: str) -> None:
    result = cd.Federation(members(), Talk()).run(2, runtime=runtime, **QUIET)
    assert counts(result, "exchanges") == of_all([1 + 4 + 2, 4 + 2])


def test_who_is_absent_does_nothing_and_is_not_waited_for() -> None:
    """Without c, a waits for b alone; with b absent as well, for nobody."""
    faults = [
        cd.Fault(kind="gone", agent="c", first=1, last=2), cd.Fault(kind="gone", agent="b", first=2, last=2),
    ]  # fmt: skip
    result = cd.Federation(members(), Talk(), faults=faults).run(3, runtime="simulation", **QUIET)
    assert counts(result, "exchanges") == {"a": [1 + 4 + 1, 0, 4 + 2], "b": [1 + 4 + 1, 0, 4 + 2], "c": [1, 0, 4 + 2]}


def test_what_was_done_in_a_round_that_did_not_end_counts_nowhere() -> None:
    """The third step fails, such as by a lost connection; the round is started again."""
    federation, [agent, *_] = cd.Federation(members(), Steps()), members()
    record_of(agent).encode_labels(2)
    host = replace(federation.description, agents=(agent,)).host([agent])
    agent.learner.gradient_at = lambda *arguments: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        host.run(0, ("a",))
    del agent.learner.gradient_at
    assert host.run(0, ("a",)).steps == {"a": 1 + 2}


# --- whole runs -------------------------------------------------------------------------------------


def test_the_figures_of_fedavg_and_of_distributed_distillation() -> None:
    """fedavg asks once per round; d_distillation has a network step for each gradient step unless told otherwise."""
    averaged = cd.Federation(members(), cd.FedAvg(batch_size=10, local_epochs=2)).run(2, runtime="simulation", **QUIET)
    # 33 samples in batches of 10: 4; 20: 2; 65: 7
    assert counts(averaged, "steps") == {"a": [8, 8], "b": [4, 4], "c": [14, 14]}
    assert counts(averaged, "exchanges") == of_all([1, 1])
    public = np.random.default_rng(9).normal(size=(30, 4)).astype(np.float32)
    protocol = cd.DDistillation(local_steps=6, every=3)
    distilled = cd.Federation(members(), protocol, public=public).run(2, runtime="simulation", **QUIET)
    assert counts(distilled, "steps") == of_all([6, 6])
    assert counts(distilled, "exchanges") == of_all([2, 2])


@pytest.mark.parametrize("runtime", ["processes", "network"])
def test_sampled_agents_are_counted_alike(runtime: str) -> None:
    """In each round one of three agents takes part; the others take no steps, and exchange nothing.

    From the second round on an agent first asks for the weights that it may have missed. That is the download of an
    earlier round, late: an exchange of FedAvg is one upload and one download, so a round has one (it was counted as 2).
    """

    def rows(runtime: str) -> list[dict[str, Any]]:
        federation = cd.Federation(members(), cd.FedAvg(batch_size=10), participation=0.34, seed=1)
        return [dict(row) for row in federation.run(4, runtime=runtime, **QUIET).rows]

    here = rows("simulation")
    steps = {"a": 4, "b": 2, "c": 7}
    assert [row["steps"] for row in here] == [steps[row["agent"]] * row["present"] for row in here]
    assert [row["exchanges"] for row in here] == [row["present"] * 1 for row in here]
    assert {row["agent"] for row in here if row["present"]} != {here[0]["agent"]}  # not always the same one
    assert rows(runtime) == here


def test_agents_alone_take_the_same_steps_and_exchange_nothing(tmp_path: Path) -> None:
    federation = cd.Federation(members(), cd.FedAvg(batch_size=10), test=(np.zeros((2, 4)), [0, 1]))
    alone = federation.run(2, runtime="network", progress=False, folder=tmp_path).alone_rows
    assert [(row["steps"], row["exchanges"]) for row in alone] == [(4, 0), (2, 0), (7, 0)] * 2


def test_runs_without_rounds_count_a_round_where_it_ends_also_after_a_resume(tmp_path: Path) -> None:
    """A round of 4 steps takes 4 s of virtual time, one of 2 steps 2 s, one of 7 steps 7 s; a period is 10 s."""
    clock = cd.Clock(asynchronous=True, step=1.0, period=10.0)

    def federation() -> cd.Federation:
        return cd.Federation(members(), cd.Alone(batch_size=10), clock=clock)

    whole = federation().run(2, runtime="simulation", folder=tmp_path / "whole", **QUIET)
    # Rounds that end by 10 s and by 20 s: 2 and 5 of a, 5 and 10 of b, 1 and 2 of c.
    assert counts(whole, "steps") == {"a": [2 * 4, 3 * 4], "b": [5 * 2, 5 * 2], "c": [7, 7]}
    federation().run(1, runtime="simulation", folder=tmp_path / "parts", **QUIET)
    federation().run(2, runtime="simulation", folder=tmp_path / "parts", resume=True, **QUIET)
    first, second = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "parts"))
    assert first == second


def test_a_measure_of_a_protocol_cannot_have_these_names() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Measures(Probe):
        async def round(self, me: cd.Agent, t: int) -> None:
            me.measure(me.name, steps=1.0)

    with pytest.raises(ProtocolError, match="name of a column that every run has.*'steps'"):
        cd.Federation(members(), Measures()).run(1, runtime="simulation", **QUIET)
