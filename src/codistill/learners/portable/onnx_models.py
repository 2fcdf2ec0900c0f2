"""Models that travel as ONNX: torch modules of no registered architecture, and objects with a method `to_onnx()`.

Needs the extra `onnx`. What arrives is parsed, checked and counted (`onnx_graph`) before onnxruntime sees it, and then
runs on one thread, without graph rewriting, in an arena of limited memory and for a limited time: the same bits
everywhere.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from codistill.core.devices import in_host_memory
from codistill.core.errors import CodistillError, LearnerError
from codistill.learners.portable.models import Cost, CostOfRows
from codistill.wire.message import Message

if TYPE_CHECKING:
    import onnxruntime

    from codistill.learners.torch import TorchLearner

INSTALL = "pip install 'codistill[onnx]'"

_OPSET = 17
_CHUNK = 250  # rows per pass: a fixed size, since the last digits can depend on it
_MEMORY_LIMIT = 2 << 30
_SECONDS = 10.0  # of processor time that any pass may take; one of many operations may take more
_SLOWEST = 1e9  # operations per second below which a pass is ended: a tenth of what they stand for
_TRIED = 5  # samples by which an exported module is compared with itself, before round 0


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxruntime"))


# --- sending ------------------------------------------------------------------------------------


def module_graph(learner: TorchLearner) -> Any:
    """A module and, where the learner predicts probabilities, a softmax after it, as an onnx.ModelProto."""
    from onnx import ModelProto

    if learner.sample_shape is None:
        raise LearnerError("A module must have seen samples before it travels as ONNX.", "none yet", "Fit it first.")
    out = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad(), in_host_memory():
        stages = [learner.of_one_tensor(), *([nn.Softmax(dim=1)] if learner.probabilistic else [])]
        warnings.simplefilter("ignore")
        # The exporter that traces needs no other package, and is 75 times faster than the one that compiles.
        torch.onnx.export(
            nn.Sequential(*stages).eval(),
            (torch.zeros(2, *learner.sample_shape),),
            out,  # type: ignore[arg-type]
            dynamo=False,
            opset_version=_OPSET,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )
    return ModelProto.FromString(out.getvalue())


def object_graph(model: Any) -> Any:
    """What an object's own `to_onnx()` returns, bytes or an onnx.ModelProto, as the latter."""
    from onnx import ModelProto

    name = type(model).__name__
    given = model.to_onnx()
    try:
        return given if isinstance(given, ModelProto) else ModelProto.FromString(given)
    except Exception as error:  # protobuf's own errors share no base but this one
        raise _cannot(name, f"{type(given).__name__} from to_onnx(): {str(error)[:100]}") from None


def graph_message(proto: Any, name: str) -> Message:
    """A graph as it travels; a `LearnerError` with the `name` of its model if it cannot."""
    from codistill.learners.portable.onnx_graph import to_message

    try:
        return to_message(proto)
    except ValueError as error:
        raise _cannot(name, str(error)) from None


def _cannot(name: str, found: str) -> LearnerError:
    return LearnerError(
        f"{name} must be one graph of standard ONNX operators, with its weights inside, to travel.",
        found,
        "Change the graph; a torch module may also be registered by codistill.register_architecture(name).",
    )


def check_module(learner: TorchLearner, x: np.ndarray, owner: str) -> None:
    """Before round 0: the module, sent as ONNX and opened, must predict what it predicts here."""
    from codistill.learners.portable import open_model

    rows = x[:_TRIED]
    learner.tensor(rows)
    wanted = learner.predict(rows)
    try:
        message = Message.decode(learner.export().encoded)
        found = open_model(message, x.shape[1:], wanted.shape[1]).predict(rows)
        if not np.allclose(found, wanted, rtol=1e-2, atol=1e-3):
            raise ValueError("predictions that differ once it is written as ONNX; does its code branch on the data?")
    except Exception as error:  # the module is its owner's code, and the exporter may fail in any way
        why = error.found if isinstance(error, CodistillError) else f"{type(error).__name__}: {error}"
        raise LearnerError(
            f"The module of agent '{owner}' must be of a registered architecture, or such that ONNX can express it.",
            " ".join(why.split())[:200],
            "Register its builder with codistill.register_architecture(name), and build it by that name.",
        ) from None


# --- receiving ----------------------------------------------------------------------------------


def open_onnx(message: Message, shape: tuple[int, ...], classes: int) -> tuple[OnnxModel, CostOfRows]:
    """The ONNX model in a message, and what its predictions take; anything unsound raises, in whatever way."""
    if not is_installed():
        raise ValueError(f"an ONNX model, which cannot be opened without the extra onnx ({INSTALL})")
    from codistill.learners.portable.onnx_graph import FLOATS, check_graph, check_numbers, count, from_message, join

    model = from_message(message)
    taken = check_graph(model, shape)
    join(model, message)
    check_numbers(model, taken)
    kind = FLOATS[model.graph.input[0].type.tensor_type.elem_type]
    counted = functools.cache(lambda rows: count(model, taken, rows))
    counted(min(classes + 1, _CHUNK))  # before onnxruntime prepares it
    opened = OnnxModel(_session(model.SerializeToString()), taken, kind, counted)
    return opened, opened.cost


@dataclass(frozen=True)
class OnnxModel:
    """A received ONNX model, for samples of the shape `taken`."""

    session: onnxruntime.InferenceSession
    taken: tuple[int, ...]
    kind: np.dtype[Any]
    count: CostOfRows  # cost of a pass of n rows; raises if it is too high

    def cost(self, rows: int) -> Cost:
        """What predictions for some rows take, chunk by chunk; ValueError where that is too much."""
        full, rest = divmod(rows, _CHUNK)
        whole = self.count(_CHUNK) if full else Cost(0, 0)
        last = self.count(rest) if rest or not full else Cost(0, 0)
        return Cost(rows, full * whole.operations + last.operations, max(whole.memory, last.memory))

    def predict(self, x: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(x, dtype=self.kind).reshape(len(x), *self.taken)
        parts = [self._run(rows[i : i + _CHUNK]) for i in range(0, max(len(rows), 1), _CHUNK)]
        return np.concatenate(parts).astype(np.float32, copy=False)

    def _run(self, rows: np.ndarray) -> np.ndarray:
        import onnxruntime

        # What a graph computes can depend on the number of rows in any way, so it is counted for each number.
        cost = self.count(len(rows))
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        with _ended_after(options, _SECONDS + cost.operations / _SLOWEST):
            return np.asarray(self.session.run(None, {self.session.get_inputs()[0].name: rows}, options)[0])


@contextmanager
def _ended_after(options: onnxruntime.RunOptions, seconds: float) -> Iterator[None]:
    """End a pass, between two nodes of its graph, after so much processor time: a paused machine does not count."""
    began, over = time.process_time(), threading.Event()

    def watch() -> None:
        left = seconds
        while not over.wait(left):
            left = seconds - (time.process_time() - began)
            if left <= 0:
                options.terminate = True
                return

    watcher = threading.Thread(target=watch, daemon=True, name="limit of a received model")
    watcher.start()
    try:
        yield
    except Exception as error:
        if options.terminate:
            raise ValueError(f"a model that took more than {seconds:.3g} s of processor time") from error
        raise
    finally:
        over.set()
        watcher.join()


def _session(data: bytes) -> onnxruntime.InferenceSession:
    import onnxruntime

    _limit_memory()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.use_deterministic_compute = True
    # Rewriting computes constant parts ahead, outside of the arena: a few bytes could ask for any memory.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.use_env_allocators", "1")
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


@functools.cache
def _limit_memory() -> None:
    """One arena of limited size for all models of this process."""
    import onnxruntime

    arena = onnxruntime.OrtArenaCfg(_MEMORY_LIMIT, 1, -1, -1)  # 1: no more than is asked for
    place = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(place, arena)
