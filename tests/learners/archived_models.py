"""Archives of estimators by name, each with a function that opens one: of those that travel, and of saved ones."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import scipy.sparse
import skops.io
from model_messages import closed, nodes, npy, plain_node
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import BisectingKMeans, KMeans
from sklearn.compose import make_column_transformer
from sklearn.ensemble import (
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomTreesEmbedding,
    StackingClassifier,
)
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.impute import KNNImputer, SimpleImputer
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.manifold import Isomap
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor, RadiusNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import KBinsDiscretizer, OneHotEncoder, OrdinalEncoder, SplineTransformer, TargetEncoder
from sklearn.random_projection import SparseRandomProjection
from sklearn.svm import SVC, NuSVR
from sklearn.tree import DecisionTreeClassifier
from travelling_models import CLASSES, ESTIMATORS, D, N, message, toy

from codistill.core.errors import MessageError
from codistill.learners.portable import ReceivedModel, open_model
from codistill.learners.portable.saved_learner import load_transformer
from codistill.wire.message import Message

SAVED: dict[str, Callable[[], Any]] = {
    "support vectors": lambda: SVC(),
    "support vector regression": lambda: NuSVR(kernel="poly"),
    "neighbours, brute force": lambda: KNeighborsClassifier(algorithm="brute"),
    "neighbours, k-d tree": lambda: KNeighborsClassifier(algorithm="kd_tree", leaf_size=4),
    "neighbours, ball tree": lambda: KNeighborsRegressor(algorithm="ball_tree", leaf_size=4, p=3),
    "neighbours in a radius": lambda: RadiusNeighborsClassifier(radius=50.0),
    "gaussian process": lambda: GaussianProcessClassifier(),
    "hist boosting of categories": lambda: HistGradientBoostingClassifier(
        max_iter=2, min_samples_leaf=3, categorical_features=[0, 1]
    ),
    "boosting from a model": lambda: GradientBoostingClassifier(
        n_estimators=2, init=KNeighborsClassifier(algorithm="brute")
    ),
    "calibrated": lambda: CalibratedClassifierCV(LogisticRegression(), method="isotonic", cv=2),
    "stacked": lambda: StackingClassifier(
        [("a", DecisionTreeClassifier(max_depth=2)), ("b", SVC())], LogisticRegression(), cv=2
    ),
    "clusters": lambda: make_pipeline(KMeans(2, n_init=1), LogisticRegression()),
    "bisected clusters": lambda: make_pipeline(BisectingKMeans(2), LogisticRegression()),
    "embedded by trees": lambda: make_pipeline(RandomTreesEmbedding(2, max_depth=2), Ridge()),
    "embedded by neighbours": lambda: make_pipeline(Isomap(n_neighbors=6), Ridge()),
    "imputed": lambda: make_pipeline(SimpleImputer(add_indicator=True), LogisticRegression()),
    "imputed by neighbours": lambda: make_pipeline(KNNImputer(n_neighbors=2), LogisticRegression()),
    "encoded": lambda: make_pipeline(
        make_column_transformer(
            (OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=10), [0, 1]),
            (OneHotEncoder(drop="first", handle_unknown="ignore"), [0]),
            remainder=SimpleImputer(),
        ),
        LogisticRegression(),
    ),
    "encoded as numbers": lambda: make_pipeline(
        make_column_transformer(
            (OrdinalEncoder(), [0]), (TargetEncoder(cv=2), [1]), remainder=SimpleImputer(strategy="most_frequent")
        ),
        LogisticRegression(),
    ),
    "in bins": lambda: make_pipeline(SimpleImputer(), KBinsDiscretizer(3), LogisticRegression()),
    "splines": lambda: make_pipeline(SimpleImputer(), SplineTransformer(3), Ridge()),
    "projected": lambda: make_pipeline(SparseRandomProjection(3), Ridge()),
    "isotonic": lambda: IsotonicRegression(out_of_bounds="clip"),
}  # fmt: skip


TREES = (
    "tree", "regression tree", "extra tree", "extra regression tree", "forest", "regression forest", "extra trees",
    "extra regression trees", "boosting", "boosting columns", "adaboost", "bagging", "bagging columns", "components",
)  # fmt: skip
HIST_TREES = ("hist boosting", "hist boosting columns")


def names() -> list[str]:
    """All archives."""
    return [*ESTIMATORS, *(f"saved: {name}" for name in SAVED)]


def rows(name: str) -> np.ndarray:
    """Samples for a saved model: two columns of codes, and missing values for a model that takes or fills them."""
    x = toy()[0].copy()
    x[:, 0], x[:, 1] = np.arange(N) % 4, np.arange(N) % 3
    if name in ("imputed", "imputed by neighbours", "encoded", "encoded as numbers", "in bins", "splines"):
        x[::5, 3] = np.nan
    return x[:, 2:3] if name == "isotonic" else x


@cache
def fitted(name: str) -> Any:
    """A fitted estimator of the table of saved ones."""
    labels = np.arange(N) % CLASSES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SAVED[name]().fit(rows(name), labels)


def answers(model: Any, x: np.ndarray) -> list[np.ndarray]:
    """Whatever a model answers to samples."""
    methods = ("predict_proba", "decision_function", "predict", "transform")
    made = [getattr(model, method)(x) for method in methods if hasattr(model, method)]
    return [each.toarray() if hasattr(each, "toarray") else np.asarray(each) for each in made]


def archive(name: str) -> tuple[bytes, Callable[[bytes], bool]]:
    """A sound archive, and a function that opens others like it; it returns whether they are accepted."""
    if name in ESTIMATORS:
        return message(name).arrays["model"].tobytes(), receive
    saved = name.removeprefix("saved: ")
    return skops.io.dumps(fitted(saved)), lambda data: read(data, rows(saved))


def receive(data: bytes) -> bool:
    """Open an archive as the receiver of a message does, and predict."""
    sent = Message({"model": np.frombuffer(data, np.uint8)}, {"kind": "skops", "classes": CLASSES})
    try:
        ReceivedModel(open_model(sent, (D,), CLASSES), toy()[0], CLASSES)
    except MessageError:
        return False
    return True


def read(data: bytes, x: np.ndarray) -> bool:
    """Open an archive as the reader of a file does, and predict; a model that cannot is as good as refused."""
    try:
        answers(load_transformer(data), x)
    except Exception:
        return False
    return True


# --- archives that killed a reader that trusted them ----------------------------------------------------------

Edit = Callable[[Any, dict[str, bytes]], None]


def set_array(find: Callable[[Any], Any], change: Callable[[np.ndarray], Any]) -> Edit:
    """Another array in the place of one."""

    def edit(outline: Any, files: dict[str, bytes]) -> None:
        node = find(outline)
        files["changed.npy"] = npy(np.asarray(change(np.load(io.BytesIO(files[node["file"]])).copy())))
        node["file"] = "changed.npy"

    return edit


def attribute(name: str, owner: str | None = None) -> Callable[[Any], Any]:
    """The first node that is an attribute of this name (of an object of this class)."""

    def find(outline: Any) -> Any:
        for node in nodes(outline):
            content = node.get("content")
            held = content.get("content") if isinstance(content, dict) else None
            if isinstance(held, dict) and name in held and owner in (None, node["__class__"]):
                return held[name]
        raise AssertionError(name)

    return find


def first_of(node: Any) -> Any:
    """The first item of a list, or of an array of objects."""
    return node["content"][0]


def item(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The first item of what is found."""
    return lambda outline: first_of(find(outline))


def narrower(array: np.ndarray) -> np.ndarray:
    """The same fields, of which the last is shorter."""
    fields = [(name, array.dtype[name]) for name in array.dtype.names]
    made = np.zeros(array.shape, dtype=[*fields[:-1], (fields[-1][0], np.uint8)])
    for name in array.dtype.names[:-1]:
        made[name] = array[name]
    return made


def sets(field: str, where: Any, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    """One field of a tree's nodes is something else."""

    def change(array: np.ndarray) -> np.ndarray:
        array[field][where] = value
        return array

    return change


def evil_trees(kind: str) -> dict[str, Edit]:
    """What may be wrong with a tree: of one kind, or of histogram boosting."""
    hist = kind == "TreePredictor"
    left, right, feature = ("left", "right", "feature_idx") if hist else ("left_child", "right_child", "feature")
    tree = attribute("nodes", kind)
    made = {
        "no dimension": set_array(tree, lambda array: array[0]),
        "two dimensions": set_array(tree, lambda array: array[None]),
        "no nodes": set_array(tree, lambda array: array[:0]),
        "bytes": set_array(tree, lambda array: np.zeros(len(array), np.int8)),
        "a scalar": set_array(tree, lambda array: np.float64(7)),
        "shorter fields": set_array(tree, narrower),
        "big-endian, and a circle": set_array(
            tree, lambda array: sets(left, 0, 0)(array).astype(array.dtype.newbyteorder(">"))
        ),
        "a circle": set_array(tree, sets(left, 0, 0)),
        "a child outside": set_array(tree, sets(right, 0, 10**6)),
        "a feature outside": set_array(tree, sets(feature, 0, 10**7)),
    }
    if hist:
        return made | {
            "sets of categories of no dimension": set_array(
                attribute("raw_left_cat_bitsets", kind), lambda array: np.uint32(1)
            ),
            "a category": set_array(tree, sets("is_categorical", slice(None), 1)),
        }
    values = attribute("values", kind)
    return made | {
        "a child before": set_array(tree, sets(left, 0, -5)),
        "values of no dimension": set_array(values, lambda array: array.ravel()[0]),
        "fewer values": set_array(values, lambda array: array[:1]),
        "values of 32 bits": set_array(values, lambda array: array.astype(np.float32)),
        "flat values": set_array(values, lambda array: array.reshape(-1)),
        "class counts of no dimension": set_array(
            lambda outline: next(
                n for n in nodes(outline) if n["__loader__"] == "TreeNode"
            )["__reduce__"]["args"]["content"][1],
            lambda array: array[0],
        ),
    }  # fmt: skip


def plain(find: Callable[[Any], Any], value: Any) -> Edit:
    """Another plain value in the place of a part."""

    def edit(outline: Any, files: dict[str, bytes]) -> None:
        node = find(outline)
        node.clear()
        node.update(plain_node(value))

    return edit


def sparse_outside(outline: Any, files: dict[str, bytes]) -> None:
    """A sparse matrix with columns that it does not have."""
    node = next(n for n in nodes(outline) if n["__loader__"] == "SparseMatrixNode")
    matrix = scipy.sparse.load_npz(io.BytesIO(files[node["file"]]))
    matrix.indices[:] = 10**8
    out = io.BytesIO()
    scipy.sparse.save_npz(out, matrix)
    files[node["file"]] = out.getvalue()


EVIL: dict[str, dict[str, Edit]] = {
    **{name: evil_trees("Tree") for name in TREES},
    **{name: evil_trees("TreePredictor") for name in HIST_TREES},
    "saved: embedded by trees": evil_trees("Tree"),
    "saved: hist boosting of categories": {
        what: edit for what, edit in evil_trees("TreePredictor").items() if what != "a category"
    } | {
        "a set outside": set_array(
            attribute("nodes", "TreePredictor"),
            lambda array: sets("bitset_idx", slice(None), 10**6)(sets("is_categorical", slice(None), 1)(array)),
        ),
        "a category of a number": set_array(
            attribute("nodes", "TreePredictor"),
            lambda array: sets("feature_idx", 0, 4)(sets("is_categorical", 0, 1)(array)),
        ),
    },
    "saved: support vectors": {
        "more of a class": set_array(attribute("_n_support"), lambda array: array + 10**6),
        "fewer coefficients": set_array(attribute("_dual_coef_"), lambda array: array[:, :1]),
        "no coefficients": set_array(attribute("_dual_coef_"), lambda array: array[:0]),
        "fewer intercepts": set_array(attribute("_intercept_"), lambda array: array[:0]),
        "fewer features": set_array(attribute("support_vectors_"), lambda array: array[:, :1]),
        "another task": plain(attribute("_sparse"), True),
    },
    "saved: neighbours, brute force": {
        "classes outside": set_array(attribute("_y"), lambda array: array + 10**8),
        "fewer labels": set_array(attribute("_y"), lambda array: array[:1]),
        "fewer features": set_array(attribute("_fit_X"), lambda array: array[:, :1]),
    },
    "saved: boosting from a model": {
        "a start of classes outside": set_array(attribute("_y"), lambda array: array + 10**8),
        **evil_trees("Tree"),
    },
    "saved: clusters": {
        "fewer features": set_array(attribute("cluster_centers_"), lambda array: np.ascontiguousarray(array[:, :1])),
        "no clusters": set_array(attribute("cluster_centers_"), lambda array: array[:0]),
    },
    "saved: encoded": {
        "fewer columns": plain(attribute("_n_features_outs"), [1, 1]),
        "rare ones outside": set_array(
            item(attribute("_default_to_infrequent_mappings")), lambda array: array + 10**8
        ),
        "not in order": set_array(item(attribute("categories_")), lambda array: array[::-1]),
    },
    "saved: projected": {"indices outside": sparse_outside},
}  # fmt: skip


def main() -> None:
    """Open every evil archive; a death is seen by whoever called this."""
    warnings.simplefilter("ignore")
    for name, edits in EVIL.items():
        data, opens = archive(name)
        assert opens(data), name
        for what, edit in edits.items():
            print(f"{name}: {what}", end=": ", flush=True)
            with zipfile.ZipFile(io.BytesIO(data)) as packed:
                files = {each: packed.read(each) for each in packed.namelist()}
            outline = json.loads(files.pop("schema.json"))
            edit(outline, files)
            print("ACCEPTED" if opens(closed(outline, files).arrays["model"].tobytes()) else "refused", flush=True)


if __name__ == "__main__":
    main()
