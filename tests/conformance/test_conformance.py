"""One table for all protocols: a new protocol adds one row to CASES and gets all of these checks.

Simulation, processes and network are equal, to the bit and in bytes; stop and resume changes nothing, nor does the
number of workers, but the seed does; a lone agent reduces to local training; an absent agent and lost messages do not
stop the others; compression is the same everywhere, and shorter; no message holds private data, and nothing that an
agent tells gives its class counts; no message exceeds the limit that follows from the run; unmet needs fail before
anything runs; and where the paper says so, it beats learning alone.

One uninterrupted simulation of each case is what the others are compared with. It is small: these are questions of
equality, not of accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples.ds_fl import DSFL
from examples.fedgkt import FedGKT
from examples.fedtgp import FedTGP
from examples.kt_pfl import KTpFL
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier

import codistill as cd
from codistill.core.errors import LearnerError, RuntimeFault
from codistill.engine.privacy_guard import LabelGuard, PrivacyGuard
from codistill.learners.zoo import build
from codistill.network.options import UNKNOWN, derived_limit
from codistill.protocol import Agent, Hub, Message, Protocol
from codistill.protocols import PROTOCOLS
from codistill.protocols.alone import baseline_of
from codistill.topology import HUB

SHAPE, CLASSES, ROUNDS = (1, 8, 8), 10, 4
QUIET: dict[str, Any] = {"progress": False, "alone": False}
pytestmark = pytest.mark.usefixtures("time_limit")


@dataclass(frozen=True)
class Size:
    """How much there is to compute."""

    samples: int  # of each agent
    public: int
    test: int
    epochs: int
    trees: int


SMALL = Size(samples=40, public=30, test=60, epochs=1, trees=3)
LARGE = Size(samples=60, public=200, test=597, epochs=10, trees=20)  # enough to learn something
Models = Callable[[Size], list[Any]]


def _torch(name: str, size: Size, **options: Any) -> cd.TorchLearner:
    settings = {"lr": 3e-3, "epochs": size.epochs, "batch_size": 16, **options}
    return cd.TorchLearner(build(name, SHAPE, CLASSES), **settings)


def mixed(size: Size) -> list[Any]:
    """A convolutional network, a perceptron, a forest and a linear model."""
    forest, linear = RandomForestClassifier(size.trees), LogisticRegression(max_iter=1000)
    return [_torch("cnn", size), _torch("mlp", size), forest, linear]


def regressors(size: Size) -> list[Any]:
    """Models that are fitted to real values."""
    cnn, mlp = (_torch(name, size, loss="squared") for name in ("cnn", "mlp"))
    return [cnn, RandomForestRegressor(size.trees), mlp, Ridge()]


def equal(size: Size) -> list[Any]:
    """Four networks of one architecture."""
    return [_torch("mlp", size) for _ in range(4)]


def normalised(size: Size) -> list[Any]:
    """Four networks of one architecture with batch norm."""

    def module() -> torch.nn.Module:
        layers = torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES)
        return torch.nn.Sequential(torch.nn.Flatten(), *layers)

    return [cd.TorchLearner(module(), lr=3e-3, epochs=size.epochs, batch_size=16) for _ in range(4)]


def two_kinds(size: Size) -> list[Any]:
    """Four networks of two architectures."""
    return [_torch(name, size) for name in ("cnn", "mlp", "cnn", "mlp")]


@dataclass(frozen=True, kw_only=True)
class Relay(Protocol):
    """A hub that answers each ask at once, with the mean of what it has been told so far."""

    name = "relay"
    topology = "star"

    async def round(self, me: Agent, t: int) -> None:
        heard = [await me.ask_hub(x=np.full(4, float(len(me.shard) + step))) for step in range(3)]
        me.state["heard"] = [*me.state.get("heard", []), *(float(answer["x"][0]) for answer in heard if answer)]
        me.measure(me.name, last=me.state["heard"][-1])

    def serve(self, me: Hub, sender: str, message: Message) -> Message:
        total, count = me.state.get("total", 0.0) + message["x"], me.state.get("count", 0) + 1
        me.state["total"], me.state["count"] = total, count
        return Message.of(x=total / count)


@dataclass(frozen=True)
class Case:
    """One row: a protocol, models that suit it, and the settings by which it beats learning alone, if it should."""

    protocol: cd.Protocol
    models: Models
    beats_alone: cd.Protocol | None = None


STEPS: dict[str, Any] = {"local_steps": 2, "batch_size": 16}
CASES = [
    Case(cd.Alone(), mixed),
    Case(cd.Centralised(), mixed, cd.Centralised()),
    Case(cd.FedAvg(batch_size=16), equal, cd.FedAvg(local_epochs=4, batch_size=16)),
    Case(cd.FedProx(batch_size=16), equal, cd.FedProx(local_epochs=4, batch_size=16)),
    Case(cd.FedMAX(batch_size=16), equal, cd.FedMAX(local_epochs=4, batch_size=16, activation_weight=1.0)),
    Case(cd.FedBN(batch_size=16), normalised, cd.FedBN(local_epochs=4, batch_size=16)),
    Case(cd.FedDKD(dkd_steps=2, batch_size=16), equal, cd.FedDKD(local_epochs=4, batch_size=16)),
    Case(cd.FedDKD(local="max", average="except batch norm", dkd_steps=1, batch_size=16), normalised),
    Case(cd.FedDistill(batch_size=16), equal, cd.FedDistill(local_epochs=4, batch_size=16)),
    Case(cd.FedGen(generator_steps=2, batch_size=16), equal, cd.FedGen(local_epochs=4, batch_size=16)),
    Case(cd.FedMD(batch_size=16), mixed, cd.FedMD(local_epochs=10, batch_size=16)),
    Case(cd.FedAL(transfer_steps=2, **STEPS), two_kinds, cd.FedAL(local_steps=40, transfer_steps=12, batch_size=16)),
    Case(cd.FedDF(adversarial=1.0, **STEPS), two_kinds, cd.FedDF(local_steps=20, adversarial=1.0, batch_size=16)),
    Case(cd.DDistillation(network_batch=16, **STEPS), mixed),
    Case(cd.DSGD(every=1, **STEPS), equal, cd.DSGD(local_steps=10, every=5, batch_size=16)),
    Case(cd.SiloSGD(**STEPS), equal),
    Case(cd.FD(batch_size=16), equal),
    Case(cd.FedProto(batch_size=16), equal),
    Case(cd.FedProto(form="public", batch_size=16, transfer_steps=3), equal),
    Case(cd.CRS(batch_size=16, average_over=3), equal),
    Case(cd.AKD(), mixed),
    Case(cd.AKD(simultaneous=True), regressors),
    Case(cd.PKD(), mixed),
    Case(cd.EKD(), regressors),
    Case(cd.EKD(half=False, single=True), equal),
    Case(cd.Backfitting(), regressors),
    Case(cd.AvgKD(), mixed),
]
RELAY = Case(Relay(), equal)
# Protocols of the literature that are written outside of the package, by the tutorial's means. FedGKT sends the labels
# of private samples, and a lone agent learns from the hub's model.
GKT = Case(FedGKT(local_epochs=1, hub_epochs=1, batch_size=16), equal)
NEIGHBOURS = [
    Case(DSFL(local_epochs=1, public_epochs=1, batch_size=16, queries=20), mixed, DSFL()),
    Case(FedTGP(local_epochs=1, hub_steps=3, batch_size=16), equal),
    Case(KTpFL(local_epochs=1, batch_size=16), two_kinds),
]
# Second forms of a protocol share its code for talking: what is about that is checked on the first.
FIRST = list({case.protocol.name: case for case in reversed(CASES)}.values())[::-1]
NETWORKED = [RELAY, GKT, *NEIGHBOURS, *(case for case in FIRST if not case.protocol.pools_data)]
NAMED = {case.protocol.name: case for case in FIRST}


def rows_of(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.protocol.name for case in cases])


@dataclass
class Whole:
    """The uninterrupted simulation of a case."""

    result: cd.Result
    folder: Path
    messages: int = 0
    largest: int = 0  # bytes of a message
    limit: int = 0  # that a node between machines would accept
    leaks: list[str] = field(default_factory=list)  # what must stay at home, and was in a message
    label_leaks: list[str] = field(default_factory=list)  # class counts, in what an agent would tell

    @property
    def metrics(self) -> bytes:
        return (self.folder / "metrics.jsonl").read_bytes()

    def rows(self, rounds: int) -> list[dict[str, Any]]:
        return [row for row in self.result.rows if row["round"] <= rounds]


@pytest.fixture(scope="module")
def federation(digits: tuple[np.ndarray, np.ndarray]) -> Callable[..., cd.Federation]:
    """A federation of a case: each of four agents has digits of six classes out of ten."""
    x, y = digits

    def make(
        case: Case, *, agents: int = 4, size: Size = SMALL, withheld: slice | None = None, changed: slice = slice(0),
        **options: Any,
    ) -> cd.Federation:  # fmt: skip
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        members = []
        for i, model in enumerate(case.models(size)[:agents]):
            held = (np.arange(6) + 3 * i) % CLASSES
            rows = rng.choice(np.flatnonzero(np.isin(y[:1000], held)), size.samples, replace=False)
            own, labels, releases = x[rows], y[rows], None
            if withheld is not None and i == 0:
                releases = np.ones(size.samples, dtype=bool)
                releases[withheld] = False
                own[changed], labels[changed] = 100 - own[changed], (labels[changed] + 1) % CLASSES
            members.append(cd.Agent(f"agent-{i}", model, own, labels, releases=releases))
        public, test = x[1000 : 1000 + size.public], slice(1200, 1200 + size.test)
        return cd.Federation(members, case.protocol, public=public, test=(x[test], y[test]), classes=CLASSES, **options)

    return make


@pytest.fixture(scope="module")
def whole_of(federation: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Whole]:
    """The simulation of a case, run once, with the privacy guard."""
    known: dict[int, Whole] = {}

    def run(case: Case) -> Whole:
        guarded, folder = federation(case), tmp_path_factory.mktemp(case.protocol.name)
        models = not case.protocol.needs & (cd.Ability.WEIGHTS | cd.Ability.PORTABLE)
        guard = PrivacyGuard(guarded.agents, guarded.description.hub, models=models)
        labels = LabelGuard(replace(guarded.description, tells_class_mix=False))
        leaks: list[str] = []
        sizes: list[int] = []

        def watch(sender: str, receiver: str, data: bytes) -> None:
            sizes.append(len(data))
            try:
                guard(sender, receiver, data)
            except RuntimeFault as fault:
                leaks.append(str(fault))

        guarded.description = replace(guarded.description, watchers=(watch, labels))
        result = guarded.run(ROUNDS, runtime="simulation", folder=folder, progress=False, observers=[labels])
        limit = derived_limit(guarded.description)
        return Whole(result, folder, len(sizes), max(sizes, default=0), limit, leaks, labels.leaks)

    def once(case: Case) -> Whole:
        if id(case) not in known:
            known[id(case)] = run(case)
        return known[id(case)]

    return once


def test_every_protocol_has_a_row() -> None:
    assert {case.protocol.name for case in CASES} == set(PROTOCOLS)


@rows_of([*CASES, RELAY, GKT, *NEIGHBOURS])
def test_parts_in_simulation_and_processes_equal_the_whole(
    case: Case, federation: Any, whole_of: Any, digits: Any, tmp_path: Path
) -> None:
    """To the bit and in bytes, with any number of workers; each part goes on from the checkpoint of the one before."""
    whole, folder = whole_of(case), {"folder": tmp_path, **QUIET}

    def metrics() -> bytes:
        return (tmp_path / "metrics.jsonl").read_bytes()

    def first(rounds: int) -> bytes:
        return b"".join(whole.metrics.splitlines(keepends=True)[: 4 * rounds])

    assert whole.metrics.count(b"\n") == 4 * ROUNDS
    federation(case).run(1, runtime="processes", workers=1, **folder)
    assert metrics() == first(1)
    federation(case).run(2, runtime="simulation", resume=True, **folder)
    assert metrics() == first(2)
    result = federation(case).run(ROUNDS, runtime="processes", workers=3, resume=True, **folder)
    assert metrics() == whole.metrics
    for name, agent in whole.result.agents.items():
        np.testing.assert_array_equal(
            agent.decision_function(digits[0][:50]), result.agents[name].decision_function(digits[0][:50])
        )


@rows_of(NETWORKED)
def test_the_network_equals_the_simulation(case: Case, federation: Any, whole_of: Any, tmp_path: Path) -> None:
    """Real sockets with mutual TLS, one process for each node: the same bits and bytes."""
    whole = whole_of(case)
    federation(case).run(ROUNDS, runtime="network", folder=tmp_path, progress=False)
    for name in ("metrics.jsonl", "log.txt", "alone/metrics.jsonl", "outputs.safetensors"):
        paths = [folder / name for folder in (whole.folder, tmp_path)]
        assert [path.exists() for path in paths] in ([True, True], [False, False]), name
        if paths[0].exists():
            assert paths[0].read_bytes() == paths[1].read_bytes(), name


@rows_of(FIRST)
def test_another_seed_is_another_run(case: Case, federation: Any, whole_of: Any) -> None:
    other = federation(case, seed=1).run(1, runtime="simulation", **QUIET)
    assert len(other.rows) == 4
    assert other.rows != whole_of(case).rows(1)


@rows_of([*CASES, RELAY, *NEIGHBOURS])
def test_no_message_holds_what_must_stay_at_home(case: Case, whole_of: Any) -> None:
    """Samples and labels; weights and what the hub keeps, unless weights or models are what is exchanged."""
    whole = whole_of(case)
    assert whole.leaks == []
    assert (whole.messages > 0) == (sum(row["sent"] for row in whole.result.rows) > 0)
    assert whole.messages > 0 or case.protocol.name in ("alone", "centralised", "silo_sgd")


@rows_of([*CASES, RELAY, *NEIGHBOURS])
def test_nothing_that_an_agent_tells_gives_its_class_counts(case: Case, whole_of: Any) -> None:
    """Messages, measures, remarks, and the scores that it reports to a hub of another operator."""
    assert whole_of(case).label_leaks == []


@rows_of([*CASES, RELAY, *NEIGHBOURS])
def test_no_byte_depends_on_a_withheld_sample(case: Case, federation: Any) -> None:
    """Agent-0 withholds ten of its samples: other values and labels of these change no message, and no score.

    Those of a sample that it releases do, unless nothing but the number of samples is sent.
    """

    def told(changed: slice) -> tuple[list[tuple[str, str, bytes]], list[dict[str, Any]]]:
        sent: list[tuple[str, str, bytes]] = []
        watch = [lambda sender, receiver, data: sent.append((sender, receiver, bytes(data)))]
        made = federation(case, withheld=slice(5, 15), changed=changed, watchers=watch)
        return sent, made.run(2, runtime="simulation", progress=False).rows

    plain = told(slice(0))
    assert told(slice(5, 15)) == plain
    assert told(slice(0, 5)) != plain or case is RELAY


@rows_of([*CASES, RELAY, GKT, *NEIGHBOURS])
def test_no_message_exceeds_the_limit_that_follows_from_the_run(case: Case, whole_of: Any) -> None:
    whole = whole_of(case)
    assert whole.largest <= whole.limit
    if case.protocol.message_bytes(CLASSES, SMALL.public) is None:
        assert whole.limit == UNKNOWN
    else:
        assert whole.limit <= 4 * whole.largest + (1 << 20)


@rows_of([*CASES, *NEIGHBOURS])
def test_a_lone_agent_reduces_to_local_training(case: Case, federation: Any) -> None:
    together = federation(case, agents=1).run(2, runtime="simulation", **QUIET)
    baseline = Case(baseline_of(case.protocol) or case.protocol, case.models)
    alone = federation(baseline, agents=1).run(2, runtime="simulation", **QUIET)
    assert [row["accuracy"] for row in together.rows] == [row["accuracy"] for row in alone.rows]


@rows_of([*FIRST, *NEIGHBOURS])
def test_an_absent_agent_and_lost_messages_do_not_stop_the_others(case: Case, federation: Any) -> None:
    faults = [cd.Fault(kind="drop", rate=0.4), cd.Fault(kind="gone", agent="agent-1", first=2, last=2)]
    posted: list[int] = []  # bytes of messages to agents, lost or not
    watch = [lambda _, receiver, data: posted.append(len(data) * (receiver != HUB))]
    here, there = (
        federation(case, faults=faults, watchers=watchers).run(3, runtime=runtime, **QUIET).rows
        for runtime, watchers in (("simulation", watch), ("processes", []))
    )
    assert here == there
    assert [(row["round"], row["agent"]) for row in here if not row["present"]] == [(2, "agent-1")]
    silent = next(row for row in here if not row["present"])
    assert silent["sent"] == silent["received"] == 0
    assert sum(row["received"] for row in here) < sum(posted) or not posted
    assert all("accuracy" in row for row in here)


@rows_of([NAMED["fedmd"], NAMED["d_distillation"]])
def test_injected_faults_compression_and_sampling_are_the_same_over_the_network(
    case: Case, federation: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "faults": [cd.Fault(kind="drop", rate=0.3), cd.Fault(kind="gone", agent="agent-1", first=2, last=2)],
        "compression": cd.Compression(bits=8),
        "participation": 0.75,
    }
    metrics = []
    for runtime in ("simulation", "network"):
        federation(case, **options).run(3, runtime=runtime, folder=tmp_path / runtime, **QUIET)
        metrics.append((tmp_path / runtime / "metrics.jsonl").read_bytes())
    assert metrics[0] == metrics[1]
    assert b'"present": false' in metrics[0]


@rows_of([*FIRST, *NEIGHBOURS])
def test_compression_is_the_same_everywhere_and_shorter(case: Case, federation: Any, whole_of: Any) -> None:
    """8 bits, without loss of a message, in both runtimes; models that travel as bytes are left as they are."""
    small = cd.Compression(bits=8, error_feedback=True)
    here, there = (
        federation(case, compression=small).run(1, runtime=runtime, **QUIET).rows
        for runtime in ("simulation", "processes")
    )
    assert here == there
    assert all(np.isfinite(row["accuracy"]) for row in here)
    sent, packed = (sum(row["sent"] for row in rows) for rows in (whole_of(case).rows(1), here))
    # Of a model that travels, only weights of networks are arrays: a forest stays as it is.
    assert packed < (1.0 if case.protocol.needs & cd.Ability.PORTABLE else 0.6) * sent or not sent


@rows_of([*FIRST, *NEIGHBOURS])
def test_unmet_needs_fail_before_anything_runs(case: Case, federation: Any) -> None:
    class NeverFitted(KNeighborsClassifier):  # type: ignore[misc]
        def fit(self, x: Any, y: Any) -> Any:
            raise AssertionError("nothing may run")

    unfit = Case(case.protocol, lambda size: [*case.models(size)[:3], NeverFitted()])
    if case.protocol.needs == cd.Ability.LABELS:
        assert federation(unfit)
        return
    with pytest.raises(LearnerError) as caught:
        federation(unfit)
    sentence = str(caught.value)
    assert "agent-3" in sentence
    assert "NeverFitted" in sentence
    assert "Protocols that work with it as it is: alone" in sentence


@pytest.mark.long
@rows_of([Case(case.beats_alone, case.models) for case in (*CASES, *NEIGHBOURS) if case.beats_alone])
def test_it_beats_learning_alone(case: Case, federation: Any) -> None:
    rounds = 8
    options: dict[str, Any] = {"runtime": "simulation", "progress": False, "evaluate_every": rounds}
    together = federation(case, size=LARGE).run(rounds, **options)
    alone = together.alone_rows
    if alone is None:  # of what is a baseline itself
        alone = federation(Case(cd.Alone(local_epochs=4), case.models), size=LARGE).run(rounds, **options).rows
    together_mean, alone_mean = (
        np.mean([row["accuracy"] for row in rows if "accuracy" in row]) for rows in (together.rows, alone)
    )
    assert together_mean > alone_mean + 0.05
