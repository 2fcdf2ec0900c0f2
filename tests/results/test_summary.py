"""The figures that a person is shown, derived from the rows by hand."""

import re
from io import StringIO

import pytest
from rich.console import Console

from codistill.core.text import bytes_text, duration_text, percent_text
from codistill.results.rounds import scores_of
from codistill.results.summary import Summary, comparison_table
from codistill.results.tables import Cell


def row(done, agent, sent=0, received=0, **scores):
    return {"round": done, "agent": agent, "present": True, "sent": sent, "received": received, **scores}


def summary(rows, alone_rows=None, **changes):
    values = {
        "title": "trial", "protocol": "fedmd", "agents": {"a": "forest", "b": "mlp"}, "rows": rows,
        "alone_rows": alone_rows, "counts": None, "class_names": ("0", "1"), "seconds": 75.0, "test_samples": 50,
    }  # fmt: skip
    return Summary(**{**values, **changes})


def words(shown):
    """The table's text however it is wrapped."""
    return " ".join(shown.table_text().split())


ROWS = [
    row(1, "a", 10, 20, accuracy=0.5, own_accuracy=0.55, test_samples=20),
    row(1, "b", 30, 40, accuracy=0.6, own_accuracy=0.65, test_samples=20),
    row(2, "a", 1, 2),
    row(2, "b", 3, 4),
    row(3, "a", 100, 200, accuracy=0.7, own_accuracy=0.75, test_samples=50),
    row(3, "b", 300, 400, accuracy=0.9, own_accuracy=0.95, test_samples=50),
]
ALONE = [row(3, "a", accuracy=0.4, own_accuracy=0.6, test_samples=50), row(3, "b", accuracy=1.0, test_samples=50)]


def test_lines_are_the_last_scores_and_the_sums_of_bytes():
    a, b = summary(ROWS, ALONE).lines()
    assert (a.name, a.model, a.alone, a.together) == ("a", "forest", 0.4, 0.7)
    assert (a.own_alone, a.own_together) == (0.6, 0.75)
    assert (a.sent, a.received) == (10 + 1 + 100, 20 + 2 + 200)
    assert a.gain == pytest.approx(0.7 - 0.4)
    assert (b.alone, b.together, b.own_alone) == (1.0, 0.9, None)
    assert (b.sent, b.received) == (30 + 3 + 300, 40 + 4 + 400)
    assert b.gain == pytest.approx(0.9 - 1.0)


def test_the_table_shows_them_with_their_means():
    """Means: alone (0.4 + 1.0) / 2, together (0.7 + 0.9) / 2, gain (0.3 - 0.1) / 2; 111 + 333 bytes sent."""
    text = summary(ROWS, ALONE).table_text()
    cells = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in text.splitlines()
        if "│" in line
    }
    assert cells["a"] == ["forest", "40.0 %", "70.0 %", "+30.0", "75.0 %", "+15.0", "111 B", "222 B"]
    assert cells["b"] == ["mlp", "100.0 %", "90.0 %", "-10.0", "95.0 %", "-", "333 B", "444 B"]
    assert cells["mean"] == ["", "70.0 %", "80.0 %", "+10.0", "85.0 %", "+15.0", "444 B", "666 B"]
    # The sample standard deviation of two values is their distance / sqrt(2).
    assert cells["worst"] == ["", "40.0 %", "70.0 %", "-10.0", "75.0 %", "+15.0", "", ""]
    assert cells["spread"] == ["", "± 42.4", "± 14.1", "± 28.3", "± 14.1", "-", "", ""]
    assert "trial: accuracy on the common test set (50 samples; classification, 2 classes) after 3 rounds" in " ".join(
        text.split()
    )
    assert "1 min 15 s" in text


def away_after(last, rounds=10):
    """'b' takes part up to some round and is then away, with full marks; 'a' stays, at 50 %."""
    rows = []
    for done in range(1, rounds + 1):
        rows.append(row(done, "a", accuracy=0.5, own_accuracy=0.5, test_samples=50))
        rows.append(row(done, "b", accuracy=1.0, own_accuracy=1.0, test_samples=50))
        if done > last:
            rows[-1] = {**row(done, "b"), "present": False}
    return rows


def test_an_agent_that_was_away_at_the_end_is_marked_and_left_out_of_means():
    """Means of 'a' alone: together 50 %, not (50 % + 100 %) / 2; alone 40 %, not (40 % + 100 %) / 2."""
    shown = summary(away_after(8, 80), ALONE)
    b = shown.lines()[1]
    assert (b.rounds, b.scored, b.together) == (8, 8, 1.0)
    console = Console(width=160, record=True, file=StringIO())
    console.print(shown.table())
    text = console.export_text()
    cells = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in text.splitlines()
        if "│" in line
    }
    assert cells["a"][:4] == ["forest", "80 of 80", "40.0 %", "50.0 %"]
    assert cells["b"][:4] == ["mlp (scores of round 8)", "8 of 80", "100.0 %", "100.0 %"]
    assert cells["mean of the 1 agent at the end"][:4] == ["", "", "40.0 %", "50.0 %"]
    assert "not evaluated at the end, left out of all means: 1 of 2 agents: b (scores of round 8)" in text
    assert "better than alone on their own data: 0 of 1 agents; worse: a (-10.0 points); not measured: 1" in text
    run = scores_of(shown)
    assert (run.alone, run.together) == (0.4, 0.5)


def test_an_agent_that_missed_rounds_and_is_back_at_the_end_counts():
    rows = [{**one, "present": one["agent"] == "a" or one["round"] > 2} for one in away_after(10)]
    shown = summary(rows)
    assert [(line.rounds, line.scored) for line in shown.lines()] == [(10, None), (8, None)]
    assert "8 of 10" in shown.table_text(140)
    assert "left out" not in shown.table_text()
    assert "rounds ┃" not in summary(ROWS).table_text(140)  # no such column where everybody took part in all


def test_a_sample_of_the_test_set_is_said():
    shown = summary(ROWS[:2])
    assert shown.tested_on == 20
    assert shown.scope() == "accuracy on a random 20 of the common test set (50 samples; classification, 2 classes)"
    assert "after 1 round ┏" in words(shown)


def test_figures_of_an_earlier_round_are_not_said_to_be_of_the_last():
    shown = summary(ROWS[:4])
    assert (shown.rounds, shown.evaluated) == (2, 1)
    assert "after round 1; 2 rounds done" in words(shown)


def test_without_a_common_test_set():
    shown = summary([row(1, "a", own_accuracy=0.5, test_samples=0), row(1, "b")], test_samples=0)
    scope = "accuracy on each agent's own test data (there is no common test set; classification, 2 classes)"
    assert shown.scope() == scope
    a, b = shown.lines()
    assert (a.together, a.gain, a.own_together) == (0.5, None, 0.5)
    assert (b.together, b.own_together) == (None, None)
    assert "50.0 %" in shown.table_text()


def test_stopped_before_the_first_evaluation():
    shown = summary([])
    assert (shown.rounds, shown.evaluated, shown.tested_on) == (0, 0, 0)
    assert shown.scope() == "not evaluated yet"
    assert "not evaluated yet after 0 rounds" in words(shown)


@pytest.mark.parametrize("key", ["rmse", "own_rmse"])
def test_real_values_are_measured_by_rmse(key):
    shown = summary([row(1, "a", test_samples=50, **{key: 0.12345})])
    assert shown.metric == "rmse"
    assert "0.1235" in shown.table_text()
    assert "%" not in shown.table_text()


def test_a_gain_is_positive_when_the_error_falls():
    shown = summary([row(1, "a", rmse=0.5, test_samples=9)], [row(1, "a", rmse=0.75, test_samples=9)])
    assert shown.lines()[0].gain == 0.25
    assert "+0.25" in shown.table_text()


def test_an_agent_that_fell_behind_is_told():
    """'a' loses 30 points since round 2; 'b' loses 5, which evaluation on a part may explain; 'c' is Byzantine."""
    courses = {"a": (0.5, 0.9, 0.6), "b": (0.5, 0.95, 0.9), "c": (0.9, 0.9, 0.1)}
    rows = [
        row(done, name, accuracy=values[done - 1], test_samples=50, **({"lies": True} if name == "c" else {}))
        for done in (1, 2, 3)
        for name, values in courses.items()
    ]
    shown = summary(rows, agents=dict.fromkeys(courses, "mlp"))
    assert shown.fell_behind() == ["a: 60.0 % after 90.0 % in round 2"]
    assert "fell behind: a: 60.0 % after 90.0 % in round 2" in words(shown)
    assert summary(ROWS).fell_behind() == []


def compared(metric="accuracy", byzantine=(), **both):
    """A run of agents with these scores on their own data, alone and together."""

    def rows(which):
        return [
            row(1, name, test_samples=9, **({} if pair[which] is None else {f"own_{metric}": pair[which]}),
                **({"lies": True} if name in byzantine else {}))
            for name, pair in both.items()
        ]  # fmt: skip

    return summary(rows(1), rows(0), agents=dict.fromkeys(both, "mlp"))


def test_who_is_better_off_than_alone_on_its_own_data_is_said_first():
    """By 2.0 and 0.06 points better, by 0.04 the same to the digits shown, by 1.2 and 3 points worse."""
    shown = compared(a=(0.5, 0.52), b=(0.5, 0.5006), c=(0.5, 0.5004), lab=(0.5, 0.488), d=(0.9, 0.87), e=(None, 0.4))
    said = (
        "better than alone on their own data: 2 of 5 agents; unchanged: 1; worse: d (-3.0 points), lab (-1.2 points); "
        "not measured: 1"
    )
    assert shown.against_alone().sentence() == said
    assert f"┘ {said}" in words(shown)


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({"a": (0.5, 0.4), "b": (0.2, 0.2)}, "1 of 2 agents; unchanged: 1; worse: none"),
        ({"a": (0.5, 0.525), "b": (0.2, 0.1)}, "1 of 2 agents; worse: a (-0.025)"),
        ({"a": (0.5, float("nan")), "b": (float("inf"), 0.1)}, "1 of 2 agents; worse: a (+nan)"),
    ],
)
def test_a_lower_error_is_better_and_a_diverged_model_worse(scores, said):
    assert compared("rmse", **scores).against_alone().sentence() == f"better than alone on their own data: {said}"


def test_only_honest_agents_are_compared_and_of_many_losses_a_few_are_named():
    many = {f"a{index}": (0.5, 0.5 - index / 100) for index in range(1, 6)}
    against = compared(byzantine=("a5",), **many).against_alone()
    assert against.sentence() == (
        "better than alone on their own data: 0 of 4 honest agents; worse: a4 (-4.0 points), a3 (-3.0 points), "
        "a2 (-2.0 points), and 1 more"
    )
    assert summary(ROWS).against_alone() is None
    assert "better than alone" not in words(summary(ROWS))


def test_the_text_has_no_colours_in_a_notebook_either(monkeypatch):
    """There rich would write escape codes into whatever file it is given."""
    text = summary(ROWS, ALONE).table_text()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert summary(ROWS, ALONE).table_text() == text
    assert "\x1b" not in text


def test_of_many_agents_the_best_and_the_worst_are_shown_with_quantiles():
    names = {f"agent {i}": "mlp" for i in range(41)}
    rows = [row(1, name, 1, 1, accuracy=i / 40, test_samples=100) for i, name in enumerate(names)]
    text = summary(rows, agents=names).table_text()
    shown = [int(found) for found in re.findall(r"agent (\d+)", text)]
    assert shown == [40, 39, 38, 37, 36, 4, 3, 2, 1, 0]
    assert "... 31 more" in text
    # The scores are i / 40 for i = 0 to 40: quantile q is q itself.
    for label, value in (("10 % quantile", "10.0 %"), ("median", "50.0 %"), ("90 % quantile", "90.0 %")):
        assert value in next(line for line in text.splitlines() if label in line)
    assert "the 5 best and the 5 worst of 41" in text
    assert "41 B" in text
    few = dict(list(names.items())[:40])
    assert "agent 20" in summary(rows[:40], agents=few).table_text()


def test_of_many_agents_without_scores_the_first_are_shown():
    names = {f"agent {i}": "mlp" for i in range(50)}
    text = summary([row(1, name, 1, 1) for name in names], agents=names).table_text()
    assert "agent 9 " in text
    assert "agent 10" not in text
    assert "the first 10" in text


def test_brackets_in_a_name_are_shown_as_they_are():
    text = summary(ROWS, title="[red] run", agents={"a": "mlp [2]", "b": "mlp"}).table_text()
    assert "[red] run" in text
    assert "mlp [2]" in text


def test_runs_side_by_side():
    """Bytes: (111 + 222) + (333 + 444)."""
    runs = [summary(ROWS, ALONE), summary(ROWS[:2], title="short")]
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_table(runs))
    console.file.close()
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    assert [
        "trial",
        "fedmd",
        "2",
        "3",
        "70.0 %",
        "80.0 %",
        "+10.0",
        "85.0 %",
        "+15.0",
        "1 of 1",
        "1.1 kB",
        "1 min 15 s",
    ] in lines
    assert ["short", "fedmd", "2", "1", "-", "55.0 %", "-", "60.0 %", "-", "-", "100 B", "1 min 15 s"] in lines


def test_the_clock_of_a_run_is_beside_its_time():
    timed = summary([{**each, "time": 2.5 * each["round"]} for each in ROWS])
    assert timed.clock_seconds == 7.5
    assert summary(ROWS).clock_seconds is None
    table = comparison_table([timed, summary(ROWS)])
    assert [row[-1] for row in table.rows] == [Cell("7.5 s", 7.5), "-"]
    assert "clock" not in comparison_table([summary(ROWS)]).headings


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.2 kB"), (5_600_000, "5.6 MB"), (7.8e9, "7.8 GB"), (9e12, "9.0 TB")],
)
def test_bytes_as_people_read_them(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.7, "1 min 0 s"), (75, "1 min 15 s"), (3599.6, "1 h 0 min"), (7384, "2 h 3 min")],
)
def test_durations_as_people_read_them(seconds, text):
    assert duration_text(seconds) == text


def test_percent():
    assert percent_text(0.9561) == "95.6 %"
