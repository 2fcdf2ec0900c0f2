"""Views of tensors: what they find and copy is what the tensors hold, as long as these stay where they are."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import codistill as cd
from codistill.learners.trained_module import HostViews, renewed

NOT_FINITE = [float("nan"), float("inf"), -float("inf"), 1e30]


def _tensors():
    torch.manual_seed(0)
    image = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    return [image, torch.randn(7, requires_grad=True), torch.tensor(3.0), torch.arange(4), torch.empty(0, 2)]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_number_is_looked_at(value, place):
    tensors = _tensors()
    views = HostViews(tensors)
    assert views.are_finite()
    with torch.no_grad():
        numbers = tensors[place].reshape(-1) if place else tensors[place].permute(0, 2, 3, 1).reshape(-1)
        numbers[-1] = value
    assert not views.are_finite()


def test_integers_are_not_numbers_that_could_be_infinite():
    counter = torch.tensor([2**62])
    assert HostViews([counter]).are_finite()


def test_copies_are_filled_in_again_wherever_the_values_lie():
    tensors = _tensors()
    before = [tensor.detach().clone() for tensor in tensors]
    views = HostViews(tensors)
    copies = views.copies()
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(9)
    for _ in range(2):
        views.fill(copies)
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
        tensors[0].zero_()


def test_views_are_valid_until_a_tensor_moves():
    tensors = _tensors()
    views = renewed(None, tensors)
    assert views is not None
    assert renewed(views, tensors) is views
    assert renewed(views, tensors[:-1]) is not views
    tensors[1].data = tensors[1].data.clone()
    after = renewed(views, tensors)
    assert after is not views
    np.testing.assert_array_equal(after.arrays[1], tensors[1].detach().numpy())
    assert renewed(after, [tensors[0].clone(), *tensors[1:]]) is not after


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.float16),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(4, 7)[:, ::2],
    ],
    ids=["half", "bfloat16", "apart"],
)
def test_what_cannot_be_seen_has_no_views(tensor):
    assert renewed(None, [torch.ones(2), tensor]) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))])  # noqa: S301
def test_a_copy_of_a_learner_has_no_views_of_its_own(copied):
    """They would be arrays that show nothing, and make what is sent to another machine three times as large."""
    learner = cd.TorchLearner(nn.Linear(300, 100))
    before = learner.weights()  # which makes views
    assert len(pickle.dumps(learner)) < 1.5 * sum(array.nbytes for array in before.values())
    other = copied(learner)
    assert other._views is None
    other.load({name: array + 1 for name, array in before.items()})
    for name, array in before.items():
        np.testing.assert_array_equal(other.module.state_dict()[name], array + 1)
        np.testing.assert_array_equal(other.weights()[name], array + 1)
        np.testing.assert_array_equal(learner.weights()[name], array)
