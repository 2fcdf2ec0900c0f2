"""Columns of data frames are found by name, wherever a frame is given; arrays beside frames are reported."""

from __future__ import annotations

import socket

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.datasets import load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import codistill as cd
from codistill.core.errors import DataError, NetworkError
from codistill.nodes.record import record_of

X, Y = load_wine(return_X_y=True, as_frame=True)
ORDER = np.random.default_rng(0).permutation(len(X))
X, Y = ((X - X.mean()) / X.std()).iloc[ORDER], Y.iloc[ORDER].to_numpy()
NAMES = list(X.columns)
QUIET = {"runtime": "simulation", "progress": False}


def same(frame):
    return frame


def reversed_columns(frame):
    return frame[frame.columns[::-1]]


def array(frame):
    return frame.to_numpy()


def arrow(frame):
    return pa.Table.from_pandas(reversed_columns(frame), preserve_index=False)


def net():
    torch.manual_seed(0)
    return torch.nn.Linear(len(NAMES), 3)


def members(first=same, second=same, third=same, model=None):
    forms, starts = {"a": first, "b": second, "c": third}, (0, 40, 80)
    return [
        cd.Agent(name, (model or net)(), form(X[start : start + 40]), Y[start : start + 40])
        for (name, form), start in zip(forms.items(), starts, strict=True)
    ]


def run(first=same, second=same, third=same, public=same, test=same, protocol=None, model=None, rounds=2):
    shared = {"public": public(X[120:150]), "test": (test(X[150:]), Y[150:])}
    return cd.Federation(members(first, second, third, model), protocol or cd.FedMD(), **shared).run(rounds, **QUIET)


def forest():
    return RandomForestClassifier(5, random_state=0)


# --- agents, public data, tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "protocol", [cd.FedMD(), cd.FedAvg(), cd.FedDF(), cd.Centralised()], ids=lambda each: each.name
)
@pytest.mark.parametrize(
    "forms",
    [
        {"second": reversed_columns},
        {"first": reversed_columns},
        {"public": reversed_columns, "test": reversed_columns},
        {"first": reversed_columns, "public": reversed_columns},
        {"third": arrow, "public": arrow, "test": arrow},
    ],
    ids=["an agent", "the first agent", "public and test", "an agent and public", "tables of arrow"],
)
def test_columns_in_another_order_give_the_same_run(protocol, forms):
    expected, found = run(protocol=protocol), run(**forms, protocol=protocol)
    assert found.rows == expected.rows
    assert found.alone_rows == expected.alone_rows
    np.testing.assert_array_equal(found.agents["b"].decision_function(X), expected.agents["b"].decision_function(X))


def test_frames_that_agree_keep_their_order():
    """The order that they have, not a sorted one: results of frames that agreed before stay as they were."""
    result = run(model=forest)
    assert result.agents["a"].feature_names_in_.tolist() == NAMES != sorted(NAMES)
    plain = cd.Federation(
        [cd.Agent(each.name, forest(), *record_of(each).data) for each in members()],
        cd.FedMD(), public=X[120:150].to_numpy(), test=(X[150:].to_numpy(), Y[150:]),
    ).run(2, **QUIET)  # fmt: skip
    assert result.rows == plain.rows
    assert not result.events
    assert not plain.events


@pytest.mark.parametrize(
    ("forms", "owner"),
    [
        ({"second": lambda frame: frame.rename(columns={"hue": "Hue "})}, "agent 'b'"),
        ({"public": lambda frame: frame.rename(columns={"hue": "Hue "})}, "the public data"),
        ({"test": lambda frame: frame.rename(columns={"hue": "Hue "})}, "the test set"),
    ],
)
def test_other_columns_are_refused_by_name(forms, owner):
    with pytest.raises(DataError) as caught:
        run(**forms, protocol=cd.FedAvg())
    assert f"The columns of {owner} must be those of agent 'a'" in caught.value.must
    assert caught.value.found == "missing: 'hue'; extra: 'Hue '"
    assert "Did you mean 'hue' by 'Hue '?" in caught.value.do


def test_entirely_other_names_a_missing_and_a_further_column_are_refused():
    for form in (lambda frame: frame.add_prefix("x_"), lambda frame: frame.drop(columns="hue"),
                 lambda frame: frame.assign(more=1.0)):  # fmt: skip
        with pytest.raises(DataError, match="The columns of agent 'b' must be those of agent 'a': fedavg needs"):
            run(second=form, protocol=cd.FedAvg())


def test_an_agents_own_test_data_are_aligned():
    agents = members()
    agents[1] = cd.Agent("b", net(), X[40:80], Y[40:80], test=(reversed_columns(X[150:]), Y[150:]))
    made = cd.Federation(agents, cd.FedAvg())
    np.testing.assert_array_equal(record_of(made.agents[1]).test[0], X[150:].to_numpy())
    agents = members()
    agents[1] = cd.Agent("b", net(), X[40:80], Y[40:80], test=(X[150:].rename(columns={"hue": "tint"}), Y[150:]))
    with pytest.raises(DataError, match="the test data of agent 'b'.*missing: 'hue'; extra: 'tint'"):
        cd.Federation(agents, cd.FedAvg())


def test_the_order_is_the_most_frequent_one_and_else_that_of_the_public_data():
    orders = {
        "two of three": ((same, reversed_columns, same), same, NAMES),
        "two of three, against public": ((same, reversed_columns, same), reversed_columns, NAMES),
        "no two": ((lambda frame: frame[sorted(NAMES)], reversed_columns, same), same, NAMES),
    }
    for forms, public, expected in orders.values():
        made = cd.Federation(members(*forms), cd.FedMD(), public=public(X[120:150]))
        assert list(made.description.columns) == expected
        np.testing.assert_array_equal(made.public.x, X[120:150][expected].to_numpy())
        for agent, start in zip(made.agents, (0, 40, 80), strict=True):
            np.testing.assert_array_equal(agent.shard.x, X[start : start + 40][expected].to_numpy())


def test_a_plain_array_beside_frames_is_reported_and_needs_one_order(capsys):
    result = run(public=array, second=array)
    assert result.rows == run().rows
    said = [event for event in result.events if "a plain array beside data frames" in event]
    assert [event.split(": ")[1] for event in said] == ["agent 'b'", "the public data"]
    assert "note: the public data: a plain array" in capsys.readouterr().err
    assert result.agents["b"].feature_names_in_.tolist() == NAMES  # so that frames are aligned when it predicts
    for forms in ({"public": array}, {"third": array}, {"test": array}):
        with pytest.raises(DataError, match="must have the same column order.*agent 'b'"):
            run(second=reversed_columns, **forms)
    with pytest.raises(DataError, match="must have the shape"):
        run(public=lambda frame: frame.to_numpy()[:, :3])


def test_an_agent_in_another_order_is_reported():
    said = "round 1: agent 'b': its columns are brought into the order of the others"
    assert run(second=reversed_columns).events == [said]


def test_numbered_columns_are_those_of_an_array_and_other_names_become_text():
    numbered = X.set_axis(range(len(NAMES)), axis=1)
    agents = [
        cd.Agent("a", net(), numbered[:40], Y[:40]),
        cd.Agent("b", net(), reversed_columns(numbered[40:80]), Y[40:80]),
        cd.Agent("c", net(), X[80:120].to_numpy(), Y[80:120]),
    ]
    made = cd.Federation(agents, cd.FedAvg())
    for agent, start in zip(made.agents, (0, 40, 80), strict=True):
        np.testing.assert_array_equal(agent.shard.x, X[start : start + 40].to_numpy())
    levels = X.set_axis(pd.MultiIndex.from_product([["wine"], NAMES]), axis=1)
    agents = [
        cd.Agent("a", net(), levels[:40], Y[:40]),
        cd.Agent("b", net(), reversed_columns(levels[40:80]), Y[40:80]),
    ]
    assert cd.Federation(agents, cd.FedAvg()).description.columns[0] == "wine, alcohol"
    np.testing.assert_array_equal(agents[1].shard.x, X[40:80].to_numpy())


def test_a_name_that_occurs_twice_is_refused():
    twice = X.set_axis([*NAMES[:-1], NAMES[0]], axis=1)
    with pytest.raises(DataError, match="Column names of the samples x of agent 'a' must be unique.*'alcohol' more"):
        cd.Agent("a", net(), twice, Y)
    with pytest.raises(DataError, match="'alcohol' more than once"):
        run().agents["a"].predict(twice)
    with pytest.raises(DataError, match="'alcohol' more than once"):
        cd.Columns({}).fit(twice)


def test_booleans_beside_numbers_are_numbers():
    for more in ({}, {"c": pd.array([1, None], dtype="Int64")}):
        frame = pd.DataFrame({"a": [True, False], "b": [1.5, 2.5], **more})
        agent = cd.Agent("a", RandomForestClassifier(2), frame, [0, 1])
        cd.Federation([agent], cd.Alone(refit=True))
        np.testing.assert_array_equal(agent.shard.x[:, :2], [[1, 1.5], [0, 2.5]])
    assert np.isnan(agent.shard.x[1, 2])


# --- predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [False, True], ids=["in memory", "saved"])
def test_predictions_find_columns_by_name(saved, tmp_path, capsys):
    trained = run(second=reversed_columns, model=forest).agents["b"]
    model = cd.load(trained.save(tmp_path / "model")) if saved else trained
    expected = trained.predict_proba(X)
    for frame in (reversed_columns(X), arrow(X), X.assign(more=1.0)[["more", *sorted(NAMES)]]):
        np.testing.assert_array_equal(model.predict_proba(frame), expected)
    assert model.feature_names_in_.tolist() == NAMES
    with pytest.raises(DataError, match="'hue'"):
        model.predict(X.rename(columns={"hue": "hues"}))
    assert not capsys.readouterr().err.count("by position")
    for _ in range(2):  # reported once
        np.testing.assert_array_equal(model.predict_proba(X.to_numpy()), expected)
    assert capsys.readouterr().err.count("agent 'b' predicts columns by position: a plain array") == 1


def test_a_frame_for_a_model_of_arrays_is_reported(capsys):
    trained = run(array, array, array, array, array).agents["a"]
    assert not hasattr(trained, "feature_names_in_")
    trained.predict(X)
    assert "agent 'a' predicts columns by position: a data frame" in capsys.readouterr().err
    numbered = X.set_axis(range(len(NAMES)), axis=1)
    np.testing.assert_array_equal(trained.predict(reversed_columns(numbered)), trained.predict(X))


def test_advice_aligns_columns():
    def advised(form):
        return cd.advise(members(second=form)[:2], public=form(X[120:150]), rounds=1, seconds=0.01).facts

    assert advised(reversed_columns) == advised(same)


# --- options that name columns --------------------------------------------------------------------------------------


def scaled(columns):
    return lambda: make_pipeline(make_column_transformer((StandardScaler(), columns)), LogisticRegression())


TWO = ["hue", "proline"]
PLACES = [NAMES.index(name) for name in TWO]


@pytest.mark.parametrize(
    "columns",
    [TWO, np.array(TWO), make_column_selector(pattern="hue|proline"), lambda frame: [name in TWO for name in frame]],
    ids=["list", "array", "selector", "mask of a function"],
)
def test_a_column_transformer_may_name_columns(columns, tmp_path):
    """As with the positions of these columns; also where the agent's own order is another one."""
    expected = run(model=scaled(sorted(PLACES)))
    for form in (same, reversed_columns):
        found = run(model=scaled(columns), second=form)
        assert found.rows == expected.rows
    saved = cd.load(found.agents["b"].save(tmp_path / "model")) if not callable(columns) else found.agents["b"]
    np.testing.assert_array_equal(saved.predict_proba(reversed_columns(X)), expected.agents["b"].predict_proba(X))


def as_column(values):
    return np.asarray(values).reshape(-1, 1)


@pytest.mark.parametrize("select", [lambda frame: "hue", lambda frame: slice("hue", "hue")], ids=["name", "slice"])
def test_a_function_may_select_one_column_by_its_name(select):
    """As its position does, also where the agent's own order is another one."""

    def model(columns):
        one = make_column_transformer((FunctionTransformer(as_column), columns))
        return lambda: make_pipeline(one, LogisticRegression())

    expected = run(model=model(NAMES.index("hue")))
    for form in (same, reversed_columns):
        assert run(model=model(select), second=form).rows == expected.rows


def test_other_options_that_name_columns():
    def boosted(**options):
        return lambda: HistGradientBoostingClassifier(max_iter=3, min_samples_leaf=3, **options)

    binary = np.minimum(Y, 1)
    for named, placed in (
        ({"categorical_features": ["hue"]}, {"categorical_features": [NAMES.index("hue")]}),
        ({"monotonic_cst": {"hue": 1}}, {"monotonic_cst": [int(name == "hue") for name in NAMES]}),
    ):
        frame = X.assign(hue=X["hue"].rank(method="dense").astype(int) % 5)
        rows = []
        for options in (named, placed):
            agent = cd.Agent("a", boosted(**options)(), frame, binary)
            made = cd.Federation([agent], cd.Alone(refit=True), test=(frame, binary))
            rows.append(made.run(1, alone=False, **QUIET).agents["a"].predict_proba(frame))
        np.testing.assert_array_equal(*rows)


def test_prepare_may_name_columns():
    def made(columns, form=same):
        prepare = make_column_transformer((StandardScaler(), columns))
        agents = [
            cd.Agent(name, LogisticRegression(), form(X[start::2]), Y[start::2], prepare=prepare)
            for start, name in enumerate("ab")
        ]
        return cd.Federation(agents, cd.FedMD(), public=X[:30], test=(X, Y)).run(1, **QUIET).rows

    assert made(TWO) == made(PLACES) == made(TWO, reversed_columns)


def test_an_array_beside_frames_takes_their_names():
    """Also in the baseline: what it prepares by name is prepared there too."""
    agents = members()
    prepare = make_column_transformer((StandardScaler(), TWO))
    agents[2] = cd.Agent("c", LogisticRegression(), X[80:120].to_numpy(), Y[80:120], prepare=prepare)
    result = cd.Federation(agents, cd.FedMD(), public=X[120:150], test=(X, Y)).run(1, **QUIET)
    np.testing.assert_array_equal(
        result.agents["c"].predict_proba(reversed_columns(X)), result.agents["c"].predict_proba(X)
    )
    assert len(result.alone_rows) == 3


def test_columns_that_cannot_be_named_are_refused_before_the_run():
    with pytest.raises(
        DataError, match="ColumnTransformer of agent 'a' names an unknown column.*'hues'.*Did you mean 'hue'"
    ):
        run(model=scaled(["hues"]))
    with pytest.raises(DataError, match="ColumnTransformer of agent 'a' must give columns by position.*no names"):
        run(array, array, array, array, array, model=scaled(TWO))
    agent = cd.Agent("a", scaled(TWO)(), X, Y, prepare=StandardScaler())
    with pytest.raises(DataError, match="must give columns by position.*without a transformer prepare="):
        cd.Federation([agent], cd.Alone(refit=True))


def test_positions_mean_the_columns_as_they_were_given():
    with pytest.raises(
        DataError, match="ColumnTransformer of agent 'b' gives columns by position.*Use column names there"
    ):
        run(second=reversed_columns, model=scaled(PLACES))
    first = make_column_transformer((StandardScaler(), [0]))
    moved = cd.Agent("d", LogisticRegression(), reversed_columns(X), Y, prepare=first)
    with pytest.raises(
        DataError, match="of agent 'd' gives columns by position, so its x must have the common column order"
    ):
        cd.Federation([*members(), moved], cd.FedMD(), public=X)


# --- between machines -------------------------------------------------------------------------------------------------


def between_machines(forms, protocol, public=None, publics=(None, None, None), wait=60):
    """What three agents answer after a run under a hub; an error where one has failed."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    common = {"insecure": True, "background": True, "log": False}
    shared = {} if public is None else {"public": public(X[120:150])}
    hub = cd.serve(protocol, ["a", "b", "c"], classes=3, listen=address, rounds=2, progress=False, **shared, **common)
    started = []
    try:
        for agent, form in zip(members(*forms), publics, strict=True):
            own = {} if form is None else {"public": form(X[120:150])}
            test = reversed_columns(X[150:]), Y[150:]
            started.append(cd.join(agent, address, test=test, safeguard=False, **own, **common))
        return [node.wait(wait).decision_function(X) for node in started], hub.wait(wait)
    finally:
        for node in (hub, *started):
            node._process.stop()
            node._process.end()


@pytest.mark.usefixtures("time_limit")
def test_agents_of_a_hub_have_the_order_that_a_simulation_has():
    expected = run(protocol=cd.FedAvg())
    assert run(reversed_columns, same, same, protocol=cd.FedAvg()).rows == expected.rows
    answers, result = between_machines((reversed_columns, same, same), cd.FedAvg())
    for name, answer in zip("abc", answers, strict=True):
        np.testing.assert_array_equal(answer, expected.agents[name].decision_function(X))
    assert [row["accuracy"] for row in result.rows] == [row["accuracy"] for row in expected.rows]


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("runtime", ["processes", "network"])
@pytest.mark.parametrize("protocol", [cd.FedMD(), cd.DDistillation(local_steps=2)], ids=["hub", "peers"])
def test_notes_and_figures_are_equal_in_every_runtime(protocol, runtime):
    def made():
        return cd.Federation(
            members(second=reversed_columns), protocol, public=reversed_columns(X[120:150]), test=(X[150:], Y[150:])
        )

    expected, found = made().run(2, **QUIET), made().run(2, runtime=runtime, progress=False)
    assert (found.rows, found.events) == (expected.rows, expected.events)
    assert len(found.events) == 1


@pytest.mark.usefixtures("time_limit")
def test_public_data_may_have_other_orders_on_every_node():
    expected = run(protocol=cd.FedDF())
    answers, _ = between_machines(
        (same, reversed_columns, same), cd.FedDF(), reversed_columns, (same, reversed_columns, arrow)
    )
    for name, answer in zip("abc", answers, strict=True):
        np.testing.assert_array_equal(answer, expected.agents[name].decision_function(X))


@pytest.mark.usefixtures("time_limit")
def test_an_agent_with_other_columns_may_not_join():
    def misspelt(frame):
        return frame.rename(columns={"hue": "tint"})

    with pytest.raises(
        NetworkError, match="its columns differ from those of the federation: missing: 'hue'; extra: 'tint'"
    ):
        between_machines((misspelt, same, same), cd.FedAvg())
