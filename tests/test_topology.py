"""Topologies: who may speak to whom, and mixing weights that lose nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codistill.errors import RecipeError
from codistill.topology import HUB, KINDS, Topology

NAMES = ("a", "b", "c", "d")


def test_a_star_speaks_to_its_hub_only():
    star = Topology.star(NAMES)
    assert star.hub
    assert star.may_speak("a", HUB)
    assert star.may_speak(HUB, "a")
    assert not star.may_speak("a", "b")
    assert star.neighbours("a") == ()


def test_complete_ring_and_silent():
    assert Topology.complete(NAMES).neighbours("c") == ("a", "b", "d")
    assert Topology.ring(NAMES).neighbours("a") == ("b", "d")
    assert Topology.silent(NAMES).neighbours("a") == ()
    for kind in ("complete", "ring", "silent"):
        assert not KINDS[kind](NAMES).may_speak("a", HUB)


@pytest.mark.parametrize(("names", "around"), [(("a",), ()), (("a", "b"), ("b",))])
def test_small_rings_have_no_link_to_oneself_and_none_twice(names, around):
    assert Topology.ring(names).neighbours("a") == around


def test_links_go_both_ways_in_the_order_of_the_roster():
    path = Topology(NAMES, [("d", "b"), ("b", "a")])
    assert path.neighbours("b") == ("a", "d")
    assert path.may_speak("b", "d")
    assert path.may_speak("d", "b")
    assert not path.may_speak("a", "d")


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
