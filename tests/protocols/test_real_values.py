"""FedMD and D-Distillation on targets of one real value, by hand: the squared error in place of the divergence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.neighbors import KNeighborsRegressor

import codistill as cd
from codistill.core.errors import CodistillError, LearnerError, RecipeError

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(120, 3))
Y = X @ [1.0, -2.0, 0.5] + 0.1 * RANDOM.normal(size=120)
PARTS, PUBLIC, TEST = (slice(0, 20), slice(20, 50), slice(50, 60)), X[60:80], (X[80:], Y[80:])
QUIET = {"runtime": "simulation", "progress": False}


def net(x=None):
    torch.manual_seed(0)
    return cd.TorchLearner(torch.nn.Linear(3, 1), loss="squared", optimiser="sgd", lr=0.05)


def federation(models, protocol, public=PUBLIC, **more):
    agents = [
        cd.Agent(f"a{i}", model, X[part], Y[part]) for i, (model, part) in enumerate(zip(models, PARTS, strict=False))
    ]
    return cd.Federation(agents, protocol, public=public, test=TEST, task="regression", **more)


def fitted(model, part, extra=None):
    x, y = X[part], Y[part]
    return model.fit(x, y) if extra is None else model.fit(np.concatenate([x, PUBLIC]), np.concatenate([y, extra]))


def test_fedmd_of_models_that_fit_learns_the_mean_of_the_others():
    """After a round each is fitted to its targets and, on public samples, to the mean of the others' predictions."""
    result = federation([Ridge(), LinearRegression(), KNeighborsRegressor(3)], cd.FedMD()).run(1, **QUIET)
    models = [Ridge(), LinearRegression(), KNeighborsRegressor(3)]
    p = [fitted(model, part).predict(PUBLIC) for model, part in zip(models, PARTS, strict=True)]
    for i, (model, part) in enumerate(zip(models, PARTS, strict=True)):
        expected = fitted(model, part, (sum(p) - p[i]) / 2)
        np.testing.assert_allclose(result.agents[f"a{i}"].predict(TEST[0]), expected.predict(TEST[0]), atol=1e-4)


def test_fedmd_of_a_network_takes_a_step_down_the_squared_error():
    protocol = cd.FedMD(local_steps=0, transfer_steps=1, batch_size=len(PUBLIC))
    result = federation([net(), LinearRegression()], protocol).run(1, **QUIET)
    w, b = (each.detach().numpy().astype(np.float64) for each in net().module.parameters())
    other = fitted(LinearRegression(), PARTS[1]).predict(PUBLIC)
    off = PUBLIC @ w[0] + b - other
    # w <- w - lr * d/dw mean (f - f_other)^2
    w, b = w[0] - 0.05 * 2 * (off[:, None] * PUBLIC).mean(axis=0), b - 0.05 * 2 * off.mean()
    np.testing.assert_allclose(result.agents["a0"].predict(TEST[0]), TEST[0] @ w + b, atol=1e-5)
    rows = {row["agent"]: row for row in result.rows}
    assert rows["a0"]["deviation"] == pytest.approx(np.sqrt(np.mean((off / 2) ** 2)), rel=1e-4)  # the mean is halfway
    assert "disagreement" not in rows["a0"]


def test_robust_aggregates_are_of_the_values_themselves():
    models = [LinearRegression(), LinearRegression(), LinearRegression()]
    result = federation(models, cd.FedMD(aggregate="median")).run(1, **QUIET)
    p = [fitted(LinearRegression(), part).predict(PUBLIC) for part in PARTS]
    expected = fitted(LinearRegression(), PARTS[0], np.median(p[1:], axis=0))
    np.testing.assert_allclose(result.agents["a0"].predict(TEST[0]), expected.predict(TEST[0]), atol=1e-4)


def test_d_distillation_of_models_that_fit_by_hand():
    """One communication of all points on a ring of two: z <- mixed - gamma (mixed - s), and a fit to labels and z."""
    weight, gamma = 1.0, 0.25
    protocol = cd.DDistillation(local_steps=1, network_batch=len(PUBLIC), weight=weight, z_step=gamma)
    made = federation([Ridge(), LinearRegression()], protocol)
    w = made.topology.weights("a0")["a1"]
    result = made.run(1, **QUIET)
    s = [fitted(model, part).predict(PUBLIC) for model, part in zip((Ridge(), LinearRegression()), PARTS, strict=False)]
    mixed = (1 - w) * s[0] + w * s[1]
    z = mixed - gamma * (mixed - s[0])
    # weight * 20 labels: as many points as there are
    expected = fitted(Ridge(), PARTS[0], z)
    np.testing.assert_allclose(result.agents["a0"].predict(TEST[0]), expected.predict(TEST[0]), atol=1e-4)


def test_d_distillation_of_a_network_by_hand():
    protocol = cd.DDistillation(local_steps=1, batch_size=20, network_batch=len(PUBLIC), weight=2.0)
    made = federation([net(), LinearRegression()], protocol)
    mix = made.topology.weights("a0")["a1"]
    result = made.run(1, **QUIET)
    w, b = (each.detach().numpy().astype(np.float64) for each in net().module.parameters())
    s = PUBLIC @ w[0] + b
    z = (1 - mix) * s + mix * fitted(LinearRegression(), PARTS[1]).predict(PUBLIC)
    x, y = X[PARTS[0]], Y[PARTS[0]]
    off, pull = x @ w[0] + b - y, s - z
    step = 2 * (off[:, None] * x).mean(axis=0) + 2.0 * 2 * (pull[:, None] * PUBLIC).mean(axis=0)
    expected = TEST[0] @ (w[0] - 0.05 * step) + b - 0.05 * (2 * off.mean() + 2.0 * 2 * pull.mean())
    np.testing.assert_allclose(result.agents["a0"].predict(TEST[0]), expected, atol=1e-5)


@pytest.mark.parametrize(
    "protocol", [cd.FedMD(less_forgetting=1.0), cd.DDistillation(local_steps=10)], ids=lambda p: p.name
)
def test_mixed_models_gain_alike_in_all_runtimes(protocol):
    def run(runtime, **more):
        models = [net(), RandomForestRegressor(10, random_state=0), Ridge()]
        return federation(models, protocol, safeguard=True).run(2, runtime=runtime, progress=False, **more)

    first = run("simulation")
    assert run("processes").rows == first.rows
    together, alone = ([row["rmse"] for row in rows if row["round"] == 2] for rows in (first.rows, first.alone_rows))
    assert len(together) == len(alone) == 3
    assert np.mean(together) < np.mean(alone)


def test_huge_values_of_a_neighbour_end_no_round():
    """Finite, as the codec demands, but their squares are not in 32 bits; the safeguard keeps the answers."""

    class Liar(LinearRegression):
        def predict(self, x):
            return np.full(len(x), 3e38)

    protocol = cd.DDistillation(local_steps=2)
    result = federation([net(), Liar()], protocol, safeguard=True).run(2, **QUIET)
    rows = [row for row in result.rows if row["agent"] == "a0"]
    assert [np.isfinite(row["consensus_error"]) for row in rows] == [True, True]
    alone = next(row["rmse"] for row in result.alone_rows if row["agent"] == "a0" and "rmse" in row)
    assert rows[-1]["rmse"] == pytest.approx(alone, rel=0.05)


def test_without_rounds_and_resumed(tmp_path):
    def made():
        return federation([net(), Ridge()], cd.FedMD(), clock=cd.Clock(asynchronous=True))

    whole = made().run(3, **QUIET)
    made().run(2, folder=tmp_path, **QUIET)
    resumed = made().run(3, folder=tmp_path, resume=True, **QUIET)
    for name in ("a0", "a1"):
        np.testing.assert_array_equal(resumed.agents[name].predict(TEST[0]), whole.agents[name].predict(TEST[0]))


@pytest.mark.parametrize(
    ("protocol", "words"),
    [
        (cd.FedMD(temperature=2.0), "fedmd.temperature is for classes"),
        (cd.FedMD(floor=0.01), "fedmd.floor is for classes"),
        (cd.FedMD(aggregate="confidence"), "fedmd.aggregate is for classes.*mean, trimmed, median"),
        (cd.DDistillation(start="uniform"), "d_distillation.start must be 'own' for real values"),
        (cd.DDistillation(form="printed", lr=0.1), "d_distillation.form must be 'mean' for real values"),
    ],
)
def test_settings_without_meaning_for_real_values_are_refused(protocol, words):
    with pytest.raises(RecipeError, match=f"(?s){words}"):
        federation([Ridge(), LinearRegression()], protocol)


def test_several_values_and_other_protocols_are_refused_by_name():
    agents = [cd.Agent(name, Ridge(), X[:20], np.c_[Y, Y][:20]) for name in "ab"]
    with pytest.raises(LearnerError, match="for one value per sample also fedmd, d_distillation"):
        cd.Federation(agents, cd.FedMD(), public=PUBLIC, task="regression")
    with pytest.raises(CodistillError, match="for one value per sample also fedmd, d_distillation"):
        federation([net(), net()], cd.FedAL())
