"""Each agent prepares samples by its own training rows: missing values, scaling, frames and sparse matrices."""

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import codistill as cd
from codistill.core.errors import DataError
from codistill.data import validation
from codistill.learners.sklearn import takes_missing
from codistill.nodes.record import record_of

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(120, 4))
Y = (X[:, 0] > 0).astype(int)
X[RANDOM.random(X.shape) < 0.2] = np.nan
X[:, 3] = np.where(np.isnan(X[:, 3]), np.nan, (X[:, 3] > 0.5))  # 0 or 1
QUIET = {"runtime": "simulation", "progress": False}


def agents(*models, **options):
    return [
        cd.Agent(f"a{place}", model, X[20 * place : 20 * place + 20], Y[20 * place : 20 * place + 20], **options)
        for place, model in enumerate(models)
    ]


def boosting():
    return HistGradientBoostingClassifier(max_iter=3, min_samples_leaf=3)


def test_missing_values_reach_a_model_that_takes_them_and_are_filled_in_for_others():
    federation = cd.Federation(
        agents(boosting(), LogisticRegression()), cd.FedMD(), public=X[60:80], test=(X[80:], Y[80:])
    )
    takes, other = federation.agents
    np.testing.assert_array_equal(takes.shard.x, X[:20])
    assert takes.public is federation.public
    own = X[20:40]
    # By its own rows: medians of numbers, and of a column of codes the most frequent.
    codes = own[~np.isnan(own[:, 3]), 3]
    fill = [*np.nanmedian(own[:, :3], axis=0), float(codes.mean() > 0.5)]
    np.testing.assert_allclose(other.shard.x, np.where(np.isnan(own), fill, own))
    np.testing.assert_allclose(other.public.x, np.where(np.isnan(X[60:80]), fill, X[60:80]))
    assert other.public.digest == federation.public.digest, "what all share is what they agree on"
    result = federation.run(1, **QUIET)
    assert not result.events
    assert result.agents["a1"].predict(X[:5]).shape == (5,)


@pytest.mark.parametrize("protocol", [cd.AvgKD(), cd.EKD(), cd.Centralised()])
def test_models_that_travel_meet_samples_that_they_take(protocol):
    made = agents(boosting(), LogisticRegression(), LogisticRegression(), test=(X[90:], Y[90:]))
    result = cd.Federation(made, protocol, test=(X[60:], Y[60:])).run(1, alone=False, **QUIET)
    assert result.events == [], "no model is refused for what is missing"
    assert len(result.rows) == 3


def test_an_agent_scales_by_its_own_rows():
    made = agents(LogisticRegression(), LogisticRegression(), prepare=StandardScaler())
    federation = cd.Federation(made, cd.Alone(), test=(X[60:], Y[60:]))
    for place, agent in enumerate(federation.agents):
        own = X[20 * place : 20 * place + 20]
        scaled = (own - np.nanmean(own, axis=0)) / np.nanstd(own, axis=0)
        np.testing.assert_allclose(agent.shard.x[~np.isnan(own)], scaled[~np.isnan(own)], atol=1e-5)
        np.testing.assert_array_equal(record_of(agent).prepared(own), agent.shard.x)
    federation.run(1, **QUIET)


@pytest.mark.parametrize(
    ("prepare", "phrase"),
    [
        ("standard", "must be a scikit-learn transformer"),
        (make_column_transformer((StandardScaler(), [9])), "must work on its samples"),
    ],
)
def test_a_transformer_that_does_not_work_is_named(prepare, phrase):
    with pytest.raises(DataError, match="prepare of agent 'a0'") as error:
        cd.Federation(agents(LogisticRegression(), prepare=prepare), cd.Alone())
    assert phrase in str(error.value)


def test_frames_and_sparse_matrices_are_samples(monkeypatch):
    full = np.nan_to_num(X)
    frame = pd.DataFrame(full).astype({0: "Float64", 3: "Int64"})
    sparse = scipy.sparse.csr_matrix(full)
    made = [cd.Agent("f", LogisticRegression(), frame, Y), cd.Agent("s", LogisticRegression(), sparse, Y)]
    one, other = cd.Federation(made, cd.FedMD(), public=sparse[:9], test=(frame[:9], Y[:9])).agents
    np.testing.assert_allclose(one.shard.x, other.shard.x, rtol=1e-6)
    monkeypatch.setattr(validation, "DENSE_LIMIT", 1000)
    with pytest.raises(DataError, match=r"agent 's'.*shape \(120, 4\).*TruncatedSVD"):
        cd.Agent("s", LogisticRegression(), sparse, Y)
    with pytest.raises(DataError, match=r"column 'b'.*codistill\.Columns"):
        cd.Agent("f", cd.KernelRidge("linear"), pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}), [0, 1])


@pytest.mark.parametrize(
    ("model", "takes"),
    [
        (boosting(), True),
        (LogisticRegression(), False),
        (make_pipeline(StandardScaler(), LogisticRegression()), False),
        (make_pipeline(StandardScaler(), boosting()), True),
        (make_pipeline(SimpleImputer(add_indicator=True), LogisticRegression()), True),
        (make_pipeline(make_column_transformer((SimpleImputer(), [0])), LogisticRegression()), True),
        (make_pipeline(make_column_transformer((StandardScaler(), [0])), LogisticRegression()), False),
    ],
)
def test_which_models_take_missing_values(model, takes):
    assert takes_missing(model) is takes


def test_integers_that_32_bits_cannot_hold_stay_exact():
    x = np.array([[(1 << 24) + 1], [3], [5], [-7]])
    agent = cd.Agent("a", LogisticRegression(), x, [0, 1, 0, 1])
    made = cd.Federation([agent], cd.Alone(), test=(x, [0, 1, 0, 1])).agents[0]
    assert made.shard.x.tolist() == x.tolist()
