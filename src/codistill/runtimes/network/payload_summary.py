"""What the payload of a frame holds, in words and without a value of it, for the audit log of an agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from codistill.runtimes.network.frame_header import FrameKind
from codistill.wire.packing import BODY

_DTYPES = {"F": "float", "I": "int", "U": "uint"}  # in the header of an array that is sent as it is
_PACKED_DTYPES = {"e": "float16", "f": "float32", "d": "float64"}  # of a compressed array, before it was compressed
_MODELS = ("torch", "onnx", "skops", "kernel")  # the value `kind` of a message that holds a model
_ANSWERS = {"report": "report", "scores": "scores", "trouble": "confirmation"}  # what an answer of an agent holds


def summarise(kind: FrameKind, payload: bytes) -> dict[str, Any]:
    """`what` a payload is, the names of its plain values, and the names, types and shapes of its arrays."""
    try:
        return _summary(kind, payload)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):  # logged by size and digest all the same
        return {"what": "other", "values": [], "arrays": {}}


def _summary(kind: FrameKind, payload: bytes) -> dict[str, Any]:
    arrays, values = _contents(payload)
    if kind in (FrameKind.CONTROL, FrameKind.HELLO):
        return _of_control(json.loads(values["json"]), arrays)
    what = "model" if values.get("kind") in _MODELS else "protocol message"
    return {"what": what, "values": sorted(values), "arrays": arrays}


def _of_control(content: Mapping[str, Any], arrays: dict[str, str]) -> dict[str, Any]:
    fields = sorted(key for key, value in content.items() if key not in ("do", "number") and value is not None)
    what = str(content["do"])
    if what == "report":  # of a run without rounds
        fields = sorted({"own_rounds", *content["scores"], *(key for key, value in content[what].items() if value)})
    if what == "answer":
        what = next((word for key, word in _ANSWERS.items() if key in content), "answer")
        if what == "report":
            fields = sorted(key for key, value in content[what].items() if value)
        elif what == "scores":
            fields = sorted(content[what])
            what = "scores and outputs" if arrays else "scores"
    return {"what": what, "values": fields, "arrays": arrays}


def _contents(payload: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Arrays as words by name, and the plain values; read from the header of the encoding alone."""
    header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
    metadata = header.pop("__metadata__", None) or {}
    arrays = {name: f"{_dtype(found['dtype'])} {_shape(found['shape'])}" for name, found in header.items()}
    if "p" not in metadata:
        return arrays, json.loads(metadata.get("v", "{}"))
    values, (items, _) = json.loads(metadata["p"])
    del arrays[BODY]  # which holds the arrays below
    for name, dtype, shape, bits, k, _ in items:
        parts = [f"{bits} bits"] * bool(bits) + [f"{k} per row"] * bool(k)
        arrays[name] = f"{_PACKED_DTYPES[dtype]} {_shape(shape)}, compressed" + "".join(f", {part}" for part in parts)
    return arrays, values


def _dtype(code: str) -> str:
    return "bool" if code == "BOOL" else _DTYPES[code[0]] + code[1:]


def _shape(sides: list[int]) -> str:
    return "x".join(map(str, sides)) or "scalar"
