"""AvgKD against its pseudo-code, with kernel learners and numpy beside them."""

from __future__ import annotations

import numpy as np
import pytest

import codistill as cd
from codistill.core.errors import LearnerError


def _kernel(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    return np.exp(-((x[:, None] - z[None]) ** 2).sum(-1))


@pytest.mark.parametrize("own_weight", [None, 0.5])
@pytest.mark.parametrize("agents", [2, 3])
def test_three_rounds_equal_the_pseudo_code(agents: int, own_weight: float | None) -> None:
    """ŷ_{t+1}^i = w y^i + (1 - w) mean_{j≠i} g_t^j(X^i), w = 1/M as printed; g is kernel ridge, c N on the diagonal."""
    rng = np.random.default_rng(0)
    c, sizes = 0.1, [4, 5, 6][:agents]
    xs = [rng.normal(size=(n, 2)).astype(np.float32) for n in sizes]
    ys = [rng.normal(size=(n, 2)).astype(np.float32) for n in sizes]
    learners = [cd.KernelRidge("rbf", c, gamma=1.0, reveal_inputs=True) for _ in sizes]
    members = [cd.Agent(f"a{i}", learner, x, y) for i, (learner, x, y) in enumerate(zip(learners, xs, ys, strict=True))]
    result = cd.Federation(members, cd.AvgKD(own_weight=own_weight)).run(
        3, runtime="simulation", alone=False, progress=False
    )

    targets = list(ys)
    for _ in range(3):
        models = [
            np.linalg.solve(_kernel(x, x) + c * sum(sizes) * np.eye(len(x)), y)
            for x, y in zip(xs, targets, strict=True)
        ]
        fitted, targets = targets, []
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            others = [_kernel(x, xs[j]) @ models[j] for j in range(agents) if j != i]
            w = 1 / agents if own_weight is None else own_weight
            targets.append((w * y + (1 - w) * np.mean(others, axis=0)).astype(np.float32))
    probe = rng.normal(size=(5, 2)).astype(np.float32)
    for i, agent in enumerate(result.agents.values()):
        np.testing.assert_allclose(agent.predict(probe), _kernel(probe, xs[i]) @ models[i], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(members[i].state["targets"], targets[i], rtol=1e-4, atol=1e-5)
    assert not np.allclose(fitted[0], ys[0])


def test_every_pair_of_agents_exchanges_models() -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 2)), np.zeros((6, 1))
    members = [cd.Agent(f"a{i}", cd.KernelRidge(reveal_inputs=True), x[i * 2 : i * 2 + 2], y[:2]) for i in range(3)]
    rows = cd.Federation(members, cd.AvgKD()).run(1, runtime="simulation", alone=False, progress=False).rows
    assert len({row["sent"] for row in rows}) == 1
    assert all(row["sent"] == row["received"] for row in rows)
    assert rows[0]["sent"] % 2 == 0  # the same model to each of two others


def test_a_kernel_model_does_not_travel_unless_its_owner_agrees() -> None:
    members = [cd.Agent(f"a{i}", cd.KernelRidge(), [[0.0], [1.0]], [[0.0], [1.0]]) for i in range(2)]
    with pytest.raises(LearnerError, match="reveal_inputs"):
        cd.Federation(members, cd.AvgKD())
