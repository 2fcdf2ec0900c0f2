import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codistill.core.errors import CodistillError, DataError, RecipeError
from codistill.data.partition import (
    KINDS,
    ById,
    ClassesPerAgent,
    Dirichlet,
    Iid,
    LabelSplit,
    Unequal,
    counts,
)

ALL = [
    Iid(),
    Unequal(),
    Unequal(weights=(1.0, 2.0, 3.0, 4.0)),
    Unequal(spread=0.0),
    Dirichlet(alpha=0.1),
    Dirichlet(alpha=10.0, min_size=3),
    Dirichlet(alpha=0.05, balance=True),
    ClassesPerAgent(k=2),
    ClassesPerAgent(k=4),
    LabelSplit(alpha=0.0),
    LabelSplit(alpha=0.3),
    LabelSplit(alpha=1.0),
    ById(id="writer"),
]


def rng(seed=0):
    return np.random.default_rng(seed)


def split(partition, y, agents, seed=0, **more):
    return partition.split(np.asarray(y), agents, rng(seed), **more)


def assert_complete(parts, total):
    for part in parts:
        assert len(part) > 0
        assert np.all(np.diff(part) > 0)
    assert sorted(np.concatenate(parts)) == list(range(total))


@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("partition", ALL, ids=str)
@given(
    samples=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), min_size=1, max_size=60),
    agents=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_every_sample_is_handed_out_once_or_the_split_is_refused(partition, samples, agents, seed):
    y, writers = np.array(samples).T
    try:
        parts = split(partition, y, agents, seed, ids={"writer": writers}, classes=6)
    except CodistillError:
        return
    assert len(parts) == agents
    assert_complete(parts, len(y))


@pytest.mark.parametrize("partition", ALL, ids=str)
def test_a_usual_split_works_is_repeatable_and_follows_the_seed(partition):
    y = np.arange(400) % 8
    ids = {"writer": np.repeat(np.arange(40), 10)}
    first, same, other = (split(partition, y, 4, seed, ids=ids, classes=8) for seed in (0, 0, 1))
    assert_complete(first, 400)
    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    if partition != LabelSplit(alpha=0.0):
        assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_parts_differ_by_at_most_one_sample():
    assert sorted(len(part) for part in split(Iid(), np.zeros(11, int), 4)) == [2, 3, 3, 3]


def test_given_weights_give_those_sizes():
    parts = split(Unequal(weights=(1.0, 2.0, 7.0)), np.zeros(1000, int), 3)
    assert [len(part) for part in parts] == [100, 200, 700]


def test_random_sizes_are_log_normal():
    """With n agents the sample deviation of log sizes has the error σ / sqrt(2 n)."""
    sizes = [len(part) for part in split(Unequal(spread=0.5), np.zeros(400_000, int), 400)]
    assert np.log(sizes).std() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(800))
    equal = [len(part) for part in split(Unequal(spread=0.0), np.zeros(400, int), 4)]
    assert equal == [100] * 4


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 100.0])
def test_dirichlet_shares_have_the_second_moment_of_the_distribution(alpha):
    """For p ~ Dir(α, …, α) over A agents, E Σ p² = A · α(α+1) / (Aα(Aα+1)) = (α+1) / (Aα+1).

    A value in [1/A, 1] with mean m has a variance of at most (1 - m)(m - 1/A), and the shares are rounded
    to 1/200, which moves Σ p² by at most 2/200 + A/200².
    """
    agents, classes, size = 4, 400, 200
    y = np.repeat(np.arange(classes), size)
    table = counts(y, split(Dirichlet(alpha=alpha), y, agents), classes)
    concentration = ((table / size) ** 2).sum(axis=0).mean()
    expected = (alpha + 1) / (agents * alpha + 1)
    error = math.sqrt((1 - expected) * (expected - 1 / agents) / classes)
    assert concentration == pytest.approx(expected, abs=5 * error + 2 / size + agents / size**2)


def test_dirichlet_with_a_large_alpha_is_nearly_iid():
    """Var p = (1/A)(1 - 1/A) / (Aα + 1); rounding adds at most one sample."""
    agents, size, alpha = 4, 1000, 1e6
    y = np.repeat(np.arange(10), size)
    table = counts(y, split(Dirichlet(alpha=alpha), y, agents), 10)
    deviation = size * math.sqrt(0.25 * 0.75 / (agents * alpha + 1))
    assert np.abs(table - size / agents).max() <= 1 + 6 * deviation


def test_a_balanced_dirichlet_gives_no_more_to_who_has_an_even_part():
    """An agent grows by at most one class beyond 1/K of all samples: its size before its last class is below that."""
    y = np.repeat(np.arange(26), 100)
    agents, even = 20, 26 * 100 / 20
    plain = [len(part) for part in split(Dirichlet(alpha=0.05), y, agents)]
    assert max(plain) > even + 100  # what is not balanced is beyond that bound
    for seed in range(10):
        table = counts(y, split(Dirichlet(alpha=0.05, balance=True), y, agents, seed), 26)
        sizes = table.sum(axis=1)
        assert sizes.sum() == len(y)
        assert (sizes - table.max(axis=1) < even + 1).all()
        assert sizes.max() <= even + 100 + 1


def test_dirichlet_redraws_until_every_agent_has_enough():
    y = np.repeat(np.arange(2), 50)
    for seed in range(20):
        parts = split(Dirichlet(alpha=0.3, min_size=15), y, 4, seed)
        assert min(map(len, parts)) >= 15


@settings(max_examples=20, deadline=None)
@given(classes=st.integers(1, 8), agents=st.integers(1, 6), k=st.integers(1, 8), seed=st.integers(0, 1000))
def test_every_agent_holds_k_classes_and_every_class_has_a_holder(classes, agents, k, seed):
    y = np.repeat(np.arange(classes), 12)
    if not k <= classes <= agents * k:
        with pytest.raises(DataError, match="k different classes, and every class an agent"):
            split(ClassesPerAgent(k=k), y, agents, seed)
        return
    held = counts(y, split(ClassesPerAgent(k=k), y, agents, seed), classes) > 0
    assert np.all(held.sum(axis=1) == k)
    assert held.sum(axis=0).min() >= 1
    assert np.ptp(held.sum(axis=0)) <= 1


@pytest.mark.parametrize("partition", [ClassesPerAgent(k=1), Dirichlet(alpha=100.0)], ids=str)
def test_a_class_is_shared_out_at_random_not_in_the_order_of_the_samples(partition):
    first, second = split(partition, np.zeros(100, int), 2)
    assert first.min() < second.max()
    assert second.min() < first.max()


def test_holders_share_a_class_equally():
    y = np.repeat(np.arange(4), 30)
    table = counts(y, split(ClassesPerAgent(k=2), y, 4), 4)
    assert set(table.ravel()) == {0, 15}


@pytest.mark.parametrize(
    ("agents", "blocks"),
    [
        (2, [range(5), range(5, 10)]),
        (5, [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]),
        (3, [range(4), range(4, 7), range(7, 10)]),
    ],
)
def test_split_by_labels_gives_each_agent_only_its_block(agents, blocks):
    y = rng().permutation(np.repeat(np.arange(10), 7))
    for part, block in zip(split(LabelSplit(alpha=0.0), y, agents), blocks, strict=True):
        assert set(y[part]) == set(block)


@settings(max_examples=30, deadline=None)
@given(alpha=st.floats(0, 1), seed=st.integers(0, 1000))
def test_mixing_a_portion_keeps_sizes_and_leaves_the_rest_at_home(alpha, seed):
    y = np.repeat(np.arange(6), [10, 20, 5, 5, 30, 7])
    parts = split(LabelSplit(alpha=alpha), y, 3, seed)
    assert [len(part) for part in parts] == [30, 10, 37]
    for part, block in zip(parts, ((0, 1), (2, 3), (4, 5)), strict=True):
        assert np.isin(y[part], block).sum() >= len(part) - round(alpha * len(part))


def test_mixing_everything_is_iid():
    """A class of n among N samples gives a part of size s a hypergeometric count, deviation below
    sqrt(s · n/N · (1 - n/N))."""
    y = np.repeat(np.arange(10), 400)
    table = counts(y, split(LabelSplit(alpha=1.0), y, 5), 10)
    assert np.abs(table - 80).max() <= 5 * math.sqrt(800 * 0.1 * 0.9)


def test_the_mixed_portion_is_taken_from_all_classes_of_an_agent():
    """Half of each agent's samples leave and half of those come back: 25 of 100 of each class move."""
    y = np.repeat(np.arange(4), 100)
    table = counts(y, split(LabelSplit(alpha=0.5), y, 2), 4)
    moved = np.r_[table[1, :2], table[0, 2:]]
    assert np.abs(moved - 25).max() <= 5 * math.sqrt(100 * 0.25 * 0.75)


def test_mixing_half_moves_the_expected_number():
    """Of 1000 own samples 500 stay, and of the 500 returned half are expected to be own again: 750."""
    y = np.repeat([0, 1], 1000)
    table = counts(y, split(LabelSplit(alpha=0.5), y, 2), 2)
    assert table.sum(axis=1).tolist() == [1000, 1000]
    assert abs(table[0, 0] - 750) <= 5 * math.sqrt(500 * 0.25)
    assert table[0, 0] == table[1, 1]


def test_as_many_ids_as_agents_give_one_each_in_sorted_order():
    names = np.array(["b", "a", "c", "a", "b"])
    parts = split(ById(id="who"), np.zeros(5, int), 3, ids={"who": names})
    assert [part.tolist() for part in parts] == [[1, 3], [0, 4], [2]]


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=30), data=st.data(), seed=st.integers(0, 1000))
def test_groups_stay_whole_and_loads_even(sizes, data, seed):
    agents = data.draw(st.integers(1, len(sizes)))
    who = rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    parts = split(ById(id="who"), np.zeros(len(who), int), agents, seed, ids={"who": who})
    assert_complete(parts, len(who))
    groups = [set(who[part]) for part in parts]
    assert sum(map(len, groups)) == len(sizes)
    # Who gets a group has the least before, so no one is ahead by more than one group.
    assert np.ptp([len(part) for part in parts]) <= max(sizes)


def test_large_groups_are_dealt_first():
    who = np.array([0, 1, 2, 3, 4, 4, 4, 4])
    for seed in range(5):
        parts = split(ById(id="who"), np.zeros(8, int), 2, seed, ids={"who": who})
        assert [part.tolist() for part in parts] == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_real_valued_targets_can_be_split_without_classes():
    y = np.ones((30, 2))
    for partition in (Iid(), Unequal(spread=0.1), ById(id="who")):
        assert_complete(split(partition, y, 3, ids={"who": np.arange(30) % 7}, classes=2), 30)


@pytest.mark.parametrize("partition", [Dirichlet(alpha=1.0), ClassesPerAgent(k=1), LabelSplit()], ids=str)
def test_real_valued_targets_have_no_classes(partition):
    with pytest.raises(DataError, match=r"one label per sample.*\(30, 2\).*iid, unequal or by"):
        split(partition, np.ones((30, 2)), 3)


@pytest.mark.parametrize(
    ("partition", "y", "agents", "more", "phrases"),
    [
        (Iid(), [0, 1], 3, {}, ["3 agents and 2 samples", "Change the number of agents"]),
        (Iid(), [0, 1], 0, {}, ["at least one agent", "0 agents"]),
        (Iid(), [0, 1, 5], 1, {"classes": 5}, ["from 0 to 4", "5 in row 2"]),
        (Iid(), [0, -1], 1, {"classes": 5}, ["-1 in row 1"]),
        (Unequal(weights=(1.0, 1e-9)), [0] * 9, 2, {}, ["none for agent 1", "Unequal(weights", "more even"]),
        (Dirichlet(alpha=1.0, min_size=5), [0] * 9, 2, {}, ["at least 5 samples", "2 agents", "Raise alpha"]),
        (Dirichlet(alpha=0.001), [0] * 100, 5, {}, ["1000 failed draws", "alpha 0.001", "use fewer agents"]),
        (ClassesPerAgent(k=1), [0, 1, 2], 2, {}, ["k = 1, 2 agents and 3 classes", "k from 2 to 3"]),
        (ClassesPerAgent(k=4), [0, 1, 2], 2, {}, ["k = 4", "k from 2 to 3"]),
        (ClassesPerAgent(k=2), [0, 0, 1], 2, {}, ["1 samples of class 1 for 2 agents", "Lower k"]),
        (LabelSplit(), [0, 0, 1, 1], 3, {}, ["as many classes as agents", "2 classes and 3 agents"]),
        (ById(id="writer"), [0, 1], 1, {}, ["'writer'", "no ids"]),
        (ById(id="writer"), [0, 1], 1, {"ids": {"writers": [1, 2]}}, ["Did you mean 'writers'?"]),
        (ById(id="w"), [0, 1], 1, {"ids": {"w": [1, 2, 3]}}, ["'w'", "3 ids for 2 samples"]),
        (ById(id="w"), [0, 1], 2, {"ids": {"w": [1, 1]}}, ["1 values and 2 agents", "fewer agents"]),
    ],
)
def test_an_impossible_split_says_why_and_what_to_change(partition, y, agents, more, phrases):
    with pytest.raises(DataError) as error:
        split(partition, y, agents, **more)
    for phrase in phrases:
        assert phrase in str(error.value)


@pytest.mark.parametrize(
    ("kind", "fields", "phrase"),
    [
        ("dirichlet", {"alpha": 0.0}, "partition.alpha must be above 0"),
        ("dirichlet", {"alpha": 1.0, "min_size": 0}, "partition.min_size must be at least 1"),
        ("classes", {"k": 0}, "partition.k must be at least 1"),
        ("classes", {"k": 1.5}, "partition.k must be an integer"),
        ("labels", {"alpha": 1.5}, "partition.alpha must be at most 1"),
        ("unequal", {"spread": -1.0}, "partition.spread must be at least 0"),
        ("unequal", {"weights": (1.0, 0.0)}, "partition.weights must be a list of numbers, each above 0. Found: 0.0"),
        ("unequal", {"weights": (1.0, float("inf"))}, "Found: inf"),
        ("unequal", {"weights": ("a",)}, "Found: 'a'"),
        ("by", {"id": 3}, "partition.id must be a string"),
    ],
)
def test_a_faulty_setting_is_named(kind, fields, phrase):
    with pytest.raises(RecipeError) as error:
        KINDS[kind](**fields)
    assert phrase in str(error.value)


def test_weights_must_match_the_agents():
    with pytest.raises(RecipeError, match="2 weights for 3 agents"):
        split(Unequal(weights=(1.0, 1.0)), [0] * 9, 3)


def test_counts_are_agents_by_classes():
    y = np.array([0, 0, 2, 2, 2, 1])
    parts = [np.array([0, 2, 3]), np.array([1, 4, 5])]
    assert counts(y, parts, 4).tolist() == [[1, 0, 2, 0], [1, 1, 1, 0]]


def test_counts_need_labels_within_range():
    with pytest.raises(DataError, match=r"from 0 to 1\. Found: 2 in row 1"):
        counts(np.array([0, 2]), [np.array([0, 1])], 2)
    with pytest.raises(DataError, match=r"one label for each sample .* shape \(3, 2\)"):
        counts(np.ones((3, 2)), [np.arange(3)], 2)
