"""Sweeps: every combination of a recipe's fields, run once, shown as tables and a picture."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy.stats import t as student
from scipy.stats import ttest_rel

from codistill.cli import main
from codistill.core.errors import RecipeError
from codistill.experiments.sweep import Sweep, execute_sweep, read_sweep
from codistill.experiments.sweep_results import means, on_compared_data, scores_by_seed
from codistill.experiments.sweep_view import draw_scores as draw
from codistill.experiments.sweep_view import score_tables as tables
from codistill.experiments.sweep_view import show_seeds

TOY = """
seed = 0
[data]
name = "linear"
scale = "none"
[partition]
kind = "unequal"
weights = [0.6, 0.4]
[[agents]]
learner = { kind = "kernel_ridge", kernel = "linear", c = 0.01, reveal_inputs = true }
count = 2
[protocol]
name = "akd"
rounds = 3
[evaluation]
alone = false
[runtime]
kind = "simulation"
[sweep]
protocol = [{ name = "akd" }, { label = "half", name = "ekd" }, { name = "alone", refit = true, rounds = 1 }]
"agents.0.learner.c" = [0.01, 1.0]
seed = [0, 1]
[sweep.partition]
"same data" = { sort = false }
"different data" = { sort = true }
[quick]
"protocol.rounds" = 2
"sweep.seed" = [5]
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.toml"
    path.write_text(TOY)
    return path


def test_every_combination_is_a_recipe_of_its_own(toy: Path) -> None:
    sweep = read_sweep(toy)
    runs = list(sweep.runs)
    assert len(runs) == 3 * 2 * 2 * 2
    labels, recipe = runs[-1]
    assert labels == {"protocol": "alone", "agents.0.learner.c": "1.0", "seed": "1", "partition": "different data"}
    assert (recipe.protocol.name, recipe.spec.rounds, recipe.seed) == ("alone", 1, 1)
    assert recipe.agents[0].options["c"] == 1.0
    # A table on an axis changes what it names, and keeps the rest.
    assert recipe.partition.weights == (0.6, 0.4)  # type: ignore[attr-defined]
    assert recipe.partition.sort  # type: ignore[attr-defined]
    assert {recipe.spec.rounds for chosen, recipe in runs if chosen["protocol"] != "alone"} == {3}


def test_the_quick_form_and_then_a_person_have_the_last_word(toy: Path) -> None:
    quick = read_sweep(toy, quick=True)
    assert len(quick.runs) == 12
    assert {(recipe.spec.rounds, recipe.seed) for labels, recipe in quick.runs if labels["protocol"] == "half"} == {
        (2, 5)
    }
    told = read_sweep(toy, ["protocol.rounds=4", 'sweep."agents.0.learner.c"=[0.5]'], quick=True)
    assert {recipe.spec.rounds for labels, recipe in told.runs if labels["protocol"] == "akd"} == {4}
    assert {recipe.agents[0].options["c"] for _, recipe in told.runs} == {0.5}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("[sweep]", "[swoop]", "A sweep needs a table"),
        ("seed = [0, 1]", "seed = 3", "sweep.seed must be a list of different values"),
        ("seed = [0, 1]", "seed = [1, 1]", "sweep.seed must be a list of different values"),
        ("seed = [0, 1]", "seed = [0, -1]", "seed must be an integer of at least 0"),
        ('{ name = "akd" },', '{ name = "akd", rouns = 3 },', "Unknown option 'rouns' for akd"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(toy: Path, before: str, after: str, said: str) -> None:
    text = TOY.replace(before, after)
    toy.write_text(text.replace("[sweep.partition]", "[unknown]") if "swoop" in after else text)
    with pytest.raises(RecipeError, match=said):
        read_sweep(toy)


def test_a_quick_form_must_be_there(toy: Path) -> None:
    toy.write_text(TOY[: TOY.index("[quick]")])
    with pytest.raises(RecipeError, match="needs a table"):
        read_sweep(toy, quick=True)


def test_run_sends_a_sweep_to_its_own_command(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy.write_text(TOY[: TOY.index("[quick]")])
    assert main(["run", str(toy)]) == 2
    assert "codistill sweep" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.usefixtures("no_report")
def test_runs_are_made_once_and_shown(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["sweep", str(toy), "--quick", "--out", str(out)]) == 0
    first = capsys.readouterr().out
    assert first.count("different data") >= 6
    frame = pd.read_csv(out / "sweep.csv")
    assert len(frame) == 4 * (2 * 2 + 2 * 2 + 1 * 2)  # settings x (rounds x agents of akd, ekd and alone)
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    assert len(stamps) == 12
    assert main(["sweep", str(toy), "--quick", "--out", str(out)]) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")} == stamps
    assert pd.read_csv(out / "sweep.csv").equals(frame)


def test_a_folder_of_another_recipe_is_not_taken_for_done(toy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    only = ["sweep.protocol=[{name='akd'}]", 'sweep."agents.0.learner.c"=[0.5]', "sweep.seed=[1]", "protocol.rounds=1"]
    assert execute_sweep(read_sweep(toy, only), out, tell=str) is not None
    with pytest.raises(RecipeError, match="must hold runs of the same recipe"):
        execute_sweep(read_sweep(toy, [*only, "partition.weights=[0.5, 0.5]"]), out, tell=str)


def test_an_interrupted_run_ends_the_sweep(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Path] = []

    def stopped(recipe: object, place: Path, **options: object) -> tuple[None, bool]:
        begun.append(place)
        return None, False

    monkeypatch.setattr("codistill.experiments.sweep_jobs.execute", stopped)
    assert main(["sweep", str(toy), "--out", str(tmp_path / "out")]) == 130
    assert len(begun) == 1


def test_means_are_over_agents_and_seeds_and_the_spread_over_seeds(toy: Path) -> None:
    sweep = read_sweep(toy)
    rows = [
        {"protocol": "akd", "agents.0.learner.c": "1.0", "partition": "same data", "seed": seed, "round": 1, "rmse": v}
        for seed, values in (("0", (1.0, 3.0)), ("1", (5.0, 7.0)))
        for v in values
    ]
    table = means(sweep, pd.DataFrame(rows))
    assert table[["mean", "spread", "seeds"]].to_numpy().tolist() == [[4.0, 8**0.5, 2]]


@pytest.mark.usefixtures("no_report")
def test_an_impossible_combination_is_reported_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(
        """
        seed = 0
        [data]
        name = "digits"
        samples = 60
        test_samples = 40
        [[agents]]
        learner = "mlp"
        [[agents]]
        learner = "logistic"
        [protocol]
        name = "alone"
        rounds = 1
        [evaluation]
        alone = false
        [runtime]
        kind = "simulation"
        [sweep]
        protocol = ["fedavg", "alone"]
        """.replace('protocol = ["fedavg", "alone"]', 'protocol = [{ name = "fedavg" }, { name = "alone" }]')
    )
    said: list[str] = []
    sweep = read_sweep(path)
    frame = execute_sweep(sweep, tmp_path, tell=said.append)
    assert frame is not None
    assert said[0].startswith("[1/2] protocol=fedavg: skipped. fedavg averages weights")
    assert said[1].startswith("[2/2] protocol=alone: accuracy")
    assert set(frame["protocol"]) == {"alone"}
    table = means(sweep, frame)
    assert sweep.lines.key == "protocol"
    assert [title for title, _ in sweep.parts(table)] == ["all"]
    console = Console(width=100, record=True, file=io.StringIO())
    for drawn in tables(sweep, table):
        console.print(drawn)
    shown = console.export_text()
    assert "fedavg" not in shown
    assert f"{100 * float(np.mean(frame['accuracy'])):.1f}" in shown
    draw(sweep, table, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5_000


VARIED = (
    TOY[: TOY.index("[sweep]")]
    + """
[sweep]
seed = [0, 1]
[sweep.variants]
"as it is" = {}
"other" = { protocol = { name = "alone", refit = true }, compression = { bits = 8 }, "agents.0.learner.c" = 1.0 }
"""
)


def test_a_variant_changes_several_tables_at_once(toy: Path) -> None:
    toy.write_text(VARIED)
    sweep = read_sweep(toy)
    plain, other = [recipe for labels, recipe in sweep.runs if labels["seed"] == "1"]
    assert sweep.lines.key == "variants"
    assert (plain.protocol.name, plain.compression, plain.agents[0].options["c"]) == ("akd", None, 0.01)
    assert (other.protocol.name, other.spec.rounds, other.seed) == ("alone", 3, 1)
    assert other.compression is not None
    assert (other.compression.bits, other.agents[0].options["c"]) == (8, 1.0)


@pytest.mark.parametrize("values", ["[1, 2]", '{ "a" = 1 }'])
def test_a_variant_that_is_no_table_of_changes(toy: Path, values: str) -> None:
    toy.write_text(TOY[: TOY.index("[sweep]")] + f"[sweep]\nvariants = {values}\n")
    with pytest.raises(RecipeError, match="must be a table of named changes"):
        read_sweep(toy)


OWN = '''
"""A protocol of one's own."""

from dataclasses import dataclass

from codistill.protocol import Agent, Protocol


@dataclass(frozen=True, kw_only=True)
class Echo(Protocol):
    name = "echo"
    loud: bool = False

    async def round(self, me: Agent, t: int) -> None:
        me.learner.fit(me.shard.x, me.shard.targets)
        me.measure(me.name, volume=float(self.loud))
'''


@pytest.mark.usefixtures("no_report")
def test_a_sweep_of_a_protocol_of_ones_own_recognises_its_finished_runs(tmp_path: Path) -> None:
    """Its class is another object at each load; the file's content and the settings say whether it is the same."""
    (tmp_path / "own.py").write_text(OWN)
    path, out = tmp_path / "own.toml", tmp_path / "out"
    tables = (
        TOY[: TOY.index("[sweep]")].replace('name = "akd"', 'name = "own.py:Echo"').replace("rounds = 3", "rounds = 1")
    )
    path.write_text(tables + '[sweep]\n"protocol.loud" = [false, true]\n')
    said: list[str] = []
    first = execute_sweep(read_sweep(path), out, tell=said.append)
    assert first is not None
    assert first.groupby("protocol.loud")["volume"].first().tolist() == [0.0, 1.0]
    stamps = {found: found.stat().st_mtime_ns for found in out.rglob("metrics.jsonl")}
    assert len(stamps) == 2
    again = execute_sweep(read_sweep(path), out, tell=said.append)
    assert again is not None
    assert again.equals(first)
    assert said[2:] == said[:2]
    assert {found: found.stat().st_mtime_ns for found in out.rglob("metrics.jsonl")} == stamps
    # Other settings in the same folders, or other code in the same file, are another run.
    path.write_text(tables + '[sweep."protocol.loud"]\n"False" = true\n')
    with pytest.raises(RecipeError, match="must hold runs of the same recipe"):
        execute_sweep(read_sweep(path), out, tell=str)
    path.write_text(tables + '[sweep]\n"protocol.loud" = [false, true]\n')
    (tmp_path / "own.py").write_text(OWN.replace("float(self.loud)", "2.0"))
    with pytest.raises(RecipeError, match="must hold runs of the same recipe"):
        execute_sweep(read_sweep(path), out, tell=str)


def test_one_protocol_with_several_settings_is_several_lines(toy: Path, no_report: None) -> None:
    """Their labels say in what they differ, and what all of them say is not repeated."""
    same = [f'{{ name = "avgkd", rounds = 1, own_weight = {weight} }}' for weight in (0.2, 0.8)]
    values = f'[{", ".join(same)}, {{ name = "akd" }}, {{ name = "avgkd" }}]'
    toy.write_text(TOY[: TOY.index("[sweep]")] + f"[sweep]\nprotocol = {values}\n")
    sweep = read_sweep(toy)
    labels = ["avgkd, rounds=1, own_weight=0.2", "avgkd, rounds=1, own_weight=0.8", "akd", "avgkd"]
    assert [run["protocol"] for run, _ in sweep.runs] == labels
    assert [recipe.protocol.own_weight for _, recipe in sweep.runs[:2]] == [0.2, 0.8]
    frame = execute_sweep(sweep, toy.parent / "out", tell=str)
    assert frame is not None
    assert list(frame["protocol"].unique()) == labels
    assert len({path.parent for path in (toy.parent / "out").glob("*/metrics.jsonl")}) == 4


def test_labels_say_what_tables_without_a_name_change(toy: Path) -> None:
    """A table without a name keeps that of [protocol]; a name alone is a table with it."""
    start = TOY[: TOY.index("[sweep]")]
    values = '["akd", { rounds = 1 }, { name = "avgkd", own_weight = 0.2, rounds = 1 }, { name = "avgkd", rounds = 1 }]'
    toy.write_text(start + f"[sweep]\nprotocol = {values}\n")
    sweep = read_sweep(toy)
    assert list(sweep.lines.values) == ["akd", "akd, rounds=1", "avgkd, own_weight=0.2", "avgkd"]
    assert [(r.protocol.name, r.spec.rounds) for _, r in sweep.runs] == [
        ("akd", 3),
        ("akd", 1),
        ("avgkd", 1),
        ("avgkd", 1),
    ]
    kinds = '[{ kind = "unequal", weights = [0.6, 0.4] }, { kind = "unequal", weights = [0.9, 0.1] }]'
    toy.write_text(start + f"[sweep]\ncompression = [{{ bits = 8 }}, {{ bits = 16 }}]\npartition = {kinds}\n")
    words = [read_sweep(toy).words(labels) for labels, _ in read_sweep(toy).runs]
    assert words[0] == "bits=8, partition=unequal, weights=[0.6, 0.4]"
    assert words[3] == "bits=16, partition=unequal, weights=[0.9, 0.1]"


@pytest.mark.parametrize(
    "values",
    [
        'protocol = [{ rounds = 1 }, { rounds = 2 }]\n"protocol.rounds" = [3, 4]',
        "protocol = [{ rounds = 1 }, { rounds = 2 }]\nvariants = { a = { protocol = { rounds = 3 } }, b = {} }",
        'variants = { a = { "protocol.rounds" = 3 }, b = {} }\n"protocol.rounds" = [3, 4]',
    ],
)
def test_two_axes_do_not_set_one_field(toy: Path, values: str) -> None:
    """The later one would win, and the labels of the other would say what is not so."""
    toy.write_text(TOY[: TOY.index("[sweep]")] + f"[sweep]\n{values}\n")
    with pytest.raises(RecipeError, match="set in one place. Found: protocol.rounds by sweep"):
        read_sweep(toy)


@pytest.mark.parametrize(
    "values",
    [
        '[{ name = "avgkd" }, { name = "avgkd" }]',
        '[{ label = "a", name = "avgkd" }, { label = "a", name = "akd" }]',
        "[1, 1]",
    ],
)
def test_equal_values_are_not_different(toy: Path, values: str) -> None:
    toy.write_text(TOY[: TOY.index("[sweep]")] + f"[sweep]\nprotocol = {values}\n")
    with pytest.raises(RecipeError, match="must be a list of different values"):
        read_sweep(toy)


def test_labels_of_a_sweep_are_no_formulas_in_a_spreadsheet(toy: Path, no_report: None) -> None:
    toy.write_text(TOY[: TOY.index("[sweep]")] + '[sweep.seed]\n"=1+1" = 0\n"-1" = 1\n')
    frame = execute_sweep(read_sweep(toy), toy.parent / "out", tell=str)
    assert frame is not None
    assert set(frame["seed"]) == {"=1+1", "-1"}
    assert set(pd.read_csv(toy.parent / "out" / "sweep.csv", dtype=str)["seed"]) == {"'=1+1", "-1"}


def test_runs_are_enumerated_once(toy: Path) -> None:
    sweep = read_sweep(toy)
    assert sweep.runs is sweep.runs


# --- every score, over seeds ---------------------------------------------------------------------


def scores_of(sweep: Sweep, lines: dict[str, tuple[float, ...]], **changes: object) -> pd.DataFrame:
    """Rows of two agents whose accuracy is a little above and below these by seed; a round before it is worse."""
    rows = []
    for place, (line, values) in enumerate(lines.items()):
        for seed, value in enumerate(values):
            for done, agent in ((1, "a"), (1, "b"), (2, "a"), (2, "b")):
                accuracy = value + (0.01 if agent == "a" else -0.01) if done == 2 else 0.1
                labels = {"protocol": line, "partition": "same data", "agents.0.learner.c": "1.0", "seed": str(seed)}
                row = {**labels, "round": done, "agent": agent, "present": True, "sent": 0, "accuracy": accuracy}
                rows.append({**row, "own_accuracy": accuracy / 2, "log_loss": 1 - accuracy + place, **changes})
    return pd.DataFrame(rows)


LINES = {"akd": (0.60, 0.62, 0.70), "half": (0.50, 0.54, 0.57), "alone": (0.3, 0.4, 0.5)}


def test_every_score_has_means_intervals_and_a_test_over_seeds(toy: Path, tmp_path: Path) -> None:
    toy.write_text(TOY.replace("[quick]", '[compare]\ngain_over = "half"\n[quick]'))
    sweep = read_sweep(toy)
    frame = scores_of(sweep, LINES)
    console = Console(width=200, record=True, file=io.StringIO())
    found = show_seeds(sweep, frame, means(sweep, frame), tmp_path, console)
    assert found == {"scores": tmp_path / "scores.csv"}
    kept = pd.read_csv(tmp_path / "scores.csv").set_index(["protocol", "score"])
    assert set(kept["partition"]) == {"same data"}  # a column for each of the other axes
    akd, half = (np.array(LINES[name]) for name in ("akd", "half"))
    width = student.ppf(0.975, 2) / np.sqrt(3)
    row = kept.loc[("akd", "accuracy")]
    assert row["mean, s"] == pytest.approx(akd.std(ddof=1))
    assert row["mean, 95 % high"] == pytest.approx(akd.mean() + width * akd.std(ddof=1))
    assert row["gain"] == pytest.approx((akd - half).mean())
    assert row["gain, 95 % low"] == pytest.approx((akd - half).mean() - width * (akd - half).std(ddof=1))
    assert (row["n"], row["pairs"], row["p"]) == (3, 3, pytest.approx(ttest_rel(akd, half).pvalue))
    # The log loss of 'half' is 1 higher, and it is better when it is lower.
    assert kept.loc[("akd", "log loss"), "mean"] == pytest.approx(1 - akd.mean())
    assert kept.loc[("akd", "log loss"), "gain"] == pytest.approx((1 - half + 1 - (1 - akd)).mean())
    text = console.export_text()
    assert "c=1.0, same data: after the run" in " ".join(text.split())
    assert text.count("log loss") >= 3
    assert r"\begin{tabular}{llrrrrrrr}" in (tmp_path / "scores.tex").read_text()


def test_scores_on_own_data_are_those_of_the_table_if_asked_for(toy: Path) -> None:
    toy.write_text(TOY.replace("[quick]", "[compare]\nown = true\n[quick]"))
    sweep = read_sweep(toy)
    parts = scores_by_seed(sweep, on_compared_data(sweep, scores_of(sweep, LINES)))
    lines = {line.label: line.scores for _, lines in parts for line in lines}
    assert lines["akd"]["accuracy"] == pytest.approx({"0": 0.30, "1": 0.31, "2": 0.35})
    assert lines["akd"]["log_loss"] == {}  # was not measured there


def test_a_sweep_over_seeds_alone_is_one_line(toy: Path) -> None:
    toy.write_text(TOY[: TOY.index("[sweep]")] + "[sweep]\nseed = [0, 1, 2]\n")
    sweep = read_sweep(toy)
    frame = scores_of(sweep, {"akd": LINES["akd"]}).drop(columns=["protocol", "partition", "agents.0.learner.c"])
    ((labels, (line,)),) = scores_by_seed(sweep, frame)
    assert (labels, line.label) == ({}, "akd")
    assert line.scores["accuracy"] == pytest.approx({"0": 0.60, "1": 0.62, "2": 0.70})


# --- settings that not every protocol has ---------------------------------------------------------

MIXED = """
seed = 0
[data]
name = "wine"
[[agents]]
learner = "decision_tree"
count = 2
[protocol]
name = "ekd"
rounds = 1
half = false
[evaluation]
alone = false
[runtime]
kind = "simulation"
[sweep]
seed = [0, 1]
protocol = [{ name = "ekd" }, { name = "avgkd" }]
"protocol.own_weight" = [0.2, 0.8]
[compare]
gain_over = "ekd"
"""


@pytest.mark.usefixtures("no_report")
def test_a_field_that_a_protocol_does_not_have_is_left_out_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = tmp_path / "mixed.toml", tmp_path / "out"
    recipe.write_text(MIXED)
    sweep = read_sweep(recipe)
    assert [tuple(labels.values()) for labels, _ in sweep.runs] == [
        ("0", "ekd", "-"), ("0", "avgkd", "0.2"), ("0", "avgkd", "0.8"),
        ("1", "ekd", "-"), ("1", "avgkd", "0.2"), ("1", "avgkd", "0.8"),
    ]  # fmt: skip
    assert not sweep.runs[0][1].protocol.half
    assert main(["sweep", str(recipe), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "note: protocol.own_weight is left out for ekd, which has no such setting" in said
    assert "note: protocol.half is left out for avgkd, which has no such setting" in said
    assert "seed=0, protocol=avgkd, own_weight=0.2: accuracy" in said
    # The run without the field is compared with all values of it.
    for title in ("own_weight=0.2", "own_weight=0.8"):
        assert f"{title}: costs" in said
    costs = pd.read_csv(out / "costs.csv")
    assert len(costs) == 4
    assert costs["gain"].notna().all()
    for name in ("sweep.tex", "costs.tex"):
        text = (out / name).read_text()
        assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
        assert r"own\_weight=0.2" in text
        assert r"$\pm$" in text
    for name in ("sweep", "costs"):
        assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_a_field_that_no_protocol_has_is_a_mistake(tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.toml"
    recipe.write_text(MIXED.replace("own_weight", "own_wait"))
    with pytest.raises(RecipeError, match="own_wait"):
        read_sweep(recipe)
