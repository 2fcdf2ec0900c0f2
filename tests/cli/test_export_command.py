"""`codistill export` and `codistill predict`: from the folder of a run to predictions for a table."""

import io

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_iris
from sklearn.tree import DecisionTreeClassifier

import codistill as cd
from codistill.cli import main
from codistill.core.text import csv_text
from codistill.experiments.building import build
from codistill.experiments.recipe import read_recipe
from codistill.experiments.run import prepare
from codistill.experiments.saved_run import reopen
from codistill.nodes.record import record_of

RECIPE = """
seed = 0
[data]
file = "flowers.csv"
label = "kind"
ids = ["place"]
[[agents]]
name = "forest"
learner = { kind = "random_forest", n_estimators = 3 }
[[agents]]
name = "linear"
learner = "logistic_regression"
[protocol]
name = "avgkd"
rounds = 1
[evaluation]
alone = false
[runtime]
kind = "simulation"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flowers")
    flowers = load_iris(as_frame=True)
    table = flowers.data.assign(kind=flowers.target_names[flowers.target], place=range(150))
    table.to_csv(folder / "flowers.csv", index=False)
    (folder / "recipe.toml").write_text(RECIPE)
    federation, _ = prepare(read_recipe(folder / "recipe.toml"), folder / "run")
    federation.run(1, runtime="simulation", alone=False, progress=False, folder=folder / "run")
    return folder


def said(capsys, *command):
    code = main([str(part) for part in command])
    return code, capsys.readouterr()


@pytest.mark.parametrize("suffix", ["codistill", "onnx"])
@pytest.mark.parametrize("agent", ["forest", "linear"])
def test_predictions_for_the_raw_table_are_those_of_the_run(run, agent, suffix, capsys, tmp_path):
    path, out = tmp_path / f"model.{suffix}", tmp_path / "predictions.csv"
    onnx = ["--onnx"] if suffix == "onnx" else []
    code, shown = said(capsys, "export", run / "run", agent, "--out", path, *onnx)
    assert code == 0
    assert f"of '{agent}' after 1 round of avgkd: {path}" in shown.out
    shuffled = pd.read_csv(run / "flowers.csv").sample(frac=1, axis=1, random_state=1)
    shuffled.to_csv(tmp_path / "table.csv", index=False)
    code, shown = said(capsys, "predict", path, tmp_path / "table.csv", "--out", out)
    assert (code, shown.out, shown.err) == (0, f"150 rows: {out}\n", "")
    found = pd.read_csv(out)
    assert list(found.columns) == ["class", *(f"probability_{name}" for name in ("setosa", "versicolor", "virginica"))]
    right = (found["class"] == shuffled["kind"]).mean()
    # The accuracy on the test rows, scaled by the recipe, is that of the model on the same rows as they are.
    loaded, (_, data) = cd.load(path), build(reopen(run / "run"))
    raw = data.x_test * data.scaling.divisor + data.scaling.shift
    rows = pd.read_json(run / "run" / "metrics.jsonl", lines=True).set_index("agent")
    names = np.array(data.class_names)[data.y_test]
    assert (loaded.predict(raw) == names).mean() == pytest.approx(rows.loc[agent, "accuracy"], abs=0.04)
    assert right > 0.85


def test_columns_are_checked_by_name(run, capsys, tmp_path):
    path = tmp_path / "model"
    said(capsys, "export", run / "run", "linear", "--out", path)
    table = pd.read_csv(run / "flowers.csv")
    table.drop(columns=["kind", "place", "petal width (cm)"]).to_csv(tmp_path / "few.csv", index=False)
    code, shown = said(capsys, "predict", path, tmp_path / "few.csv")
    assert code == 3
    assert "must have the column 'petal width (cm)'" in shown.err
    table.assign(more=1).to_csv(tmp_path / "more.csv", index=False)
    code, shown = said(capsys, "predict", path, tmp_path / "more.csv")
    assert "left out: 'more'" in shown.err
    assert shown.out.startswith("class,probability_setosa")
    assert len(shown.out.splitlines()) == 151


def test_categories_text_and_missing_cells_are_read_as_in_the_run(capsys, tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"age": rng.normal(50, 9, 60).round(1), "sex": rng.choice(["f", "m"], 60)})
    table["note"] = rng.choice(["chest pain today", "no pain", "mild ache"], 60)
    table["state"] = np.where((table["age"] > 50) ^ (table["sex"] == "m"), "ill", "well")
    table = table.mask(rng.random((60, 4)) < [0.2, 0.1, 0.1, 0])
    table["age"] = table["age"].astype(object).where(table["age"].notna(), "?")
    table.to_csv(tmp_path / "flowers.csv", index=False)
    columns = """
        missing_values = ["?"]
        columns = { sex = "category", note = { kind = "text", encode = "tfidf" } }
        [safeguard]
    """
    recipe = RECIPE.replace('label = "kind"\nids = ["place"]', 'label = "state"' + columns)
    (tmp_path / "recipe.toml").write_text(recipe)
    federation, data = prepare(read_recipe(tmp_path / "recipe.toml"), tmp_path / "run")
    result = federation.run(1, runtime="simulation", alone=False, progress=False, folder=tmp_path / "run")
    frame = pd.read_csv(tmp_path / "flowers.csv", na_values=["?"])
    samples = data.scaling.apply(data.columns.transform(frame), "samples")
    for name, agent in result.agents.items():
        assert record_of(agent._agent).safeguard.ready
        said(capsys, "export", tmp_path / "run", name, "--out", tmp_path / "model")
        code, _ = said(capsys, "predict", tmp_path / "model", tmp_path / "flowers.csv", "--out", tmp_path / "out.csv")
        found = pd.read_csv(tmp_path / "out.csv")
        assert code == 0
        assert np.allclose(found[["probability_ill", "probability_well"]], agent.answers(samples), atol=1e-7)
        assert found["class"].tolist() == [data.class_names[i] for i in agent.predict(samples)]
        assert np.array_equal(cd.load(tmp_path / "model").answers(frame), agent.answers(samples))
    code, shown = said(capsys, "export", tmp_path / "run", "linear", "--onnx", "--out", tmp_path / "model.onnx")
    assert (code, "a safeguard" in shown.err, "Leave --onnx out" in shown.err) == (4, True, True)


def test_a_model_without_names_takes_columns_in_order(capsys, tmp_path):
    x, y = load_iris(return_X_y=True)
    agents = [cd.Agent("a", DecisionTreeClassifier(random_state=0), x, y)]
    result = cd.Federation(agents, cd.Alone(refit=True)).run(1, runtime="simulation", alone=False, progress=False)
    path = result.agents["a"].save(tmp_path / "tree")
    pd.DataFrame(x).assign(y=y).to_csv(tmp_path / "table.csv", index=False)
    code, shown = said(capsys, "predict", path, tmp_path / "table.csv")
    assert (code, "--label" in shown.err) == (3, True)
    code, shown = said(capsys, "predict", path, tmp_path / "table.csv", "--label", "y")
    assert [int(line.split(",")[0]) for line in shown.out.splitlines()[1:]] == result.agents["a"].predict(x).tolist()
    assert "columns: they are taken by position, '0', '1'" in shown.err
    (tmp_path / "empty.csv").write_text((tmp_path / "table.csv").read_text().splitlines()[0])
    code, shown = said(capsys, "predict", path, tmp_path / "empty.csv", "--label", "y")
    assert (code, shown.out) == (0, "class,probability_0,probability_1,probability_2\n")


def test_mistakes_are_named(run, capsys, tmp_path):
    code, shown = said(capsys, "export", run / "run", "forrest")
    assert (code, "Did you mean 'forest'?" in shown.err) == (2, True)
    code, shown = said(capsys, "export", tmp_path, "forest")
    assert (code, "must be the folder of a run" in shown.err) == (6, True)
    code, shown = said(capsys, "predict", run / "recipe.toml", run / "flowers.csv")
    assert (code, "recipe.toml must be a saved model" in shown.err) == (6, True)
    path = tmp_path / "model"
    said(capsys, "export", run / "run", "linear", "--out", path)
    code, shown = said(capsys, "predict", path, run / "flowers.csv", "--out", tmp_path / "out.txt")
    assert (code, ".csv or a .parquet" in shown.err) == (3, True)


def test_predicted_classes_are_no_formulas_in_a_spreadsheet(tmp_path, capsys):
    """Names of classes may be others'. A leading quote makes them text; without it they are the names again."""
    classes = ["=1+1", "+cmd|x", "-3.5", "@a", "'=x", "plain", "\tx", "-"]
    x = np.arange(16, dtype=float).reshape(-1, 1) // 2
    agent = cd.Agent("a", DecisionTreeClassifier(random_state=0), x, np.repeat(classes, 2))
    agents = [agent, cd.Agent("b", DecisionTreeClassifier(), x, np.repeat(classes, 2))]
    result = cd.Federation(agents, cd.AvgKD(), seed=0).run(1, runtime="simulation", alone=False, progress=False)
    path, table, out = tmp_path / "a.codistill", tmp_path / "x.csv", tmp_path / "out.csv"
    result.agents["a"].save(path)
    pd.DataFrame({"0": x[:, 0]}).to_csv(table, index=False)
    assert main(["predict", str(path), str(table), "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["predict", str(path), str(table)]) == 0
    assert capsys.readouterr().out == out.read_text()
    found = pd.read_csv(out, dtype=str, keep_default_na=False)
    assert list(found["class"][::2]) == ["'=1+1", "'+cmd|x", "-3.5", "'@a", "''=x", "plain", "'\tx", "-"]
    restored = found["class"].str.replace(r"^'(?='*[=+\-@\t])", "", regex=True)
    assert list(restored) == list(np.repeat(classes, 2))
    assert main(["predict", str(path), str(table), "--out", str(tmp_path / "out.parquet")]) == 0
    assert list(pd.read_parquet(tmp_path / "out.parquet")["class"][::2]) == classes


@pytest.mark.parametrize("text", ["=x", "+x", "-x", "@x", "\tx", "\rx", "\n=x", "-1-1", "+1e", "--1", "-=1", "\uff1dx"])
def test_text_that_may_be_a_formula_is_quoted_in_cells_and_headings(text):
    frame = pd.DataFrame({text: [text, "x"], "number": [-0.5, 1e-9], "said": ["-0.5", "+3e-7"]})
    lines = csv_text(frame)
    back = pd.read_csv(io.StringIO(lines, newline=""), dtype={"said": str}, lineterminator="\n")
    assert list(back.columns) == [f"'{text}", "number", "said"]
    assert list(back[f"'{text}"]) == [f"'{text}", "x"]
    assert list(back["number"]) == [-0.5, 1e-9]
    assert list(back["said"]) == ["-0.5", "+3e-7"]
    assert next(iter(frame.columns)) == text  # the frame itself is not changed
