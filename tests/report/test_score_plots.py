import io
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib.patches import Rectangle

from codistill.nodes.faults import Fault
from codistill.report import score_plots, style
from codistill.report.score_plots import (
    counted,
    draw_counts,
    draw_gains,
    draw_rounds,
    draw_runs,
    draw_times,
    draw_traffic,
    omitted_agents,
)
from codistill.report.style import plain
from codistill.results.agents import score_text
from codistill.results.rounds import scores_of
from codistill.results.summary import Summary


def rows_of(scores, *, key="accuracy", sent=100, received=300):
    """One row per round and agent; a score of None was not measured."""
    return [
        {"round": done, "agent": name, "present": True, "sent": sent, "received": received}
        | ({} if values[done - 1] is None else {key: values[done - 1], "test_samples": 1000})
        for done in range(1, 1 + max(map(len, scores.values())))
        for name, values in scores.items()
    ]


def summary(scores, alone=None, **options):
    alone_rows = None if alone is None else rows_of({name: [value] for name, value in alone.items()}, **options)
    return Summary(
        title="a run", protocol="fedmd", agents=dict.fromkeys(scores, "linear"), rows=rows_of(scores, **options),
        alone_rows=alone_rows, counts=None, class_names=("cat", "dog"), seconds=75, test_samples=1000,
    )  # fmt: skip


TWO = {"a": [0.2, 0.5], "b": [0.6, 0.9]}


def many(count, gain=lambda index: index / 1000):
    """Agents with 50 % alone and a gain of their own."""
    names = [f"agent {index}" for index in range(count)]
    return summary({name: [0.5 + gain(index)] for index, name in enumerate(names)}, alone=dict.fromkeys(names, 0.5))


def line(axes, gid=None, label=None):
    (found,) = [each for each in axes.lines if each.get_gid() == gid and label in (None, each.get_label())]
    return found


def gains(run):
    return draw_gains(run.compared, run.metric, run.axis_label())


def texts(axes):
    return [text.get_text() for text in axes.texts]


def svg(figure):
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg")
    return out.getvalue()


def test_figures_are_those_of_the_rows():
    """Means (0.2 + 0.6) / 2 and (0.5 + 0.9) / 2; two agents of 400 bytes per round."""
    run = scores_of(summary(TWO, alone={"a": 0.6, "b": 0.6}))
    assert run.rounds.tolist() == [1, 2]
    assert run.mean == pytest.approx([0.4, 0.7])
    assert run.traffic.tolist() == [800, 1600]
    assert run.curves == {"a": ([1, 2], [0.2, 0.5]), "b": ([1, 2], [0.6, 0.9])}
    assert (run.alone, run.together, run.gain) == pytest.approx((0.6, 0.7, 0.1))


def test_bytes_of_rounds_without_evaluation_count():
    run = scores_of(summary({"a": [None, 0.5, None, 0.7]}))
    assert run.rounds.tolist() == [2, 4]
    assert run.traffic.tolist() == [800, 1600]


def test_without_a_common_test_set_the_own_scores_are_drawn():
    run = scores_of(summary(TWO, alone={"a": 0.1, "b": 0.3}, key="own_accuracy"))
    assert run.own
    assert "each agent's own data" in run.axis_label()
    assert (run.alone, run.together) == pytest.approx((0.2, 0.7))


def test_rounds_show_mean_range_each_agent_and_alone():
    axes = draw_rounds(scores_of(summary(TWO, alone={"a": 0.3, "b": 0.5}))).axes[0]
    assert line(axes, label="mean").get_xydata() == pytest.approx(np.array([[1, 0.4], [2, 0.7]]))
    assert line(axes, gid="agent-0").get_ydata().tolist() == [0.2, 0.5]
    assert line(axes, gid="agent-1").get_ydata().tolist() == [0.6, 0.9]
    assert line(axes, label="mean alone, at the end").get_ydata() == pytest.approx([0.4, 0.4])
    (band,) = axes.collections
    corners = {(float(x), float(y)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(1, 0.2), (1, 0.6), (2, 0.5), (2, 0.9)}


def test_one_round_shows_its_range_too():
    axes = draw_rounds(scores_of(summary({"a": [0.2], "b": [0.6]}))).axes[0]
    (bar,) = axes.collections
    assert bar.get_segments()[0].tolist() == [[1, 0.2], [1, 0.6]]
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [1]


def test_an_agent_that_could_not_be_evaluated_is_left_out_of_the_mean():
    axes = draw_rounds(scores_of(summary({"a": [0.2, 0.5], "b": [None, 0.9]}))).axes[0]
    assert line(axes, label="mean").get_ydata() == pytest.approx([0.2, 0.7])
    assert line(axes, gid="agent-1").get_xdata().tolist() == [2]


def test_long_lines_of_agents_are_thinned_but_end_where_they_end(monkeypatch):
    monkeypatch.setattr(score_plots, "MOST_POINTS", 40)
    run = scores_of(summary({"a": [0.1] * 49 + [0.8], "b": [0.1] * 50}))
    assert score_plots.thinning(run) == 3
    axes = draw_rounds(run).axes[0]
    drawn = line(axes, gid="agent-0")
    assert len(drawn.get_xdata()) == 17
    assert (drawn.get_xdata()[-1], drawn.get_ydata()[-1]) == (50, 0.8)
    assert len(line(axes, label="mean").get_xdata()) == 50


@pytest.mark.parametrize(("rounds", "scale"), [(29, "linear"), (30, "log")])
def test_bytes_are_logarithmic_where_they_span_much(rounds, scale):
    axes = draw_traffic(scores_of(summary({"a": [0.5] * rounds}))).axes[0]
    assert axes.get_xscale() == scale
    assert ("logarithmic" in axes.get_xlabel()) == (scale == "log")
    assert texts(axes) == ["round 1", f"round {rounds}"]
    assert axes.xaxis.get_major_formatter()(2_000_000, 0) == "2 MB"


def test_bars_are_the_scores_and_the_gains():
    figure = gains(scores_of(summary(TWO, alone={"a": 0.7, "b": 0.6})))
    alone, together = figure.axes[0].containers
    assert [bar.get_width() for bar in alone] == [0.7, 0.6]
    assert [bar.get_width() for bar in together] == [0.5, 0.9]
    assert texts(figure.axes[0]) == ["-20.0", "+30.0"]
    assert [text.get_color() for text in figure.axes[0].texts] == [style.WORSE, style.INK]


def test_less_error_is_better():
    run = scores_of(summary(TWO, alone={"a": 0.7, "b": 0.6}, key="rmse"))
    axes = gains(run).axes[0]
    assert texts(axes) == ["+0.2", "-0.3"]
    assert [text.get_color() for text in axes.texts] == [style.INK, style.WORSE]
    assert run.axis_label() == "RMSE on the common test set (lower is better)"
    assert score_text("rmse", 0.12345) == "0.1235"


def test_of_many_agents_those_with_the_largest_gains_and_losses_get_bars():
    """Of gains 0, 1, ..., 39 (the odd ones losses), the 30 largest in size are 10 to 39."""
    run = scores_of(many(40, lambda index: (-1) ** index * index / 1000))
    axes = gains(run).axes[0]
    shown = [float(text) for text in texts(axes)]
    assert sorted(map(abs, shown)) == pytest.approx([index / 10 for index in range(10, 40)])
    assert shown == sorted(shown, reverse=True)
    assert axes.get_yticklabels()[0].get_text() == "agent 38"
    assert omitted_agents(run.lines) == "Of 40 agents, the 30 with the largest gain or loss are shown."
    assert omitted_agents(scores_of(many(30)).lines) == ""


def test_lines_have_a_style_of_their_own():
    assert len({style.series_style(index) for index in range(score_plots.MOST_SWITCHES)}) == score_plots.MOST_SWITCHES


def test_runs_are_drawn_together():
    runs = [scores_of(summary(TWO)), scores_of(summary({"a": [0.3]}, sent=0, received=0))]
    rounds = draw_runs(list(enumerate(runs))).axes[0]
    assert line(rounds, gid="run-0").get_ydata() == pytest.approx([0.4, 0.7])
    assert line(rounds, gid="run-1").get_xydata().tolist() == [[1, 0.3]]
    against = draw_runs(list(enumerate(runs)), against="bytes").axes[0]
    assert line(against, gid="run-0").get_xdata().tolist() == [800, 1600]
    assert line(against, gid="run-1").get_ydata() == pytest.approx([0.3, 0.3])  # level: it has no bytes


def timed(scores, seconds, **options):
    made = summary(scores, **options)
    return replace(made, rows=[row | {"time": seconds * row["round"]} for row in made.rows])


def test_runs_with_a_clock_are_drawn_against_time():
    assert scores_of(summary(TWO)).times is None
    slow, fast = scores_of(timed(TWO, 2.5)), scores_of(timed({"a": [0.3, None, 0.9]}, 0.5))
    axes = draw_times(slow).axes[0]
    assert line(axes, label="mean").get_xydata() == pytest.approx(np.array([[2.5, 0.4], [5, 0.7]]))
    assert axes.get_xlim()[0] == 0
    together = draw_runs([(0, slow), (3, fast)], against="time").axes[0]
    assert line(together, gid="run-0").get_xdata().tolist() == [2.5, 5]
    assert line(together, gid="run-3").get_xydata().tolist() == [[0.5, 0.3], [1.5, 0.9]]


def with_counts(given, steps, exchanges, absent=()):
    """The same run with counts of each agent in each round; `absent`: (round, agent) that did not take part."""
    rows = [
        row | {"steps": 0, "exchanges": 0, "present": False}
        if (row["round"], row["agent"]) in absent
        else row | {"steps": steps[row["agent"]], "exchanges": exchanges}
        for row in given.rows
    ]
    return replace(given, rows=rows)


def test_scores_against_steps_and_exchanges():
    """a takes 10 steps per round and b 30; in round 2 of 3, which is not evaluated, only a takes part, in 4 nobody."""
    given = summary({"a": [0.2, None, 0.5, 0.5], "b": [0.6, None, 0.9, 0.9]})
    absent = {(2, "b"), (4, "a"), (4, "b")}
    run = scores_of(with_counts(given, {"a": 10, "b": 30}, 2, absent))
    assert run.steps.tolist() == [20, 20 + 10 + 20, 50]
    assert run.exchanges.tolist() == [2, 6, 6]
    exchanges, steps = draw_counts(run).axes
    assert line(exchanges, label="mean").get_xydata() == pytest.approx(np.array([[2, 0.4], [6, 0.7], [6, 0.7]]))
    assert line(steps, label="mean").get_xydata() == pytest.approx(np.array([[20, 0.4], [50, 0.7], [50, 0.7]]))
    assert ("exchanges" in exchanges.get_xlabel(), "gradient steps" in steps.get_xlabel()) == (True, True)
    assert (exchanges.get_legend() is None, steps.get_legend() is None) == (False, True)  # once for both
    together = draw_runs([(0, run), (3, scores_of(with_counts(summary(TWO), {"a": 0, "b": 0}, 1)))], "steps").axes[0]
    assert line(together, gid="run-0").get_xdata().tolist() == [20, 50, 50]
    assert set(line(together, gid="run-3").get_ydata()) == {0.7}  # no steps: level, at its last score


def test_what_was_not_counted_is_not_drawn():
    run = scores_of(summary(TWO))  # of an older version
    assert (run.steps, run.exchanges) == (None, None)
    assert counted(run) == {}
    forests = scores_of(with_counts(summary(TWO), {"a": 0, "b": 0}, 1))
    assert counted(forests).keys() == {"exchanges"}
    assert len(draw_counts(forests).axes) == 1


def test_names_are_drawn_as_they_are():
    name = "<b>$x_{$ & \x07"
    figure = gains(scores_of(summary({name: [0.5]}, alone={name: 0.4})))
    assert "&lt;b&gt;$x_{$ &amp; \N{REPLACEMENT CHARACTER}" in svg(figure)
    assert plain("x" * 30) == "x" * 19 + "…"


def test_a_diverged_run_can_be_drawn():
    scores = {"a": [1.0, float("inf"), float("nan")], "b": [1.0, 2.0, 3.0]}
    diverged = summary(scores, alone={"a": float("inf"), "b": 2.0}, key="rmse")
    run = scores_of(diverged)
    for figure in (draw_rounds(run), draw_traffic(run), gains(run)):
        svg(figure)


def test_rounds_of_a_fault_are_shaded_and_named():
    passing = Fault(kind="gone", agent="b", first=2, last=3)
    always = Fault(kind="drop", rate=0.25)
    scores = {"a": [0.1, 0.2, 0.3, 0.4], "b": [0.1, 0.1, 0.1, 0.4]}
    axes = draw_rounds(scores_of(replace(summary(scores), faults=(passing, always)))).axes[0]
    (band,) = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert (band.get_x(), band.get_x() + band.get_width()) == (1.5, 3.5)
    assert texts(axes) == ["b: absent"]
    assert always.words == "all: messages lost (25 %)"


def test_what_was_measured_on_is_named():
    assert (
        scores_of(replace(summary(TWO), test_part="validation")).axis_label() == "accuracy on the common validation set"
    )
