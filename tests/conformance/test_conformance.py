"""One suite for all protocols: a new protocol adds one row to CASES and gets all of these checks.

Simulation equals processes, to the bit and in bytes; kill and resume changes nothing; a lone agent
reduces to local training; a dropped agent does not stop the others; no message holds private data;
unmet needs fail before anything runs; and where the paper says so, it beats learning alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier

import codistill as cd
from codistill.errors import LearnerError
from codistill.learners.zoo import build
from codistill.protocols import PROTOCOLS
from codistill.protocols.alone import baseline_of
from codistill.runtimes.observers.privacy_guard import PrivacyGuard
from codistill.topology import HUB

Models = Callable[[], list[Any]]
SHAPE, CLASSES = (1, 8, 8), 10


def _torch(name: str, **options: Any) -> cd.TorchLearner:
    return cd.TorchLearner(build(name, SHAPE, CLASSES), **{"lr": 3e-3, "epochs": 10, "batch_size": 16, **options})


def mixed() -> list[Any]:
    """A convolutional network, a perceptron, a forest and a linear model."""
    return [_torch("cnn"), _torch("mlp"), RandomForestClassifier(20), LogisticRegression(max_iter=1000)]


def regressors() -> list[Any]:
    """Models that are fitted to real values."""
    return [_torch("cnn", loss="squared"), RandomForestRegressor(10), _torch("mlp", loss="squared"), Ridge()]


def equal() -> list[Any]:
    """Four networks of one architecture."""
    return [_torch("mlp") for _ in range(4)]


def two_kinds() -> list[Any]:
    """Four networks of two architectures."""
    return [_torch(name) for name in ("cnn", "mlp", "cnn", "mlp")]


@dataclass(frozen=True)
class Case:
    """One row: a protocol, models that suit it, and whether it should beat learning alone here."""

    protocol: cd.Protocol
    models: Models
    beats_alone: bool = False


CASES = [
    Case(cd.Alone(), mixed),
    Case(cd.Centralised(), mixed, beats_alone=True),
    Case(cd.FedAvg(local_epochs=4, batch_size=16), equal, beats_alone=True),
    Case(cd.FedMD(local_epochs=10, batch_size=16), mixed, beats_alone=True),
    Case(cd.FedAL(local_steps=40, transfer_steps=12, batch_size=16), two_kinds, beats_alone=True),
    Case(cd.FedDF(local_steps=20, adversarial=1.0, batch_size=16), two_kinds, beats_alone=True),
    Case(cd.DDistillation(local_steps=20, batch_size=16, network_batch=16), mixed),
    Case(cd.DSGD(local_steps=10, every=5, batch_size=16), equal, beats_alone=True),
    Case(cd.SiloSGD(local_steps=10, batch_size=16), equal),
    Case(cd.FD(batch_size=16), equal),
    Case(cd.FedProto(batch_size=16), equal),
    Case(cd.FedProto(form="public", batch_size=16, transfer_steps=3), equal),
    Case(cd.AKD(), mixed),
    Case(cd.AKD(simultaneous=True), regressors),
    Case(cd.PKD(), mixed),
    Case(cd.EKD(), regressors),
    Case(cd.EKD(half=False, single=True), equal),
    Case(cd.Backfitting(), regressors),
    # Own labels keep weight 1/2: at the printed 1/M four agents hardly see their own labels.
    Case(cd.AvgKD(own_weight=0.5), mixed),
]
every_case = pytest.mark.parametrize("case", CASES, ids=[case.protocol.name for case in CASES])
# Second forms of a protocol share its code for talking: what is about that is checked on the first.
FIRST = list({case.protocol.name: case for case in reversed(CASES)}.values())[::-1]
every_protocol = pytest.mark.parametrize("case", FIRST, ids=[case.protocol.name for case in FIRST])


@pytest.fixture
def federation(digits: tuple[np.ndarray, np.ndarray]) -> Callable[..., cd.Federation]:
    """A federation of a case: each of four agents has 60 digits, of six classes out of ten."""
    x, y = digits

    def make(case: Case, *, agents: int = 4, **options: Any) -> cd.Federation:
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        members = []
        for i, model in enumerate(case.models()[:agents]):
            held = (np.arange(6) + 3 * i) % CLASSES
            rows = rng.choice(np.flatnonzero(np.isin(y[:1000], held)), 60, replace=False)
            members.append(cd.Agent(f"agent-{i}", model, x[rows], y[rows]))
        return cd.Federation(
            members, case.protocol, public=x[1000:1200], test=(x[1200:], y[1200:]), classes=CLASSES, **options
        )

    return make


def test_every_protocol_has_a_row() -> None:
    assert {case.protocol.name for case in CASES} == set(PROTOCOLS)


@every_case
def test_simulation_equals_processes_to_the_bit_and_in_bytes(case: Case, federation: Any, digits: Any) -> None:
    results = {
        runtime: federation(case, seed=3).run(2, runtime=runtime, workers=2, alone=False, progress=False)
        for runtime in ("simulation", "processes")
    }
    assert results["simulation"].rows == results["processes"].rows
    for name, agent in results["simulation"].agents.items():
        np.testing.assert_array_equal(
            agent.decision_function(digits[0][:50]), results["processes"].agents[name].decision_function(digits[0][:50])
        )


@every_protocol
def test_workers_do_not_change_the_result(case: Case, federation: Any) -> None:
    one, three = (
        federation(case).run(1, runtime="processes", workers=workers, alone=False, progress=False).rows
        for workers in (1, 3)
    )
    assert one == three


@every_protocol
def test_another_seed_is_another_run(case: Case, federation: Any) -> None:
    first, second = (
        federation(case, seed=seed).run(1, runtime="simulation", alone=False, progress=False) for seed in (1, 2)
    )
    assert first.rows != second.rows


@every_case
@pytest.mark.parametrize("runtime", ["simulation", "processes"])
def test_stop_and_resume_changes_nothing(case: Case, runtime: str, federation: Any, tmp_path: Path) -> None:
    options = {"runtime": runtime, "alone": False, "progress": False}
    federation(case).run(3, folder=tmp_path / "whole", **options)
    federation(case).run(1, folder=tmp_path / "parts", **options)
    federation(case).run(3, folder=tmp_path / "parts", resume=True, **options)
    whole, parts = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    assert whole.count(b"\n") == 3 * 4


@every_case
def test_a_lone_agent_reduces_to_local_training(case: Case, federation: Any) -> None:
    together = federation(case, agents=1).run(2, runtime="simulation", alone=False, progress=False)
    yardstick = baseline_of(case.protocol) or case.protocol
    alone = federation(Case(yardstick, case.models), agents=1).run(2, runtime="simulation", progress=False)
    assert [row["accuracy"] for row in together.rows] == [row["accuracy"] for row in alone.rows]


@every_protocol
def test_an_agent_that_is_gone_does_not_stop_the_others(case: Case, federation: Any) -> None:
    gone = [cd.Fault(kind="gone", agent="agent-1", first=2, last=2)]
    results = [
        federation(case, faults=gone).run(3, runtime=runtime, alone=False, progress=False).rows
        for runtime in ("simulation", "processes")
    ]
    assert results[0] == results[1]
    present = {(row["round"], row["agent"]): row["present"] for row in results[0]}
    assert [agent for (t, agent), there in present.items() if not there] == ["agent-1"]
    silent = next(row for row in results[0] if row["round"] == 2 and row["agent"] == "agent-1")
    assert silent["sent"] == silent["received"] == 0
    assert all("accuracy" in row for row in results[0])


@every_protocol
def test_compression_is_the_same_everywhere_and_shorter(case: Case, federation: Any) -> None:
    """8 bits, without loss of a message, in both runtimes; models that travel as bytes are left as they are."""
    small = cd.Compression(bits=8, error_feedback=True)
    plain, here, there = (
        federation(case, compression=setting).run(1, runtime=runtime, alone=False, progress=False).rows
        for setting, runtime in ((None, "simulation"), (small, "simulation"), (small, "processes"))
    )
    assert here == there
    assert all(np.isfinite(row["accuracy"]) for row in here)
    sent, packed = (sum(row["sent"] for row in rows) for rows in (plain, here))
    # Of a model that travels, only weights of networks are arrays: a forest stays as it is.
    assert packed < (1.0 if case.protocol.needs & cd.Ability.PORTABLE else 0.6) * sent or not sent


@every_protocol
def test_lost_messages_do_not_stop_the_round(case: Case, federation: Any) -> None:
    lossy = [cd.Fault(kind="drop", rate=0.4)]
    posted: list[int] = []  # bytes of messages to agents, lost or not
    watch = [lambda _, receiver, data: posted.append(len(data) * (receiver != HUB))]
    results = [
        federation(case, faults=lossy, watchers=watchers).run(2, runtime=runtime, alone=False, progress=False).rows
        for runtime, watchers in (("simulation", watch), ("processes", []))
    ]
    assert results[0] == results[1]
    assert sum(row["received"] for row in results[0]) < sum(posted) or not posted


@every_case
def test_no_message_holds_what_must_stay_at_home(case: Case, federation: Any) -> None:
    """Samples and labels; weights and what the hub keeps, unless weights or models are what is exchanged."""
    guarded = federation(case)
    models = not case.protocol.needs & (cd.Ability.WEIGHTS | cd.Ability.PORTABLE)
    guarded._watchers = (PrivacyGuard(guarded.agents, guarded.hub, models=models),)
    assert guarded.run(2, runtime="simulation", alone=False, progress=False).rows


@every_protocol
def test_unmet_needs_fail_before_anything_runs(case: Case, federation: Any) -> None:
    class NeverFitted(KNeighborsClassifier):  # type: ignore[misc]
        def fit(self, x: Any, y: Any) -> Any:
            raise AssertionError("nothing may run")

    models = [*case.models()[:3], NeverFitted()]
    if case.protocol.needs == cd.Ability.LABELS:
        assert federation(Case(case.protocol, lambda: models))
        return
    with pytest.raises(LearnerError) as caught:
        federation(Case(case.protocol, lambda: models))
    sentence = str(caught.value)
    assert "agent-3" in sentence
    assert "NeverFitted" in sentence
    assert "Protocols that work with it as it is: alone" in sentence


@pytest.mark.parametrize("case", [case for case in CASES if case.beats_alone], ids=lambda case: case.protocol.name)
def test_it_beats_learning_alone(case: Case, federation: Any) -> None:
    together = federation(case).run(8, runtime="processes", progress=False, evaluate_every=8)
    alone = (
        together.alone_rows
        or federation(Case(cd.Alone(local_epochs=4), case.models))
        .run(8, runtime="processes", progress=False, evaluate_every=8)
        .rows
    )
    mean = {
        key: np.mean([row["accuracy"] for row in rows if "accuracy" in row])
        for key, rows in (("together", together.rows), ("alone", alone))
    }
    assert mean["together"] > mean["alone"] + 0.05
