"""Distributed Distillation against (5) and (6), Lemma 4 and Theorem 3, on problems small enough to follow by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import softmax
from torch import nn

import codistill as cd
from codistill.core.errors import CodistillError
from codistill.results.records import RoundEnded
from codistill.topology import graphs

NAMES = ["d0", "d1", "d2"]
# A path d0 - d1 - d2: Metropolis-Hastings weights are 1 / (1 + 2) on both links.
PATH = [("d0", "d1"), ("d1", "d2")]
W = np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3
THETA = [np.array([0.5, -0.3]), np.array([-0.2, 0.4]), np.array([0.1, 0.9])]  # f_n(x) = θ_n x, two classes
PRIVATE = [([[1.0]], [0]), ([[-2.0]], [1]), ([[0.5]], [0])]
POINTS = np.array([[1.0], [-0.5]])  # the reference data: both points are in every batch
RATE = 0.1


def _device(theta: np.ndarray, lr: float = RATE) -> cd.TorchLearner:
    module = nn.Linear(1, len(theta), bias=False)
    module.weight.data = torch.tensor(theta[:, None], dtype=torch.float32)
    return cd.TorchLearner(module, optimiser="sgd", lr=lr)


def _run(protocol: cd.Protocol, rounds: int = 1, edges: Any = PATH, **options: Any) -> list[cd.Agent]:
    federation = _federation(protocol, edges, **options)
    federation.run(rounds, runtime="simulation", alone=False, progress=False)
    return list(federation.agents)


def _federation(protocol: cd.Protocol, edges: Any = PATH, **options: Any) -> cd.Federation:
    agents = [cd.Agent(name, _device(THETA[n]), *PRIVATE[n]) for n, name in enumerate(NAMES)]
    return cd.Federation(agents, protocol, public=POINTS, classes=2, topology=cd.Topology(NAMES, edges), **options)


def _slope(theta: np.ndarray, z: np.ndarray) -> np.ndarray:
    """d mean |s - z|² / dθ over the points: the softmax's Jacobian is diag(s) - s sᵀ, f = θ u."""
    slope = np.zeros_like(theta)
    for u, target in zip(POINTS[:, 0], z, strict=True):
        s = softmax(theta * u)
        slope += u * (np.diag(s) - np.outer(s, s)) @ (2 * (s - target)) / len(POINTS)
    return slope


def _by_hand(
    steps: int, form: str, start: str, weight: float, z_step: float, factor: Any, every: int = 1, between: str = "pull"
) -> tuple[Any, Any]:
    """θ and z of all three devices after some iterations; `weight` and `z_step` are those of the mean form."""
    theta = [each.copy() for each in THETA]
    own = [softmax(each * POINTS) for each in theta]
    z = [each.copy() if start == "own" else np.full((2, 2), 0.5) for each in own]
    for t in range(steps):
        s = [softmax(each * POINTS) for each in theta]
        due = t % every == 0
        mixed = [sum((W if due else np.eye(3))[n, m] * z[m] for m in range(3)) for n in range(3)]
        rate = RATE * factor(t)
        for n in range(3):
            (x,), (y,) = PRIVATE[n]
            loss = (softmax(theta[n] * x[0]) - np.eye(2)[y]) * x[0]
            if form == "printed":  # M_n = 1, Q = 2, N = 3, β = weight
                target, step, pull = z[n], 2 * weight * rate, weight * 2 / 3
            else:
                target, step, pull = mixed[n], z_step, weight
            if not due:
                step, pull = (step if between == "step" else 0.0), (0.0 if between == "nothing" else pull)
            theta[n] = theta[n] - rate * (loss + pull * _slope(theta[n], target))
            mixed[n] = mixed[n] - step * (target - s[n])
        z = mixed
    return theta, z


@pytest.mark.parametrize("between", ["pull", "step", "nothing"])
@pytest.mark.parametrize(
    "form", [{"weight": 1.5, "z_step": 0.3}, {"form": "printed", "beta": 0.8, "lr": RATE}], ids=str
)
def test_between_communications_as_by_hand(form: dict[str, Any], between: str) -> None:
    """Of four iterations those at 0 and 3 communicate; in rounds of two, 2 has the z of the round before.

    "nothing": ∇ℓ alone. "pull": (5) with the z of the last communication, z stays. "step": (5) and (6) with W = I.
    """
    protocol = cd.DDistillation(local_steps=2, every=3, between=between, start="uniform", **form)
    agents = _run(protocol, 2)
    weight = form.get("weight", form.get("beta"))
    theta, z = _by_hand(4, form.get("form", "mean"), "uniform", weight, 0.3, lambda t: 1.0, 3, between)
    for n, agent in enumerate(agents):
        np.testing.assert_allclose(agent.learner.module.weight.detach().numpy()[:, 0], theta[n], atol=2e-6)
        np.testing.assert_allclose(agent.state["z"], z[n], atol=2e-6)
    others = {_by_hand(4, form.get("form", "mean"), "uniform", weight, 0.3, lambda t: 1.0, 3, each)[0][0][0]
              for each in ("pull", "step", "nothing")}  # fmt: skip
    assert len(others) == 3  # readings that can be told apart
    assert max(others) - min(others) > 1e-4


def test_there_is_no_pull_towards_points_on_which_nobody_was_heard() -> None:
    """All messages lost: in the form "mean" the steps between communications are those on the private loss alone."""
    lost = [cd.Fault(kind="drop")]
    runs = [_run(cd.DDistillation(local_steps=4, every=2, between=how), faults=lost) for how in ("pull", "nothing")]
    for pulled, not_pulled in zip(*runs, strict=True):
        assert torch.equal(pulled.learner.module.weight, not_pulled.learner.module.weight)


def test_the_pull_is_to_points_of_the_last_tau_communications() -> None:
    """Of 12 iterations 0, 3, 6, 9 communicate, on batches S_0 ... S_3 of two: with τ = 3 the last three are kept."""
    public = np.linspace(-1, 1, 20)[:, None]
    agents = [cd.Agent(name, _device(THETA[n]), *PRIVATE[n]) for n, name in enumerate(NAMES)]
    protocol = cd.DDistillation(local_steps=12, every=3, network_batch=2)
    federation = cd.Federation(agents, protocol, public=public, classes=2, topology=cd.Topology(NAMES, PATH))
    federation.run(1, runtime="simulation", alone=False, progress=False)
    batches = [ids for ids, _ in agents[0].public.batches(0, 2, 4)]
    assert agents[0].state["recent"].tolist() == np.concatenate(batches[1:]).tolist()


def test_a_device_without_gradients_sees_the_same_points_as_one_with() -> None:
    """between = "step": S_t is drawn for every iteration, also where a box only agrees on every other one.

    Q = 6 points, b = 2, every = 2: of the batches of iterations 0, 1, 2 those of 0 and 2 are exchanged; all are met.
    """
    public = np.linspace(-1, 1, 6)[:, None]
    agents = [
        cd.Agent("d0", Teller([0.9, 0.1]), [[0.0]], [0]),
        cd.Agent("d1", _device(THETA[1], lr=1e-12), *PRIVATE[1]),
    ]
    protocol = cd.DDistillation(local_steps=3, every=2, network_batch=2, between="step", z_step=0.0, weight=0.0)
    cd.Federation(agents, protocol, public=public, classes=2, topology=cd.Topology.complete(["d0", "d1"])).run(
        1, runtime="simulation", alone=False, progress=False
    )
    agreed, own = agents[0].state["z"], np.array([0.9, 0.1])
    assert agents[0].state["met"].all()
    assert agents[1].state["met"].all()
    local = np.abs(agreed - own).max(axis=1) < 1e-6
    assert local.sum() == 2  # the points of iteration 1, which nobody exchanged
    theirs = softmax(THETA[1] * public)
    np.testing.assert_allclose(agreed[~local], (own + theirs[~local]) / 2, atol=1e-5)
    np.testing.assert_allclose(agents[1].state["z"][~local], agreed[~local], atol=1e-6)


@pytest.mark.parametrize("k", [1, 3])
def test_top_k_of_flat_soft_decisions_does_not_make_a_network_confident(k: int) -> None:
    """γ = λ = 0 and equal θ: z ← W z keeps s = (.19, .09, ..., .09) however often it is sent, and so does top-K of it.

    The missing mass is spread evenly over the entries left out: .09 each, for any K.
    """
    flat = np.array([0.19] + [0.09] * 9)
    agents = [cd.Agent(name, _device(np.log(flat), lr=1e-12), [[1.0]], [0]) for name in NAMES]
    protocol = cd.DDistillation(local_steps=30, z_step=0.0, weight=0.0)
    federation = cd.Federation(
        agents, protocol, public=np.ones((32, 1)), classes=10, topology=cd.Topology(NAMES, PATH),
        compression=cd.Compression(top_k=k),
    )  # fmt: skip
    federation.run(1, runtime="simulation", alone=False, progress=False)
    for agent in agents:
        np.testing.assert_allclose(agent.state["z"], np.tile(flat, (32, 1)), atol=1e-5)


@pytest.mark.parametrize("start", ["own", "uniform"])
@pytest.mark.parametrize(
    ("protocol", "weight", "factor"),
    [
        ({"weight": 1.5, "z_step": 0.3}, 1.5, lambda t: 1.0),
        ({"form": "printed", "beta": 0.8, "lr": RATE}, 0.8, lambda t: 1.0),
        ({"form": "printed", "beta": 0.8, "lr": RATE, "schedule": "summable"}, 0.8, lambda t: (1 + t / 100) ** -0.75),
    ],
    ids=["mean", "printed", "printed, summable"],
)  # fmt: skip
def test_updates_5_and_6_on_three_devices_and_two_classes(
    protocol: dict[str, Any], weight: float, factor: Any, start: str
) -> None:
    agents = _run(cd.DDistillation(local_steps=3, start=start, **protocol))
    theta, z = _by_hand(3, protocol.get("form", "mean"), start, weight, 0.3, factor)
    for n, agent in enumerate(agents):
        np.testing.assert_allclose(agent.learner.module.weight.detach().numpy()[:, 0], theta[n], atol=2e-6)
        np.testing.assert_allclose(agent.state["z"], z[n], atol=2e-6)


def test_a_neighbour_that_is_missing_leaves_its_weight_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """d2 is gone: d1 mixes 2/3 of its own with 1/3 of d0's, and the mean of those present is kept."""
    faults = [cd.Fault(kind="gone", agent="d2")]
    agents = _run(cd.DDistillation(local_steps=1, z_step=0.0, weight=0.0), faults=faults)
    own = [softmax(each * POINTS) for each in THETA]
    np.testing.assert_allclose(agents[1].state["z"], 2 / 3 * own[1] + 1 / 3 * own[0], atol=1e-6)
    np.testing.assert_allclose(agents[0].state["z"], 2 / 3 * own[0] + 1 / 3 * own[1], atol=1e-6)


@pytest.mark.long
def test_consensus_error_falls_as_lemma_4_says() -> None:
    """Σ |z^n - z̄|² <= C η_{t-1}²: with η_t = η (1 + t/100)^-3/4 the ratio of the two stays bounded."""
    ratios = []

    class Consensus:
        def round_ended(self, record: RoundEnded) -> None:
            z = np.stack([agent.state["z"] for agent in federation.agents])
            lr = 0.3 * (1 + (250 * record.round - 1) / 100) ** -0.75
            if record.round in (1, 2, 5):  # 250, 500 and 1250 steps: schedules count steps over all rounds
                ratios.append(np.square(z - z.mean(axis=0)).sum() / lr**2)

    protocol = cd.DDistillation(local_steps=250, form="printed", beta=0.5, lr=0.3, schedule="summable", start="uniform")
    federation = _federation(protocol)
    federation.run(5, runtime="simulation", alone=False, progress=False, observers=[Consensus()])
    assert ratios[1] < 1.5 * ratios[0]
    assert ratios[2] < 1.5 * ratios[1]
    assert ratios[0] > 0


@pytest.mark.long
def test_the_gradient_of_2_goes_to_zero() -> None:
    """Theorem 3, (7): ∇_θn [ℓ_n + β/(N - 1) Σ_x |mean of all s - s_n|²] → 0; convex in θ for logistic regression.

    s_n is part of the mean: β/(N - 1) · 2 (s_n - mean)(1 - 1/N) = 2 β/N · (s_n - mean), as below with the mean fixed.
    Labels are soft, so that the private loss alone has its minimum at a finite θ.
    """
    soft = [[[0.8, 0.2]], [[0.3, 0.7]], [[0.6, 0.4]]]
    norms = []
    for steps in (1, 50, 1000):
        agents = [cd.Agent(name, _device(THETA[n]), PRIVATE[n][0], np.array(soft[n])) for n, name in enumerate(NAMES)]
        protocol = cd.DDistillation(
            local_steps=steps, form="printed", beta=0.5, lr=0.3, schedule="summable", start="uniform"
        )
        federation = cd.Federation(agents, protocol, public=POINTS, classes=2, topology=cd.Topology(NAMES, PATH))
        federation.run(1, runtime="simulation", alone=False, progress=False)
        theta = [agent.learner.module.weight.detach().numpy()[:, 0].astype(float) for agent in agents]
        mean = np.mean([softmax(each * POINTS) for each in theta], axis=0)
        total = 0.0
        for n in range(3):
            x = PRIVATE[n][0][0][0]
            slope = (softmax(theta[n] * x) - np.array(soft[n][0])) * x + 0.5 * len(POINTS) / 3 * _slope(theta[n], mean)
            total += float(np.linalg.norm(slope))
        norms.append(total)
    assert norms[1] < 0.5 * norms[0]
    assert norms[2] < 0.05 * norms[0]


def test_it_communicates_every_tau_iterations_and_not_while_warming_up() -> None:
    sent = {}
    for every, warm_up in ((1, 0), (3, 0), (1, 2)):
        counted: list[int] = []
        watch = [lambda _, __, data, counted=counted: counted.append(len(data))]
        _run(cd.DDistillation(local_steps=7, every=every, warm_up=warm_up), 2, watchers=watch)
        sent[every, warm_up] = len(counted)
    links = 4  # two links, both ways
    assert sent == {(1, 0): 2 * 7 * links, (3, 0): 5 * links, (1, 2): 0}  # of 14 iterations: 0, 3, ..., 12


@pytest.mark.parametrize("protocol", [cd.DDistillation, cd.DSGD])
@pytest.mark.parametrize(("steps", "every"), [(5, 3), (2, 5), (7, 7)])
def test_tau_counts_over_all_rounds(protocol: Any, steps: int, every: int) -> None:
    """In 6 rounds d_distillation communicates before steps 0, τ, 2τ, ...; d_sgd after steps τ, 2τ, ..."""
    counted: list[int] = []
    watch = [lambda _, __, data: counted.append(len(data))]
    _run(protocol(local_steps=steps, every=every), 6, watchers=watch)
    times = -(-6 * steps // every) if protocol is cd.DDistillation else 6 * steps // every
    assert len(counted) == 4 * times  # two links, both ways


@pytest.mark.parametrize("protocol", [cd.DDistillation, cd.DSGD])
def test_the_yardstick_takes_the_same_steps(protocol: Any) -> None:
    options = {"local_steps": 7, "batch_size": 3, "lr": 0.5, "schedule": "decayed", "decay": 0.7}
    assert protocol(**options, every=2).alone() == cd.SiloSGD(**options)


class Teller:
    """A black box with a fixed answer that remembers what it was taught."""

    def __init__(self, answer: list[float]) -> None:
        self.answer, self.taught = answer, []

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        self.taught.append((x.copy(), targets.copy()))

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.tile(np.array(self.answer, dtype=np.float32), (len(x), 1))


def test_a_device_without_gradients_is_fitted_on_its_labels_and_z() -> None:
    """Two devices, one link of weight 1/2: z = (s_0 + s_1)/2, then a step γ towards its own."""
    boxes = [Teller([0.9, 0.1]), Teller([0.2, 0.8])]
    agents = [cd.Agent(f"d{n}", box, [[float(n)]], [n]) for n, box in enumerate(boxes)]
    federation = cd.Federation(
        agents, cd.DDistillation(local_steps=1, z_step=0.5), public=POINTS, classes=2,
        topology=cd.Topology(["d0", "d1"], [("d0", "d1")]),
    )  # fmt: skip
    federation.run(1, runtime="simulation", alone=False, progress=False)
    mixed = np.array([0.55, 0.45])
    x, targets = boxes[0].taught[-1]
    np.testing.assert_allclose(x, [[0.0], [1.0], [-0.5]])
    np.testing.assert_allclose(targets[1:], np.tile(mixed - 0.5 * (mixed - [0.9, 0.1]), (2, 1)), atol=1e-6)
    np.testing.assert_allclose(targets[0], [1.0, 0.0])


@pytest.mark.parametrize(("weight", "points"), [(0.0, 0), (0.5, 1), (2.0, 4)])
@pytest.mark.parametrize("start", ["own", "uniform"])
def test_points_beside_labels_weigh_as_in_5(weight: float, points: int, start: str) -> None:
    """Two labels and λ: 2 λ reference points of those that were met, whatever z was at first; none without λ."""
    boxes = [Teller([0.9, 0.1]), Teller([0.2, 0.8])]
    agents = [cd.Agent(f"d{n}", box, [[0.0], [1.0]], [0, 1]) for n, box in enumerate(boxes)]
    public = np.linspace(-1, 1, 10)[:, None]
    protocol = cd.DDistillation(local_steps=3, every=2, network_batch=3, weight=weight, start=start)
    federation = cd.Federation(agents, protocol, public=public, classes=2, topology=cd.Topology.complete(["d0", "d1"]))
    federation.run(1, runtime="simulation", alone=False, progress=False)
    assert len(boxes[0].taught[-1][0]) == 2 + points
    assert agents[0].state["met"].sum() in range(3, 7)  # two batches of three
    quiet = cd.DDistillation(local_steps=3, warm_up=1, start=start)
    boxes = [Teller([0.9, 0.1]), Teller([0.2, 0.8])]
    agents = [cd.Agent(f"d{n}", box, [[0.0], [1.0]], [0, 1]) for n, box in enumerate(boxes)]
    cd.Federation(agents, quiet, public=public, classes=2, topology=cd.Topology.complete(["d0", "d1"])).run(
        1, runtime="simulation", alone=False, progress=False
    )
    assert len(boxes[0].taught) == 1  # nothing was heard: nothing to be fitted anew on


def test_a_regressor_tells_probabilities() -> None:
    """What a black box answers is put on the simplex: (1.2, -0.2) becomes (1, 0), and nothing above 0 uniform."""
    agents = [cd.Agent("d0", Teller([1.2, -0.2]), [[0.0]], [0]), cd.Agent("d1", Teller([-1.0, -1.0]), [[1.0]], [1])]
    protocol = cd.DDistillation(local_steps=1, z_step=0.0)
    cd.Federation(agents, protocol, public=POINTS, classes=2, topology=cd.Topology.complete(["d0", "d1"])).run(
        1, runtime="simulation", alone=False, progress=False
    )
    np.testing.assert_allclose(agents[0].state["z"], np.tile([0.75, 0.25], (2, 1)), atol=1e-6)


def test_a_lost_model_is_told_and_spoils_nobody(tmp_path: Path) -> None:
    """A device with infinite weights passes on what others say; its neighbours' z stay probabilities."""
    agents = [cd.Agent(name, _device(THETA[n]), *PRIVATE[n]) for n, name in enumerate(NAMES)]
    agents[1].learner.module.weight.data.fill_(float("nan"))
    protocol, graph = cd.DDistillation(local_steps=3), cd.Topology(NAMES, PATH)
    federation = cd.Federation(agents, protocol, public=POINTS, classes=2, topology=graph)
    federation.run(1, runtime="simulation", folder=tmp_path / "run", alone=False, progress=False)
    told = [line for line in (tmp_path / "run" / "log.txt").read_text().splitlines() if "round 1: " in line]
    assert told == [
        "round 1: 'd1': diverged: its outputs were not finite, or far beyond what they were; "
        "the model returned to its state at the start of the round."
    ]  # once, and no message was refused
    for agent in agents:
        np.testing.assert_allclose(agent.state["z"].sum(axis=1), 1, atol=1e-5)


def test_in_print_a_device_that_hears_nobody_still_steps_towards_its_z() -> None:
    """w_nn = 1 then: (5) keeps its second term, the form "mean" has nothing to learn from."""
    lost = [cd.Fault(kind="drop")]
    strong, weak = (
        _run(cd.DDistillation(local_steps=3, form="printed", beta=beta, lr=0.1, start="uniform"), faults=lost)
        for beta in (1.0, 1e-6)
    )
    slope = [agents[0].learner.module.weight.detach().numpy() for agents in (strong, weak)]
    assert np.abs(slope[0] - slope[1]).max() > 1e-3


def test_z_stays_a_probability_whatever_a_neighbour_sends() -> None:
    """A liar's z is refused by name; garbage that looks like probabilities is mixed as any other."""
    agents = _run(cd.DDistillation(local_steps=20), 2, faults=[cd.Fault(kind="random", agent="d1", strength=100.0)])
    for agent in agents:
        assert (agent.state["z"] >= 0).all()
        np.testing.assert_allclose(agent.state["z"].sum(axis=1), 1, atol=1e-5)


FAULTS = {
    "silent for a while": cd.Fault(kind="gone", agent="d1", first=2, last=3),
    "silent for ever": cd.Fault(kind="gone", agent="d2", first=2),
    "late to join": cd.Fault(kind="gone", agent="d0", last=2),
    "lossy links": cd.Fault(kind="drop", rate=0.4),
    "split and healed": cd.Fault(kind="split", agents=("d0",), first=2, last=3),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_through_faults_consensus_stays_and_z_stays_in_the_simplex(fault: cd.Fault) -> None:
    """With γ = 0, z ← W z: equal z stay equal, whoever is missing; whatever γ, z is a probability."""
    alike = [cd.Agent(name, _device(THETA[0]), *PRIVATE[n]) for n, name in enumerate(NAMES)]
    federation = cd.Federation(
        alike, cd.DDistillation(local_steps=5, z_step=0.0, weight=0.0, start="uniform"), public=POINTS, classes=2,
        topology=cd.Topology(NAMES, PATH), faults=[fault],
    )  # fmt: skip
    federation.run(4, runtime="simulation", alone=False, progress=False)
    for agent in alike:
        np.testing.assert_allclose(agent.state["z"], 0.5, atol=1e-6)
    for agent in _run(cd.DDistillation(local_steps=5), 4, faults=[fault]):
        assert (agent.state["z"] >= 0).all()
        np.testing.assert_allclose(agent.state["z"].sum(axis=1), 1, atol=1e-5)


def test_an_absent_device_leaves_the_mean_of_the_others_as_it_was() -> None:
    """A weight that goes to the diagonal on both ends keeps W doubly stochastic: Σ_n z^n of those present stays."""
    edges = [("d0", "d1"), ("d1", "d2"), ("d0", "d2")]
    away = cd.Fault(kind="gone", agent="d2", first=2)
    protocol = cd.DDistillation(local_steps=2, z_step=0.0, weight=0.0)
    before, after = (_run(protocol, rounds, edges=edges, faults=[away]) for rounds in (1, 3))
    means = [sum(agent.state["z"] for agent in agents[:2]) / 2 for agents in (before, after)]
    np.testing.assert_allclose(means[0], means[1], atol=1e-6)
    np.testing.assert_array_equal(before[2].state["z"], after[2].state["z"])


def test_who_comes_back_is_drawn_to_the_others_again() -> None:
    """Healed, a split shows in the consensus error, which falls again: both sides went their own way meanwhile."""
    errors = {}
    for split in (False, True):
        faults = [cd.Fault(kind="split", agents=("d0",), first=3, last=6)] if split else []
        agents = [cd.Agent(name, _device(THETA[n]), *PRIVATE[n]) for n, name in enumerate(NAMES)]
        federation = cd.Federation(
            agents, cd.DDistillation(local_steps=10), public=POINTS, classes=2, topology=cd.Topology(NAMES, PATH),
            faults=faults,
        )  # fmt: skip
        rows = federation.run(9, runtime="simulation", alone=False, progress=False).rows
        errors[split] = [row.get("consensus_error") for row in rows if row["agent"] == "d0"]
    assert errors[True][2:6] == [None] * 4  # cut off: nobody was heard, so nothing is known
    assert errors[True][6] > 2 * errors[False][6]
    assert errors[True][8] < errors[True][6] / 2


def test_the_consensus_error_of_a_round_is_the_mean_of_its_communications() -> None:
    """Pure mixing on a path: |W z - z|² of d0 is |(z_1 - z_0)/3|², for z and for W z."""
    z = [softmax(each * POINTS) for each in THETA]
    mixed = [sum(W[n, m] * z[m] for m in range(3)) for n in range(3)]
    errors = [float(np.square((now[1] - now[0]) / 3).sum(axis=1).mean()) for now in (z, mixed)]
    agents = [cd.Agent(name, _device(THETA[n]), *PRIVATE[n]) for n, name in enumerate(NAMES)]
    federation = cd.Federation(
        agents, cd.DDistillation(local_steps=2, z_step=0.0, weight=0.0), public=POINTS, classes=2,
        topology=cd.Topology(NAMES, PATH),
    )  # fmt: skip
    row = federation.run(1, runtime="simulation", alone=False, progress=False).rows[0]
    assert row["consensus_error"] == pytest.approx(sum(errors) / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("protocol", "edges", "sentence"),
    [
        (cd.DDistillation(form="printed"), PATH, "needs lr"),
        (cd.DDistillation(form="printed", beta=2.0, lr=0.1), PATH, r"at agent 'd1', whose w_nn is 0.333"),
        (cd.DDistillation(), [("d0", "d1")], "d2"),
        (cd.DSGD(), [("d0", "d1")], "d2"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(protocol: Any, edges: Any, sentence: str) -> None:
    with pytest.raises(CodistillError, match=sentence):
        _run(protocol, edges=edges)


def test_printed_needs_plain_gradient_steps() -> None:
    agents = [cd.Agent(name, cd.TorchLearner(nn.Linear(1, 2)), *PRIVATE[n]) for n, name in enumerate(NAMES)]
    protocol = cd.DDistillation(form="printed", lr=0.01)
    with pytest.raises(CodistillError, match="agent 'd0' steps by Adam"):
        cd.Federation(agents, protocol, public=POINTS, classes=2, topology=cd.Topology(NAMES, PATH)).run(1)


def test_real_values_are_refused() -> None:
    real = np.array([[0.3, 4.0], [1.0, -2.0]])
    agents = [cd.Agent(n, cd.TorchLearner(nn.Linear(1, 2), loss="squared"), [[0.0], [1.0]], real) for n in NAMES]
    with pytest.raises(CodistillError, match="agent 'd0' has real values"):
        cd.Federation(agents, cd.DDistillation(), public=POINTS, classes=2, topology=cd.Topology(NAMES, PATH)).run(1)


# --- the baselines ------------------------------------------------------------------------------------------


def test_d_sgd_mixes_weights_after_every_tau_steps() -> None:
    """θ^n ← Σ_m w_nm (θ^m - η ∇ℓ_m), and only η ∇ℓ in between."""
    agents = _run(cd.DSGD(local_steps=4, every=2, synchronise=False))
    theta = [each.copy() for each in THETA]
    for t in range(4):
        for n in range(3):
            (x,), (y,) = PRIVATE[n]
            theta[n] = theta[n] - RATE * (softmax(theta[n] * x[0]) - np.eye(2)[y]) * x[0]
        if t % 2:
            theta = [sum(W[n, m] * theta[m] for m in range(3)) for n in range(3)]
    for n, agent in enumerate(agents):
        np.testing.assert_allclose(agent.learner.module.weight.detach().numpy()[:, 0], theta[n], atol=1e-6)


def _two_kinds() -> list[cd.Agent]:
    """Three devices of which the middle one has a bias, and so weights of another kind."""
    models = [_device(THETA[0]), cd.TorchLearner(nn.Linear(1, 2), optimiser="sgd", lr=RATE), _device(THETA[2])]
    names = ("plain-1", "biased", "plain-2")
    return [cd.Agent(name, model, *PRIVATE[n]) for n, (name, model) in enumerate(zip(names, models, strict=True))]


def test_d_sgd_on_islands_mixes_each_kind_by_itself() -> None:
    """Names but for their number make an island: θ ← (θ + θ')/2 for two alike; a lone kind learns by itself."""
    agents = _two_kinds()
    graph = graphs.Islands().over([agent.name for agent in agents])
    protocol = cd.DSGD(local_steps=1, synchronise=False)
    cd.Federation(agents, protocol, classes=2, topology=graph).run(1, runtime="simulation", alone=False, progress=False)
    theta = []
    for n in (0, 2):
        (x,), (y,) = PRIVATE[n]
        theta.append(THETA[n] - RATE * (softmax(THETA[n] * x[0]) - np.eye(2)[y]) * x[0])
    for n in (0, 2):
        found = agents[n].learner.module.weight.detach().numpy()[:, 0]
        np.testing.assert_allclose(found, (theta[0] + theta[1]) / 2, atol=1e-6)


def test_d_sgd_needs_one_architecture_in_each_group() -> None:
    names = [agent.name for agent in _two_kinds()]
    with pytest.raises(CodistillError, match="same architecture"):
        cd.Federation(_two_kinds(), cd.DSGD(), classes=2, topology=cd.Topology.complete(names)).run(1)
    apart = cd.Topology(names, [], groups=[[names[0], names[2]], [names[1]]])
    with pytest.raises(CodistillError, match="'plain-2' cannot be reached from 'plain-1'"):
        cd.Federation(_two_kinds(), cd.DSGD(), classes=2, topology=apart).run(1)


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, lambda t, i: 1.0),
        ({"schedule": "decayed", "decay": 0.5}, lambda t, i: 0.5**t),
        ({"lr": 0.3}, lambda t, i: 3.0),
    ],
)  # fmt: skip
def test_silo_sgd_steps_alone_at_the_common_pace(options: dict[str, Any], factor: Any) -> None:
    agents = _run(cd.SiloSGD(local_steps=2, **options), 2, edges=[])
    theta = THETA[0].copy()
    for t in range(2):
        for i in range(2):
            theta = theta - RATE * factor(t, i) * (softmax(theta) - np.array([1.0, 0.0]))
    np.testing.assert_allclose(agents[0].learner.module.weight.detach().numpy()[:, 0], theta, atol=1e-6)


def test_with_weights_of_zero_distillation_is_silo_sgd() -> None:
    one = _run(cd.DDistillation(local_steps=5, weight=0.0, every=5), 2)
    other = _run(cd.SiloSGD(local_steps=5), 2, edges=[])
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine.learner.weights()["weight"], theirs.learner.weights()["weight"], atol=1e-7)
