"""The zoo: sizes derived from the papers' tables, shapes, randomness, rebuilding, and every error."""

import copy
import dataclasses
import json
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.nn import functional

from codistill.core.errors import LearnerError
from codistill.learners import architectures, zoo
from codistill.learners.zoo import flat_size

SMALLEST_IMAGE = {
    "cnn": 4,
    "digits_cnn": 4,
    "fedgen_cnn": 1,
    "femnist_cnn": 16,
    "lenet5": 12,
    "lenet5_gap": 4,
    "lenet5_tanh": 12,
    "resnet14": 1,
    "resnet18": 1,
    "resnet2": 1,
    "resnet34": 1,
    "resnet8": 1,
    "resnet9": 8,
    "vgg16": 32,
    "vgg9": 8,
    "wresnet10_1": 1,
    "wresnet10_2": 1,
    "wresnet16_1": 1,
}
ANY_SHAPE = ["logistic", "mlp"]
NAMES = sorted([*SMALLEST_IMAGE, *ANY_SHAPE])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(architectures, "_entries", dict(architectures._entries))


def small_shape(name):
    side = max(8, SMALLEST_IMAGE.get(name, 1))
    return (3, side, side)


@cache
def small(name):
    """One small module of each architecture, for tests that leave it as it is."""
    torch.manual_seed(0)
    return zoo.build(name, small_shape(name), 3).eval()


def seeded_batch(shape, n=4):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(1))


def outline(name, shape, classes, **options):
    """A module without memory: for tests that look at shapes only."""
    with torch.device("meta"):
        return zoo.build(name, shape, classes, **options).eval()


def count(name, shape, classes, **options):
    return sum(p.numel() for p in outline(name, shape, classes, **options).parameters())


def conv(before, channels, kernel, bias=True):
    return before * channels * kernel**2 + bias * channels


def norm(channels):
    return 2 * channels


def linear(before, width):
    return (before + 1) * width


def test_these_architectures_are_registered():
    assert zoo.names() == NAMES


# --- parameter counts ---------------------------------------------------------------------------------


def test_simple_models_have_the_sizes_of_their_docstrings():
    assert count("logistic", (1, 28, 28), 10) == linear(784, 10) == 7_850
    assert count("mlp", (1, 28, 28), 10) == linear(784, 200) + linear(200, 200) + linear(200, 10) == 199_210
    assert count("mlp", (5,), 2, hidden=(7,)) == linear(5, 7) + linear(7, 2)
    assert count("mlp", (5,), 2, hidden=()) == linear(5, 2)
    expected = conv(1, 16, 3) + conv(16, 32, 3) + linear(32 * 7 * 7, 128) + linear(128, 10)
    assert count("cnn", (1, 28, 28), 10) == expected == 206_922
    assert count("cnn", (1, 8, 8), 10, width=2) == conv(1, 2, 3) + conv(2, 4, 3) + linear(16, 128) + 1290


@pytest.mark.parametrize("name", ["lenet5", "lenet5_tanh"])
def test_lenet5_has_its_61706_parameters(name):
    expected = conv(1, 6, 5) + conv(6, 16, 5) + linear(16 * 5 * 5, 120) + linear(120, 84) + linear(84, 10)
    assert count(name, (1, 28, 28), 10) == expected == 61_706


def test_lenet5_gap_has_its_30986_parameters_on_every_image():
    assert count("lenet5_gap", (1, 28, 28), 10) == count("lenet5_gap", (1, 9, 20), 10) == 30_986


def test_table_vii():
    trunk = conv(1, 32, 3, False) + conv(32, 64, 3, False) + conv(64, 64, 3, False)
    assert count("femnist_cnn", (1, 28, 28), 26) == trunk + linear(256, 512) + linear(512, 26) == 200_506


def test_table_viii():
    widths = (3, 32, 64, 128, 128, 256, 256)
    trunk = sum(conv(before, after, 3) for before, after in pairwise(widths))
    expected = trunk + linear(4096, 512) + linear(512, 512) + linear(512, 10)
    assert count("vgg9", (3, 32, 32), 10) == expected == 3_491_530
    kinds = {nn.Dropout: [], nn.Dropout2d: []}
    for layer in small("vgg9").modules():
        if type(layer) in kinds:
            kinds[type(layer)].append(layer.p)
    assert kinds == {nn.Dropout2d: [0.05], nn.Dropout: [0.1, 0.1]}


def test_table_ix():
    trunk = conv(3, 64, 5) + norm(64) + conv(64, 64, 5) + norm(64) + conv(64, 128, 5) + norm(128)
    head = linear(6272, 2048) + norm(2048) + linear(2048, 512) + norm(512) + linear(512, 10)
    assert count("digits_cnn", (3, 28, 28), 10) == trunk + head == 14_219_210


def test_table_ix_in_a_quarter_of_its_width():
    trunk = conv(3, 16, 5) + norm(16) + conv(16, 16, 5) + norm(16) + conv(16, 32, 5) + norm(32)
    head = linear(32 * 7 * 7, 512) + norm(512) + linear(512, 128) + norm(128) + linear(128, 10)
    assert count("digits_cnn", (3, 28, 28), 10, width=0.25) == trunk + head == 892_154


def test_the_network_of_fedgen():
    trunk = conv(1, 6, 3) + norm(6) + conv(6, 16, 3) + norm(16)
    assert count("fedgen_cnn", (1, 28, 28), 26) == trunk + linear(784, 32) + linear(32, 26) == 26_962
    assert small("fedgen_cnn")[-2].out_features == 32  # no activation between the features and the head
    assert outline("fedgen_cnn", (1, 28, 28), 26, features=8)[-1].in_features == 8


@pytest.mark.parametrize(("name", "n"), [("resnet2", 0), ("resnet8", 1), ("resnet14", 2)])
def test_cifar_resnets_have_6n_plus_2_layers_and_shortcuts_without_parameters(name, n):
    expected = conv(3, 16, 3, False) + norm(16)
    for before, width in [(16, 16), (16, 32), (32, 64)]:
        if n:
            expected += conv(before, width, 3, False) + conv(width, width, 3, False) + 2 * norm(width)
        expected += max(n - 1, 0) * 2 * (conv(width, width, 3, False) + norm(width))
    module = zoo.build(name, (3, 32, 32), 10)
    assert sum(p.numel() for p in module.parameters()) == expected + linear(module[-1].in_features, 10)
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in module.modules()) == 6 * n + 2


@pytest.mark.parametrize(("name", "n", "k"), [("wresnet10_1", 1, 1), ("wresnet10_2", 1, 2), ("wresnet16_1", 2, 1)])
def test_wide_resnets_have_6n_plus_4_layers(name, n, k):
    expected = conv(3, 16, 3, False) + norm(64 * k) + linear(64 * k, 10)
    for before, width in [(16, 16 * k), (16 * k, 32 * k), (32 * k, 64 * k)]:
        expected += norm(before) + conv(before, width, 3, False) + norm(width) + conv(width, width, 3, False)
        expected += conv(before, width, 1, False) if before != width else 0
        expected += (n - 1) * 2 * (norm(width) + conv(width, width, 3, False))
    assert count(name, (3, 32, 32), 10) == expected
    module = small(name)
    assert module[-1].in_features == 64 * k
    # Zagoruyko & Komodakis count one layer for the projections of a stage, also where it is the identity.
    threes = sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in module.modules())
    assert threes + 3 == 6 * n + 4


def test_resnet9_is_the_size_that_berdoz_et_al_give():
    assert 2.4e6 <= count("resnet9", (1, 28, 28), 10) < 2.5e6
    assert small("resnet9")[-1].in_features == 128
    assert zoo.build("resnet9", (1, 8, 8), 10, features=32)[-1].in_features == 32


def test_large_resnets_have_their_usual_sizes():
    assert count("resnet18", (3, 32, 32), 10) == 11_173_962
    assert count("resnet34", (3, 32, 32), 10) == 21_282_122


def test_resnet18_with_256_features_is_the_size_that_berdoz_et_al_give():
    without = count("resnet18", (3, 32, 32), 10)
    with_features = count("resnet18", (3, 32, 32), 10, features=256)
    assert with_features - without == linear(512, 256) + linear(256, 10) - linear(512, 10)
    assert round(with_features / 1e6, 1) == 11.3


def test_vgg16_has_16_layers_with_or_without_batch_norm():
    plain = zoo.build("vgg16", (3, 32, 32), 10, batch_norm=False, dropout=0.0)
    normed = outline("vgg16", (3, 32, 32), 10)
    for module in (plain, normed):
        assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in module.modules()) == 16
    channels = sum(layer.out_channels for layer in plain.modules() if isinstance(layer, nn.Conv2d))
    difference = sum(p.numel() for p in normed.parameters()) - sum(p.numel() for p in plain.parameters())
    assert difference == norm(channels)
    with torch.no_grad():
        logits = plain(seeded_batch((3, 32, 32), 2))
    assert logits.std() > 1e-3  # the signal survives thirteen layers without batch norm


# --- what every architecture does ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("channels", "taller", "wider", "classes"), [(1, 5, 0, 10), (4, 1, 8, 2)])
def test_output_has_one_column_for_each_class(name, channels, taller, wider, classes):
    side = small_shape(name)[1]
    shape = (channels, side + taller, side + wider)
    logits = outline(name, shape, classes)(torch.zeros(2, *shape, device="meta"))
    assert logits.shape == (2, classes)


@pytest.mark.parametrize("name", ANY_SHAPE)
@pytest.mark.parametrize("shape", [(5,), (4, 3), (2, 3, 4, 5)])
def test_tables_and_any_other_shape_are_flattened(name, shape):
    assert zoo.build(name, shape, 3)(seeded_batch(shape)).shape == (4, 3)


@pytest.mark.parametrize("name", NAMES)
def test_it_ends_in_a_linear_layer_and_the_rest_gives_its_features(name):
    module, x = small(name), seeded_batch(small_shape(name))
    *_, last = (layer for layer in module.modules() if not list(layer.children()))
    assert last is module[-1]
    assert isinstance(last, nn.Linear)
    assert last.out_features == 3
    with torch.no_grad():
        features = module[:-1](x)
        assert features.shape == (4, last.in_features)
        logits = module(x)
        assert logits.isfinite().all()
        torch.testing.assert_close(last(features), logits)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_weights_and_untouched_statistics(name):
    torch.manual_seed(0)
    again = zoo.build(name, small_shape(name), 3)
    assert again.training
    assert all(layer.training for layer in again.modules())
    expected = small(name).state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in again.state_dict().items())
    for layer in again.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            assert layer.num_batches_tracked == 0
            assert not layer.running_mean.any()


def test_building_draws_random_numbers():
    torch.manual_seed(0)
    first, second = zoo.build("cnn", (1, 8, 8), 3), zoo.build("cnn", (1, 8, 8), 3)
    assert not torch.equal(first[0].weight, second[0].weight)


def test_measuring_a_trunk_draws_no_random_number_and_moves_no_statistic():
    trunk = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten())
    before, randomness = copy.deepcopy(trunk.state_dict()), torch.get_rng_state()
    assert flat_size(trunk, (2, 5, 6)) == 3 * 3 * 4
    assert torch.equal(torch.get_rng_state(), randomness)
    assert all(torch.equal(value, before[key]) for key, value in trunk.state_dict().items())
    assert trunk.training


@pytest.mark.parametrize("name", sorted(SMALLEST_IMAGE))
def test_channels_last_gives_the_same_logits(name):
    module, x = small(name), seeded_batch(small_shape(name))
    other = copy.deepcopy(module).to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = module(x)
        logits = other(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter_and_repeat_to_the_bit(name):
    x, y = seeded_batch(small_shape(name)), torch.tensor([0, 1, 2, 0])
    gradients = []
    for _ in range(2):
        module = copy.deepcopy(small(name)).train()
        torch.manual_seed(0)  # dropout
        functional.cross_entropy(module(x), y).backward()
        gradients.append([p.grad for p in module.parameters()])
    first, second = gradients
    assert all(gradient is not None and gradient.isfinite().all() for gradient in first)
    # A bias before batch norm has no effect, so only weights must have a gradient that is not zero.
    assert all(gradient.any() for gradient in first if gradient.dim() > 1)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_rebuilt_from_its_architecture_and_its_weights(name):
    module, x = small(name), seeded_batch(small_shape(name))
    assert (module.architecture.name, module.architecture.shape) == (name, small_shape(name))
    travelled = json.loads(json.dumps(dataclasses.asdict(module.architecture)))
    options = travelled.pop("options")
    rebuilt = zoo.build(**travelled, **options)
    assert rebuilt.architecture == module.architecture
    rebuilt.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.equal(rebuilt.eval()(x), module(x))


def test_architecture_holds_every_option():
    module = zoo.build("mlp", [2, 3], 4, hidden=[5, 6])
    expected = zoo.Architecture(name="mlp", shape=(2, 3), classes=4, options={"hidden": (5, 6)})
    assert module.architecture == expected
    assert [layer.out_features for layer in module if isinstance(layer, nn.Linear)] == [5, 6, 4]
    assert zoo.build("mlp", (2,), 4).architecture.options == {"hidden": (200, 200)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        expected.classes = 5


def test_the_size_can_be_known_before_memory_is_spent():
    with torch.device("meta"):
        assert count("mlp", (10,), 3, hidden=(10**6, 10**6)) > 10**12


@pytest.mark.parametrize("name", NAMES)
def test_describe_is_the_first_line_of_the_docstring(name):
    line = zoo.describe(name)
    assert line.endswith(".")
    assert architectures._entries[name].builder.__doc__.startswith(line)


# --- one's own architectures --------------------------------------------------------------------------


def test_a_user_registers_a_builder(own_registry):
    @zoo.register_architecture("mine")
    def mine(shape, classes, width=2, *, kind="plain"):
        return nn.Sequential(nn.Linear(shape[0], width), nn.Linear(width, classes))

    assert "mine" in zoo.names()
    assert zoo.describe("mine") == ""
    module = zoo.build("mine", (3,), 4, width=5)
    assert module.architecture == zoo.Architecture("mine", (3,), 4, {"width": 5, "kind": "plain"})
    assert zoo.register_architecture("mine")(mine) is mine


def test_a_user_registers_a_module_class(own_registry):
    @zoo.register_architecture("mine", smallest_image=2)
    class Mine(nn.Linear):
        """My own."""

        def __init__(self, shape, classes, width: int = 1):
            super().__init__(shape[0], classes)

    assert zoo.describe("mine") == "My own."
    assert zoo.build("mine", (3, 2, 2), 4).out_features == 4
    with pytest.raises(LearnerError, match="at least 2 x 2"):
        zoo.build("mine", (3, 2, 1), 4)
    with pytest.raises(LearnerError, match=r"width: int = 1"):
        zoo.build("mine", (3, 2, 2), 4, width=1.5)


def test_a_name_stands_for_one_builder(own_registry):
    with pytest.raises(LearnerError, match=r"'lenet5' is already codistill\.learners\.zoo\.lenet5"):
        zoo.register_architecture("lenet5")(lambda shape, classes: nn.Identity())
    assert isinstance(zoo.build("lenet5", (1, 12, 12), 2)[-1], nn.Linear)


@pytest.mark.parametrize(
    "builder",
    [
        lambda shape: nn.Identity(),
        lambda shape, classes, width: nn.Identity(),
        lambda shape, classes, **options: nn.Identity(),
        lambda shape, classes, layer=nn.ReLU: nn.Identity(),
    ],
)
def test_a_builder_takes_shape_classes_and_options_with_defaults(own_registry, builder):
    with pytest.raises(LearnerError, match="named options with plain defaults"):
        zoo.register_architecture("mine")(builder)
    assert "mine" not in zoo.names()


def test_a_builder_returns_a_module(own_registry):
    zoo.register_architecture("mine")(lambda shape, classes: "not a module")
    with pytest.raises(LearnerError, match=r"must return a torch\.nn\.Module\. Found: str\."):
        zoo.build("mine", (3,), 2)


@pytest.mark.parametrize("hint", [Any, "OnlyATypeCheckerSeesIt", object, None])
def test_an_option_of_any_type_is_still_a_plain_value(own_registry, hint):
    def mine(shape, classes, free=0):
        return nn.Identity()

    if hint is not None:
        mine.__annotations__["free"] = hint
    zoo.register_architecture("mine")(mine)
    assert zoo.build("mine", (3,), 2, free=[1, ["a", None]]).architecture.options == {"free": (1, ("a", None))}
    for wrong in [float("nan"), {1: 2}, (torch.ones(1),), nn.ReLU]:
        with pytest.raises(LearnerError, match="a value of its type"):
            zoo.build("mine", (3,), 2, free=wrong)


def test_each_kind_of_annotation(own_registry):
    @zoo.register_architecture("mine")
    def mine(
        shape,
        classes,
        rate: float = 0.5,
        flag: bool = False,
        kind: Literal["a", "b"] = "a",
        pair: tuple[int, str] = (1, "x"),
        size: int | None = None,
    ):
        return nn.Identity()

    zoo.build("mine", (3,), 2, rate=1, flag=True, kind="b", pair=[2, "y"], size=3)
    for wrong in [
        {"rate": "fast"},
        {"rate": True},
        {"flag": 1},
        {"kind": "c"},
        {"pair": (1, 2)},
        {"pair": (1, "x", 2)},
        {"pair": 1},
        {"size": 1.0},
        {"size": True},
    ]:
        with pytest.raises(LearnerError, match="takes these options"):
            zoo.build("mine", (3,), 2, **wrong)


# --- errors -------------------------------------------------------------------------------------------


def test_an_unknown_name_is_answered_with_its_neighbour():
    with pytest.raises(LearnerError, match=r"'lenet-5'\. Did you mean 'lenet5'\?"):
        zoo.build("lenet-5", (1, 28, 28), 10)
    with pytest.raises(LearnerError, match="Known: cnn, "):
        zoo.describe("transformer")


def test_an_unknown_option_is_answered_with_those_that_exist():
    with pytest.raises(LearnerError) as caught:
        zoo.build("mlp", (4,), 2, hiden=(3,))
    assert caught.value.must == "'mlp' takes these options: hidden: tuple[int, ...] = (200, 200)."
    assert caught.value.do == "Did you mean 'hidden'?"
    with pytest.raises(LearnerError, match="'logistic' takes no options"):
        zoo.build("logistic", (4,), 2, hidden=(3,))


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("mlp", {"hidden": 200}),
        ("mlp", {"hidden": (200, "200")}),
        ("mlp", {"hidden": (True,)}),
        ("resnet18", {"features": "256"}),
        ("resnet9", {"features": None}),
        ("vgg16", {"batch_norm": 1}),
        ("vgg16", {"dropout": float("inf")}),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(name, option):
    (key,) = option
    with pytest.raises(LearnerError) as caught:
        zoo.build(name, (1, 32, 32), 2, **option)
    assert f"{key}: " in caught.value.must
    assert caught.value.found.startswith(f"{key}=")


@pytest.mark.parametrize(
    ("name", "option", "reason"),
    [
        ("mlp", {"hidden": (3, 0)}, "'hidden' must be at least 1"),
        ("cnn", {"width": 0}, "'width' must be at least 1"),
        ("digits_cnn", {"width": 0.001}, "at least one channel"),
        ("fedgen_cnn", {"features": 0}, "'features' must be at least 1"),
        ("resnet18", {"features": -1}, "'features' must be at least 1"),
        ("vgg16", {"dropout": 2.0}, "between 0 and 1"),
    ],
)
def test_an_option_of_a_senseless_value_is_refused(name, option, reason):
    with pytest.raises(LearnerError, match=reason):
        zoo.build(name, (1, 32, 32), 2, **option)


@pytest.mark.parametrize("name", sorted(SMALLEST_IMAGE))
def test_the_smallest_image_is_said_and_is_the_smallest(name):
    side = SMALLEST_IMAGE[name]
    assert outline(name, (1, side, side), 2)(torch.zeros(1, 1, side, side, device="meta")).shape == (1, 2)
    with pytest.raises(LearnerError, match=f"at least {side} x {side}"):
        zoo.build(name, (64,), 2)
    if side > 1:
        shape = (1, side, side - 1)
        with pytest.raises(LearnerError, match=f"at least {side} x {side}"):
            zoo.build(name, shape, 2)
        with torch.device("meta"), pytest.raises(RuntimeError, match=r"too small|size"):
            architectures._entries[name].builder(shape, 2)(torch.zeros(1, *shape))


def test_a_shape_that_does_not_fit_is_answered_with_architectures_that_do():
    with pytest.raises(LearnerError, match=r"\(64,\)\. This shape suits: logistic, mlp\."):
        zoo.build("lenet5", (64,), 10)


@pytest.mark.parametrize("shape", [(), (0,), (1, -1, 8), (1.5,), 64, None, "28"])
def test_a_shape_is_positive_integers(shape):
    with pytest.raises(LearnerError, match="shape of one sample"):
        zoo.build("mlp", shape, 10)


@pytest.mark.parametrize("classes", [0, -1, 2.0, "ten", None])
def test_the_number_of_classes_is_a_positive_integer(classes):
    with pytest.raises(LearnerError, match="number of classes"):
        zoo.build("mlp", (3,), classes)
