"""Advice: candidates, folds, expected gains by hand, planted gains and losses, and the command."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

import codistill as cd
from codistill.cli import main
from codistill.core.rng import derive
from codistill.experiments.advice import Option, advise, advise_recipe, advise_summaries, choose
from codistill.experiments.advice_prior import (
    ALONE,
    FEATURES,
    FITTED,
    LIKE,
    NOTHING,
    AgentFacts,
    Gain,
    Gains,
    Prior,
    Setting,
    combined_gains,
    differences,
    expected_gains,
    features,
    find_candidates,
    input_shifts,
    label_skew,
    measured_gains,
    read_prior,
)
from codistill.experiments.advice_probe import folds, run_probe
from codistill.experiments.recipe import make_recipe
from codistill.learners.zoo import build as build_module
from codistill.nodes.record import record_of
from codistill.protocols import PROTOCOLS


def samples(owner, count=24):
    """Two features; the class is the sign of the first."""
    x = np.random.default_rng([len(owner), *owner.encode()]).standard_normal((count, 2)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(int)


def setting(*agents, **shared):
    for agent in agents:
        record_of(agent).encode_labels(2)
    return Setting(agents=agents, classes=2, rounds=2, **shared)


@dataclass(frozen=True, kw_only=True)
class Knows(cd.Protocol):
    """Its answers do not depend on a model: the sign of the first feature, or the opposite."""

    name = "knows"
    exchanges = "nothing"
    topology = "complete"
    needs = cd.Ability.LABELS
    right: bool = cd.setting(True, "whether the answers are right")

    async def begin(self, me):
        me.learner.fit(me.shard.x, me.shard.targets)

    def predict(self, me, x):
        said = (x[:, 0] > 0) == self.right
        return np.stack([~said, said], axis=1).astype(np.float32)


# --- candidates ---------------------------------------------------------------------------------------------------


def test_all_protocols_that_the_agents_can_run_are_candidates_and_the_others_have_a_reason():
    agents = [cd.Agent("a", LogisticRegression(), *samples("a")), cd.Agent("b", LogisticRegression(), *samples("b"))]
    found = find_candidates(setting(*agents))
    assert set(found.protocols) == {"akd", "avgkd", "ekd", "pkd"}
    assert set(found.baselines) == {ALONE}
    assert found.left_out["fedmd"] == "it needs unlabelled public data that all agents share"
    assert "gradients" in found.left_out["fd"]
    assert "'a'" in found.left_out["fd"]
    assert {"alone", "centralised", "silo_sgd"}.isdisjoint({*found.protocols, *found.left_out})


def test_local_training_is_that_of_the_recipe_for_all_candidates():
    torch_agents = [cd.Agent(name, build_module("mlp", (2,), 2), *samples(name, 70)) for name in "ab"]
    found = find_candidates(setting(*torch_agents, public=samples("u")[0]), cd.FedMD(local_epochs=3, batch_size=16))
    assert found.protocols["fedmd"] == cd.FedMD(local_epochs=3, batch_size=16)
    assert found.protocols["fedavg"] == cd.FedAvg(local_epochs=3, batch_size=16)
    assert found.protocols["d_sgd"] == cd.DSGD(local_steps=15, batch_size=16)  # three passes over five batches
    assert found.baselines[ALONE] == cd.Alone(local_epochs=3, batch_size=16)
    # Two rounds of three epochs are other training than a fit of five.
    assert found.baselines[FITTED] == cd.Alone(refit=True)
    assert found.baseline_of("avgkd") == FITTED
    assert found.baseline_of("fedmd") == ALONE


def test_a_single_agent_has_no_candidates():
    found = find_candidates(setting(cd.Agent("a", LogisticRegression(), *samples("a"))))
    assert found.protocols == {}
    assert set(found.left_out.values()) == {"a single agent has nobody to learn from"}


# --- folds --------------------------------------------------------------------------------------------------------


def test_folds_hold_out_every_sample_once_except_the_only_one_of_its_class():
    x, y = samples("a", 21)
    y[5] = 2
    agent = cd.Agent("a", LogisticRegression(), x, y)
    record_of(agent).encode_labels(3)
    held = np.concatenate([fold["a"][1] for fold in folds([agent], 4, seed=0)])
    assert sorted(held) == [i for i in range(21) if i != 5]
    for fold in folds([agent], 4, seed=0):
        train, test = fold["a"]
        assert sorted([*train, *test]) == list(range(21))
        assert set(y[train]) == {0, 1, 2}


@pytest.mark.parametrize("protocol", [cd.AvgKD(), cd.EKD(), cd.AKD()], ids=lambda each: each.name)
def test_a_probing_run_gives_what_a_run_gives_and_counts_its_bytes(protocol):
    """Though models stay in the process, and only their number and as many bytes are sent."""
    tree = DecisionTreeClassifier(max_depth=2)
    made = {name: cd.Agent(name, clone(tree), *samples(name)) for name in "ab"}
    split = {name: (np.arange(18), np.arange(18, 24)) for name in made}
    probe = run_probe(setting(*made.values()), protocol, split, 0)
    agents = [
        cd.Agent(name, DecisionTreeClassifier(max_depth=2), *(part[:18] for part in samples(name))) for name in made
    ]
    plain = cd.Federation(agents, protocol, seed=derive(0, "advice", 0) >> 1, classes=2)
    result = plain.run(2, runtime="simulation", alone=False, progress=False)
    for name in made:
        x, y = samples(name)
        wrong = result.agents[name].predict(x[18:]) != y[18:]
        np.testing.assert_array_equal(probe.losses[name], wrong)
    # Trees of other rounds may be larger or smaller than the first, and the number of a model takes a few bytes.
    assert probe.sent == pytest.approx(np.mean([row["sent"] for row in result.rows]), rel=0.1)


# --- gains --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepare", [None, StandardScaler()], ids=["as they are", "scaled"])
@pytest.mark.parametrize("protocol", [cd.AvgKD(), cd.EKD(), cd.FedMD()], ids=lambda each: each.name)
def test_a_probing_run_prepares_samples_as_a_run_does(protocol, prepare):
    """With missing values, filled in for one model and kept for the other, and a transformer of each agent's own."""
    public = samples("public", 40)[0]
    public[::3, 0] = np.nan

    def agents(**options):
        data = {name: samples(name) for name in ("a", "bb")}
        for x, _ in data.values():
            x *= 10
            x[::4, 1] = np.nan
        models = {"a": LogisticRegression(), "bb": DecisionTreeClassifier(max_depth=2, random_state=0)}
        return [cd.Agent(name, models[name], *data[name], prepare=prepare, **options) for name in models]

    asking = setting(*agents(), public=public)
    every, held = np.arange(24), np.arange(6)
    probe = run_probe(asking, protocol, dict.fromkeys(("a", "bb"), (every, held)), 1)
    seed = derive(asking.seed, "advice", 1) >> 1
    run = cd.Federation(agents(), protocol, public=public, seed=seed, classes=2).run(
        2, runtime="simulation", alone=False, progress=False
    )
    for name, raw in zip(("a", "bb"), agents(), strict=True):
        x, y = record_of(raw).data
        wrong = run.agents[name].predict(x[held]) != y[held]
        assert np.array_equal(probe.losses[name], wrong.astype(float))
    assert np.isnan(public).any()


def test_advice_for_a_recipe_with_missing_cells_leaves_nothing_out_that_runs(tmp_path):
    """Every protocol is named once: as an option, or as left out, and missing cells are a reason for neither."""
    x, y = samples("table", 80)
    lines = [f"{a},{'' if i % 5 == 0 else b},{'yes' if y[i] else 'no'}" for i, (a, b) in enumerate(x)]
    (tmp_path / "table.csv").write_text("first,second,label\n" + "\n".join(lines) + "\n")
    learners = ["logistic_regression", "gradient_boosting", {"kind": "mlp", "epochs": 1}]
    tables = {
        "data": {"file": "table.csv", "label": "label", "public": 20},
        "agents": [{"learner": learner} for learner in learners],
        "protocol": {"name": "fedmd", "rounds": 1},
    }
    advice = advise_recipe(make_recipe(tables, tmp_path), seconds=60)
    assert advice.findings is not None
    assert advice.findings.failed == {}
    named = [*(option.name for option in advice.options), *advice.left_out]
    assert sorted(named) == sorted(set(named))
    assert {"fedmd", "avgkd", "ekd", "pkd"} <= {option.name for option in advice.options}


@pytest.mark.parametrize("fold", [0, 1])
def test_a_protocol_whose_probing_run_fails_is_left_out_and_no_option(monkeypatch, fold):
    """Whether it fails at once or in a later fold, when a gain was measured already."""
    from codistill.experiments import advice_probe

    probe = advice_probe.run_probe

    def failing(setting, protocol, split, seed, **options):
        if protocol.name == "knows" and seed == 1 + fold:
            raise ValueError("too few samples")
        return probe(setting, protocol, split, seed, **options)

    monkeypatch.setattr(advice_probe, "run_probe", failing)
    agents = [cd.Agent(name, DummyClassifier(), *samples(name)) for name in ("a", "bb")]
    advice = advise(agents, rounds=2, like=Knows(right=True))
    assert advice.left_out["knows"] == "its probing run failed: too few samples"
    assert "knows" not in {option.name for option in advice.options}
    assert advice.recommended != "knows"


def test_the_gain_of_real_values_is_the_fall_of_the_rmse_in_deviations_of_the_targets():
    alone, together = np.array([4.0, 16.0]), np.array([1.0, 3.0])
    found = differences({"a": alone}, {"a": together}, deviation=2.0)["a"]
    assert found.mean() == pytest.approx((np.sqrt(alone.mean()) - np.sqrt(together.mean())) / 2.0)


def test_measured_gains_are_means_with_a_variance_that_is_never_zero():
    found = {"a": np.array([1.0, 0.0, 0.0, -1.0]), "b": np.zeros(4), "c": np.zeros(0)}
    gains = measured_gains(found, done=4, of=4)
    pooled = (2 + 2) / (8 + 2)  # the squares of a, and the two that were not seen
    # 7/3: four folds of which each trains on three times what it holds out vary by 1/4 + 1/3 instead of 1/4.
    assert gains["a"].error == pytest.approx(math.sqrt(7 / 3 * (2 + 4 * pooled) / 8 / 4))
    assert gains["b"].mean == 0
    assert gains["b"].error == pytest.approx(math.sqrt(7 / 3 * 4 * pooled / 8 / 4))
    assert gains["c"].error == math.inf


def test_without_probing_runs_the_prior_is_what_is_expected():
    gains = combined_gains({}, Prior({"a": 0.1, "b": -0.1}, setting=0.03, agent=0.04))
    assert gains.mean == Gain(0.0, 0.03)
    assert gains.agents["a"].mean == pytest.approx(0.1)
    assert gains.agents["a"].error == pytest.approx(0.05)
    assert gains.worst[0] == "b"


def test_prior_and_measurement_are_weighted_by_their_precisions():
    prior = Prior({"a": 0.0, "b": 0.0}, setting=0.1, agent=1e6)  # agents tell nothing of one another
    gains = combined_gains({"a": Gain(0.2, 0.1), "b": Gain(0.0, 0.1)}, prior)
    assert gains.agents["a"].mean == pytest.approx(0.2)
    assert gains.agents["a"].error == pytest.approx(0.1)
    # The mean 0.1 of both has the variance (0.01 + 0.01) / 4, the prior 0.01.
    assert gains.mean.error == pytest.approx((200 + 100) ** -0.5)


def test_the_skew_of_labels_is_their_distance_in_variation():
    mine = AgentFacts(10, (5, 5), gradients=False)
    assert label_skew(mine, [AgentFacts(20, (10, 10), gradients=False)]) == 0
    assert label_skew(mine, [AgentFacts(20, (20, 0), gradients=False)]) == 0.5
    assert label_skew(AgentFacts(4, (0, 4), gradients=False), [AgentFacts(4, (4, 0), gradients=False)]) == 1


def test_inputs_that_can_be_told_apart_are_shifted():
    x, y = samples("a", 40)
    far = setting(cd.Agent("a", LogisticRegression(), x, y), cd.Agent("b", LogisticRegression(), x + 9, y))
    assert min(input_shifts(far).values()) > 0.95


def test_the_prior_knows_every_protocol_that_may_be_advised():
    known = read_prior()
    measured = {name for name, protocol in PROTOCOLS.items() if not protocol.is_baseline}
    assert set(known) | set(LIKE) == measured
    assert not set(known) & set(LIKE)
    assert set(LIKE.values()) <= set(known)
    assert {len(each["coefficients"]) for each in known.values()} == {len(FEATURES)}
    assert all(each["setting"] > 0 and each["agent"] > 0 for each in known.values())


def test_a_protocol_that_the_prior_does_not_know_may_be_anything():
    facts = {"a": AgentFacts(10, (5, 5), gradients=True), "b": AgentFacts(90, (50, 40), gradients=False)}
    prior = expected_gains("my own", facts)
    assert set(prior.gains.values()) == {0.0}
    assert prior.setting == 0.1
    like, fedavg = expected_gains("fedprox", facts), expected_gains("fedavg", facts)
    assert like.gains == fedavg.gains
    assert (like.setting, like.agent) == (prior.setting, prior.agent)
    assert len(features(facts)["a"]) == len(FEATURES)


# --- the choice ---------------------------------------------------------------------------------------------------


def option(name, mean, *agents, error=0.01):
    return Option(name, "", Gains({f"{i}": each for i, each in enumerate(agents)}, Gain(mean, error)))


def test_the_best_lower_bound_is_chosen():
    sure, unsure = option("sure", 0.03, Gain(0.03, 0.01)), option("unsure", 0.05, Gain(0.05, 0.04), error=0.04)
    assert choose([sure, unsure, option(ALONE, 0.0, NOTHING, error=0.0)]) == "sure"


def test_an_agent_that_is_expected_to_lose_rules_a_protocol_out():
    harmful = option("harmful", 0.10, Gain(0.25, 0.01), Gain(-0.05, 0.02))
    kind = option("kind", 0.03, Gain(0.03, 0.01), Gain(-0.02, 0.02))
    assert harmful.harms == ["1"]
    assert kind.harms == []
    assert choose([harmful, kind]) == "kind"
    assert choose([harmful]) == ALONE


def test_a_gain_within_its_uncertainty_is_no_reason_to_take_part():
    assert choose([option("perhaps", 0.01, Gain(0.01, 0.02), error=0.02)]) == ALONE


# --- from agents, recipes and summaries ---------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "chosen"), [(True, "knows"), (False, ALONE)])
def test_a_planted_gain_is_found_and_a_planted_loss_is_avoided(right, chosen):
    agents = [cd.Agent(name, DummyClassifier(), *samples(name, 40)) for name in ("north", "south")]
    advice = advise(agents, rounds=1, like=Knows(right=right), seconds=30)
    assert advice.recommended == chosen
    assert (advice["knows"].gains.mean.mean > 0.1) == right
    assert advice["knows"].folds == (4 if right else 1)  # what is hopeless is not probed again
    assert advice.sentence.startswith("Use knows: expected +" if right else "Stay alone: knows comes closest")
    assert advice.sentence in str(advice)
    assert "north" in str(advice)
    assert not record_of(agents[0]).learned
    assert agents[0].shard is None


def test_where_time_runs_out_the_expectation_is_from_the_facts_alone():
    agents = [cd.Agent(name, DummyClassifier(), *samples(name, 40)) for name in ("north", "south")]
    advice = advise(agents, rounds=1, like=Knows(), seconds=1e-9)
    assert advice["knows"].folds == 0
    assert advice["knows"].sent is None
    assert advice.recommended == ALONE
    assert "no probing run" in str(advice)


def test_what_was_not_probed_is_not_chosen_where_others_were():
    gains = Gains({"a": Gain(0.3, 0.01)}, Gain(0.3, 0.01))
    unseen, seen = Option("unseen", "", gains), Option("seen", "", Gains({"a": NOTHING}, NOTHING), folds=1)
    assert choose([unseen]) == "unseen"
    assert choose([unseen, seen]) == ALONE


def test_what_the_facts_tell_against_is_not_probed(monkeypatch):
    hopeless = {"knows": {"coefficients": [-0.5, 0, 0, 0, 0, 0, 0], "setting": 0.1, "agent": 0.1}}
    monkeypatch.setattr("codistill.experiments.advice_prior.read_prior", lambda: hopeless)
    agents = [cd.Agent(name, DummyClassifier(), *samples(name, 40)) for name in ("north", "south")]
    advice = advise(agents, rounds=1, like=Knows(), seconds=30)
    assert advice["knows"].folds == 0
    assert advice.recommended == ALONE


def test_real_values_are_compared_by_their_errors():
    x = np.random.default_rng(0).standard_normal((32, 3)).astype(np.float32)
    y = x[:, :1] + 0.1
    agents = [cd.Agent(f"{i}", Ridge(), x[i * 16 :][:16], y[i * 16 :][:16]) for i in range(2)]
    advice = advise(agents, rounds=1, seconds=30)
    assert not advice.has_labels
    assert "RMSE" in str(advice)
    assert advice["backfitting"].folds >= 1


RECIPE = {
    "data": {"name": "wine"},
    "partition": {"kind": "iid"},
    "agents": [{"name": name, "learner": {"kind": "logistic_regression", "max_iter": 20}} for name in ("a", "b")],
    "protocol": {"name": "centralised", "rounds": 1},
}


def test_a_recipe_is_probed_on_its_training_samples_whatever_its_protocol(tmp_path):
    advice = advise_recipe(make_recipe(RECIPE, tmp_path), seconds=30)
    assert {option.name for option in advice.options} == {ALONE, "akd", "avgkd", "ekd", "pkd"}
    assert [facts.samples for facts in advice.facts.values()] == [71, 71]  # a fifth of the 178 is the test set
    assert advice["avgkd"].sent > 0
    assert advice["avgkd"].seconds > 0


SUMMARIES = {
    "agents": [
        {"name": "north", "model": "random_forest", "counts": [60, 40]},
        {"name": "south", "model": "logistic_regression", "counts": [1, 30]},
    ]
}


def test_summaries_are_enough_for_an_expectation():
    advice = advise_summaries(SUMMARIES)
    assert {option.name for option in advice.options} == {ALONE, "akd", "avgkd", "ekd", "pkd"}
    assert "from the summaries alone" in str(advice)
    assert all(option.gains.mean.error > 0.01 for option in advice.options if option.name != ALONE)


def test_the_command_prints_a_table_and_a_sentence_and_writes_json(tmp_path, capsys):
    path, written = tmp_path / "summaries.json", tmp_path / "advice.json"
    path.write_text(json.dumps(SUMMARIES))
    assert main(["advise", str(path), "--json", str(written), "--set", "public=100"]) == 0
    advice = json.loads(written.read_text())
    assert advice["sentence"] in " ".join(capsys.readouterr().out.split())
    assert {"fedmd", "d_distillation"} <= {option["protocol"] for option in advice["options"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "[[agents]]"),
        ('[[agents]]\nname = "a"\nmodel = "ridge"', "neither counts nor samples"),
        ('[[agents]]\nname = "a"\nmodel = "ridge"\nsamples = 3\ncounts = [1]', "1 and 3"),
        ('[[agents]]\nname = "a"\nmodel = "rigde"\nsamples = 3', "'ridge'"),
        ('[[agents]]\nname = "a"\nmodle = "ridge"\nsamples = 3', "'model'"),
        ('[data]\nheld_by_agents = true\nclasses = 2\n[[agents]]\nname = "a"\n[protocol]\nname = "fd"', "summaries"),
        ("agents = [", "TOML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, capsys, text, words):
    path = tmp_path / "file.toml"
    path.write_text(text)
    assert main(["advise", str(path)]) in (2, 4)
    assert words in capsys.readouterr().err


def test_a_time_limit_is_above_zero(capsys):
    assert main(["advise", "recipe.toml", "--seconds", "0"]) == 2
    assert "--seconds must be a number above 0" in capsys.readouterr().err
