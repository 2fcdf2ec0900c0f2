"""Classes that the same agents have are aggregated at once: to the bit as one by one."""

import numpy as np
import pytest
import torch

from codistill.protocols import parts
from codistill.protocols.fd import means_of_others
from codistill.wire.message import Message

NAMES = ("a", "b", "c", "d")


def _heard(seed, seen):
    rng = np.random.default_rng(seed)
    return {
        name: Message.of(means=rng.normal(size=(6, 6)).astype(np.float32), seen=np.array(row, dtype=bool))
        for name, row in zip(NAMES, seen, strict=True)
    }


SEEN = [[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 1, 0]]


def test_classes_are_grouped_by_who_has_them():
    groups = [(names, classes.tolist()) for names, classes in parts.classes_by_holders(_heard(0, SEEN))]
    assert groups == [(["a", "b", "c", "d"], [0]), (["a", "b", "c"], [1]), (["b"], [2]), (["a", "d"], [4])]
    everyone = [(names, classes.tolist()) for names, classes in parts.classes_by_holders(_heard(0, np.ones((4, 6))))]
    assert everyone == [(list(NAMES), [0, 1, 2, 3, 4, 5])]
    assert parts.classes_by_holders({}) == []


@pytest.mark.parametrize("kind", parts.PLAIN_KINDS)
@pytest.mark.parametrize("outputs", [True, False])
@pytest.mark.parametrize("seen", [SEEN, np.ones((4, 6)).tolist()])
def test_all_classes_at_once_equal_one_by_one(kind, outputs, seen):
    heard, aggregation = _heard(1, seen), parts.Aggregation(kind=kind, outputs=outputs)
    at_once = {}
    for holders, classes in parts.classes_by_holders(heard):
        held = {name: heard[name]["means"][classes] for name in holders}
        for name, targets in means_of_others(aggregation, held, NAMES).items():
            at_once |= {(name, int(c)): target for c, target in zip(classes, targets, strict=True)}
    one_by_one = {}
    for c in range(6):
        held = {name: message["means"][[c]] for name, message in heard.items() if message["seen"][c]}
        for name, targets in means_of_others(aggregation, held, NAMES).items():
            one_by_one[name, c] = targets[0]
    assert at_once.keys() == one_by_one.keys()
    assert all(np.array_equal(at_once[key], one_by_one[key]) for key in at_once)


@pytest.mark.parametrize(("known", "wanted"), [([1, 1, 1], [0, 1, 2, 3]), ([1, 0, 1], [0, 1, 3]), ([0, 0, 0], [])])
def test_targets_of_the_samples_whose_class_has_one(known, wanted):
    y = torch.eye(3)[[2, 0, 1, 2]]
    state = {"told": np.arange(6, dtype=np.float32).reshape(3, 2), "known": np.array(known, dtype=bool)}
    rows, targets = parts.class_targets(state, y)
    outputs = torch.arange(8.0).reshape(4, 2)
    assert torch.equal(parts.chosen(outputs, rows), outputs[wanted])
    assert torch.equal(targets, torch.from_numpy(state["told"])[y.argmax(dim=1)[wanted]])


def test_before_the_first_exchange_no_sample_has_a_target():
    rows, targets = parts.class_targets({}, torch.eye(3))
    assert len(targets) == 0
    assert len(parts.chosen(torch.ones(3, 2), rows)) == 0
