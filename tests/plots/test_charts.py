import io
import itertools
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from codistill.faults import Fault
from codistill.plots import charts
from codistill.plots import style as look
from codistill.plots.charts import arrange, draw_bars, draw_result, draw_rounds, draw_runs, draw_traffic
from codistill.results.summary import Summary


def rows_of(scores, *, key="accuracy", sent=100, received=300):
    """One row per round and agent; a score of None was not measured."""
    return [
        {"round": done, "agent": name, "present": True, "sent": sent, "received": received}
        | ({} if values[done - 1] is None else {key: values[done - 1], "test_samples": 1000})
        for done in range(1, 1 + max(map(len, scores.values())))
        for name, values in scores.items()
    ]


def summary(scores, alone=None, *, counts=None, **options):
    alone_rows = None if alone is None else rows_of({name: [value] for name, value in alone.items()}, **options)
    return Summary(
        title="a run", protocol="fedmd", agents=dict.fromkeys(scores, "linear"), rows=rows_of(scores, **options),
        alone_rows=alone_rows, counts=counts, class_names=("cat", "dog"), seconds=75, test_samples=1000,
    )  # fmt: skip


TWO = {"a": [0.2, 0.5], "b": [0.6, 0.9]}


def many(count, gain=lambda index: index / 1000):
    """Agents with 50 % alone and a gain of their own."""
    names = [f"agent {index}" for index in range(count)]
    return summary({name: [0.5 + gain(index)] for index, name in enumerate(names)}, alone=dict.fromkeys(names, 0.5))


def line(axes, gid=None, label=None):
    (found,) = [each for each in axes.lines if each.get_gid() == gid and label in (None, each.get_label())]
    return found


def texts(axes):
    return [text.get_text() for text in axes.texts]


def svg(figure):
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg")
    return out.getvalue()


def test_figures_are_those_of_the_rows():
    """Means (0.2 + 0.6) / 2 and (0.5 + 0.9) / 2; two agents of 400 bytes per round."""
    run = arrange(summary(TWO, alone={"a": 0.6, "b": 0.6}))
    assert run.rounds.tolist() == [1, 2]
    assert run.mean == pytest.approx([0.4, 0.7])
    assert run.traffic.tolist() == [800, 1600]
    assert run.curves == {"a": ([1, 2], [0.2, 0.5]), "b": ([1, 2], [0.6, 0.9])}
    assert (run.alone, run.together, run.gain) == pytest.approx((0.6, 0.7, 0.1))


def test_bytes_of_rounds_without_evaluation_count():
    run = arrange(summary({"a": [None, 0.5, None, 0.7]}))
    assert run.rounds.tolist() == [2, 4]
    assert run.traffic.tolist() == [800, 1600]


def test_without_a_common_test_set_the_own_scores_are_drawn():
    run = arrange(summary(TWO, alone={"a": 0.1, "b": 0.3}, key="own_accuracy"))
    assert run.own
    assert "own distribution" in run.word_of_axis
    assert (run.alone, run.together) == pytest.approx((0.2, 0.7))


def test_rounds_show_mean_range_each_agent_and_alone():
    axes = draw_rounds(arrange(summary(TWO, alone={"a": 0.3, "b": 0.5}))).axes[0]
    assert line(axes, label="mean").get_xydata() == pytest.approx(np.array([[1, 0.4], [2, 0.7]]))
    assert line(axes, gid="agent-0").get_ydata().tolist() == [0.2, 0.5]
    assert line(axes, gid="agent-1").get_ydata().tolist() == [0.6, 0.9]
    assert line(axes, label="mean alone, at the end").get_ydata() == pytest.approx([0.4, 0.4])
    (band,) = axes.collections
    corners = {(float(x), float(y)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(1, 0.2), (1, 0.6), (2, 0.5), (2, 0.9)}


def test_one_round_shows_its_range_too():
    axes = draw_rounds(arrange(summary({"a": [0.2], "b": [0.6]}))).axes[0]
    (bar,) = axes.collections
    assert bar.get_segments()[0].tolist() == [[1, 0.2], [1, 0.6]]
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [1]


def test_an_agent_that_could_not_be_evaluated_is_left_out_of_the_mean():
    axes = draw_rounds(arrange(summary({"a": [0.2, 0.5], "b": [None, 0.9]}))).axes[0]
    assert line(axes, label="mean").get_ydata() == pytest.approx([0.2, 0.7])
    assert line(axes, gid="agent-1").get_xdata().tolist() == [2]


def test_long_lines_of_agents_are_thinned_but_end_where_they_end(monkeypatch):
    monkeypatch.setattr(charts, "MOST_POINTS", 40)
    run = arrange(summary({"a": [0.1] * 49 + [0.8], "b": [0.1] * 50}))
    assert charts.thinning(run) == 3
    axes = draw_rounds(run).axes[0]
    drawn = line(axes, gid="agent-0")
    assert len(drawn.get_xdata()) == 17
    assert (drawn.get_xdata()[-1], drawn.get_ydata()[-1]) == (50, 0.8)
    assert len(line(axes, label="mean").get_xdata()) == 50


@pytest.mark.parametrize(("rounds", "scale"), [(29, "linear"), (30, "log")])
def test_bytes_are_logarithmic_where_they_span_much(rounds, scale):
    axes = draw_traffic(arrange(summary({"a": [0.5] * rounds}))).axes[0]
    assert axes.get_xscale() == scale
    assert ("logarithmic" in axes.get_xlabel()) == (scale == "log")
    assert texts(axes) == ["round 1", f"round {rounds}"]
    assert axes.xaxis.get_major_formatter()(2_000_000, 0) == "2 MB"


def test_bars_are_the_scores_and_the_gains():
    figure = draw_bars(arrange(summary(TWO, alone={"a": 0.7, "b": 0.6})))
    alone, together = figure.axes[0].containers
    assert [bar.get_width() for bar in alone] == [0.7, 0.6]
    assert [bar.get_width() for bar in together] == [0.5, 0.9]
    assert texts(figure.axes[0]) == ["-20.0", "+30.0"]
    assert [text.get_color() for text in figure.axes[0].texts] == [look.WORSE, look.INK]


def test_less_error_is_better():
    run = arrange(summary(TWO, alone={"a": 0.7, "b": 0.6}, key="rmse"))
    axes = draw_bars(run).axes[0]
    assert texts(axes) == ["-0.2", "+0.3"]
    assert [text.get_color() for text in axes.texts] == [look.INK, look.WORSE]
    assert run.word_of_axis == "RMSE on the common test set (lower is better)"
    assert run.score_text(0.12345) == "0.1235"


def test_of_many_agents_those_with_the_largest_gains_and_losses_get_bars():
    """Of gains 0, 1, ..., 39 (the odd ones losses), the 30 largest in size are 10 to 39."""
    run = arrange(many(40, lambda index: (-1) ** index * index / 1000))
    axes = draw_bars(run).axes[0]
    gains = [float(text) for text in texts(axes)]
    assert sorted(map(abs, gains)) == pytest.approx([index / 10 for index in range(10, 40)])
    assert gains == sorted(gains, reverse=True)
    assert axes.get_yticklabels()[0].get_text() == "agent 38"
    assert charts.bars_note(run) == "Of 40 agents, the 30 with the largest gain or loss are shown."
    assert charts.bars_note(arrange(many(30))) == ""


def test_the_first_columns_of_a_large_partition_are_drawn():
    scores = {f"agent {index}": [0.5] for index in range(70)}
    figure = charts.draw_shares(summary(scores, counts=np.ones((70, 2), dtype=int)))
    assert len(figure.axes[0].collections[0].get_offsets()) == 2 * 60


def test_lines_have_a_style_of_their_own():
    assert len({charts.series_style(index) for index in range(charts.MOST_SWITCHES)}) == charts.MOST_SWITCHES


def test_runs_are_drawn_together():
    runs = [arrange(summary(TWO)), arrange(summary({"a": [0.3]}, sent=0, received=0))]
    rounds = draw_runs(list(enumerate(runs))).axes[0]
    assert line(rounds, gid="run-0").get_ydata() == pytest.approx([0.4, 0.7])
    assert line(rounds, gid="run-1").get_xydata().tolist() == [[1, 0.3]]
    against = draw_runs(list(enumerate(runs)), against_bytes=True).axes[0]
    assert line(against, gid="run-0").get_xdata().tolist() == [800, 1600]
    assert line(against, gid="run-1").get_ydata() == pytest.approx([0.3, 0.3])  # level: it has no bytes


@pytest.mark.parametrize("alone", [None, {"a": 0.5, "b": 0.5}])
def test_the_picture_of_a_result(alone, tmp_path):
    figure = draw_result(summary(TWO, alone=alone))
    assert len(figure.axes) == (1 if alone is None else 2)
    figure.savefig(tmp_path / "result.png")
    assert (tmp_path / "result.png").stat().st_size > 10_000
    labels = {text.get_text(): text for text in figure.axes[0].texts}
    assert set(labels) == {"a", "b"}
    # The leader has its line's colour.
    assert to_hex(labels["b"].arrow_patch.get_edgecolor()) == charts.series_style(1)[0]


def test_names_at_the_ends_do_not_overlap():
    figure = draw_result(summary({f"agent {index}": [0.1, 0.8 + index / 1e6] for index in range(12)}))
    figure.draw_without_rendering()
    boxes = sorted((Text.get_window_extent(text) for text in figure.axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == 12
    assert all(lower.y1 <= upper.y0 for lower, upper in itertools.pairwise(boxes))


def test_names_are_moved_apart_no_more_than_needed():
    assert charts._moved_apart([1, 5], 1) == [1, 5]
    assert charts._moved_apart([1, 1, 5], 1) == [0.5, 1.5, 5]
    assert charts._moved_apart([1, 1.2, 1.4, 2], 1) == pytest.approx([-0.1, 0.9, 1.9, 2.9])


def test_a_picture_of_many_agents_says_whom_it_shows():
    figure = draw_result(many(40))
    assert not figure.axes[0].texts
    assert figure.axes[1].get_xlabel() == "the 12 of 40 agents that gained or lost most"


def test_a_picture_without_scores():
    svg(draw_result(summary({"a": [None]})))


def test_names_are_drawn_as_they_are():
    name = "<b>$x_{$ & \x07"
    figure = draw_bars(arrange(summary({name: [0.5]}, alone={name: 0.4})))
    assert "&lt;b&gt;$x_{$ &amp; \N{REPLACEMENT CHARACTER}" in svg(figure)
    assert charts.plain("x" * 30) == "x" * 19 + "…"


def test_a_diverged_run_can_be_drawn():
    scores = {"a": [1.0, float("inf"), float("nan")], "b": [1.0, 2.0, 3.0]}
    diverged = summary(scores, alone={"a": float("inf"), "b": 2.0}, key="rmse")
    run = arrange(diverged)
    for figure in (draw_rounds(run), draw_traffic(run), draw_bars(run), draw_result(diverged)):
        svg(figure)


def test_rounds_of_a_fault_are_shaded_and_named():
    passing = Fault(kind="gone", agent="b", first=2, last=3)
    always = Fault(kind="drop", rate=0.25)
    scores = {"a": [0.1, 0.2, 0.3, 0.4], "b": [0.1, 0.1, 0.1, 0.4]}
    axes = draw_rounds(arrange(replace(summary(scores), faults=(passing, always)))).axes[0]
    (band,) = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert (band.get_x(), band.get_x() + band.get_width()) == (1.5, 3.5)
    assert texts(axes) == ["b: absent"]
    assert always.words == "all: messages lost (25 %)"


def test_what_was_measured_on_is_named():
    assert (
        arrange(replace(summary(TWO), test_part="validation")).word_of_axis == "accuracy on the common validation set"
    )
