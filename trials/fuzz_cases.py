"""Tiny federations of every protocol, one recorded round of each, and that round again for one of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.tree import DecisionTreeClassifier
from torch import nn

import codistill as cd
from codistill.engine.evaluation import score
from codistill.engine.exchange import Frame, Report, Waiting
from codistill.engine.host import BEGIN, Host
from codistill.learners.zoo import build
from codistill.nodes.agent import Agent
from codistill.nodes.node import Node
from codistill.nodes.record import record_of
from codistill.topology import HUB
from codistill.wire.message import Message
from codistill.wire.state import pack, unpack

CLASSES, WIDTH, ROUND = 3, 4, 1
LIMIT = 1 << 20  # bytes of a message
STEPS: dict[str, Any] = {"local_steps": 1, "batch_size": 4}
Models = Callable[[], list[Any]]


def _network(width: int = 5, **options: Any) -> cd.TorchLearner:
    outputs = 1 if options.get("loss") == "squared" else CLASSES
    parts = nn.Linear(WIDTH, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, outputs)
    return cd.TorchLearner(nn.Sequential(*parts), optimiser="sgd", lr=0.05, epochs=1, batch_size=4, **options)


def equal() -> list[Any]:
    """Three networks of one architecture."""
    return [_network() for _ in range(3)]


def regressing() -> list[Any]:
    """The same, for one real value."""
    return [_network(loss="squared") for _ in range(3)]


def two_kinds() -> list[Any]:
    """Three networks of two architectures."""
    return [_network(), _network(), _network(7)]


def black_boxes() -> list[Any]:
    """A network, and models that only fit and predict."""
    return [_network(), LogisticRegression(), DecisionTreeClassifier(max_depth=2)]


def travelling() -> list[Any]:
    """Models that are sent: weights of a registered architecture, and two estimators."""
    network = cd.TorchLearner(build("logistic", (WIDTH,), CLASSES), optimiser="sgd", lr=0.05, epochs=1, batch_size=4)
    return [network, LogisticRegression(), DecisionTreeClassifier(max_depth=2)]


def travelling_regressors() -> list[Any]:
    """Models of real values that are sent."""
    module = build("logistic", (WIDTH,), 1)
    network = cd.TorchLearner(module, optimiser="sgd", lr=0.05, epochs=1, batch_size=4, loss="squared")
    return [Ridge(), cd.KernelRidge(reveal_inputs=True), network]


@dataclass(frozen=True)
class Case:
    """A protocol with its settings, and the models of its agents."""

    name: str
    protocol: cd.Protocol
    models: Models
    real_valued: bool = False
    compression: cd.Compression | None = None
    participation: float = 1.0


_EIGHT, _ALL = cd.Compression(bits=8, error_feedback=True), cd.Compression(bits=16, top_k=2, lossless=True)
_SHARED: dict[str, Any] = {"transfer_steps": 2, **STEPS}
_PRINTED: dict[str, Any] = {"form": "printed", "lr": 0.01, "beta": 1.0}
CASES = (
    Case("fedavg", cd.FedAvg(**STEPS), equal),
    Case("fedavg median", cd.FedAvg(aggregate="median", **STEPS), equal),
    Case("fedavg trimmed, real values", cd.FedAvg(aggregate="trimmed", trim=0.4, **STEPS), regressing, True),
    Case("fedavg, real values", cd.FedAvg(**STEPS), regressing, True),
    Case("fedavg, 8 bits", cd.FedAvg(**STEPS), equal, compression=_EIGHT),
    Case("fedavg, sampled", cd.FedAvg(**STEPS), equal, participation=0.7),
    Case("fedprox, sampled", cd.FedProx(**STEPS), equal, participation=0.7),
    Case("fedmax", cd.FedMAX(**STEPS), equal),
    Case("fedbn, sampled", cd.FedBN(**STEPS), equal, participation=0.7),
    Case("feddkd", cd.FedDKD(dkd_steps=2, dkd_batch_size=4, **STEPS), equal),
    Case("feddkd max, sampled", cd.FedDKD(local="max", dkd_steps=2, **STEPS), equal, participation=0.7),
    Case("feddkd without batch norm", cd.FedDKD(average="except batch norm", dkd_steps=1, **STEPS), equal),
    Case("feddkd median, 8 bits", cd.FedDKD(aggregate="median", dkd_steps=1, **STEPS), equal, compression=_EIGHT),
    Case("feddistill, sampled", cd.FedDistill(**STEPS), equal, participation=0.7),
    Case("fedgen", cd.FedGen(generator_steps=2, **STEPS), equal),
    Case(
        "fedgen coverage, sampled",
        cd.FedGen(generator_steps=1, class_shares="coverage", **STEPS),
        equal,
        participation=0.7,
    ),
    Case("fedmd", cd.FedMD(**_SHARED), equal),
    Case("fedmd black boxes", cd.FedMD(less_forgetting=1.0, **_SHARED), black_boxes),
    Case("fedmd coverage", cd.FedMD(aggregate="coverage", **_SHARED), equal),
    Case("fedmd trimmed", cd.FedMD(aggregate="trimmed", trim=0.4, **_SHARED), equal),
    Case("fedmd confidence", cd.FedMD(aggregate="confidence", **_SHARED), equal),
    Case("fedmd probabilities", cd.FedMD(aggregate="probabilities", temperature=2.0, **_SHARED), equal),
    Case("fedmd, packed", cd.FedMD(**_SHARED), equal, compression=_ALL),
    Case("fedmd, real values", cd.FedMD(less_forgetting=1.0, **_SHARED), travelling_regressors, True),
    Case("fedmd median, real values", cd.FedMD(aggregate="median", **_SHARED), travelling_regressors, True, _EIGHT),
    Case("fedal", cd.FedAL(**_SHARED), two_kinds),
    Case("fedal clipped, 8 bits", cd.FedAL(clip=1.0, **_SHARED), two_kinds, compression=_EIGHT),
    Case("feddf", cd.FedDF(adversarial=1.0, less_forgetting=1.0, **_SHARED), two_kinds),
    Case("feddf median", cd.FedDF(aggregate_weights="median", aggregate="median", **_SHARED), two_kinds),
    Case("d_distillation", cd.DDistillation(network_batch=4, **STEPS), black_boxes),
    Case("d_distillation printed", cd.DDistillation(network_batch=4, **_PRINTED, **STEPS), equal),
    Case("d_distillation, packed", cd.DDistillation(network_batch=4, **STEPS), equal, compression=_ALL),
    Case("d_distillation, real values", cd.DDistillation(network_batch=4, **STEPS), travelling_regressors, True),
    Case("d_sgd", cd.DSGD(every=1, **STEPS), equal),
    Case("d_sgd, real values, 8 bits", cd.DSGD(every=1, **STEPS), regressing, True, _EIGHT),
    Case("fd", cd.FD(**STEPS), equal),
    Case("fd squared, median", cd.FD(distance="squared", aggregate="median", **STEPS), equal),
    Case("fedproto classes", cd.FedProto(**STEPS), equal),
    Case("fedproto classes, 8 bits", cd.FedProto(aggregate="median", **STEPS), equal, compression=_EIGHT),
    Case("fedproto public", cd.FedProto(form="public", **_SHARED), equal),
    Case("fedproto public, real values", cd.FedProto(form="public", **_SHARED), regressing, True),
    Case("akd", cd.AKD(), travelling),
    Case("akd simultaneous, real values", cd.AKD(simultaneous=True), travelling_regressors, True),
    Case("pkd", cd.PKD(), travelling),
    Case("avgkd", cd.AvgKD(), travelling),
    Case("avgkd, real values, packed", cd.AvgKD(own_weight=0.5), travelling_regressors, True, _ALL),
    Case("ekd", cd.EKD(), travelling),
    Case("ekd single, real values", cd.EKD(half=False, single=True), travelling_regressors, True),
    Case("backfitting", cd.Backfitting(), travelling_regressors, True),
    Case("backfitting simultaneous", cd.Backfitting(simultaneous=True), travelling_regressors, True),
)


def federation(case: Case) -> cd.Federation:
    """Three agents with twelve samples each."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(count, WIDTH)).astype(np.float32)
        return x, (x[:, :1] if case.real_valued else np.arange(count) % CLASSES)

    agents = [cd.Agent(name, model, *samples(12)) for name, model in zip("abc", case.models(), strict=True)]
    public = None if case.protocol.name in ("fedavg", "d_sgd", "fd") else samples(8)[0]
    return cd.Federation(
        agents, case.protocol, public=public, test=samples(6), compression=case.compression,
        participation=case.participation,
    )  # fmt: skip


class Recorded:
    """A case after its first round, with the messages of the second; any node can be run through it again."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.messages: list[tuple[str, str, bytes]] = []  # sender, receiver, encoded
        self.description = replace(federation(case).description, watchers=(self._watch,))
        nodes = self.description.nodes
        host = self.description.host(nodes)
        self.names = self.description.topology.names
        for phase in range(BEGIN, ROUND):
            host.run(phase, self.names)
        self._nodes = {node.name: node for node in nodes}
        self._states = {node.name: pack(record_of(node).dump()) for node in nodes}
        self.messages.clear()
        report = host.run(ROUND, self.names)
        assert not report.refused, report.refused
        self.signatures: dict[str, set[Any]] = {}  # what each node sends when all goes well
        for sender, _, data in self.messages:
            self.signatures.setdefault(sender, {((), ())}).add(self._signature(data))
        self.largest = max((len(data) for _, _, data in self.messages), default=0)

    def _watch(self, sender: str, receiver: str, data: bytes) -> None:
        self.messages.append((sender, receiver, data))

    def replay(self, place: int, data: bytes) -> Report:
        """Run the receiver of a message through the round, with other bytes in its place."""
        receiver = self.messages[place][1]
        node = self._nodes[receiver]
        record_of(node).resume(unpack(self._states[receiver]))
        arrivals = [
            (sender, data if index == place else sent)
            for index, (sender, to, sent) in enumerate(self.messages)
            if to == receiver
        ]
        links = _Arrivals(receiver, arrivals, [name for name in (*self.names, HUB) if name != receiver])
        host = Host(
            [node], self.case.protocol, self.description.faults, links,
            compression=self.case.compression, message_limit=LIMIT,
        )  # fmt: skip
        report = host.run(ROUND, self.names)
        self._check(node, links.posted)
        return report

    def _check(self, node: Node, posted: Sequence[bytes]) -> None:
        """What the node sends and predicts must be as usable as ever."""
        for data in posted:
            sent = self._signature(data)
            assert sent in self.signatures[node.name], f"{node.name} sends {sent}"
        if isinstance(node, Agent):
            scores = score(self.description, node, None)
            assert scores, "no scores"
            assert all(np.isfinite(value) for value in scores.values()), scores
            if cd.Ability.WEIGHTS not in self.case.protocol.needs:  # a mean of finite weights may be of no use
                assert np.isfinite(self.case.protocol.predict(node, node.shard.x)).all(), "predictions"

    def _signature(self, data: bytes) -> Any:
        message = Message.decode(data, limit=LIMIT)
        arrays: Any = message.signature
        if cd.Ability.PORTABLE in self.case.protocol.needs:  # the size of a model depends on what it has learnt
            arrays = tuple((name, len(shape), dtype) for name, shape, dtype in arrays)
        return arrays, tuple(sorted(message.plain))


class _Arrivals:
    """Links on which all messages of a round have arrived, and nobody sends any more."""

    def __init__(self, receiver: str, arrivals: Iterable[tuple[str, bytes]], senders: Iterable[str]) -> None:
        self._frames = [Frame(ROUND, sender, [receiver], data) for sender, data in arrivals]
        self._senders = senders
        self.posted: list[bytes] = []

    def post(self, phase: int, sender: str, receivers: Sequence[str], data: bytes | None) -> None:
        """Keep what is sent."""
        self.posted += [data] if data is not None else []

    def post_end(self, phase: int, sender: str, listeners: Iterable[str]) -> None:
        """Nobody listens."""

    def flush(self) -> None:
        """Nothing is queued."""

    def arrived(self) -> list[Frame]:
        """All messages, and the end of everyone's round."""
        return [*self._frames, *(Frame(ROUND, sender, [], b"", is_end=True) for sender in self._senders)]

    def wait(self, host: Waiting) -> list[Frame]:
        """There is nothing to wait for."""
        raise AssertionError(f"the round does not end: {host.waits()}")
