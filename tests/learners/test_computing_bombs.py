"""Received models that would compute for minutes or fill the memory are refused before they run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from computing_bombs import BOMBS, ROWS, fails_unless, products
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import Ridge
from travelling_models import CLASSES, D, exported, message
from travelling_models import N as SAMPLES

import codistill as cd
from codistill.core.errors import LearnerError, MessageError
from codistill.learners import zoo
from codistill.learners.kernel_ridge import KernelRidge
from codistill.learners.portable import ReceivedModel, onnx_models, open_model, skops_archive
from codistill.learners.portable import models as model_limits
from codistill.learners.portable.estimators import open_estimator
from codistill.learners.portable.models import open_torch
from codistill.learners.sklearn import SklearnLearner
from codistill.learners.torch import TorchLearner
from codistill.wire.message import Message

MB = 1 << 20


def memory(field: str) -> int:
    """Bytes of this process, by a line of its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


@contextmanager
def limited(seconds: float, size: int) -> Iterator[None]:
    """So much processor time and so many bytes more than before, at most."""
    Path("/proc/self/clear_refs").write_text("5")  # from here on, a new peak
    before, began = memory("VmRSS"), time.process_time()
    yield
    assert time.process_time() - began < seconds
    assert memory("VmHWM") - before < size


def received(sent: Message, shape: tuple[int, ...], classes: int, rows: int) -> ReceivedModel:
    """A model as an agent with so many rows takes it."""
    return ReceivedModel(open_model(sent, shape, classes, rows), np.zeros((rows, *shape), np.float32), classes)


@pytest.fixture(scope="module")
def meta() -> None:
    """Torch takes seconds to load what it needs to count on the meta device, once."""
    torch.nn.Linear(1, 1, device="meta")(torch.zeros(1, 1, device="meta"))


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_at_once_and_takes_little_memory(name, request):
    if name.startswith("torch"):
        request.getfixturevalue("meta")
    bomb = BOMBS[name]
    made = bomb.make()
    assert len(made.encoded) < 10 * MB
    with (
        limited(2, 200 * MB),
        pytest.raises(MessageError, match=rf"within its limits, and made for this task\..*(?:{bomb.said})"),
    ):
        received(made, bomb.shape, bomb.classes, ROWS)


def test_a_kernel_model_with_many_inputs_predicts_in_blocks():
    """40,000 inputs and 1,500 rows: 480 MB in one piece, and the same again on the way."""
    rng = np.random.default_rng(0)
    inputs, coefficients = rng.normal(size=(40_000, 1)), rng.normal(size=(40_000, 2))
    sent = message("rbf kernel")
    sent = Message({"inputs": inputs, "coefficients": coefficients}, sent.plain)
    with limited(10, 200 * MB):
        model = received(sent, (1,), 2, 1500)
    rows = rng.normal(size=(60, 1))
    gram = np.exp(-0.3 * (rows - inputs.T) ** 2)  # gamma = 0.3
    np.testing.assert_allclose(model.predict(rows), gram @ coefficients, rtol=1e-6, atol=1e-6)


def test_small_kernel_models_predict_in_one_piece():
    """So their bits are those of one product."""
    rng = np.random.default_rng(0)
    model = KernelRidge("rbf", 0.1, gamma=0.5)
    model.fit(rng.normal(size=(300, 4)), rng.normal(size=(300, 2)))
    rows, state = rng.normal(size=(700, 4)), model.state()
    assert np.array_equal(model.predict(rows), model._gram(rows, state["inputs"]) @ state["coefficients"])


def test_estimators_predict_in_blocks():
    model = open_model(message("forest"), (D,), CLASSES)
    rows = np.random.default_rng(0).normal(size=(SAMPLES, D)).astype(np.float32)
    at_once = model.predict(rows)
    assert model.block == model_limits.BLOCK // D
    model.block = 10
    assert np.array_equal(model.predict(rows), at_once)


def test_a_graph_that_computes_longer_than_counted_is_ended(monkeypatch):
    """A third of a second of products, in a fiftieth of a second of processor time."""
    sent = products(1000, 10)
    received(sent, (D,), CLASSES, ROWS)
    monkeypatch.setattr(onnx_models, "_SECONDS", 0.02)
    monkeypatch.setattr(onnx_models, "_SLOWEST", 1e15)
    with pytest.raises(MessageError, match=r"a model that took more than 0\.02 s of processor time"):
        received(sent, (D,), CLASSES, ROWS)


def test_models_for_too_many_rows_are_refused(monkeypatch):
    """Each row is within the limit, all of them are not."""
    sent = products(1000, 5)  # 1.1e10 operations, in each pass of at most 250 rows
    open_model(sent, (D,), CLASSES, 250_000)
    monkeypatch.setattr(model_limits, "CALL_OPERATIONS", 10**13)
    with pytest.raises(MessageError, match="operations in all, above 10,000,000,000,000"):
        open_model(sent, (D,), CLASSES, 250_000)


# --- honest models --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn", "lenet5", "resnet8", "femnist_cnn"])
def test_honest_modules_are_far_below_the_limits(name):
    """As ONNX and as registered architectures, a tenth of the limits at most, for all rows of a large agent."""
    shape = (1, 28, 28) if "cnn" in name else (3, 32, 32)
    learner = TorchLearner(zoo.build(name, shape, 10))
    open_model(learner.export(), shape, 10, 2000)
    learner.predict(np.zeros((1, *shape), np.float32))
    message = onnx_models.graph_message(onnx_models.module_graph(learner), name)
    taken = onnx_models.open_onnx(message, shape, 10)[1](10_000)
    assert taken.operations < min(10_000 * model_limits.ROW_OPERATIONS, model_limits.CALL_OPERATIONS) / 10
    assert taken.memory < model_limits.MEMORY / 10


def test_a_residual_network_of_18_layers_passes(meta):
    learner = TorchLearner(zoo.build("resnet18", (3, 32, 32), 10))
    rows = 2000
    sent, opened = learner.export(), []
    with limited(2, 400 * MB):
        opened.append(open_torch(sent, (3, 32, 32), 10)[1](rows))
    # 0.56e9 multiplications with additions, as is known of this network, and its activations.
    assert 1.1e9 < opened[0].operations / rows < model_limits.ROW_OPERATIONS / 8
    opened[0].check()


def test_a_model_that_receivers_would_refuse_is_an_error_before_round_0(meta):
    learner = TorchLearner(zoo.build("resnet14", (3, 512, 512), CLASSES))
    with pytest.raises(LearnerError, match=r"agent 'ann' must be within the limits.*operations per row.*smaller"):
        learner.check_travel(np.zeros((2, 3, 512, 512), np.float32), "ann")


def test_forests_of_1000_trees_are_far_below_the_limits():
    """What 50 trees take, 20 times; a forest of 1,000 takes seconds to fit and to send."""
    rng = np.random.default_rng(0)
    forest = SklearnLearner(RandomForestClassifier(50, random_state=0))
    forest.fit(rng.normal(size=(300, D)).astype(np.float32), np.eye(CLASSES)[np.arange(300) % CLASSES])
    sent = forest.export()
    packed, files = sent.arrays["model"].nbytes, skops_archive.unzipped(sent.arrays["model"].tobytes())
    text = files["schema.json"]
    assert 20 * len(text) < skops_archive._OUTLINE_LIMIT / 5
    assert 20 * (text.count(b"{") + text.count(b"[")) < skops_archive._PARTS_LIMIT / 5
    assert 20 * text.count(b",") < skops_archive._VALUES_LIMIT / 5
    assert sum(map(len, files.values())) < skops_archive._RATIO * packed / 3
    taken = open_estimator(sent, (D,), CLASSES)[1](50_000)
    assert 20 * taken.operations < min(50_000 * model_limits.ROW_OPERATIONS, model_limits.CALL_OPERATIONS) / 2


# --- in a running federation ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hijacked(cd.EKD):
    """EKD, except for what mallory sends in each round."""

    sent: tuple[Message, ...] = ()

    async def round(self, me, t):
        if me.name != "mallory":
            return await super().round(me, t)
        await me.exchange(Message(self.sent[t].arrays, {**self.sent[t].plain, "age": 0}))
        return None


def test_a_kept_model_that_fails_on_the_test_set_is_refused_by_name_and_counts_as_nothing(tmp_path):
    """It predicts for 4 rows, of the probe, and for 30, of an agent, but not for the 50 of the test set."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, D)).astype(np.float32), np.arange(30) % CLASSES
    module = torch.nn.Linear(D, CLASSES)
    models = {"ann": cd.TorchLearner(module, epochs=1), "ben": RandomForestClassifier(3), "mallory": Ridge()}
    agents = [cd.Agent(name, model, x, y) for name, model in models.items()]
    sent = (fails_unless({CLASSES + 1, 30}), Message.decode(exported("ridge")), BOMBS["onnx: products"].make())
    test = (rng.normal(size=(50, D)).astype(np.float32), np.arange(50) % CLASSES)
    result = cd.Federation(agents, Hijacked(sent=sent), test=test).run(
        3, runtime="simulation", alone=False, progress=False, folder=tmp_path / "run"
    )
    assert all(np.isfinite(row["accuracy"]) for row in result.rows if row["agent"] != "mallory")
    log = (tmp_path / "run" / "log.txt").read_text()
    for agent in ("ann", "ben"):
        assert re.search(rf"round 2: '{agent}' continues without a message of 'mallory'.*received model", log)
        assert re.search(rf"round 3: '{agent}' continues without a message of 'mallory'.*operations per row", log)
