"""The skops format: a zip archive of an outline in JSON and of arrays in numpy's file format."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import json
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np

from codistill.core.errors import CheckpointError

UNPACKED_LIMIT = 1 << 30
# Forests unpack to 8 times their bytes. Zeros unpack to 1,000 times, so beyond some size more than that is refused.
_RATIO = 32
_FREE, _FREE_OUTLINE = 1 << 25, 1 << 20
# What an outline costs to parse and to rebuild: a forest of 1,000 trees has 5.3 MB, 63,000 parts and 225,000 values.
_OUTLINE_LIMIT, _PARTS_LIMIT, _VALUES_LIMIT = 1 << 25, 350_000, 1_500_000
OUTLINE = "schema.json"

# What estimators keep of their training but do not need to predict is not sent: weights and votes of
# single rows (weights are the soft labels), sorted values of a feature, gradients, generators, threads.
_NOT_SENT = frozenset(
    {"_sample_weight", "oob_decision_function_", "oob_prediction_", "bin_thresholds_", "_optimizer", "n_threads"}
)
_GENERATORS = frozenset({"RandomStateNode", "RandomGeneratorNode"})
# A part of an outline that is None.
NOTHING = {"__class__": "str", "__module__": "builtins", "__loader__": "JsonNode", "content": "null", "is_json": True}


def unzipped(data: bytes) -> dict[str, bytes]:
    """The files of an archive, read no further than it says they are long, which may not be too long."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        size = sum(entry.file_size for entry in entries)
        if size > min(UNPACKED_LIMIT, _FREE + _RATIO * len(data)):
            raise ValueError(f"an archive of {len(data)} bytes that unpacks to {size} bytes")
        outline = sum(entry.file_size for entry in entries if entry.filename == OUTLINE)
        if outline > min(_OUTLINE_LIMIT, _FREE_OUTLINE + _RATIO * len(data)):
            raise ValueError(f"an archive of {len(data)} bytes with an outline of {outline} bytes")
        if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
            raise ValueError("an archive packed in an unusual way")
        contents = {}
        for entry in entries:
            with archive.open(entry) as file:
                contents[entry.filename] = file.read(entry.file_size)
    return contents


def read_outline(contents: Mapping[str, bytes]) -> Any:
    """The outline of an archive, parsed if it has not too many parts and values."""
    text = contents[OUTLINE]
    parts, values = text.count(b"{") + text.count(b"["), text.count(b",")
    if parts > _PARTS_LIMIT or values > _VALUES_LIMIT:
        raise ValueError(
            f"an outline of {parts} parts and {values} values, above the limits of {_PARTS_LIMIT} and {_VALUES_LIMIT}"
        )
    return json.loads(text)


def nodes(outline: Any) -> Iterator[dict[str, Any]]:
    """Every node of an outline that builds something."""
    stack = [outline]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            if "__loader__" in item:
                yield item
            stack.extend(item.values())


def read_array(data: bytes, text: bool = False) -> np.ndarray:
    """An array of numbers (or of `text` and times) in numpy's file format, in the byte order of this machine.

    It must be as long as it says: numpy would first allocate what it says.
    """
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, columns_first, dtype = read(stream)
    if dtype.kind not in ("biufVUSMm" if text else "biufV") or dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"an array of dtype {dtype}")
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise ValueError("an array that is shorter or longer than it says")
    array = np.frombuffer(data, dtype=dtype, offset=stream.tell())
    if dtype.kind == "b":
        array = array.view(np.uint8) != 0  # numpy counts other bytes than 0 and 1 wrongly
    # A copy: in memory of its own, aligned, and writable.
    own = array.astype(array.dtype.newbyteorder("="), copy=True)
    return own.reshape(shape, order="F" if columns_first else "C")


def canonical(data: bytes) -> bytes:
    """Equal models, equal bytes: skops names parts by memory address; number them by content instead."""
    contents = unzipped(data)
    numbers: dict[bytes, str] = {}

    def tidy(node: Any) -> Any:
        if isinstance(node, list):
            return [tidy(item) for item in node]
        if not isinstance(node, dict):
            return node
        if node.get("__loader__") in _GENERATORS:
            return NOTHING
        tidied: dict[str, Any] = {}
        for key, value in node.items():
            if key in _NOT_SENT:
                tidied[key] = NOTHING
            elif key == "file" and isinstance(value, str):
                tidied[key] = numbers.setdefault(_without_padding(contents[value]), f"{len(numbers)}.npy")
            elif key != "__id__":
                tidied[key] = tidy(value)
        return tidied

    outline = tidy(json.loads(contents[OUTLINE]))
    files = {name: content for content, name in numbers.items()}
    files[OUTLINE] = json.dumps(outline, separators=(",", ":")).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:  # the same bytes whenever it is made
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name], zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _without_padding(data: bytes) -> bytes:
    """The padding between the fields of a tree's nodes is uninitialised memory: it is set to zero."""
    array = np.load(io.BytesIO(data), allow_pickle=False) if data.startswith(np.lib.format.MAGIC_PREFIX) else None
    if array is None or array.dtype.names is None or array.ndim != 1:
        return data
    clean = np.zeros(array.nbytes, dtype=np.uint8)
    for name in array.dtype.names:
        clean.view(array.dtype)[name] = array[name]
    return data[: len(data) - len(clean)] + clean.tobytes()


# --- Models in an agent's own checkpoint: any estimator or plain object, never pickled, never executed.

# Packages whose classes may be rebuilt, and single types of others.
_OWN_PACKAGES = frozenset({"numpy", "scipy", "sklearn", "collections"})
_OWN_TYPES = frozenset(
    {"builtins.complex", "builtins.frozenset", "builtins.object", "builtins.range", "functools.partial"}
)


class OwnFunction:
    """In a file: the place of a function of the owner's, such as that of a FunctionTransformer.

    No code is saved, and none is imported by name: whoever opens the file puts in the functions of the model that it is
    configured with, in their order. So functions without a name can be used as well.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *given: Any, **options: Any) -> Any:
        raise RuntimeError("This file does not hold the function that belongs here.")

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        return memo.get(OwnFunction, {}).get(self.number, self)


OWN_FUNCTION = f"{OwnFunction.__module__}.{OwnFunction.__qualname__}"


def own_functions(estimator: Any) -> list[Any]:
    """The functions among an estimator's options, at any depth, that belong to no library; each once."""
    found: dict[int, Any] = {}

    def look(values: Iterable[Any]) -> None:
        for value in values:
            function = value.func if isinstance(value, functools.partial) else value
            if isinstance(function, FunctionType):
                if function.__module__.split(".")[0] not in _OWN_PACKAGES:
                    found.setdefault(id(value), value)
            elif isinstance(value, list | tuple):
                look(value)
            elif isinstance(value, dict):
                look(value.values())

    if callable(getattr(estimator, "get_params", None)) and not isinstance(estimator, type):
        look(estimator.get_params().values())
    return list(found.values())


def dump_estimator(estimator: Any) -> bytes:
    import skops.io  # takes seconds, so only where it is needed
    from skops.io.exceptions import UnsupportedTypeException

    try:
        places = {id(each): OwnFunction(number) for number, each in enumerate(own_functions(estimator))}
        if places:
            estimator = copy.deepcopy(estimator, places)
        return bytes(skops.io.dumps(estimator))
    except (UnsupportedTypeException, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"A model must be made of plain attributes to be saved: {type(estimator).__name__}.",
            f"{type(error).__name__}: {str(error)[:200]}",
            "Keep only arrays, numbers, strings, lists and dicts in its attributes.",
        ) from None


def load_own_estimator(data: bytes, like: Any) -> Any:
    """An estimator from an agent's own checkpoint: of the configured class, and without foreign types inside."""
    import skops.io

    configured = like.get_params() if hasattr(like, "get_params") else getattr(like, "__dict__", {})
    parts = [like, *configured.values()]  # the model and what its owner built it of
    packages = _OWN_PACKAGES | {type(part).__module__.split(".")[0] for part in parts} - {"builtins"}
    try:
        untrusted = skops.io.get_untrusted_types(data=data)
        own = dict(enumerate(own_functions(like)))
        known = _OWN_TYPES | ({OWN_FUNCTION} if own else set())
        foreign = [name for name in untrusted if name not in known and name.split(".")[0] not in packages]
        if foreign:
            raise ValueError(f"foreign types {', '.join(foreign)}")
        _check_calls(data)
        model = skops.io.loads(data, trusted=untrusted)
        if type(model) is not type(like):
            raise ValueError(f"a {type(model).__name__} in place of a {type(like).__name__}")
        if own and OWN_FUNCTION in untrusted:
            functions: dict[Any, Any] = {OwnFunction: own}
            model = copy.deepcopy(model, functions)
    except Exception as error:
        raise CheckpointError(
            "A saved model must be of the class that the agent is configured with.",
            f"{type(error).__name__}: {str(error)[:200]}",
            "Resume with the recipe the run was started with, or from an earlier checkpoint.",
        ) from None
    return model


# Loaders of skops that call what a file names.
_CALLING = frozenset(
    f"{kind}Node"
    for kind in (
        "ConstructorFromReduce", "Dict", "List", "Loss", "NdArray", "Object", "QuantileForest", "RandomGenerator",
        "RandomState", "Reduce", "Set", "Tree", "Tuple",
    )
)  # fmt: skip


def _check_calls(data: bytes) -> None:
    """Classes are built by calling them; functions are never called."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        outline = json.loads(archive.read("schema.json"))
    called = {(node["__module__"], node["__class__"]) for node in nodes(outline) if node["__loader__"] in _CALLING}
    for module, name in sorted(called):
        if not isinstance(getattr(importlib.import_module(module), name), type):
            raise ValueError(f"a call of {module}.{name}")
