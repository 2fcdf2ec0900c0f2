"""Models that travel: the same predictions elsewhere, equal bytes for equal models, and no training rows inside."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from model_messages import (
    attributes,
    edited,
    first,
    graph,
    linear,
    nodes,
    opened,
    plain_node,
    put,
    stumps,
    with_attribute,
    with_graph,
    with_tree_nodes,
)
from sklearn.base import is_classifier
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
)
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.kernel_ridge import KernelRidge as SklearnKernelRidge
from sklearn.multioutput import MultiOutputRegressor
from sklearn.naive_bayes import BernoulliNB, GaussianNB, MultinomialNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from travelling_models import (
    CASES,
    CLASSES,
    ESTIMATORS,
    D,
    N,
    digests,
    exported,
    fit_anew,
    fitted,
    learner,
    message,
    norm_and_dropout,
    samples,
    toy,
)

import codistill as cd
from codistill.core.errors import LearnerError, MessageError
from codistill.learners import PlainLearner, as_learner, zoo
from codistill.learners.ability import Ability
from codistill.learners.portable import onnx_models, open_model
from codistill.learners.portable.estimators import TRAVELLING, may_travel
from codistill.learners.portable.models import open_torch
from codistill.learners.portable.onnx_graph import to_message
from codistill.learners.sklearn import SklearnLearner
from codistill.learners.torch import TorchLearner
from codistill.wire.message import Message

# --- every model of the table ---------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_model_predicts_the_same_elsewhere(name):
    case, sent = CASES[name], fitted(name)
    assert Ability.PORTABLE in sent.abilities
    sent.check_travel(samples(case.shape), "Ann")
    assert message(name).plain["kind"] == case.kind
    arrived = open_model(message(name), case.shape, CLASSES)
    for n in (N, 1, 251) if case.kind == "onnx" else (N,):
        x = samples(case.shape, n)
        found, wanted = arrived.predict(x), sent.predict(x)
        if case.kind == "onnx":
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
            assert np.array_equal(found, arrived.predict(x.astype(np.float64)))
        else:
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("name", CASES)
def test_equal_models_are_equal_bytes(name):
    again = fit_anew(name)
    assert again.export().encoded == exported(name)
    if CASES[name].kind == "skops":
        restored = learner(name)
        restored.restore(again.state())
        assert restored.export().encoded == exported(name)


@pytest.mark.long
def test_equal_models_are_equal_bytes_in_another_process():
    """With another hash seed, which orders sets otherwise: one model of each way to be packed."""
    names = ["forest with votes", "boosting", "hist boosting stopped", "mlp stopped", "scaled", "registered mlp"]
    names += ["polynomial kernel", "module attentive", "module recurrent"]
    code = f"import json, travelling_models; print(json.dumps(travelling_models.digests({names})))"
    own = {"PYTHONHASHSEED": "4711", "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | own | {"PYTHONPATH": paths}, capture_output=True, check=True, text=True,
    )  # fmt: skip
    assert json.loads(answer.stdout.splitlines()[-1]) == digests(names)


def test_a_model_that_has_not_seen_every_class():
    x, _ = toy()
    sent = SklearnLearner(GradientBoostingClassifier(n_estimators=2))
    sent.fit(x, np.eye(4)[1 + 2 * (np.arange(N) % 2)])
    arrived = open_model(Message.decode(sent.export().encoded), (D,), 4)
    assert np.array_equal(arrived.predict(x), sent.predict(x))


def test_the_weights_of_a_message_are_not_aliased():
    arrived = message("registered mlp")
    weights = open_model(arrived, (D,), CLASSES).weights()
    assert not any(np.shares_memory(array, arrived.arrays[name]) for name, array in weights.items())


# --- estimators: no training rows inside ----------------------------------------------------------


def columns(array):
    """The numbers of an array, field by field."""
    for name in array.dtype.names or [None]:
        yield (array if name is None else array[name]).ravel().astype(np.float64)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_training_row_is_in_a_travelling_model(name):
    """Neither a row, nor an array as long as the data or its weighted copies, but those of trees' own nodes."""
    x, _ = toy()
    outline, files = opened(message(name))
    trees = [node for node in nodes(outline) if "Tree" in node["__class__"]]
    in_trees = {inner["file"] for node in trees for inner in nodes(node["content"]) if "file" in inner}
    for file, data in files.items():
        array = np.load(io.BytesIO(data), allow_pickle=False)
        assert file in in_trees or not {N, N * CLASSES} & set(array.shape)
        for numbers in columns(array):
            if len(numbers) >= D:
                windows = np.lib.stride_tricks.sliding_window_view(numbers, D)
                assert not np.isclose(windows[:, None], x[None], rtol=1e-4, atol=1e-5).all(axis=2).any()
    assert not {node["__loader__"] for node in nodes(outline)} & {"RandomStateNode", "RandomGeneratorNode"}


@pytest.mark.parametrize(
    "model",
    [
        KNeighborsClassifier(),
        SVC(),
        GaussianProcessClassifier(),
        SklearnKernelRidge(),
        GaussianNB(),  # a class mean is a row where the class has one sample
        MultinomialNB(),
        BernoulliNB(),
        LinearDiscriminantAnalysis(),
        BaggingClassifier(SVC()),
        AdaBoostClassifier(SVC()),
        MultiOutputRegressor(SklearnKernelRidge()),
        GradientBoostingClassifier(init=KNeighborsClassifier(), n_estimators=2),
        MultiOutputRegressor(GradientBoostingRegressor(init=SklearnKernelRidge(), n_estimators=2)),
        HistGradientBoostingClassifier(categorical_features=[0], max_iter=2),
        make_pipeline(StandardScaler(), KNeighborsClassifier()),
        make_pipeline(StandardScaler(), BaggingClassifier(KNeighborsClassifier())),
    ],
    ids=lambda model: str(model)[:50],
)
def test_models_that_hold_rows_do_not_travel(model):
    assert not may_travel(model)
    sent = SklearnLearner(model)
    assert Ability.PORTABLE not in sent.abilities
    x, targets = toy(hard=True)
    sent.fit(np.abs(x) if isinstance(model, MultinomialNB) else x, targets)
    with pytest.raises(MessageError):  # and whoever sends one all the same is refused
        open_model(Message.decode(sent.export().encoded), (D,), CLASSES)


def test_a_class_of_ones_own_does_not_travel_by_its_name():
    class Ridge(SklearnKernelRidge):
        pass

    assert not may_travel(Ridge())


def test_every_listed_type_is_in_the_table():
    def inside(model):
        yield type(model).__name__
        for value in model.get_params().values():
            if hasattr(value, "get_params"):
                yield type(value).__name__

    made = [make() for make in ESTIMATORS.values()]
    assert {name for model in made for name in inside(model)} == TRAVELLING
    assert all(is_classifier(model) or model.__sklearn_tags__().estimator_type == "regressor" for model in made)


# --- estimators: harmless changes -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["tree", "forest", "boosting", "hist boosting", "scaled", "components"])
def test_a_rebuilt_message_is_sound(name):
    """So that hostile messages are refused for what was done to them."""
    arrived = open_model(edited(name, lambda outline, files: None), (D,), CLASSES)
    assert np.array_equal(arrived.predict(toy()[0]), fitted(name).predict(toy()[0]))


@pytest.mark.parametrize(
    "harmless",
    [
        lambda: with_tree_nodes("hist boosting", put("bitset_idx", slice(None), 2**32 - 1)),
        lambda: with_tree_nodes("hist boosting", put("bin_threshold", slice(None), 255)),
        lambda: with_attribute("hist boosting", "_in_fit", False),
        # scikit-learn itself cuts this down to what there is
        lambda: edited(
            "tree", lambda outline, _: attributes(first(outline, "TreeNode")).update(node_count=plain_node(10**9))
        ),
        lambda: with_attribute("boosting from zero", "n_trees_per_iteration_", CLASSES),
    ],
    ids=["bitsets without categories", "bins without categories", "at rest", "many nodes", "as many trees as outputs"],
)
def test_what_is_not_followed_does_no_harm(harmless):
    arrived = open_model(harmless(), (D,), CLASSES)
    kept = {"HistGradientBoostingClassifier": "hist boosting", "DecisionTreeClassifier": "tree"}
    name = kept.get(arrived.describe(), "boosting from zero")
    assert np.array_equal(arrived.predict(toy()[0]), fitted(name).predict(toy()[0]))


def test_a_received_model_computes_with_one_thread():
    def many_threads(outline, files):
        for node in nodes(outline):
            if node["__class__"] == "RandomForestClassifier":
                attributes(node)["n_jobs"] = plain_node(64)

    assert open_model(edited("components", many_threads), (D,), CLASSES).estimator[-1].n_jobs is None


# --- ONNX -----------------------------------------------------------------------------------------


def test_export_leaves_the_module_and_the_generators_alone():
    sent = TorchLearner(norm_and_dropout())
    sent.tensor(samples((D,)))
    before, state = copy.deepcopy(sent.weights()), torch.get_rng_state()
    sent.export()
    sent.check_travel(samples((D,)), "Ann")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(np.array_equal(before[name], weight) for name, weight in sent.weights().items())


def test_a_registered_architecture_needs_no_onnx(monkeypatch):
    arriving = message("module linear")
    monkeypatch.setattr(onnx_models, "is_installed", lambda: False)
    sent = TorchLearner(zoo.build("mlp", (D,), CLASSES))
    assert Ability.PORTABLE in sent.abilities
    assert sent.export().plain["kind"] == "torch"
    assert Ability.PORTABLE not in TorchLearner(nn.Linear(D, CLASSES)).abilities
    assert Ability.PORTABLE not in PlainLearner(Object(linear())).abilities
    with pytest.raises(MessageError, match=r"cannot be opened without the extra onnx \(pip install"):
        open_model(arriving, (D,), CLASSES)


def test_a_named_head_travels():
    """Of a registered architecture with its weights; where none is named, the message has not a byte more."""
    x = np.ones((2, D), np.float32)
    found, named = (TorchLearner(zoo.build("mlp", (D,), CLASSES), head=head) for head in (None, "1"))
    assert "head" not in found.export().plain
    sent = named.export()
    there = open_torch(sent, (D,), CLASSES)[0]
    assert there.head_name == "1"
    np.testing.assert_array_equal(there.evaluated_features(x), x)
    for wrong in ("2", "nowhere", 5, ["1"]):
        with pytest.raises(MessageError):
            open_model(Message(sent.arrays, sent.plain | {"head": wrong}), (D,), CLASSES)


def test_a_module_that_has_seen_nothing_cannot_travel_yet():
    with pytest.raises(LearnerError, match="Fit it first"):
        TorchLearner(nn.Linear(D, CLASSES)).export()


class FixedBatch(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.zeros(len(x), self.out_features)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0 * torch.randn(len(x), self.out_features)


@pytest.mark.parametrize("module", [FixedBatch, Noisy])
def test_a_module_that_cannot_travel_is_named_before_round_0(module):
    agents = [cd.Agent(name, module(D, CLASSES), toy()[0], np.arange(N) % CLASSES) for name in "ab"]
    with pytest.raises(LearnerError, match=r"module of agent 'a' must be of a registered.*register_architecture"):
        cd.Federation(agents, cd.AvgKD())


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
    sent = as_learner(Object(linear(), as_bytes))
    assert sent.abilities == Ability.PREDICT | Ability.PORTABLE
    x, arriving = toy()[0], Message.decode(sent.export().encoded)
    arrived = open_model(arriving, (D,), CLASSES)
    expected = x @ np.arange(D * CLASSES, dtype=np.float32).reshape(D, CLASSES)
    np.testing.assert_allclose(arrived.predict(x), expected, rtol=1e-5, atol=1e-5)
    images = open_model(arriving, (1, D, 1), CLASSES)  # a table's model takes images row by row
    np.testing.assert_array_equal(images.predict(x.reshape(-1, 1, D, 1)), arrived.predict(x))


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


def test_trees_travel_as_onnx():
    x = np.float32([[0, 0, 0, 0, 0], [1, 0, 0, 0, -1]])
    arrived = open_model(Message.decode(to_message(stumps()).encoded), (D,), CLASSES)
    np.testing.assert_array_equal(arrived.predict(x), [[1, 0, 4], [2, 0, 3]])


def test_a_graph_changed_in_nothing_is_sound():
    open_model(with_graph(lambda proto: None), (D,), CLASSES)
    few = {"size": np.array([10]), "w": np.ones((D, CLASSES), np.float32)}
    sized = onnx.helper.make_node("ConstantOfShape", ["size"], ["big"])
    added = [onnx.helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=0)]
    added += [onnx.helper.make_node("MatMul", ["x", "w"], ["z"]), onnx.helper.make_node("Add", ["z", "sum"], ["y"])]
    assert open_model(to_message(graph([sized, *added], few)), (D,), CLASSES).predict(toy()[0]).shape == (N, CLASSES)


def test_names_and_comments_are_not_sent():
    for sent in (to_message(linear()), message("module attentive"), message("module recurrent")):
        for word in (b"secret", b"home", b"/", b"producer", b"pytorch", b"lstm", b"token", b"Attentive", b"travelling"):
            assert word not in bytes(sent.arrays["graph"]), word
        assert os.getcwd().encode() not in sent.encoded
        assert all(name == "graph" or name[0] == "v" or name[0].isdigit() for name in sent.arrays)


def test_names_do_not_matter():
    other = linear()
    other.graph.node[0].name, other.producer_name, other.graph.name = "a", "b", "c"
    other.graph.initializer[0].name = other.graph.node[0].input[1] = "weights"
    assert to_message(other).encoded == to_message(linear()).encoded
    assert to_message(linear(2.0)).encoded != to_message(linear()).encoded


def federation(runtime):
    agents = []
    for number, name in enumerate("ab"):
        torch.manual_seed(number)
        module = nn.Sequential(nn.Flatten(), nn.Linear(D, 4 + number), nn.ReLU(), nn.Linear(4 + number, CLASSES))
        agents.append(cd.Agent(name, cd.TorchLearner(module, epochs=1), samples((D,), 40), np.arange(40) % CLASSES))
    workers = {"workers": 2} if runtime == "processes" else {}
    result = cd.Federation(agents, cd.AvgKD(), test=(samples((D,), 30), np.arange(30) % CLASSES)).run(
        2, runtime=runtime, alone=False, progress=False, **workers
    )
    return result.rows, [agent.predict(samples((D,))) for agent in result.agents.values()]


def test_models_as_onnx_give_the_same_bits_in_every_runtime():
    rows, predictions = federation("simulation")
    others, again = federation("processes")
    assert rows == others
    assert all(np.array_equal(one, two) for one, two in zip(predictions, again, strict=True))
