"""Torch learners: steps checked by hand, randomness, modes, state to the bit, weights, features, errors."""

import copy
from contextlib import nullcontext
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from codistill.core.errors import LearnerError
from codistill.core.rng import seed_libraries
from codistill.data.shard import cut
from codistill.learners import zoo
from codistill.learners.ability import Ability
from codistill.learners.features import Head, find_head
from codistill.learners.torch import TorchLearner
from codistill.wire.state import pack, unpack


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def toy(n=12, d=3, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    targets = rng.dirichlet(np.ones(classes), size=n).astype(np.float32)
    return rng.normal(size=(n, d)).astype(np.float32), targets


def linear(d=3, classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(d, classes)


def softmax(values):
    e = np.exp(values - values.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def noisy(classes=3):
    """A module with everything that tells training from evaluation."""
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, classes))


def images(n=10, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3, 6, 6)).astype(np.float32), np.eye(3, dtype=np.float32)[np.arange(n) % 3]


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(128, 3)
    )


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


# --- fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
def test_one_step_of_sgd_is_the_formula(loss):
    """One epoch of one batch: W ← W - lr Gᵀx / scale, with G = p - t (cross-entropy) or 2 (o - t) (squared)."""
    x, t = toy()
    learner = TorchLearner(linear(), loss=loss, optimiser="sgd", lr=0.1, epochs=1, batch_size=12, warm=True)
    before = learner.weights()
    outputs = x @ before["weight"].T + before["bias"]
    # mean over the batch; the squared loss is also a mean over the classes
    g = (softmax(outputs) - t) / 12 if loss == "cross_entropy" else 2 * (outputs - t) / (12 * 3)
    learner.fit(x, t)
    after = learner.weights()
    np.testing.assert_allclose(after["weight"], before["weight"] - 0.1 * g.T @ x, atol=1e-6)
    np.testing.assert_allclose(after["bias"], before["bias"] - 0.1 * g.sum(axis=0), atol=1e-6)


def test_weight_decay_and_momentum_reach_the_optimiser():
    """Two steps on the loss 0·o: v₁ = λw₀, w₁ = w₀ - lr v₁, v₂ = μv₁ + λw₁, w₂ = w₁ - lr v₂."""
    learner = TorchLearner(linear(), optimiser="sgd", lr=0.1, weight_decay=0.5, momentum=0.9)
    w = learner.weights()["weight"]
    x = torch.zeros(2, 3)
    for _ in range(2):
        learner.descend((learner(x) * 0).sum())
    v1 = 0.5 * w
    w1 = w - 0.1 * v1
    np.testing.assert_allclose(learner.weights()["weight"], w1 - 0.1 * (0.9 * v1 + 0.5 * w1), rtol=1e-5)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_first_step_of_adam_has_the_length_of_the_learning_rate(name):
    x, t = toy()
    learner = TorchLearner(linear(), optimiser=name, lr=0.01)
    before = learner.weights()["weight"]
    learner.descend(learner.loss(learner(torch.from_numpy(x)), torch.from_numpy(t)))
    np.testing.assert_allclose(np.abs(learner.weights()["weight"] - before), 0.01, rtol=1e-3)


def test_every_sample_is_seen_once_per_epoch_in_batches():
    seen = []

    def loss(outputs, targets):
        seen.append(targets[:, 0].tolist())
        return nn.functional.mse_loss(outputs, targets)

    x = np.zeros((10, 3), dtype=np.float32)
    targets = np.arange(10, dtype=np.float32)[:, None] * np.ones((1, 3), dtype=np.float32)
    TorchLearner(linear(), loss=loss, epochs=2, batch_size=4).fit(x, targets)
    assert [len(batch) for batch in seen] == [4, 4, 2, 4, 4, 2]
    assert sorted(chain(*seen[:3])) == sorted(chain(*seen[3:])) == list(range(10))
    assert seen[:3] != seen[3:]  # shuffled anew


def test_fit_starts_afresh_unless_warm():
    x, t = toy()

    def fitted(*times, warm):
        learner = TorchLearner(noisy(), epochs=2, batch_size=4, warm=warm)
        seed_libraries(0, "initial")
        learner.reset()
        for time in times:
            seed_libraries(0, time)
            learner.fit(x, t)
        return learner.weights()

    assert same(fitted("a", "b", warm=False), fitted("b", warm=False))
    assert not same(fitted("a", "b", warm=True), fitted("b", warm=True))


def test_the_same_seed_gives_the_same_model_to_the_bit():
    x, t = toy(n=30)
    learners = [TorchLearner(noisy(), epochs=3, batch_size=8) for _ in range(3)]
    for learner, seed in zip(learners, [5, 5, 6], strict=True):
        seed_libraries(seed, "agent", 0)
        learner.fit(x, t)
    first, second, other = (learner.predict(x) for learner in learners)
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_reset_returns_what_no_layer_initialises_to_its_first_value():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.scale * self.layer(x)

    x, t = toy()
    learner = TorchLearner(Scaled(), optimiser="sgd", lr=0.5)
    first = learner.weights()
    learner.descend(learner.loss(learner(torch.from_numpy(x)), torch.from_numpy(t)))
    assert learner.weights()["scale"] != 3.0
    seed_libraries(1)
    learner.reset()
    assert learner.weights()["scale"] == 3.0
    assert not np.array_equal(learner.weights()["layer.weight"], first["layer.weight"])
    seed_libraries(1)
    expected = nn.Linear(3, 3)
    assert np.array_equal(learner.weights()["layer.weight"], expected.weight.detach().numpy())


def test_reset_forgets_the_optimiser_and_the_statistics_of_batch_norm():
    x, t = toy()
    learner = TorchLearner(noisy())
    learner.descend(learner.loss(learner(torch.from_numpy(x)), torch.from_numpy(t)))
    learner.reset()
    assert learner.state()["optimiser"] is None
    assert (learner.weights()["1.running_mean"] == 0).all()
    assert learner.weights()["1.num_batches_tracked"] == 0


@pytest.mark.parametrize(
    ("n", "size", "expected"),
    [(10, 4, [4, 4, 2]), (9, 4, [4, 5]), (1, 4, [1]), (4, 4, [4]), (5, 4, [5]), (3, 1, [1, 2]), (2, 9, [2])],
)
def test_a_single_left_over_sample_joins_the_last_batch(n, size, expected):
    batches = [list(range(n))[part] for part in cut(n, size)]
    assert [len(batch) for batch in batches] == expected
    assert list(chain(*batches)) == list(range(n))


def test_batch_norm_survives_a_left_over_sample():
    x, t = toy(n=9)
    TorchLearner(noisy(), epochs=1, batch_size=4).fit(x, t)


# --- predict --------------------------------------------------------------------------------------


def test_cross_entropy_predicts_probabilities():
    x, t = toy()
    learner = TorchLearner(linear())
    w = learner.weights()
    found = learner.predict(x)
    assert (found.dtype, found.shape) == (np.float32, t.shape)
    np.testing.assert_allclose(found, softmax(x @ w["weight"].T + w["bias"]), atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("loss", ["squared", nn.functional.l1_loss])
def test_any_other_loss_predicts_raw_outputs(loss):
    x, _ = toy()
    learner = TorchLearner(linear(), loss=loss)
    w = learner.weights()
    np.testing.assert_allclose(learner.predict(x), x @ w["weight"].T + w["bias"], atol=1e-6)


def test_predictions_do_not_depend_on_their_company():
    x, _ = toy(n=620)
    learner = TorchLearner(noisy())
    alone = np.concatenate([learner.predict(x[i : i + 1]) for i in range(0, 620, 31)])
    np.testing.assert_allclose(learner.predict(x)[::31], alone, atol=1e-6)
    assert learner.predict(x[:0]).shape == (0, 3)


def test_predict_is_in_evaluation_mode_and_a_call_in_training_mode():
    x, _ = toy(n=20)
    learner = TorchLearner(noisy())
    learner(torch.from_numpy(x))
    before = learner.weights()
    assert np.array_equal(learner.predict(x), learner.predict(x))
    assert same(before, learner.weights())  # statistics of batch norm left alone
    one, two = (learner(torch.from_numpy(x)) for _ in range(2))
    assert one.requires_grad
    assert not torch.equal(one, two)  # dropout
    assert learner.weights()["1.num_batches_tracked"] == before["1.num_batches_tracked"] + 2


def test_predict_takes_any_layout_and_leaves_the_samples_alone():
    x, _ = toy()
    learner = TorchLearner(nn.Sequential(nn.Hardtanh(-0.1, 0.1, inplace=True), linear()))
    copied = x.copy()
    found = learner.predict(x)
    assert np.array_equal(x, copied)
    assert np.array_equal(learner.predict(x[::-1]), found[::-1])
    x.flags.writeable = False
    assert np.array_equal(learner.predict(x), found)
    assert np.array_equal(learner.predict(x.astype(np.float64)), found)
    assert np.array_equal(learner.predict(x.astype(">f4")), found)


def test_convolutions_are_channels_last_and_count_the_same():
    x, _ = images()
    plain = convolutional()
    expected = copy.deepcopy(plain).eval()(torch.from_numpy(x)).detach().numpy()
    learner = TorchLearner(plain, loss="squared")
    assert learner.tensor(x).is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_allclose(learner.predict(x), expected, atol=1e-5)


# --- gradients ------------------------------------------------------------------------------------


def test_descend_keeps_the_moments_of_adam():
    """Gradients 1 then 0: the second step is lr m̂ / √v̂ with m = β₁(1-β₁), v = β₂(1-β₂), not zero."""
    learner = TorchLearner(nn.Linear(1, 1, bias=False), optimiser="adam", lr=0.1)
    learner.descend(learner.module.weight.sum())
    between = learner.weights()["weight"].item()
    learner.descend(learner.module.weight.sum() * 0)
    m, v = 0.9 * 0.1 / (1 - 0.9**2), 0.999 * 0.001 / (1 - 0.999**2)
    assert between - learner.weights()["weight"].item() == pytest.approx(0.1 * m / np.sqrt(v), rel=1e-3)


def test_an_optimiser_and_a_loss_of_ones_own():
    made = []

    def optimiser(parameters):
        made.append(torch.optim.SGD(parameters, 0.25))
        return made[-1]

    x, t = toy()
    learner = TorchLearner(linear(), loss=lambda o, t: (o * t).sum(), optimiser=optimiser)
    before = learner.weights()
    learner.descend(learner.loss(learner(torch.from_numpy(x)), torch.from_numpy(t)))
    # d/dW Σ (Wx + b) t = tᵀx
    np.testing.assert_allclose(learner.weights()["weight"], before["weight"] - 0.25 * t.T @ x, atol=1e-5)
    assert learner.optimiser is made[0]
    assert len(made) == 1


def test_a_snapshot_is_frozen():
    x, t = toy()
    learner = TorchLearner(noisy())
    frozen = learner.snapshot()
    u = torch.from_numpy(x)
    before = frozen(u)
    assert not before.requires_grad
    learner.descend(learner.loss(learner(u), torch.from_numpy(t)))
    assert torch.equal(frozen(u), before)
    assert not torch.equal(learner.outputs(x), before)
    assert learner.module.training is False
    assert all(parameter.requires_grad for parameter in learner.module.parameters())


# --- features -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "cnn", "lenet5_gap"])
def test_the_head_of_the_features_is_the_output(name):
    shape = (1, 12, 12)
    learner = TorchLearner(zoo.build(name, shape, 4))
    assert Ability.FEATURES in learner.abilities
    x = torch.randn(5, *shape)
    features = learner.features(x)
    assert features.requires_grad
    assert features.shape == (5, learner.head.in_features)
    torch.testing.assert_close(learner.head(features), learner(x))
    assert not learner.head._forward_pre_hooks


def test_outputs_and_features_of_one_pass_in_training_mode():
    x, _ = toy(n=20)
    learner = TorchLearner(noisy())
    learner.predict(x)  # leaves the module in evaluation mode
    outputs, features = learner.with_features(torch.from_numpy(x))
    assert outputs.requires_grad
    assert features.requires_grad
    assert (features == 0).float().mean() > 0.6  # ReLU and dropout, each of a half
    torch.testing.assert_close(learner.head(features), outputs)
    assert learner.weights()["1.num_batches_tracked"] == 1
    seed_libraries(0)
    expected = learner(torch.from_numpy(x))
    seed_libraries(0)
    assert torch.equal(learner.with_features(torch.from_numpy(x))[0], expected)


def test_evaluated_features_are_those_that_predictions_are_made_of():
    x, _ = toy(n=620)
    learner = TorchLearner(noisy(), loss="squared")
    learner(torch.from_numpy(x))
    before = learner.weights()
    features = learner.evaluated_features(x)
    assert (features.shape, features.dtype) == ((620, 8), np.float32)
    assert same(before, learner.weights())
    w = learner.weights()
    np.testing.assert_allclose(features @ w["4.weight"].T + w["4.bias"], learner.predict(x), atol=1e-5)
    assert learner.evaluated_features(x[:0]).shape == (0, 8)


def test_features_at_many_places_of_a_sample_are_one_row():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(x).mean(dim=1)

    learner = TorchLearner(Tokens())
    x = np.zeros((6, 5, 4), dtype=np.float32)
    assert learner.evaluated_features(x).shape == (6, 20)
    assert learner.with_features(torch.from_numpy(x))[1].shape == (6, 20)


def test_a_linear_layer_that_is_not_used_gives_no_features():
    """The head is the layer that gives the outputs, here `used`; the last one that the module has is not asked for
    unless its owner names it."""

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    learner = TorchLearner(Unused())
    assert torch.equal(learner.features(torch.ones(2, 3)), torch.ones(2, 3))
    assert learner.head is learner.module.used
    named, (x, t) = TorchLearner(Unused(), head="unused"), toy()
    with pytest.raises(LearnerError, match=r"linear layer that every sample passes.*Unused does not use 'unused'"):
        named.features(torch.zeros(2, 3))
    with pytest.raises(LearnerError, match=r"Unused does not use 'unused'.*TorchLearner\(module, head="):
        named.check(x, t, "Ann")
    with pytest.raises(LearnerError, match=r"head must be the name of a linear layer.*'used_'.*[Dd]id you mean 'used'"):
        TorchLearner(Unused(), head="used_")


class Network(nn.Module):
    """Layers a, b, c in this order, all 3 to 3; what is made of them is a function of the module and x."""

    def __init__(self, run):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.more = nn.ModuleList([nn.Sequential(nn.Tanh(), nn.Linear(3, 3))])
        self.bias, self.run = nn.Parameter(torch.ones(3)), run

    def forward(self, x):
        return self.run(self, x)


def twice(m, x):
    return m.b(m.a(m.b(x)))


def first_of_two(m, x):
    out = m.b(m.a(x))
    m.b(out)
    return out


def in_place(m, x):
    return nn.functional.relu_(m.a(x))


def behind_a_view(m, x):
    out = m.a(x)
    out.view(-1).mul_(2)
    return out


HEADS = {  # what the network computes, and which layer's output that is
    "registered first": (lambda m, x: m.a(torch.tanh(m.c(x))), "a"),
    "registered last": (lambda m, x: m.c(torch.tanh(m.a(x))), "c"),
    "in a list": (lambda m, x: m.more[0](m.c(x)), "more.0.1"),
    "view": (lambda m, x: m.b(m.c(x)).view(-1, 3), "b"),
    "places": (lambda m, x: m.b(m.c(x)[:, None]).squeeze(1), "b"),
    "flatten": (lambda m, x: m.b(m.c(x)[:, None]).flatten(1), "b"),
    "softmax": (lambda m, x: nn.functional.softmax(m.b(m.c(x)), dim=-1), "b"),
    "log_softmax": (lambda m, x: m.b(m.c(x)).log_softmax(1), "b"),
    "dropout": (lambda m, x: nn.functional.dropout(m.b(m.c(x)), 0.5, m.training), "b"),
    "dropout in place": (lambda m, x: nn.functional.dropout(m.b(m.c(x)), 0.5, m.training, inplace=True), "b"),
    "identity": (lambda m, x: nn.Identity()(m.b(m.c(x)))[:, :], "b"),
    "of another type": (lambda m, x: m.b(m.c(x)).double().float(), "b"),
    "in a list of one": (lambda m, x: torch.cat([m.b(m.c(x))], dim=1), "b"),
    "a tuple inside": (lambda m, x: (m.c(x), m.b(x))[1], "b"),
    "by name": (lambda m, x: m.b(input=m.c(input=x)), "b"),
    "used twice": (twice, "b"),
    "used twice, the first counts": (first_of_two, "b"),
    "beside it": (lambda m, x: (m.b(m.a(x)), m.c(x))[0], "b"),
}
NO_HEADS = {
    "sum": lambda m, x: m.a(x) + m.b(x),
    "zero sum": lambda m, x: m.a(x) + 0 * m.b(x),
    "scaled": lambda m, x: m.a(x) / 2,
    "relu": lambda m, x: torch.relu(m.a(x)),
    "relu in place": in_place,
    "in place behind a view": behind_a_view,
    "functional": lambda m, x: nn.functional.linear(m.c(x), m.a.weight, m.a.bias),
    "no layer": lambda m, x: x + m.bias,
    "some of many": lambda m, x: m.a(x.repeat(1, 2).view(-1, 2, 3))[:, 0],
    "over samples": lambda m, x: m.a(x) - m.a(x).mean(dim=0),
}


@pytest.mark.parametrize("case", HEADS)
def test_the_head_is_the_layer_whose_output_is_the_modules(case):
    run, expected = HEADS[case]
    learner, (x, t) = TorchLearner(Network(run)), toy()
    with pytest.warns(UserWarning, match="final softmax") if case == "softmax" else nullcontext():
        learner.check(x, t, "Ann")
    assert learner.head_name == expected
    assert learner.head is learner.module.get_submodule(expected)
    features = torch.from_numpy(learner.evaluated_features(x))
    with torch.no_grad():
        logits, outputs = learner.head(features), learner.outputs(x)
        # as they are, or up to a softmax
        of_probabilities = torch.log(outputs) if case == "softmax" else outputs
        torch.testing.assert_close(log_softmax(logits), log_softmax(of_probabilities))


def log_softmax(values):
    return nn.functional.log_softmax(values, dim=1)


@pytest.mark.parametrize("case", NO_HEADS)
def test_where_no_layer_gives_the_outputs_there_are_no_features_unless_named(case):
    learner, (x, t) = TorchLearner(Network(NO_HEADS[case])), toy()
    learner.check(x, t, "Ann")
    assert Ability.FEATURES not in learner.abilities
    with pytest.raises(LearnerError, match=r"Features need a linear layer.*Add an nn\.Linear, or name"):
        learner.evaluated_features(x)
    if case in ("functional", "no layer"):
        return  # there is none to be named
    named = TorchLearner(Network(NO_HEADS[case]), head="a")
    named.check(x, t, "Ann")
    assert Ability.FEATURES in named.abilities
    assert named.head is named.module.a
    assert named.evaluated_features(x).shape[0] == len(x)


def test_to_find_the_head_changes_nothing():
    """Neither what is drawn next, nor statistics, modes, gradients and buffers, whatever the module does in a pass."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, x):
            self.passes += 1
            return self.head(nn.functional.dropout(self.norm(self.body(x)), 0.5, training=True))

    x, _ = toy()
    learner = TorchLearner(Counting())
    learner(torch.from_numpy(x)).sum().backward()
    learner.module.norm.eval()  # an owner's own choice
    modes = [part.training for part in learner.module.modules()]
    gradients = [parameter.grad.clone() for parameter in learner.module.parameters()]
    before, drawn = learner.weights(), torch.random.get_rng_state()
    assert find_head(learner.module, torch.from_numpy(x)) == Head("head", -1)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert same(learner.weights(), before)
    assert [part.training for part in learner.module.modules()] == modes
    assert all(map(torch.equal, gradients, [parameter.grad for parameter in learner.module.parameters()]))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in learner.module.modules())
    assert all(tensor.grad_fn is None for tensor in learner.module.parameters())


def test_the_head_stays_with_copies_and_after_memory_was_freed():
    x, t = toy()
    learner = TorchLearner(Network(HEADS["registered first"][0]))
    learner.check(x, t, "Ann")
    features = learner.evaluated_features(x)
    twin = copy.deepcopy(learner)
    assert twin.head is twin.module.a
    state = unpack(pack(learner.state()))
    learner.offload()
    learner.restore(state)
    assert learner.head is learner.module.a
    assert np.array_equal(learner.evaluated_features(x), features)


def test_a_projection_is_put_before_the_head():
    """Before any samples it is put before the last layer, and the error says the name where that is not the head."""
    x, t = toy()
    run = HEADS["registered first"][0]
    with pytest.raises(LearnerError, match=r"A projection must be before.*'a' of Network.*projection=.*head=\"a\""):
        TorchLearner(Network(run), projection=5).check(x, t, "Ann")
    learner = TorchLearner(Network(run), projection=5, head="a")
    learner.check(x, t, "Ann")
    assert (learner.head_name, learner.head.in_features) == ("a.1", 5)
    assert learner.evaluated_features(x).shape == (12, 5)


def test_without_a_linear_layer_there_are_no_features():
    learner = TorchLearner(nn.Sequential(nn.Conv1d(1, 2, 1), nn.Flatten()))
    assert Ability.FEATURES not in learner.abilities
    with pytest.raises(LearnerError, match=r"Features need a linear layer.*Add an nn\.Linear"):
        learner.features(torch.zeros(1, 1, 1))


# --- weights --------------------------------------------------------------------------------------


def test_weights_are_copies_and_load_takes_them_over():
    one, two = TorchLearner(noisy()), TorchLearner(noisy())
    taken = one.weights()
    assert set(taken) == set(one.module.state_dict())
    taken["0.bias"][:] = 7
    assert not (one.weights()["0.bias"] == 7).any()
    two.load(taken)
    assert same(two.weights(), taken)


def test_load_leaves_out_what_is_left_out():
    one, two = TorchLearner(noisy()), TorchLearner(noisy())
    kept = two.weights()
    two.load({"0.weight": one.weights()["0.weight"], "1.num_batches_tracked": np.array(3.0)})
    found = two.weights()
    assert np.array_equal(found["0.weight"], one.weights()["0.weight"])
    assert found["1.num_batches_tracked"] == 3
    assert found["1.num_batches_tracked"].dtype == np.int64
    assert all(np.array_equal(found[name], kept[name]) for name in kept if name.startswith("4"))


@pytest.mark.parametrize("wrong", [{"0.bias": np.zeros(1)}, {"0.bias": np.zeros((8, 1))}, {"9.bias": np.zeros(8)}])
def test_weights_of_another_architecture_are_refused_as_a_whole(wrong):
    learner = TorchLearner(noisy())
    before = learner.weights()
    with pytest.raises(LearnerError, match=r"Weights must fit Sequential by name and shape.*same architecture"):
        learner.load({"4.bias": np.ones(3)} | wrong)
    assert same(learner.weights(), before)


def test_a_copy_of_a_learner_has_weights_of_its_own():
    one = TorchLearner(noisy())
    before = one.weights()
    two = copy.deepcopy(one)
    x, t = toy()
    two.descend(two.loss(two(torch.from_numpy(x)), torch.from_numpy(t)))
    two.load({"0.bias": np.zeros(8)})
    assert same(one.weights(), before)
    assert (two.weights()["0.bias"] == 0).all()
    assert same(two.weights(), {name: tensor.numpy() for name, tensor in two.module.state_dict().items()})


def test_weights_in_any_layout():
    one, two = TorchLearner(convolutional()), TorchLearner(convolutional())
    two.load(one.weights())
    x, _ = images()
    assert same(one.weights(), two.weights())
    assert np.array_equal(one.predict(x), two.predict(x))


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"optimiser": "adam"},
        {"optimiser": "adamw", "weight_decay": 0.1},
        {"optimiser": "sgd", "momentum": 0.9, "lr": 0.1},
        {"optimiser": lambda parameters: torch.optim.RMSprop(parameters, 0.01, momentum=0.5)},
    ],
)
@pytest.mark.parametrize("module", [noisy, convolutional])
def test_after_a_checkpoint_the_next_step_is_the_same_to_the_bit(module, options):
    x, t = toy() if module is noisy else images()

    def steps(learner, n):
        for i in range(n):
            seed_libraries(i)
            learner.descend(learner.loss(learner(learner.tensor(x)), torch.from_numpy(t)))

    one, two = TorchLearner(module(), **options), TorchLearner(module(), **options)
    steps(one, 3)
    two.restore(unpack(pack(one.state())))
    assert same(one.weights(), two.weights())
    steps(one, 2)
    steps(two, 2)
    assert same(one.weights(), two.weights())
    assert np.array_equal(one.predict(x), two.predict(x))


def test_a_state_before_the_first_step_has_no_optimiser():
    one, two = TorchLearner(noisy()), TorchLearner(noisy())
    x, t = toy()
    two.descend(two.loss(two(torch.from_numpy(x)), torch.from_numpy(t)))
    two.restore(unpack(pack(one.state())))
    assert same(one.weights(), two.weights())
    assert two.state()["optimiser"] is None


# --- what it says ---------------------------------------------------------------------------------


def test_abilities_and_names(monkeypatch):
    own, registered = TorchLearner(noisy()), TorchLearner(zoo.build("mlp", (3,), 3))
    assert own.abilities == registered.abilities  # as ONNX, since the extra is there
    monkeypatch.setattr("codistill.learners.portable.onnx_models.is_installed", lambda: False)
    own, registered = TorchLearner(noisy()), TorchLearner(zoo.build("mlp", (3,), 3))
    assert own.abilities == Ability.PREDICT | Ability.GRADIENTS | Ability.WEIGHTS | Ability.FEATURES
    assert registered.abilities == own.abilities | Ability.PORTABLE
    assert (own.describe(), registered.describe()) == ("Sequential", "mlp")
    assert own.ready
    assert "register_architecture" in own.advice(Ability.PORTABLE)
    assert "pip install 'codistill[onnx]'" in own.advice(Ability.PORTABLE)
    assert "nn.Linear" in own.advice(Ability.FEATURES)


def test_check_accepts_what_fits_and_leaves_the_module_alone():
    x, t = toy()
    learner = TorchLearner(noisy())
    before = learner.weights()
    learner.check(x, t, "Ann")
    learner.check(x[:1], t[:1], "Ann")
    assert same(learner.weights(), before)
    assert learner.state()["optimiser"] is None


class Odd(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.forward = forward


@pytest.mark.parametrize(
    "module",
    [nn.Linear(4, 3), nn.Conv2d(1, 3, 3), Odd(lambda x: x[:, 9]), Odd(lambda x: []), Odd(lambda x: x.missing)],
)
def test_a_module_for_other_samples_is_named_before_the_first_round(module):
    x, t = toy()
    with pytest.raises(LearnerError, match=r"The module of agent 'Ann' must accept samples of shape \(3,\)"):
        TorchLearner(module).check(x, t, "Ann")


@pytest.mark.parametrize("module", [nn.Linear(3, 4), Odd(lambda x: x[:, 0]), Odd(lambda x: x[:, :, None])])
def test_a_module_with_other_classes_is_named_before_the_first_round(module):
    x, t = toy()
    with pytest.raises(LearnerError, match=r"agent 'Ann' must give 3 outputs per sample.*Change its last layer"):
        TorchLearner(module).check(x, t, "Ann")


def test_unknown_losses_and_optimisers_are_refused():
    with pytest.raises(LearnerError, match=r"cross_entropy, squared.*'hinge'"):
        TorchLearner(linear(), loss="hinge")
    with pytest.raises(LearnerError, match=r"adam, adamw, sgd.*'rprop'"):
        TorchLearner(linear(), optimiser="rprop")


# --- batch norm -----------------------------------------------------------------------------------


def test_batch_norm_uses_its_running_statistics_for_a_single_sample():
    """One value per channel has no variance: (x - running mean) / sqrt(running variance + eps), as in evaluation."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    learner = TorchLearner(module, epochs=2, batch_size=1)
    one = torch.ones(1, 3)
    expected = module.eval()(one)
    assert torch.equal(learner(one), expected)
    assert module[1].training
    assert torch.equal(learner.snapshot(training=True)(one), expected)
    assert torch.equal(learner.with_features(one)[0], expected)
    assert torch.equal(module[1].running_mean, torch.zeros(4))
    learner.fit(np.ones((1, 3), dtype=np.float32), np.array([[0.0, 1.0]]))
    assert learner.predict(np.ones((1, 3)))[0, 1] > 0.0
    learner(torch.randn(2, 3))
    assert not torch.equal(module[1].running_mean, torch.zeros(4))


def test_batch_norm_of_one_image_with_many_positions_is_as_ever():
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
    image = torch.randn(1, 1, 2, 2)
    expected = copy.deepcopy(module).train()(image)
    assert torch.equal(TorchLearner(module)(image), expected)
