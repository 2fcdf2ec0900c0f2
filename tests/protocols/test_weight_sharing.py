"""Protocols that share weights, beside straight-line copies of their pseudo-code: two agents, a two-layer net."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax, softmax

import codistill as cd
from codistill.core.errors import LearnerError
from codistill.nodes.agent import JoinInfo, twin_of
from codistill.nodes.record import record_of
from codistill.protocols.feddkd import dkd_gradient, note_effect
from codistill.protocols.fedgen import Generator, accepted_heads, class_weights, diversity_loss
from codistill.protocols.parts import activation_divergence, distillation, head_name, watch_growth

RATE, ROUNDS, CLASSES, SEED = 0.1, 3, 3, 5
SIZES = {"a": 12, "b": 6}
Nets = dict[str, nn.Module]


def net(norm: bool = False) -> nn.Module:
    layers = [nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers)


def data() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    made = {}
    for shift, (name, size) in enumerate(SIZES.items()):
        x = rng.standard_normal((size, 4)).astype(np.float32) + shift
        made[name] = x, np.arange(size) % (2 + shift)  # the first agent lacks the last class
    return made


def federation(protocol: cd.Protocol, *, norm: bool = False, names: str = "ab", **options: Any) -> cd.Federation:
    torch.manual_seed(1)
    agents = [cd.Agent(name, cd.TorchLearner(net(norm), optimiser="sgd", lr=RATE), *data()[name]) for name in names]
    return cd.Federation(agents, protocol, classes=CLASSES, seed=SEED, **options)


def run(protocol: cd.Protocol, rounds: int = ROUNDS, **options: Any) -> dict[str, dict[str, np.ndarray]]:
    result = federation(protocol, **options).run(rounds, runtime="simulation", alone=False, progress=False)
    return {name: agent.learner.weights() for name, agent in result.agents.items()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# --- straight-line copies ---------------------------------------------------------------------------


def initial(norm: bool = False) -> Nets:
    """The common initial weights, as the federation makes them."""
    made = federation(cd.FedAvg(local_epochs=0), norm=norm)
    result = made.run(1, runtime="simulation", alone=False, progress=False)
    module = next(iter(result.agents.values())).learner.module
    return {name: copy.deepcopy(module) for name in SIZES}


def batches(name: str, t: int, size: int, purpose: str = "batches", steps: int | None = None) -> list[Any]:
    """The samples that a round uses: these are fixed by the seed, and given to both sides."""
    shard = cd.Agent(name, net(), *data()[name])
    record_of(shard).encode_labels(CLASSES)
    shard.shard.seed = SEED
    return list(shard.shard.batches(t, size, steps=steps, purpose=purpose))


def descend(module: nn.Module, loss: torch.Tensor) -> None:
    """w ← w - η ∇"""
    module.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= RATE * parameter.grad


def average(nets: Nets, kept: Callable[[str], bool] = lambda name: False) -> None:
    """w ← Σ_k n_k / n · w_k, for all but the names that are kept."""
    n = sum(SIZES.values())
    states = {name: module.state_dict() for name, module in nets.items()}
    mean = {
        key: sum(SIZES[name] / n * states[name][key].double() for name in nets) for key in states["a"] if not kept(key)
    }
    for module in nets.values():
        own = module.state_dict()
        module.load_state_dict({**own, **{key: value.to(own[key].dtype) for key, value in mean.items()}})


def train(
    nets: Nets, t: int, loss_of: Callable[[nn.Module, nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    for name, module in nets.items():
        start = copy.deepcopy(module)
        module.train()
        for x, y in batches(name, t, 4):
            descend(module, loss_of(module, start, x, y))


def plain(module: nn.Module, start: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(module(x), y)


def proximal(module: nn.Module, start: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """F(w) + μ/2 ‖w - w^t‖², μ = 2"""
    apart = sum(((w - old) ** 2).sum() for w, old in zip(module.parameters(), start.parameters(), strict=True))
    return cross_entropy(module(x), y) + 2 / 2 * apart


def entropy(module: nn.Module, start: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """F(w) + β 1/B Σ_i KL(a_i ‖ U), β = 3, by its definition."""
    a = softmax(module[:-1](x), dim=1)
    uniform = torch.full_like(a, 1 / a.shape[1])
    return cross_entropy(module(x), y) + 3 / len(x) * (a * (a / uniform).log()).sum()


def distil(nets: Nets, t: int, *, steps: int, rate: float, shared: Callable[[str], bool] = lambda name: True) -> None:
    """Algorithm 1, lines 6 to 12: the mean of weights, then `steps` times w̄ ← w̄ - γ Σ_k q_k ∇d_k with q_k = 1/2."""
    teachers = {name: copy.deepcopy(module).eval() for name, module in nets.items()}
    average(nets, kept=lambda key: not shared(key))
    for j, drawn in enumerate(zip(*(batches(name, t, 5, "distillation", steps) for name in nets), strict=True)):
        gradients = []
        for (name, student), (x, _) in zip(nets.items(), drawn, strict=True):
            # L_CE(Φ(x; w_k), Φ(x; w)), softmax on both sides; of copies, since batch norm writes its statistics
            teacher, twin = copy.deepcopy(teachers[name]).train(), copy.deepcopy(student).train()
            twin.zero_grad()
            p, q = softmax(teacher(x).detach(), dim=1), log_softmax(twin(x), dim=1)
            (-(p * q).sum() / len(x)).backward()
            gradients.append({key: w.grad.clone() for key, w in twin.named_parameters() if shared(key)})
        for student in nets.values():
            with torch.no_grad():
                for key, w in student.named_parameters():
                    if shared(key):
                        w -= rate * 0.9**t * 0.8**j * sum(gradient[key] for gradient in gradients) / 2


def not_norm(name: str) -> bool:
    return not name.startswith("1.")


STEPS = {"dkd_steps": 2, "dkd_lr": 0.5, "dkd_lr_decay": 0.9, "dkd_lr_step_decay": 0.8, "dkd_batch_size": 5}


def straight(kind: str) -> Nets:
    norm = kind.endswith("bn")
    nets = initial(norm)
    for t in range(ROUNDS):
        train(nets, t, {"fedprox": proximal, "fedmax": entropy, "feddkd_max": entropy}.get(kind, plain))
        if kind.startswith("feddkd"):
            distil(nets, t, steps=2, rate=0.5, shared=not_norm if norm else lambda name: True)
        else:
            average(nets, kept=lambda key: norm and not not_norm(key))
    return nets


@pytest.mark.parametrize(
    ("kind", "protocol"),
    [
        ("fedavg", cd.FedAvg(batch_size=4)),
        ("fedprox", cd.FedProx(batch_size=4, proximal_weight=2.0)),
        ("fedmax", cd.FedMAX(batch_size=4, activation_weight=3.0)),
        ("fedbn", cd.FedBN(batch_size=4)),
        ("feddkd", cd.FedDKD(batch_size=4, **STEPS)),
        ("feddkd_max", cd.FedDKD(batch_size=4, local="max", activation_weight=3.0, **STEPS)),
        ("feddkd_bn", cd.FedDKD(batch_size=4, average="except batch norm", **STEPS)),
    ],
)
def test_rounds_equal_a_straight_line_copy_of_the_pseudo_code(kind: str, protocol: cd.Protocol) -> None:
    norm = kind.endswith("bn")
    found, expected = run(protocol, norm=norm), straight(kind)
    start = initial(norm)
    for name in SIZES:
        for key, tensor in expected[name].state_dict().items():
            np.testing.assert_allclose(found[name][key], tensor.numpy(), atol=1e-6, err_msg=f"{name} {key}")
        moved = max(np.abs(found[name][key] - tensor.numpy()).max() for key, tensor in start[name].state_dict().items())
        assert moved > 0.01


def test_feddistill_equals_a_straight_line_copy() -> None:
    """FedAvg; from round 1 on ℓ(f, y) + γ KL(ψ(F̂_c) ‖ ψ(f)), F̂_c the mean of F_k,c over agents that have class c."""
    nets, told = initial(), None
    for t in range(ROUNDS):
        means = []
        for name, module in nets.items():
            sums, counts = torch.zeros(CLASSES, CLASSES), torch.zeros(CLASSES)
            for x, y in batches(name, t, 4):
                f, label = module(x), y.argmax(dim=1)
                loss = cross_entropy(f, y)
                if told is not None:
                    p = softmax(told[label], dim=1)
                    loss = loss + 0.7 * (p * (p.log() - log_softmax(f, dim=1))).sum() / len(x)
                sums, counts = sums.index_add(0, label, f.detach()), counts + y.sum(dim=0)
                descend(module, loss)
            means.append((sums, counts))
        average(nets)
        told = torch.stack(
            [torch.stack([sums[c] / counts[c] for sums, counts in means if counts[c]]).mean(0) for c in range(CLASSES)]
        )
    found = run(cd.FedDistill(batch_size=4, weight=0.7))
    for key, tensor in nets["a"].state_dict().items():
        np.testing.assert_allclose(found["a"][key], tensor.numpy(), atol=1e-6)
        np.testing.assert_array_equal(found["a"][key], found["b"][key])


def fixed_noise(count: int, width: int = 4) -> torch.Tensor:
    return torch.linspace(0, 1, count * width).view(count, width)


def test_fedgen_equals_a_straight_line_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With draws that are fixed on both sides. Agent a has classes 0 and 1, b all three."""
    decay, alpha, beta, eta = 0.9, 2.0, 0.5, 0.3
    protocol = cd.FedGen(
        batch_size=4, generated_weight=alpha, distillation_weight=beta, generated_decay=decay, generator_steps=2,
        generator_lr=0.05, generator_weight_decay=0.1, generator_hidden=6, generator_noise=4, diversity=eta,
    )  # fmt: skip

    def draw(self: Generator, module: nn.Module, y: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
        return module(torch.cat([fixed_noise(len(y)), torch.eye(classes)[y]], dim=1)), fixed_noise(len(y))

    monkeypatch.setattr(torch, "randint", lambda high, size: torch.arange(size[0]) % high)
    monkeypatch.setattr(Generator, "draw", draw)
    untrained = federation(replace(protocol, generator_steps=0, local_epochs=0))
    untrained.run(1, runtime="simulation", alone=False, progress=False)
    made = nn.Sequential(nn.Linear(4 + CLASSES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 8))
    first = untrained.agents[0].state["generator"]
    made.load_state_dict({name.removeprefix("generator "): torch.tensor(array) for name, array in first.items()})
    adam = torch.optim.Adam(made.parameters(), 0.05, weight_decay=0.1)
    shares = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 1.0]])  # α_k(y): equal for all who have class y
    nets = initial()
    for t in range(ROUNDS):
        made.eval()
        for name, module in nets.items():
            for x, y in batches(name, t, 4):
                f = module(x)
                loss = cross_entropy(f, y)
                if t > 0:
                    labels = torch.arange(4) % CLASSES
                    z = made(torch.cat([fixed_noise(4), torch.eye(CLASSES)[labels]], dim=1)).detach()
                    loss = loss + decay**t * alpha * cross_entropy(module[-1](z), labels)
                    z = made(torch.cat([fixed_noise(len(x)), y], dim=1)).detach()
                    p = softmax(module[-1](z).detach(), dim=1)
                    loss = loss + decay**t * beta * (p * (p.log() - log_softmax(f, dim=1))).sum() / len(x)
                descend(module, loss)
        made.train()
        adam.param_groups[0]["lr"] = 0.05 * decay**t
        for _ in range(2):
            y = torch.arange(4) % CLASSES
            z = made(torch.cat([fixed_noise(4), torch.eye(CLASSES)[y]], dim=1))
            loss = eta * diversity_loss(fixed_noise(4), z)
            for k, module in enumerate(nets.values()):
                frozen = copy.deepcopy(module[-1]).requires_grad_(False)
                loss = loss + (shares[k, y] * cross_entropy(frozen(z), y, reduction="none")).sum() / 4
            adam.zero_grad()
            loss.backward()
            adam.step()
        average(nets)
    found = run(protocol)
    for key, tensor in nets["a"].state_dict().items():
        np.testing.assert_allclose(found["a"][key], tensor.numpy(), atol=1e-6)
        np.testing.assert_array_equal(found["a"][key], found["b"][key])


# --- equalities that the papers state ---------------------------------------------------------------


@pytest.mark.parametrize(
    "protocol",
    [
        cd.FedDKD(batch_size=4, dkd_steps=0),
        cd.FedDKD(batch_size=4, warm_up=ROUNDS),
        cd.FedProx(batch_size=4, proximal_weight=0.0),
        cd.FedMAX(batch_size=4, activation_weight=0.0),
        cd.FedBN(batch_size=4),
        cd.FedDistill(batch_size=4, weight=0.0),
        cd.FedGen(batch_size=4, generated_weight=0.0, distillation_weight=0.0),
    ],
    ids=lambda protocol: protocol.name,
)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_its_own_term_it_is_fedavg_to_the_bit(protocol: cd.Protocol, participation: float) -> None:
    fedavg = run(cd.FedAvg(batch_size=4), participation=participation)
    found = run(protocol, participation=participation)
    assert all(same(found[name], fedavg[name]) for name in SIZES)


def test_distillation_of_identical_agents_leaves_the_average_where_it_is() -> None:
    torch.manual_seed(1)
    x, y = data()["b"]
    agents = [cd.Agent(name, cd.TorchLearner(net(), optimiser="sgd", lr=RATE), x, y) for name in "ab"]
    weights = []
    for steps in (0, 20):
        twins = [twin_of(agent) for agent in agents]
        protocol = cd.FedDKD(batch_size=6, dkd_steps=steps, dkd_lr=0.2)
        result = cd.Federation(twins, protocol, classes=CLASSES).run(
            1, runtime="simulation", alone=False, progress=False
        )
        weights.append(result.agents["a"].learner.weights())
    for key in weights[0]:
        np.testing.assert_allclose(weights[0][key], weights[1][key], atol=1e-6)


def test_batch_norm_stays_at_home() -> None:
    """FedBN and FedDKD_BN: scale, shift, statistics and counters are each agent's own, everything else is common."""
    for protocol in (cd.FedBN(batch_size=4), cd.FedDKD(batch_size=4, average="except batch norm")):
        found = run(protocol, norm=True)
        for key in found["a"]:
            assert np.array_equal(found["a"][key], found["b"][key]) == not_norm(key), (protocol.name, key)
    found = run(cd.FedDKD(batch_size=4), norm=True)
    assert same(found["a"], found["b"])


def test_a_gradient_at_other_weights_changes_nothing_of_the_model() -> None:
    """Neither its weights nor its statistics; dropout leaves nothing out, so that equal weights have no gradient."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    learner, x = cd.TorchLearner(module), torch.randn(6, 4)
    before = learner.weights()
    other = {name: array + 1 if array.dtype.kind == "f" else array for name, array in before.items()}
    for weights, is_zero in ((before, True), (other, False)):
        gradient = learner.gradient_at(weights, x, distillation)
        assert gradient.keys() == {name for name, array in before.items() if array.dtype.kind == "f"}
        assert not gradient["1.running_mean"].any()
        assert (np.abs(gradient["3.weight"]).max() < 1e-7) == is_zero
    assert same(learner.weights(), before)
    assert learner.gradient_at(before, x[:1], distillation)["0.weight"].shape == (8, 4)  # a batch of one sample


def test_a_gradient_that_is_not_finite_is_not_sent() -> None:
    agent = federation(cd.FedDKD()).agents[0]
    far = {name: np.full_like(array, 3e38) for name, array in agent.learner.weights().items()}
    assert dkd_gradient(agent, far, torch.ones(2, 4)) == {}
    assert dkd_gradient(agent, agent.learner.weights(), torch.ones(2, 4)).keys() == far.keys()


# --- agents that were not in the last round ---------------------------------------------------------


@pytest.mark.parametrize(
    "protocol", [cd.FedAvg(batch_size=4), cd.FedDKD(batch_size=4, dkd_steps=2), cd.FedGen(batch_size=4)]
)
def test_an_agent_that_missed_rounds_trains_from_the_newest_weights(protocol: cd.Protocol) -> None:
    """One of two takes part in each round, so the rounds are one chain of local training."""
    made = federation(protocol, participation=0.5)
    result = made.run(6, runtime="simulation", alone=False, progress=False)
    frame = result.frame()
    turns = frame[frame["present"]].sort_values("round")["agent"].tolist()
    assert len(turns) == 6
    assert set(turns) == set(SIZES)
    last = result.agents[turns[-1]].learner.weights()
    if not isinstance(protocol, cd.FedAvg):
        other = result.agents[next(name for name in SIZES if name != turns[-1])].learner.weights()
        assert not same(last, other)
        return
    module = initial()["a"]
    for t, name in enumerate(turns):
        for x, y in batches(name, t, 4):
            descend(module, cross_entropy(module(x), y))
    for key, tensor in module.state_dict().items():
        np.testing.assert_allclose(last[key], tensor.numpy(), atol=1e-6)


def test_who_has_the_newest_weights_does_not_get_them_again() -> None:
    """The mean of weights has 4 (4*8 + 8 + 8*3 + 3) = 268 bytes; it comes once per round, and once more after a gap."""
    frame = (
        federation(cd.FedAvg(batch_size=4), participation=0.5)
        .run(8, runtime="simulation", alone=False, progress=False)
        .frame()
    )
    present = {name: set(rows[rows["present"]]["round"]) for name, rows in frame.groupby("agent")}
    for row in frame[frame["present"]].itertuples():
        behind = row.round > 1 and row.round - 1 not in present[row.agent]
        assert (2 if behind else 1) * 268 < row.received < (2 if behind else 1) * 268 + 600, row


def test_a_round_of_feddkd_has_one_exchange_and_one_for_each_step_of_distillation() -> None:
    """12 and 6 samples in batches of 4: 3 and 2 local steps; each step of distillation counts as one more."""
    protocol = cd.FedDKD(batch_size=4, dkd_steps=5, warm_up=1)
    rows = federation(protocol).run(2, runtime="simulation", alone=False, progress=False).rows
    assert [(row["agent"], row["exchanges"], row["steps"]) for row in rows] == [
        ("a", 1, 3), ("b", 1, 2), ("a", 1 + 5, 3 + 5), ("b", 1 + 5, 2 + 5),
    ]  # fmt: skip
    # Weights of 268 bytes up and down, and as much for each gradient and each new global model.
    for row in rows[2:]:
        assert 6 * 268 < row["sent"] < 6 * 268 + 6 * 500
        assert 6 * 268 < row["received"] < 6 * 268 + 6 * 500


def weight_sharing() -> list[cd.Protocol]:
    return [
        cd.FedAvg(batch_size=4), cd.FedProx(batch_size=4), cd.FedMAX(batch_size=4), cd.FedBN(batch_size=4),
        cd.FedDistill(batch_size=4), cd.FedGen(batch_size=4, generator_steps=2), cd.FedDKD(batch_size=4),
    ]  # fmt: skip


@pytest.mark.parametrize("protocol", weight_sharing(), ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("participation", [1.0, 0.75, 0.5])
def test_a_round_has_as_many_exchanges_as_in_the_paper_for_any_participation(
    protocol: cd.Protocol, participation: float
) -> None:
    """One, and J = 10 more in FedDKD where others take part: to get weights that one missed is none."""
    agents = []
    for name in "abcd":
        torch.manual_seed(1)
        x, y = data()["a"]
        agents.append(cd.Agent(name, cd.TorchLearner(net(norm=True), optimiser="sgd", lr=RATE), x, y))
    made = cd.Federation(agents, protocol, classes=CLASSES, seed=SEED, participation=participation)
    rows = made.run(5, runtime="simulation", alone=False, progress=False).rows
    assert {row["present"] for row in rows} == ({True} if participation == 1 else {True, False})
    expected = 11 if protocol.name == "feddkd" else 1
    assert [row["exchanges"] for row in rows] == [expected * row["present"] for row in rows]


# --- the optimiser's state ----------------------------------------------------------------------------


def optimised(
    protocol: cd.Protocol, optimiser: Any, names: str = "ab", norm: bool = True, **options: Any
) -> dict[str, cd.TorchLearner]:
    """The learners after a run in which all agents have this optimiser."""
    torch.manual_seed(1)
    agents = [
        cd.Agent(name, cd.TorchLearner(net(norm), optimiser=optimiser, lr=RATE, momentum=0.9), *data()[name])
        for name in names
    ]
    public = np.zeros((4, 4), np.float32) if protocol.needs_public else None
    made = cd.Federation(agents, protocol, classes=CLASSES, seed=SEED, public=public, **options)
    result = made.run(ROUNDS, runtime="simulation", alone=False, progress=False)
    return {name: agent.learner for name, agent in result.agents.items()}


def stepped_by(optimiser: str, module: nn.Module) -> torch.optim.Optimizer:
    if optimiser == "sgd":
        return torch.optim.SGD(module.parameters(), RATE, momentum=0.9)
    return torch.optim.Adam(module.parameters(), RATE)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("state", ["fresh", "kept"])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_an_optimiser_starts_afresh_from_the_downloaded_weights_unless_kept(
    optimiser: str, state: str, decay: float
) -> None:
    """Beside plain torch: a new optimiser in each round, or one for all rounds, at the rate 0.1 · decay^t."""
    protocol = cd.FedAvg(batch_size=4, lr_decay=decay, optimiser_state=state)
    found, nets = optimised(protocol, optimiser, norm=False), initial()
    kept = {name: stepped_by(optimiser, module) for name, module in nets.items()}
    for t in range(ROUNDS):
        for name, module in nets.items():
            steps = kept[name] if state == "kept" else stepped_by(optimiser, module)
            steps.param_groups[0]["lr"] = RATE * decay**t
            module.train()
            for x, y in batches(name, t, 4):
                steps.zero_grad()
                cross_entropy(module(x), y).backward()
                steps.step()
        average(nets)
    for name, module in nets.items():
        for key, tensor in module.state_dict().items():
            np.testing.assert_allclose(found[name].weights()[key], tensor.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize(
    "protocol", [*weight_sharing(), cd.FedDF(transfer_steps=0)], ids=lambda protocol: protocol.name
)
def test_what_an_optimiser_kept_is_forgotten_where_weights_are_replaced(protocol: cd.Protocol, optimiser: str) -> None:
    for state, is_empty in (("fresh", True), ("kept", False)):
        learners = optimised(replace(protocol, optimiser_state=state), optimiser)
        assert [not each.optimiser.state for each in learners.values()] == [is_empty, is_empty]
        alone = optimised(replace(protocol, optimiser_state=state), optimiser, names="a")
        assert alone["a"].optimiser.state  # who gets back its own weights goes on


def test_without_its_own_term_it_is_fedavg_with_momentum_and_adam_too() -> None:
    for optimiser in ("sgd", "adam"):
        fedavg = optimised(cd.FedAvg(batch_size=4), optimiser, participation=0.5)
        for protocol in (cd.FedProx(batch_size=4, proximal_weight=0.0), cd.FedDKD(batch_size=4, dkd_steps=0)):
            found = optimised(protocol, optimiser, participation=0.5)
            assert all(same(found[name].weights(), fedavg[name].weights()) for name in SIZES)


def test_an_optimiser_of_ones_own_is_made_anew_where_weights_are_replaced() -> None:
    """Once for each agent at the start, and once for each of three rounds."""
    made: list[torch.optim.Optimizer] = []

    def nesterov(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True))
        return made[-1]

    learners = optimised(cd.FedAvg(batch_size=4, lr_decay=0.5), nesterov)
    assert len(made) == len(SIZES) * (1 + ROUNDS)
    assert learners["a"].optimiser.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (ROUNDS - 1))
    made.clear()
    optimised(cd.FedAvg(batch_size=4, optimiser_state="kept"), nesterov)
    assert len(made) == len(SIZES)


# --- the head ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """The two layers of `net`, registered in the order in which they are used, or the other way round."""

    def __init__(self, order: tuple[str, str], scale: float = 1.0) -> None:
        super().__init__()
        layers = {"body": nn.Linear(4, 8), "head": nn.Linear(8, CLASSES)}
        for name in order:
            self.add_module(name, layers[name])
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.body(x)))
        return out if self.scale == 1 else out * self.scale


def run_nets(
    protocol: cd.Protocol, order: tuple[str, str], rounds: int = ROUNDS, **options: Any
) -> dict[str, dict[str, np.ndarray]]:
    torch.manual_seed(1)
    first, agents = Net(("body", "head")).state_dict(), []
    for name in SIZES:
        module = Net(order, options.get("scale", 1.0))
        module.load_state_dict(first)
        learner = cd.TorchLearner(module, optimiser="sgd", lr=RATE, head=options.get("head"))
        agents.append(cd.Agent(name, learner, *data()[name]))
    made = cd.Federation(agents, protocol, classes=CLASSES, seed=SEED)
    result = made.run(rounds, runtime="simulation", alone=False, progress=False)
    return {name: agent.learner.weights() for name, agent in result.agents.items()}


USE_FEATURES = [
    cd.FedMAX(batch_size=4, activation_weight=3.0, synchronise=False),
    cd.FedDKD(batch_size=4, local="max", activation_weight=3.0, synchronise=False, **STEPS),
    cd.FedGen(batch_size=4, synchronise=False),
    cd.FedProto(batch_size=4),
    cd.CRS(batch_size=4),
]


@pytest.mark.parametrize("protocol", USE_FEATURES, ids=lambda protocol: protocol.name)
def test_the_order_in_which_layers_are_registered_does_not_matter(protocol: cd.Protocol) -> None:
    """The features are the input of the layer that gives the outputs, not of the last one that was registered."""
    expected, found = (run_nets(protocol, order) for order in (("body", "head"), ("head", "body")))
    for name in SIZES:
        assert all(np.array_equal(found[name][key], array) for key, array in expected[name].items())


@pytest.mark.parametrize("protocol", USE_FEATURES, ids=lambda protocol: protocol.name)
def test_a_network_whose_outputs_no_layer_gives_is_refused_by_name(protocol: cd.Protocol) -> None:
    with pytest.raises(LearnerError, match=rf"{protocol.name} needs.*'a' has Net, which lacks 'features'.*head=\.\.\."):
        run_nets(protocol, ("body", "head"), scale=0.5)
    run_nets(protocol, ("body", "head"), rounds=2, scale=0.5, head="head")  # the way out


@pytest.mark.parametrize("protocol", [cd.FedGen(), cd.CRS()], ids=lambda protocol: protocol.name)
def test_where_the_head_is_applied_to_received_features_it_must_be_one_map(protocol: cd.Protocol) -> None:
    """A head that is used at two places of a sample has 8 inputs, where a sample has 16 features."""

    class Places(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(torch.tanh(self.body(x.repeat(1, 2).view(-1, 2, 4)))).mean(dim=1)
            return out

    agents = [cd.Agent(name, Places(("body", "head")), *data()[name]) for name in SIZES]
    with pytest.raises(LearnerError, match=rf"{protocol.name} applies the head.*: 16 to 3\..*the head 'head', 8 to 3"):
        cd.Federation(agents, protocol, classes=CLASSES)
    assert cd.Federation(agents, cd.FedMAX(), classes=CLASSES)


# --- tied weights ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A layer that is used twice; matrices that two layers share; a head whose matrix is that of the first layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.back, self.head = nn.Linear(4, CLASSES), nn.Linear(CLASSES, 4), nn.Linear(4, CLASSES)
        self.norm = nn.BatchNorm1d(4) if kind == "norm" else nn.Identity()
        self.again = self.norm
        if kind == "layer":
            self.head = self.first
        elif kind == "matrix":
            self.other = nn.Linear(CLASSES, 4)
            self.other.weight = self.back.weight
        elif kind == "head":
            self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = torch.tanh(self.back(torch.tanh(self.first(x))))
        if hasattr(self, "other"):
            middle = middle + self.other(torch.tanh(self.first(middle)))
        out: torch.Tensor = self.head(self.again(self.norm(middle)))
        return out


TIED = ("layer", "matrix", "head", "norm")


def run_tied(protocol: cd.Protocol, kind: str, rounds: int = 2, **options: Any) -> tuple[Nets, Nets]:
    """The federation's modules after some rounds, and copies of them before."""
    torch.manual_seed(1)
    start, agents = Tied(kind), []
    for name in SIZES:
        learner = cd.TorchLearner(copy.deepcopy(start), optimiser="sgd", lr=RATE)
        agents.append(cd.Agent(name, learner, *data()[name]))
    result = cd.Federation(agents, protocol, classes=CLASSES, seed=SEED, **options).run(
        rounds, runtime="simulation", alone=False, progress=False
    )
    found = {name: agent.learner.module for name, agent in result.agents.items()}
    return found, {name: copy.deepcopy(start) for name in SIZES}


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize(
    ("way", "protocol"),
    [
        ("fedavg", cd.FedAvg(batch_size=4, synchronise=False)),
        ("fedprox", cd.FedProx(batch_size=4, proximal_weight=2.0, synchronise=False)),
        ("feddkd", cd.FedDKD(batch_size=4, synchronise=False, **STEPS)),
    ],
)
def test_shared_weights_count_once_with_the_sum_of_their_gradients(way: str, protocol: cd.Protocol, kind: str) -> None:
    """Beside plain torch, which sums the gradients of a parameter over the places where it is used."""
    found, nets = run_tied(protocol, kind)
    for t in range(2):
        train(nets, t, proximal if way == "fedprox" else plain)
        if way == "feddkd":
            distil(nets, t, steps=2, rate=0.5)
        else:
            average(nets)
    for name, module in nets.items():
        assert found[name].state_dict().keys() == module.state_dict().keys()
        for key, tensor in module.state_dict().items():
            np.testing.assert_allclose(found[name].state_dict()[key], tensor, atol=2e-6)


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("protocol", weight_sharing(), ids=lambda protocol: protocol.name)
def test_shared_weights_stay_shared_and_are_sent_once(protocol: cd.Protocol, kind: str) -> None:
    found, _ = run_tied(protocol, kind)
    for module in found.values():
        learner = cd.TorchLearner(module)
        names = {id(parameter): name for name, parameter in reversed([*module.named_parameters()])}
        assert {*learner.weights()} >= {*names.values()}
        state = module.state_dict()
        assert len(learner.weights()) == len({tensor.data_ptr() for tensor in state.values()}) < len(state)
        # By the other name, too, as in a file that was written before.
        learner.load({name: np.full(tensor.shape, 2) for name, tensor in state.items()})
        assert all((tensor == 2).all() for tensor in state.values())


def test_tied_heads_of_fedgen_have_their_own_bias() -> None:
    module = Tied("head")
    agent = cd.Agent("a", module, *data()["a"])
    record_of(agent).encode_labels(CLASSES)
    agent.learner.check(agent.shard.x, agent.shard.targets, "a")
    assert head_name(agent) == "first.weight head.bias"
    hub = cd.Hub()
    hub.classes, hub.joined = CLASSES, {"a": JoinInfo(12, None, 4)}
    sent = {"a": cd.Message(agent.learner.weights())}
    matrix, bias = accepted_heads(hub, sent, {"a": cd.Message.of(head=head_name(agent))})["a"]
    np.testing.assert_array_equal(matrix, module.head.weight.detach())
    np.testing.assert_array_equal(bias, module.head.bias.detach())
    module.head.bias = None
    assert head_name(agent) == "first.weight -"  # not the bias of the first layer
    _, bias = accepted_heads(hub, sent, {"a": cd.Message.of(head=head_name(agent))})["a"]
    assert not bias.any()


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("protocol", [cd.DSGD(local_steps=3, batch_size=4), cd.FedDF(batch_size=4)])
def test_shared_weights_survive_a_resume_and_a_file(protocol: cd.Protocol, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    public = np.ones((8, 4), np.float32) if protocol.needs_public else None

    def made() -> cd.Federation:
        torch.manual_seed(1)
        agents = [cd.Agent(name, cd.TorchLearner(Tied(kind), momentum=0.9), *data()[name]) for name in SIZES]
        return cd.Federation(agents, protocol, classes=CLASSES, seed=SEED, public=public)

    options: dict[str, Any] = {"runtime": "simulation", "alone": False, "progress": False}
    whole = made().run(3, **options)
    made().run(2, folder=tmp_path / "run", **options)
    resumed = made().run(3, folder=tmp_path / "run", resume=True, **options)
    for name, agent in resumed.agents.items():
        assert same(agent.learner.weights(), whole.agents[name].learner.weights())
        loaded = cd.load(agent.save(tmp_path / "model"), model=Tied(kind))
        assert same(loaded.learner.weights(), agent.learner.weights())
        for key, tensor in agent.learner.module.state_dict().items():
            np.testing.assert_array_equal(loaded.learner.module.state_dict()[key], tensor)


# --- divergence -----------------------------------------------------------------------------------------


def logged(protocol: cd.Protocol, folder: Path, **options: Any) -> tuple[dict[str, dict[str, np.ndarray]], str, Any]:
    """Weights, events and rows of a run."""
    made = federation(protocol, **options)
    result = made.run(ROUNDS, runtime="simulation", alone=False, progress=False, folder=folder)
    log = folder / "log.txt"
    events = log.read_text() if log.exists() else ""
    return {name: agent.learner.weights() for name, agent in result.agents.items()}, events, result.rows


@pytest.mark.parametrize("rate", [1e3, 1e6, 1e30])
def test_distillation_that_diverges_is_an_event_and_leaves_the_mean(rate: float, tmp_path: Path) -> None:
    """Each step leads more than ten times as far as the largest w_k: every round ends with the mean, as FedAvg."""
    fedavg = run(cd.FedAvg(batch_size=4))
    found, events, _ = logged(cd.FedDKD(batch_size=4, dkd_steps=4, dkd_lr=rate), tmp_path / "run")
    assert all(same(found[name], fedavg[name]) for name in SIZES)
    assert events.count("'hub': diverged: distillation made weights") == ROUNDS
    _, events, _ = logged(cd.FedDKD(batch_size=4, dkd_steps=4), tmp_path / "other")
    assert "diverged" not in events


def test_what_distillation_made_of_the_mean_is_measured() -> None:
    """Accuracy and cross-entropy of w̄_0 and w̄_J on the samples of the last step, in evaluation mode."""
    nets = initial()
    train(nets, 0, plain)
    before = copy.deepcopy(nets)
    average(before)
    distil(nets, 0, steps=2, rate=0.5)
    protocol = cd.FedDKD(batch_size=4, **STEPS)
    rows = federation(protocol).run(1, runtime="simulation", alone=False, progress=False).rows
    for row in rows:
        x, y = batches(row["agent"], 0, 5, "distillation", 2)[-1]
        for when, made in (("before", before), ("after", nets)):
            with torch.no_grad():
                outputs = made[row["agent"]](x)
            accuracy = (outputs.argmax(dim=1) == y.argmax(dim=1)).float().mean().item()
            assert row[f"accuracy_{when}_dkd"] == pytest.approx(accuracy)
            assert row[f"loss_{when}_dkd"] == pytest.approx(cross_entropy(outputs, y).item(), rel=1e-4)
    rows = federation(replace(protocol, warm_up=1)).run(1, runtime="simulation", alone=False, progress=False).rows
    assert not any("dkd" in key for row in rows for key in row)


def test_a_loss_that_distillation_raises_is_an_event() -> None:
    """Outputs w x with x = 1 and w = 0, so log 2, become those of w = (-9, 0) for class 0: log (1 + e^9)."""
    agent = cd.Agent("a", nn.Linear(1, 2, bias=False), np.ones((4, 1)), np.zeros(4, int))
    agent.topology = cd.Topology.star(["a"])
    record_of(agent).encode_labels(2)
    x, y = torch.ones(4, 1), torch.tensor([[1.0, 0.0]] * 4)
    start = {"weight": np.zeros((2, 1), np.float32)}
    note_effect(agent, start, {"weight": np.array([[-9.0], [0.0]], np.float32)}, (x, y))
    assert record_of(agent).remarks == ["distillation raised the loss on its own samples from 0.693 to 9."]
    assert record_of(agent).measures[1][2] == pytest.approx(np.log(2))
    note_effect(agent, start, {"weight": np.array([[-0.5], [0.0]], np.float32)}, (x, y))
    assert len(record_of(agent).remarks) == 1
    record_of(agent).measures = []
    note_effect(agent, start, {"weight": np.array([[-3e38], [3e38]], np.float32)}, (100 * x, y))
    # Losses of 3e38, whose sum single precision does not hold: their mean it does
    note_effect(agent, start, {"weight": np.array([[-1e38], [1e38]], np.float32)}, (1.5 * x, y))
    said = "distillation raised the loss on its own samples from 0.693 to"
    assert record_of(agent).remarks[1:] == [f"{said} nan.", f"{said} 3e+38."]
    assert all(np.isfinite(value) for _, _, value in record_of(agent).measures)


def test_combined_weights_far_beyond_those_of_the_round_before_are_an_event() -> None:
    """Norms: 4 weights of 0.5 are 1, of 6 are 12, below ten times √4; of 60 are 120, ten times 12 or more."""
    hub = cd.Hub()
    for value, events in ((0.5, 0), (6.0, 0), (59.9, 0), (599.0, 0), (6000.0, 1), (6000.0, 1), (np.inf, 2)):
        watch_growth(hub, [(["a"], {"w": np.full((2, 2), value, np.float32), "count": np.array(10**9)})])
        assert len(record_of(hub).remarks) == events, value
    assert all(text.startswith("diverged: the combined weights are") for text in record_of(hub).remarks)


# --- parts ------------------------------------------------------------------------------------------


def test_the_divergence_of_activations_is_that_of_its_definition() -> None:
    features = torch.randn(5, 7, dtype=torch.float64) * 10
    a = softmax(features, dim=1)
    assert activation_divergence(features).item() == pytest.approx(((a * (a * 7).log()).sum() / 5).item(), abs=1e-12)
    assert activation_divergence(torch.zeros(2, 9)).item() == pytest.approx(0, abs=1e-6)
    assert torch.isfinite(activation_divergence(torch.tensor([[0.0, 1000.0]])))


def test_diversity_is_the_mean_over_all_pairs() -> None:
    noise, z = torch.rand(4, 3), torch.rand(4, 5)
    total = sum(((noise[i] - noise[j]) ** 2).mean() * (z[i] - z[j]).abs().mean() for i in range(4) for j in range(4))
    assert diversity_loss(noise, z).item() == pytest.approx(float(np.exp(-total.item() / 16)), abs=1e-6)


def test_a_head_is_taken_by_the_name_that_its_owner_tells() -> None:
    """Also of a model whose other matrices have the same shape; whoever names another array is refused."""
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    agent = cd.Agent("a", module, np.eye(3), [0, 1, 2])
    assert head_name(agent) == "2.weight"
    hub = cd.Hub()
    hub.classes, hub.joined = 3, dict.fromkeys("abc", JoinInfo(3, None, 3))
    sent = cd.Message(agent.learner.weights())
    told = {"a": "2.weight", "b": "2.bias", "c": "7.weight"}
    heads = accepted_heads(hub, dict.fromkeys("abc", sent), {name: cd.Message.of(head=told[name]) for name in told})
    assert list(heads) == ["a"]
    np.testing.assert_array_equal(heads["a"][0], sent["2.weight"])
    np.testing.assert_array_equal(heads["a"][1], sent["2.bias"])
    assert [sender for sender, _ in record_of(hub).rejected] == ["b", "c"]


def test_class_weights_are_shares_of_what_is_held() -> None:
    held = [np.array([True, False, False]), np.array([True, True, False])]
    np.testing.assert_allclose(class_weights(held), [[0.5, 0, 0], [0.5, 1, 0]])
    np.testing.assert_allclose(class_weights([np.array([0.25, -3]), np.array([0.75, 9])]), [[0.25, 0], [0.75, 1]])


def test_a_generator_learns_features_that_the_heads_recognise() -> None:
    """Two heads that separate three classes along the axes: after training G, both recognise what it makes up."""
    hub, head, bias = cd.Hub(), np.eye(CLASSES, 4, dtype=np.float32), np.zeros(CLASSES, np.float32)
    hub.classes = CLASSES
    generator = Generator(lr=1e-2, noise=4, hidden=16)
    y = torch.arange(300) % CLASSES

    def recognised() -> float:
        made, _ = generator.draw(hub.memo["generator", 4][0].eval(), y, CLASSES)
        return float((made @ torch.from_numpy(head).T).argmax(dim=1).eq(y).float().mean())

    torch.manual_seed(0)
    for steps, at_least in ((0, 0.0), (200, 0.95)):
        heads, shares = [(head, bias), (3 * head, bias)], np.full((2, CLASSES), 0.5)
        generator.train(hub, 4, heads, shares, steps=steps, batch_size=32, lr_factor=1.0)
        assert recognised() >= at_least
        assert (recognised() < 0.9) == (steps == 0)


def test_a_generator_whose_weights_explode_begins_anew() -> None:
    """Steps of Adam at a rate of 1000 leave finite weights of some thousands; at 0.001 it is kept."""
    heads, shares = [(np.eye(CLASSES, 4, dtype=np.float32), np.zeros(CLASSES, np.float32))], np.ones((1, CLASSES))
    for rate, events in ((1e-3, []), (1e3, ["the generator diverged; it is initialised anew."])):
        hub = cd.Hub()
        hub.classes = CLASSES
        arrays = Generator(lr=rate).train(hub, 4, heads, shares, steps=5, batch_size=8, lr_factor=1.0)
        assert record_of(hub).remarks == events
        assert max(abs(array).max() for array in arrays.values()) < 10
