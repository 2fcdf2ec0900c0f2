"""The average output by true class: in a report, on a comparison page, and after a sweep."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from codistill.cli import main
from codistill.experiments.saved_run import read_summary
from codistill.experiments.sweep import read_sweep
from codistill.experiments.sweep_results import outputs_grid
from codistill.report.maps import draw_maps, draw_outputs
from codistill.report.pages import write_comparison, write_report
from codistill.report.style import HEAT
from codistill.results.outputs import Outputs, pool
from codistill.results.summary import Summary

HEADING = "Average output by true class"
MEAN = np.array([[0.904, 0.096, 0.0], [0.3, 0.6996, 0.0004], [np.nan] * 3])


def outputs(mean=MEAN, samples=(30, 10, 0), apart=(0.25, 0.75, np.nan), agents=("a", "b")):
    shares = None if apart is None else np.array(apart)
    return Outputs(2, agents, np.array(samples), np.asarray(mean), None, shares)


def summary(title="a run", found=None, metric="accuracy"):
    rows = [
        {"round": 2, "agent": name, "present": True, "sent": 0, "received": 0, metric: 0.5, "test_samples": 40}
        for name in ("a", "b")
    ]
    agents = {"a": "mlp", "b": "mlp"}
    return Summary(title, "fedmd", agents, rows, None, None, ("cat", "<dog>", "eel"), 1.0, 40, outputs=found)


def test_cells_hold_their_numbers_and_bars_the_disagreement() -> None:
    """90.4 % and so on; 0.04 % is as good as nothing, and a class without test samples stays empty."""
    heat, bars = draw_outputs(outputs(), ["cat", "dog", "eel"]).axes
    cells = {tuple(text.get_position()): text.get_text() for text in heat.texts}  # (column, row)
    assert cells == {(0, 0): "90", (1, 0): "10", (0, 1): "30", (1, 1): "70"}
    depths = {(patch.get_x() + 0.5, patch.get_y() + 0.5): patch.get_facecolor()[3] for patch in heat.patches}
    assert depths == pytest.approx({(0, 0): 0.904, (1, 0): 0.096, (0, 1): 0.3, (1, 1): 0.6996})
    assert [label.get_text() for label in heat.get_yticklabels()] == ["cat", "dog", "eel"]
    assert heat.yaxis_inverted()  # the first class on top, as in a matrix
    assert [bar.get_width() for bar in bars.patches] == [0.25, 0.75, 0]
    assert [text.get_text() for text in bars.texts] == ["25.0 %", "75.0 %", ""]


def test_many_classes_are_an_image() -> None:
    mean = np.random.default_rng(0).dirichlet(np.ones(13), 13)
    heat, _ = draw_outputs(outputs(mean, [1] * 13, [0.5] * 13), ()).axes
    assert not heat.texts
    (image,) = heat.images
    np.testing.assert_array_equal(image.get_array()[..., 3], mean)


def test_small_maps_have_titles_and_the_mean_disagreement() -> None:
    """30 samples with 25 % and 10 with 75 %: 37.5 %; one agent has nobody to disagree with."""
    figure = draw_maps([("first", outputs(), ()), ("one", outputs(apart=None), ()), *[("more", outputs(), ())] * 2])
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.axison]
    assert titles == ["first\ndisagreement 37.5 %", "one", *["more\ndisagreement 37.5 %"] * 2]


def test_pooled_outputs_weigh_every_test_sample_alike() -> None:
    """Class 0: 30 samples at 0.904 and 10 at 0.1; class 1: 10 and 30; class 2: only in the second run."""
    other = outputs(np.full((3, 3), 0.1), (10, 30, 5), (0.05, 0.35, 0.5))
    both = pool([outputs(), other])
    assert both.samples.tolist() == [40, 40, 5]
    np.testing.assert_allclose(both.mean[:, 0], [(30 * 0.904 + 1) / 40, (10 * 0.3 + 3) / 40, 0.1])
    np.testing.assert_allclose(both.disagreement, [(7.5 + 0.5) / 40, (7.5 + 10.5) / 40, 0.5])
    assert np.isnan(pool([outputs(), outputs()]).mean[2]).all()
    assert pool([outputs(), outputs(apart=None)]).disagreement is None


def test_the_report_shows_them(tmp_path: Path) -> None:
    page = write_report(summary(found=outputs(agents=("a",))), tmp_path / "report.html").read_text("utf-8")
    assert f"<h2>{HEADING}</h2>" in page
    assert "Each row is a true class" in page
    assert "Bars: the share of pairs of agents" in page
    assert "1 of 2 agents count: Byzantine agents" in page
    assert "&lt;dog&gt;" in page
    # Colours of a dark page come from the style sheet.
    drawn = " ".join(re.findall('style="([^"]*)"', page))
    assert "fill: var(--heat)" in drawn
    assert HEAT not in drawn
    assert page.count("--heat:") == 2


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("metric", ["accuracy", "rmse"])
def test_without_outputs_there_is_no_section(metric: str, tmp_path: Path) -> None:
    page = write_report(summary(metric=metric), tmp_path / "report.html").read_text("utf-8")
    both = write_comparison([summary(metric=metric)] * 2, tmp_path / "both.html").read_text("utf-8")
    assert HEADING not in page + both


def test_a_comparison_shows_the_runs_that_have_them(tmp_path: Path) -> None:
    runs = [summary("first", outputs()), summary("old"), summary("<third>", outputs(apart=None))]
    page = write_comparison(runs, tmp_path / "comparison.html").read_text("utf-8")
    chart = page[page.index(HEADING) : page.index("All runs")]
    assert ">first<" in chart
    assert ">&lt;third&gt;<" in chart
    assert ">old<" not in chart
    assert chart.count("disagreement 37.5 %") == 1


SWEEP = """
seed = 0
[data]
name = "wine"
[[agents]]
learner = "naive_bayes"
count = 2
[partition]
kind = "dirichlet"
alpha = 1.0
[protocol]
name = "alone"
rounds = 1
[evaluation]
alone = false
[runtime]
kind = "simulation"
[sweep]
protocol = [{ name = "alone" }, { name = "fedavg" }, { label = "all data", name = "centralised" }]
"partition.alpha" = [0.5, 100.0]
seed = [0, 1]
"""


@pytest.mark.usefixtures("no_report")
def test_a_sweep_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two protocols below one another (weights of such models cannot be averaged), two values side by side."""
    recipe, out = tmp_path / "sweep.toml", tmp_path / "out"
    recipe.write_text(SWEEP)
    assert main(["sweep", str(recipe), "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"average outputs: {out / 'outputs.png'}\n")
    assert imread(out / "outputs.png").shape[:2] == (2 * 341, 2 * 330)

    grid = outputs_grid(read_sweep(recipe), out)
    assert [[each[0] for each in row] for row in grid] == [
        ["protocol=alone, alpha=0.5", "protocol=alone, alpha=100.0"],
        ["protocol=all data, alpha=0.5", "protocol=all data, alpha=100.0"],
    ]
    runs = [read_summary(out / f"alone_0.5_{seed}").outputs for seed in (0, 1)]
    np.testing.assert_allclose(grid[0][0][1].mean, pool([run for run in runs if run is not None]).mean)
    assert not np.allclose(runs[0].mean, runs[1].mean)  # type: ignore[union-attr]
    # With all data in every agent, all answer alike.
    assert (grid[0][0][1].mean_disagreement > 0, grid[1][0][1].mean_disagreement) == (True, 0)
    assert grid[0][0][2] == read_summary(out / "alone_0.5_0").class_names
    # Folders of runs that kept no outputs have nothing to draw.
    for path in out.rglob("outputs.*"):
        path.unlink()
    assert outputs_grid(read_sweep(recipe), out) == []
