"""Models that travel: round trips to the bit, equal bytes, no rows inside, and hostile models refused."""

import copy
import functools
import hashlib
import io
import json
import lzma
import operator
import os
import pickle
import random
import resource
import struct
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import pytest
import skops.io
import torch
from sklearn.base import is_classifier
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    BaggingRegressor,
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.kernel_ridge import KernelRidge as SklearnKernelRidge
from sklearn.linear_model import (
    ElasticNet,
    Lasso,
    LinearRegression,
    LogisticRegression,
    Perceptron,
    Ridge,
    RidgeClassifier,
    SGDClassifier,
)
from sklearn.multioutput import MultiOutputRegressor
from sklearn.naive_bayes import BernoulliNB, GaussianNB, MultinomialNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, Normalizer, RobustScaler, StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor, ExtraTreeClassifier, ExtraTreeRegressor

from codistill.errors import CheckpointError, MessageError
from codistill.learners import zoo
from codistill.learners.ability import Ability
from codistill.learners.kernel_ridge import KernelRidge
from codistill.learners.portable import open_model
from codistill.learners.portable.estimator_state import load_own_estimator
from codistill.learners.portable.sklearn_models import TRAVELLING, may_travel
from codistill.learners.sklearn import SklearnLearner
from codistill.learners.torch import TorchLearner
from codistill.message import Message

N, D, CLASSES = 37, 5, 3

MODELS = {
    "tree": lambda: DecisionTreeClassifier(max_depth=3, random_state=0),
    "regression tree": lambda: DecisionTreeRegressor(max_depth=3, random_state=0),
    "extra tree": lambda: ExtraTreeClassifier(max_depth=3, random_state=0),
    "extra regression tree": lambda: ExtraTreeRegressor(max_depth=3, random_state=0),
    "forest": lambda: RandomForestClassifier(3, random_state=0),
    "forest with votes": lambda: RandomForestClassifier(20, oob_score=True, random_state=0),
    "regression forest": lambda: RandomForestRegressor(20, oob_score=True, random_state=0),
    "extra trees": lambda: ExtraTreesClassifier(3, random_state=0),
    "extra regression trees": lambda: ExtraTreesRegressor(3, random_state=0),
    "boosting": lambda: GradientBoostingClassifier(n_estimators=2, random_state=0),
    "boosting from zero": lambda: GradientBoostingClassifier(
        n_estimators=2, init="zero", subsample=0.5, random_state=0
    ),
    "boosting columns": lambda: MultiOutputRegressor(
        GradientBoostingRegressor(n_estimators=2, loss="huber", random_state=0)
    ),
    "hist boosting": lambda: HistGradientBoostingClassifier(max_iter=2, min_samples_leaf=3, random_state=0),
    "hist boosting stopped": lambda: HistGradientBoostingClassifier(max_iter=3, early_stopping=True, random_state=0),
    "hist boosting columns": lambda: MultiOutputRegressor(
        HistGradientBoostingRegressor(max_iter=2, min_samples_leaf=3, random_state=0)
    ),
    "adaboost": lambda: AdaBoostClassifier(n_estimators=2, random_state=0),
    "bagging": lambda: BaggingClassifier(n_estimators=2, max_features=0.6, random_state=0),
    "bagging columns": lambda: BaggingRegressor(n_estimators=2, random_state=0),
    "logistic": lambda: LogisticRegression(),
    "linear": lambda: LinearRegression(),
    "ridge": lambda: Ridge(),
    "ridge classifier": lambda: RidgeClassifier(),
    "lasso": lambda: Lasso(0.01),
    "elastic net": lambda: ElasticNet(0.01),
    "sgd": lambda: SGDClassifier(loss="log_loss", average=True, random_state=0),
    "perceptron": lambda: Perceptron(random_state=0),
    "linear svm": lambda: LinearSVC(random_state=0),
    "mlp": lambda: MLPClassifier(4, max_iter=30, tol=1, n_iter_no_change=2, random_state=0),
    "mlp stopped": lambda: MLPClassifier(
        4, max_iter=30, tol=1, early_stopping=True, n_iter_no_change=2, random_state=0
    ),
    "mlp columns": lambda: MLPRegressor(hidden_layer_sizes=4, solver="lbfgs", tol=1, random_state=0),
    "scaled": lambda: make_pipeline(StandardScaler(), RobustScaler(), LogisticRegression()),
    "scaled otherwise": lambda: make_pipeline(MinMaxScaler(), MaxAbsScaler(), Normalizer(), Ridge()),
    "components": lambda: make_pipeline(PCA(2, random_state=0), RandomForestClassifier(2, random_state=0)),
}


def toy(hard=False):
    rng = np.random.default_rng(0)
    labels = np.arange(N) % (CLASSES - 1)
    labels[5] = CLASSES - 1  # a class with one sample
    x = (rng.normal(size=(N, D)) + labels[:, None]).astype(np.float32)
    onehot = np.eye(CLASSES)[labels]
    return x, onehot if hard else 0.7 * onehot + 0.3 * rng.dirichlet(np.ones(CLASSES), size=N)


def fitted(model):
    learner = SklearnLearner(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few trees, too few iterations
        learner.fit(*toy(hard=Ability.PREDICT not in learner.abilities))
    return learner


@functools.cache
def exported(name):
    """A model of the table, as the bytes of its message."""
    return fitted(MODELS[name]()).export().encoded


def travel(message):
    return Message.decode(message.encoded)


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_an_estimator_predicts_the_same_elsewhere(name):
    learner = fitted(MODELS[name]())
    assert Ability.PORTABLE in learner.abilities
    arrived = open_model(travel(learner.export()), (D,), CLASSES)
    x, _ = toy()
    assert np.array_equal(arrived.predict(x), learner.predict(x))


def test_an_estimator_for_images():
    x, targets = toy()
    learner = SklearnLearner(RandomForestClassifier(2, random_state=0))
    learner.fit(x.reshape(N, 1, 1, D), targets)
    arrived = open_model(travel(learner.export()), (1, 1, D), CLASSES)
    assert np.array_equal(arrived.predict(x.reshape(N, 1, 1, D)), learner.predict(x))


def test_a_model_that_has_not_seen_every_class():
    x, _ = toy()
    learner = SklearnLearner(GradientBoostingClassifier(n_estimators=2))
    learner.fit(x, np.eye(4)[1 + 2 * (np.arange(N) % 2)])
    arrived = open_model(travel(learner.export()), (D,), 4)
    assert np.array_equal(arrived.predict(x), learner.predict(x))


@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("mlp", (D,), {"hidden": [4, 3]}),
        ("mlp", (D,), {}),
        ("logistic", (1, 2, 2), {}),
        ("cnn", (1, 8, 8), {"width": 2}),
        ("resnet8", (3, 8, 8), {}),
    ],
)
def test_a_torch_model_predicts_the_same_elsewhere(name, shape, options, loss):
    torch.manual_seed(0)
    learner = TorchLearner(zoo.build(name, shape, CLASSES, **options), loss=loss, epochs=1, batch_size=8)
    x = np.random.default_rng(0).normal(size=(20, *shape)).astype(np.float32)
    learner.fit(x, np.eye(CLASSES)[np.arange(20) % CLASSES])
    arrived = open_model(travel(learner.export()), shape, CLASSES)
    assert np.array_equal(arrived.predict(x), learner.predict(x))
    assert learner.export().encoded == learner.export().encoded


@pytest.mark.parametrize(("kernel", "options"), [("rbf", {"gamma": 0.3}), ("polynomial", {"degree": 2, "coef0": 1.0})])
def test_a_kernel_model_travels_if_its_owner_agrees(kernel, options):
    x, targets = toy()
    learner = KernelRidge(kernel, 0.1, reveal_inputs=True, **options)
    learner.fit(x, targets)
    arrived = open_model(travel(learner.export()), (D,), CLASSES)
    assert np.array_equal(arrived.predict(x), learner.predict(x))


# --- equal models, equal bytes --------------------------------------------------------------------


def digests():
    return {name: hashlib.sha256(exported(name)).hexdigest() for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_equal_models_are_equal_bytes(name):
    learner = fitted(MODELS[name]())
    assert learner.export().encoded == exported(name)
    restored = SklearnLearner(MODELS[name]())
    restored.restore(learner.state())
    assert restored.export().encoded == exported(name)


def test_equal_models_are_equal_bytes_in_another_process():
    code = "import json, test_portable; print(json.dumps(test_portable.digests()))"
    own = {"PYTHONHASHSEED": "4711", "PYTHONPATH": os.path.dirname(__file__), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | own, capture_output=True, check=True, text=True
    )
    assert json.loads(answer.stdout.splitlines()[-1]) == digests()


# --- data stays home ------------------------------------------------------------------------------


def opened(message):
    """The outline of a travelling estimator and its files."""
    with zipfile.ZipFile(io.BytesIO(message.arrays["model"].tobytes())) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    return json.loads(files.pop("schema.json")), files


def nodes(outline):
    if isinstance(outline, dict):
        if "__loader__" in outline:
            yield outline
        outline = list(outline.values())
    if isinstance(outline, list):
        for item in outline:
            yield from nodes(item)


def columns(array):
    """The numbers of an array, field by field."""
    for name in array.dtype.names or [None]:
        yield (array if name is None else array[name]).ravel().astype(np.float64)


@pytest.mark.parametrize("name", MODELS)
def test_no_row_is_in_a_travelling_model(name):
    x, _ = toy()
    _, files = opened(Message.decode(exported(name)))
    for data in files.values():
        for numbers in columns(np.load(io.BytesIO(data), allow_pickle=False)):
            if len(numbers) >= D:
                windows = np.lib.stride_tricks.sliding_window_view(numbers, D)
                near = np.isclose(windows[:, None], x[None], rtol=1e-4, atol=1e-5)
                assert not near.all(axis=2).any()


@pytest.mark.parametrize("name", MODELS)
def test_nothing_of_single_rows_is_in_a_travelling_model(name):
    """No array is as long as the training data, or as its weighted copies, but those of trees' own nodes."""
    outline, files = opened(Message.decode(exported(name)))
    inside_trees = {
        inner["file"]
        for node in nodes(outline)
        if "Tree" in node["__class__"]
        for inner in nodes(node["content"])
        if "file" in inner
    }
    for file, data in files.items():
        shape = np.load(io.BytesIO(data), allow_pickle=False).shape
        assert file in inside_trees or not {N, N * CLASSES} & set(shape)
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
    learner = SklearnLearner(model)
    assert Ability.PORTABLE not in learner.abilities
    learner.fit(*toy(hard=True)) if not isinstance(model, MultinomialNB) else learner.fit(
        np.abs(toy()[0]), toy(True)[1]
    )
    with pytest.raises(MessageError):  # and whoever sends one all the same is refused
        open_model(travel(learner.export()), (D,), CLASSES)


def test_a_class_of_ones_own_does_not_travel_by_its_name():
    class Ridge(SklearnKernelRidge):
        pass

    assert not may_travel(Ridge())


def test_every_listed_type_is_among_the_models_tested():
    def inside(model):
        yield type(model).__name__
        for value in model.get_params().values():
            if hasattr(value, "get_params"):
                yield type(value).__name__

    tested = {name for make in MODELS.values() for name in inside(make())}
    assert tested == {name for line in TRAVELLING for name in line.split()}
    assert all(
        is_classifier(make()) or make().__sklearn_tags__().estimator_type == "regressor" for make in MODELS.values()
    )


# --- hostile: torch and kernels -------------------------------------------------------------------


def refused(message, shape=(D,), classes=CLASSES, said=""):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MessageError, match=rf"A received model must be of a known type, sound.*(?:{said})"):
        open_model(message, shape, classes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


@functools.cache
def torch_message():
    torch.manual_seed(0)
    return TorchLearner(zoo.build("mlp", (D,), CLASSES, hidden=[4])).export()


def changed(message, arrays=None, **plain):
    """A message with other values; None takes one away."""
    keep = {name: value for name, value in (message.plain | plain).items() if value is not None}
    taken = {name: array for name, array in (message.arrays | (arrays or {})).items() if array is not None}
    return Message(taken, keep)


@pytest.mark.parametrize(
    "plain",
    [
        {"kind": None},
        {"kind": "pickle"},
        {"kind": ["torch"]},
        {"name": None},
        {"name": "secret_net"},
        {"name": "__import__('os')"},
        {"name": ["mlp"]},
        {"name": "logistic"},
        {"shape": [D + 1]},
        {"shape": "many"},
        {"shape": None},
        {"classes": CLASSES + 1},
        {"classes": None},
        {"options": '{"hidden": [5]}'},
        {"options": '{"hidden": [4, 4]}'},
        {"options": '{"hidden": [1000000, 1000000]}'},  # 4 TB
        {"options": '{"hidden": [50000, 50000]}'},  # 10 GB
        {"options": '{"hidden": [1000000000000000000]}'},
        {"options": json.dumps({"hidden": [1] * 100_000})},
        {"options": '{"hidden": [-1]}'},
        {"options": '{"hidden": "4"}'},
        {"options": '{"depth": 4}'},
        {"options": '["hidden"]'},
        {"options": "hidden"},
        {"options": "[" * 100_000},
        {"options": 7},
        {"options": None},
        {"probabilistic": None},
    ],
    ids=str,
)
def test_a_torch_model_must_be_a_registered_one_with_its_own_options(plain):
    refused(changed(torch_message(), **plain))


@pytest.mark.parametrize(
    "arrays",
    [
        {"1.weight": None},
        {"extra": np.zeros(1)},
        {"1.weight": np.zeros((4, D + 1), np.float32)},
        {"1.weight": np.zeros((D, 4), np.float32)},
        {"1.bias": np.zeros(1, np.float32)},
        {"1.bias": np.float32(0)},
        {"1.bias": np.full(4, 3e38, np.float32), "3.weight": np.full((CLASSES, 4), 3e38, np.float32)},  # overflows
    ],
    ids=lambda arrays: f"{next(iter(arrays))} {np.shape(next(iter(arrays.values())))}",
)
def test_a_torch_model_must_bring_its_weights_exactly(arrays):
    refused(changed(torch_message(), arrays))


def test_a_torch_model_for_another_task_is_refused():
    open_model(torch_message(), (D,), CLASSES)
    refused(torch_message(), shape=(D + 1,))
    refused(torch_message(), shape=(1, D))
    refused(torch_message(), classes=CLASSES + 1)


def test_the_weights_of_a_message_are_not_executed_and_not_aliased():
    message = travel(torch_message())
    model = open_model(message, (D,), CLASSES)
    assert not any(np.shares_memory(array, message.arrays[name]) for name, array in model.weights().items())


@pytest.mark.parametrize(
    ("arrays", "plain"),
    [
        ({"inputs": None}, {}),
        ({"inputs": np.zeros((N, D + 1))}, {}),
        ({"inputs": np.zeros(N)}, {}),
        ({"coefficients": np.zeros((N, CLASSES + 1))}, {}),
        ({"coefficients": np.zeros((N - 1, CLASSES))}, {}),
        ({"inputs": np.zeros((0, D)), "coefficients": np.zeros((0, CLASSES))}, {}),
        ({}, {"kernel": "wavelet"}),
        ({}, {"kernel": "precomputed"}),
        ({}, {"kernel": ["rbf"]}),
        ({}, {"kernel": None}),
        ({}, {"options": '{"n_jobs": 1000}'}),
        ({}, {"options": '{"metric": "rbf"}'}),
        ({}, {"options": '{"gamma": "os.system"}'}),
        ({}, {"options": '{"c": 1}'}),
        ({}, {"options": "[]"}),
        ({"coefficients": np.full((N, CLASSES), 1e308)}, {}),
    ],
    ids=str,
)
def test_a_kernel_model_must_be_made_for_the_task(arrays, plain):
    learner = KernelRidge("rbf", 0.1, reveal_inputs=True)
    learner.fit(*toy())
    refused(changed(learner.export(), arrays, **plain))


# --- hostile: estimators --------------------------------------------------------------------------


def model_message(data, **plain):
    return Message({"model": np.frombuffer(data, np.uint8)}, {"kind": "skops", "classes": CLASSES} | plain)


def closed(outline, files, method=zipfile.ZIP_DEFLATED):
    """The opposite of `opened`."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("schema.json", json.dumps(outline))
        for name, data in files.items():
            archive.writestr(name, data)
    return model_message(out.getvalue())


def npy(array):
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def plain_node(value):
    return {"__class__": "str", "__module__": "builtins", "__loader__": "JsonNode", "content": json.dumps(value)}


def first(outline, loader=None, name=None):
    return next(n for n in nodes(outline) if loader in (None, n["__loader__"]) and name in (None, n["__class__"]))


def attributes(node):
    return node["content"]["content"]


def test_a_rebuilt_message_is_sound():
    """So that what is refused below is refused for what was done to it."""
    for name in ("forest", "boosting", "hist boosting", "scaled"):
        learner = open_model(closed(*opened(Message.decode(exported(name)))), (D,), CLASSES)
        assert np.array_equal(learner.predict(toy()[0]), fitted(MODELS[name]()).predict(toy()[0]))


class Trap:
    """Whoever unpickles it makes a folder."""

    def __init__(self, where):
        self.where = str(where)

    def __reduce__(self):
        return os.mkdir, (self.where,)


class Foreign:
    def __init__(self):
        self.harmless = 1


def foreign_models(where):
    yield "own class", Foreign()
    yield "own class inside", Ridge(Foreign())
    yield "partial", Ridge(functools.partial(os.mkdir, where))
    yield "function", Ridge(os.mkdir)
    yield "method", Ridge(Ridge().fit)
    yield "operator", Ridge(operator.methodcaller("mkdir", where))
    yield "type", Ridge(Foreign)
    yield "unlisted estimator inside", Ridge(KMeans())
    yield "set", Ridge({1, 2})
    yield "slice", Ridge(slice(3))
    yield "bytes", Ridge(b"1")
    yield "text array", Ridge(np.array(["a"]))
    yield "masked", Ridge(np.ma.MaskedArray([1.0], [True]))
    yield "a list", [Ridge()]
    yield "a number", 7


def test_pickles_are_not_opened(tmp_path):
    where = tmp_path / "trap"
    refused(model_message(pickle.dumps(Trap(where))))
    refused(closed({"__loader__": "ObjectNode"}, {"model.pkl": pickle.dumps(Trap(where))}))
    outline, files = opened(Message.decode(exported("logistic")))
    files["0.npy"] = b"\x93NUMPY\x01\x00" + struct.pack("<H", 70)
    files["0.npy"] += (
        b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}".ljust(69) + b"\n" + pickle.dumps([Trap(where)])
    )
    refused(closed(outline, files))
    assert not where.exists()


def test_foreign_types_are_not_built(tmp_path):
    where = tmp_path / "trap"
    for name, model in foreign_models(str(where)):
        try:
            refused(model_message(skops.io.dumps(model)))
        except BaseException as error:
            error.add_note(name)
            raise
    assert not where.exists()


def call(module, name, *arguments, loader="ConstructorFromReduceNode"):
    """A node of the skops format that calls a function on loading."""
    content = {"__class__": "tuple", "__module__": "builtins", "__loader__": "TupleNode"}
    content["content"] = [plain_node(argument) for argument in arguments]
    return {"__class__": name, "__module__": module, "__loader__": loader, "content": content} | (
        {"__reduce__": {"args": content}} if loader != "ConstructorFromReduceNode" else {}
    )


@pytest.mark.parametrize("loader", ["ConstructorFromReduceNode", "LossNode", "TreeNode", "ObjectNode", "FunctionNode"])
@pytest.mark.parametrize("protocol", [0, 2])
def test_no_node_calls_a_function(tmp_path, loader, protocol):
    outline, files = opened(Message.decode(exported("ridge")))
    attributes(outline)["alpha"] = call("os", "mkdir", str(tmp_path / "trap"), loader=loader)
    outline["protocol"] = protocol
    refused(closed(outline, files), said=r"a part of type os\.mkdir, which may not travel")
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize(
    ("loader", "module", "name"),
    [
        ("LossNode", "sklearn.tree._tree", "Tree"),
        ("TypeNode", "sklearn.tree._tree", "Tree"),
        ("ObjectNode", "sklearn.tree._tree", "Tree"),
        ("ConstructorFromReduceNode", "sklearn.tree._tree", "Tree"),
        ("ObjectNode", "sklearn.svm._classes", "SVC"),
        ("ObjectNode", "sklearn.linear_model._base", "Ridge"),
        ("ObjectNode", "codistill.learners.sklearn", "Ridge"),
        ("NdArrayNode", "numpy", "void"),
        ("NdArrayNode", "numpy", "str_"),
        ("DictNode", "collections", "OrderedDict"),
        ("CachedNode", "builtins", "str"),
        ("NoSuchNode", "builtins", "str"),
        (None, None, None),
    ],
)
def test_every_part_must_be_on_the_list(loader, module, name):
    outline, files = opened(Message.decode(exported("ridge")))
    array = first(outline, "NdArrayNode")
    node = {"__loader__": loader, "__module__": module, "__class__": name, "content": copy.deepcopy(outline["content"])}
    node |= {"__reduce__": {"args": call("a", "b", 1, 2)["content"]}, "type": "numpy", "file": array["file"]}
    attributes(outline)["alpha"] = node
    said = (
        "UntrustedTypesFound" if (module, name) == ("sklearn.linear_model._base", "Ridge") else "which may not travel"
    )
    refused(closed(outline, files), said=said)


def test_parts_may_not_refer_to_one_another():
    """Ten lists of ten references each would be 10¹⁰ parts."""
    outline, files = opened(Message.decode(exported("ridge")))
    inner = plain_node(1) | {"__id__": 1}
    for level in range(2, 12):
        again = [{"__id__": level - 1}] * 9
        content = [inner, *again]
        inner = {
            "__class__": "list",
            "__module__": "builtins",
            "__loader__": "ListNode",
            "content": content,
            "__id__": level,
        }
    attributes(outline)["alpha"] = inner
    refused(closed(outline, files), said="refer to one another")
    outline, files = opened(Message.decode(exported("ridge")))
    attributes(outline)["alpha"] = {"__class__": "x", "__module__": "x", "__loader__": "CachedNode", "__id__": 1}
    refused(closed(outline, files))


@pytest.mark.parametrize("classes", [CLASSES + 1, None, "3", [CLASSES]])
def test_an_estimator_for_other_classes_is_refused(classes):
    refused(changed(Message.decode(exported("forest")), classes=classes), said="a model for .* classes")


@pytest.mark.parametrize("name", ["forest", "ridge", "scaled", "hist boosting", "boosting", "mlp"])
def test_an_estimator_for_another_task_is_refused(name):
    message = Message.decode(exported(name))
    refused(message, shape=(D + 1,), said=f"a model for {D} features")
    refused(message, shape=(D - 1,), said=f"a model for {D} features")
    refused(changed(message, classes=CLASSES - 1), classes=CLASSES - 1)


def test_an_unfitted_estimator_is_refused():
    for model in (
        Ridge(),
        RandomForestClassifier(),
        HistGradientBoostingClassifier(),
        make_pipeline(StandardScaler(), Ridge()),
    ):
        refused(model_message(skops.io.dumps(model)))
        refused(changed(SklearnLearner(model).export(), classes=CLASSES))


@pytest.mark.parametrize("data", [b"", b"PK", b"noise" * 100, b"PK\x05\x06" + b"\0" * 18])
def test_what_is_no_archive_is_refused(data):
    refused(model_message(data))
    refused(Message({}, {"kind": "skops", "classes": CLASSES}))


def test_a_model_of_another_version_is_refused():
    outline, files = opened(Message.decode(exported("ridge")))
    attributes(outline)["_sklearn_version"] = plain_node("0.1")
    refused(closed(outline, files), said="InconsistentVersionWarning")


def test_numbers_in_a_model_must_be_finite():
    outline, files = opened(Message.decode(exported("ridge")))
    coefficients = attributes(outline)["coef_"]["file"]
    files[coefficients] = npy(np.full((CLASSES, D), np.nan))
    refused(closed(outline, files), said="NaN or infinity in a model")
    files[coefficients] = npy(np.full((CLASSES, D), 1e300))  # as float32, infinite
    refused(closed(outline, files), said="NaN or infinity in its predictions")


@pytest.mark.parametrize(
    "array",
    [np.zeros((CLASSES, D + 1)), np.zeros((CLASSES + 1, D)), np.zeros(D), np.zeros((1, CLASSES, D)), np.zeros((0, D))],
    ids=lambda array: str(array.shape),
)
@pytest.mark.parametrize("name", ["ridge", "logistic", "linear svm"])
def test_coefficients_must_have_the_right_shape(name, array):
    outline, files = opened(Message.decode(exported(name)))
    files["new.npy"] = npy(array)
    attributes(outline)["coef_"]["file"] = "new.npy"
    refused(closed(outline, files))


# --- hostile: sizes -------------------------------------------------------------------------------


def claims(data, name, size):
    """The archive with another claim of how long a file is when unpacked."""
    data = bytearray(data)
    for mark, offset, at in ((b"PK\x03\x04", 22, 30), (b"PK\x01\x02", 24, 46)):
        start = data.find(mark)
        while start >= 0:
            if data[start + at : start + at + len(name)] == name:
                data[start + offset : start + offset + 4] = struct.pack("<I", size)
            start = data.find(mark, start + 4)
    return bytes(data)


def test_an_archive_that_claims_to_be_giant_is_not_unpacked():
    data = Message.decode(exported("ridge")).arrays["model"].tobytes()
    refused(model_message(claims(data, b"schema.json", 2**32 - 2)), said="an archive that unpacks to")


def test_an_archive_that_is_larger_than_it_may_be_is_not_unpacked(monkeypatch):
    outline, files = opened(Message.decode(exported("ridge")))
    message = closed(outline, files | {"more.npy": b"\0" * 1_000_000})
    open_model(message, (D,), CLASSES)
    monkeypatch.setattr("codistill.learners.portable.skops_archive.UNPACKED_LIMIT", 1_000_000)
    refused(message, said="an archive that unpacks to")


def test_an_archive_that_claims_to_be_small_is_not_unpacked_further():
    out = io.BytesIO()
    archive = zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with archive, archive.open("schema.json", "w") as file:
        for _ in range(6):
            file.write(b" " * 100_000_000)  # 600 MB in 3 MB
    assert len(out.getvalue()) < 5_000_000
    refused(model_message(claims(out.getvalue(), b"schema.json", 200)))


def test_unusual_archives_are_refused():
    outline, files = opened(Message.decode(exported("ridge")))
    for method in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):  # whose size on unpacking Python does not limit
        refused(closed(outline, files, method), said="unusual way")
    refused(model_message(lzma.compress(b"model")))


def test_an_array_is_as_long_as_it_says():
    outline, files = opened(Message.decode(exported("ridge")))
    coefficients = attributes(outline)["coef_"]["file"]
    header = np.lib.format.magic(1, 0) + struct.pack("<H", 118)

    def says(shape, descr="'<f8'", body=b"0" * 8):
        text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
        return header + text.ljust(117) + b"\n" + body

    for shape in ("(10000000000,)", "(1000000, 1000000)", "(2,)", "(0,)", "(-1,)", "(2, 0)"):
        files[coefficients] = says(shape)
        refused(closed(outline, files), said="an array that is shorter or longer than it says")
    for shape in ("('1',)", "1", "(2**9,)", "__import__('os')"):
        files[coefficients] = says(shape)
        refused(closed(outline, files), said="header|shape|malformed")
    for descr in ("'<U2'", "'|S8'", "'|O'", "'<M8[s]'", "'<c16'", "'|V0'", "[('a', '|O')]"):
        files[coefficients] = says("(1,)", descr)
        refused(closed(outline, files), said="an array of dtype")


def test_one_file_may_not_be_read_over_and_over(monkeypatch):
    monkeypatch.setattr("codistill.learners.portable.skops_archive.UNPACKED_LIMIT", 1_000_000)
    outline, files = opened(Message.decode(exported("ridge")))
    open_model(closed(outline, files), (D,), CLASSES)
    files["big.npy"] = npy(np.zeros(50_000))
    array = first(outline, "NdArrayNode") | {"file": "big.npy"}
    attributes(outline)["alpha"] = {
        "__class__": "list",
        "__module__": "builtins",
        "__loader__": "ListNode",
        "content": [array] * 3,
    }
    refused(closed(outline, files), said="a model of more than 1000000 bytes")


@pytest.mark.parametrize("count", ["n_classes_", "n_outputs_", "n_trees_per_iteration_"])
@pytest.mark.parametrize("value", [10**9, 10**30, 0, -1, 1.5, [1, 10**9], "many", None])
def test_counts_are_held_to_the_task(count, value):
    name = {"n_classes_": "forest", "n_outputs_": "regression forest", "n_trees_per_iteration_": "hist boosting"}[count]
    outline, files = opened(Message.decode(exported(name)))
    attributes(outline)[count] = plain_node(value)
    refused(closed(outline, files), said=f"{count} = ")


def test_a_received_model_computes_with_one_thread():
    outline, files = opened(Message.decode(exported("components")))
    for node in nodes(outline):
        if node["__class__"] == "RandomForestClassifier":
            attributes(node)["n_jobs"] = plain_node(64)
    model = open_model(closed(outline, files), (D,), CLASSES)
    assert model.estimator[-1].n_jobs is None


# --- hostile: what compiled code follows ----------------------------------------------------------


def with_nodes(name, change):
    """A model whose first tree has nodes changed by hand."""
    outline, files = opened(Message.decode(exported(name)))
    loader, where = ("ObjectNode", "nodes") if name.startswith("hist") else ("TreeNode", "nodes")
    tree = first(outline, loader, "TreePredictor" if name.startswith("hist") else "Tree")
    array = np.load(io.BytesIO(files[attributes(tree)[where]["file"]])).copy()
    array = change(array) if callable(change) else array
    files["changed.npy"] = npy(array)
    attributes(tree)[where]["file"] = "changed.npy"
    return closed(outline, files)


def put(field, index, value):
    def change(array):
        array[field][index] = value
        return array

    change.said = {
        "feature": "features that do not exist",
        "feature_idx": "features that do not exist",
        "is_categorical": "with categories",
    }.get(field, "nodes point outside")
    return change


TREES = ["tree", "regression tree", "forest", "regression forest", "adaboost", "bagging", "boosting", "components"]


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(
    "change",
    [
        put("left_child", 0, 10**6),
        put("right_child", 0, 10**6),
        put("right_child", 0, -1),
        put("right_child", 0, -(10**6)),
        put("left_child", 0, -2),
        put("left_child", 0, 0),  # a circle
        put("left_child", 1, 0),  # a longer one
        put("feature", 0, D),
        put("feature", 0, 10**9),
        put("feature", 0, -2),
        lambda array: array[:0],
        lambda array: array[:1],
        lambda array: array.reshape(1, -1),
        lambda array: np.zeros(len(array)),
    ],
    ids=lambda change: "",
)
def test_trees_must_be_walkable(name, change):
    open_model(with_nodes(name, None), (D,), CLASSES)
    if "components" in name:  # two of them
        refused(with_nodes(name, put("feature", 0, 2)), said="features that do not exist")
    # An array of another form scikit-learn refuses by itself.
    refused(with_nodes(name, change), said=getattr(change, "said", ""))


@pytest.mark.parametrize("name", ["hist boosting", "hist boosting columns"])
@pytest.mark.parametrize(
    "change",
    [
        put("left", 0, 10**6),
        put("right", 0, 2**32 - 1),
        put("left", 0, 0),
        put("right", 1, 0),
        put("feature_idx", 0, D),
        put("feature_idx", 0, -1),
        put("feature_idx", 0, 2**60),
        put("is_categorical", 0, 1),  # would look up bitset_idx and the map of categories
        put("is_leaf", slice(None), 0),
        lambda array: array[:0],
        lambda array: array[:1],
        lambda array: array.reshape(1, -1),
        lambda array: np.zeros(len(array)),
    ],
    ids=lambda change: "",
)
def test_trees_of_histograms_must_be_walkable(name, change):
    open_model(with_nodes(name, None), (D,), CLASSES)
    refused(with_nodes(name, change), said=getattr(change, "said", ""))


def test_bins_and_bitsets_are_not_followed():
    """Without categories nothing looks at them: whatever they hold, the model predicts what it did."""
    x, _ = toy()
    learner = fitted(MODELS["hist boosting"]())

    def change(array):
        array["bitset_idx"] = 2**32 - 1
        array["bin_threshold"] = 255
        return array

    arrived = open_model(with_nodes("hist boosting", change), (D,), CLASSES)
    assert np.array_equal(arrived.predict(x), learner.predict(x))


def with_attribute(name, attribute, value):
    """A model with one attribute set by hand; ... takes it away."""
    outline, files = opened(Message.decode(exported(name)))
    own, types = attributes(outline), outline["content"]["key_types"]["content"]
    types.append(types[0])  # one too many does no harm
    own[attribute] = plain_node(None if value is ... else value)
    if value is ...:
        del own[attribute]
    return closed(outline, files)


@pytest.mark.parametrize(("attribute", "value"), [("_in_fit", True), ("_in_fit", 1), ("_preprocessor", "scaler")])
def test_hist_boosting_must_be_at_rest(attribute, value):
    open_model(with_attribute("hist boosting", "_in_fit", False), (D,), CLASSES)
    refused(with_attribute("hist boosting", attribute, value), said="with categories, or in the middle of a fit")


@pytest.mark.parametrize("name", ["forest", "tree", "boosting", "hist boosting"])
def test_models_must_say_how_many_features_they_see(name):
    """It is what samples are held to before compiled code reads them."""
    for value in (D + 1, 10**9, "5", None, True):
        refused(with_attribute(name, "n_features_in_", value), said=f"a model for {value} features")
    refused(with_attribute(name, "n_features_in_", float(D)), said="without a number of features")
    refused(with_attribute(name, "n_features_in_", ...), said="KeyError: 'n_features_in_'")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("forest", "than those of their ensemble"),
        ("boosting", "than those of their ensemble"),
        ("bagging", "is expecting"),
    ],
)
def test_every_tree_must_see_what_its_ensemble_sees(name, said):
    outline, files = opened(Message.decode(exported(name)))
    trees = [n for n in nodes(outline) if "DecisionTree" in n["__class__"] and "TreeNode" in str(n.get("content"))]
    attributes(trees[-1])["n_features_in_"] = plain_node(D + 3)
    refused(closed(outline, files), said=f"a tree of the wrong size|{said}")
    attributes(trees[-1])["tree_"]["__reduce__"]["args"]["content"][0] = plain_node(D + 3)
    refused(closed(outline, files), said=said)


def test_a_tree_must_see_what_it_says_it_sees():
    outline, files = opened(Message.decode(exported("tree")))
    first(outline, "TreeNode")["__reduce__"]["args"]["content"][0] = plain_node(D + 1)
    refused(closed(outline, files), said="a tree of the wrong size")


@pytest.mark.parametrize("outputs", [0, -1, 2, 1000, 10**12, "1", 1.0, None])
def test_a_tree_has_as_many_class_counts_as_outputs(outputs):
    outline, files = opened(Message.decode(exported("tree")))
    first(outline, "TreeNode")["__reduce__"]["args"]["content"][2] = plain_node(outputs)
    refused(
        closed(outline, files),
        said="other class counts than outputs" if outputs == 2 else f"a tree with {outputs} outputs",
    )


@pytest.mark.parametrize("count", [0, -5, 1, 10**9])
def test_a_tree_has_as_many_nodes_as_it_says(count):
    outline, files = opened(Message.decode(exported("tree")))
    attributes(first(outline, "TreeNode"))["node_count"] = plain_node(count)
    if count == 10**9:  # scikit-learn itself cuts this down to what there is
        open_model(closed(outline, files), (D,), CLASSES)
    else:
        refused(closed(outline, files), said="a tree of the wrong size")


def test_a_tree_without_nodes_is_refused():
    outline, files = opened(Message.decode(exported("tree")))
    node = first(outline, "TreeNode")
    node["content"]["content"], node["content"]["key_types"]["content"] = {}, []
    refused(closed(outline, files), said="a tree of the wrong size")


def test_boosting_has_as_many_trees_as_outputs():
    """Compiled code adds the trees' values to columns that it does not check."""
    outline, files = opened(Message.decode(exported("boosting from zero")))
    attributes(outline)["n_trees_per_iteration_"] = plain_node(1)
    refused(closed(outline, files), said="boosting with a wrong number of trees")
    attributes(outline)["n_trees_per_iteration_"] = plain_node(CLASSES)
    open_model(closed(outline, files), (D,), CLASSES)
    for stage in attributes(outline)["estimators_"]["content"]:
        stage["content"] = stage["content"] * 2
    refused(closed(outline, files), said="boosting with a wrong number of trees")


def test_boosting_starts_from_as_many_columns_as_it_has_trees():
    outline, files = opened(Message.decode(exported("boosting")))
    start = attributes(attributes(outline)["init_"])
    assert np.load(io.BytesIO(files[start["class_prior_"]["file"]])).shape == (CLASSES,)
    files["prior.npy"] = npy(np.array([1.0]))
    start["class_prior_"]["file"] = "prior.npy"
    refused(closed(outline, files), said="boosting from a start of the wrong shape")


def test_boosting_starts_from_nothing_but_a_constant():
    outline, files = opened(Message.decode(exported("boosting")))
    other, more = opened(Message.decode(exported("tree")))
    for node in nodes(other):
        if "file" in node:
            node["file"] = f"other {node['file']}"
    attributes(outline)["init_"] = other
    message = closed(outline, files | {f"other {name}": data for name, data in more.items()})
    refused(message, said="boosting from an unknown start")


# --- hostile: noise -------------------------------------------------------------------------------


def survives(data, x):
    """Whether bytes are a model; if so, it must answer as one."""
    try:
        model = open_model(Message.decode(data), (D,), CLASSES)
    except MessageError:
        return False
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        assert model.predict(x).shape == (len(x), CLASSES)
    return True


def noise(rng, data, start=0):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        where = rng.randrange(start, len(data))
        match rng.randrange(3):
            case 0:
                data[where] = rng.randrange(256)
            case 1:
                data[where] ^= 1 << rng.randrange(8)
            case 2:
                data[where] = ord(rng.choice('0123456789-{}[]",:'))
    return bytes(data)


@pytest.mark.parametrize("name", ["forest", "hist boosting", "boosting", "scaled", "mlp", "torch"])
def test_mutated_messages_are_refused_or_are_models(name):
    rng = random.Random(0)
    x, _ = toy()
    valid = torch_message().encoded if name == "torch" else exported(name)
    assert survives(valid, x)
    for _ in range(100):
        survives(noise(rng, valid), x)


@pytest.mark.parametrize("name", ["tree", "forest", "hist boosting", "boosting", "logistic", "mlp"])
def test_mutated_models_are_refused_or_are_models(name):
    """Inside of the archive, where no checksum helps: the outline and the arrays."""
    rng = random.Random(1)
    x, _ = toy()
    outline, files = opened(Message.decode(exported(name)))
    arrays = [file for file in files if len(files[file]) > 130]
    survived = 0
    for i in range(60):
        other, text = dict(files), json.dumps(outline).encode()
        if i % 3:
            file = rng.choice(arrays)
            other[file] = noise(rng, files[file], start=rng.choice([0, 128]))
        else:
            text = noise(rng, text)
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for member, data in (other | {"schema.json": text}).items():
                archive.writestr(member, data)
        survived += survives(model_message(out.getvalue()).encoded, x)
    assert survived < 60


def test_random_messages_are_refused():
    rng = np.random.default_rng(0)
    for size in (0, 1, 30, 1000):
        refused(model_message(rng.bytes(size)))
        refused(model_message(b"PK\x03\x04" + rng.bytes(size)))


# --- at rest --------------------------------------------------------------------------------------


def test_a_checkpoint_calls_no_function(tmp_path):
    """Not even those of packages whose classes are trusted: numpy.load would unpickle."""
    np.save(tmp_path / "trap.npy", np.array([Trap(tmp_path / "trap")], dtype=object), allow_pickle=True)
    for module, name, arguments in [
        ("numpy", "load", (str(tmp_path / "trap.npy"), None, True)),
        ("builtins", "eval", (f"__import__('os').mkdir({str(tmp_path / 'trap')!r})",)),
        ("os", "mkdir", (str(tmp_path / "trap"),)),
    ]:
        for loader in ("ConstructorFromReduceNode", "LossNode"):
            outline, files = opened(Message.decode(exported("ridge")))
            attributes(outline)["alpha"] = call(module, name, *arguments, loader=loader)
            with pytest.raises(CheckpointError, match="Resume with the recipe"):
                load_own_estimator(closed(outline, files).arrays["model"].tobytes(), Ridge())
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("data", [b"", b"noise", pickle.dumps([1])])
def test_a_damaged_checkpoint_is_a_checkpoint_error(data):
    with pytest.raises(CheckpointError):
        load_own_estimator(data, Ridge())
