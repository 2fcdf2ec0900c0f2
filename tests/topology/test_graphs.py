"""Graphs by name: connected, as asked for, and the same whenever they are made again."""

import math

import numpy as np
import pytest

from codistill.core.errors import RecipeError
from codistill.topology import Topology
from codistill.topology.graphs import (
    KINDS,
    Edges,
    ErdosRenyi,
    Expander,
    Geometric,
    Islands,
    Matrix,
    Random,
    Star,
    Torus,
    most_square,
)

DRAWN = [
    Random(),
    Random(degree=2),
    Geometric(radius=0.4),
    ErdosRenyi(probability=0.25),
    Expander(),
    Expander(degree=4),
]


def names(count):
    return [f"n{i}" for i in range(count)]


def links(topology):
    return {(a, b) for a in topology.names for b in topology.neighbours(a)}


@pytest.mark.parametrize("graph", DRAWN, ids=repr)
def test_a_drawn_graph_is_connected_doubly_stochastic_and_decided_by_the_seed(graph):
    topology = graph.over(names(16), seed=3)
    assert topology.diameter is not None
    assert links(graph.over(names(16), seed=3)) == links(topology)
    assert any(links(graph.over(names(16), seed=other)) != links(topology) for other in (4, 5))
    w = topology.matrix()
    np.testing.assert_allclose([w.sum(axis=0), w.sum(axis=1)], 1, atol=1e-12)
    assert (np.diag(w) > 0).all()
    assert np.array_equal(w > 0, np.eye(16, dtype=bool) | (w > 0).T)


def test_a_graph_has_its_own_seed_or_that_of_the_run():
    assert links(Random(seed=7).over(names(12), seed=1)) == links(Random(seed=7).over(names(12), seed=2))
    assert links(Random(seed=7).over(names(12))) == links(Random().over(names(12), seed=7))


def test_places_are_drawn_not_names():
    """The same graph over other names, in their order."""
    other = dict(zip(names(10), "qwertyuiop", strict=True))
    renamed = {(other[a], other[b]) for a, b in links(Random().over(names(10)))}
    assert renamed == links(Random().over(list("qwertyuiop")))


@pytest.mark.parametrize("degree", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 16, 101])
def test_a_random_graph_keeps_to_its_degree(degree, count):
    topology = Random(degree=degree).over(names(count), seed=1)
    assert topology.degrees[1] <= degree
    assert topology.diameter is not None
    assert topology.links >= count - 1


def test_a_random_graph_is_more_than_a_tree_and_less_than_regular():
    topology = Random(degree=3).over(names(100))
    assert 99 < topology.links < 150
    assert topology.degrees == (1, 3)


def test_everyone_in_an_expander_has_the_same_degree():
    assert Expander(degree=4).over(names(15)).degrees == (4, 4)


@pytest.mark.parametrize(("number", "shape"), [(1, (1, 1)), (12, (3, 4)), (16, (4, 4)), (1000, (25, 40)), (7, (1, 7))])
def test_a_grid_is_as_square_as_can_be(number, shape):
    assert most_square(number) == shape


def test_a_torus_by_hand():
    """Rows n0 n1 n2 n3, n4 n5 n6 n7, n8 n9 n10 n11: n0 is left of n1, right of n3, above n4, below n8."""
    topology = Torus().over(names(12))
    assert topology.neighbours("n0") == ("n1", "n3", "n4", "n8")
    assert topology.degrees == (4, 4)
    assert topology.links == 24
    assert topology.diameter == 1 + 2  # half way around 3 rows and 4 columns


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_small_torus_is_a_ring(count):
    assert links(Torus().over(names(count))) == links(
        Topology(names(count), [("n0", "n1"), ("n0", "n2"), ("n1", "n3"), ("n2", "n3")])
        if count == 4
        else Topology.ring(names(count))
    )


def test_a_geometric_graph_links_those_who_are_near():
    """A radius that spans the square links all; a smaller one has fewer links."""
    assert Geometric(radius=math.sqrt(2)).over(names(6)).degrees == (5, 5)
    assert Geometric(radius=0.5).over(names(20)).links < 190


def test_probability_decides_how_many_links():
    assert ErdosRenyi(probability=1).over(names(6)).degrees == (5, 5)
    linked = ErdosRenyi(probability=0.3).over(names(60)).links / (60 * 59 / 2)
    assert abs(linked - 0.3) < 0.05


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Torus().over(names(13)), ["in a torus must be", "13 agents, a prime number", "use a ring"]),
        (lambda: Geometric(radius=0.01).over(names(9)),
         ["graph 'geometric' must be connected", "100 unconnected draws with 9 agents and radius 0.01", "above 0.28"]),
        (lambda: ErdosRenyi(probability=0.001).over(names(16)),
         ["graph 'erdos_renyi'", "16 agents and probability 0.001", "Raise the probability", "above 0.17"]),
        (lambda: Expander(degree=3).over(names(7)), ["An expander needs", "7 agents and degree 3"]),
        (lambda: Expander(degree=5).over(names(4)), ["An expander needs", "4 agents and degree 5"]),
        (lambda: Random(degree=1), ["topology.degree must be at least 2", "maximal number of links"]),
        (lambda: ErdosRenyi(probability=1.5), ["topology.probability must be at most 1"]),
        (lambda: Edges(edges=(["a"],)), ["topology.edges must be pairs of agents' names", "['a']"]),
        (lambda: Edges(edges=(["a", 3],)), ["topology.edges must be pairs of agents' names", "['a', 3]"]),
        (lambda: Edges(edges=(["a", "x"],)).over(["a", "b"]), ["An edge must join two agents", "'x'"]),
        (lambda: Edges(edges=(["a", "b"],), directed=True).over(["a", "b"]), ["A directed graph needs an explicit"]),
        (lambda: Matrix(matrix=([1.0, 0.0],)).over(["a", "b"]), ["a row and a column for each of the 2 agents"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(make, words):
    with pytest.raises(RecipeError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_listed_graph_and_a_matrix_are_taken_as_they_are():
    listed = Edges(edges=(["a", "b"], ["b", "c"])).over(["a", "b", "c"])
    assert (listed.neighbours("b"), listed.kind) == (("a", "c"), "edges")
    turning = ([0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5])
    for made in (
        Matrix(matrix=turning).over(["a", "b", "c"]),
        Edges(edges=(["b", "a"], ["c", "b"], ["a", "c"]), directed=True, matrix=turning).over(["a", "b", "c"]),
    ):
        assert made.directed
        assert made.sources("a") == ("b",)
        assert np.array_equal(made.matrix(), turning)


def test_a_star_has_the_hub_or_an_agent_in_its_centre():
    assert Star().over(names(3)).hub
    star = Star(centre="n1").over(names(3))
    assert not star.hub
    assert links(star) == {("n1", "n0"), ("n0", "n1"), ("n1", "n2"), ("n2", "n1")}
    with pytest.raises(RecipeError, match="must be an agent.*'n9'"):
        Star(centre="n9").over(names(3))


def test_islands_are_names_that_differ_by_their_number_only():
    topology = Islands().over(["a-1", "b", "a-2", "a-b-1", "a-10"])
    assert topology.groups == (("a-1", "a-2", "a-10"), ("b",), ("a-b-1",))
    assert {frozenset(link) for link in links(topology)} == {
        frozenset(pair) for pair in (("a-1", "a-2"), ("a-1", "a-10"), ("a-2", "a-10"))
    }
    topology.check_mixing()  # each by itself


def test_a_degree_beyond_all_agents_is_that_of_a_complete_graph_at_most():
    assert Random(degree=10**12).over(names(4)).degrees[1] <= 3


def test_every_kind_knows_its_name():
    assert all(cls.kind == kind and cls.__doc__ for kind, cls in KINDS.items())
    assert KINDS["star"]().over(["a", "b"]).hub
    assert [KINDS[kind]().over(names(5)).links for kind in ("complete", "ring", "silent")] == [10, 5, 0]


def test_a_thousand_agents_are_read_in_time_that_grows_with_their_links():
    """Each name is compared a few times per link, never with all the others."""

    class Name(str):
        __slots__ = ()
        looks = 0

        def __hash__(self):
            Name.looks += 1
            return super().__hash__()

    roster = [Name(f"n{i}") for i in range(1000)]
    topology = Topology.ring(roster)
    assert topology.links == 1000
    assert Name.looks < 40_000


@pytest.mark.parametrize(
    "graph", [KINDS["complete"](), Geometric(radius=0.1), ErdosRenyi(probability=0.5)], ids=lambda each: each.kind
)
def test_all_pairs_of_very_many_agents_are_refused_at_once(graph):
    """Fifty thousand agents have more than a billion pairs."""
    with pytest.raises(RecipeError, match=r"at most 10,000.*50,000.*ring"):
        graph.over([f"a{i}" for i in range(50_000)])
