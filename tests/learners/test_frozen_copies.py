"""Frozen copies: the model as it was, whatever became of it and of copies before."""

import copy

import pytest
import torch
from torch import nn

from codistill.learners.torch import TorchLearner
from codistill.learners.trained_module import FrozenCopies


def _module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _change(module):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)


def _same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left.state_dict().values(), right.state_dict().values(), strict=True))


def test_a_copy_that_is_not_used_takes_the_next_weights():
    module = _module()
    copies = FrozenCopies(module)
    first = copies.take(training=True)
    used = first.module
    assert not any(parameter.requires_grad for parameter in used.parameters())
    assert _same(used, module)
    _change(module)
    assert not _same(used, module)
    del first
    second = copies.take(training=False)
    assert second.module is used
    assert not any(part.training for part in used.modules())
    assert _same(used, module)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_copies_in_use_are_apart_from_one_another():
    module = _module()
    copies = FrozenCopies(module)
    before, first = copy.deepcopy(module), copies.take(training=True)
    _change(module)
    second = copies.take(training=True)
    assert first.module is not second.module
    assert _same(first.module, before)
    assert _same(second.module, module)


def test_what_a_module_of_a_user_keeps_is_copied_too():
    class Own(nn.Linear):
        factor = 1.0

        def forward(self, x):
            return self.factor * super().forward(x)

    module = Own(3, 2)
    copies = FrozenCopies(module)
    _ = copies.take(training=True)
    module.factor = 5.0
    assert copies.take(training=True).module.factor == 5.0


def test_forgotten_copies_are_not_used_again():
    copies = FrozenCopies(_module())
    taken = copies.take(training=True)
    used = taken.module
    copies.forget()
    del taken
    assert copies.take(training=True).module is not used


@pytest.mark.parametrize("training", [True, False])
def test_a_snapshot_of_a_learner_is_the_model_as_it_was(training):
    learner, x = TorchLearner(_module(), lr=0.1), torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        expected = copy.deepcopy(learner.module).train(training)(x)
        snapshot = learner.snapshot(training=training)
        learner.descend(learner(x).square().sum())
        assert torch.equal(snapshot(x), expected)
        assert not snapshot(x).requires_grad
