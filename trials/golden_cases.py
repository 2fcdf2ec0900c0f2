"""The runs of the trial `golden`, in a process of their own: see trials/golden.py, which starts it.

Each case is one small federation, and each way of running it must give the same messages, metrics, answers and states,
to the bit: in every runtime, stopped and resumed, killed and resumed. One line of JSON is printed for each way.

Only the public names of codistill are used, so that the same cases run with the source of another checkout; what has
to reach further inside is in `_module` and `_watch`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, Ridge

import codistill as cd
from codistill.protocols import PROTOCOLS

ROOT = Path(__file__).parents[1]
SHAPE, CLASSES, ROUNDS = (1, 8, 8), 10, 3
SAMPLES, PUBLIC, TEST, ASKED = 40, 30, 60, 50
NAMES = tuple(f"agent-{i}" for i in range(4))
HUB = "hub"
LOCAL, CLUSTER = "local", "ray"  # two processes: to fork is not safe beside Ray's threads


# --- what reaches further inside than public names --------------------------------------------------


def _module(name: str) -> torch.nn.Module:
    """A registered architecture: only those can travel."""
    from codistill.learners.zoo import build

    return build(name, SHAPE, CLASSES)


class _Unrefused(tuple[Any, ...]):
    """Watchers that are not noticed by the check that the runtime "ray" has none, as it calls them on other machines.

    Here they are on this machine, and write to a file.
    """

    def __bool__(self) -> bool:
        return False


def _watch(federation: cd.Federation, tap: Tap) -> None:
    """Let the tap see all messages, in a Ray cluster as well."""
    federation.description = replace(federation.description, watchers=_Unrefused([tap]))


# --- messages -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tap:
    """A watcher: one line for each message, as its sender encodes it. Many processes append to the same file."""

    path: str

    def __call__(self, sender: str, receiver: str, data: bytes) -> None:
        """Append a line; one write, so that lines of several processes do not mix."""
        line = f"{sender}\t{receiver}\t{hashlib.sha256(data).hexdigest()}\t{len(data)}\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)

    def told(self) -> dict[str, list[tuple[str, int]]]:
        """The messages of each sender to each receiver in their order: digest and bytes."""
        told: dict[str, list[tuple[str, int]]] = {}
        path = Path(self.path)
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            sender, receiver, digest, size = line.split("\t")
            told.setdefault(f"{sender} > {receiver}", []).append((digest, int(size)))
        return dict(sorted(told.items()))


# --- models and protocols ---------------------------------------------------------------------------

Models = Callable[[], list[Any]]


def _torch(name: str, **options: Any) -> cd.TorchLearner:
    return cd.TorchLearner(_module(name), **{"lr": 3e-3, "epochs": 1, "batch_size": 16, **options})


def mixed() -> list[Any]:
    """A convolutional network, a perceptron, a forest and a linear model."""
    return [_torch("cnn"), _torch("mlp"), RandomForestClassifier(3), LogisticRegression(max_iter=1000)]


def regressors() -> list[Any]:
    """Models that are fitted to real values."""
    return [_torch("cnn", loss="squared"), RandomForestRegressor(3), _torch("mlp", loss="squared"), Ridge()]


def equal() -> list[Any]:
    """Four networks of one architecture."""
    return [_torch("mlp") for _ in range(4)]


def normalised() -> list[Any]:
    """Four networks of one architecture with batch norm."""

    def module() -> torch.nn.Module:
        layers = torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES)
        return torch.nn.Sequential(torch.nn.Flatten(), *layers)

    return [cd.TorchLearner(module(), lr=3e-3, epochs=1, batch_size=16) for _ in range(4)]


def two_kinds() -> list[Any]:
    """Four networks of two architectures."""
    return [_torch(name) for name in ("cnn", "mlp", "cnn", "mlp")]


@dataclass(frozen=True, kw_only=True)
class Relay(cd.Protocol):
    """A hub that answers each ask at once, with the mean of what it has been told so far."""

    name = "relay"
    topology = "star"

    async def round(self, me: cd.Agent, t: int) -> None:
        """Ask three times."""
        heard = [await me.ask_hub(x=np.full(4, float(len(me.shard) + step))) for step in range(3)]
        me.state["heard"] = [*me.state.get("heard", []), *(float(answer["x"][0]) for answer in heard if answer)]

    def serve(self, me: cd.Hub, sender: str, message: cd.Message) -> cd.Message:
        """The mean so far."""
        total, count = me.state.get("total", 0.0) + message["x"], me.state.get("count", 0) + 1
        me.state["total"], me.state["count"] = total, count
        return cd.Message.of(x=total / count)


STEPS: dict[str, Any] = {"local_steps": 2, "batch_size": 16}
# All protocols, the first form of each first: (name of the case, protocol, models).
TABLE: list[tuple[str, cd.Protocol, Models]] = [
    ("alone", cd.Alone(), mixed),
    ("centralised", cd.Centralised(), mixed),
    ("fedavg", cd.FedAvg(batch_size=16), equal),
    ("fedprox", cd.FedProx(batch_size=16), equal),
    ("fedmax", cd.FedMAX(batch_size=16), equal),
    ("fedbn", cd.FedBN(batch_size=16), normalised),
    ("feddkd", cd.FedDKD(dkd_steps=2, batch_size=16), equal),
    ("feddistill", cd.FedDistill(batch_size=16), equal),
    ("fedgen", cd.FedGen(generator_steps=2, batch_size=16), equal),
    ("fedmd", cd.FedMD(batch_size=16), mixed),
    ("fedal", cd.FedAL(transfer_steps=2, **STEPS), two_kinds),
    ("feddf", cd.FedDF(adversarial=1.0, **STEPS), two_kinds),
    ("d_distillation", cd.DDistillation(network_batch=16, **STEPS), mixed),
    ("d_sgd", cd.DSGD(every=1, **STEPS), equal),
    ("silo_sgd", cd.SiloSGD(**STEPS), equal),
    ("fd", cd.FD(batch_size=16), equal),
    ("fedproto", cd.FedProto(batch_size=16), equal),
    ("crs", cd.CRS(batch_size=16, average_over=3), equal),
    ("akd", cd.AKD(), mixed),
    ("pkd", cd.PKD(), mixed),
    ("ekd", cd.EKD(), regressors),
    ("backfitting", cd.Backfitting(), regressors),
    ("avgkd", cd.AvgKD(), mixed),
    (
        "feddkd, second form",
        cd.FedDKD(local="max", average="except batch norm", dkd_steps=1, batch_size=16),
        normalised,
    ),
    ("fedproto, second form", cd.FedProto(form="public", batch_size=16, transfer_steps=3), equal),
    ("akd, second form", cd.AKD(simultaneous=True), regressors),
    ("ekd, second form", cd.EKD(half=False, single=True), equal),
    ("relay", Relay(), equal),
]
NAMED = {name: (protocol, models) for name, protocol, models in TABLE}


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A federation, and the ways of running it that must be equal."""

    name: str
    protocol: cd.Protocol
    models: Models
    ways: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the federation
    run: Mapping[str, Any] = field(default_factory=dict)  # of its run
    rounds: int = ROUNDS
    agents: int = 4
    # Where the network runs in real time: how many messages of each agent to each receiver do not depend on it.
    # Metrics, answers and states do; and answers of a hub without rounds are not shown to watchers there.
    first: int | None = None


Part = tuple[str, int | None, dict[str, Any]]  # a runtime, up to which round, options
# How a case is run: in parts, each of which resumes the one before.
WAYS: dict[str, list[Part]] = {
    "simulation": [("simulation", None, {})],
    "processes": [("processes", None, {"workers": 3})],
    "network": [("network", None, {})],
    "ray": [("ray", None, {"workers": 1})],
    "ray, two hosts": [("ray", None, {"workers": 2})],
    "resumed": [("simulation", 1, {}), ("processes", 2, {"workers": 2}), ("simulation", None, {})],
    "resumed simulation": [("simulation", 1, {}), ("simulation", None, {})],
    "resumed network": [("network", 1, {}), ("network", None, {})],
    "resumed ray": [("simulation", 1, {}), ("ray", 2, {"workers": 2, "idle": "disk"}), ("simulation", None, {})],
    "idle simulation": [("simulation", None, {"idle": "disk"})],
    "idle processes": [("processes", None, {"workers": 2, "idle": "disk"})],
    "killed simulation": [("simulation", None, {})] * 2,
    "killed processes": [("processes", None, {"workers": 2})] * 2,
    "killed network": [("network", None, {})] * 2,
}
HERE = ("simulation", "processes", "network")
FAULTS = (cd.Fault(kind="drop", rate=0.3), cd.Fault(kind="gone", agent="agent-1", first=2, last=2))
EIGHT = cd.Compression(bits=8, error_feedback=True)
CLOCK: dict[str, Any] = {"step": 0.05, "slowest": 3.0, "delay": 0.1}


def cases() -> Iterator[Case]:
    """All cases, those of one kind together."""
    assert {protocol.name for _, protocol, _ in TABLE} == {*PROTOCOLS, "relay"}, "every protocol must have a row"
    several = ("fedmd", "fedavg", "avgkd", "d_distillation")  # what is asked of some only
    for name, protocol, models in TABLE:
        ways = ("simulation", "processes", "resumed")
        if not protocol.pools_data:
            ways = (*ways, "network", *([] if "second" in name else ["ray, two hosts" if name in several else "ray"]))
        yield Case(name, protocol, models, ways)
    first = [row for row in TABLE if "second" not in row[0]]
    for name, protocol, models in first:
        ways = ("simulation", "processes" if protocol.pools_data else "network")
        if name in several:
            ways = (*ways, "processes", "resumed", "resumed ray")
        options = {"faults": FAULTS, "participation": 0.75, "compression": EIGHT}
        yield Case(f"{name}, faults, sampled, compressed", protocol, models, ways, options)
    for name, protocol, models in first:
        ways = ("simulation", "resumed", *(["network"] if name in several else []))
        yield Case(f"{name}, sampled", protocol, models, ways, {"participation": 0.5})
    for name in ("fedavg", "fedmd", "d_distillation"):
        killed = ("killed simulation", "killed processes", "killed network")
        yield Case(f"{name}, killed", *NAMED[name], ("simulation", *killed, "resumed network"))
    yield from _with_options()
    yield from _on_graphs()
    yield from _by_a_clock()


def _with_options() -> Iterator[Case]:
    for name in ("alone", "fedavg", "fedmd", "fedgen", "d_distillation", "avgkd", "crs"):
        ways = ("simulation", "processes", "resumed", "network", *(["ray"] if name == "fedmd" else []))
        yield Case(f"{name}, safeguard", *NAMED[name], ways, {"safeguard": True})
    for what, compression in (
        ("16 bits, deflated", cd.Compression(bits=16, lossless=True)),
        ("8 bits, top 3", cd.Compression(bits=8, top_k=3, error_feedback=True)),
        ("deflated", cd.Compression(lossless=True)),
    ):
        for name in ("fedavg", "fedmd", "avgkd"):
            ways = HERE if name == "fedavg" else HERE[:2]
            yield Case(f"{name}, {what}", *NAMED[name], ways, {"compression": compression})
    for kind in ("invert", "random"):
        fault = cd.Fault(kind=kind, agent="agent-2", strength=3.0)
        for protocol in (cd.FedAvg(batch_size=16, aggregate="median"), cd.FedMD(batch_size=16, aggregate="median")):
            models = NAMED[protocol.name][1]
            yield Case(f"{protocol.name}, Byzantine {kind}", protocol, models, HERE, {"faults": [fault]})
    late = [cd.Fault(kind="late", rate=0.3), cd.Fault(kind="split", agents=NAMES[:2], first=2, last=2)]
    yield Case("d_distillation, late and split", *NAMED["d_distillation"], HERE, {"faults": late})
    some = {"evaluate_every": 2, "evaluate_samples": 20, "evaluate_agents": "present"}
    for name in ("fedmd", "fedavg"):
        # Not resumed, since the last round of each part is evaluated as well.
        ways = ("simulation", "processes", "idle simulation", "idle processes", *(["ray"] if name == "fedmd" else []))
        yield Case(f"{name}, few evaluations", *NAMED[name], ways, {"participation": 0.5}, run=some)


def _on_graphs() -> Iterator[Case]:
    a, b, c, d = NAMES
    line = cd.Topology(NAMES, [(a, b), (b, c), (c, d)])
    third = 1 / 3
    weights = [[third, 0, third, third], [third, third, 0, third], [third, third, third, 0], [0, third, third, third]]
    one_way = [(NAMES[m], NAMES[n]) for n in range(4) for m in range(4) if n != m and weights[n][m]]
    directed = cd.Topology(NAMES, one_way, directed=True, weights=weights)
    for name in ("d_distillation", "d_sgd", "crs"):
        ways = (*HERE, "resumed", *(["ray, two hosts"] if name == "d_sgd" else []))
        yield Case(f"{name}, on a line", *NAMED[name], ways, {"topology": line})
    yield Case("d_sgd, on a directed graph", *NAMED["d_sgd"], HERE, {"topology": directed})
    options = {"topology": line, "faults": FAULTS, "participation": 0.75, "compression": EIGHT}
    yield Case("d_sgd, on a line with faults", *NAMED["d_sgd"], (*HERE, "resumed"), options)


def _by_a_clock() -> Iterator[Case]:
    ring = cd.Topology(NAMES, [(NAMES[i], NAMES[i - 1]) for i in range(4)])
    own_pace = cd.Clock(asynchronous=True, offline=(cd.Offline(agent="agent-1", first=1.2, last=2.1),), **CLOCK)
    yield Case("fedmd, rounds by a clock", *NAMED["fedmd"], ("simulation",), {"clock": cd.Clock(**CLOCK)})
    networks = (cd.FedMD(batch_size=16, transfer_steps=2), equal)
    for name, (protocol, models), more in (
        ("alone", NAMED["alone"], {}),
        ("fedmd", networks, {}),
        ("crs", NAMED["crs"], {}),
        ("crs on a ring", NAMED["crs"], {"topology": ring}),
        ("fedmd with faults", networks, {"faults": FAULTS, "participation": 0.75, "compression": EIGHT}),
        ("crs with a safeguard", NAMED["crs"], {"safeguard": True}),
    ):
        ways = ("simulation", "resumed simulation", "killed simulation")
        yield Case(f"{name}, without rounds", protocol, models, ways, {"clock": own_pace, **more})
    real = {"clock": cd.Clock(asynchronous=True, step=0.01, period=1.0)}
    both = ("simulation", "network")
    # A question to the relay and an upload in each round; alone, an agent is answered that there is nothing.
    yield Case("crs, a lone agent without rounds", *NAMED["crs"], both, real, rounds=2, agents=1, first=4)
    yield Case("fedmd, without rounds, first", *networks, both, real, rounds=2, first=1)
    on_ring = {**real, "topology": ring}
    yield Case("crs on a ring, without rounds, first", *NAMED["crs"], both, on_ring, rounds=2, first=1)


# --- one way of running a case ----------------------------------------------------------------------


def digits() -> tuple[np.ndarray, np.ndarray]:
    """All 1,797 digits as (n, 1, 8, 8) in 0..1."""
    x, y = load_digits(return_X_y=True)
    return (x.reshape(-1, *SHAPE) / 16).astype(np.float32), y.astype(np.int64)


def make(case: Case, tap: Tap) -> cd.Federation:
    """The federation: each agent has digits of six classes out of ten."""
    x, y = digits()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    agents = []
    for i, model in enumerate(case.models()[: case.agents]):
        held = (np.arange(6) + 3 * i) % CLASSES
        rows = rng.choice(np.flatnonzero(np.isin(y[:1000], held)), SAMPLES, replace=False)
        agents.append(cd.Agent(NAMES[i], model, x[rows], y[rows]))
    public, test = x[1000 : 1000 + PUBLIC], slice(1200, 1200 + TEST)
    federation = cd.Federation(
        agents, case.protocol, public=public, test=(x[test], y[test]), classes=CLASSES, **case.options
    )
    _watch(federation, tap)
    return federation


class Kill:
    """An observer that ends this process and all others of its session when a round has ended."""

    def __init__(self, after: int) -> None:
        self._after = after

    def round_ended(self, record: Any) -> None:
        """Kill, without a chance to tidy up."""
        if record.round == self._after:
            os.killpg(0, signal.SIGKILL)


def run(case: Case, way: str, folder: Path) -> dict[str, Any]:
    """Run the parts one after the other; returns digests of what came out of it."""
    tap, parts, killed = Tap(str(folder / "messages")), WAYS[way], way.startswith("killed")
    out = folder / "run"
    result: cd.Result | None = None
    for i, (runtime, rounds, options) in enumerate(parts):
        last = min(rounds or case.rounds, case.rounds)
        settings = {"runtime": runtime, "folder": out, "resume": i > 0, "progress": False, **case.run, **options}
        if killed and i == 0:
            _run_and_kill(case, tap, last, settings)
        else:
            result = make(case, tap).run(last, **settings)
    assert result is not None
    told = record(case, tap.told(), out, result)
    # What differs by design:
    left_out = {"messages", "count", "bytes"} if killed else {"distinct"}  # those of a round that is done again
    if way.startswith("resumed"):
        left_out.add("alone")  # agents alone are trained as long as the first part
    if "network" in way:
        told.get("states", {}).pop(HUB, None)  # which knows less about agents of other operators
    return {what: value for what, value in told.items() if what not in left_out or way == "simulation"}


def _run_and_kill(case: Case, tap: Tap, rounds: int, settings: dict[str, Any]) -> None:
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            make(case, tap).run(rounds, observers=[Kill(2)], **settings)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
        raise RuntimeError("the run has ended before it was killed")


def record(case: Case, told: Mapping[str, list[tuple[str, int]]], out: Path, result: cd.Result) -> dict[str, Any]:
    """Digests of messages, metrics, the agents' answers and the states in the last checkpoint."""
    if case.first is not None:
        first = {pair: sent[: case.first] for pair, sent in told.items() if not pair.startswith(HUB)}
        return _messages(first)
    x = digits()[0][:ASKED]
    answers = {name: np.asarray(agent.answers(x)) for name, agent in result.agents.items()}
    return {
        **_messages(told),
        "metrics": _digest(_content(out / "metrics.jsonl")),
        "alone": _digest(_content(out / "alone" / "metrics.jsonl")),
        "answers": _digest([answers, _content(out / "outputs.safetensors")]),
        "states": {name: _digest(state) for name, state in sorted(cd.read_state(out)["nodes"].items())},
    }


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _messages(told: Mapping[str, list[tuple[str, int]]]) -> dict[str, Any]:
    """In the order of each pair. Those that a killed run sends again are equal to the first: `distinct` is without."""
    distinct = {pair: list(dict.fromkeys(sent)) for pair, sent in told.items()}
    sizes = [size for sent in told.values() for _, size in sent]
    return {"messages": _digest(told), "distinct": _digest(distinct), "count": len(sizes), "bytes": sum(sizes)}


def _digest(content: Any) -> str:
    made = hashlib.sha256()
    _add(made, content)
    return made.hexdigest()[:16]


def _add(made: Any, content: Any) -> None:
    """Add content of any type, with its type and its length, so that no two contents look alike."""
    if isinstance(content, Mapping):
        made.update(f"table {len(content)}\n".encode())
        for key in sorted(content, key=repr):
            _add(made, key)
            _add(made, content[key])
    elif isinstance(content, list | tuple):
        made.update(f"list {len(content)}\n".encode())
        for item in content:
            _add(made, item)
    elif isinstance(content, np.ndarray):
        made.update(f"array {content.dtype.str} {content.shape}\n".encode() + np.ascontiguousarray(content).tobytes())
    elif isinstance(content, bytes) and content.startswith(b"PK"):
        made.update(b"an archive of an estimator, which holds times and addresses in memory\n")
    elif isinstance(content, bytes):
        made.update(f"bytes {len(content)}\n".encode() + content)
    else:
        made.update(f"{type(content).__name__} {content!r}\n".encode())


# --- a recipe, by the command line ------------------------------------------------------------------

RECIPE = """
seed = 0
data = { name = "digits", public = 60 }
partition = { kind = "dirichlet", alpha = 0.5, min_size = 20 }
agents = [{ learner = "cnn" }, { learner = "mlp" }, { learner = "logistic_regression" }]
protocol = { name = "fedmd", rounds = 2, local_steps = 3, batch_size = 32, transfer_steps = 2 }
"""


def run_recipe(way: str, folder: Path) -> dict[str, Any]:
    """`codistill run`: its messages are not seen, and compared by their bytes in the metrics."""
    recipe, out = folder / "recipe.toml", folder / "run"
    recipe.write_text(RECIPE, "utf-8")
    settings = ["--set", f"runtime.kind={way}", *(["--set", "runtime.workers=2"] if way != "network" else [])]
    command = [sys.executable, "-m", "codistill", "run", str(recipe), "--out", str(out), "--quiet", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"codistill run: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    files = {"metrics": "metrics.jsonl", "alone": "alone/metrics.jsonl", "answers": "outputs.safetensors"}
    return {what: _digest(_content(out / name)) for what, name in files.items()}


# --- all of them ----------------------------------------------------------------------------------


def chosen(lane: str, *, quick: bool, only: str) -> Iterator[tuple[str, str, Callable[[Path], dict[str, Any]]]]:
    """The name of a case, a way of running it, and what runs it."""
    for case in cases():
        if only not in case.name or (quick and case.name not in NAMED):
            continue
        for way in case.ways[:1] if quick else case.ways:
            if ("ray" in way) == (lane == CLUSTER):
                yield case.name, way, lambda folder, case=case, way=way: run(case, way, folder)
    if not quick and only in "recipe":
        for way in ("ray",) if lane == CLUSTER else HERE:
            yield "recipe", way, lambda folder, way=way: run_recipe(way, folder)


def fingerprint() -> dict[str, str]:
    """What figures depend on besides this source: versions, and how this processor rounds."""
    import safetensors
    import sklearn

    rng = np.random.default_rng(0)
    x, y = digits()
    a = rng.normal(size=(64, 96)).astype(np.float32)
    torch.manual_seed(0)
    images = torch.from_numpy(x[:64])
    layer = torch.nn.Conv2d(1, 6, 3)
    layer(images).square().mean().backward()  # type: ignore[no-untyped-call]
    forest = RandomForestClassifier(3, random_state=0).fit(x[:200].reshape(200, -1), y[:200])
    linear = LogisticRegression(max_iter=50).fit(x[:200].reshape(200, -1), y[:200])
    t = torch.from_numpy(a)
    probe = [
        a @ a.T, a.astype(np.float64) @ a.T, np.exp(a), np.log1p(np.abs(a)), (t @ t.T).numpy(),
        layer(images).detach().numpy(), layer.weight.grad.numpy(), torch.log_softmax(t, dim=1).numpy(),
        forest.predict_proba(x[200:300].reshape(100, -1)), linear.coef_,
    ]  # fmt: skip
    versions = {module.__name__: module.__version__ for module in (np, torch, sklearn, safetensors)}
    return {**versions, "python": ".".join(map(str, sys.version_info[:2])), "probe": _digest(probe)}


def _join_ray() -> bool:
    """A Ray cluster on this machine, whose processes import from where this one does; False: Ray is not installed."""
    try:
        import ray
    except ImportError:
        return False
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="CRITICAL", log_to_driver=False)
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # for `codistill run`
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases of one lane; one line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lane", choices=(LOCAL, CLUSTER))
    parser.add_argument("folder", type=Path, help="for the runs; exists")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes of a run end with it
    torch.set_num_threads(1)
    if options.lane == LOCAL:
        _tell(fingerprint=fingerprint(), source=str(Path(cd.__file__).parent))
    elif not _join_ray():
        _tell(missing="ray")
        return 0
    for i, (name, way, execute) in enumerate(chosen(options.lane, quick=options.quick, only=options.only)):
        folder = options.folder / f"{options.lane}-{i}"
        folder.mkdir()
        began = time.monotonic()
        try:
            outcome: dict[str, Any] = {"record": execute(folder)}
        except Exception:
            outcome = {"error": traceback.format_exc()}
        _tell(case=name, way=way, seconds=round(time.monotonic() - began, 2), **outcome)
    return 0


def _tell(**content: Any) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    from trials import golden_cases  # by its name, so that hosts of a Ray cluster find its classes

    raise SystemExit(golden_cases.main())
