"""One agent of a running federation sends what is no model: it is refused by name, and the others go on.

The honest agents must end with the very bits they would have if the hostile one had sent nothing.
"""

import functools
import io
import json
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import skops.io
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier

import codistill as cd
from codistill.learners import zoo
from codistill.learners.portable.onnx_graph import to_message
from codistill.learners.sklearn import SklearnLearner
from codistill.learners.torch import TorchLearner
from codistill.message import Message

D, CLASSES, ROUNDS = 5, 3, 2
TRAP = "codistill-was-trapped"


def data(seed, n=30):
    """Rows that reach far beyond what a model is probed with."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % CLASSES
    x = rng.normal(size=(n, D)) + labels[:, None]
    x[:, 0] *= 1000
    return x.astype(np.float32), labels


@dataclass(frozen=True, kw_only=True)
class Hijacked(cd.AvgKD):
    """AvgKD, except for what mallory sends."""

    attack: Callable[[], Message | None] = lambda: None

    async def round(self, me, t):
        if me.name != "mallory":
            return await super().round(me, t)
        message = self.attack()
        if message is not None:
            await me.exchange(message)
        return None


def federation(attack, folder=None):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(D, 6), torch.nn.Tanh(), torch.nn.Linear(6, CLASSES))
    models = {
        "ann": RandomForestClassifier(4),
        "ben": TorchLearner(zoo.build("mlp", (D,), CLASSES, hidden=[6]), epochs=1),
        "mallory": Ridge(),
        "cleo": TorchLearner(module, epochs=1),  # travels as ONNX
    }
    agents = [cd.Agent(name, model, *data(number)) for number, (name, model) in enumerate(models.items())]
    run = cd.Federation(agents, Hijacked(attack=attack), test=data(9)).run(
        ROUNDS, runtime="simulation", alone=False, progress=False, folder=folder
    )
    targets = {agent.name: agent.state["targets"] for agent in agents if agent.name != "mallory"}
    answers = {name: run.agents[name].predict(data(9)[0]) for name in targets}
    return targets, answers, run


@pytest.fixture(scope="module")
def without_mallory():
    return federation(lambda: None)


# --- what mallory sends ---------------------------------------------------------------------------


class Trap:
    """Whoever unpickles it makes a folder."""

    def __reduce__(self):
        return os.mkdir, (TRAP,)


def on_the_wire(raw):
    """Bytes that are no message at all."""
    message = Message({"any": np.zeros(1)})
    message.__dict__["encoded"] = raw
    return message


def announced(shape, nbytes, actual=0):
    header = json.dumps({"0.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * actual


def network(shape=(D,), classes=CLASSES, arrays=None, **plain):
    torch.manual_seed(1)
    message = TorchLearner(zoo.build("mlp", shape, classes, hidden=[4])).export()
    return Message(message.arrays | (arrays or {}), message.plain | plain)


def logistic(weight):
    message = TorchLearner(zoo.build("logistic", (D,), CLASSES)).export()
    signs = np.sign(np.arange(CLASSES) - 1.0)  # classes pull against one another
    arrays = {
        name: np.broadcast_to(weight * signs[:, None] if array.ndim == 2 else 0 * signs, array.shape)
        for name, array in message.arrays.items()
    }
    return Message({name: array.astype(np.float32) for name, array in arrays.items()}, message.plain)


def estimator(model, features=D, classes=CLASSES):
    learner = SklearnLearner(model)
    x, labels = data(4)
    learner.fit(np.tile(x, 2)[:, :features], np.eye(classes)[labels % classes])
    return learner.export()


def archive(raw):
    return Message({"model": np.frombuffer(raw, np.uint8)}, {"kind": "skops", "classes": CLASSES})


@functools.cache
def spaces():
    """1.2 GB of spaces in about 1 MB."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file, file.open("schema.json", "w") as one:
        for _ in range(120):
            one.write(b" " * 10_000_000)
    return out.getvalue()


def zip_bomb(claim=None):
    """With or without a lie about how long it is."""
    raw = bytearray(spaces())
    if claim is not None:
        start = raw.rfind(b"PK\x01\x02") + 24
        raw[start : start + 4] = struct.pack("<I", claim)
    return archive(bytes(raw))


def onnx_model(width=D, columns=CLASSES, weights=None, nodes=None, change=None, **numbers):
    """y = x w as ONNX; `change` is what a hostile sender does to the graph at last."""
    weights = np.ones((width, columns), np.float32) if weights is None else weights
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", columns])
    held = [numpy_helper.from_array(array, name) for name, array in ({"w": weights} | numbers).items()]
    graph = helper.make_graph(nodes or [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], held)
    message = to_message(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    if change is None:
        return message
    proto = ModelProto.FromString(message.arrays["graph"].tobytes())
    arrays = change(proto, dict(message.arrays))
    return Message(arrays | {"graph": np.frombuffer(proto.SerializeToString(), np.uint8)}, message.plain)


def custom_domain(proto, arrays):
    proto.graph.node[0].domain = "com.mallory"
    proto.opset_import.add(domain="com.mallory", version=1)
    return arrays


def external_data(proto, arrays):
    tensor = TensorProto(name="v1", dims=[D, CLASSES], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../../../etc/passwd")
    proto.graph.initializer.append(tensor)
    return {name: array for name, array in arrays.items() if name == "graph"}


def nan_inside(proto, arrays):
    proto.graph.initializer.append(numpy_helper.from_array(np.full((D, CLASSES), np.nan, np.float32), "v1"))
    return {name: array for name, array in arrays.items() if name == "graph"}


def nan_beside(proto, arrays):
    return arrays | {"v1": np.full((D, CLASSES), np.nan, np.float32)}


def giant():
    """40 GB, asked for in a few bytes."""
    nodes = [
        helper.make_node("ConstantOfShape", ["size"], ["big"]),
        helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=0),
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("Add", ["z", "sum"], ["y"]),
    ]
    return onnx_model(nodes=nodes, size=np.array([10**10]))


ATTACKS = {
    "pickle for a message": (lambda: on_the_wire(pickle.dumps(Trap())), "valid safetensors"),
    "noise for a message": (lambda: on_the_wire(np.random.default_rng(0).bytes(5000)), "valid safetensors"),
    "no bytes": (lambda: on_the_wire(b""), "valid safetensors"),
    "10 GB announced": (lambda: on_the_wire(announced([50_000, 50_000], 10**10)), "valid safetensors"),
    "10 GB announced, some sent": (lambda: on_the_wire(announced([50_000, 50_000], 10**10, 4096)), "valid safetensors"),
    "a header of 10 GB": (lambda: on_the_wire(struct.pack("<Q", 10**10) + b"{}"), "valid safetensors"),
    "pickle for a model": (lambda: archive(pickle.dumps(Trap())), "BadZipFile"),
    "a kind unknown": (lambda: network(kind="pickle"), "a model of unknown kind 'pickle'"),
    "no model at all": (lambda: Message({"f": np.zeros((4, CLASSES))}), "a model of unknown kind None"),
    "architecture unknown": (lambda: network(name="backdoor"), "'backdoor'"),
    "10 GB of layers": (lambda: network(options='{"hidden": [50000, 50000]}'), "do not fit the architecture"),
    "NaN weights": (lambda: network(arrays={"1.bias": np.full(4, np.nan, np.float32)}), "NaN or infinity in '1.bias'"),
    "wrong class count": (lambda: network(classes=CLASSES + 1), f"and {CLASSES + 1} classes"),
    "wrong sample shape": (lambda: network(shape=(D + 1,)), f"a model for samples [{D + 1}]"),
    "overflow where it is not probed": (lambda: logistic(1e37), "NaN or infinity in its predictions"),
    "estimator unknown": (lambda: archive(skops.io.dumps(Trap())), "may not travel"),
    "estimator full of rows": (lambda: estimator(KNeighborsClassifier()), "KNeighborsClassifier, which may not travel"),
    "estimator of other classes": (lambda: estimator(RandomForestClassifier(2), classes=2), "a model for 2 classes"),
    "estimator of other samples": (lambda: estimator(Ridge(), D + 2), f"a model for {D + 2} features"),
    "zip bomb": (zip_bomb, "an archive that unpacks to 1200000000 bytes"),
    "zip bomb that lies": (lambda: zip_bomb(100), "A received model must be"),
    "ONNX of a custom domain": (lambda: onnx_model(change=custom_domain), "operators of the domain 'com.mallory'"),
    "ONNX with external data": (lambda: onnx_model(change=external_data), "weights inside of the graph"),
    "ONNX with NaN inside": (lambda: onnx_model(change=nan_inside), "weights inside of the graph"),
    "ONNX with NaN beside": (lambda: onnx_model(change=nan_beside), "NaN or infinity in 'v1'"),
    "ONNX that wants 40 GB": (giant, "A received model must be"),
    "ONNX of other classes": (lambda: onnx_model(columns=2), "predictions of shape (4, 2) instead of (4, 3)"),
    "ONNX of other samples": (lambda: onnx_model(width=D + 1), f"a model for samples of shape ({D + 1},)"),
    "ONNX that overflows": (
        lambda: onnx_model(weights=np.full((D, CLASSES), 1e37, np.float32)),
        "NaN or infinity in its predictions",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_model_is_refused_by_name_and_the_others_go_on(name, tmp_path, monkeypatch, without_mallory):
    attack, said = ATTACKS[name]
    monkeypatch.chdir(tmp_path)
    made = attack()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    targets, answers, run = federation(lambda: made, tmp_path / "run")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # kB
    assert not (tmp_path / TRAP).exists()

    refusals = [line for line in (tmp_path / "run" / "log.txt").read_text().splitlines() if "goes on without" in line]
    for number in range(1, ROUNDS + 1):
        for receiver in targets:
            said_of = [line for line in refusals if f"round {number}: '{receiver}' goes on without" in line]
            assert len(said_of) == 1
            assert "a message of 'mallory'" in said_of[0]
            assert said in said_of[0]

    alike, answered, _ = without_mallory
    for agent in targets:
        assert np.array_equal(targets[agent], alike[agent])
        assert np.array_equal(answers[agent], answered[agent])
    assert len([row for row in run.rows if row["round"] == ROUNDS]) == 4


def test_the_others_learn_from_one_another(without_mallory):
    """ŷ = (y + Σ of two others) / 3: no longer the labels, and further from them than a third."""
    targets, _, _ = without_mallory
    for number, name in [(0, "ann"), (1, "ben"), (3, "cleo")]:
        labels = np.eye(CLASSES)[data(number)[1]]
        assert np.isfinite(targets[name]).all()
        assert np.abs(targets[name] - labels).max() > 0.1


def likely(weights):
    """A sound ONNX model: probabilities."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Softmax", ["z"], ["y"], axis=1)]
    return onnx_model(nodes=nodes, weights=weights)


@pytest.mark.parametrize(
    "model", [network, lambda: logistic(1e-3), lambda: likely(np.eye(D, CLASSES, dtype=np.float32) / 100)]
)
def test_a_sound_model_of_the_same_sender_is_heard(model, without_mallory):
    """So that what is refused above is refused for what was done to it."""
    targets, _, _ = federation(model)
    assert all(not np.array_equal(targets[name], other) for name, other in without_mallory[0].items())


def test_answers_below_zero_do_not_end_the_run():
    """A classifier learns probabilities: of real values it takes what is positive."""
    targets, _, _ = federation(lambda: onnx_model(weights=np.full((D, CLASSES), -1, np.float32)))
    assert all((wanted >= 0).all() for wanted in targets.values())
