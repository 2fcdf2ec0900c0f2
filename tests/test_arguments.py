"""Arguments of what users call: a misspelt, misplaced or missing one is named with what was meant."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from torch import nn

import codistill as cd
from codistill.core.errors import ArgumentError

X, Y = np.eye(4), np.array([0, 1, 0, 1])


def agent(**named: object) -> cd.Agent:
    return cd.Agent("a", LogisticRegression(), X, Y, **named)


def federation(**named: object) -> cd.Federation:
    return cd.Federation([agent()], cd.Alone(), **named)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: federation().run(round=3), "Federation.run got an unexpected argument 'round'. Did you"),
        (lambda: federation().run(round=3), "Did you mean 'rounds'?"),
        (lambda: federation().run(seed=3), "Pass it to Federation(..., seed=...)."),
        (lambda: federation().run(local_epochs=3), "Pass it to the protocol, as in codistill.FedMD(local_epochs=...)"),
        (
            lambda: federation().run(3, "simulation"),
            "takes at most 1 positional argument. Found: 'simulation'. Write Fed",
        ),
        (lambda: federation().run(3, rounds=3), "Federation.run got the argument 'rounds' twice."),
        (lambda: federation(publc=X), "Federation got an unexpected argument 'publc'. Did you mean 'public'?"),
        (lambda: federation(rounds=3), "Pass it to federation.run(rounds=...)."),
        (lambda: cd.Federation([agent()]), "Federation needs the argument 'protocol'. Write Fed"),
        (lambda: agent(tst=(X, Y)), "Agent got an unexpected argument 'tst'. Did you mean 'test'?"),
        (lambda: agent(lr=0.1), "Pass it to the model: codistill.TorchLearner(module, lr=...)."),
        (lambda: cd.Agent("a"), "Agent needs the argument 'model'. Write Agent(name, model, x)."),
        (lambda: cd.TorchLearner(nn.Linear(2, 2), epoch=3), "Did you mean 'epochs'?"),
        (
            lambda: cd.TorchLearner(nn.Linear(2, 2), 0.1),
            "TorchLearner takes at most 1 positional argument. Found: 0.1.",
        ),
        (lambda: cd.serve(cd.FedMD(), ["a"], classes=2, lissten=""), "serve got an unexpected argument 'lissten'."),
        (lambda: cd.serve(cd.FedMD(), ["a"], classes=2), "serve needs the argument 'listen'."),
        (lambda: cd.join(agent(), "hub:7447", cert="certs"), "Did you mean 'certs'?"),
        (lambda: cd.load("a.codistill", modell=None), "Did you mean 'model'?"),
        (lambda: cd.advise([agent()], second=3), "Did you mean 'seconds'?"),
        (lambda: cd.Score("cost", max, greater_is_bettr=False), "Did you mean 'greater_is_better'?"),
        (lambda: cd.Score("cost"), "Score needs the argument 'function'. Write Score(name, functi"),
        (lambda: cd.Topology(["a", "b"], [("a", "b")], direct=True), "Did you mean 'directed'?"),
        (lambda: cd.KernelRidge("rbf", 1.0, 3), "KernelRidge takes at most 2 positional arguments. Found: 3."),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_meant(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["Federation", "Agent", "TorchLearner", "serve", "join", "load", "advise"])
def test_help_shows_the_arguments(name: str) -> None:
    shown = inspect.signature(getattr(cd, name)).parameters
    assert "self" not in shown
    assert "values" not in shown


def test_options_of_a_kernel_are_still_taken() -> None:
    assert cd.KernelRidge("rbf", gamma=2.0).kernel_options == {"gamma": 2.0}
