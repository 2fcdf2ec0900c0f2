"""The part of the common test set that an evaluation is made on."""

import numpy as np

import codistill as cd
from codistill.core.rng import generator
from codistill.learners.zoo import build


def _description(seed):
    x, y = np.arange(40.0, dtype=np.float32).reshape(20, 2), np.arange(20) % 2
    agents = [cd.Agent(name, cd.TorchLearner(build("logistic", (2,), 2)), x, y) for name in "ab"]
    return cd.Federation(agents, cd.FD(), test=(x, y), seed=seed).description


def test_a_part_is_drawn_by_the_seed_and_in_the_order_of_the_test_set():
    description = _description(seed=3)
    x, y = description.test
    chosen = np.sort(generator(3, "evaluation").choice(20, 6, replace=False))
    for _ in range(2):  # the same in the next round
        inputs, labels = description.tested(6)
        np.testing.assert_array_equal(inputs, x[chosen])
        np.testing.assert_array_equal(labels, y[chosen])
    assert not np.array_equal(_description(seed=4).tested(6)[0], inputs)


def test_all_samples_are_taken_where_no_fewer_are_asked_for():
    description = _description(seed=0)
    for samples in (None, 20, 21):
        assert description.tested(samples)[0] is description.test[0]
