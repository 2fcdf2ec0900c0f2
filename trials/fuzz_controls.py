"""Commands, answers, join requests and terms with one thing changed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

import codistill as cd
from codistill.core.errors import CodistillError, MessageError
from codistill.engine.evaluation import score
from codistill.engine.exchange import Report
from codistill.network.agent import RemoteAgent
from codistill.network.commands import (
    checked_report,
    checked_scores,
    checked_view,
    read_command,
    read_go,
    report_content,
)
from codistill.network.options import Network
from codistill.network.terms import (
    check_terms,
    description_under,
    difference,
    hello_of,
    objection,
    read_hello,
    terms_of,
)
from codistill.results.outputs import collect
from codistill.results.records import Scores
from codistill.wire.codec import SIZE_LIMIT, decode, encode, read_json
from trials.fuzz_cases import STEPS, Case, equal, federation, regressing
from trials.fuzz_mutations import mutate_json

Try = Callable[[random.Random], bool]
_MEASURES = [("a", "disagreement", 0.25), ("a", "discriminator_accuracy", 0.5)]
_REPORT = Report(
    {"a": 1200}, {"a": 800}, [("a", "hub", "Arrays must be finite.")], [("a", "diverged.")], _MEASURES,
    steps={"a": 20}, exchanges={"a": 3},
)  # fmt: skip


@cache
def _run(real_valued: bool) -> Any:
    case = Case("", cd.FedAvg(**STEPS), regressing, True) if real_valued else Case("", cd.FedAvg(**STEPS), equal)
    return federation(case).description


def _arrived(content: Any) -> Any:
    """Plain values as they arrive: refused if they are no proper JSON."""
    try:
        data = encode({}, {"json": json.dumps(content)})
        _, values = decode(data, finite=False, header_limit=1 << 24, packed=False)
        return read_json(values["json"], 1 << 23)
    except (MessageError, ValueError, RecursionError):
        return None


def _attempt(content: Callable[[], Any], use: Callable[[Any], None]) -> Callable[[], Try]:
    """Cases in which plain values are changed; `use` may raise a `CodistillError` or a `_RefusedError`."""

    def make() -> Try:
        valid = content()
        use(_arrived(valid))  # as it is, it is accepted

        def attempt(rng: random.Random) -> bool:
            arrived = _arrived(mutate_json(valid, rng))
            if not isinstance(arrived, dict):
                return True
            try:
                use(arrived)
            except (CodistillError, _RefusedError):
                return True
            return False

        return attempt

    return make


class _RefusedError(Exception):
    """What a node refuses in another way than by an error of its own."""


def _use_report(content: Any) -> None:
    report = checked_report("a", content.get("report"), ("a", "b", "c"))
    json.dumps(vars(Report().add(report)), allow_nan=False)


def _use_scores(content: Any) -> None:
    scores: Scores = checked_scores(content.get("scores"))
    json.dumps(scores, allow_nan=False)


def _use_hello(content: Any) -> None:
    if objection(terms_of(_run(False)), content) is not None:
        raise _RefusedError
    assert read_hello(content) is not None


def _use_terms(content: Any) -> None:
    check_terms(content)
    description_under(content, _run(False).agents[0], None, None)


def _use_peer_terms(content: Any) -> None:
    if difference(terms_of(_run(False)), content) is not None:
        raise _RefusedError


def _use_welcome(content: Any) -> None:
    """As an agent that has just joined."""
    transport = SimpleNamespace(accept=_ignore, limit=SIZE_LIMIT)
    connections = SimpleNamespace(command=_ignore, tell=_ignore, network=Network(), transport=transport)
    remote = RemoteAgent(connections, {}, lambda terms: description_under(terms, _run(False).agents[0], None, None))
    remote._enter(SimpleNamespace(content=content))


def _use_command(content: Any) -> None:
    """As `RemoteAgent._execute` does, which strikes the hub for these three."""
    described = _run(False)
    try:
        read_command(
            str(content.get("do")), content, described.topology.names, described.spec.rounds, asynchronous=False
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _RefusedError from error


def _use_go(content: Any) -> None:
    """As `RemoteAgent` does in a run without rounds."""
    try:
        read_go(content)
    except (KeyError, TypeError, ValueError) as error:
        raise _RefusedError from error


def _go() -> Any:
    return {"do": "go", "elapsed": 3.25, "samples": 36, "part": None, "evaluate_every": 1, "store_every": 1}


def _commands() -> Any:
    return {
        "do": "run", "number": 3, "turn": [1, 0], "present": ["a", "b"], "samples": 36, "round": 1, "store": True,
        "of": 36, "views": True,
    }  # fmt: skip


def _views(real_valued: bool) -> Callable[[], Try]:
    """Outputs on the common test set: arrays."""

    def make() -> Try:
        run = _run(real_valued)
        views: dict[str, Any] = {}
        score(run, run.agents[0], None, views)
        labels = run.test[1]
        valid = views.get("a") or {"mean": np.eye(run.classes), "chosen": np.zeros(len(labels), np.uint8)}

        def attempt(rng: random.Random) -> bool:
            arrays = {name: array.copy() for name, array in valid.items()}
            name = rng.choice(sorted(arrays))
            match rng.randrange(6):
                case 0:
                    arrays[name] = arrays.pop(name)[:-1]
                case 1:
                    arrays[name][...] = rng.choice([0, 1, 2, 9, 200])
                case 2:
                    kinds = [bool, np.uint8, np.int64, np.float16, np.float64]
                    arrays[name] = arrays[name].astype(rng.choice(kinds))
                case 3:
                    arrays["mean"][rng.randrange(run.classes)] = rng.choice([np.nan, np.inf, -1, 2, 1e308])
                case 4:
                    arrays[rng.choice(["", "mean", "chosen", "extra"])] = rng.choice(
                        [
                            np.zeros(0),
                            np.zeros((run.classes, run.classes)),
                            np.zeros(len(labels), np.uint8),
                            np.array(1),
                        ]
                    )
                case _:
                    del arrays[name]
            received, _ = decode(encode(arrays, {}), finite=False, packed=False)
            try:
                view = checked_view(received, labels, run.classes)
            except MessageError:
                return True
            if view:
                collect(1, {"a": view, "b": view}, labels)
            return False

        return attempt

    return make


def _ignore(*_: Any, **__: Any) -> None:
    pass


def _welcome() -> Any:
    return {"do": "welcome", "run": "abc", "done": 0, "terms": terms_of(_run(False))}


def _command(do: str) -> Callable[[], Any]:
    return lambda: _commands() | {"do": do, "samples": None if do == "evaluate" else 36}


CONTROLS: list[tuple[str, Callable[[], Try]]] = [
    ("report", _attempt(lambda: {"report": report_content(_REPORT)}, _use_report)),
    ("scores", _attempt(lambda: {"scores": {"accuracy": 0.5, "own_accuracy": 0.25}}, _use_scores)),
    ("scores, real values", _attempt(lambda: {"scores": {"rmse": 0.5, "own_rmse": 2.5}}, _use_scores)),
    ("views", _views(False)),
    ("views, real values", _views(True)),
    ("hello", _attempt(lambda: hello_of(_run(False).agents[0], None), _use_hello)),
    ("welcome", _attempt(_welcome, _use_welcome)),
    ("terms", _attempt(lambda: terms_of(_run(False)), _use_terms)),
    ("terms of a peer", _attempt(lambda: terms_of(_run(False)), _use_peer_terms)),
    *((f"command {do}", _attempt(_command(do), _use_command)) for do in ("run", "keep", "store", "evaluate", "alone")),
    ("command go", _attempt(_go, _use_go)),
]
