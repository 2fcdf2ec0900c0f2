"""Means, intervals and tests over seeds, derived from their formulas; of sweeps and of runs in folders."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student
from scipy.stats import ttest_rel

from codistill.cli import main
from codistill.core.errors import RecipeError
from codistill.report.pages import write_comparison
from codistill.results.scores import ACCURACY, as_score
from codistill.results.seeds import Estimate, Line, lines_of, over_seeds_table, paired_p, seeds_table
from codistill.results.summary import Summary
from codistill.results.tables import plain_text

OURS, THEIRS = [0.80, 0.83, 0.84, 0.81], [0.78, 0.80, 0.83, 0.77]


def test_an_interval_is_the_mean_and_t_standard_errors() -> None:
    found = Estimate.of(OURS)
    assert found is not None
    n, mean = 4, sum(OURS) / 4
    spread = math.sqrt(sum((x - mean) ** 2 for x in OURS) / (n - 1))
    half = student.ppf(0.975, n - 1) * spread / math.sqrt(n)
    assert (found.n, found.mean, found.spread) == (4, pytest.approx(mean), pytest.approx(spread))
    assert (found.low, found.high) == (pytest.approx(mean - half), pytest.approx(mean + half))
    # The quantile itself, by the definition: of the area under the density 2.5 % are on each side.
    assert student.cdf(-student.ppf(0.975, 3), 3) == pytest.approx(0.025)
    assert Estimate.of([0.5]) == Estimate(1, 0.5)
    assert Estimate.of([]) is None


def test_the_test_is_paired_and_two_sided() -> None:
    differences = [a - b for a, b in zip(OURS, THEIRS, strict=True)]
    mean = sum(differences) / 4
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / 3)
    by_hand = 2 * student.sf(abs(mean) * math.sqrt(4) / spread, 3)
    assert paired_p(differences) == pytest.approx(by_hand)
    assert paired_p([-d for d in differences]) == pytest.approx(by_hand)
    assert paired_p(differences) == pytest.approx(ttest_rel(OURS, THEIRS).pvalue)


@pytest.mark.parametrize("differences", [[], [0.1], [0.1, 0.3], [0.0] * 3, [0.3 - 0.2, 0.2 - 0.1, 0.1]])
def test_without_three_unequal_differences_there_is_no_p_value(differences: list[float]) -> None:
    """The last three differ by rounding alone, and a t of 10^16 would be made of it."""
    assert paired_p(differences) is None


def line(label: str, *values: float, score: str = "accuracy", first: int = 0) -> Line:
    return Line(label, {score: {str(first + seed): value for seed, value in enumerate(values)}})


def cells(text: str, label: str) -> list[str]:
    row = next(each for each in text.splitlines() if each.startswith(f"│ {label} "))
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_the_table_says_mean_spread_interval_and_test() -> None:
    table = seeds_table([({}, [line("ours", *OURS), line("theirs", *THEIRS)])], [ACCURACY], "theirs", what="protocol")
    text = plain_text([table], 160)
    found, gain = Estimate.of(OURS), Estimate.of([a - b for a, b in zip(OURS, THEIRS, strict=True)])
    assert found is not None
    assert gain is not None
    p = ttest_rel(OURS, THEIRS).pvalue
    assert cells(text, "ours") == [
        "ours", "4", f"82.0 ± {100 * found.spread:.1f} %", f"{100 * found.low:.1f} to {100 * found.high:.1f} %",
        f"+2.5 ± {100 * gain.spread:.1f}", f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f}", f"{p:.3f}", "4",
    ]  # fmt: skip
    assert cells(text, "theirs")[4:] == ["-", "-", "-", "-"]
    said = " ".join(text.split())
    assert "Student's t with n - 1 degrees of freedom" in said
    assert "two-sided paired t-test, not corrected for several comparisons" in said
    kept = pd.read_csv(io.StringIO(table.csv())).set_index("protocol").loc["ours"]
    expected = {
        "n": 4, "mean": found.mean, "mean, s": found.spread, "mean, 95 % low": found.low, "mean, 95 % high": found.high,
        "gain": gain.mean, "gain, s": gain.spread, "gain, 95 % low": gain.low, "gain, 95 % high": gain.high, "p": p,
        "pairs": 4,
    }  # fmt: skip
    assert kept.to_dict() == pytest.approx(expected)
    assert r"82.0 $\pm$" in table.latex()


def test_only_runs_of_the_same_seed_are_paired_and_why_there_is_no_test_is_said() -> None:
    """'late' has the seeds 2 to 5, of which 'ours' has two; 'same' is ours with 1 point more in every seed."""
    lines = [line("ours", *OURS), line("late", *THEIRS, first=2), line("same", *(x + 0.01 for x in OURS))]
    text = plain_text([seeds_table([({}, lines)], [ACCURACY], "ours", what="protocol")], 160)
    both = [THEIRS[0] - OURS[2], THEIRS[1] - OURS[3]]  # seeds 2 and 3
    assert cells(text, "late")[4].startswith(f"{100 * sum(both) / 2:+.1f} ±")
    assert cells(text, "late")[6:] == ["-", "2"]
    assert cells(text, "same")[6:] == ["-", "4"]
    assert "3 pairs with unequal differences are needed: late (pairs: 2); same (all differences are equal)" in " ".join(
        text.split()
    )


def test_a_lower_error_is_a_gain_and_one_seed_has_no_interval() -> None:
    rmse = as_score("rmse")
    lines = [line("ours", 0.50, score="rmse"), line("theirs", 0.75, score="rmse")]
    text = plain_text([seeds_table([({}, lines)], [rmse], "theirs", what="protocol")], 160)
    assert cells(text, "ours") == ["ours", "1", "0.5", "-", "+0.25", "-", "-", "1"]
    assert "one seed has neither s nor an interval" in text
    assert "lower is better: RMSE" in " ".join(text.split())


def test_every_score_has_a_row() -> None:
    both = Line("ours", {"accuracy": {"0": 0.8, "1": 0.9}, "log_loss": {"0": 0.5, "1": 0.25}})
    table = seeds_table([({"alpha": "0.1"}, [both])], [ACCURACY, as_score("log_loss")], None, what="protocol")
    assert list(table.headings[:4]) == ["alpha", "protocol", "score", "n"]
    assert [row[:3] for row in table.rows] == [["0.1", "ours", "accuracy"], ["0.1", "ours", "log loss"]]
    assert "lower is better: log loss" in table.notes


# --- runs in folders ------------------------------------------------------------------------------------

RECIPE = """seed = {seed}
[data]
name = "{data}"
[[agents]]
learner = "mlp"
[protocol]
name = "{protocol}"
local_epochs = {epochs}
[runtime]
kind = "{runtime}"
"""


def summary(
    value: float, seed: int, protocol: str = "fedmd", title: str = "", done: int = 1, **changes: object
) -> Summary:
    recipe = RECIPE.format(
        seed=seed, protocol=protocol, **{"epochs": 1, "data": "digits", "runtime": "simulation"} | changes
    )
    row = {"round": done, "agent": "a", "present": True, "sent": 0, "received": 0, "accuracy": value, "test_samples": 9}
    facts = {"recipe": recipe, "seed": seed}
    title = title or f"{protocol}-{seed}"
    return Summary(title, protocol, {"a": "mlp"}, [row], None, None, ("0", "1"), 1.0, 9, facts=facts)


def runs(protocol: str, values: list[float], **changes: object) -> list[Summary]:
    return [summary(value, seed, protocol, **changes) for seed, value in enumerate(values)]  # type: ignore[arg-type]


def test_runs_that_differ_in_their_seeds_are_one_line() -> None:
    lines, notes = lines_of([*runs("fedmd", OURS), *runs("fd", THEIRS)])
    assert {each.label: each.scores["accuracy"] for each in lines} == {
        "fedmd": dict(enumerate(OURS)),
        "fd": dict(enumerate(THEIRS)),
    }
    assert notes == []


def test_lines_of_one_protocol_are_called_by_what_differs() -> None:
    several = [*runs("fedmd", OURS), *runs("fedmd", THEIRS, epochs=5), *runs("fd", THEIRS, epochs=5)]
    assert [each.label for each in lines_of(several)[0]] == ["fedmd, local_epochs=1", "fedmd, local_epochs=5", "fd"]
    where = [summary(0.5, 0), summary(0.5, 1, runtime="processes")]  # gives the same results
    assert [len(each.seeds) for each in lines_of(where)[0]] == [2]
    bare = [Summary(t, "fd", {"a": "mlp"}, [], None, None, ("0", "1"), 1.0, 9) for t in ("one", "two")]
    assert [each.label for each in lines_of(bare)[0]] == [
        "fd (one)",
        "fd (two)",
    ]  # nothing says what they have in common


def test_a_run_twice_is_one_seed() -> None:
    lines, notes = lines_of([summary(0.5, 0), summary(0.5, 0, title="copy"), summary(0.7, 0, title="other")])
    assert [(each.label, dict(each.scores["accuracy"])) for each in lines] == [
        ("fedmd (fedmd-0)", {0: 0.5}), ("fedmd (other)", {0: 0.7}),
    ]  # fmt: skip
    assert notes == [
        "fedmd-0, copy: the same settings, seed and scores, counted once",
        "fedmd-0, other: other scores with the same settings and seed, not averaged",
    ]


def test_runs_that_ended_at_different_rounds_are_noted() -> None:
    assert lines_of([summary(0.5, 0), summary(0.6, 1, done=3)])[1] == ["fedmd: scores of different rounds (1, 3)"]


def test_a_line_may_be_named_by_one_of_its_runs() -> None:
    several = [*runs("fedmd", OURS), *runs("fd", THEIRS)]
    by_label, by_run = (over_seeds_table(several, name) for name in ("fd", "fd-2"))
    assert by_label == by_run
    assert by_label is not None
    assert by_label.headings[4] == "gain over\nfd"
    with pytest.raises(
        RecipeError, match=r"must name one of the lines, or a run of it. Found: 'fdd'. Did you mean 'fd'"
    ):
        over_seeds_table(several, "fdd")
    assert over_seeds_table(runs("fedmd", OURS[:1])) is None  # nothing to add


@pytest.mark.usefixtures("no_charts")
def test_a_comparison_page_has_the_table(tmp_path: Path) -> None:
    several = [*runs("fedmd", OURS), *runs("fd", THEIRS)]
    page = write_comparison(several, tmp_path / "page.html", over_seeds_table(several, "fd")).read_text("utf-8")
    part = page[page.index("<h2>Means over seeds: accuracy</h2>") : page.index("<h2>All runs</h2>")]
    assert "82.0 ± 1.8 %" in part
    assert 'data-by="0.82' in part


TRIAL = """
[data]
name = "wine"
[[agents]]
learner = "naive_bayes"
count = 2
[protocol]
name = "alone"
rounds = 1
[evaluation]
alone = false
scores = ["accuracy", "log_loss"]
[runtime]
kind = "simulation"
"""


@pytest.mark.usefixtures("no_report")
def test_compare_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trial.toml").write_text(TRIAL)
    folders = []
    for name in ("alone", "centralised"):
        for seed in range(3):
            folders.append(str(tmp_path / f"{name}-{seed}"))
            changes = ["--set", f"seed={seed}", "--set", f"protocol.name={name}", "--quiet", "--out", folders[-1]]
            assert main(["run", str(tmp_path / "trial.toml"), *changes]) == 0
    scores = {f: pd.read_json(Path(f) / "metrics.jsonl", lines=True)[["accuracy", "log_loss"]].mean() for f in folders}
    capsys.readouterr()
    out = tmp_path / "table.csv"
    assert main(["compare", *folders, "--gain-over", "alone", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"table: {tmp_path / 'table-seeds.csv'}" in said
    kept = pd.read_csv(tmp_path / "table-seeds.csv").set_index(["runs", "score"])
    for score, column, sign in (("accuracy", "accuracy", 1), ("log loss", "log_loss", -1)):
        alone, central = (np.array([scores[f][column] for f in folders[at : at + 3]]) for at in (0, 3))
        row = kept.loc[("centralised", score)]
        assert row["mean"] == pytest.approx(central.mean())
        assert row["gain"] == pytest.approx(sign * (central - alone).mean())
        assert row["p"] == pytest.approx(ttest_rel(central, alone).pvalue)
        assert row["pairs"] == 3
    assert main(["compare", *folders, "--gain-over", "fedmd"]) == 2
    assert "--gain-over must name one of the lines" in capsys.readouterr().err
