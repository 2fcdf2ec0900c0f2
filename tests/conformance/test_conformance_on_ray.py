"""The conformance suite in a Ray cluster: every protocol equals the simulation, to the bit and in bytes.

A file of its own, since the suite forks worker processes, which is not safe in a process with Ray's threads. A run
takes seconds, in which its hosts import torch and scikit-learn: so as much as possible is asked of each. In short some
protocols: through a hub, on a graph, and with models that travel. Marked as long, all others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance import test_conformance as suite
from tests.conformance.test_conformance import CASES, FIRST, NAMED, QUIET, RELAY, ROUNDS, Case, Whole
from tests.federation.test_equal_in_all_runtimes import outcome

import codistill as cd
from codistill.core.errors import RecipeError

pytestmark = pytest.mark.usefixtures("time_limit", "ray_here")

FILES = ("metrics.jsonl", "log.txt", "alone/metrics.jsonl", "outputs.safetensors")
TALKING = [case for case in [*CASES, RELAY] if not case.protocol.pools_data]
Make = Callable[..., cd.Federation]


def rows_of(cases: list[Case], *short: str) -> Any:
    """Those that are named are part of every test run."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=case.protocol.name, marks=() if case.protocol.name in short else pytest.mark.long)
            for case in cases
        ],
    )


@pytest.fixture(scope="module")
def make(digits: Any) -> Make:
    """The suite's federations."""
    maker: Make = suite.federation.__wrapped__(digits)  # type: ignore[attr-defined]
    return maker


@pytest.fixture(scope="module")
def whole_of(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Whole]:
    """The suite's simulations."""
    once: Callable[[Case], Whole] = suite.whole_of.__wrapped__(make, tmp_path_factory)  # type: ignore[attr-defined]
    return once


@rows_of(TALKING, "avgkd")
def test_the_whole_equals_the_simulation(
    case: Case, make: Make, whole_of: Callable[[Case], Whole], digits: Any, tmp_path: Path
) -> None:
    """With the baseline before it: metrics, log, outputs, and what the agents answer in the end."""
    whole = whole_of(case)
    result = make(case).run(ROUNDS, runtime="ray", workers=2, folder=tmp_path, progress=False)
    for name in FILES:
        paths = [folder / name for folder in (whole.folder, tmp_path)]
        assert [path.exists() for path in paths] in ([True, True], [False, False]), name
        if paths[0].exists():
            assert paths[0].read_bytes() == paths[1].read_bytes(), name
    for name, agent in whole.result.agents.items():
        np.testing.assert_array_equal(
            agent.decision_function(digits[0][:50]), result.agents[name].decision_function(digits[0][:50])
        )


@rows_of([case for case in FIRST if not case.protocol.pools_data], "fedmd", "d_distillation")
def test_parts_with_faults_equal_the_whole(case: Case, make: Make, tmp_path: Path) -> None:
    """From the simulation to Ray, which keeps states on disk, and back. Messages are lost and compressed, an agent is
    gone for a round, others do not take part, and one withholds samples."""
    faults = [cd.Fault(kind="drop", rate=0.3), cd.Fault(kind="gone", agent="agent-1", first=2, last=2)]
    options: dict[str, Any] = {
        "faults": faults, "participation": 0.75, "withheld": slice(5, 15),
        "compression": cd.Compression(bits=8, error_feedback=True),
    }  # fmt: skip
    make(case, **options).run(ROUNDS, runtime="simulation", folder=tmp_path / "whole", **QUIET)
    parts = [("simulation", {}), ("ray", {"workers": 2, "idle": "disk"}), ("simulation", {})]
    for rounds, (runtime, where) in zip((1, 3, ROUNDS), parts, strict=True):
        settings = {"resume": rounds > 1, "folder": tmp_path / "parts", **where, **QUIET}
        make(case, **options).run(rounds, runtime=runtime, **settings)
    whole, parts_metrics = ((tmp_path / each / "metrics.jsonl").read_bytes() for each in ("whole", "parts"))
    assert parts_metrics == whole
    assert b'"present": false' in whole


@rows_of([NAMED[name] for name in ("fedmd", "d_distillation", "avgkd")])
def test_a_lone_agent_reduces_to_local_training(case: Case, make: Make) -> None:
    here, there = (make(case, agents=1).run(2, runtime=runtime, progress=False) for runtime in ("simulation", "ray"))
    assert (here.rows, here.alone_rows) == (there.rows, there.alone_rows)


def test_what_is_measured_and_kept_is_the_same(make: Make, tmp_path: Path) -> None:
    """A safeguard, a score of one's own, features, evaluations of some samples and of who took part."""

    def certain(y: np.ndarray, answers: np.ndarray) -> float:
        return float(np.max(answers, axis=1).mean())

    options: dict[str, Any] = {"safeguard": True, "scores": ["accuracy", cd.Score("certain", certain)]}
    measures = {"evaluate_every": 2, "evaluate_samples": 20, "evaluate_agents": "present", "features_at": [1, 3]}
    seen: dict[str, list[Any]] = {}

    class Watches:
        def __init__(self, runtime: str) -> None:
            self._told = seen.setdefault(runtime, [])

        def evaluated(self, record: Any) -> None:
            self._told.append((record.round, record.scores, record.test_samples))

        def round_ended(self, record: Any) -> bool:
            self._told.append((record.round, record.rows, record.events))
            return bool(record.round == 3)  # which stops the run

    results = {
        runtime: make(NAMED["fedmd"], participation=0.5, **options).run(
            ROUNDS, runtime=runtime, folder=tmp_path / runtime, checkpoint_every=3, observers=[Watches(runtime)],
            workers=2, **measures, **QUIET,
        )
        for runtime in ("simulation", "ray")
    }  # fmt: skip
    here, there = results.values()
    assert [result.interrupted for result in (here, there)] == [True, True]
    assert seen["ray"] == seen["simulation"]
    assert any({"certain", "safeguard_weight"} <= row.keys() for row in there.rows)
    assert len(here.features) == 2
    for mine, theirs in zip(here.features.values(), there.features.values(), strict=True):
        assert mine.encode() == theirs.encode()
    kept = [sorted(path.name for path in (tmp_path / each / "checkpoints").iterdir()) for each in results]
    assert kept[0] == kept[1] != []


@pytest.mark.long
@pytest.mark.parametrize("case", ["augmented", "with_holes"])
def test_data_as_they_are_in_life_give_the_same(case: str) -> None:
    assert outcome(case, "ray") == outcome(case, "simulation")


def test_what_cannot_be_done_there_is_refused_before_anything_starts(make: Make, tmp_path: Path) -> None:
    """None of it is left out silently."""
    from codistill.network.options import Network

    fedmd, clock = NAMED["fedmd"], cd.Clock(asynchronous=True, step=1.0)
    for case, made_with, run_with, found in [
        (NAMED["centralised"], {}, {}, "centralised pools the data"),
        (NAMED["crs"], {"clock": clock}, {}, "Use the runtime 'simulation' or, without rounds, 'network'"),
        (fedmd, {"clock": cd.Clock(step=1.0)}, {}, "Use the runtime 'simulation' or, without rounds, 'network'"),
        (fedmd, {"watchers": [print]}, {}, "watchers are called where messages are sent"),
        (fedmd, {}, {"network": Network()}, "network is for the runtime 'network'"),
        (fedmd, {}, {"node_logs": "text"}, "node_logs is for the runtime 'network'"),
    ]:
        with pytest.raises(RecipeError) as caught:
            make(case, **made_with).run(1, runtime="ray", folder=tmp_path / "run", progress=False, **run_with)  # type: ignore[arg-type]
        assert found in str(caught.value)
        assert not (tmp_path / "run").exists()
