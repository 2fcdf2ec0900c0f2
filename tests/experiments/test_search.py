"""Searches: settings chosen by validation samples, never by test samples; resumed with the same result."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codistill.cli import main
from codistill.core.errors import CodistillError
from codistill.experiments import search as searching
from codistill.experiments.recipe import read_recipe
from codistill.experiments.search import Found, Search, execute_search, read_search
from codistill.experiments.search_view import BEST, TRIALS, best_table, conclusion, show_search

pytestmark = pytest.mark.usefixtures("time_limit")

RECIPE = """
seed = 4
[data]
name = "toy"
public = 30
[partition]
kind = "iid"
[[agents]]
name = "one"
learner = "logistic_regression"
[[agents]]
name = "tree"
learner = { kind = "decision_tree", max_depth = 2 }
[protocol]
name = "fedmd"
rounds = 2
[runtime]
kind = "simulation"
checkpoint_every = 0
[evaluation]
alone = true
features_at = [1]
"""
SPACE = """
[search]
trials = 4
"protocol.less_forgetting" = { low = 0, high = 4 }
"agents.0.learner.C" = { low = 1e-3, high = 10, log = true }
"agents.1.learner.max_depth" = [1, 3]
"""


def write_data(folder: Path, *, test_seed: int = 0) -> None:
    """A data set whose test part alone depends on `test_seed`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 3)).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=150) > 0).astype(int)
    other = np.random.default_rng([7, test_seed])
    np.savez(
        folder / "toy.npz", x_train=x, y_train=y, x_test=other.normal(size=(40, 3)).astype(np.float32),
        y_test=other.integers(0, 2, 40),
    )  # fmt: skip


def written(folder: Path, space: str = SPACE, recipe: str = RECIPE) -> Path:
    write_data(folder)
    path = folder / "recipe.toml"
    path.write_text(recipe + space)
    return path


def read(folder: Path, space: str = SPACE, recipe: str = RECIPE) -> Search:
    return read_search(written(folder, space, recipe))


def execute(search: Search, folder: Path, out: str, tell: Any = lambda text: None) -> Found | None:
    return execute_search(search, folder / out, data_dir=str(folder), tell=tell)


def files(folder: Path, found: Found) -> list[bytes]:
    """What a search writes, but for its picture, which has a test of its own."""
    from rich.console import Console

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("codistill.experiments.search_view.draw_search", lambda *_: None)
        show_search(found, folder, Console(quiet=True), "data")
    return [(folder / name).read_bytes() for name in (TRIALS, BEST)]


# --- What a table [search] may hold.


def test_the_kinds_of_fields_are_those_of_the_settings(tmp_path: Path) -> None:
    space = """
[search]
protocol.local_epochs = { low = 1, high = 8, log = true }
"protocol.less_forgetting" = { low = 0, high = 4 }
"protocol.rounds" = { low = 1, high = 3 }
"agents.0.learner.C" = { low = 1, high = 10 }
"agents.1.learner.max_depth" = { low = 1, high = 10 }
"runtime.participation" = { low = 0.5, high = 1 }
safeguard = [true, false]
"""
    search = read(tmp_path, space)
    assert {each.key: each.whole for each in search.fields if each.range} == {
        "protocol.local_epochs": True,  # TOML reads a key without quotes as a table in a table
        "protocol.less_forgetting": False,
        "protocol.rounds": True,
        "agents.0.learner.C": False,  # as scikit-learn's default, 1.0
        "agents.1.learner.max_depth": True,  # its default is None: as low and high are written
        "runtime.participation": False,
    }
    assert list(search.fields[-1].choices.values.values()) == [True, False]  # type: ignore[union-attr]
    changed = search.trial_recipe({"agents.0.learner.C": 2.5, "protocol.rounds": 3}, seed=1)
    assert changed.agents[0].options == {"C": 2.5}  # a name has become a table
    assert (changed.spec.rounds, changed.spec.evaluate_every, changed.seed) == (3, 3, 5)
    assert (changed.test, changed.validation, changed.spec.alone, changed.spec.features_at) == (False, 0.2, False, ())


@pytest.mark.parametrize(
    ("space", "text"),
    [
        ('trails = 3\n"protocol.rounds" = [1, 2]', r"Unknown option 'trails' for \[search\].*'trials'"),
        ('"protocol.les_forgetting" = [1.0, 2.0]', r"Unknown option 'les_forgetting'.*'less_forgetting'"),
        ('"protocl.rounds" = [1, 2]', r"Unknown table 'protocl'.*'protocol'"),
        ('"protocol.less_forgetting" = { low = -1, high = 2 }', "less_forgetting must be at least 0.*-1"),
        ('"protocol.local_epochs" = { low = 0.5, high = 2.5 }', "must have integers as low and high"),
        ('"protocol.local_epochs" = { low = 4, high = 2 }', "must have low below high"),
        ('"protocol.less_forgetting" = { low = 0, high = 2, log = true }', "and low above 0 with log"),
        ('"protocol.less_forgetting" = { low = 0, hihg = 2 }', "Unknown option 'hihg'.*'high'"),
        ('"protocol.less_forgetting" = { low = 0, high = inf }', "high must be finite"),
        ("safeguard = { low = 0, high = 1 }", "safeguard"),
        ('"data.scale" = { low = 0, high = 1 }', "must be a list: the field takes no numbers"),
        ('"data.scale" = ["unit", "standart"]', "scale must be one of .*standart"),
        ("seed = [1, 2]", "must not change which samples"),
        ('"data.samples" = [10, 20]', "must not change which samples"),
        ('"agents.0.count" = [1, 2]', "must not change which samples"),
        ('"protocol.name" = ["fedmd", "avgkd"]', "must not change .*codistill sweep"),
        ('"agents.0.learner" = ["ridge"]\n"agents.0.learner.alpha" = [1.0]', "change each field once"),
        ('"agents.7.learner.C" = [1.0]', "must name a place in the recipe.*'agents.7.learner.C'"),
        ('"protocol.rounds" = [2, 2]', "search.protocol.rounds must be a list of different values"),
        ("trials = 3", "must name a field of the recipe"),
        ('trials = 0\n"protocol.rounds" = [1, 2]', "search.trials must be at least 1"),
        ('of = "median"\n"protocol.rounds" = [1, 2]', "search.of must be one of mean, worst"),
        ('score = "acuracy"\n"protocol.rounds" = [1, 2]', "A score must be one of.*'accuracy'"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(tmp_path: Path, space: str, text: str) -> None:
    with pytest.raises(CodistillError, match=f"(?s){text}"):
        read(tmp_path, f"[search]\n{space}\n")


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (RECIPE, r"needs a table \[search\]"),
        (RECIPE.replace("public = 30", "public = 30\nvalidation = 0.2") + SPACE, "held out once.*data.validation"),
        (RECIPE.replace('"simulation"', '"ray"') + SPACE, "computed on one machine"),
        (RECIPE + SPACE + "[sweep]\nseed = [1]\n", r"A recipe with \[sweep\] is many runs"),
    ],
)
def test_a_recipe_that_cannot_be_searched_is_refused(tmp_path: Path, recipe: str, text: str) -> None:
    with pytest.raises(CodistillError, match=f"(?s){text}"):
        read(tmp_path, "", recipe)


def test_options_of_learners_are_checked_with_the_data_before_anything_runs(tmp_path: Path) -> None:
    search = read(tmp_path, '[search]\n"agents.0.learner.C" = { low = -1, high = 10 }\n')
    with pytest.raises(CodistillError, match="'C' parameter"):
        execute(search, tmp_path, "out")
    assert not (tmp_path / "out").exists()


def test_a_recipe_to_search_is_not_run_by_itself(tmp_path: Path) -> None:
    with pytest.raises(CodistillError, match=r"(?s)\[search\] is many runs.*codistill search"):
        read_recipe(written(tmp_path))


# --- What a search does.


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("search")


@pytest.fixture(scope="module")
def whole(home: Path) -> Found:
    found = execute(read(home), home, "whole")
    assert found is not None
    return found


def test_scores_are_those_of_validation_rows_over_agents_and_seeds(tmp_path: Path) -> None:
    search = read(tmp_path, SPACE.replace("trials = 4", 'trials = 2\nseeds = 2\nof = "worst"'))
    found = execute(search, tmp_path, "out")
    assert found is not None
    for trial in (found.own, *found.trials):
        by_seed = []
        for seed in (4, 5):
            text = (tmp_path / "out" / trial.name / f"seed-{seed}" / "metrics.jsonl").read_text()
            rows = [json.loads(line) for line in text.splitlines()]
            assert not any("accuracy" in row for row in rows)  # no test sample was measured on
            by_seed.append([row["validation_accuracy"] for row in rows if row["round"] == 2])
        assert trial.mean == pytest.approx(np.mean(by_seed))
        assert trial.worst == trial.score == pytest.approx(np.mean(np.min(by_seed, axis=1)))
        assert trial.spread == pytest.approx(np.std(np.min(by_seed, axis=1), ddof=1))


def test_other_test_samples_give_the_same_search_to_the_bit(home: Path, whole: Found) -> None:
    first = files(home / "whole", whole)
    write_data(home, test_seed=1)
    other = execute(read_search(home / "recipe.toml"), home, "other")
    assert other is not None
    assert files(home / "other", other) == first
    facts = [(home / out / "own" / "seed-4" / "run.json").read_bytes() for out in ("whole", "other")]
    assert facts[0] == facts[1]  # not even a digest of test samples
    write_data(home)


def test_a_search_that_was_killed_goes_on_to_the_same_result(
    home: Path, whole: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, begun = searching.outcome_of, 0

    def killed_in_the_third(*args: Any, **options: Any) -> Any:
        nonlocal begun
        begun += 1
        outcome = run(*args, **options)
        if begun == 3:  # the own settings, and two trials: what the second wrote is lost but for its recipe
            (args[1] / "metrics.jsonl").write_text("")
            raise KeyboardInterrupt
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(searching, "outcome_of", killed_in_the_third)
        with pytest.raises(KeyboardInterrupt):
            execute(read_search(home / "recipe.toml"), home, "killed")
    again = execute(read_search(home / "recipe.toml"), home, "killed")
    assert again is not None
    assert files(home / "killed", again) == files(home / "whole", whole)


def test_finished_trials_are_not_run_again_and_more_may_follow(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = searching.outcome_of

    def counted(recipe: Any, place: Path, *args: Any, **options: Any) -> Any:
        if not place.exists():
            ran.append(place.parent.name)
        return run(recipe, place, *args, **options)

    monkeypatch.setattr(searching, "outcome_of", counted)
    few = execute(read_search(home / "recipe.toml", ["search.trials=2"]), home, "grown")
    assert ran == ["own", "trial-0001", "trial-0002"]
    more = execute(read_search(home / "recipe.toml", ["search.trials=3"]), home, "grown")
    assert ran == ["own", "trial-0001", "trial-0002", "trial-0003"]
    assert few is not None
    assert more is not None
    assert more.trials[:2] == few.trials
    with pytest.raises(CodistillError, match="must hold runs of the same recipe"):
        execute(read_search(home / "recipe.toml", ["protocol.rounds=1"]), home, "grown")


def test_settings_that_were_tried_before_are_no_trial_and_the_search_ends_when_all_are(tmp_path: Path) -> None:
    said: list[str] = []
    space = '[search]\ntrials = 9\n"protocol.less_forgetting" = [0.0, 1.0]\n'
    found = execute(read(tmp_path, space), tmp_path, "out", said.append)
    assert found is not None
    assert sorted(trial.values["protocol.less_forgetting"] for trial in found.trials) == [0.0, 1.0]
    assert said[-1].startswith("no further trials")


def test_no_trial_begins_after_the_minutes(tmp_path: Path) -> None:
    said: list[str] = []
    found = execute(read(tmp_path, SPACE.replace("trials", "minutes = 1e-9\ntrials")), tmp_path, "out", said.append)
    assert found is not None
    assert (found.trials, found.winner) == ([], found.own)
    assert "the same command goes on" in said[-1]


def test_a_trial_that_is_not_possible_has_no_score_and_the_others_go_on(tmp_path: Path) -> None:
    recipe = RECIPE.replace('"fedmd"', '"fedavg"').replace('{ kind = "decision_tree", max_depth = 2 }', '"mlp"')
    recipe = recipe.replace('"logistic_regression"', '"mlp"')
    search = read(tmp_path, '[search]\ntrials = 2\n"agents.0.learner" = ["mlp", "decision_tree"]\n', recipe)
    found = execute(search, tmp_path, "out")
    assert found is not None
    failed = [trial for trial in found.trials if trial.score is None]
    assert {trial.values["agents.0.learner"] for trial in failed} == {"decision_tree"}
    assert "skipped. fedavg needs learners" in failed[0].why
    assert "1 of 2 trials were not possible" in best_table(found).notes


def test_what_was_found_is_a_recipe_that_runs_and_says_where_it_is_from(
    home: Path, whole: Found, capsys: pytest.CaptureFixture[str], no_report: None
) -> None:
    best = whole.ranked()[0]
    assert best.score == max(trial.score for trial in whole.trials if trial.score is not None)
    _, text = files(home / "whole", whole)
    comment, tables = text.decode().partition("\n\n")[0], tomllib.loads(text.decode())
    assert f"trial {best.number} of 4, 1 seed each" in comment
    assert "is optimistic. No test sample was used." in comment
    assert tables["agents"][0]["learner"] == {"kind": "logistic_regression", "C": best.values["agents.0.learner.C"]}
    assert tables["protocol"]["less_forgetting"] == best.values["protocol.less_forgetting"]
    assert tables["evaluation"] == {"alone": True, "features_at": [1]}  # as they were: test samples are measured on
    changes = ["--set", "evaluation.features_at=[]", "--set", f"data.dir={home}"]
    assert main(["run", str(home / "whole" / BEST), "--out", str(home / "run"), "--quiet", *changes]) == 0
    assert "accuracy on the common test set (40 samples" in " ".join(capsys.readouterr().out.split())


def test_the_end_says_what_the_search_was_worth(whole: Found) -> None:
    """Scores are replaced, so that each case occurs; a search in which no trial is better finds the recipe itself."""
    from dataclasses import replace

    best, own = whole.ranked()[0], whole.own
    won = replace(whole, own=replace(own, score=0.5), trials=[replace(best, score=0.75)])
    said = " ".join(conclusion(won))
    assert "75.0 %; with the recipe's own settings 50.0 %; gain +25.0 points" in said
    assert "its score and gain are optimistic" in said
    assert "Each trial is one run" in said
    lost = replace(whole, own=replace(own, score=0.75), trials=[replace(best, score=0.75)])
    assert lost.winner is lost.own
    assert conclusion(lost)[0].startswith("No trial is better than the recipe's own settings, with 75.0 %")
    options = replace(whole.search.options, seeds=3)
    chance = replace(won, search=replace(whole.search, options=options), own=replace(won.own, spread=0.3))
    assert "smaller than the standard deviation over the seeds" in conclusion(chance)[-1]


def test_an_error_is_minimised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = """
[data]
name = "linear"
samples = 60
[partition]
kind = "iid"
[[agents]]
learner = { kind = "ridge", alpha = 1e-3 }
count = 2
[protocol]
name = "alone"
refit = true
rounds = 1
[runtime]
kind = "simulation"
[search]
trials = 2
"agents.0.learner.alpha" = [1e-3, 1e6]
"""
    import optuna

    directions, create = [], optuna.create_study

    def created(**options: Any) -> Any:
        directions.append(options["direction"])
        return create(**options)

    monkeypatch.setattr(optuna, "create_study", created)
    found = execute(read(tmp_path, "", recipe), tmp_path, "out")
    assert found is not None
    assert (found.search.judged_by.name, directions) == ("rmse", ["minimize"])
    by_alpha = {trial.values["agents.0.learner.alpha"]: trial.score or 0.0 for trial in found.trials}
    assert by_alpha[1e6] < by_alpha[1e-3] == found.own.score  # more columns than 48 samples can show
    assert found.winner.values == {"agents.0.learner.alpha": 1e6}
    assert found.gain == pytest.approx(by_alpha[1e-3] - by_alpha[1e6])


def test_the_command_prints_the_best_trials_and_writes_all_files(
    home: Path, whole: Found, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", str(home / "recipe.toml"), "--out", str(home / "whole"), "--data-dir", str(home)]) == 0
    out = capsys.readouterr().out
    assert "[4/4] less_forgetting=" in out
    own = next(line for line in out.splitlines() if line.startswith("│ own"))
    assert [cell.strip() for cell in own.split("│")[2:5]] == ["default", "default", "2"]
    for name in ("search.csv", "search.png", "search.pdf", "best.toml"):
        assert (home / "whole" / name).stat().st_size > 100


def test_without_optuna_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["search", str(written(tmp_path))]) == 2
    assert "pip install 'codistill[search]'" in capsys.readouterr().err
