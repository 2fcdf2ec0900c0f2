"""The features of some common test samples that are kept after chosen rounds, for a map in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import codistill as cd
from codistill.core.errors import CheckpointError, RecipeError
from codistill.engine import evaluation
from codistill.engine.evaluation import chosen_samples
from codistill.experiments.networked import run_hub, run_up
from codistill.experiments.recipe import Recipe, make_recipe
from codistill.experiments.run import execute
from codistill.experiments.saved_run import read_summary
from codistill.nodes.record import record_of
from codistill.results.outputs import FeatureSpace
from codistill.results.records import RoundEnded

RNG = np.random.default_rng(0)
X = RNG.normal(size=(340, 4)).astype(np.float32)
Y = (X[:, 0] + X[:, 1] > 0).astype(int)
TEST = (X[60:], Y[60:])
QUIET: dict[str, Any] = {"progress": False, "alone": False, "runtime": "simulation"}


def net(width: int = 6) -> cd.TorchLearner:
    torch.manual_seed(width)
    return cd.TorchLearner(nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)))


def federation(protocol: cd.Protocol | None = None, **options: Any) -> cd.Federation:
    """A federation of two networks of different widths, which scale by their own data, and a model without features."""
    from sklearn.preprocessing import StandardScaler

    agents = [
        cd.Agent("narrow", net(), X[:20], Y[:20], prepare=StandardScaler()),
        cd.Agent("plain", LogisticRegression(), X[20:40], Y[20:40]),
        cd.Agent("wide", net(9), X[40:60], Y[40:60]),
    ]
    return cd.Federation(agents, protocol or cd.Alone(), **{"test": TEST} | options)


def same(these: FeatureSpace, those: FeatureSpace) -> bool:
    """Whether two are equal to the bit."""
    return these.encode() == those.encode()


class Copier:
    """An observer that computes the features of all agents by itself after every round."""

    def __init__(self, of: cd.Federation) -> None:
        self.of, self.found = of, dict[int, dict[str, np.ndarray]]()

    def round_ended(self, record: RoundEnded) -> None:
        chosen = TEST[0][chosen_samples(self.of.description)]
        agents = {agent.name: agent for agent in self.of.agents if agent.name != "plain"}
        self.found[record.round] = {
            name: agent.learner.evaluated_features(record_of(agent).prepared(chosen)) for name, agent in agents.items()
        }


def test_features_are_those_of_the_learners_after_the_chosen_rounds() -> None:
    run = federation()
    copier = Copier(run)
    result = run.run(3, features_at=[1, 3], observers=[copier], **QUIET)
    assert list(result.features) == [1, 3]
    for done, space in result.features.items():
        assert (done, list(space.by_agent)) == (space.round, ["narrow", "wide"])
        assert [each.shape for each in space.by_agent.values()] == [(200, 6), (200, 9)]
        for name, features in space.by_agent.items():
            assert np.array_equal(features, copier.found[done][name])
    first, last = (result.features[done].by_agent["wide"] for done in (1, 3))
    assert not np.array_equal(first, last)


def test_the_samples_are_the_same_in_all_rounds_and_follow_the_seed() -> None:
    spaces = federation().run(2, features_at=(1, 2), **QUIET).features
    assert np.array_equal(spaces[1].samples, spaces[2].samples)
    assert len(np.unique(spaces[1].samples)) == 200
    assert np.array_equal(spaces[1].labels, TEST[1][spaces[1].samples])
    other = federation(seed=1).run(1, features_at=(1,), **QUIET).features[1]
    assert not np.array_equal(other.samples, spaces[1].samples)


def test_a_small_test_set_is_used_whole() -> None:
    space = federation(test=(X[60:70], Y[60:70])).run(1, features_at=(1,), **QUIET).features[1]
    assert space.samples.tolist() == list(range(10))


def test_real_values_have_no_classes() -> None:
    learner = cd.TorchLearner(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), loss="squared")
    agents = [cd.Agent("a", learner, X[:20], X[:20, :1])]
    run = cd.Federation(agents, cd.Alone(), test=(X[60:90], X[60:90, :1]))
    assert run.run(1, features_at=(1,), **QUIET).features[1].labels is None


def test_both_runtimes_give_equal_features() -> None:
    here = federation().run(2, features_at=(2,), **QUIET).features[2]
    there = federation().run(2, features_at=(2,), **QUIET | {"runtime": "processes", "workers": 2}).features[2]
    assert same(here, there)


def test_a_resumed_run_has_the_features_of_all_rounds(tmp_path: Path) -> None:
    options: dict[str, Any] = {"features_at": (1, 3), **QUIET}
    whole = federation().run(4, folder=tmp_path / "whole", **options)
    stopped = federation().run(
        4, folder=tmp_path / "run", checkpoint_every=2, observers=[StopAfter(3)], **options | {"features_at": (1,)}
    )
    assert list(stopped.features) == [1]
    rest = federation().run(4, folder=tmp_path / "run", resume=True, **options | {"features_at": (1, 4)})
    assert list(rest.features) == [1, 4]
    assert same(rest.features[1], whole.features[1])
    read = read_summary(tmp_path / "whole").features
    assert [space.round for space in read] == [1, 3]
    assert all(same(space, whole.features[space.round]) for space in read)


class StopAfter:
    """Stops a run after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round_ended(self, record: RoundEnded) -> bool:
        return record.round == self.rounds


class Cut(Exception):
    """In the place of a loss of power."""


class CutAfter:
    """Ends a run without a checkpoint of its last round."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round_ended(self, record: RoundEnded) -> None:
        if record.round == self.rounds:
            raise Cut


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_a_killed_run_goes_on_to_equal_features(tmp_path: Path, cut: int) -> None:
    """Killed before the first checkpoint, between checkpoints, and before the last one."""
    options: dict[str, Any] = {"features_at": (1, 3, 4), "checkpoint_every": 2, **QUIET}
    whole = federation().run(4, **options).features
    with pytest.raises(Cut):
        federation().run(4, folder=tmp_path / "run", observers=[CutAfter(cut)], **options)
    rest = federation().run(4, folder=tmp_path / "run", resume=True, **options).features
    assert list(rest) == [1, 3, 4]
    assert all(same(rest[done], whole[done]) for done in whole)
    read = read_summary(tmp_path / "run").features
    assert [space.round for space in read] == [1, 3, 4]
    assert all(same(space, whole[space.round]) for space in read)


def test_features_of_rounds_after_the_checkpoint_do_not_count(tmp_path: Path) -> None:
    """The run was cut in round 3, whose features were written; round 2 is the last that is known."""
    options: dict[str, Any] = {"checkpoint_every": 2, **QUIET}
    with pytest.raises(Cut):
        federation().run(4, features_at=(1, 3), folder=tmp_path / "run", observers=[CutAfter(3)], **options)
    assert (tmp_path / "run" / "features-000003.safetensors").exists()
    rest = federation().run(2, features_at=(1,), folder=tmp_path / "run", resume=True, **options)
    assert list(rest.features) == [1]
    assert [space.round for space in read_summary(tmp_path / "run").features] == [1]


def test_by_default_nothing_is_kept_or_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_features = federation().run(2, features_at=(1, 2), folder=tmp_path / "with", **QUIET)
    monkeypatch.setattr(evaluation, "features_of", None)
    monkeypatch.setattr("codistill.runtimes.simulation.features_of", None)
    without = federation().run(2, folder=tmp_path / "without", **QUIET)
    assert (without.features, without.summary().features) == ({}, ())
    assert not list((tmp_path / "without").glob("features*"))
    assert len(list((tmp_path / "with").glob("features*"))) == 2
    assert with_features.rows == without.rows
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("with", "without")]
    assert metrics[0] == metrics[1]


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3, r"features_at must be a list of integers"),
        ((1, 2.5), r"features_at must be a list of integers"),
        ((0,), r"features_at must be a list of numbers, each at least 1"),
        ((1, 4), r"features_at must name rounds of the run, which has 3"),
    ],
)
def test_wrong_rounds_are_refused(given: Any, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        federation().run(3, features_at=given, **QUIET)


def test_features_need_samples_and_a_model_that_has_them() -> None:
    with pytest.raises(RecipeError, match="needs a common test set"):
        federation(test=None).run(1, features_at=(1,), **QUIET)
    agents = [cd.Agent("plain", LogisticRegression(), X[:20], Y[:20])]
    with pytest.raises(RecipeError, match="needs an agent whose model has features.*LogisticRegression"):
        cd.Federation(agents, cd.Alone(), test=TEST).run(1, features_at=(1,), **QUIET)


def recipe(**runtime: Any) -> Recipe:
    """A recipe of two networks on digits."""
    tables = {
        "data": {"name": "digits", "samples": 100, "test_samples": 60},
        "agents": [{"learner": "mlp", "count": 2}],
        "protocol": {"name": "fedavg", "rounds": 2},
        "evaluation": {"alone": False, "features_at": [1, 2]},
        "runtime": {"kind": "simulation"} | runtime,
    }
    return make_recipe(tables, Path.cwd())


def test_a_recipe_says_rounds_that_it_has() -> None:
    with pytest.raises(RecipeError, match="features_at must name rounds of the run, which has 2"):
        make_recipe({**recipe().source, "evaluation": {"features_at": [3]}}, Path.cwd())


STAY = "In the network an agent's features on test samples stay with the agent"


def test_the_network_refuses_in_python() -> None:
    with pytest.raises(RecipeError, match=STAY):
        federation(cd.AvgKD()).run(1, features_at=(1,), **QUIET | {"runtime": "network"})


def start(command: str, folder: Path) -> None:
    """What 'codistill run', 'up' and 'hub' do with a recipe for the network."""
    options: dict[str, Any] = {"data_dir": None, "progress": False}
    match command:
        case "run":
            execute(recipe(kind="network"), folder, progress=False)
        case "up":
            run_up(recipe(), folder, form="text", verbose=False, **options)
        case "hub":
            run_hub(recipe(), folder, None, "127.0.0.1:0", should_stop=lambda: False, form="text", **options)


@pytest.mark.parametrize("command", ["run", "up", "hub"])
def test_the_network_refuses_before_anything_is_written(tmp_path: Path, command: str) -> None:
    with pytest.raises(RecipeError, match=STAY):
        start(command, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- files and the report ---------------------------------------------------------------------------


def test_a_recipe_keeps_features_and_its_report_shows_them(tmp_path: Path) -> None:
    summary, complete = execute(recipe(), tmp_path / "run", progress=False)
    assert complete
    assert [space.round for space in summary.features] == [1, 2]
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "<h2>Feature space</h2>" in page
    chart = page.partition('id="features"')[2].partition("</figure>")[0]
    assert all(text in chart for text in ("after round 1", "after round 2", "mlp-1", "mlp-2"))
    assert chart.count("<use ") >= 2 * 2 * 60  # rounds, agents, samples


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    federation().run(1, features_at=(1,), folder=tmp_path / "run", **QUIET)
    path = tmp_path / "run" / "features-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"features-000001.safetensors is corrupted"):
        read_summary(tmp_path / "run")
