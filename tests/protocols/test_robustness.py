"""Bad luck and bad peers in protocols that share outputs, features or weights: nobody stops, nobody is ruined."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import codistill as cd
from codistill.core.errors import LearnerError, RecipeError
from codistill.engine.guard import GuardedLearner
from codistill.protocols.alone import baseline_of

LIAR = [cd.Fault(kind="invert", agent="c0")]  # what it sends is replaced below
X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)


def _federation(protocol: cd.Protocol, models: list[Any], scale: float = 1.0, **options: Any) -> cd.Federation:
    agents = [cd.Agent(f"c{n}", m, X[20 * n :][:20] * scale, Y[20 * n :][:20]) for n, m in enumerate(models)]
    return cd.Federation(agents, protocol, public=X * scale, classes=2, test=(X * scale, Y), **options)


def _run(federation: cd.Federation, rounds: int = 2) -> cd.Result:
    return federation.run(rounds, runtime="simulation", alone=False, progress=False)


@pytest.mark.parametrize(
    "protocol",
    [cd.FedMD(transfer_steps=2), cd.FedAL(), cd.FedDF(synchronise=False), cd.FedProto(form="public")],
    ids=lambda p: p.name,
)
@pytest.mark.parametrize("agents", [1, 2], ids=["lone", "the other is gone"])
def test_who_hears_nobody_learns_as_if_alone_also_with_batch_norm(protocol: cd.Protocol, agents: int) -> None:
    def weights(protocol: cd.Protocol) -> list[np.ndarray]:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)) for _ in range(agents)]
        gone = [cd.Fault(kind="gone", agent="c1")] if agents == 2 else []
        result = _run(_federation(protocol, models, faults=gone))
        return list(result.agents["c0"].learner.weights().values())

    for mine, alone in zip(weights(protocol), weights(baseline_of(protocol)), strict=True):
        np.testing.assert_array_equal(mine, alone)


def test_large_outputs_from_the_start_do_not_keep_an_agent_from_learning() -> None:
    """Data in units such that the outputs of a fresh model are beyond ten thousand."""
    torch.manual_seed(0)
    models = [cd.TorchLearner(nn.Linear(4, 2), lr=1e-2) for _ in range(3)]
    rows = _run(_federation(cd.FedMD(local_epochs=20, transfer_steps=1), models, scale=1e5), 6).rows
    assert np.mean([row["accuracy"] for row in rows[-3:]]) > 0.8


def test_the_start_of_a_round_can_be_returned_to_twice() -> None:
    learner = cd.TorchLearner(nn.Linear(4, 2), lr=0.1)
    agent = _federation(cd.Alone(), [learner]).agents[0]

    def step() -> None:
        learner.descend(learner(torch.from_numpy(X)).square().sum())

    step()
    guarded = GuardedLearner(agent)
    guarded(torch.from_numpy(X))
    found = []
    for _ in range(2):
        guarded._return("")
        step()
        found.append(learner.weights()["weight"])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("protocol", [cd.FedAL(), cd.FedDF(), cd.FD()], ids=lambda p: p.name)
def test_real_values_have_no_softmax(protocol: cd.Protocol) -> None:
    agents = [cd.Agent("c0", cd.TorchLearner(nn.Linear(4, 1), loss="squared"), X, X[:, :1])]
    with pytest.raises(LearnerError, match=f"{protocol.name} .*real values"):
        cd.Federation(agents, protocol, public=X)


SOFTMAX = [
    cd.FedMD(), cd.FedAL(), cd.FedDF(), cd.FedDKD(), cd.FedDKD(local="max"), cd.FedGen(), cd.FedDistill(), cd.CRS(),
    cd.DDistillation(), cd.FD(distance="kl"),
]  # fmt: skip
OF_REAL_VALUES = ["squared", nn.MSELoss(), nn.functional.l1_loss, partial(nn.functional.huber_loss, delta=2.0)]


@pytest.mark.parametrize("protocol", SOFTMAX, ids=lambda p: p.name)
@pytest.mark.parametrize("loss", OF_REAL_VALUES, ids=["squared", "module", "function", "partial"])
def test_a_model_of_real_values_is_refused_where_a_softmax_is_taken_of_its_outputs(
    protocol: cd.Protocol, loss: Any
) -> None:
    """Also where targets are labels; one with a loss of its owner's, of which nothing is known, is not."""

    def federation(loss: Any, protocol: cd.Protocol) -> cd.Federation:
        models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
        agents = [cd.Agent(f"c{n}", cd.TorchLearner(model, loss=loss), X, Y) for n, model in enumerate(models)]
        return cd.Federation(agents, protocol, public=X, classes=2)

    with pytest.raises(LearnerError, match=rf"{protocol.name} takes a softmax.*'c0' has Sequential.*avgkd, akd"):
        federation(loss, protocol)
    assert federation(nn.CrossEntropyLoss(label_smoothing=0.1), protocol)
    for other in (cd.FedAvg(), cd.FedMAX(), cd.AvgKD(), cd.FD(distance="squared"), cd.FedProto()):
        assert federation(loss, other)


@pytest.mark.parametrize("samples", [0, -20])
@pytest.mark.parametrize("protocol", [cd.FedAvg(), cd.FedDF()], ids=lambda p: p.name)
def test_a_number_of_samples_that_cannot_be_is_refused(protocol: cd.Protocol, samples: int) -> None:
    federation = _federation(
        protocol, [nn.Linear(4, 2) for _ in range(2)], faults=[cd.Fault(kind="invert", agent="c0")]
    )
    federation.faults.as_sent = lambda t, sender, number, message: cd.Message(  # type: ignore[method-assign]
        message.arrays, message.plain | ({"samples": samples} if message.plain else {})
    )
    assert _run(federation, 1).rows


@pytest.mark.parametrize(
    "change",
    [lambda f: f.astype(np.float64), lambda f: f.astype(np.int64), lambda f: f[:, :0], lambda f: np.tile(f, 2)],
    ids=["float64", "int64", "no columns", "more columns"],
)
def test_outputs_that_are_none_do_not_stop_the_hub(change: Any) -> None:
    """Of two agents, the first on the roster, whose word counts where there is no majority."""
    federation = _federation(
        cd.FedAL(), [nn.Linear(4, 2) for _ in range(2)], faults=[cd.Fault(kind="invert", agent="c0")]
    )
    federation.faults.as_sent = lambda t, sender, number, message: (  # type: ignore[method-assign]
        cd.Message({"f": change(message["f"])}) if number == 1 else message
    )
    assert _run(federation, 1).rows


def test_outputs_without_bound_do_not_stop_a_black_box() -> None:
    lies = [cd.Fault(kind="invert", agent=name, strength=1e300) for name in ("c1", "c2")]
    models = [LogisticRegression(), nn.Linear(4, 2), nn.Linear(4, 2)]
    assert _run(_federation(cd.FedMD(transfer_steps=2), models, faults=lies), 2).rows


@pytest.mark.parametrize(
    "protocol", [cd.FD(distance="squared"), cd.FedProto(), cd.FedProto(form="public")], ids=lambda p: p.name
)
def test_garbage_in_one_round_does_not_stop_an_optimiser_for_good(protocol: cd.Protocol) -> None:
    models = [nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)) for _ in range(3)]
    garbage = [cd.Fault(kind="random", agent="c2", strength=1e25, last=1)]
    result = _run(_federation(protocol, models, faults=garbage), 3)
    assert all(agent.learner.is_finite() for agent in result.agents.values())


@pytest.mark.parametrize("hidden", [(0,), (32, -1)])
def test_a_layer_has_neurons(hidden: tuple[int, ...]) -> None:
    with pytest.raises(RecipeError, match="discriminator_hidden"):
        cd.FedAL(discriminator_hidden=hidden)


@pytest.mark.parametrize("kind", ["trimmed", "median"])
def test_one_of_four_cannot_move_a_robust_target_and_a_round_with_too_few_says_so(kind: str) -> None:
    """Each of four hears three others, of which one is left out at each end: the one in the middle stays.

    In round 2 c2 is absent. Of the two others that are left, one Byzantine, none can be left out: that is an event.
    """
    torch.manual_seed(0)
    x = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    agents = [
        cd.Agent(f"c{n}", cd.TorchLearner(nn.Linear(4, 2), lr=1e-2), x[20 * n :][:20], x[20 * n :, 0][:20] > 0)
        for n in range(4)
    ]
    faults = [cd.Fault(kind="invert", agent="c3", strength=1e6), cd.Fault(kind="gone", agent="c2", first=2, last=2)]
    replies: list[dict[str, np.ndarray]] = []
    outputs: list[dict[str, np.ndarray]] = []

    def watch(sender: str, receiver: str, data: bytes) -> None:
        message = cd.Message.decode(data)
        if receiver == "hub":
            if not outputs or sender in outputs[-1]:
                outputs.append({})
                replies.append({})
            outputs[-1][sender] = message["f"]
        else:
            replies[-1][receiver] = message["told"][0]

    protocol = cd.FedMD(transfer_steps=1, aggregate=kind)
    result = _run(cd.Federation(agents, protocol, public=X, classes=2, faults=faults, watchers=[watch]), 3)
    log_p = [{name: torch.log_softmax(torch.tensor(f), 1).numpy() for name, f in each.items()} for each in outputs]
    for t in (0, 2):  # four are heard: an honest agent's target is between the two honest others'
        for name in ("c0", "c1", "c2"):
            others = np.stack([log_p[t][other] for other in ("c0", "c1", "c2") if other != name])
            assert (replies[t][name] >= others.min(axis=0) - 1e-4).all()
            assert (replies[t][name] <= others.max(axis=0) + 1e-4).all()
    assert (np.abs(replies[1]["c0"]) > 1e3).any()
    said = [event for event in result.events if "leaves nobody out" in event]
    assert said == [
        f"round 2: 'hub': aggregate = '{kind}' of 2 agents leaves nobody out: against 1 Byzantine agent it needs 3."
    ]
