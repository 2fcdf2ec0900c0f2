"""What a sweep's accuracy costs; all figures of small frames are worked out by hand."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich.console import Console

from codistill.cli import main
from codistill.core.errors import RecipeError
from codistill.experiments.sweep import Compare, Sweep, read_sweep
from codistill.experiments.sweep_results import (
    along_costs,
    compared_costs,
    costs,
    has_costs,
    means,
    measured,
    on_compared_data,
)
from codistill.experiments.sweep_view import (
    cost_tables,
    draw_costs,
    draw_measures,
    draw_scores,
    score_tables,
    show_costs,
)

RECIPE = """
[data]
name = "digits"
samples = 120
test_samples = 40
public = 0.3
[[agents]]
learner = { kind = "logistic", optimiser = "sgd", lr = 0.1 }
count = 3
[protocol]
name = "silo_sgd"
topology = "ring"
local_steps = 2
rounds = 3
[evaluation]
alone = false
every = 2
[runtime]
kind = "simulation"
[sweep]
protocol = [
    { name = "d_distillation", warm_up = 1, label = "Talk" },
    { name = "d_sgd", label = "Shout" },
    { name = "silo_sgd", label = "Silo" },
]
seed = [0, 1]
"""
PANELS = """
[sweep.partition]
even = { kind = "iid" }
skewed = { kind = "classes", k = 3 }
"""
COMPARE = """
[compare]
target = 0.8
gain_over = "Silo"
bytes_against = "Shout"
"""
# Scores of the agents x and y by line, seed and evaluated round; what all send per round; round 1 is not evaluated.
# Mean:                     round 2       round 3        last
SCORES = {
    ("Talk", "0"): {2: (0.70, 0.80), 3: (0.80, 0.90)},  # 0.85, lowest 0.80, target in round 3
    ("Talk", "1"): {2: (0.80, 0.80), 3: (0.90, 0.90)},  # 0.90, lowest 0.90, target in round 2
    ("Shout", "0"): {2: (0.60, 0.60), 3: (0.70, 0.74)},  # 0.72, lowest 0.70, target never
    ("Shout", "1"): {2: (0.60, 0.60), 3: (0.90, 0.90)},  # 0.90, lowest 0.90, target in round 3
    ("Silo", "0"): {2: (0.50, 0.50), 3: (0.60, 0.70)},  # 0.65, lowest 0.60, target never
    ("Silo", "1"): {2: (0.50, 0.50), 3: (0.75, 0.75)},  # 0.75, lowest 0.75, target never
}
SENT = {("Talk", "0"): 60, ("Talk", "1"): 120, ("Shout", "0"): 600, ("Shout", "1"): 800}
STEPS = {"Talk": (10, 20, 30), "Shout": (40, 40, 40), "Silo": (5, 5, 5)}  # of x, y and z, in every round
EXCHANGES = {"Talk": 2, "Shout": 1, "Silo": 0}  # of each, in every round


def frame_of(metric: str = "accuracy", **fixed: str) -> pd.DataFrame:
    """Rows of x and y, which send a quarter each, and of a Byzantine agent z, which sends the other half.

    In round 1 z is dropped before its end: what it has sent counts, but it does not say what it has done.
    """
    rows = []
    for (line, seed), scores in SCORES.items():
        for t in (3, 1, 2):  # the order of rows does not matter
            sent = SENT.get((line, seed), 0)
            for place, (agent, share) in enumerate({"x": 4, "y": 4, "z": 2}.items()):
                row = {"protocol": line, "seed": seed, **fixed, "round": t, "agent": agent, "sent": sent // share}
                done = not (agent == "z" and t == 1)
                row |= {"present": done, "steps": STEPS[line][place] * done, "exchanges": EXCHANGES[line] * done}
                if t in scores:
                    row[metric] = (*scores[t], 0.01)[place]
                rows.append({**row, "lies": True} if agent == "z" else row)
    return pd.DataFrame(rows)


@pytest.fixture
def made(tmp_path: Path):
    def make(text: str = RECIPE + COMPARE, *overrides: str, quick: bool = False) -> Sweep:
        (tmp_path / "sweep.toml").write_text(text)
        return read_sweep(tmp_path / "sweep.toml", overrides, quick=quick)

    return make


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    figures: list[Figure] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, **options: options["format"] == "png" and figures.append(self)
    )
    return figures


def text_of(*shown) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for table in shown:
        console.print(table)
    return console.export_text()


def cells(text: str, label: str) -> list[str]:
    row = next(line for line in text.splitlines() if line.startswith(f"│ {label} "))
    return [cell.strip() for cell in row.strip("│").split("│")]


# --- figures ----------------------------------------------------------------------------------------


def test_the_figures_are_those_worked_out_by_hand(made) -> None:
    found = costs(made(), frame_of()).set_index("protocol")
    expected = {
        "seeds": {"Talk": 2, "Shout": 2, "Silo": 2},
        "accuracy": {"Talk": 0.875, "Shout": 0.81, "Silo": 0.70},
        # of two values at a distance d: d / sqrt(2), the deviations being divided by n - 1
        "accuracy_spread": {"Talk": 0.05 / 2**0.5, "Shout": 0.18 / 2**0.5, "Silo": 0.1 / 2**0.5},
        "worst_agent": {"Talk": 0.85, "Shout": 0.80, "Silo": 0.675},
        # 3 rounds, the Byzantine agent's bytes among them: (180 + 360) / 2 and (1800 + 2400) / 2
        "bytes": {"Talk": 270, "Shout": 2100, "Silo": 0},
        # Talk: 15 in round 1, the mean of x and y, and twice 20, the mean of all three
        "steps": {"Talk": 55, "Shout": 120, "Silo": 15},
        "exchanges": {"Talk": 6, "Shout": 3, "Silo": 0},
        # by seed: 0.85 - 0.65 and 0.90 - 0.75; 0.72 - 0.65 and 0.90 - 0.75
        "gain": {"Talk": 0.175, "Shout": 0.11, "Silo": 0},
        "gain_spread": {"Talk": 0.05 / 2**0.5, "Shout": 0.08 / 2**0.5, "Silo": 0},
        # Talk: 3 rounds of 60 and 2 rounds of 120, the round that was not evaluated among them
        "bytes_to_target": {"Talk": 210, "Shout": 2400, "Silo": np.nan},
        "rounds_to_target": {"Talk": 2.5, "Shout": 3, "Silo": np.nan},
        # Talk: after round 3 of seed 0 and round 2 of seed 1: 55 and 35, 6 and 4
        "steps_to_target": {"Talk": 45, "Shout": 120, "Silo": np.nan},
        "exchanges_to_target": {"Talk": 5, "Shout": 3, "Silo": np.nan},
        "bytes_to_target_spread": {"Talk": 60 / 2**0.5, "Shout": np.nan, "Silo": np.nan},
        "rounds_to_target_spread": {"Talk": 1 / 2**0.5, "Shout": np.nan, "Silo": np.nan},
        "steps_to_target_spread": {"Talk": 20 / 2**0.5, "Shout": np.nan, "Silo": np.nan},
        "exchanges_to_target_spread": {"Talk": 2 / 2**0.5, "Shout": np.nan, "Silo": np.nan},
        "seeds_at_target": {"Talk": 2, "Shout": 1, "Silo": 0},
        "seeds_compared": {"Talk": 1, "Shout": 1, "Silo": 0},
        # by seed: 1800 / 180 and 2400 / 360; to the target 2400 / 240, in the one seed in which both reach it
        "fewer_bytes": {"Talk": (10 + 20 / 3) / 2, "Shout": 1, "Silo": np.nan},
        "fewer_bytes_spread": {"Talk": (10 - 20 / 3) / 2**0.5, "Shout": 0, "Silo": np.nan},
        "fewer_bytes_to_target": {"Talk": 10, "Shout": 1, "Silo": np.nan},
        "fewer_bytes_to_target_spread": {"Talk": np.nan, "Shout": np.nan, "Silo": np.nan},
    }
    assert set(found.columns) == set(expected)
    for figure, by_line in expected.items():
        assert found[figure].to_dict() == pytest.approx(by_line, nan_ok=True), figure


def test_all_costs_up_to_the_target_are_compared_seed_by_seed(made) -> None:
    """Both reach the target in seed 1: Talk in round 2, Shout in round 3. Talk needs more exchanges."""
    sweep = made(RECIPE + COMPARE.replace("bytes_against", "fewer_against"))
    found = costs(sweep, frame_of()).set_index("protocol")
    expected = {"rounds": 3 / 2, "steps": 120 / 35, "exchanges": 3 / 4, "bytes": 2400 / 240}
    for name, factor in expected.items():
        assert found[f"fewer_{name}_to_target"]["Talk"] == pytest.approx(factor), name
        assert found[f"fewer_{name}_to_target"]["Shout"] == 1
    # Were the target 0.7, both would reach it in both seeds: Talk in round 2, Shout in round 3.
    easier = made(RECIPE + COMPARE.replace("bytes_against", "fewer_against").replace("0.8", "0.7"))
    found = costs(easier, frame_of()).set_index("protocol")
    assert found["seeds_compared"].to_dict() == {"Talk": 2, "Shout": 2, "Silo": 1}
    assert found["fewer_bytes_to_target"]["Talk"] == pytest.approx((1800 / 120 + 2400 / 240) / 2)
    assert found["fewer_bytes_to_target_spread"]["Talk"] == pytest.approx(5 / 2**0.5)
    assert found["fewer_steps_to_target_spread"]["Talk"] == pytest.approx(0)
    assert compared_costs(Compare(fewer_against="Shout")) == ["bytes"]


def test_runs_of_an_older_version_have_not_counted_steps(made) -> None:
    frame = frame_of()
    frame.loc[frame["protocol"] == "Shout", ["steps", "exchanges"]] = np.nan
    found = costs(made(), frame).set_index("protocol")
    assert found["steps"].to_dict() == pytest.approx({"Talk": 55, "Shout": np.nan, "Silo": 15}, nan_ok=True)
    assert found["steps_to_target"].to_dict() == pytest.approx(
        {"Talk": 45, "Shout": np.nan, "Silo": np.nan}, nan_ok=True
    )
    sweep = made()
    without = frame.drop(columns=["steps", "exchanges"])
    table = text_of(*cost_tables(sweep, costs(sweep, without)))
    assert cells(table, "Talk")[5:8] == ["-", "-", "270 B"]


def test_a_round_in_which_nobody_takes_part_costs_no_steps(made) -> None:
    """Of the rounds 1, 2 and 3 of Silo, 5 steps each, the second is missed by all."""
    frame = frame_of()
    missed = (frame["protocol"] == "Silo") & (frame["round"] == 2)
    frame.loc[missed, ["present", "steps", "exchanges"]] = [False, 0, 0]
    assert costs(made(), frame).set_index("protocol")["steps"]["Silo"] == 10
    along = along_costs(made(), frame)
    assert along[along["protocol"] == "Silo"].set_index("round")["steps"].to_dict() == {2: 5, 3: 10}


def test_runs_are_paired_within_their_panel(made) -> None:
    """In the panel 'skewed' Talk is the only line that could be run: nothing to compare it with."""
    even, skewed = frame_of(partition="even"), frame_of(partition="skewed")
    frame = pd.concat([even, skewed[skewed["protocol"] == "Talk"].assign(sent=1)])
    found = costs(made(RECIPE + PANELS + COMPARE), frame).set_index(["partition", "protocol"])
    assert found["gain"].to_dict() == pytest.approx(
        {("even", "Talk"): 0.175, ("even", "Shout"): 0.11, ("even", "Silo"): 0, ("skewed", "Talk"): np.nan},
        nan_ok=True,
    )
    assert found.loc[("skewed", "Talk"), "bytes"] == 9
    assert np.isnan(found.loc[("skewed", "Talk"), "fewer_bytes"])


def test_what_a_hub_sends_is_counted_where_there_is_one(made) -> None:
    """Talk goes through a hub, which sends 7 bytes to each of three agents in each of three rounds: 63 more."""
    plain, frame = costs(made(), frame_of()).set_index("protocol"), frame_of()
    frame["from_hub"] = np.where(frame["protocol"] == "Talk", 7.0, np.nan)
    found = costs(made(), frame).set_index("protocol")
    assert (found["bytes"] - plain["bytes"]).to_dict() == {"Talk": 63, "Shout": 0, "Silo": 0}


def test_only_what_is_asked_for_is_told(made) -> None:
    sweep = made(RECIPE)
    assert set(costs(sweep, frame_of()).columns) == {
        "protocol", "seeds", "accuracy", "accuracy_spread", "worst_agent", "exchanges", "steps", "bytes",
    }  # fmt: skip
    silent = frame_of().assign(sent=0)
    assert has_costs(sweep, frame_of())
    assert not has_costs(sweep, silent)
    assert has_costs(made(), silent)


def test_an_error_is_to_be_at_most_the_target_and_its_worst_agent_is_the_highest(made) -> None:
    found = costs(made(RECIPE + COMPARE.replace("0.8", "0.7")), frame_of("rmse")).set_index("protocol")
    assert found["rounds_to_target"].to_dict() == pytest.approx({"Talk": np.nan, "Shout": 2, "Silo": 2}, nan_ok=True)
    assert found["worst_agent"].to_dict() == pytest.approx({"Talk": 0.9, "Shout": 0.82, "Silo": 0.725})
    assert found["rmse"]["Talk"] == pytest.approx(0.875)
    assert found["gain"]["Talk"] == pytest.approx(0.7 - 0.875)  # a larger error than Silo's is a loss


def test_seeds_are_the_lines_of_a_sweep_over_seeds_alone(made) -> None:
    start = RECIPE.index("protocol = [")
    sweep = made(RECIPE[:start] + "seed = [0, 1]\n[compare]\ngain_over = '0'\n")
    frame = frame_of()
    talk = frame[frame["protocol"] == "Talk"].drop(columns="protocol")
    found = costs(sweep, talk).set_index("seed")
    assert found["gain"].to_dict() == pytest.approx({"0": 0, "1": 0.05})
    assert found["bytes"].to_dict() == {"0": 180, "1": 360}
    shown = text_of(*score_tables(sweep, means(sweep, talk)))
    assert cells(shown, "1") == ["1", "80.0", "90.0"]


def test_scores_of_agents_that_took_part_are_compared_where_asked_for(made) -> None:
    """In the last round of seed 0 Talk's agents have 0.80 and 0.90; where only y took part, 0.90 is what counts."""
    frame = frame_of().assign(present=True)
    absent = (frame["protocol"] == "Talk") & (frame["seed"] == "0") & (frame["round"] == 3) & (frame["agent"] == "x")
    frame.loc[absent, "present"] = False
    for text, mean in ((RECIPE, 0.875), (RECIPE + "[compare]\npresent = true\n", 0.90)):
        sweep = made(text)
        found = costs(sweep, on_compared_data(sweep, frame)).set_index("protocol")
        assert found["accuracy"]["Talk"] == pytest.approx(mean)
        assert found["bytes"]["Talk"] == 270  # of all agents, as before
    (table, *_) = score_tables(sweep, means(sweep, on_compared_data(sweep, frame)))
    assert "of the agents that took part" in text_of(table)


# --- tables -----------------------------------------------------------------------------------------


def test_the_table_says_it_in_words(made) -> None:
    sweep = made()
    text = text_of(*cost_tables(sweep, costs(sweep, frame_of())))
    assert "all: costs" in text
    assert "of the honest agents" in text
    assert "sample standard deviation over n seeds" in " ".join(text.split())
    assert "sample standard deviation over these seeds" in " ".join(text.split())
    heading = [part for line in text.splitlines() if line.startswith("┃") for part in line.split()]
    assert {"gain", "Silo", "worst", "fewer", "exchanges", "steps"} <= set(heading)
    assert cells(text, "Talk") == [
        "Talk", "2", "87.5 ± 3.5", "+17.50 ± 3.54", "85.0", "6", "55", "270 B", "8.3 x",
    ]  # fmt: skip
    assert cells(text, "Shout") == [
        "Shout", "2", "81.0 ± 12.7", "+11.00 ± 5.66", "80.0", "3", "120", "2.1 kB", "1 x",
    ]  # fmt: skip
    assert cells(text, "Silo") == ["Silo", "2", "70.0 ± 7.1", "-", "67.5", "0", "15", "0 B", "-"]
    target = text[text.index("all: costs to reach 80 %") : text.index("all: fewer than Shout")]
    assert cells(target, "Talk") == ["Talk", "2 of 2", "2.5 ± 0.7", "5 ± 1.4", "45 ± 14.1", "210 B ± 42 B"]
    assert cells(target, "Shout") == ["Shout", "1 of 2", "3", "3", "120", "2.4 kB"]
    assert cells(target, "Silo") == ["Silo", "0 of 2", "-", "-", "-", "-"]
    factors = text[text.index("all: fewer than Shout") :]
    assert cells(factors, "Talk") == ["Talk", "1 of 2", "10 x"]
    assert cells(factors, "Silo") == ["Silo", "0 of 2", "-"]


def test_the_tables_of_all_factors_fit_a_terminal(made) -> None:
    sweep = made(RECIPE + COMPARE.replace("bytes_against", "fewer_against").replace("0.8", "0.7"))
    frame = frame_of()
    frame[["sent", "steps"]] *= 1_234_567
    shown = list(cost_tables(sweep, costs(sweep, frame)))
    text = text_of(*shown)
    assert max(map(len, text.splitlines())) <= 120
    factors = text[text.index("all: fewer than Shout to reach 70 %") :]
    # by seed: rounds 3 / 2; exchanges 3 / 4; steps 120 / 35; bytes 1800 / 120 and 2400 / 240
    assert cells(factors, "Talk") == ["Talk", "2 of 2", "1.5 ± 0 x", "0.75 ± 0 x", "3.4 ± 0 x", "12 ± 3.5 x"]


def test_one_seed_has_no_spread_and_an_error_is_no_percentage(made) -> None:
    sweep = made(RECIPE.replace("seed = [0, 1]\n", "") + COMPARE)
    frame = frame_of("rmse")
    frame = frame[frame["seed"] == "0"].drop(columns="seed")
    text = text_of(*cost_tables(sweep, costs(sweep, frame)))
    assert "%" not in text
    assert "RMSE" in text
    assert cells(text, "Shout") == [
        "Shout", "0.7200", "-0.0700", "0.7400", "3", "120", "1.8 kB", "1 x",
    ]  # fmt: skip
    assert cells(text[text.index("costs to reach") :], "Shout") == ["Shout", "1 of 1", "2", "2", "80", "1.2 kB"]


def test_nobody_honest_is_no_figure(made, tmp_path: Path) -> None:
    sweep, frame = made(), frame_of().assign(lies=True)
    text = text_of(*cost_tables(sweep, costs(sweep, frame)))
    assert cells(text, "Talk")[1:8] == ["2", "-", "-", "-", "6", "55", "270 B"]
    show_costs(sweep, frame, tmp_path, Console(quiet=True))
    assert (tmp_path / "costs.png").exists()


# --- pictures ---------------------------------------------------------------------------------------


def test_accuracy_is_drawn_against_each_cost(made, drawn: list[Figure], tmp_path: Path) -> None:
    sweep, frame = made(), frame_of()
    draw_costs(sweep, along_costs(sweep, frame), tmp_path / "costs.png")
    # After the evaluated rounds 2 and 3, means over seeds as above; Silo takes steps, and exchanges nothing.
    expected = {"rounds": (2, 3), "exchanges": (4, 6), "steps": (35, 55), "bytes": (180, 270)}
    assert len(drawn[0].axes) == 4
    for axes, (cost, values) in zip(drawn[0].axes, expected.items(), strict=True):
        assert cost.removesuffix("s") in axes.get_xlabel()
        lines = {line.get_label(): line for line in axes.lines}
        assert lines["protocol=Talk"].get_xydata() == pytest.approx(np.array([[values[0], 0.775], [values[1], 0.875]]))
        assert (lines["protocol=Silo"].get_linestyle() == "--") == (cost in ("exchanges", "bytes"))
        assert axes.get_xscale() == ("log" if cost == "bytes" else "linear")
        assert set(lines["target: 80 %"].get_ydata()) == {0.8}
    without = frame.drop(columns=["steps", "exchanges"])
    draw_costs(sweep, along_costs(sweep, without), tmp_path / "costs.png")
    assert [axes.get_xlabel() for axes in drawn[1].axes] == ["rounds", "bytes sent so far, all together"]


def test_accuracy_is_drawn_against_bytes(made, drawn: list[Figure], tmp_path: Path) -> None:
    sweep, frame = made(), frame_of()
    frame.loc[(frame["protocol"] == "Shout") & (frame["round"] < 3), "sent"] = 0
    draw_costs(sweep, along_costs(sweep, frame), tmp_path / "costs.png")
    axes = drawn[0].axes[-1]
    lines = {line.get_label(): line for line in axes.lines}
    # Talk: 2 rounds of 60 and of 120 on average, then 3; Shout: nothing before the last round
    assert lines["protocol=Talk"].get_xydata() == pytest.approx(np.array([[180, 0.775], [270, 0.875]]))
    assert lines["protocol=Shout"].get_xydata() == pytest.approx(np.array([[700, 0.81]]))
    silo = lines["protocol=Silo"]
    assert (silo.get_linestyle(), set(silo.get_ydata())) == ("--", {0.7})
    assert (lines["target: 80 %"].get_linestyle(), set(lines["target: 80 %"].get_ydata())) == (":", {0.8})
    assert axes.get_xscale() == "log"
    assert axes.xaxis.get_major_formatter()(2e6) == "2 MB"
    assert isinstance(axes.xaxis.get_minor_formatter(), NullFormatter)


@pytest.mark.parametrize("span", [1.2, 15, 100, 1e7])
def test_labels_of_bytes_have_room(made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, span: float) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **o: (figures.append(self), save(self, *a, **o)))
    sweep, frame = made(RECIPE + PANELS), pd.concat([frame_of(partition=name) for name in ("even", "skewed")])
    frame["sent"] = frame["round"].map({1: 0, 2: 40_000, 3: 40_000 * (span - 1)})
    draw_costs(sweep, along_costs(sweep, frame), tmp_path / "costs.png")
    axes = figures[0].axes[-1]
    low, high = axes.get_xlim()
    labels = [tick.label1.get_window_extent() for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert len(labels) >= 2
    assert all(one.x1 + 2 < other.x0 for one, other in pairwise(labels))


def test_the_axis_says_what_is_measured_on(made, drawn: list[Figure], tmp_path: Path) -> None:
    for overrides in ([], ["data.validation=0.2"], ['sweep."data.validation"=[0.0, 0.2]']):
        sweep = made(RECIPE, *overrides)
        frame = frame_of(**({"data.validation": "0.0"} if "sweep" in str(overrides) else {}))
        draw_scores(sweep, means(sweep, frame), tmp_path / "sweep.png")
    assert [figure.axes[0].get_ylabel() for figure in drawn] == [
        "accuracy, common test set", "accuracy, validation set", "accuracy, common test or validation set",
    ]  # fmt: skip


# --- recipes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"Silo"', '"Sillo"', r"compare.gain_over must be one of the values of sweep.protocol.*'Sillo'.*mean 'Silo'"),
        ('"Shout"', '"d_sgd"', r"compare.bytes_against must be one of .*'d_sgd'. Known: Shout, Silo, Talk"),
        ("0.8", "0.0", "compare.target must be above 0"),
        ("0.8", "1.5", "compare.target must be at most 1"),
        ("bytes_against", 'fewer_against = "Talk"\nbytes_against', "may have one of fewer_against and bytes_against"),
        ("target", "tarrget", r"Unknown option 'tarrget' for \[compare\].*mean 'target'"),
    ],
)
def test_a_wrong_comparison_is_told_before_anything_runs(made, before: str, after: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        made(RECIPE + COMPARE.replace(before, after))


def test_a_comparison_is_a_table(made) -> None:
    with pytest.raises(RecipeError, match=r"'compare' must be a \[compare\] table"):
        made("compare = 0.9\n" + RECIPE)


def test_the_quick_form_and_a_person_may_change_the_comparison(made) -> None:
    text = RECIPE + COMPARE + '[quick]\n"compare.target" = 0.3\n'
    assert made(text).compare == Compare(target=0.8, gain_over="Silo", bytes_against="Shout")
    assert made(text, quick=True).compare.target == 0.3
    assert made(text, "compare.target=0.4", quick=True).compare.target == 0.4
    assert made(RECIPE).compare == Compare()


def test_a_single_run_has_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE + COMPARE)
    assert main(["run", str(path)]) == 2
    assert "codistill sweep" in capsys.readouterr().err
    path.write_text(RECIPE[: RECIPE.index("[sweep]")] + COMPARE)
    assert main(["run", str(path)]) == 2
    assert "Unknown table 'compare'" in capsys.readouterr().err


# --- all of it --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("no_report")
def test_a_sweep_tells_its_costs(made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep, out = made(RECIPE + COMPARE.replace("0.8", "0.999")), tmp_path / "out"
    assert main(["sweep", str(tmp_path / "sweep.toml"), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert cells(said[said.index("all: costs to reach 99.9 %") :], "Talk")[1:] == ["0 of 2", "-", "-", "-", "-"]
    found = pd.read_csv(out / "costs.csv").set_index("protocol")
    frame = pd.read_csv(out / "sweep.csv", dtype={"seed": str})
    by_seed = frame.groupby(["protocol", "seed"])["sent"].sum().unstack()
    assert found["bytes"].to_dict() == by_seed.mean(axis=1).to_dict()
    assert found["bytes"]["Silo"] == 0 < found["bytes"]["Talk"] < found["bytes"]["Shout"]
    # 3 rounds of 2 steps; d_distillation and d_sgd exchange after each, the first of them not in its warm-up
    assert found["steps"].to_dict() == {"Talk": 6, "Shout": 6, "Silo": 6}
    assert found["exchanges"].to_dict() == {"Talk": 4, "Shout": 6, "Silo": 0}
    for name in ("costs.png", "measures.png"):
        assert f"{out / name}\n" in said
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    # What was measured: means over agents and seeds of the rounds after the warm-up.
    expected = frame.dropna(subset=["consensus_error"]).groupby("round")["consensus_error"].mean()
    table = measured(sweep, frame, out)
    assert set(table["protocol"]) == {"Talk"}
    assert table.set_index("round")["mean"].to_dict() == pytest.approx(expected.to_dict())
    assert list(expected.index) == [2, 3]


@pytest.mark.long
def test_scores_on_own_data_are_compared_where_asked_for(
    made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skewed = '[partition]\nkind = "classes"\nk = 4\n'  # own data differ from the common test set
    sweep, out = made(RECIPE + skewed + COMPARE + "own = true\n"), tmp_path / "out"
    assert sweep.test_part == "own test"
    assert main(["sweep", str(tmp_path / "sweep.toml"), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    frame = pd.read_csv(out / "sweep.csv")
    last = frame[frame["round"] == 3].groupby("protocol")[["accuracy", "own_accuracy"]].mean()
    assert (last["accuracy"] - last["own_accuracy"]).abs().min() > 0.01
    found = pd.read_csv(out / "costs.csv").set_index("protocol")
    assert found["accuracy"].to_dict() == pytest.approx(last["own_accuracy"].to_dict())
    first = frame[(frame["round"] == 3) & (frame["protocol"] == "Talk") & (frame["seed"] == 0)]
    assert f"accuracy {100 * first['own_accuracy'].mean():.1f} % on own data" in said
    assert said.count("scores on each agent's own") == 4  # under all tables


def test_without_traffic_and_measures_there_is_no_more_than_there_was(made, tmp_path: Path, monkeypatch) -> None:
    sweep, silent = made(RECIPE), frame_of().assign(sent=0)
    assert show_costs(sweep, silent, tmp_path, Console(quiet=True)) == {}
    assert set(show_costs(made(), silent, tmp_path, Console(quiet=True))) == {"costs"}
    assert not (tmp_path / "costs.png").exists()
    monkeypatch.setattr("codistill.experiments.sweep_results.read_summary", lambda place: None)
    monkeypatch.setattr("codistill.experiments.sweep_results.measures", lambda summary: [])
    assert not draw_measures(sweep, measured(sweep, silent, tmp_path), tmp_path / "measures.png")


@pytest.mark.parametrize(("values", "scale"), [((0.01, 1.1), "log"), ((0.02, 1.1), "linear"), ((0, 1.1), "linear")])
def test_a_wide_span_of_measures_is_drawn_on_a_logarithmic_axis(
    made, drawn: list[Figure], tmp_path: Path, values: tuple[float, float], scale: str
) -> None:
    sweep = made(RECIPE + PANELS)
    table = pd.DataFrame(
        [
            {"partition": part, "protocol": "Talk", "measure": name, "round": t, "mean": value}
            for part in ("even", "skewed")
            for name, factor in (("error", 1), ("share", 0))
            for t, value in enumerate(np.array(values) * factor + (1 - factor), 1)
        ]
    )
    assert draw_measures(sweep, table, tmp_path / "measures.png")
    assert [axes.get_yscale() for axes in drawn[0].axes] == [scale, scale, "linear", "linear"]
    assert [axes.get_ylabel() for axes in drawn[0].axes] == ["error", "", "share", ""]
