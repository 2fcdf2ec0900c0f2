"""Models that travel as ONNX: the same predictions, equal bytes, nothing of the sender's machine, hostile graphs."""

import copy
import functools
import hashlib
import json
import os
import random
import resource
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import codistill as cd
from codistill.errors import LearnerError, MessageError
from codistill.learners import as_learner, zoo
from codistill.learners.ability import Ability
from codistill.learners.plain import PlainLearner
from codistill.learners.portable import onnx_models as portable_onnx
from codistill.learners.portable import open_model
from codistill.learners.portable.onnx_graph import to_message
from codistill.learners.torch import TorchLearner
from codistill.message import Message

D, CLASSES = 5, 3


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.last(self.lstm(x)[0][:, -1])


class Attentive(nn.Module):
    """Patches, a learned token expanded over the batch, attention written out, layer norm."""

    def __init__(self):
        super().__init__()
        self.cut, self.token = nn.Conv2d(1, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.ask, self.norm, self.last = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x):
        patches = self.cut(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1)
        q, k, v = self.ask(self.norm(tokens)).chunk(3, -1)
        return self.last((torch.softmax(q @ k.transpose(1, 2) / 8**0.5, -1) @ v)[:, 0])


MODULES = {
    "linear": ((D,), lambda: nn.Linear(D, CLASSES)),
    "norm and dropout": (
        (D,),
        lambda: nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(), nn.Linear(8, CLASSES)),
    ),
    "convolutions": (
        (1, 8, 8),
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)),
        ),
    ),
    "recurrent": ((7, 4), Recurrent),
    "attentive": ((1, 8, 8), Attentive),
    "residual": ((3, 8, 8), lambda: stranger(zoo.build("resnet8", (3, 8, 8), CLASSES))),
}


def stranger(module):
    """A module of the zoo that nobody has registered."""
    return nn.Sequential(*module)


@functools.cache
def fitted(name, loss="cross_entropy"):
    shape, make = MODULES[name]
    torch.manual_seed(0)
    learner = TorchLearner(make(), loss=loss, epochs=1, batch_size=8)
    learner.fit(samples(shape), np.eye(CLASSES)[np.arange(20) % CLASSES])
    return learner


def samples(shape, n=20):
    return np.random.default_rng(0).normal(size=(n, *shape)).astype(np.float32)


def travel(message):
    return Message.decode(message.encoded)


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_predicts_the_same_elsewhere(name, loss):
    shape, _ = MODULES[name]
    learner = fitted(name, loss)
    assert Ability.PORTABLE in learner.abilities
    learner.check_travel(samples(shape), "Ann")
    arrived = open_model(travel(learner.export()), shape, CLASSES)
    for n in (1, 3, 20, 251):
        answer = arrived.predict(samples(shape, n))
        assert answer.dtype == np.float32
        np.testing.assert_allclose(answer, learner.predict(samples(shape, n)), rtol=1e-4, atol=1e-6)
    assert np.array_equal(arrived.predict(samples(shape)), arrived.predict(samples(shape).astype(np.float64)))


def test_export_leaves_the_module_and_the_generators_alone():
    learner = TorchLearner(MODULES["norm and dropout"][1]())
    x = samples((D,))
    learner.tensor(x)
    before, state = copy.deepcopy(learner.weights()), torch.get_rng_state()
    learner.export()
    learner.check_travel(x, "Ann")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(np.array_equal(before[name], weight) for name, weight in learner.weights().items())


def test_a_registered_architecture_needs_no_onnx(monkeypatch):
    monkeypatch.setattr(portable_onnx, "is_installed", lambda: False)
    learner = TorchLearner(zoo.build("mlp", (D,), CLASSES))
    assert Ability.PORTABLE in learner.abilities
    assert learner.export().plain["kind"] == "torch"
    assert Ability.PORTABLE not in TorchLearner(nn.Linear(D, CLASSES)).abilities
    assert Ability.PORTABLE not in PlainLearner(Object(linear())).abilities
    with pytest.raises(MessageError, match=r"cannot be opened without the extra onnx \(pip install"):
        open_model(travel(fitted("linear").export()), (D,), CLASSES)


def test_a_module_that_has_seen_nothing_cannot_travel_yet():
    with pytest.raises(LearnerError, match="Fit it first"):
        TorchLearner(nn.Linear(D, CLASSES)).export()


class FixedBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.last(x.reshape(len(x), D)) + torch.zeros(len(x), CLASSES)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0 * torch.randn(len(x), self.out_features)


@pytest.mark.parametrize("make", [FixedBatch, lambda: Noisy(D, CLASSES)])
def test_a_module_that_cannot_travel_is_named_before_round_0(make):
    agents = [cd.Agent(name, make(), samples((D,)), np.arange(20) % CLASSES) for name in "ab"]
    with pytest.raises(LearnerError, match=r"module of agent 'a' must be of a registered.*register_architecture"):
        cd.Federation(agents, cd.AvgKD())


# --- objects that can say to_onnx -----------------------------------------------------------------


def graph(nodes, weights=(), width=D, columns=CLASSES, domain="", version=17, **options):
    """A model x (n, width) -> y (n, columns)."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", columns])
    weights = [numpy_helper.from_array(array, name) for name, array in dict(weights).items()]
    opsets = [helper.make_opsetid("", version), helper.make_opsetid(domain or "ai.onnx.ml", 3 if not domain else 1)]
    body = helper.make_graph(nodes, "secret project", [x], options.get("outputs", [y]), weights)
    return helper.make_model(body, opset_imports=opsets, ir_version=8, producer_name="me", doc_string="/home/me/x.py")


def linear(scale=1.0):
    weights = np.arange(D * CLASSES, dtype=np.float32).reshape(D, CLASSES) * np.float32(scale)
    product = helper.make_node("MatMul", ["x", "w"], ["y"], name="/home/me/layer", doc_string="me")
    return graph([product], {"w": weights})


def trees(**changes):
    """Two stumps, on features 0 and 4, into columns 0 and 2."""
    lists = {
        "nodes_treeids": [0, 0, 0, 1, 1, 1],
        "nodes_nodeids": [0, 1, 2, 0, 1, 2],
        "nodes_featureids": [0, 0, 0, 4, 0, 0],
        "nodes_truenodeids": [1, 0, 0, 1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0, 2, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"] * 2,
        "nodes_values": [0.5, 0.0, 0.0, -0.5, 0.0, 0.0],
        "target_treeids": [0, 0, 1, 1],
        "target_nodeids": [1, 2, 1, 2],
        "target_ids": [0, 0, 2, 2],
        "target_weights": [1.0, 2.0, 3.0, 4.0],
        "n_targets": CLASSES,
    }
    return graph([helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", **(lists | changes))])


class Object:
    """A model of one's own that knows its ONNX."""

    def __init__(self, proto, as_bytes=True):
        self.proto, self.as_bytes = proto, as_bytes

    def fit(self, x, targets):
        pass

    def predict(self, x):
        return open_model(to_message(self.proto), (D,), CLASSES).predict(x)

    def to_onnx(self):
        return self.proto.SerializeToString() if self.as_bytes else self.proto


@pytest.mark.parametrize("as_bytes", [True, False])
def test_an_object_with_its_own_onnx_travels(as_bytes):
    learner = as_learner(Object(linear(), as_bytes))
    assert learner.abilities == Ability.PREDICT | Ability.PORTABLE
    x = samples((D,))
    expected = x @ np.arange(D * CLASSES, dtype=np.float32).reshape(D, CLASSES)
    arrived = open_model(travel(learner.export()), (D,), CLASSES)
    np.testing.assert_allclose(arrived.predict(x), expected, rtol=1e-5, atol=1e-5)
    images = open_model(travel(learner.export()), (1, D, 1), CLASSES)  # a table's model takes images row by row
    np.testing.assert_array_equal(images.predict(x.reshape(-1, 1, D, 1)), arrived.predict(x))


def test_trees_travel():
    x = np.float32([[0, 0, 0, 0, 0], [1, 0, 0, 0, -1]])
    arrived = open_model(travel(to_message(trees())), (D,), CLASSES)
    np.testing.assert_array_equal(arrived.predict(x), [[1, 0, 4], [2, 0, 3]])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("text", "str from to_onnx"),
        (None, "NoneType from to_onnx"),
        (b"noise" * 10, "bytes from to_onnx"),
        (b"", "0 inputs instead of one"),
    ],
)
def test_what_to_onnx_must_return(given, said):
    model = Object(linear())
    model.to_onnx = lambda: given
    with pytest.raises(LearnerError, match=rf"Object must be one graph of standard ONNX operators.*{said}"):
        PlainLearner(model).export()


# --- equal models, equal bytes, and nothing of a machine ------------------------------------------


def digests():
    return {name: hashlib.sha256(fitted(name).export().encoded).hexdigest() for name in MODULES}


def test_equal_models_are_equal_bytes_in_another_process():
    code = "import json, test_onnx; print(json.dumps(test_onnx.digests()))"
    own = {"PYTHONHASHSEED": "4711", "PYTHONPATH": os.path.dirname(__file__), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run([sys.executable, "-c", code], env=os.environ | own, capture_output=True, check=True)
    assert answer.stdout.decode().splitlines()[-1] == json.dumps(digests())
    assert digests() == digests()


def test_names_and_comments_stay_home():
    for message in (to_message(linear()), fitted("attentive").export(), fitted("recurrent").export()):
        data = message.encoded
        for word in (b"secret", b"home", b"/", b"producer", b"pytorch", b"lstm", b"token", b"Attentive", b"test_onnx"):
            assert word not in bytes(message.arrays["graph"]), word
        assert os.getcwd().encode() not in data
        named = Message.decode(data)
        assert all(name == "graph" or name[0] == "v" or name[0].isdigit() for name in named.arrays)


def test_names_do_not_matter():
    other = linear()
    other.graph.node[0].name, other.producer_name, other.graph.name = "a", "b", "c"
    other.graph.initializer[0].name = other.graph.node[0].input[1] = "weights"
    assert to_message(other).encoded == to_message(linear()).encoded
    assert to_message(linear(2.0)).encoded != to_message(linear()).encoded


def federation(runtime):
    agents = []
    for number, name in enumerate(["convolutions", "residual"]):
        torch.manual_seed(number)
        module = nn.Sequential(nn.Flatten(), nn.Linear(D, 4 + number), nn.ReLU(), nn.Linear(4 + number, CLASSES))
        agents.append(cd.Agent(name, cd.TorchLearner(module, epochs=1), samples((D,), 40), np.arange(40) % CLASSES))
    result = cd.Federation(agents, cd.AvgKD(), test=(samples((D,), 30), np.arange(30) % CLASSES)).run(
        2, runtime=runtime, alone=False, progress=False, **({"workers": 2} if runtime == "processes" else {})
    )
    return [(row["agent"], row["accuracy"], row["sent"]) for row in result.rows], [
        agent.predict(samples((D,))) for agent in result.agents.values()
    ]


def test_every_runtime_gives_the_same_bits():
    rows, predictions = federation("simulation")
    others, again = federation("processes")
    assert rows == others
    assert all(np.array_equal(one, two) for one, two in zip(predictions, again, strict=True))


# --- hostile --------------------------------------------------------------------------------------


def refused(message, said, shape=(D,), classes=CLASSES):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MessageError, match=rf"A received model must be of a known type, sound.*(?:{said})"):
        open_model(message, shape, classes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


def raw(proto, **arrays):
    """A message of a graph as it is, as a hostile sender would write it."""
    return Message({"graph": np.frombuffer(proto.SerializeToString(), np.uint8), **arrays}, {"kind": "onnx"})


def bare(change):
    """The message of a sound model, its graph changed by hand."""
    message = to_message(linear())
    proto = onnx.ModelProto.FromString(message.arrays["graph"].tobytes())
    change(proto)
    return raw(proto, **{name: array for name, array in message.arrays.items() if name != "graph"})


def test_a_graph_changed_in_nothing_is_sound():
    open_model(bare(lambda proto: None), (D,), CLASSES)
    open_model(travel(bare(lambda proto: None)), (D,), CLASSES)


def node(proto, **changes):
    for name, value in changes.items():
        setattr(proto.graph.node[0], name, value)


def external(proto):
    tensor = TensorProto(name="v1", dims=[D, CLASSES], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    proto.graph.initializer.append(tensor)


def external_constant(proto):
    external(proto)
    added = proto.graph.node.add(op_type="Constant", output=["c"])
    added.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(proto.graph.initializer.pop())


def subgraph(proto):
    node(proto, op_type="Relu")
    proto.graph.node[0].attribute.add(name="body", type=onnx.AttributeProto.GRAPH).g.name = "g"


def nested(proto, depth=90):
    place = proto.graph
    for _ in range(depth):
        place = place.node.add(op_type="Relu").attribute.add(name="g", type=onnx.AttributeProto.GRAPH).g


HOSTILE = {
    "custom domain": (lambda p: node(p, domain="com.evil"), "the domain 'com.evil'"),
    "custom opset": (lambda p: p.opset_import.append(helper.make_opsetid("com.evil", 1)), "the domain 'com.evil'"),
    "runtime's own operators": (lambda p: node(p, domain="com.microsoft"), "the domain 'com.microsoft'"),
    "external weights": (external, "weights inside of the graph"),
    "external constant": (external_constant, "numbers inside of the graph: 'value' of Constant"),
    "function": (lambda p: p.functions.add(name="MatMul", domain="ai.onnx"), "functions"),
    "training": (lambda p: p.training_info.add(), "functions, training"),
    "loop": (lambda p: node(p, op_type="Loop"), "an operator Loop, which may not travel"),
    "random": (lambda p: node(p, op_type="RandomNormalLike"), "an operator RandomNormalLike"),
    "unknown operator": (lambda p: node(p, op_type="Pickle"), "an operator Pickle"),
    "support vectors": (lambda p: node(p, op_type="SVMClassifier", domain="ai.onnx.ml"), "an operator SVMClassifier"),
    "subgraph": (subgraph, "a graph inside of the graph"),
    "nested subgraphs": (nested, "a graph inside of the graph|DecodeError"),
    "many nodes": (lambda p: p.graph.node.extend([onnx.NodeProto(op_type="Relu")] * 10_001), "10002 nodes"),
    "two inputs": (lambda p: p.graph.input.append(p.graph.input[0]), "2 inputs"),
    "no output": (lambda p: p.graph.output.pop(), "0 outputs"),
    "an input of text": (
        lambda p: setattr(p.graph.input[0].type.tensor_type, "elem_type", TensorProto.STRING),
        "an input that is not of floating-point numbers",
    ),
    "one sample only": (
        lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", 1),
        "any number of samples",
    ),
    "other samples": (
        lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 7),
        r"for samples of shape \(7,\)",
    ),
    "giant samples": (
        lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 10**10),
        "for samples of shape",
    ),
    "an output that is nowhere": (lambda p: setattr(p.graph.output[0], "name", "z"), ""),
    "a circle": (lambda p: p.graph.node[0].input.__setitem__(0, p.graph.node[0].output[0]), ""),
    "a name twice": (lambda p: p.graph.node.append(p.graph.node[0]), ""),
    "old operators": (lambda p: setattr(p.opset_import[0], "version", 0), ""),
    "operators of the future": (lambda p: setattr(p.opset_import[0], "version", 10**6), ""),
    "a format of the future": (lambda p: setattr(p, "ir_version", 10**6), ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_graphs_are_refused(name):
    change, said = HOSTILE[name]
    refused(bare(change), said)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"v1": np.full((D, CLASSES), np.nan, np.float32)}, "NaN or infinity in 'v1'"),
        ({"v1": np.full((D, CLASSES), np.inf, np.float32)}, "NaN or infinity in 'v1'"),
        ({"v1": np.full((D, CLASSES), 3e38, np.float32)}, "NaN or infinity in its predictions"),
        ({"v1": np.zeros((D, CLASSES + 1), np.float32)}, r"predictions of shape \(4, 4\) instead of \(4, 3\)"),
        ({"v1": np.zeros((D + 1, CLASSES), np.float32)}, ""),
        ({"v1": np.zeros((D, CLASSES), np.int64)}, ""),
        ({"v1": np.zeros(D, np.float32)}, ""),
        ({"v1": None}, ""),
        ({"v9": np.zeros(1)}, "numbers 'v9' that nothing reads"),
        ({"0.alpha": np.zeros(1)}, "numbers '0.alpha' that nothing reads"),
        ({"graph": np.zeros(5_000_000, np.uint8)}, "a graph of 5000000 bytes"),
        ({"graph": np.zeros((1, 1), np.uint8)}, "a graph of 1 bytes"),
        ({"graph": np.zeros(9)}, "a graph of 72 bytes"),
        ({"graph": np.zeros(50, np.uint8)}, "DecodeError"),
        ({"graph": np.zeros(0, np.uint8)}, "0 inputs"),
        ({"graph": None}, "KeyError"),
    ],
    ids=str,
)
def test_hostile_numbers_are_refused(arrays, said):
    message = to_message(linear())
    kept = {name: array for name, array in (message.arrays | arrays).items() if array is not None}
    refused(Message(kept, message.plain), said)


def test_a_bomb_of_empty_nodes_is_not_built():
    """Two bytes make a node of more than a hundred."""
    body = b"\x0a\x00" * 3_000_000
    length = len(body)
    size = bytes([length & 127 | 128, length >> 7 & 127 | 128, length >> 14 & 127 | 128, length >> 21])
    refused(Message({"graph": np.frombuffer(b"\x3a" + size + body, np.uint8)}, {"kind": "onnx"}), "a graph of 6000005")


@pytest.mark.parametrize("elements", [2_500_000_000, 10**12, 2**62])
def test_a_graph_that_asks_for_giant_memory_does_not_get_it(elements):
    nodes = [
        helper.make_node("ConstantOfShape", ["size"], ["big"]),
        helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    message = to_message(graph(nodes, {"size": np.array([elements])}, width=CLASSES))
    refused(message, "Fail|RuntimeException|Overflow|ONNXRuntimeError", shape=(CLASSES,))
    open_model(to_message(graph(nodes, {"size": np.array([10])}, width=CLASSES)), (CLASSES,), CLASSES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes_featureids": [5, 0, 0, 4, 0, 0]}, "features that do not exist"),
        ({"nodes_featureids": [-1, 0, 0, 4, 0, 0]}, "features that do not exist"),
        ({"nodes_truenodeids": [0, 0, 0, 1, 0, 0]}, "do not form trees"),  # a circle
        ({"nodes_truenodeids": [2, 0, 0, 1, 0, 0]}, "do not form trees"),  # a child of two
        ({"nodes_truenodeids": [9, 0, 0, 1, 0, 0]}, "do not form trees"),
        ({"nodes_nodeids": [0, 1, 1, 0, 1, 2]}, "do not form trees"),
        ({"nodes_nodeids": [0, 1, 2**40, 0, 1, 2]}, "giant numbers"),
        ({"nodes_values": [0.5]}, "lists of different lengths"),
        ({"nodes_modes": ["LEAF"]}, "lists of different lengths"),
        ({"nodes_modes": ["JUMP", "LEAF", "LEAF"] * 2}, ""),
        ({"target_ids": [0, 0, 2, 3]}, "outputs that do not exist"),
        ({"target_ids": [0, 0, 2, -1]}, "outputs that do not exist"),
        ({"target_nodeids": [1, 2, 1, 7]}, "leaves of other trees"),
        ({"target_weights": [1.0]}, "lists of different lengths"),
        ({"n_targets": 2**40}, "outputs that do not exist"),
        ({"base_values": [1.0]}, "base values"),
    ],
    ids=str,
)
def test_trees_must_be_walkable(changes, said):
    refused(to_message(trees(**changes)), said)


def test_trees_must_not_be_too_deep():
    depth = 2000
    count = 2 * depth + 1
    inner = np.arange(count) % 2 == 0
    inner[-1] = False
    chain = {
        "nodes_treeids": [0] * count,
        "nodes_nodeids": list(range(count)),
        "nodes_featureids": [0] * count,
        "nodes_truenodeids": [i + 1 if inner[i] else 0 for i in range(count)],
        "nodes_falsenodeids": [i + 2 if inner[i] else 0 for i in range(count)],
        "nodes_modes": ["BRANCH_LT" if inside else "LEAF" for inside in inner],
        "nodes_values": [0.0] * count,
        "target_treeids": [0],
        "target_nodeids": [1],
        "target_ids": [0],
        "target_weights": [1.0],
    }
    refused(to_message(trees(**chain)), "deeper than 500")


def test_trees_must_read_the_samples():
    leaves = {a.name: helper.get_attribute_value(a) for a in trees().graph.node[0].attribute}
    cut = helper.make_node("Slice", ["x", "zero", "one", "one"], ["z"])
    forest = helper.make_node("TreeEnsembleRegressor", ["z"], ["y"], domain="ai.onnx.ml", **leaves)
    numbers = {"zero": np.array([0]), "one": np.array([1])}
    refused(to_message(graph([cut, forest], numbers)), "does not read the samples")


def test_mutated_messages_are_refused_or_are_models():
    rng, x = random.Random(0), samples((D,))
    survived = 0
    for message in (to_message(linear()), to_message(trees()), fitted("norm and dropout").export()):
        valid = message.encoded
        start = valid.find(b"MatMul") if b"MatMul" in valid else 0
        for i in range(150):
            data = bytearray(valid)
            for _ in range(rng.choice([1, 1, 3])):
                data[rng.randrange(start if i % 2 else 0, len(data))] ^= 1 << rng.randrange(8)
            try:
                model = open_model(Message.decode(bytes(data)), (D,), CLASSES)
            except MessageError:
                continue
            survived += 1
            assert model.predict(x).shape == (len(x), CLASSES)
    assert 0 < survived < 450
