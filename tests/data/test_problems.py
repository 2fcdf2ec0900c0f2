"""All problems of a table at once, and advice that solves them when it is pasted."""

import io
import tomllib

import numpy as np
import pandas as pd
import pytest

import codistill as cd
from codistill.cli import main
from codistill.core.errors import DataError
from codistill.data.columns import Column
from codistill.data.problems import find_problems, python_advice, toml_advice
from codistill.data.tables import read_table, read_tables
from codistill.experiments.building import load_data
from codistill.experiments.recipe import read_recipe
from codistill.experiments.run import prepare

ROWS = 40
MESSY = {
    "patient id": lambda row: f"P{row:04d}",
    "age": lambda row: 30 + row % 17,
    "height": lambda row: f"1,{50 + row}",
    "pay": lambda row: f"{2 + row % 7}.{100 + row}",
    "crp": lambda row: "<0,5" if row % 9 == 4 else f"{row},5",
    "admitted": lambda row: f"{1 + row % 28:02d}.03.2021",
    "seen": lambda row: "" if row % 7 == 0 else f"2021-0{1 + row % 9}-11",
    "ward": lambda row: "ABC"[row % 3],
    "notes": lambda row: f"pain at night and no complaint since day {row}",
    "site": lambda row: "north",
    "marker": lambda row: "?" if row % 8 == 1 else row % 5,
    "diagnosis": lambda row: ("no", "yes")[row // 2 % 2],
}
RECIPE = """
seed = 0

[data]
file = "visits.csv"
label = "diagnosis"

[[agents]]
learner = "logistic_regression"
count = 2

[protocol]
name = "alone"
"""


def write(path, columns=MESSY, separator=";", rows=ROWS):
    lines = [list(columns), *([make(row) for make in columns.values()] for row in range(rows))]
    path.write_text("\n".join(separator.join(map(str, line)) for line in lines) + "\n")
    return path


def pasted(recipe, advice):
    """The recipe with the lines of an advice where they say that they belong."""
    lists, _, kinds = advice.partition("[data.columns]")
    recipe = recipe.replace("[data]\n", f"[data]\n{lists.replace('# under [data]:', '')}")
    return f"{recipe}\n[data.columns]{kinds}"


def test_one_error_names_everything_and_its_advice_makes_the_recipe_run(tmp_path, capsys):
    write(tmp_path / "visits.csv")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    assert main(["data", str(path)]) == 3
    shown = capsys.readouterr().err
    assert "9 problems" in shown
    for phrase in (
        "'patient id': another text in each row, such as 'P0000'",
        "'pay': numbers that can be read in two ways, such as '2.100'",
        "'crp': bounds among numbers: '<0,5' in data row 5",
        "'admitted': dates, such as '01.03.2021'",
        "'seen': dates, such as '2021-02-11'",
        "'ward': 3 different texts, such as 'A', 'B', 'C'",
        "'notes': 40 different texts",
        "'site': only the value 'north'",
        "'marker': numbers and '?' in data row 2",
    ):
        assert phrase in shown
    advice = shown.partition("'drop' or 'ids':\n\n")[2]
    assert tomllib.loads(pasted(RECIPE, advice))["data"]["columns"]["admitted"] == {
        "kind": "date",
        "format": "%d.%m.%Y",
    }
    path.write_text(pasted(RECIPE, advice))
    data = load_data(read_recipe(path))
    fitted = data.columns.columns
    assert {name: column.kind for name, column in fitted.items()} == {
        "age": "number", "height": "number", "pay": "number", "crp": "number", "marker": "number",
        "admitted": "date", "seen": "date", "ward": "category", "notes": "text",
    }  # fmt: skip
    assert (fitted["height"].decimal, fitted["pay"].thousands, fitted["crp"].bounds) == (",", ".", "value")
    place = data.columns.feature_names().index
    x = np.concatenate([data.x, data.x_test]) * data.scaling.divisor + data.scaling.shift
    assert {round(value) for value in x[:, place("pay")]} == {1000 * (2 + row % 7) + 100 + row for row in range(ROWS)}
    assert np.isnan(x[:, place("marker")]).sum() == sum(row % 8 == 1 for row in range(ROWS))
    federation, _ = prepare(read_recipe(path), tmp_path / "run")
    federation.run(1, runtime="simulation", alone=False, progress=False, folder=tmp_path / "run")
    check_predictions(tmp_path, capsys)


def check_predictions(folder, capsys):
    """A saved model reads a table as the recipe has read it."""
    run, model = folder / "run", folder / "model.codistill"
    assert main(["export", str(run), "logistic_regression-1", "--out", str(model)]) == 0
    capsys.readouterr()
    assert main(["predict", str(model), str(folder / "visits.csv")]) == 0
    predicted = pd.read_csv(io.StringIO(capsys.readouterr().out))
    loaded = cd.load(model)
    plain = pd.DataFrame({name: [make(row) for row in range(ROWS)] for name, make in MESSY.items()})
    plain = plain.replace({"marker": "?", "seen": ""}, np.nan).assign(
        height=[1.5 + row / 100 for row in range(ROWS)],
        pay=[1000 * (2 + row % 7) + 100 + row for row in range(ROWS)],
        crp=[0.5 if row % 9 == 4 else row + 0.5 for row in range(ROWS)],
    )
    np.testing.assert_allclose(loaded.predict_proba(plain)[:, 1], predicted["probability_yes"], rtol=1e-6)
    assert predicted["probability_yes"].nunique() > ROWS / 2


def test_the_command_shows_what_a_file_holds(tmp_path, capsys):
    assert main(["data", str(write(tmp_path / "visits.csv"))]) == 0
    shown = capsys.readouterr().out
    assert "40 rows, 12 columns, separated by semicolons" in shown
    for phrase in (
        "numbers with a decimal comma",
        'drop = ["patient id", "site"]',
        'ward = "category"',
        'seen = "date"',
    ):
        assert phrase in " ".join(shown.split())
    assert main(["data", str(write(tmp_path / "plain.csv", {"a": int, "b": lambda row: row % 3}, ","))]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a number of its own in each" in shown
    assert "All columns are numbers." in shown


def test_in_python_the_advice_is_python():
    frame = pd.DataFrame(
        {
            "age": [41, 52, 63, 70],
            "sex": ["m", "f", "f", None],
            "day": ["2021-01-02", "2021-02-03", None, "2021-03-04"],
            "crp": ["<1", "2", "?", "4"],
        }
    )
    with pytest.raises(DataError) as error:
        cd.Columns({}).fit(frame)
    advice = error.value.do.removeprefix("Write: ")
    assert advice == (
        'x = x.replace(["?"], float("nan")); '
        'codistill.Columns({"sex": "category", "day": "date", "crp": {"kind": "number", "bounds": "value"}})'
        ".fit(x).transform(x)"
    )
    first, last = advice.split("; ")
    x = frame.replace(["?"], float("nan"))
    assert first == 'x = x.replace(["?"], float("nan"))'
    kinds = {"sex": "category", "day": "date", "crp": {"kind": "number", "bounds": "value"}}
    assert str(kinds).replace("'", '"') in last
    made = cd.Columns(kinds).fit(x).transform(x)
    np.testing.assert_array_equal(made[:, 1], [1, 2, np.nan, 4])


@pytest.mark.parametrize(
    ("cells", "kind", "missing", "note"),
    [
        (["a", "b"] * 10, {"kind": "category"}, (), ""),
        ([f"word {row} and more words" for row in range(40)], {"kind": "text"}, (), ""),
        ([f"{row} unknown"[: 2 if row < 9 else 3].strip() for row in range(5)] + ["unknown"], None, ("unknown",), ""),
        (["1,5", "?", "2,5", "n/a"], {"kind": "number", "decimal": ","}, ("?", "n/a"), ""),
        (["2021-01-02", "never", "2021-01-03"], {"kind": "date"}, ("never",), ""),
        (["01/02/2021", "03/04/2021"], {"kind": "date", "format": "%d/%m/%Y"}, (), 'or format = "%m/%d/%Y"'),
        (["01/22/2021"], {"kind": "date", "format": "%m/%d/%Y"}, (), ""),
        (["3 Mar 2021 10:15"], {"kind": "date", "format": "%d %b %Y %H:%M"}, (), ""),
        (["1,234", "5,678"], {"kind": "number", "decimal": ","}, (), 'or { kind = "number", thousands = "," }'),
    ],
)
def test_what_a_column_could_be(cells, kind, missing, note):
    (found,) = find_problems(pd.DataFrame({"x": pd.Series(cells, dtype=object)}), {}, "the frame")
    assert (found.kind, found.missing, found.note) == (kind, missing, note)
    assert found.stops


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (pd.Series(np.arange(20)), "a number of its own in each row"),
        (pd.Series(np.full(20, 2.5)), "only the value 2.5"),
        (pd.Series(np.arange(20) % 3), None),
        (pd.Series(np.arange(20) * 3), None),
        (pd.Series([1.0, 1.0]), None),  # two rows say nothing
        (pd.Series([True, False, None], dtype=object), None),  # as 1 and 0
    ],
)
def test_numbers_that_say_nothing_are_noted(values, found):
    problems = find_problems(values.to_frame("x"), {}, "the frame")
    assert [each.found.startswith(str(found)) for each in problems] == ([] if found is None else [True])
    assert not any(each.stops for each in problems)


def test_kinds_that_were_given_are_read_too():
    frame = pd.DataFrame({"d": ["2021-01-01", "x"], "c": ["a", "b"], "n": ["1", "2"]})
    kinds = {"d": Column(kind="date"), "c": Column(kind="category", values=("a",)), "n": Column(kind="number")}
    problems = find_problems(frame, kinds, "the frame")
    assert [each.column for each in problems] == ["d", "c"]
    assert "'x' in data row 2" in problems[0].found
    assert find_problems(frame, kinds, "the frame", declared=False) == []


def test_cells_that_are_lists_are_named():
    (found,) = find_problems(pd.DataFrame({"x": [[1], [2]]}), {}, "the frame")
    assert (found.found, found.drop) == ("cells that hold a list", True)


def test_several_tables_are_one_error(tmp_path):
    columns = {"x": lambda row: row, "word": lambda row: "ab"[row % 2], "y": lambda row: "no" if row % 2 else "yes"}
    north = write(tmp_path / "n.csv", {**columns, "x": lambda row: row or "none"}, ",")
    south = write(tmp_path / "s.csv", {**columns, "x": lambda row: row or "?"}, ",")
    with pytest.raises(DataError) as error:
        read_tables({"n": north, "s": south}, "y")
    assert f"table {north}, column 'word'" in error.value.found
    assert f"table {south}, column 'x': numbers and '?' in data row 1" in error.value.found
    assert error.value.do.count("word =") == 1
    assert 'missing_values = ["none", "?"]' in error.value.do
    data = read_tables({"n": north, "s": south}, "y", missing_values=["none", "?"], columns={"word": "category"})
    assert np.isnan(data.x[:, 0]).sum() + np.isnan(data.x_test[:, 0]).sum() == 2


def test_lists_of_before_are_kept_in_the_advice(tmp_path):
    path = write(tmp_path / "visits.csv")
    with pytest.raises(DataError) as error:
        read_table(path, "diagnosis", drop=["notes"], missing_values=["?"], columns={"ward": "category"})
    assert 'drop = ["notes", "patient id", "site"]' in error.value.do
    assert "missing_values" not in error.value.do
    assert "# under [data.columns]:" in error.value.do
    write(path, {**MESSY, "marker": lambda row: ("?", "none", row)[min(2, row)]})
    with pytest.raises(DataError, match=r'(?s)missing_values = \["\?", "none"\]'):
        read_table(path, "diagnosis", missing_values=["?"])


def test_one_problem_is_one_sentence(tmp_path):
    columns = {"x": lambda row: row if row else "?", "y": lambda row: row % 2}
    with pytest.raises(DataError) as error:
        read_table(write(tmp_path / "t.csv", columns, ","), "y")
    assert error.value.found == "column 'x': numbers and '?' in data row 1"
    assert error.value.do == (
        "Write under [data]: missing_values = [\"?\"] (or correct these cells); or list the column in 'drop' or 'ids'."
    )
    columns["x"] = lambda row: "ab"[row % 2]
    with pytest.raises(DataError, match=r'Write under \[data\.columns\]: x = "category"; or list'):
        read_table(write(tmp_path / "t.csv", columns, ","), "y")


def test_odd_names_are_quoted():
    frame = pd.DataFrame({'a "b"': ["x", "y"] * 6, "c.d": ["x", "y"] * 6, "é": ["x", "y"] * 6})
    problems = find_problems(frame, {}, "the frame")
    assert set(tomllib.loads(toml_advice(problems))["data"]["columns"]) == set(frame.columns)
    assert 'Columns({"a \\"b\\"": "category", "c.d": "category", "é": "category"})' in python_advice(problems)


def test_gaps_are_listed_with_the_rest(tmp_path):
    columns = {"x": lambda row: row if row else "", "w": lambda row: "ab"[row % 2], "y": lambda row: row % 2}
    path = write(tmp_path / "t.csv", columns, ",")
    with pytest.raises(DataError, match=r"(?s)2 problems.*'x': no value in data row 1.*drop_rows.*'w': 2 different"):
        read_table(path, "y", missing="refuse")
