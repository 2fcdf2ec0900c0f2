"""Figures that a protocol measures: found in the rows, drawn in the report."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.ticker import PercentFormatter

from codistill.report.html import svg
from codistill.report.pages import write_report
from codistill.report.score_plots import draw_measure
from codistill.results.rounds import measures
from codistill.results.summary import Summary


def run(rounds=2, agents=("a", "b"), **figures):
    """A run whose rows hold figures, given by name as values of (round, number of the agent); None: not measured."""
    rows = []
    for done in range(1, rounds + 1):
        for index, agent in enumerate(agents):
            row = {"round": done, "agent": agent, "present": True, "sent": 1, "received": 2, "lies": False}
            row |= {"accuracy": 0.5, "own_accuracy": 0.5, "rmse": 0.5, "own_rmse": 0.5, "test_samples": 9}
            told = {name: value(done, index) for name, value in figures.items()}
            rows.append(row | {name: value for name, value in told.items() if value is not None})
    return Summary("a run", "fedal", dict.fromkeys(agents, "mlp"), rows, None, None, ("x", "y"), 1.0, 9)


def page(summary: Summary, folder: Path) -> str:
    return write_report(summary, folder / "report.html").read_text("utf-8")


def test_what_every_row_holds_is_no_measure() -> None:
    odd = run(
        time=lambda t, i: 0.5 * t,
        word=lambda t, i: "text",
        yes=lambda t, i: True,
        gone=lambda t, i: float("nan"),
        none=lambda t, i: [1.0],
    )
    assert measures(odd) == []


def test_mean_and_range_are_over_the_agents_that_were_measured() -> None:
    """In round 1 only the first agent, in round 2 none, in round 3 both: 0.2, then 0.3 and 0.7."""
    values = {(1, 0): 0.2, (3, 0): 0.3, (3, 1): 0.7}
    (found,) = measures(run(3, disagreement=lambda t, i: values.get((t, i))))
    assert found.rounds.tolist() == [1, 3]
    axes = draw_measure(found).axes[0]
    assert axes.lines[0].get_xydata().tolist() == [[1, 0.2], [3, 0.5]]
    corners = {tuple(np.round(corner, 6)) for corner in axes.collections[0].get_paths()[0].vertices}
    assert corners == {(1, 0.2), (3, 0.3), (3, 0.7)}
    assert len(axes.lines) == 1  # no level of chance


@pytest.mark.usefixtures("no_charts")
def test_byzantine_agents_do_not_count(tmp_path: Path) -> None:
    told = run(disagreement=lambda t, i: 0.9 if i else 0.1)
    told.rows[1]["lies"] = told.rows[3]["lies"] = True
    assert [values.tolist() for values in measures(told)[0].values] == [[0.1], [0.1]]
    assert "Mean and range are of the honest agents" in page(told, tmp_path)


@pytest.mark.parametrize(("highest", "percent"), [(1, True), (1.01, False)])
def test_shares_are_in_percent(highest: float, percent: bool) -> None:
    (found,) = measures(run(own=lambda t, i: highest if (t, i) == (2, 1) else 0))
    assert isinstance(draw_measure(found).axes[0].yaxis.get_major_formatter(), PercentFormatter) == percent


def test_chance_is_one_of_the_agents() -> None:
    (found,) = measures(run(agents=("a", "b", "c", "d"), discriminator_accuracy=lambda t, i: 0.3))
    axes = draw_measure(found).axes[0]
    assert [line.get_label() for line in axes.lines] == ["mean", "chance: 1 in 4"]
    assert set(axes.lines[1].get_ydata()) == {0.25}
    assert axes.lines[1].get_linestyle() == "--"


def test_the_report_explains_what_it_knows_and_names_the_rest(tmp_path: Path) -> None:
    summary = run(discriminator_accuracy=lambda t, i: 0.5, steps_taken=lambda t, i: 30.0, **{"<b>": lambda t, i: 1})
    text = page(summary, tmp_path)
    assert "<h2>Protocol measures</h2>" in text
    assert "At chance level the discriminator cannot tell the agents apart" in text
    assert re.findall('aria-label="([^"]+)"', text)[-3:] == [
        "accuracy of the discriminator: how often it recognises which agent an output is from",
        "steps taken",
        "&lt;b&gt;",
    ]
    assert "<b>" not in text


@pytest.mark.usefixtures("no_charts")
def test_without_measures_there_is_no_section(tmp_path: Path) -> None:
    assert "Protocol measures" not in page(run(), tmp_path)


def test_many_rounds_stay_small() -> None:
    noise = np.random.default_rng(0).random((401, 10))
    agents = [f"agent {index}" for index in range(10)]
    (found,) = measures(run(400, agents, disagreement=lambda t, i: noise[t, i]))
    assert len(svg(draw_measure(found), "measure", "a chart", {}, hidden=False)) < 50_000
