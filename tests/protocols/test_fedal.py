"""FedAL against its equations, on models small enough to follow by hand; and what is left of it without its parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import softmax
from torch import nn

import codistill as cd
from codistill.core.rng import seed_libraries
from codistill.learners.zoo import build
from codistill.nodes.agent import Hub
from codistill.protocols.parts import Discriminator, clip_rows
from codistill.topology import HUB
from codistill.wire.message import Message

Federate = Callable[..., cd.Federation]


def _linear(weight: np.ndarray, lr: float = 0.5) -> cd.TorchLearner:
    module = nn.Linear(*weight.shape[::-1], bias=False)
    module.weight.data = torch.tensor(weight, dtype=torch.float32)
    return cd.TorchLearner(module, optimiser="sgd", lr=lr)


def _run(federation: cd.Federation, rounds: int = 3, **options: Any) -> cd.Result:
    return federation.run(rounds, **{"runtime": "simulation", "alone": False, "progress": False} | options)


@pytest.fixture
def federate(digits: tuple[np.ndarray, np.ndarray]) -> Federate:
    """Four small networks, two architectures, on a few digits each."""
    x, y = digits

    def make(protocol: cd.Protocol, **options: Any) -> cd.Federation:
        torch.manual_seed(0)
        members = []
        for i, name in enumerate(("mlp", "cnn", "mlp", "cnn")):
            rows = np.flatnonzero(np.isin(y[:400], (np.arange(5) + 2 * i) % 10))[:60]
            model = cd.TorchLearner(build(name, (1, 8, 8), 10), lr=3e-3)
            members.append(cd.Agent(f"c{i}", model, x[rows], y[rows]))
        return cd.Federation(members, protocol, public=x[400:560], test=(x[600:800], y[600:800]), **options)

    return make


# --- the whole algorithm, by hand ---------------------------------------------------------------------------


def test_two_rounds_of_two_clients_with_three_parameters_are_as_derived_by_hand() -> None:
    """Clients f_n(x) = θ_n x with θ_n ∈ R³, one private sample (x_n, y_n), one public sample u; SGD at rate η.

    Local steps: ∇ℓ = (p(x) - e_y) x, and from the second round on ∇r_loc = (p(x) - p_old(x)) x.
    The discriminator without hidden layers is h(s) = A s + b on s = ψ(f, 2); with q = softmax(h), its loss is the
    mean over clients of -log q_n: ∇_A = mean (q - e_n) sᵀ, ∇_b = mean (q - e_n), and Adam steps
    m̂ / (√v̂ + 1e-8) down it. With the new A and b: U_n = log q_n, so dU_n/ds = Aᵀ(e_n - q) and
    dU_n/df = J dU_n/ds / 2 with J = diag(s) - s sᵀ.
    The client: θ_n ← θ_n - η [(p - p̄_-n) + λ dU_n/df + μ (p - p_old)] u.
    """
    rate, weight, hold, step, u = 0.5, 3.0, 2.0, 0.05, 0.8
    samples, labels = [1.5, -1.0], [0, 2]
    start = [np.array([0.3, -0.2, 0.5]), np.array([-0.4, 0.6, 0.1])]
    agents = [cd.Agent(f"c{n}", _linear(start[n][:, None], rate), [[samples[n]]], [labels[n]]) for n in range(2)]
    protocol = cd.FedAL(
        local_steps=2, transfer_steps=2, adversarial=weight, less_forgetting=hold,
        discriminator_hidden=(), discriminator_lr=step,
    )  # fmt: skip
    result = _run(cd.Federation(agents, protocol, public=[[u]], classes=3, seed=5), 2)

    seed_libraries(5, "alike", "discriminator")
    initial = nn.Linear(3, 2)
    w = np.concatenate([initial.weight.detach().numpy(), initial.bias.detach().numpy()[:, None]], axis=1).astype(float)
    m, v, moves = np.zeros_like(w), np.zeros_like(w), 0
    theta = [each.copy() for each in start]
    eye = np.eye(3)
    for t in range(2):
        for n in range(2):
            held = theta[n].copy()
            for _ in range(2):
                p = softmax(theta[n] * samples[n])
                slope = p - eye[labels[n]] + (hold * (p - softmax(held * samples[n])) if t else 0)
                theta[n] = theta[n] - rate * slope * samples[n]
        held_all = [each.copy() for each in theta]
        for _ in range(2):
            f = [each * u for each in theta]
            seen = [np.append(softmax(each / 2), 1.0) for each in f]  # 1: the bias
            slope_w = np.mean([np.outer(softmax(w @ s) - np.eye(2)[n], s) for n, s in enumerate(seen)], axis=0)
            moves += 1
            m, v = 0.9 * m + 0.1 * slope_w, 0.999 * v + 0.001 * slope_w**2
            w = w - step * (m / (1 - 0.9**moves)) / (np.sqrt(v / (1 - 0.999**moves)) + 1e-8)
            for n in range(2):
                s = seen[n][:3]
                slope_s = w[:, :3].T @ (np.eye(2)[n] - softmax(w @ seen[n]))
                slope_f = (np.diag(s) - np.outer(s, s)) @ slope_s / 2
                p = softmax(f[n])
                pull = p - softmax(f[1 - n]) + weight * slope_f + hold * (p - softmax(held_all[n] * u))
                theta[n] = theta[n] - rate * pull * u
    for n, agent in enumerate(result.agents.values()):
        np.testing.assert_allclose(agent.learner.module.weight.detach().numpy()[:, 0], theta[n], atol=2e-6)


def test_the_gradient_that_a_client_receives_is_that_of_u_n(federate: Federate) -> None:
    """Every message of the hub, against one process that holds all outputs and plays the game by itself."""
    messages: list[tuple[str, str, Message]] = []
    watch = [lambda sender, receiver, data: messages.append((sender, receiver, Message.decode(data)))]
    protocol = cd.FedAL(discriminator_lr=1e-2)
    federation = federate(protocol, watchers=watch)
    _run(federation, 2)

    seed_libraries(0, "alike", "discriminator")
    h = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4))
    adam = torch.optim.Adam(h.parameters(), lr=1e-2)
    up = [m for sender, _, m in messages if sender != HUB]
    down = [m for sender, _, m in messages if sender == HUB]
    assert len(up) == len(down) == 2 * 5 * 4
    largest = 0.0
    for i in range(0, len(up), 4):
        outputs = [torch.tensor(message["f"]) for message in up[i : i + 4]]
        adam.zero_grad()
        losses = [
            nn.functional.cross_entropy(h(torch.softmax(f / 2, 1)), torch.full((len(f),), n))
            for n, f in enumerate(outputs)
        ]
        torch.stack(losses).mean().backward()
        adam.step()
        for n, f in enumerate(outputs):
            f.requires_grad_()
            u_n = torch.log_softmax(h(torch.softmax(f / 2, 1)), 1)[:, n].sum()
            (wanted,) = torch.autograd.grad(u_n, f)
            np.testing.assert_allclose(down[i + n]["told"][1], wanted.numpy(), atol=1e-6)
            largest = max(largest, float(wanted.abs().max()))
    assert largest > 1e-3  # there was something to compare


# --- its parts switched off ---------------------------------------------------------------------------------


def _weights(result: cd.Result) -> list[np.ndarray]:
    return [array for agent in result.agents.values() for array in agent.learner.weights().values()]


@pytest.mark.parametrize(
    ("reduced", "plain"),
    [
        (cd.FedAL(adversarial=0, less_forgetting=0), cd.FedMD(local_steps=5, transfer_steps=5)),
        (cd.FedAL(adversarial=0), cd.FedMD(local_steps=5, transfer_steps=5, less_forgetting=1)),
        (cd.FedAL(less_forgetting=0), cd.FedAL(less_forgetting=0, clip=1e9)),
        (
            cd.FedAL(adversarial=0, aggregate="median", temperature=2),
            cd.FedMD(local_steps=5, transfer_steps=5, less_forgetting=1, aggregate="median", temperature=2),
        ),
    ],
    ids=["minus both is fedmd", "minus AL is fedmd-lf", "minus LF", "other settings"],
)  # fmt: skip
def test_without_its_parts_it_is_the_simpler_protocol_to_the_bit(
    reduced: cd.Protocol, plain: cd.Protocol, federate: Federate
) -> None:
    one, other = _run(federate(reduced)), _run(federate(plain))
    assert one.rows == other.rows
    for mine, theirs in zip(_weights(one), _weights(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_each_part_changes_the_result(federate: Federate) -> None:
    variants = [
        cd.FedAL(),
        cd.FedAL(adversarial=0),
        cd.FedAL(less_forgetting=0),
        cd.FedAL(adversarial=0, less_forgetting=0),
    ]
    results = [_weights(_run(federate(variant))) for variant in variants]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert any((a != b).any() for a, b in zip(one, other, strict=True))


def test_less_forgetting_does_nothing_in_the_first_step_of_a_stage(federate: Federate) -> None:
    """K(p_old, p) has no gradient at p = p_old; and with one step per stage there is no other."""
    held, free = (_run(federate(cd.FedMD(local_steps=1, transfer_steps=1, less_forgetting=w)), 4) for w in (1.0, 0.0))
    for mine, theirs in zip(_weights(held), _weights(free), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


# --- what travels, what is measured -------------------------------------------------------------------------


def test_bytes_per_client_and_step_are_outputs_up_and_twice_as_many_down(federate: Federate) -> None:
    rows = _run(federate(cd.FedAL()), 2).rows
    floats = 4 * 10 * 32 * 5  # bytes x K x |P| x τ
    for row in rows:
        assert 0 < row["sent"] - floats <= 150 * 5
        assert 0 < row["received"] - 2 * floats <= 150 * 5


def _recognised(apart: float) -> np.ndarray:
    """How often each of three clients is known after 150 moves; their outputs differ by `apart`, and by noise."""
    hub = Hub()
    hub.topology = cd.Topology.star(["a", "b", "c"])
    noise = np.random.default_rng(0).normal(size=(150, 3, 32, 3)).astype(np.float32)
    player = Discriminator(lr=1e-2)
    known = [player.step(hub, ["a", "b", "c"], f + apart * np.eye(3, dtype=np.float32)[:, None])[1] for f in noise]
    return np.mean(known[-30:], axis=0)


def test_a_discriminator_knows_clients_that_differ_and_no_others() -> None:
    assert (_recognised(apart=6.0) > 0.95).all()
    assert abs(_recognised(apart=0.0).mean() - 1 / 3) < 0.05


def test_a_client_that_is_absent_is_no_other_one() -> None:
    """Labels of the discriminator are places in the roster, not in the list of those who answered."""
    f = np.zeros((1, 4, 3), dtype=np.float32)
    hub = Hub()
    hub.topology = cd.Topology.star(["a", "b", "c"])
    for _ in range(200):
        _, known = Discriminator(lr=1e-2).step(hub, ["c"], f)
    h = hub.memo["discriminator"][0]
    assert known == [1.0]
    assert h(torch.softmax(torch.zeros(1, 3), 1)).argmax() == 2


def test_the_metrics_say_how_often_each_client_is_recognised_and_differs(federate: Federate) -> None:
    for row in _run(federate(cd.FedAL()), 2).rows:
        assert 0 <= row["discriminator_accuracy"] <= 1
        assert 0 <= row["disagreement"] <= 1
    assert all("discriminator_accuracy" not in row for row in _run(federate(cd.FedAL(adversarial=0)), 1).rows)


# --- stability ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [1e7, 1e30], ids=["outputs run away", "the loss is lost"])
def test_a_client_that_diverges_goes_on_says_so_and_does_not_stop_the_run(
    weight: float, federate: Federate, tmp_path: Path
) -> None:
    """Large weights on U_n throw every client off, by its outputs or by its loss."""
    federation = federate(cd.FedAL(adversarial=weight))
    for agent in federation.agents:  # plain descent: Adam would take steps of its own length
        agent.learner._make_optimiser, agent.learner._optimiser_options["lr"] = "sgd", 0.1
    result = _run(federation, 6, folder=tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text().splitlines()
    for name in ("c0", "c1", "c2", "c3"):
        said = [line for line in log if f"'{name}': diverged: its " in line]
        assert said
        assert len(said) == len({line.split(":")[0] for line in said})  # once per round, not once per step
    assert all(np.isfinite(array).all() for array in _weights(result))
    if weight == 1e30:  # no such step was taken: local training and distillation went on without
        assert np.mean([row["accuracy"] for row in result.rows[-4:]]) > 0.2


def test_a_bounded_gradient_of_the_same_weight_throws_nobody_off(federate: Federate, tmp_path: Path) -> None:
    _run(federate(cd.FedAL(adversarial=1e30, clip=1e-30)), 2, folder=tmp_path / "run")
    log = tmp_path / "run" / "log.txt"
    assert not log.exists() or "goes on" not in log.read_text()


def test_a_gradient_is_bounded_sample_by_sample() -> None:
    gradient = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=np.float32)
    np.testing.assert_allclose(clip_rows(gradient, 1.0), [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]], atol=1e-7)
    np.testing.assert_array_equal(clip_rows(gradient, None), gradient)


def test_a_discriminator_that_is_lost_begins_anew(federate: Federate, tmp_path: Path) -> None:
    result = _run(federate(cd.FedAL(discriminator_lr=1e38)), 2, folder=tmp_path / "run")
    assert "'hub': the discriminator diverged; it is initialised anew" in (tmp_path / "run" / "log.txt").read_text()
    assert all(np.isfinite(array).all() for array in _weights(result))


def test_a_discriminator_whose_weights_explode_begins_anew(federate: Federate, tmp_path: Path) -> None:
    """Each step of Adam moves a weight by about its rate: after one at 1000 all are finite, and far beyond any use."""
    result = _run(federate(cd.FedAL(discriminator_lr=1e3)), 2, folder=tmp_path / "run")
    said = (tmp_path / "run" / "log.txt").read_text()
    assert said.count("initialised anew: its weights were far beyond those of the round before") == 2
    assert all(np.isfinite(array).all() for array in _weights(result))


def test_a_transfer_step_is_a_mean_over_the_public_batch() -> None:
    """Line 18: W ← W - η/|P| Σ_u [(p - p̄_-n) + λ ∇U_n] uᵀ, with the gradient ∇U_n that the hub has sent."""
    rng = np.random.default_rng(0)
    u, start = rng.normal(size=(4, 2)), [rng.normal(size=(3, 2)) for _ in range(2)]
    sent: list[tuple[str, str, Message]] = []
    watch = [lambda sender, receiver, data: sent.append((sender, receiver, Message.decode(data)))]
    agents = [cd.Agent(f"c{n}", _linear(w), [[0.0, 0.0]], [0]) for n, w in enumerate(start)]
    protocol = cd.FedAL(local_steps=0, transfer_steps=1, adversarial=3.0)
    federation = cd.Federation(agents, protocol, public=u, classes=3, watchers=watch)
    result = _run(federation, 1)
    u = u[next(federation.public.batches(0, protocol.batch_size, 1)).ids]  # in the order of the batch
    told = {receiver: message["told"][1] for sender, receiver, message in sent if sender == HUB}
    for n, agent in enumerate(result.agents.values()):
        own, other = (np.stack([softmax(w @ row) for row in u]) for w in (start[n], start[1 - n]))
        expected = start[n] - 0.5 * (own - other + 3.0 * told[agent.name]).T @ u / len(u)
        np.testing.assert_allclose(agent.learner.weights()["weight"], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("option", "value", "base"),
    [
        ("clip", 1e-3, {}),
        ("discriminator_temperature", 8.0, {}),
        ("discriminator_lr", 1e-2, {}),
        ("discriminator_hidden", (8,), {}),
        # of three others, any share above 0 leaves one out at each end
        ("trim", 0.4, {"aggregate": "trimmed", "trim": 0.0}),
        ("temperature", 3.0, {"aggregate": "probabilities", "adversarial": 0.0}),
        ("aggregate", "coverage", {}),
    ],
)
def test_every_setting_reaches_what_it_is_for(option: str, value: Any, base: Any, federate: Federate) -> None:
    with_it, without = (_weights(_run(federate(cd.FedAL(**base | extra)), 2)) for extra in ({option: value}, {}))
    assert any((a != b).any() for a, b in zip(with_it, without, strict=True))


def test_coverage_says_whose_opinion_of_a_class_counts() -> None:
    """Two teachers, of class 0 and of class 1 only: the third is told log p_k of the one who has met class k.

    Class 2 has been met by neither, so both count alike; 1e-3 is the least weight.
    """
    answers = [np.array([0.7, 0.1, 0.2]), np.array([0.3, 0.4, 0.3]), np.full(3, 1 / 3)]
    agents = [cd.Agent(f"c{n}", _linear(np.log(p)[:, None]), [[1.0], [1.0]], [n, n]) for n, p in enumerate(answers)]
    protocol = cd.FedMD(local_epochs=0, transfer_steps=1, aggregate="coverage")
    result = _run(cd.Federation(agents, protocol, public=[[1.0]], classes=3), 1)
    weights = np.array([[1.0, 1e-3, 1e-3], [1e-3, 1.0, 1e-3]])
    target = softmax(np.average(np.log(answers[:2]), axis=0, weights=weights))
    expected = np.log(answers[2]) - 0.5 * (answers[2] - target)
    np.testing.assert_allclose(result.agents["c2"].learner.weights()["weight"][:, 0], expected, atol=1e-6)


def test_a_client_whose_outputs_were_lost_has_no_gradient() -> None:
    sent: list[tuple[str, str, Message]] = []
    watch = [lambda sender, receiver, data: sent.append((sender, receiver, Message.decode(data)))]
    agents = [cd.Agent(f"c{n}", _linear(np.eye(3, 2) * n), [[1.0, 0.0]], [0]) for n in range(3)]
    federation = cd.Federation(
        agents, cd.FedAL(transfer_steps=1), public=np.ones((4, 2)), classes=3, watchers=watch,
        faults=[cd.Fault(kind="drop", rate=1.0)],
    )  # fmt: skip
    federation.faults.strikes = lambda t, sender, *_: "drop" if sender == "c1" else None  # type: ignore[method-assign]
    _run(federation, 1)
    gradient = {receiver: message["told"][1] for sender, receiver, message in sent if sender == HUB}
    assert not gradient["c1"].any()
    assert gradient["c0"].any()
    assert gradient["c2"].any()


def test_a_last_step_that_leaves_no_numbers_is_undone() -> None:
    """A loss that is a number, and a step of 1e38 times its slope that is none; nobody looks at outputs after it."""
    start = [np.eye(3, 2) * (n + 1) for n in range(2)]
    agents = [cd.Agent(f"c{n}", _linear(w, lr=1e38), [[1.0, 0.0]], [0]) for n, w in enumerate(start)]
    protocol = cd.FedAL(local_steps=0, transfer_steps=1, adversarial=1e5)
    result = _run(cd.Federation(agents, protocol, public=[[1.0, 2.0]], classes=3), 1)
    for agent, expected in zip(result.agents.values(), start, strict=True):
        np.testing.assert_array_equal(agent.learner.weights()["weight"], expected)


def test_who_has_lost_a_loss_goes_on_without_u_n() -> None:
    """Of two transfer steps the first is left out, and the second is W ← W - η (p - p̄_-n) uᵀ."""
    u, start = np.array([1.0, 2.0]), [np.eye(3, 2), np.eye(3, 2)[[2, 1, 0]]]
    agents = [cd.Agent(f"c{n}", _linear(w), [[1.0, 0.0]], [0]) for n, w in enumerate(start)]
    protocol = cd.FedAL(local_steps=0, transfer_steps=2, adversarial=1e30, less_forgetting=0)
    result = _run(cd.Federation(agents, protocol, public=u[None], classes=3), 1)
    for n, agent in enumerate(result.agents.values()):
        slope = softmax(start[n] @ u) - softmax(start[1 - n] @ u)
        expected = start[n] - 0.5 * np.outer(slope, u)
        np.testing.assert_allclose(agent.learner.weights()["weight"], expected, atol=1e-6)
