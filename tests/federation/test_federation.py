"""The Python interface: a few lines from models and data to figures, each figure derived here by hand."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import Ridge
from sklearn.naive_bayes import GaussianNB
from sklearn.preprocessing import StandardScaler
from torch import nn

import codistill as cd
from codistill.core.errors import CheckpointError, DataError, LearnerError, RecipeError
from codistill.engine.runtime import run
from codistill.network.terms import hello_of
from codistill.nodes.record import record_of
from codistill.runtimes.simulation import LocalRuntime

X, Y = load_wine(return_X_y=True)
ORDER = np.random.default_rng(0).permutation(len(X))
X, Y = ((X - X.mean(axis=0)) / X.std(axis=0))[ORDER].astype(np.float32), Y[ORDER]
PUBLIC, TEST = X[80:110], (X[110:], Y[110:])
QUIET = {"runtime": "simulation", "progress": False}


def module(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 8), nn.ReLU(), nn.Linear(8, outputs))


def agents():
    return [
        cd.Agent("clinic", RandomForestClassifier(3), X[:40], Y[:40]),
        cd.Agent("lab", module(), X[40:80], Y[40:80]),
    ]


def federation(members=None, protocol=None, **options):
    return cd.Federation(members or agents(), protocol or cd.FedMD(), **{"public": PUBLIC, "test": TEST, **options})


def lone(model, x=X[:40], y=Y[:40], test=None, **options):
    return cd.Federation([cd.Agent("a", model, x, y, test=test)], cd.Alone(), **options).run(1, **QUIET)


# --- the few lines of the manual ------------------------------------------------------------------------


def test_accuracy_is_that_of_the_agents_answers():
    result = federation().run(2, **QUIET)
    for row in result.rows[-2:]:
        right = result.agents[row["agent"]].predict(TEST[0]) == TEST[1]
        assert row["accuracy"] == pytest.approx(right.mean())
        assert row["test_samples"] == len(TEST[0])


def test_a_few_lines_are_enough(tmp_path, capsys):
    members = agents()
    result = cd.Federation(members, cd.FedMD(), public=PUBLIC, test=TEST, seed=0).run(rounds=2)
    answers = result.agents["lab"].predict_proba(X[:5])
    assert answers.shape == (5, 3)
    assert answers.sum(axis=1) == pytest.approx(np.ones(5), abs=1e-5)
    frame = result.frame()
    assert isinstance(frame, pd.DataFrame)
    assert list(zip(frame["round"], frame["agent"], strict=True)) == [
        (1, "clinic"),
        (1, "lab"),
        (2, "clinic"),
        (2, "lab"),
    ]
    assert frame.columns.tolist() == [
        "round", "agent", "present", "sent", "received", "steps", "exchanges", "disagreement", "accuracy",
        "own_accuracy", "test_samples",
    ]  # fmt: skip
    assert result.report(tmp_path / "report.html").read_text().startswith("<!")
    assert "clinic" in repr(result)
    assert not result.interrupted
    assert "fedmd: round 2/2" in capsys.readouterr().err


@pytest.mark.parametrize("runtime", ["simulation", "processes"])
def test_agents_answer_as_they_were_when_last_measured(runtime):
    result = federation().run(2, runtime=runtime, progress=False, alone=False)
    measured = {row["agent"]: row["accuracy"] for row in result.rows}
    for name, agent in result.agents.items():
        assert measured[name] == pytest.approx(np.mean(agent.predict(TEST[0]) == TEST[1]))


def test_both_runtimes_give_the_same_figures():
    rows = [federation(seed=4).run(2, runtime=kind, progress=False).rows for kind in ("simulation", "processes")]
    assert rows[0] == rows[1]


def test_the_seed_is_all_there_is_to_chance():
    assert federation(seed=4).run(2, **QUIET).rows == federation(seed=4).run(2, **QUIET).rows
    assert federation(seed=4).run(2, **QUIET).rows != federation(seed=5).run(2, **QUIET).rows
    assert federation(seed=np.int64(4)).run(2, **QUIET).rows == federation(seed=4).run(2, **QUIET).rows


def test_alone_is_the_same_agents_without_one_another():
    """The yardstick beside a run is the protocol 'alone' with the same seed."""
    beside = federation(seed=2).run(2, **QUIET)
    apart = cd.Federation(agents(), cd.Alone(), test=TEST, seed=2).run(2, **QUIET)
    last = {row["agent"]: row["accuracy"] for row in apart.rows if row["round"] == 2}
    assert {line.name: line.alone for line in beside.summary().lines()} == last
    for line in beside.summary().lines():
        assert line.gain == pytest.approx(line.together - last[line.name])
    assert federation().run(1, alone=False, **QUIET).summary().lines()[0].gain is None


# --- what is measured, by hand ----------------------------------------------------------------------------


class Constant:
    """Says the same of everything."""

    def __init__(self, answer):
        self.answer = answer

    def fit(self, x, targets):
        pass

    def predict(self, x):
        return np.tile(self.answer, (len(x), 1))


def test_own_accuracy_weighs_the_classes_as_the_agent_holds_them():
    """The agent holds 6, 3, 1 of classes 0, 1, 2; the test set 2, 2, 4. It always says 0: right on both 0s only.

    Weights of the test samples: class 0: 6/2, class 1: 3/2, class 2: 1/4, each as often as tested:
    own accuracy = 2 · 6/2 / (2 · 6/2 + 2 · 3/2 + 4 · 1/4) = 6 / 10; accuracy = 2 / 8.
    """
    y, tested = np.repeat([0, 1, 2], [6, 3, 1]), np.repeat([0, 1, 2], [2, 2, 4])
    result = lone(Constant([1.0, 0, 0]), X[:10], y, seed=0)
    assert "own_accuracy" not in result.rows[0], "nothing to measure it on"
    result = cd.Federation(
        [cd.Agent("a", Constant([1.0, 0, 0]), X[:10], y)], cd.Alone(), test=(X[:8], tested)
    ).run(1, **QUIET)  # fmt: skip
    assert result.rows[0]["accuracy"] == pytest.approx(2 / 8)
    assert result.rows[0]["own_accuracy"] == pytest.approx(6 / 10)


def test_own_accuracy_leaves_out_classes_that_are_not_tested():
    """It holds 6, 3 of classes 0, 1 and 1 of class 2, which the test set lacks: 6 / (6 + 3)."""
    y = np.repeat([0, 1, 2], [6, 3, 1])
    made = cd.Federation([cd.Agent("a", Constant([1.0, 0, 0]), X[:10], y)], cd.Alone(), test=(X[:4], [0, 0, 1, 1]))
    assert made.run(1, **QUIET).rows[0]["own_accuracy"] == pytest.approx(6 / 9)


def test_without_any_test_set():
    result = cd.Federation(agents(), cd.FedMD(), public=PUBLIC).run(2, **QUIET)
    assert result.frame().columns.tolist() == [
        "round", "agent", "present", "sent", "received", "steps", "exchanges", "disagreement",
    ]  # fmt: skip
    assert "not evaluated: no common test set" in repr(result)


@pytest.mark.parametrize("common", [None, TEST])
def test_an_agents_own_test_data_is_what_own_accuracy_is_measured_on(common, tmp_path):
    own = (X[:7], Y[:7])
    made = cd.Federation([cd.Agent("a", GaussianNB(), X[20:60], Y[20:60], test=own)], cd.Alone(), test=common)
    result = made.run(1, **QUIET)
    model = GaussianNB().fit(X[20:60], Y[20:60])
    (row,) = result.rows
    assert row["own_accuracy"] == pytest.approx(np.mean(model.predict(own[0]) == own[1]))
    if common is None:
        assert "accuracy" not in row
    else:
        assert row["accuracy"] == pytest.approx(np.mean(model.predict(TEST[0]) == TEST[1]))
    assert result.summary().lines()[0].own_together == row["own_accuracy"]
    assert result.report(tmp_path / "report.html").exists()


def test_real_valued_targets_are_measured_by_rmse(tmp_path):
    """rmse² = mean over samples and columns of (answer - target)²."""
    targets = np.stack([2 * X[:, 0] + X[:, 1] ** 2, X[:, 1] - X[:, 2]], axis=1)
    made = cd.Federation(
        [cd.Agent("a", Ridge(), X[:40], targets[:40], test=(X[40:60], targets[40:60]))],
        cd.Alone(), test=(X[110:], targets[110:]),
    )  # fmt: skip
    result = made.run(1, **QUIET)
    model = Ridge().fit(X[:40], targets[:40])
    (row,) = result.rows
    for key, part in (("rmse", slice(110, None)), ("own_rmse", slice(40, 60))):
        wanted = np.sqrt(np.mean((model.predict(X[part]) - targets[part]) ** 2))
        assert row[key] == pytest.approx(wanted, rel=1e-5)
    assert "accuracy" not in row
    assert result.summary().metric == "rmse"
    assert result.agents["a"].predict(X[:3]) == pytest.approx(model.predict(X[:3]), abs=1e-5)
    assert "rmse" in result.report(tmp_path / "report.html").read_text().lower()


def test_evaluation_every_so_often_and_on_so_many_samples():
    """Of five rounds the 2nd and 4th, on 9 samples; and the last, always, on all."""
    result = federation().run(5, evaluate_every=2, evaluate_samples=9, **QUIET)
    scored = {(row["round"], row.get("test_samples")) for row in result.rows}
    assert scored == {(1, None), (2, 9), (3, None), (4, 9), (5, len(TEST[0]))}
    for row in result.rows:
        assert ("accuracy" in row) == ("test_samples" in row)
    assert "accuracy on the common test set (68 samples; classification, 3 classes) after 5 rounds" in " ".join(
        repr(result).split()
    )
    # A share of 9 samples is a multiple of 1/9.
    assert all(
        9 * row["accuracy"] == pytest.approx(round(9 * row["accuracy"])) for row in result.rows if row["round"] == 2
    )


def test_more_samples_than_there_are_is_all_of_them():
    rows = federation().run(2, evaluate_samples=10_000, **QUIET).rows
    assert {row["test_samples"] for row in rows} == {len(TEST[0])}


# --- bytes ------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_messages():
    """Watched one by one: what is sent to and fro is what the rows say."""
    seen = []
    made = federation(watchers=[lambda sender, receiver, data: seen.append((sender, receiver, len(data)))])
    result = made.run(2, alone=False, **QUIET)
    for name in ("clinic", "lab"):
        rows = [row for row in result.rows if row["agent"] == name]
        assert sum(row["sent"] for row in rows) == sum(size for sender, _, size in seen if sender == name)
        assert sum(row["received"] for row in rows) == sum(size for _, receiver, size in seen if receiver == name)
    line = result.summary().lines()[0]
    assert line.sent == sum(size for sender, _, size in seen if sender == "clinic")


# --- folders ------------------------------------------------------------------------------------------------


def test_a_run_kept_in_a_folder_goes_on(tmp_path):
    whole = federation().run(4, **QUIET)
    federation().run(2, folder=tmp_path / "run", **QUIET)
    rest = federation().run(4, folder=tmp_path / "run", resume=True, **QUIET)
    assert rest.rows == whole.rows
    assert rest.agents["lab"].predict_proba(X[:5]) == pytest.approx(whole.agents["lab"].predict_proba(X[:5]), abs=0)


def test_a_run_overwrites_no_other(tmp_path):
    federation().run(1, folder=tmp_path / "run", **QUIET)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(RecipeError, match=r"A new run needs a folder of its own.*resume=True"):
        federation(seed=9).run(1, folder=tmp_path / "run", **QUIET)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_run_is_resumed_with_its_own_agents(tmp_path):
    federation().run(1, folder=tmp_path / "run", alone=False, **QUIET)

    def resumed(*members):
        return federation(list(members)).run(2, folder=tmp_path / "run", resume=True, alone=False, **QUIET)

    with pytest.raises(CheckpointError, match=r"must be resumed with the agents.*a run of clinic, hub, lab"):
        resumed(cd.Agent("clinic", RandomForestClassifier(3), X[:40], Y[:40]))
    other = nn.Sequential(nn.Linear(13, 5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(CheckpointError, match=r"must be resumed with the agents and models"):
        resumed(agents()[0], cd.Agent("lab", other, X[40:80], Y[40:80]))
    assert len(resumed(*agents()).rows) == 4


def test_to_resume_takes_a_folder():
    with pytest.raises(RecipeError, match="To resume, a run needs its folder"):
        federation().run(1, resume=True, **QUIET)


def test_agents_that_have_learned_do_not_start_again():
    """What they were taught in the first run would count for the second."""
    members = agents()
    made = federation(members)
    made.run(1, **QUIET)
    for again in (made, federation(members, cd.Alone())):
        with pytest.raises(RecipeError, match=r"'clinic' has learned in an earlier run.*Make new agents"):
            again.run(1, **QUIET)


def test_the_agents_alone_leave_the_agents_as_they_were():
    members = agents()
    before = copy.deepcopy(members[1].learner.weights())
    made = federation(members)
    baseline = made.description.baseline()
    run(baseline, LocalRuntime(baseline))
    after = members[1].learner.weights()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert not members[0].learner.ready


# --- many kinds of input ----------------------------------------------------------------------------------------


def test_lists_tensors_and_frames_are_data_too():
    forms = [X[:40].tolist(), torch.from_numpy(X[:40]), pd.DataFrame(X[:40]), X[:40].astype(np.float64)]
    labels = [Y[:40].tolist(), torch.from_numpy(Y[:40]), pd.Series(Y[:40]), Y[:40].astype(np.float32)]
    answers = [
        lone(GaussianNB(), x, y, classes=3).agents["a"].predict_proba(X[:3]) for x, y in zip(forms, labels, strict=True)
    ]
    np.testing.assert_array_equal(answers[0], answers[3])  # lists of Python's numbers are float64
    np.testing.assert_array_equal(answers[1], answers[2])  # the tensor and the frame are float32
    np.testing.assert_allclose(answers[0], answers[1], atol=1e-3)


def test_a_sample_must_look_as_those_of_training():
    agent = federation().run(1, alone=False, **QUIET).agents["lab"]
    for wrong, found in [(X[:2, :5], "(2, 5)"), (X[0], "(13,)"), (np.zeros((2, 13, 1)), "(2, 13, 1)")]:
        with pytest.raises(DataError) as caught:
            agent.predict(wrong)
        assert found in caught.value.found
    with pytest.raises(DataError, match="finite"):
        agent.predict(np.full((1, 13), np.inf))
    with pytest.raises(DataError, match="numbers"):
        agent.predict([["a"] * 13])
    assert agent.predict_proba(X[:2].tolist()).shape == (2, 3)


def test_predictions_are_those_of_scikit_learn():
    """Labels from `predict`, probabilities from `predict_proba`, both those of the model itself."""
    agent = lone(GaussianNB(), X[:40], Y[:40], seed=0).agents["a"]
    model = GaussianNB().fit(X[:40], Y[:40])
    assert agent.is_classifier
    np.testing.assert_array_equal(agent.predict(X[40:60]), model.predict(X[40:60]))
    np.testing.assert_allclose(agent.predict_proba(X[40:60]), model.predict_proba(X[40:60]), atol=1e-6)
    np.testing.assert_array_equal(agent.decision_function(X[40:60]), agent.predict_proba(X[40:60]))


def test_a_regressor_on_labels_has_classes_and_no_probabilities():
    agent = lone(Ridge(), X[:40], Y[:40]).agents["a"]
    model = Ridge().fit(X[:40], np.eye(3)[Y[:40]])
    np.testing.assert_array_equal(agent.predict(X[40:60]), model.predict(X[40:60]).argmax(axis=1))
    with pytest.raises(DataError, match=r"must be at least 0 and add up to 1.*answers"):
        agent.predict_proba(100 * X[40:60])
    assert agent.answers(X[40:60]) == pytest.approx(model.predict(X[40:60]), abs=1e-5)


def test_real_valued_targets_have_no_probabilities():
    agent = lone(Ridge(), X[:40], X[:40, :2]).agents["a"]
    assert not agent.is_classifier
    assert agent.predict(X[:3]).shape == (3, 2)
    with pytest.raises(DataError, match=r"Probabilities are for classes.*Use predict"):
        agent.predict_proba(X[:3])


def test_a_topology_of_ones_own():
    names = ["a", "b", "c"]
    members = [
        cd.Agent(name, Ridge(), X[20 * i : 20 * i + 20], Y[20 * i : 20 * i + 20]) for i, name in enumerate(names)
    ]
    path = cd.Topology(names, [("a", "b"), ("b", "c")])
    result = cd.Federation(members, cd.AvgKD(), topology=path, test=TEST).run(1, alone=False, **QUIET)
    a, b, c = (row["received"] for row in result.rows)
    sent = {row["agent"]: row["sent"] for row in result.rows}
    assert b == sent["a"] + sent["c"], "b hears a and c"
    assert a == c == sent["b"] / 2, "which hear b only"


@pytest.mark.parametrize(
    ("protocol", "topology", "words"),
    [
        (cd.FedMD(), cd.Topology.ring(["clinic", "lab"]), "fedmd needs a topology with a hub"),
        (cd.FedMD(), cd.Topology.star(["clinic", "shop"]), "a topology of clinic, shop; agents clinic, lab"),
        (cd.FedMD(), "ring", "The topology must be a Topology"),
    ],
)
def test_a_topology_that_cannot_be_used(protocol, topology, words):
    with pytest.raises(RecipeError, match=words):
        federation(protocol=protocol, topology=topology)


def test_neighbours_need_links_between_them():
    members = [cd.Agent(name, GaussianNB(), X[:20], Y[:20]) for name in "ab"]
    with pytest.raises(RecipeError, match=r"avgkd speak to one another.*a star, with links to the hub only"):
        cd.Federation(members, cd.AvgKD(), topology=cd.Topology.star(["a", "b"]))


def test_pooled_data_is_everybodys():
    made = cd.Federation(agents(), cd.Centralised(), test=TEST)
    assert [len(agent.shard) for agent in made.agents] == [80, 80]
    assert [record_of(agent).class_mix.sum() for agent in made.agents] == [40, 40], "its own mix stays its own"
    assert made.run(1, runtime="processes", progress=False).alone_rows is None


def test_pooled_labels_and_soft_labels_mix():
    soft = np.eye(3, dtype=np.float32)[Y[40:80]] * 0.9
    members = [cd.Agent("a", module(), X[:40], Y[:40]), cd.Agent("b", module(), X[40:80], soft)]
    made = cd.Federation(members, cd.Centralised(), test=TEST)
    assert made.agents[0].shard.targets[40:] == pytest.approx(soft)


@pytest.mark.parametrize(
    ("seed", "good"), [(0, True), (np.int64(3), True), (-1, False), (True, False), (1.5, False), ("a", False)]
)
def test_the_seed_is_an_integer(seed, good):
    if good:
        assert type(federation(seed=seed).seed) is int
        return
    with pytest.raises(RecipeError, match="seed must be an integer of at least 0"):
        federation(seed=seed)


def test_every_agent_has_a_model_of_its_own():
    """One module for two would learn twice in one process, and once in each of two."""
    shared = module()
    for models in ([shared, shared], [cd.TorchLearner(shared), cd.TorchLearner(shared)], [GaussianNB()] * 2):
        members = [cd.Agent(name, model, X[:40], Y[:40]) for name, model in zip("ab", models, strict=True)]
        with pytest.raises(LearnerError, match=r"agents 'a' and 'b' share one.*deepcopy"):
            federation(members)


def test_a_result_holds_the_events_of_its_rounds() -> None:
    """A message that is refused is not lost in silence, whatever is shown."""
    x = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
    agents = [cd.Agent(name, torch.nn.Linear(2, 2), x, (x[:, 0] > 0).astype(int)) for name in ("a", "b")]
    gone = [cd.Fault(kind="gone", agent="b", first=2)]
    result = cd.Federation(agents, cd.FedAvg(), faults=gone).run(2, runtime="simulation", alone=False, progress=False)
    assert result.events == ["round 2: absent: b"]


def test_what_agents_do_alone_is_not_an_option_of_the_run() -> None:
    agent = cd.Agent("a", torch.nn.Linear(2, 2), [[0.0, 1.0], [1.0, 0.0]], [0, 1])
    with pytest.raises(RecipeError, match="alone must be true or false.*define alone"):
        cd.Federation([agent], cd.Alone()).run(1, alone=cd.Alone())


# --- samples that are withheld ----------------------------------------------------------------------


@pytest.mark.parametrize("as_given", [np.asarray, list, pd.Series, torch.tensor], ids=lambda kind: kind.__name__)
def test_a_withheld_sample_is_in_nothing_that_an_agent_has(as_given):
    """Not in what it joins with, its preparation, its class counts, the classes of all, or its own model."""
    names = np.array(["benign", "severe", "unclear"])
    kept = np.arange(40) >= 10

    def joined(x, y, **options):
        given = as_given(y) if as_given is not torch.tensor else as_given(np.searchsorted([*names, "z"], y))
        agent = cd.Agent("a", module(), x, given, prepare=StandardScaler(), **options)
        return agent, cd.Federation([agent], cd.Alone(), safeguard=True)

    x, y = X[:40].copy(), names[Y[:40]].astype(object)
    x[12, 3] = np.nan  # filled in by the other samples
    alone, plain = joined(x[kept], y[kept])
    other = x.copy()
    other[~kept], y[~kept] = np.nan, "z"  # a class that nobody else has, and no values at all
    agent, made = joined(other, y, releases=as_given(kept) if as_given is not torch.tensor else kept.tolist())
    assert hello_of(agent, None) == hello_of(alone, None)
    assert hello_of(agent, None)["samples"] == 30
    np.testing.assert_array_equal(agent.shard.x, alone.shard.x)
    np.testing.assert_array_equal(record_of(agent).class_mix, record_of(alone).class_mix)
    assert made.classes == plain.classes == 3
    assert made.run(2, **QUIET).rows == plain.run(2, **QUIET).rows
    for mine, theirs in zip(agent.learner.weights().values(), alone.learner.weights().values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_random_items_that_are_withheld_are_never_read():
    class Augmented(torch.utils.data.Dataset):
        def __init__(self):
            self.read = []

        def __len__(self):
            return 20

        def __getitem__(self, i):
            self.read.append(i)
            return X[i] + np.random.normal(size=13).astype(np.float32), int(Y[i])  # noqa: NPY002

    items = Augmented()
    agent = cd.Agent("a", module(), items, releases=np.arange(20) % 2 == 0)
    items.read.clear()
    cd.Federation([agent], cd.Alone(), classes=3).run(2, **QUIET)
    assert sorted(set(items.read)) == list(range(0, 20, 2))


@pytest.mark.parametrize(
    ("mask", "found"),
    [([1] * 40, "int64 of shape"), ([True] * 39, r"bool of shape \(39,\)"), (True, r"bool of shape \(\)"),
     (["yes"] * 40, "of shape"), ([None] * 40, "object of shape"), ([False] * 40, "all withheld")],
)  # fmt: skip
def test_releases_is_a_boolean_for_each_sample(mask, found):
    with pytest.raises(DataError, match=f"releases of agent 'a' must .*{found}"):
        cd.Agent("a", module(), X[:40], Y[:40], releases=mask)


def test_samples_without_labels_are_reported_as_such_also_with_a_mask():
    mask = np.arange(40) < 30
    for x, y in ((X[:40], Y[:39]), (X[:40], None), ([[1.0], [1.0, 2.0]] * 20, Y[:40])):
        with pytest.raises(DataError) as plain:
            cd.Federation([cd.Agent("a", module(), x, y)], cd.Alone(), classes=3)
        with pytest.raises(DataError) as masked:
            cd.Federation([cd.Agent("a", module(), x, y, releases=mask)], cd.Alone(), classes=3)
        assert str(masked.value) == str(plain.value)
