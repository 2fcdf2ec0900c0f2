"""Modules that take token ids or several arguments, and return more than a tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import codistill as cd
from codistill.core.errors import DataError, LearnerError
from codistill.learners.module_calls import ModuleCall
from codistill.wire.message import Message

random = np.random.default_rng(0)
IDS = random.integers(0, 20, (120, 6))
MASK = random.integers(0, 2, (120, 6))
Y = (IDS[:, 0] > 9).astype(int)
TABLE = {"input_ids": IDS, "attention_mask": MASK}

RETURNS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor": lambda outputs: outputs,
    "a table": lambda outputs: {"loss": None, "logits": outputs},
    "an object": lambda outputs: SimpleNamespace(logits=outputs),
    "a tuple": lambda outputs: (outputs, outputs * 2),
}


class Tokens(nn.Module):
    """Takes token ids, and a mask if there is one; returns its outputs in some form."""

    def __init__(self, form: str = "a tensor") -> None:
        super().__init__()
        self.embedding, self.head, self.form = nn.Embedding(20, 4), nn.Linear(24, 2), form

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        x = self.embedding(input_ids)
        if attention_mask is not None:
            assert attention_mask.dtype == torch.int64
            x = x * attention_mask[..., None]
        return RETURNS[self.form](self.head(x.flatten(1)))


def rows(x: Any, start: int, stop: int) -> Any:
    return {name: array[start:stop] for name, array in x.items()} if isinstance(x, dict) else x[start:stop]


def federation(x: Any, protocol: cd.Protocol, form: str = "a tensor") -> cd.Federation:
    agents = []
    for number, name in enumerate("ab"):
        torch.manual_seed(number)
        learner = cd.TorchLearner(Tokens(form), lr=0.01)
        agents.append(
            cd.Agent(name, learner, rows(x, 40 * number, 40 * number + 40), Y[40 * number : 40 * number + 40])
        )
    public = rows(x, 80, 100) if protocol.needs_public else None
    return cd.Federation(agents, protocol, public=public, test=(rows(x, 100, 120), Y[100:]))


def sent_by(x: Any, protocol: cd.Protocol, form: str, runtime: str = "simulation") -> list[Any]:
    """What the agents' models predict at the end, and the metrics."""
    result = federation(x, protocol, form).run(rounds=2, runtime=runtime, progress=False, alone=False)
    return [*(agent.predict_proba(rows(x, 0, 9)).tolist() for agent in result.agents.values()), result.rows]


@pytest.mark.parametrize("protocol", [cd.FedMD(), cd.FedAvg(), cd.FedProto(), cd.FedDKD()], ids=lambda each: each.name)
@pytest.mark.parametrize("x", [IDS, TABLE], ids=["token ids", "a table"])
def test_what_a_module_returns_beside_its_logits_changes_no_bit(x: Any, protocol: cd.Protocol) -> None:
    expected = sent_by(x, protocol, "a tensor")
    for form in RETURNS:
        assert sent_by(x, protocol, form) == expected
    assert sent_by(x, protocol, "an object", "processes") == expected


def test_arguments_get_their_columns_in_whatever_order_these_are() -> None:
    torch.manual_seed(0)
    learner = cd.TorchLearner(Tokens())
    expected = learner.module(torch.tensor(IDS), torch.tensor(MASK)).detach().numpy()
    agent = cd.Agent("a", learner, dict(reversed(TABLE.items())), Y)
    cd.Federation([agent], cd.Alone())
    assert agent.shard.x.shape == (120, 12)
    assert np.array_equal(learner.outputs(agent.shard.x).numpy(), expected)
    (batch,) = agent.shard.batches(0, 120)
    trained = learner(batch.x).detach().numpy()
    assert sorted(trained.tolist()) == sorted(expected.tolist())


def test_a_value_for_each_sample_goes_to_its_argument_as_a_vector() -> None:
    class Timed(Tokens):
        def forward(self, input_ids: torch.Tensor, hours: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            assert hours.shape == (len(input_ids),)
            assert hours.dtype == torch.float32
            return self.head(self.embedding(input_ids).flatten(1)) + hours[:, None]

    hours = random.random(120).astype(np.float32)
    learner = cd.TorchLearner(Timed())
    agent = cd.Agent("a", learner, {"hours": hours, "input_ids": IDS}, Y)
    cd.Federation([agent], cd.Alone())
    expected = learner.module(torch.tensor(IDS), torch.tensor(hours)).detach().numpy()
    assert np.array_equal(learner.outputs(agent.shard.x).numpy(), expected)


@pytest.mark.parametrize("x", [IDS, TABLE], ids=["token ids", "a table"])
@pytest.mark.parametrize("form", RETURNS)
def test_such_models_travel_and_are_saved(x: Any, form: str, tmp_path: Path) -> None:
    result = federation(x, cd.AvgKD(), form).run(rounds=1, runtime="simulation", progress=False, alone=False)
    assert not result.events
    agent, some = result.agents["a"], rows(x, 0, 9)
    agent.save(tmp_path / "model")
    expected = agent.predict_proba(some)
    assert np.allclose(cd.load(tmp_path / "model").predict_proba(some), expected, atol=1e-6)
    assert np.array_equal(cd.load(tmp_path / "model", model=Tokens(form)).predict_proba(some), expected)


def test_plain_tables_of_values_are_frames() -> None:
    columns = {"age": random.random(60), "dose": random.random(60)}
    module = nn.Sequential(nn.Linear(2, 2))
    agent = cd.Agent("a", cd.TorchLearner(module), columns, Y[:60])
    cd.Federation([agent], cd.Alone(), test=(pd.DataFrame(columns)[["dose", "age"]], Y[:60]))
    assert np.allclose(agent.shard.x[:, 1], columns["dose"])


def test_frames_with_such_names_go_to_a_module_of_one_tensor() -> None:
    frame = pd.DataFrame(random.random((40, 2)), columns=["marker[0]", "marker[1]"])
    result = cd.Federation([cd.Agent("a", nn.Linear(2, 2), frame, Y[:40])], cd.Alone()).run(rounds=1, progress=False)
    assert result.agents["a"].predict_proba(frame).shape == (40, 2)


@pytest.mark.parametrize(
    ("module", "x", "error", "text"),
    [
        (Tokens(), TABLE | {"token_types": MASK}, LearnerError, "must take 'token_types', as its samples have it"),
        (Tokens(), {"ids": IDS, "mask": MASK}, LearnerError, "must take 'ids', 'mask', as its samples have it"),
        (Tokens(), {"input_ids": [[1, 2], [3]]}, DataError, "padding=True"),
        (Tokens(), {"input_ids": IDS, "attention_mask": MASK[:9]}, DataError, "an array for each name"),
        (Tokens(), random.random((120, 6)), LearnerError, "must accept samples of shape"),
        (nn.LSTM(6, 2), IDS[:, None], LearnerError, "must give 2 outputs per sample"),
    ],
    ids=["an unknown argument", "unknown arguments", "ragged", "too few", "no whole numbers", "a sequence"],
)
def test_what_a_module_cannot_take_is_refused(module: nn.Module, x: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cd.Federation([cd.Agent("a", module, x, Y)], cd.Alone())


def test_a_module_must_return_logits() -> None:
    class Named(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"scores": super().forward(x)}

    with pytest.raises(LearnerError, match="forward must return a tensor, a table or an object with 'logits'"):
        cd.Federation([cd.Agent("a", Named(6, 2), IDS, Y)], cd.Alone())


def test_a_final_softmax_is_reported() -> None:
    module = nn.Sequential(nn.Linear(6, 2), nn.Softmax(dim=1))
    with pytest.warns(UserWarning, match="gives probabilities; remove its final softmax"):
        cd.Federation([cd.Agent("a", module, IDS, Y)], cd.Alone())


def test_the_weights_keep_their_names() -> None:
    learner = cd.TorchLearner(Tokens("a tuple"))
    cd.Federation([cd.Agent("a", learner, TABLE, Y)], cd.Alone())
    assert list(learner.weights()) == ["embedding.weight", "head.weight", "head.bias"]
    assert Message(learner.weights()).arrays.keys() == learner.weights().keys()


def test_a_call_is_saved_as_plain_values() -> None:
    call = ModuleCall(parts=(("input_ids", [1, 2], True), ("hours", 0, False)))
    assert ModuleCall.from_plain(call.as_plain()) == call
    for damaged in (["ids", [0, -1], True], [3, [0], True], ["ids", [0.5], True], ["ids", None, True]):
        with pytest.raises(ValueError, match="no argument of a module"):
            ModuleCall.from_plain({"whole": False, "parts": [damaged]})


def test_lazy_layers_are_refused_by_name() -> None:
    module = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 2))
    with pytest.raises(LearnerError, match="'0.weight' of a lazy layer"):
        cd.TorchLearner(module)
    module(torch.zeros(2, 3))
    assert cd.TorchLearner(module).predict(np.zeros((2, 3), np.float32)).shape == (2, 2)
