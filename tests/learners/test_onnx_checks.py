"""Trees of a received ONNX graph read the samples, or the samples shifted and scaled by constants of the same width."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from codistill.learners.portable.onnx_graph import check_numbers


def graph(operator, constant, *, feature=1, more=()):
    """A tree that reads samples of two features after one operation with a constant."""
    tree = helper.make_node(
        "TreeEnsembleRegressor", ["moved"], ["y"], domain="ai.onnx.ml", n_targets=1,
        nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2], nodes_featureids=[feature, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values=[0.5, 0.0, 0.0],
        nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0],
        target_treeids=[0, 0], target_nodeids=[1, 2], target_ids=[0, 0], target_weights=[1.0, 2.0],
    )  # fmt: skip
    nodes = [*more, helper.make_node(operator, ["x", "c"], ["moved"]), tree]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1])
    weights = [numpy_helper.from_array(np.asarray(constant, np.float32), "c")]
    return helper.make_model(helper.make_graph(nodes, "g", [given], [out], weights))


@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div"])
def test_a_constant_of_the_same_width_keeps_the_width(operator):
    check_numbers(graph(operator, [[1.0, 2.0]]), (2,))
    with pytest.raises(ValueError, match="features that do not exist"):
        check_numbers(graph(operator, [[1.0, 2.0]], feature=2), (2,))


@pytest.mark.parametrize(
    ("operator", "constant"),
    [("Add", [[1.0]]), ("Add", [[1.0] * 3]), ("Add", [[[1.0, 2.0]]]), ("MatMul", [[1.0, 2.0]]), ("Add", 1.0)],
    ids=["narrower", "wider", "one more axis", "another operator", "a number"],
)
def test_anything_else_may_change_the_width(operator, constant):
    with pytest.raises(ValueError, match="does not read the samples"):
        check_numbers(graph(operator, constant), (2,))


def test_a_name_stands_for_one_value():
    again = helper.make_node("ReduceSum", ["x"], ["c"])
    with pytest.raises(ValueError, match="two values of one name"):
        check_numbers(graph("Add", [[1.0, 2.0]], more=[again]), (2,))
