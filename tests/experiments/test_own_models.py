"""Models of one's own file in a recipe: `learner = "net.py:Net"`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from codistill.core.errors import CheckpointError, CodistillError, LearnerError, RecipeError
from codistill.experiments.building import agent_names, build
from codistill.experiments.recipe import make_recipe
from codistill.experiments.run import execute
from codistill.experiments.saved_run import reopen
from codistill.learners.sklearn import SklearnLearner
from codistill.learners.torch import TorchLearner

NET = """
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

import parts


class Net(nn.Module):
    def __init__(self, in_features, classes, hidden=4, activation="relu"):
        super().__init__()
        make = {"relu": nn.ReLU}[activation]
        self.layers = nn.Sequential(parts.linear(in_features, hidden), make(), nn.Linear(hidden, classes))

    def forward(self, x):
        return self.layers(x)


class Own(LogisticRegression):
    def fit(self, *args, **options):
        return super().fit(*args, **options)


def scaled(C=1.0):
    return make_pipeline(StandardScaler(), LogisticRegression(C=C))


def seven():
    return 7


model = make_pipeline(StandardScaler(), LogisticRegression(C=0.5))
"""
NET_OPTIONS = {"kind": "net.py:Net", "hidden": 5, "lr": 0.01, "epochs": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "parts.py").write_text("from torch import nn\n\nlinear = nn.Linear\n")
    return tmp_path


def tables(*learners: Any) -> dict[str, Any]:
    agents = [{"learner": learner} for learner in learners]
    return {
        "data": {"name": "wine", "public": 10},
        "protocol": {"name": "fedmd", "rounds": 1},
        "agents": agents,
        "evaluation": {"alone": False},
        "runtime": {"kind": "simulation"},
    }


def test_classes_functions_and_models_of_a_file(folder: Path) -> None:
    pipeline = {"kind": "pipeline", "steps": ["StandardScaler", {"kind": "net.py:Own", "C": 2.0}]}
    learners = (
        NET_OPTIONS,
        "net.py:Own",
        {"kind": "net.py:scaled", "C": 3.0},
        "net.py:model",
        "net.py:model",
        pipeline,
    )
    recipe = make_recipe(tables(*learners), folder)
    assert agent_names(recipe) == ["Net", "Own", "scaled", "model-1", "model-2", "pipeline"]
    net, own, scaled, first, second, piped = (agent.learner for agent in build(recipe)[0].agents)
    assert isinstance(net, TorchLearner)
    assert (net.epochs, net.module.layers[0].in_features, net.module.layers[0].out_features) == (2, 13, 5)
    assert net.module.layers[2].out_features == 3
    assert net.optimiser.param_groups[0]["lr"] == 0.01
    assert all(isinstance(each, SklearnLearner) for each in (own, scaled, first, second, piped))
    assert scaled.estimator[-1].C == 3.0
    assert piped.estimator[-1].C == 2.0
    assert first.estimator is not second.estimator


def test_a_run_is_resumed_only_with_the_same_file(folder: Path) -> None:
    recipe = make_recipe(tables(NET_OPTIONS, "net.py:Own"), folder)
    execute(recipe, folder / "run", progress=False)
    facts = json.loads((folder / "run" / "run.json").read_text())
    assert list(facts["learner_code"]) == ["net.py"]
    execute(reopen(folder / "run"), folder / "run", resume=True, progress=False)
    (folder / "net.py").write_text(NET + "# another\n")
    with pytest.raises(CheckpointError, match=r"other learner_code.*files of your own models"):
        execute(reopen(folder / "run"), folder / "run", resume=True, progress=False)


@pytest.mark.parametrize(
    ("learner", "error", "words"),
    [
        ({"kind": "net.py:Net", "hiden": 3}, LearnerError, "'hiden'.*Did you mean 'hidden'"),
        ({"kind": "net.py:scaled", "lr": 0.1}, LearnerError, "Unknown option 'lr' for"),
        (
            {"kind": "net.py:Net", "activation": "x"},
            LearnerError,
            r"KeyError: 'x', at .*net.py:13",
        ),
        ("net.py:Nett", RecipeError, "no 'Nett' there.*Did you mean 'Net'"),
        ("nett.py:Net", RecipeError, "must be importable.*No such file"),
        ("net.py:seven", LearnerError, "must be a torch module.*or make one.*int"),
        ("wrong.py:Net", RecipeError, r"NameError: name 'y' is not defined, at .*wrong.py:3"),
        ("broken.py:Net", RecipeError, r"SyntaxError.*\(broken.py, line 1\)"),
    ],
)
def test_a_mistake_names_the_file_and_the_line(
    folder: Path, learner: Any, error: type[CodistillError], words: str
) -> None:
    (folder / "wrong.py").write_text("import torch\n\nx = y\n")
    (folder / "broken.py").write_text("def f(:\n")
    with pytest.raises(error, match=words):
        build(make_recipe(tables(learner), folder))
