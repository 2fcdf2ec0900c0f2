"""Topologies: who is linked to whom, and mixing weights that keep the mean."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codistill.core.errors import RecipeError
from codistill.topology import HUB, KINDS, Topology

NAMES = ("a", "b", "c", "d")


def test_a_star_speaks_to_its_hub_only():
    star = Topology.star(NAMES)
    assert star.hub
    assert star.may_send("a", HUB)
    assert star.may_send(HUB, "a")
    assert not star.may_send("a", "b")
    assert star.neighbours("a") == ()


def test_complete_ring_and_silent():
    assert Topology.complete(NAMES).neighbours("c") == ("a", "b", "d")
    assert Topology.ring(NAMES).neighbours("a") == ("b", "d")
    assert Topology.silent(NAMES).neighbours("a") == ()
    for kind in ("complete", "ring", "silent"):
        assert not KINDS[kind](NAMES).may_send("a", HUB)


@pytest.mark.parametrize(("names", "around"), [(("a",), ()), (("a", "b"), ("b",))])
def test_small_rings_have_no_link_to_oneself_and_none_twice(names, around):
    assert Topology.ring(names).neighbours("a") == around


def test_links_go_both_ways_in_the_order_of_the_roster():
    path = Topology(NAMES, [("d", "b"), ("b", "a")])
    assert path.neighbours("b") == ("a", "d")
    assert path.may_send("b", "d")
    assert path.may_send("d", "b")
    assert not path.may_send("a", "d")


def test_weights_by_hand():
    """A path a - b - c: deg a = 1, deg b = 2; w_ab = 1 / (1 + max(1, 2)) = 1/3."""
    path = Topology(("a", "b", "c"), [("a", "b"), ("b", "c")])
    assert path.weights("a") == {"b": 1 / 3}
    assert path.weights("b") == {"a": 1 / 3, "c": 1 / 3}


@given(st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES))))
def test_weights_are_symmetric_and_doubly_stochastic(edges):
    topology = Topology(NAMES, edges)
    matrix = np.array([[topology.weights(row).get(column, 0.0) for column in NAMES] for row in NAMES])
    assert np.array_equal(matrix, matrix.T)
    # What is left for oneself is never negative.
    assert (matrix.sum(axis=1) <= 1).all()


def test_an_edge_to_a_stranger_names_the_nearest_agent():
    with pytest.raises(RecipeError, match=r"An edge must join two agents.*Did you mean 'clinic'"):
        Topology(("clinic", "lab"), [("lab", "clinik")])


# --- weights as a matrix, and what they bring -------------------------------------------------------


def test_the_matrix_by_hand():
    """The path a - b - c: w_ab = w_bc = 1/3, and the rest on the diagonal."""
    path = Topology(("a", "b", "c"), [("a", "b"), ("b", "c")])
    np.testing.assert_allclose(path.matrix(), np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3)
    assert not path.has_matrix


@given(st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES))))
def test_rows_and_columns_sum_to_one_and_everyone_keeps_a_part(edges):
    w = Topology(NAMES, edges).matrix()
    np.testing.assert_allclose([w.sum(axis=0), w.sum(axis=1)], 1)
    assert (np.diag(w) > 0).all()


@pytest.mark.parametrize("n", [3, 4, 5, 12])
def test_the_spectral_gap_of_a_ring(n):
    """All weights of a ring are 1/3, so the eigenvalues are (1 + 2 cos(2 pi k / n)) / 3, k = 0 .. n - 1."""
    eigenvalues = (1 + 2 * np.cos(2 * np.pi * np.arange(1, n) / n)) / 3
    ring = Topology.ring([str(i) for i in range(n)])
    assert ring.spectral_gap == pytest.approx(1 - np.abs(eigenvalues).max())


def test_the_spectral_gap_of_a_directed_ring_is_that_of_its_singular_values():
    """W = (1 + shift) / 2 has the singular values |1 + exp(2 pi i k / n)| / 2 = |cos(pi k / n)|."""
    turning = Topology.from_matrix(NAMES, (np.eye(4) + np.roll(np.eye(4), 1, axis=1)) / 2)
    assert turning.spectral_gap == pytest.approx(1 - np.cos(np.pi / 4))


def test_the_spectral_gap_is_of_singular_values_not_of_eigenvalues():
    """For a W that is not normal they differ: a single step may shrink differences by less than eigenvalues say."""
    w = np.array([[0.5, 0, 0.25, 0.25], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.25, 0.75]])
    gap = Topology.from_matrix(NAMES, w).spectral_gap
    assert gap == pytest.approx(1 - np.linalg.svd(w, compute_uv=False)[1])
    assert gap < 1 - np.sort(np.abs(np.linalg.eigvals(w)))[-2] - 0.01


def test_the_spectral_gap_of_extremes():
    assert Topology.complete(NAMES).spectral_gap == pytest.approx(1)
    assert Topology.silent(NAMES).spectral_gap == 0
    assert Topology.silent(("a",)).spectral_gap == 1
    assert Topology.silent(()).spectral_gap == 0


def test_one_step_shrinks_differences_by_the_spectral_gap_at_least():
    ring, rng = Topology.ring([str(i) for i in range(7)]), np.random.default_rng(0)
    z = rng.normal(size=(7, 50))
    z -= z.mean(axis=0)
    shrunk = np.linalg.norm(ring.matrix() @ z, axis=0) / np.linalg.norm(z, axis=0)
    assert shrunk.max() <= 1 - ring.spectral_gap


@pytest.mark.parametrize(
    ("topology", "steps"),
    [
        (Topology.ring([str(i) for i in range(9)]), 4),
        (Topology.complete(NAMES), 1),
        (Topology(NAMES, [("a", "b"), ("b", "c"), ("c", "d")]), 3),
        (Topology.silent(NAMES), None),
        (Topology(NAMES, [("a", "b"), ("c", "d")]), None),
        (Topology.silent(("a",)), 0),
        (Topology.from_matrix(NAMES, (np.eye(4) + np.roll(np.eye(4), 1, axis=1)) / 2), 3),
    ],
)
def test_the_diameter(topology, steps):
    assert topology.diameter == steps


def test_links_and_degrees_are_counted():
    path = Topology(NAMES, [("a", "b"), ("b", "a"), ("b", "c"), ("c", "c")])
    assert (path.links, path.degrees) == (2, (0, 2))


# --- directed graphs --------------------------------------------------------------------------------

# a speaks to b, b to c, c to d, d to a: row n holds the weight of the one before n.
TURNING = (np.eye(4) + np.roll(np.eye(4), -1, axis=1)) / 2


def test_a_directed_graph_has_neighbours_and_sources():
    ring = Topology(NAMES, [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")], directed=True, weights=TURNING)
    assert (ring.neighbours("b"), ring.sources("b")) == (("c",), ("a",))
    assert ring.receivers("b") == ("c",)
    assert ring.may_send("a", "b")
    assert not ring.may_send("b", "a")
    assert ring.weights("b") == {"a": 0.5}
    assert np.array_equal(ring.matrix(), TURNING)
    assert (ring.links, ring.degrees) == (4, (1, 1))


def test_sources_of_an_undirected_graph_are_its_neighbours():
    ring = Topology.ring(NAMES)
    assert all(ring.sources(name) == ring.neighbours(name) for name in NAMES)


def test_a_matrix_says_who_speaks_to_whom():
    turning = Topology.from_matrix(NAMES, TURNING)
    assert turning.directed
    assert [turning.neighbours(name) for name in NAMES] == [("b",), ("c",), ("d",), ("a",)]
    assert turning.has_matrix
    assert not Topology.from_matrix(NAMES, Topology.ring(NAMES).matrix()).directed


def test_weights_of_ones_own_on_a_graph_that_goes_both_ways():
    w = np.array([[0.8, 0.2, 0], [0.2, 0.5, 0.3], [0, 0.3, 0.7]])
    path = Topology(("a", "b", "c"), [("a", "b"), ("b", "c")], weights=w)
    assert path.weights("b") == {"a": 0.2, "c": 0.3}


def test_a_way_there_is_not_a_way_back():
    """So small a weight is within what a sum may be off by: a and b are heard by c, and hear nothing of it."""
    pairs = np.kron(np.eye(2), np.full((2, 2), 0.5))
    pairs[2, 0] = 5e-7
    with pytest.raises(RecipeError, match="strongly connected.*'a' cannot be reached from 'c'"):
        Topology.from_matrix(NAMES, pairs)


def changed(*changes):
    w = np.array(TURNING)
    for row, column, value in changes:
        w[row, column] = value
    return w


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (np.eye(3), ["a row and a column for each of the 4 agents", "3 x 3"]),
        (np.ones(4), ["a row and a column", "the shape 4"]),
        ([[1, 0], [1]], ["a row and a column", "row 1 is [1, 0]"]),
        ([["a"] * 4] * 4, ["a row and a column", "non-numeric"]),
        (changed((1, 2, np.nan)), ["finite and at least 0", "nan in row 2 ('b'), column 3 ('c')"]),
        (changed((3, 0, -0.5)), ["finite and at least 0", "-0.5 in row 4 ('d'), column 1 ('a')"]),
        (changed((1, 1, 0.4)), ["Every row of the matrix W must sum to 1", "row 2 ('b') sums to 0.9"]),
        (changed((0, 0, 0.4), (0, 1, 0.1)), ["Every column of the matrix W", "column 1 ('a') sums to 0.9"]),
        (np.roll(np.eye(4), 1, axis=1), ["The diagonal", "0 in row 1 ('a')"]),
        (np.kron(np.eye(2), np.full((2, 2), 0.5)), ["must be connected", "'c' cannot be reached from 'a'"]),
    ],
)  # fmt: skip
def test_each_mistake_in_a_matrix_is_named(matrix, words):
    with pytest.raises(RecipeError) as caught:
        Topology.from_matrix(NAMES, matrix)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.do


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ([("a", "b"), ("b", "c"), ("c", "d")], ["0.5 in the row of 'a' for 'd', which may not send to it"]),
        ([("a", "b"), ("b", "c"), ("c", "d"), ("d", "a"), ("a", "c")], ["0 in the row of 'c' for 'a', which may send"]),
    ],
)
def test_weights_stand_where_the_links_are(edges, words):
    with pytest.raises(RecipeError, match="above 0 exactly where there is a link") as caught:
        Topology(NAMES, edges, directed=True, weights=TURNING)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_directed_graph_needs_an_explicit_matrix():
    with pytest.raises(RecipeError, match="A directed graph needs an explicit matrix.*only if every link goes both"):
        Topology(NAMES, [("a", "b")], directed=True)


def test_names_are_different():
    with pytest.raises(RecipeError, match="must be unique.*'a' more than once"):
        Topology(("a", "b", "a"), ())


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (Topology.silent(NAMES), "'b' cannot be reached from 'a'"),
        (Topology(NAMES, [("a", "b"), ("c", "d")]), "'c' cannot be reached from 'a'"),
        (Topology.star(NAMES), "'b' cannot be reached from 'a'"),
    ],
)
def test_what_cannot_mix_says_who_is_not_reached(topology, words):
    with pytest.raises(RecipeError, match=words):
        topology.check_mixing()


def test_what_can_mix_passes():
    for kind in ("complete", "ring"):
        KINDS[kind](NAMES).check_mixing()
    Topology.silent(("a",)).check_mixing()


def test_sums_that_people_write_are_near_enough():
    assert Topology.from_matrix(("a", "b", "c"), np.full((3, 3), 0.3333333)).matrix().sum() == pytest.approx(
        3, abs=1e-12
    )
