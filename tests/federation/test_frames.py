"""Data frames stay data frames: pipelines get columns by name and type, and agents may have columns of their own."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.compose import ColumnTransformer, make_column_selector
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder

import codistill as cd
from codistill.cli import main
from codistill.core.errors import DataError, LearnerError
from codistill.nodes.record import record_of

RANDOM = np.random.default_rng(0)
ROWS, DAY = 260, pd.Timedelta("1D")
FRAME = pd.DataFrame({
    "age": RANDOM.integers(20, 90, ROWS),
    "sex": RANDOM.choice(["f", "m"], ROWS),
    "ward": pd.Categorical(RANDOM.choice(["a", "b", "c"], ROWS)),
    "seen": pd.Timestamp("2020-01-01") + pd.to_timedelta(RANDOM.integers(0, 99, ROWS), "D"),
    "note": RANDOM.choice(["chest pain", "no pain", "cough at night"], ROWS),
    "dose": RANDOM.integers(0, 9, ROWS) / 2,
})  # fmt: skip
FRAME.loc[::7, "dose"] = np.nan
FRAME.loc[::9, "sex"] = None
Y = np.where((FRAME["age"] > 55) ^ (FRAME["sex"] == "f"), "ill", "well")
QUIET = {"runtime": "simulation", "progress": False}
MINE, PUBLIC, TEST = slice(0, 60), slice(120, 180), slice(180, 260)


def one_hot(*columns, unknown="ignore"):
    return ("one hot", OneHotEncoder(handle_unknown=unknown), list(columns))


def days_before(frame):
    return ((pd.Timestamp("2021-01-01") - frame["seen"]) / DAY).to_numpy()[:, None]


def rich():
    """Uses all columns: text, categories, dates and missing values."""
    return make_pipeline(
        ColumnTransformer([
            one_hot("sex", "ward"), ("words", TfidfVectorizer(), "note"),
            ("days", FunctionTransformer(days_before), ["seen"]),
            ("numbers", SimpleImputer(), ["age", "dose"]),
        ]),
        RandomForestClassifier(8, random_state=0),
    )  # fmt: skip


def few():
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    strings = ("codes", encoder, make_column_selector(dtype_exclude="number"))
    return make_pipeline(
        ColumnTransformer([strings], remainder="passthrough"), HistGradientBoostingClassifier(max_iter=5)
    )


def linear():
    return make_pipeline(ColumnTransformer([one_hot("sex")]), LogisticRegression())


def members(**more):
    return [
        cd.Agent("rich", rich(), FRAME[:60], Y[:60], **more),
        cd.Agent("few", few(), FRAME.loc[60:99, ["sex", "age"]], Y[60:100], **more),
        cd.Agent("number", LogisticRegression(), FRAME.loc[100:119, ["age"]], Y[100:120], **more),
    ]


def federation(agents=None, protocol=None, public=FRAME[PUBLIC], test=(FRAME[TEST], Y[TEST]), **more):
    return cd.Federation(agents or members(), protocol or cd.FedMD(), public=public, test=test, **more)


def alone(model, frame, y=Y, **more):
    agent = cd.Agent("a", model, frame[MINE], y[MINE], **more)
    return federation([agent], cd.Alone(), public=None, test=(frame[TEST], y[TEST])).run(1, **QUIET).agents["a"]


# --- what a model gets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [rich, few, linear], ids=lambda model: model.__name__)
def test_an_agent_alone_equals_its_pipeline_on_the_frame(model):
    expected = clone(model()).fit(FRAME[MINE], Y[MINE]).predict_proba(FRAME[TEST])
    trained = alone(model(), FRAME)
    np.testing.assert_allclose(trained.predict_proba(FRAME[TEST]), expected, atol=1e-6)
    assert trained.feature_names_in_.tolist() == list(FRAME.columns)


class Recorder(TransformerMixin, BaseEstimator):
    """Checks that each frame has the columns, types and values of the rows that it comes from."""

    def __init__(self, like):
        self.like = like

    def fit(self, frame, y=None):
        self.fitted_ = True
        return self

    def transform(self, frame):
        if frame.isna()["row"].any():  # a trial, before the run, of whether it accepts missing numbers
            return np.zeros((len(frame), 1))
        rows = self.like.loc[frame["row"]].reset_index(drop=True)
        pd.testing.assert_frame_equal(frame, rows)
        return frame[["row"]].to_numpy()


def test_columns_keep_their_types_and_values():
    like = pd.DataFrame({
        "row": np.arange(ROWS), "large": np.arange(ROWS) + (1 << 40), "small": np.arange(ROWS, dtype=np.int8) % 100,
        "real": RANDOM.normal(size=ROWS), "flag": RANDOM.random(ROWS) > 0.5, "word": FRAME["note"],
        "maybe": FRAME["dose"].astype("Float64"), "whole": (FRAME["dose"] * 2).astype("Int64"),
        "ordered": pd.Categorical(RANDOM.choice(["low", "high"], ROWS), ["low", "high"], ordered=True),
        "seen": FRAME["seen"], "zoned": FRAME["seen"].dt.tz_localize("Europe/Berlin"),
        "long": FRAME["seen"] - FRAME["seen"].min(), "month": FRAME["seen"].dt.to_period("M"),
        "mixed": pd.Series(["1", 1, 2.5, True] * (ROWS // 4), dtype=object),
    })  # fmt: skip
    agents = [
        cd.Agent(
            name, make_pipeline(Recorder(like), LogisticRegression()), like[start : start + 60], Y[start : start + 60]
        )
        for name, start in zip("ab", (0, 60), strict=True)
    ]
    result = federation(agents, public=like[PUBLIC], test=(like[TEST], Y[TEST]), safeguard=True).run(2, **QUIET)
    assert len(result.agents["a"].predict(like)) == ROWS


def test_numbers_alone_stay_a_frame_for_transformers_of_ones_own():
    numbers = FRAME[["age", "dose"]].fillna(0)
    model = make_pipeline(FunctionTransformer(lambda frame: frame[["dose"]] * 2), LogisticRegression())
    expected = (
        LogisticRegression()
        .fit(numbers[["dose"]][MINE].to_numpy() * 2, Y[MINE])
        .predict(numbers[["dose"]][TEST].to_numpy() * 2)
    )
    assert alone(model, numbers).predict(numbers[TEST]).tolist() == expected.tolist()


def test_categories_that_were_not_met_before():
    trained = alone(linear(), FRAME)
    record = record_of(trained._agent)
    values = len(record.frame._values["note"])
    strange = FRAME[TEST].assign(sex="x", note=[f"note {i}" for i in range(80)])
    nothing = linear().fit(FRAME[MINE], Y[MINE])
    np.testing.assert_allclose(trained.predict_proba(strange), nothing.predict_proba(strange), atol=1e-6)
    assert len(record.frame._values["note"]) == values  # what was met in predictions is forgotten
    again = strange.iloc[::-1]  # the same values get other codes now
    np.testing.assert_allclose(trained.predict_proba(again), nothing.predict_proba(again), atol=1e-6)


def test_predictions_take_columns_by_name_and_refuse_missing_ones():
    trained = alone(rich(), FRAME)
    expected = trained.predict_proba(FRAME[TEST])
    turned = FRAME[TEST][FRAME.columns[::-1]].assign(more=1)
    np.testing.assert_array_equal(trained.predict_proba(turned), expected)
    with pytest.raises(DataError, match="missing: 'ward'"):
        trained.predict(FRAME[TEST].drop(columns="ward"))
    with pytest.raises(DataError, match="must be a data frame"):
        trained.predict(np.zeros((2, 6)))
    assert trained.predict(FRAME[:0]).tolist() == []


# --- agents with columns of their own ---------------------------------------------------------------------------------


def test_agents_with_their_own_columns_in_all_runtimes():
    results = [
        federation().run(2, runtime=runtime, progress=False) for runtime in ("simulation", "processes", "network")
    ]
    first, *others = results
    shown = [[{k: v for k, v in row.items() if k != "own_accuracy"} for row in result.rows] for result in results]
    assert shown[0] == shown[1] == shown[2]
    assert first.rows == others[0].rows
    assert (
        "round 1: agent 'number': it does not have 'sex', 'ward', 'seen', 'note', 'dose' of the others" in first.events
    )
    answers = [result.agents["rich"].predict_proba(FRAME[TEST]) for result in results[:2]]
    np.testing.assert_array_equal(*answers)


def test_the_taught_model_learns_from_private_rows_and_public_ones():
    """One agent, whose knowledge is all there is: what it is taught are its own answers."""
    agents = [cd.Agent(name, linear(), FRAME[MINE], Y[MINE]) for name in "ab"]
    result = federation(agents).run(1, **QUIET)
    model = linear()
    own = model.fit(FRAME[MINE], Y[MINE]).predict_proba(FRAME[PUBLIC])
    rows = pd.concat([FRAME[MINE], FRAME[PUBLIC], FRAME[PUBLIC]])
    labels = np.concatenate([Y[MINE], np.repeat("ill", 60), np.repeat("well", 60)])
    weights = np.concatenate([np.ones(60), own[:, 0], own[:, 1]])
    model.fit(rows, labels, logisticregression__sample_weight=weights)
    np.testing.assert_allclose(
        result.agents["a"].predict_proba(FRAME[TEST]), model.predict_proba(FRAME[TEST]), atol=1e-3
    )


def test_a_run_with_functions_of_its_owner_is_resumed_exactly(tmp_path):
    """A function without a name, and one with: no file holds them, the agent's own model has them."""

    def made():
        return make_pipeline(FunctionTransformer(lambda frame: frame[["age", "dose"]].fillna(0)), LogisticRegression())

    def agents():
        return [cd.Agent("a", made(), FRAME[:60], Y[:60]), cd.Agent("b", rich(), FRAME[60:120], Y[60:120])]

    expected = federation(agents()).run(3, **QUIET)
    federation(agents()).run(2, folder=tmp_path, **QUIET)
    resumed = federation(agents()).run(3, folder=tmp_path, resume=True, **QUIET)
    assert resumed.rows == expected.rows
    for name in "ab":
        np.testing.assert_array_equal(
            resumed.agents[name].predict_proba(FRAME[TEST]), expected.agents[name].predict_proba(FRAME[TEST])
        )
    processes = federation(agents()).run(3, runtime="processes", progress=False)
    assert processes.rows == expected.rows


def test_prepare_gets_the_frame():
    encoder = ColumnTransformer([one_hot("sex"), ("numbers", SimpleImputer(), ["dose"])], sparse_threshold=0)
    torch.manual_seed(0)
    agents = [
        cd.Agent("net", torch.nn.Linear(4, 2), FRAME[:60], Y[:60], prepare=encoder),  # f, m, missing and the dose
        cd.Agent("linear", LogisticRegression(), FRAME.loc[60:99, ["ward"]], Y[60:100], prepare=OneHotEncoder()),
    ]
    result = federation(agents).run(1, **QUIET)
    made = encoder.fit(FRAME[:60]).transform(FRAME[TEST]).astype(np.float32)
    with torch.no_grad():
        logits = result.agents["net"].learner.module(torch.from_numpy(made)).numpy()
    expected = np.array(["ill", "well"])[logits.argmax(axis=1)]
    assert result.agents["net"].predict(FRAME[TEST]).tolist() == expected.tolist()


def test_pooled_frames():
    agents = [cd.Agent("a", linear(), FRAME[:60], Y[:60]), cd.Agent("b", linear(), FRAME[60:120], Y[60:120])]
    result = federation(agents, cd.Centralised(), public=None).run(1, **QUIET)
    expected = linear().fit(FRAME[:120], Y[:120])
    for name in "ab":
        np.testing.assert_allclose(
            result.agents[name].predict_proba(FRAME[TEST]), expected.predict_proba(FRAME[TEST]), atol=1e-6
        )


def test_real_values():
    model = make_pipeline(ColumnTransformer([one_hot("sex", "ward")]), Ridge())
    target = FRAME["age"].to_numpy(float)
    expected = clone(model).fit(FRAME[MINE], target[MINE]).predict(FRAME[TEST])
    agent = cd.Agent("a", model, FRAME[MINE], target[MINE])
    made = cd.Federation([agent], cd.Alone(), test=(FRAME[TEST], target[TEST]), task="regression")
    np.testing.assert_allclose(made.run(1, **QUIET).agents["a"].predict(FRAME[TEST]), expected, rtol=1e-5)


def test_advice_for_agents_with_their_own_columns():
    agents = [
        cd.Agent("linear", linear(), FRAME[:60], Y[:60]),
        cd.Agent("number", LogisticRegression(), FRAME.loc[60:99, ["age"]], Y[60:100]),
    ]
    advice = cd.advise(agents, public=FRAME[PUBLIC], seconds=1)
    assert {option.name for option in advice.options} >= {"alone", "fedmd"}
    assert "portable" in advice.left_out["avgkd"]
    assert not any(agent.learner.ready for agent in agents)


# --- texts ------------------------------------------------------------------------------------------------------------

WORDS = RANDOM.choice(["good", "fine", "bad", "poor"], (120, 3))
TEXTS = [" ".join(words) for words in WORDS]
MOODS = np.where(np.isin(WORDS, ["good", "fine"]).sum(axis=1) > 1, "glad", "sad")


@pytest.mark.parametrize(
    "form",
    [list, np.array, pd.Series, lambda x: pd.Series(x, dtype="string")],
    ids=["list", "array", "series", "string"],
)
def test_texts(form):
    def made():
        return make_pipeline(TfidfVectorizer(), LogisticRegression())

    agents = [
        cd.Agent("a", made(), form(TEXTS[:30]), MOODS[:30]),
        cd.Agent("b", made(), form(TEXTS[30:60]), MOODS[30:60]),
    ]
    result = cd.Federation(agents, cd.FedMD(), public=form(TEXTS[60:90]), test=(form(TEXTS[90:]), MOODS[90:])).run(
        2, **QUIET
    )
    again = cd.Agent("a", made(), form(TEXTS[:30]), MOODS[:30])
    own = cd.Federation([again], cd.Alone(), test=(TEXTS[90:], MOODS[90:])).run(1, **QUIET)
    expected = made().fit(TEXTS[:30], MOODS[:30]).predict_proba(TEXTS[90:])
    np.testing.assert_allclose(own.agents["a"].predict_proba(form(TEXTS[90:])), expected, atol=1e-6)
    assert result.agents["b"].predict(["good fine", "bad poor"]).tolist() == ["glad", "sad"]
    assert result.agents["b"].predict([]).tolist() == []


# --- models in files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("safeguard", [False, True])
def test_saved_models_take_frames(tmp_path, safeguard):
    agents = [
        cd.Agent("few", few(), FRAME.loc[:59, ["sex", "age"]], Y[:60]),
        cd.Agent(
            "text",
            make_pipeline(ColumnTransformer([("w", TfidfVectorizer(), "note")]), LogisticRegression()),
            FRAME[60:90],
            Y[60:90],
        ),
        cd.Agent(
            "prepared",
            LogisticRegression(),
            FRAME.loc[90:119, ["ward"]],
            Y[90:120],
            prepare=OneHotEncoder(handle_unknown="ignore"),
        ),
    ]
    result = federation(agents, safeguard=safeguard).run(2, **QUIET)
    strange = FRAME[TEST].assign(ward="x")
    for name, trained in result.agents.items():
        model = cd.load(trained.save(tmp_path / name))
        for rows in (FRAME[TEST], strange, FRAME[:0]):
            np.testing.assert_array_equal(model.predict_proba(rows), trained.predict_proba(rows))
        assert model.feature_names_in_.tolist() == trained.feature_names_in_.tolist()
        assert model.predict(FRAME[TEST]).tolist() == trained.predict(FRAME[TEST]).tolist()


def test_the_command_predict_reads_a_table_of_words(tmp_path, capsys):
    """Types come from the model, since a CSV file has none; columns that it does not know are named."""
    trained = alone(few(), FRAME[["sex", "age", "seen", "ward"]])
    path, table = trained.save(tmp_path / "model"), tmp_path / "table.csv"
    FRAME[TEST].to_csv(table, index=False)
    main(["predict", str(path), str(table), "--out", str(tmp_path / "out.csv")])
    assert "columns that the model does not know are left out: 'note', 'dose'" in capsys.readouterr().err
    assert pd.read_csv(tmp_path / "out.csv")["class"].tolist() == trained.predict(FRAME[TEST]).tolist()


def test_a_saved_model_with_a_function_of_its_owner_is_loaded_into_one_of_its_class(tmp_path):
    trained = alone(rich(), FRAME)
    path = trained.save(tmp_path / "rich")
    with pytest.raises(LearnerError, match="a function of its owner's, which is not in the file"):
        cd.load(path)
    model = cd.load(path, model=rich())
    np.testing.assert_array_equal(model.predict_proba(FRAME[TEST]), trained.predict_proba(FRAME[TEST]))


# --- what cannot be ---------------------------------------------------------------------------------------------------


def nets():
    forms = FRAME[["age"]], FRAME[["age"]].rename(columns={"age": "Age"})
    return [cd.Agent(name, torch.nn.Linear(1, 2), form[:60], Y[:60]) for name, form in zip("ab", forms, strict=True)]


def one(model, x=FRAME, **columns):
    """An agent; with `columns` changed."""
    x = x.assign(**columns)[:60] if columns else x[:60]
    return lambda: [cd.Agent("a", model, x, Y[: len(x)])]


def pair():
    return [cd.Agent(name, linear(), FRAME[:60], Y[:60]) for name in "ab"]


def beside_an_array():
    return [*members(), cd.Agent("x", LogisticRegression(), np.zeros((9, 1)), Y[:9])]


NARROW, ARRAY = FRAME[["age", "sex"]], np.zeros((80, 6))
NOTHING_SHARED = {"protocol": cd.Alone(), "public": None, "test": None}
REFUSED = [
    (nets, {"protocol": cd.FedAvg()}, "fedavg needs the same columns everywhere, since weights are shared"),
    (nets, {"protocol": cd.FedAvg()}, "Did you mean 'age' by 'Age'"),
    (nets, {"protocol": cd.AvgKD()}, "avgkd needs the same columns everywhere, since models are shared"),
    (nets, {"protocol": cd.Centralised()}, "centralised needs the same columns everywhere, since data are pooled"),
    (pair, {"protocol": cd.AvgKD()}, "OneHotEncoder does not travel"),
    (members, {"public": NARROW[PUBLIC]}, "columns of the public data for agent 'rich'.*missing: 'ward'"),
    (members, {"test": (NARROW[TEST], Y[TEST])}, "columns of the test set for agent 'rich'.*missing: 'ward'"),
    (members, {"public": ARRAY}, "The public data must be a data frame: agents have columns of their own"),
    (members, {"test": (ARRAY, Y[TEST])}, "The test set must be a data frame: agents have columns of their own"),
    (beside_an_array, {}, "Agent 'x' must be given a data frame"),
    (one(LogisticRegression()), {}, "LogisticRegression of agent 'a'.*could not convert string"),
    (one(torch.nn.Linear(6, 2)), {}, "'sex'.*'ward' .category.*'seen' .datetime.*\"note\": \"category\""),
    (one(linear(), FRAME.rename(columns={"sex": "Sex"})), NOTHING_SHARED, "unknown column.*Did you mean 'Sex'"),
    (one(LogisticRegression(), ["good", "bad"] * 9), NOTHING_SHARED, "Put a vectoriser before it"),
    (one(make_pipeline(TfidfVectorizer(), LogisticRegression()), ["a", "b"] * 9), NOTHING_SHARED, "Change the options"),
    (one(LogisticRegression(), ["good", None] * 9), NOTHING_SHARED, "a missing one in row 1"),
    (one(linear(), note=[["x"]] * ROWS), {}, "Each cell of column 'note'.*must hold one value"),
    (one(linear(), age=1 << 60), {}, "at most 2.53"),
    (one(linear(), dose=np.inf), {}, "inf in column 'dose', row 0"),
]


@pytest.mark.parametrize(("agents", "more", "words"), REFUSED, ids=[words[:40] for *_, words in REFUSED])
def test_what_cannot_be_is_refused_by_name_before_the_run(agents, more, words):
    with pytest.raises((DataError, LearnerError), match=f"(?s){words}"):
        federation(agents(), **more)


def test_other_kinds_of_values_than_in_training_are_refused():
    trained = alone(rich(), FRAME)
    with pytest.raises(DataError, match="Column 'age' of the samples for agent 'a' must hold numbers"):
        trained.predict(FRAME[TEST].assign(age="old"))
    with pytest.raises(DataError, match="Column 'sex' of the samples for agent 'a' must hold text"):
        trained.predict(FRAME[TEST].assign(sex=1))


def test_an_encoder_that_accepts_nothing_new_is_named_with_its_agent():
    strict = make_pipeline(ColumnTransformer([one_hot("ward", unknown="error")]), LogisticRegression())
    agents = [cd.Agent("a", strict, FRAME[:60], Y[:60]), cd.Agent("b", linear(), FRAME[60:99], Y[60:99])]
    with pytest.raises(
        LearnerError, match="LogisticRegression of agent 'a' must be able to answer.*unknown categories"
    ):
        federation(agents, public=FRAME[PUBLIC].assign(ward="x")).run(1, **QUIET)
