"""Short steps of an optimiser: the weights and the state that torch's own steps leave, to the bit."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from codistill.learners.torch import TorchLearner
from codistill.learners.trained_module import ShortSteps, make_optimiser
from codistill.learners.zoo import build

CHOICES = [("adam", 0.0, 0.0), ("adam", 0.0, 0.1), ("adamw", 0.0, 0.1), ("sgd", 0.0, 0.0), ("sgd", 0.9, 0.1)]
every_optimiser = pytest.mark.parametrize(("optimiser", "momentum", "decay"), CHOICES)
X = torch.linspace(0, 1, 8 * 784).reshape(8, 1, 28, 28)
Y = torch.eye(10)[torch.arange(8)]


def _learner(optimiser, momentum, decay, module=None):
    torch.manual_seed(1)
    module = build("lenet5", (1, 28, 28), 10) if module is None else module
    chosen = {"optimiser": optimiser, "momentum": momentum, "weight_decay": decay}
    return TorchLearner(module, lr=0.01, **chosen)


def _by_torch(optimiser, momentum, decay, module=None):
    """The same learner with the same optimiser, given as a function: then torch takes the steps."""

    def make(parameters):
        return make_optimiser(optimiser, parameters, lr=0.01, weight_decay=decay, momentum=momentum)

    return _learner(make, 0.0, 0.0, module)


def _steps(learner, count=3):
    for _ in range(count):
        learner.descend(learner.loss(learner(X), Y))


def _assert_equal(ours, theirs):
    mine, other = ours.state(), theirs.state()
    assert all(torch.equal(value, other["weights"][name]) for name, value in mine["weights"].items())
    assert mine["optimiser"]["state"].keys() == other["optimiser"]["state"].keys()
    for number, table in other["optimiser"]["state"].items():
        assert table.keys() == mine["optimiser"]["state"][number].keys()
        for name, value in table.items():
            found = mine["optimiser"]["state"][number][name]
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


@every_optimiser
def test_steps_are_those_of_torch(optimiser, momentum, decay):
    pair = _learner(optimiser, momentum, decay), _by_torch(optimiser, momentum, decay)
    for learner in pair:
        _steps(learner)
        learner.set_lr(0.1)
        _steps(learner)
    assert isinstance(pair[0]._short_steps, ShortSteps)
    assert pair[1]._short_steps is None
    _assert_equal(*pair)


@every_optimiser
def test_they_go_on_where_the_state_was_replaced(optimiser, momentum, decay):
    pair = [_learner(optimiser, momentum, decay), _by_torch(optimiser, momentum, decay)]
    for number, learner in enumerate(pair):
        _steps(learner)
        learner.set_lr(0.5)
        saved = copy.deepcopy(learner.state())
        learner.set_lr(1.0)
        _steps(learner)
        learner.restore(saved)  # a new optimiser, and the learning rate of before
        _steps(learner)
        learner.set_lr(0.2)
        _steps(learner)
        go_back = learner.kept()
        _steps(learner)
        go_back()  # the same one, with tensors of before
        _steps(learner)
        go_back = learner.kept()
        torch.manual_seed(2)
        learner.reset()
        _steps(learner)
        go_back()  # to the optimiser before this one
        _steps(learner)
        learner.optimiser.load_state_dict(copy.deepcopy(learner.optimiser.state_dict()))  # behind its back
        _steps(learner)
        pair[number] = copy.deepcopy(learner)
        _steps(learner)  # which leaves the copy alone
        _steps(pair[number], 2)
    _assert_equal(*pair)


def test_a_learner_that_is_offloaded_keeps_nothing_of_its_optimiser():
    learner = _learner("adam", 0.0, 0.0)
    _steps(learner)
    learner.kept()
    optimiser = weakref.ref(learner.optimiser)
    moment = weakref.ref(next(iter(learner.optimiser.state.values()))["exp_avg"])
    learner.offload()
    gc.collect()
    assert optimiser() is None
    assert moment() is None


def test_a_return_covers_what_an_optimiser_of_a_users_own_keeps():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("gradients", []).append(parameter.grad.clone())
            return super().step(closure)

    learner = _learner(lambda parameters: Counting(parameters, lr=0.1), 0.0, 0.0)
    _steps(learner, 2)
    before = copy.deepcopy(learner.state())
    go_back = learner.kept()
    for _ in range(2):
        _steps(learner, 2)
        go_back()
        after = learner.state()
        assert all(torch.equal(value, after["weights"][name]) for name, value in before["weights"].items())
        for number, table in before["optimiser"]["state"].items():
            found = after["optimiser"]["state"][number]["gradients"]
            assert len(found) == len(table["gradients"]) == 2
            assert all(torch.equal(*pair) for pair in zip(found, table["gradients"], strict=True))


class Halves(nn.Module):
    """Two layers, of which every other pass uses only one."""

    def __init__(self, passes):
        super().__init__()
        self.first, self.second, self.passes = nn.Linear(784, 10), nn.Linear(784, 10), passes

    def forward(self, x):
        self.passes += 1
        x = x.flatten(1)
        return self.first(x) + self.second(x) if self.passes % 2 else self.first(x)


@every_optimiser
def test_a_weight_without_a_gradient_stays(optimiser, momentum, decay):
    torch.manual_seed(2)
    module = Halves(passes=0)
    pair = [_learner(optimiser, momentum, decay, copy.deepcopy(module)),
            _by_torch(optimiser, momentum, decay, copy.deepcopy(module))]  # fmt: skip
    for learner in pair:
        _steps(learner, 1)
        before = learner.module.second.weight.clone()
        _steps(learner, 1)
        assert torch.equal(learner.module.second.weight, before)
        _steps(learner, 3)
    _assert_equal(*pair)


@pytest.mark.parametrize(("optimiser", "decay"), [("adam", 0.0), ("adamw", 0.1)])
def test_a_weight_without_a_gradient_in_the_first_step(optimiser, decay):
    torch.manual_seed(2)
    module = Halves(passes=1)
    pair = [_learner(optimiser, 0.0, decay, copy.deepcopy(module)),
            _by_torch(optimiser, 0.0, decay, copy.deepcopy(module))]  # fmt: skip
    for learner in pair:
        _steps(learner, 1)
        go_back = learner.kept()  # to a state in which only one of the layers has moments
        _steps(learner, 4)
        go_back()
        _steps(learner, 4)
    _assert_equal(*pair)


@every_optimiser
def test_an_optimiser_that_starts_afresh(optimiser, momentum, decay):
    pair = _learner(optimiser, momentum, decay), _by_torch(optimiser, momentum, decay)
    for learner in pair:
        learner.reset_optimiser()  # before there is one
        _steps(learner)
        learner.set_lr(0.1)
        learner.reset_optimiser()
        assert not learner.state()["optimiser"]["state"]
        assert learner.state()["optimiser"]["param_groups"][0]["lr"] == pytest.approx(0.001)
        go_back = learner.kept()
        _steps(learner)
        learner.reset_optimiser()
        _steps(learner, 2)
        go_back()
        _steps(learner)
    _assert_equal(*pair)


@every_optimiser
def test_weights_of_two_kinds(optimiser, momentum, decay):
    torch.manual_seed(3)

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(784, 5), nn.Linear(5, 10).double()

        def forward(self, x):
            return self.second(self.first(x.flatten(1)).double()).float()

    module = Mixed()
    pair = [_learner(optimiser, momentum, decay, copy.deepcopy(module)),
            _by_torch(optimiser, momentum, decay, copy.deepcopy(module))]  # fmt: skip
    for learner in pair:
        _steps(learner)
    _assert_equal(*pair)
