"""Torch learners: steps checked by hand, randomness, modes, state to the bit, weights, features, errors."""

import copy
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from codistill.data.shard import cut
from codistill.errors import LearnerError
from codistill.learners import zoo
from codistill.learners.ability import Ability
from codistill.learners.torch import TorchLearner
from codistill.randomness import seed_libraries
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
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(LearnerError, match=r"linear layer that every sample passes.*Unused does not use its last"):
        TorchLearner(Unused()).features(torch.zeros(2, 3))


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
    [nn.Linear(4, 3), nn.Conv2d(1, 3, 3), Odd(lambda x: x[:, 9]), Odd(lambda x: (x, x)), Odd(lambda x: x.missing)],
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
