"""Scores per class and confusion matrices: of a run, in its folder, in its report, and of several runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

import codistill as cd
from codistill.cli import main
from codistill.core.errors import DataError, MessageError
from codistill.experiments.saved_run import read_summary
from codistill.federation.result import FACTS
from codistill.report import maps
from codistill.report.pages import write_comparison, write_report
from codistill.results import outputs, per_class
from codistill.results.outputs import Outputs, collect, view
from codistill.results.per_class import agents_table, class_scores, mapped_agents, row_shares, runs_table
from codistill.results.scores import as_score
from codistill.results.summary import Summary
from codistill.results.tables import Cell

NAMES = ("cat", "dog", "eel")
Y = np.array(["cat", "cat", "dog", "dog", "dog"])  # no eel among the test samples
# Of each agent the true class (row) and the predicted class (column), counted by hand from its answers below.
A = np.array([[2, 0, 0], [1, 2, 0], [0, 0, 0]])
B = np.array([[0, 1, 1], [0, 3, 0], [0, 0, 0]])
ANSWERS = {"a": [0, 0, 0, 1, 1], "b": [1, 2, 1, 1, 1]}


class Fixed(cd.Learner):
    """Answers sample number i by the i-th class of a list."""

    def __init__(self, answers: list[int]) -> None:
        self.answers = answers

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None: ...

    def predict(self, x: np.ndarray) -> np.ndarray:
        return 0.5 / 3 + 0.5 * np.eye(3, dtype=np.float32)[np.array(self.answers)[x[:, 0].astype(int)]]

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


def federation(test: bool = True, **options: Any) -> cd.Federation:
    x = np.arange(5.0)[:, None]
    agents = [cd.Agent(name, Fixed(answers), x, Y) for name, answers in ANSWERS.items()]
    return cd.Federation(agents, cd.Alone(), test=(x, Y) if test else None, classes=NAMES, **options)


def run(**options: Any) -> cd.Result:
    made = federation(**{key: options.pop(key) for key in ("test", "faults") if key in options})
    return made.run(2, **{"runtime": "simulation", "alone": False, "progress": False} | options)


def test_scores_of_a_matrix_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    y, chosen = rng.integers(0, 4, 60), rng.integers(0, 4, 60)
    found = class_scores(outputs.confusion_matrix(chosen.astype(np.uint8), y, 5))
    expected = precision_recall_fscore_support(y, chosen, labels=range(5), zero_division=np.nan)
    for name, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        np.testing.assert_allclose(found[name], values, err_msg=name)
    np.testing.assert_array_equal(
        outputs.confusion_matrix(chosen.astype(np.uint8), y, 5), confusion_matrix(y, chosen, labels=range(5))
    )


@pytest.mark.parametrize("runtime", ["simulation", "processes", "network"])
def test_a_result_has_them_by_the_names_of_the_classes_in_every_runtime(runtime: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": tmp_path / "run", "runtime": runtime}
    result = run(**options)
    for name, expected in {"a": A, "b": B}.items():
        matrix = result.confusion_matrix(name)
        assert (list(matrix.index), list(matrix.columns)) == (list(NAMES), list(NAMES))
        assert (matrix.index.name, matrix.columns.name) == ("true class", "predicted class")
        np.testing.assert_array_equal(matrix.to_numpy(), expected)
    table = result.per_class()
    assert table[["agent", "class", "support"]].to_numpy().tolist() == [
        [name, label, count] for name in "ab" for label, count in zip(NAMES, (2, 3, 0), strict=True)
    ]
    # a: both cats and 2 of 3 dogs, 3 answers of "cat"; b: no cat, all dogs, 4 answers of "dog" and one of "eel"
    np.testing.assert_allclose(table["recall"], [1, 2 / 3, np.nan, 0, 1, np.nan])
    np.testing.assert_allclose(table["precision"], [2 / 3, 1, np.nan, np.nan, 3 / 4, 0])
    np.testing.assert_allclose(table["f1"], [4 / 5, 4 / 5, np.nan, 0, 6 / 7, 0])
    # The accuracy is the share on the diagonal.
    last = result.frame().query("round == 2").set_index("agent")["accuracy"]
    assert last.to_dict() == {"a": np.trace(A) / 5, "b": np.trace(B) / 5}
    # A run that is done is read, not run again; its folder holds the same.
    again = run(**options, resume=True)
    pd.testing.assert_frame_equal(again.per_class(), table)
    kept = read_summary(tmp_path / "run")
    np.testing.assert_array_equal(per_class.matrices(kept)["b"], B)


def test_labels_are_as_they_were_given() -> None:
    x = np.arange(4.0)[:, None]
    agent = cd.Agent("a", Fixed([0, 1, 1, 1]), x, [10, 20, 20, 30])
    made = cd.Federation([agent], cd.Alone(), test=(x, [10, 20, 20, 30]), classes=[10, 20, 30])
    matrix = made.run(1, runtime="simulation", alone=False, progress=False).confusion_matrix("a")
    assert matrix.loc[30, 20] == 1
    assert matrix.loc[20, 20] == 2


@pytest.mark.parametrize(
    ("options", "agent", "said"),
    [
        ({"test": False}, "a", "there is no common test set, and what an agent answers on its own test data stays"),
        ({"faults": [cd.Fault(kind="invert", agent="b")]}, "b", "agent 'b' is Byzantine"),
        (
            {"faults": [cd.Fault(kind="gone", agent="b")], "evaluate_agents": "present"},
            "b",
            "agent 'b' gave no predict",
        ),
        ({}, "aa", r"must be one of the run. Found: 'aa'. Did you mean 'a'"),
    ],
)
def test_what_is_not_known_is_said_by_name(options: dict[str, Any], agent: str, said: str) -> None:
    result = run(**options)
    with pytest.raises(DataError, match=said):
        result.confusion_matrix(agent)
    if "faults" in options:
        assert set(result.per_class()["agent"]) == {"a"}
        assert "no scores per class of b: Byzantine, not there" in str(agents_table(result.summary()).notes)  # type: ignore[union-attr]


def test_real_values_and_too_much_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(4.0)[:, None]
    made = cd.Federation([cd.Agent("a", cd.KernelRidge(), x, x * 0.5)], cd.Alone(), test=(x, x * 0.5))
    result = made.run(1, runtime="simulation", alone=False, progress=False)
    with pytest.raises(DataError, match="the targets are real values"):
        result.per_class()
    monkeypatch.setattr(outputs, "MOST_ENTRIES", 17)  # of 2 x 3 x 3
    with pytest.raises(DataError, match="too many predictions to keep"):
        run().per_class()
    monkeypatch.setattr(per_class, "MOST_CLASSES", 2)
    with pytest.raises(DataError, match="3 classes; predictions are kept for at most 2"):
        run().per_class()


def test_an_agent_without_predicted_classes_does_not_hide_those_of_others() -> None:
    codes = np.array([0, 0, 1, 1, 1])
    answers = np.eye(3, dtype=np.float32)[ANSWERS["a"]]
    kept, bare = (view(answers, codes, probabilistic=True, agents=count) for count in (2, 5_000_000))
    assert kept is not None
    assert bare is not None
    found = collect(1, {"a": kept, "b": bare}, codes)
    assert found is not None
    found = Outputs.decode(found.encode())
    shown = replace(summary({"a": A, "b": B}), outputs=found)
    assert {name: counts.tolist() for name, counts in per_class.matrices(shown).items()} == {"a": A.tolist()}
    assert per_class.lacking(shown) is None
    assert "agent 'b' gave no predictions" in str(per_class.lacking(shown, "b"))
    nobody = collect(1, {"a": bare}, codes)
    assert nobody is not None
    assert nobody.confusion is None


@pytest.mark.parametrize("change", [np.float64, lambda counts: counts + np.uint32(1)])
def test_a_matrix_that_does_not_count_the_test_samples_is_refused(change: Any) -> None:
    whole = run().outputs
    assert whole is not None
    assert whole.confusion is not None
    assert Outputs.decode(whole.encode()).confusion.tolist() == [A.tolist(), B.tolist()]  # type: ignore[union-attr]
    object.__setattr__(whole, "confusion", change(whole.confusion))
    with pytest.raises(MessageError, match="must count every test sample once"):
        Outputs.decode(whole.encode())


# --- tables, reports, comparisons -----------------------------------------------------------------------


def summary(counts: dict[str, Any], names: tuple[str, ...] = NAMES, title: str = "a run") -> Summary:
    """A run with these confusion matrices."""
    stacked = np.array(list(counts.values()), dtype=np.uint32)
    samples = stacked[0].sum(axis=1)
    found = Outputs(1, tuple(counts), samples, np.nan_to_num(row_shares(stacked[0])), None, None, stacked)
    rows = [
        {"round": 1, "agent": name, "present": True, "sent": 0, "received": 0, "accuracy": 0.5, "test_samples": 5}
        for name in counts
    ]
    agents = dict.fromkeys(counts, "mlp")
    return Summary(title, "fedmd", agents, rows, None, None, names, 1.0, 5, outputs=found)


def test_the_table_of_the_agents() -> None:
    """Cats: 100 and 0 %; dogs: 66.7 and 100 %; there is no eel to recognise."""
    table = agents_table(summary({"a": A, "b": B}))
    assert table is not None
    assert list(table.headings) == ["agent", *NAMES]
    half, third = Cell("50.0 %", 0.5), Cell("66.7 %", 2 / 3)
    assert list(table.rows) == [
        ["a", Cell("100.0 %", 1.0), third, "-"],
        ["b", Cell("0.0 %", 0.0), Cell("100.0 %", 1.0), "-"],
    ]
    assert list(table.footer) == [
        ["mean", half, Cell("83.3 %", (2 / 3 + 1) / 2), "-"],
        ["worst", Cell("0.0 %", 0.0), third, "-"],
    ]


def test_of_many_classes_and_agents_some_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_class, "MOST_ON_PAGE", 2)
    monkeypatch.setattr(per_class, "MOST_ROWS", 2)
    monkeypatch.setattr(per_class, "MOST_MAPS", 2)
    # Of two samples of each class the agents recognise these; the means are 1.5, 0.5 and 1.
    right = {"a": (2, 1, 1), "b": (1, 0, 1), "c": (2, 1, 2), "d": (1, 0, 0)}
    counts = {}
    for name, known in right.items():
        counts[name] = np.diag(known) + np.roll(np.diag(2 - np.array(known)), 1, axis=1)
    shown = summary(counts)
    table = agents_table(shown)
    assert table is not None
    assert list(table.headings) == ["agent", "dog", "eel"]
    assert [row[0] for row in table.rows] == mapped_agents(shown) == ["c", "d"]  # 5 and 1 of 6 are right
    assert "classes shown: the 2 of 3 with the lowest mean recall" in table.notes
    assert "agents shown: the best and the worst of 4" in table.notes


def test_many_maps_are_images_so_that_a_page_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "MOST_CELLS", 8)  # cells: two maps of 2 x 2 are drawn with numbers, three without
    for count, texts in ((2, 4), (3, 0)):
        figure = maps.draw_maps([("x", np.full((2, 2), 0.5), ())] * count)
        assert [len(axes.texts) for axes in figure.axes if axes.axison] == [texts] * count


@pytest.mark.usefixtures("no_charts")
def test_the_report_and_the_comparison_show_them(tmp_path: Path) -> None:
    page = write_report(summary({"a": A, "b": B}), tmp_path / "report.html").read_text("utf-8")
    assert "<h2>Scores per class</h2>" in page
    assert page.index("66.7 %") > page.index("Scores per class")
    assert "Confusion matrices. Each row is a true class" in page
    bare = Summary("old", "fedmd", {"a": "mlp"}, [], None, None, NAMES, 1.0, 5)
    page = write_report(bare, tmp_path / "report.html").read_text("utf-8")
    assert "No predictions of the last round: the run is not finished" in page
    both = write_comparison([summary({"a": A}), bare], tmp_path / "both.html").read_text("utf-8")
    section = both[both.index("<h2>Scores per class") : both.index("<h2>All runs")]
    assert "66.7 %" in section
    assert "No scores per class of old: no predictions of the last round" in section
    assert "Scores per class" not in write_comparison([bare], tmp_path / "both.html").read_text("utf-8")


def test_runs_side_by_side_are_means_over_their_agents() -> None:
    other = summary({"a": A[:2, :2]}, ("cat", "fox"), "other")
    table = runs_table([summary({"a": A, "b": B}), other])
    assert table is not None
    assert list(table.headings) == ["run", *NAMES, "fox"]
    assert [[cell if isinstance(cell, str) else cell.value for cell in row] for row in table.rows] == [
        ["a run", 0.5, pytest.approx(5 / 6), "-", "-"],
        ["other", 1.0, "-", "-", pytest.approx(2 / 3)],
    ]
    bare = Summary("old", "fedmd", {"a": "mlp"}, [], None, None, NAMES, 1.0, 5)
    assert runs_table([bare]) is None
    said = per_class.runs_lacking(
        [bare, other, replace(bare, scores=(as_score("rmse"),))]
    )  # real values have no classes
    assert [text[:60] for text in said] == ["no scores per class of old: no predictions of the last round"]


@pytest.mark.usefixtures("no_report")
def test_compare_prints_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder=tmp_path / "first")
    monkeypatch.setattr(per_class, "MOST_COLUMNS", 2)  # a file has all classes
    monkeypatch.setattr(per_class.runs_table, "__defaults__", (2,))
    assert main(["compare", str(tmp_path / "first"), "--out", str(tmp_path / "table.csv")]) == 0
    said = capsys.readouterr().out
    assert "recall per class" in said
    assert f"table: {tmp_path / 'table-classes.csv'}" in said
    assert "eel" not in said
    kept = pd.read_csv(tmp_path / "table-classes.csv")
    assert kept.columns.tolist() == ["run", *NAMES]
    assert kept.loc[0, "dog"] == pytest.approx((2 / 3 + 1) / 2)
    assert not (tmp_path / "table-seeds.csv").exists()  # one seed says no more than the table of runs
    assert json.loads((tmp_path / "first" / FACTS).read_text())["class_names"] == list(NAMES)
