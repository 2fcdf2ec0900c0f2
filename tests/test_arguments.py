"""Arguments of what users call: a misspelt, misplaced or missing one is named with what was meant."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from torch import nn

import codistill as cd
from codistill.errors import ArgumentError

X, Y = np.eye(4), np.array([0, 1, 0, 1])


def agent(**named: object) -> cd.Agent:
    return cd.Agent("a", LogisticRegression(), X, Y, **named)


def federation(**named: object) -> cd.Federation:
    return cd.Federation([agent()], cd.Alone(), **named)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: federation().run(round=3), "Federation.run takes only arguments that it has. Found: 'round'. Did you"),
        (lambda: federation().run(round=3), "Did you mean 'rounds'?"),
        (lambda: federation().run(seed=3), "Say it to the federation: Federation(..., seed=...)."),
        (lambda: federation().run(local_epochs=3), "belongs to the protocol, as in codistill.FedMD(local_epochs=...)"),
        (
            lambda: federation().run(3, "simulation"),
            "takes at most 1 argument by place. Found: 'simulation'. Write Fed",
        ),
        (lambda: federation().run(3, rounds=3), "Federation.run takes each argument once. Found: 'rounds' twice."),
        (lambda: federation(publc=X), "Federation takes only arguments that it has. Found: 'publc'. Did you mean 'pub"),
        (lambda: federation(rounds=3), "Say it where the protocol is run: federation.run(rounds=...)."),
        (lambda: cd.Federation([agent()]), "Federation must be given 'protocol'. Found: no such argument. Write Fed"),
        (lambda: agent(tst=(X, Y)), "Agent takes only arguments that it has. Found: 'tst'. Did you mean 'test'?"),
        (lambda: agent(lr=0.1), "It belongs to the model: codistill.TorchLearner(module, lr=...)."),
        (lambda: cd.Agent("a"), "Agent must be given 'model'. Found: no such argument. Write Agent(name, model, x)."),
        (lambda: cd.TorchLearner(nn.Linear(2, 2), epoch=3), "Did you mean 'epochs'?"),
        (lambda: cd.TorchLearner(nn.Linear(2, 2), 0.1), "TorchLearner takes at most 1 argument by place. Found: 0.1."),
        (lambda: cd.serve(cd.FedMD(), ["a"], classes=2, lissten=""), "serve takes only arguments that it has."),
        (lambda: cd.serve(cd.FedMD(), ["a"], classes=2), "serve must be given 'listen'."),
        (lambda: cd.join(agent(), "hub:7447", cert="certs"), "Did you mean 'certs'?"),
        (lambda: cd.load("a.codistill", modell=None), "Did you mean 'model'?"),
        (lambda: cd.advise([agent()], second=3), "Did you mean 'seconds'?"),
        (lambda: cd.Score("cost", max, greater_is_bettr=False), "Did you mean 'greater_is_better'?"),
        (lambda: cd.Score("cost"), "Score must be given 'function'. Found: no such argument. Write Score(name, functi"),
        (lambda: cd.Topology(["a", "b"], [("a", "b")], direct=True), "Did you mean 'directed'?"),
        (lambda: cd.KernelRidge("rbf", 1.0, 3), "KernelRidge takes at most 2 arguments by place. Found: 3."),
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
