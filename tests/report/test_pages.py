import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from codistill.core.errors import RecipeError, StorageError
from codistill.report import graphs
from codistill.report.pages import write_comparison, write_report
from codistill.results.summary import Summary


def make(
    agents=3, rounds=4, *, names=None, metric="accuracy", alone=True, counts=False, during=1000, sent=40, **options
):
    """A run with scores that rise by round and differ by agent."""
    names = names or [f"agent {index}" for index in range(agents)]

    def row(done, index, score):
        row = {"round": done, "agent": names[index], "present": True, "sent": sent, "received": 3 * sent}
        return row | {
            metric: score,
            f"own_{metric}": score / 2,
            "test_samples": 1000 if done == rounds else during,
        }

    together = [
        row(done, index, 0.4 + 0.5 * done / rounds - 0.3 * index / len(names))
        for done in range(1, rounds + 1)
        for index in range(len(names))
    ]
    settings = {
        "title": "a run", "protocol": "fedmd", "agents": dict.fromkeys(names, "linear"), "rows": together,
        "alone_rows": [row(rounds, index, 0.5) for index in range(len(names))] if alone else None,
        "counts": np.arange(2 * len(names)).reshape(-1, 2) if counts else None, "class_names": ("cat", "dog"),
        "seconds": 75.0, "test_samples": 1000, "facts": {},
    }  # fmt: skip
    return Summary(**settings | options)


class Page(HTMLParser):
    """What a page says, and its elements."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text("utf-8")
        self.elements, self.texts, self._open = [], {}, []
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "input"):
            self._open.append((tag, []))

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        for _, texts in self._open:
            texts.append(data)

    def handle_endtag(self, tag):
        opened, texts = self._open.pop()
        assert opened == tag, "elements must be closed in their order"
        self.texts.setdefault(tag, []).append("".join(texts).strip())

    def having(self, attribute):
        return [attributes for _, attributes in self.elements if attribute in attributes]

    def table(self):
        """The table's rows, the heading first."""
        cells, width = self.texts["th"] + self.texts["td"], len(self.texts["th"])
        return [cells[start : start + width] for start in range(0, len(cells), width)]


@pytest.fixture
def drawn_report(tmp_path):
    return lambda summary: Page(write_report(summary, tmp_path / "report.html"))


@pytest.fixture
def report(no_charts, drawn_report):
    """A report for tests of its text."""
    return drawn_report


@pytest.fixture
def drawn_comparison(tmp_path):
    return lambda *summaries: Page(write_comparison(summaries, tmp_path / "comparison.html"))


@pytest.fixture
def comparison(no_charts, drawn_comparison):
    """A comparison for tests of its text."""
    return drawn_comparison


def two_agents():
    """Alone 50 % and 60 %, together 90 % and 70 %; own mix half as much; 2 rounds of 1 kB and 3 kB each."""

    def row(done, agent, **scores):
        return {"round": done, "agent": agent, "present": True, "sent": 1000, "received": 3000} | scores

    def scores(value):
        return {"accuracy": value, "own_accuracy": value / 2, "test_samples": 1000}

    return Summary(
        title="a run", protocol="fedmd", agents={"a": "linear", "b": "forest"},
        rows=[row(1, "a"), row(1, "b"), row(2, "a", **scores(0.9)), row(2, "b", **scores(0.7))],
        alone_rows=[row(2, "a", **scores(0.5)), row(2, "b", **scores(0.6))],
        counts=None, class_names=("cat", "dog"), seconds=75.0, test_samples=1000,
    )  # fmt: skip


@pytest.fixture(scope="module")
def page_of_two(tmp_path_factory):
    return Page(write_report(two_agents(), tmp_path_factory.mktemp("two") / "report.html"))


@pytest.fixture(scope="module")
def page_of_twenty(tmp_path_factory):
    return Page(write_report(make(20, 1, counts=True), tmp_path_factory.mktemp("twenty") / "report.html"))


def test_the_headline_is_derived_from_the_rows(page_of_two):
    """Mean alone (50 + 60) / 2, together (90 + 70) / 2; 2 agents x 2 rounds x 4 kB."""
    page = page_of_two
    assert dict(zip(page.texts["dt"], page.texts["dd"], strict=True)) == {
        "agents better than alone on their own data": "2 of 2",
        "mean accuracy on the common test set, alone → together": "55.0 % → 80.0 %",
        "mean gain, percentage points": "+25.0",
        "protocol: 2 agents, 2 rounds": "fedmd",
        "4.0 kB sent, 12.0 kB received": "16.0 kB",
        "time": "1 min 15 s",
    }
    assert "No agent is worse than alone on its own data." in page.texts["p"]


def test_agents_that_are_worse_than_alone_are_named(report):
    """Own scores alone 25 %, together 45, 40 and 35 % before the change; agent 2 then has 20 %."""
    summary = make()
    summary.rows[-1]["own_accuracy"] = 0.2
    page = report(summary)
    assert page.texts["dd"][0] == "2 of 3"
    assert "Worse than alone on their own data: agent 2 (-5.0 points)." in page.texts["p"]


def test_the_table_is_derived_from_the_rows(page_of_two):
    assert page_of_two.table() == [
        [
            "agent",
            "model",
            "alone",
            "together",
            "gain",
            "own data alone",
            "own data together",
            "own gain",
            "sent",
            "received",
        ],
        ["a", "linear", "50.0 %", "90.0 %", "+40.0", "25.0 %", "45.0 %", "+20.0", "2.0 kB", "6.0 kB"],
        ["b", "forest", "60.0 %", "70.0 %", "+10.0", "30.0 %", "35.0 %", "+5.0", "2.0 kB", "6.0 kB"],
        ["mean (bytes: sum)", "", "55.0 %", "80.0 %", "+25.0", "27.5 %", "40.0 %", "+12.5", "4.0 kB", "12.0 kB"],
        ["worst", "", "50.0 %", "70.0 %", "+10.0", "25.0 %", "35.0 %", "+5.0", "", ""],
        ["spread", "", "± 7.1", "± 14.1", "± 21.2", "± 3.5", "± 7.1", "± 10.6", "", ""],
    ]


def test_tables_are_sorted_by_numbers_not_by_their_text(page_of_two):
    keys = [float(cell["data-by"]) for cell in page_of_two.having("data-by")]
    assert keys[:8] == pytest.approx([0.5, 0.9, 0.4, 0.25, 0.45, 0.2, 2000, 6000])


def test_every_score_says_what_it_was_measured_on(page_of_two):
    notes = " ".join(page_of_two.texts["p"])
    assert (
        notes.count("ccuracy on the common test set (1,000 samples; classification, 2 classes)") == 4
    )  # headline, two charts, table
    assert "own test data, or on the common test set weighted by its class counts" in notes
    assert "lowest to the highest agent" in notes


@pytest.mark.parametrize("write", ["drawn_report", "drawn_comparison"])
def test_nothing_is_fetched(write, request, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_CIRCLES", 3)  # so that circles become an image
    page = request.getfixturevalue(write)(make(counts=True))
    assert not re.search("https?://", page.source)
    assert not re.search(r"@import|url\((?!#)", page.source)
    assert not page.having("src")
    links = [attributes["href"] for attributes in page.having("href")]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert {tag for tag, _ in page.elements}.isdisjoint({"link", "iframe", "object", "embed", "base"})
    assert ("data:image/png" in page.source) == (write == "drawn_report")


NASTY = ["<script>alert(1)</script>", "</title><b>", "a&amp;b", "\"'><img src=x>", "$x_$", "{0} %s \\", "東京 🏥"]
UNPRINTABLE = "\x07\x00\ud800\n"


@pytest.mark.parametrize("write", ["drawn_report", "drawn_comparison"])
def test_everything_is_escaped(write, request):
    write = request.getfixturevalue(write)

    def elements(words):
        everything = " ".join(words)
        page = write(
            make(
                rounds=1, names=words, counts=True, title=everything, protocol=everything,
                agents=dict.fromkeys(words, everything), class_names=words[:2],
                facts={everything: everything, "more": {everything: everything}},
            )
        )  # fmt: skip
        return Counter(tag for tag, _ in page.elements), page

    names = [*NASTY, UNPRINTABLE]
    expected, _ = elements([f"name {index}" for index in range(len(names))])
    found, page = elements(names)
    assert found == expected
    assert page.texts["h1"] == [" ".join(names[:-1]) + " \x07\x00?"] or "runs compared" in page.texts["h1"][0]


def test_names_are_written_as_they_are(drawn_report):
    page = drawn_report(make(names=NASTY, counts=True))
    assert [row[0] for row in page.table()[1:-3]] == NASTY
    assert page.texts["label"] == ["all agents", *NASTY]
    assert set(NASTY[1:]) <= set(page.texts["text"])
    assert "<script>alert(1)</s…" in page.texts["text"]


def test_runs_are_written_as_they_are(comparison):
    page = comparison(*(make(1, 1, title=name, protocol=name) for name in NASTY))
    assert [row[:2] for row in page.table()[1:]] == [[name, name] for name in NASTY]
    assert page.texts["label"] == NASTY


def test_without_facts_there_is_nothing_to_expand(page_of_two):
    assert "details" not in page_of_two.texts


def test_facts_are_shown_as_they_are(report):
    recipe = "[data]\nname = 'digits'  # <b>"
    page = report(make(facts={"seed": 7, "versions": {"codistill": "0.1.0"}, "recipe": recipe}))
    assert page.texts["pre"] == ["seed: 7\nversions:\n  codistill: 0.1.0\nrecipe:\n  [data]\n  name = 'digits'  # <b>"]


@pytest.mark.long
def test_another_process_gives_the_same_bytes(tmp_path):
    script = "import pathlib, test_pages as t; t.write_report(t.make(2, 2, counts=True), pathlib.Path(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", f"import sys; {script}", tmp_path / "other.html"],
        check=True, cwd=Path(__file__).parent, env=os.environ | {"PYTHONHASHSEED": "5"},
    )  # fmt: skip
    here = write_report(make(2, 2, counts=True), tmp_path / "here.html").read_bytes()
    assert (tmp_path / "other.html").read_bytes() == here


def test_each_agent_has_a_switch(page_of_twenty):
    page = page_of_twenty
    selectors = [box["value"] for box in page.having("type") if box["type"] == "checkbox"]
    assert selectors == ["", *(f"[data-series=agent-{index}]" for index in range(20))]
    lines = page.having("data-series")
    assert [line["data-series"] for line in lines] == [f"agent-{index}" for index in range(20)]
    assert all(line["class"] == "hidden" for line in lines)
    assert set(page.texts["title"]) >= {f"agent {index}" for index in range(20)}


def test_charts_do_not_share_names(page_of_twenty):
    page = page_of_twenty
    names = [attributes["id"] for attributes in page.having("id")]
    assert len(names) == len(set(names))
    used = [attributes["href"][1:] for attributes in page.having("href")]
    used += [re.fullmatch(r"url\(#(.+)\)", attributes["clip-path"])[1] for attributes in page.having("clip-path")]
    assert used
    assert set(used) <= set(names)


def test_colours_are_known_to_the_style_sheet(page_of_twenty):
    page = page_of_twenty
    used = set(re.findall(r"var\((--\w+)\)", page.source))
    assert {"--ink", "--blue", "--grid"} <= used <= set(re.findall(r"(--\w+):", page.source))
    drawn = " ".join(attributes["style"] for attributes in page.having("style"))
    assert "var(--ink)" in drawn
    # These would be lost on a dark background.
    assert not re.search("#000000|#ffffff|#1f2328|#e6e8ec|#ebebeb", drawn)


def test_text_stays_text(page_of_two):
    assert "lowest to highest agent" in page_of_two.texts["text"]


def test_as_many_samples_throughout_need_no_mention(page_of_two):
    assert "random" not in " ".join(page_of_two.texts["p"])


def test_fewer_samples_during_the_run_are_mentioned(report):
    used = "Evaluations during the run used 200 random test samples, the last one 1,000"
    assert used in " ".join(report(make(during=200)).texts["p"])


def test_a_run_that_was_cut_short_says_so(report):
    summary = make(rounds=4, during=200)
    cut = Summary(**vars(summary) | {"rows": [row for row in summary.rows if row["round"] < 4]})
    notes = " ".join(report(cut).texts["p"])
    assert "Accuracy on a random 200 of the common test set (1,000 samples; classification, 2 classes)" in notes
    assert "The agents alone were measured on 1,000 test samples, together on 200." in notes


def test_rounds_that_were_not_evaluated(report):
    summary = make(rounds=4)
    for row in summary.rows:
        if row["round"] == 4:
            del row["accuracy"], row["own_accuracy"], row["test_samples"]
    assert "Last evaluated in round 3 of 4." in " ".join(report(summary).texts["p"])


def test_absent_agents_are_named(report):
    summary = make(3, 4)
    for row in summary.rows[:4]:  # all three in the first round, the first one in the second
        row["present"] = False
    page = report(summary)
    assert "Absent in some rounds: agent 0 (2 of 4), agent 1 (1 of 4), agent 2 (1 of 4)." in page.texts["p"]
    assert page.source.count("Absent") == 1


def test_agents_that_were_always_absent(report):
    summary = make(3, 4)
    for row in summary.rows:
        if row["agent"] == "agent 1":
            row["present"] = False
            del row["accuracy"], row["own_accuracy"], row["test_samples"]
    page = report(summary)
    assert page.table()[2][2:9] == ["0 of 4", "50.0 %", "-", "-", "25.0 %", "-", "-"]
    notes = " ".join(page.texts["p"])
    assert "Of 3 agents, 2 to 2 could be evaluated." in notes
    assert "1 of 3 agents lack a score alone or together." in notes


def test_many_absent_agents_are_counted(report):
    summary = make(10, 2)
    for row in summary.rows[:8]:
        row["present"] = False
    assert "Absent in some rounds: 8 of 10 agents, 8 of 20 times." in report(summary).texts["p"]


def test_without_a_baseline_the_bars_are_left_out(report):
    page = report(make(alone=False))
    assert "There is nothing to compare: this run has no scores of the agents alone." in page.texts["p"]
    assert "gains" not in [attributes["id"] for attributes in page.having("id")]
    assert page.texts["dd"] == ["80.0 %", "fedmd", "1.9 kB", "1 min 15 s"]  # the mean of 90, 80 and 70


@pytest.mark.parametrize("rows", ["no scores", "no rows"])
def test_a_run_without_evaluation(rows, report):
    summary = make(alone=False, test_samples=0)
    for row in summary.rows:
        del row["accuracy"], row["own_accuracy"], row["test_samples"]
    if rows == "no rows":
        summary.rows.clear()
    page = report(summary)
    assert "Not evaluated: no common test set." in page.texts["p"]
    assert page.texts["p"].count("The agents were not evaluated during this run.") == 2
    assert page.table()[1][2:8] == ["-"] * 6


def test_own_test_data_only(report):
    summary = make(test_samples=0)
    for row in summary.rows + summary.alone_rows:
        del row["accuracy"]
        row["test_samples"] = 0
    page = report(summary)
    assert page.texts["dd"][1] == "25.0 % → 40.0 %"
    assert "mean accuracy on their own data, alone → together" in page.texts["dt"]
    assert "random" not in " ".join(page.texts["p"])


def test_real_valued_targets(drawn_report):
    page = drawn_report(make(metric="rmse"))
    assert page.texts["dd"][:3] == ["0 of 3", "0.5 → 0.8", "-0.3"]
    assert page.table()[1][2:5] == ["0.5", "0.9", "-0.4"]
    assert "RMSE per round" in page.texts["h2"]
    assert "RMSE on the common test set (lower is better)" in page.texts["text"]
    assert "%" not in " ".join(page.texts["td"] + page.texts["text"])
    worse = [cell for cell in page.having("data-by") if cell.get("class") == "worse"]
    # A larger error is worse: three agents, their mean and the worst of them, on common and own data.
    assert len(worse) == 10


def test_a_diverged_run(report):
    summary = make(metric="rmse")
    for row in summary.rows[-3:]:
        row["rmse"] = float("nan")
    page = report(summary)
    assert page.table()[1][3] == "nan"
    assert "gains" not in [attributes["id"] for attributes in page.having("id")]


def test_one_agent_and_one_round(report):
    page = report(make(1, 1))
    assert "protocol: 1 agent, 1 round" in page.texts["dt"]
    assert "label" not in page.texts


def with_times(summary):
    return replace(summary, rows=[row | {"time": 0.5 * row["round"]} for row in summary.rows])


def with_counts(summary, steps=5, exchanges=1):
    rows = [row | {"steps": steps, "exchanges": exchanges} for row in summary.rows]
    return replace(summary, rows=rows)


def test_scores_against_steps_and_exchanges_are_of_runs_that_counted_them(report, comparison):
    heading = "Accuracy against exchanges and gradient steps"
    assert heading in report(with_counts(make(2, 3))).texts["h2"]
    for other in (make(2, 3), with_counts(make(2, 3), 0, 0)):
        assert heading not in report(other).texts["h2"]
    silent = with_counts(make(2, 3, title="silent"), steps=4, exchanges=0)
    page = comparison(with_counts(make(2, 3)), silent, make(2, 3, title="older"))
    assert {"Mean accuracy against exchanges", "Mean accuracy against gradient steps"} <= set(page.texts["h2"])
    assert "Without exchanges, drawn as a level line: silent. Not counted, and so not drawn: older." in page.texts["p"]
    assert "Not counted, and so not drawn: older." in page.texts["p"]
    assert not [text for text in comparison(make(2, 3), make(2, 3)).texts["h2"] if "steps" in text]


def test_scores_against_time_are_of_runs_with_a_clock(report, comparison):
    assert "Accuracy against time" in report(with_times(make(2, 3))).texts["h2"]
    assert "Accuracy against time" not in report(make(2, 3)).texts["h2"]
    page = comparison(make(2, 3, title="plain"), with_times(make(2, 3, title="timed")))
    assert "Mean accuracy against time" in page.texts["h2"]
    assert "Without a clock, and so not drawn: plain." in page.source
    assert "Mean accuracy against time" not in comparison(make(2, 3), make(2, 3)).texts["h2"]


def test_no_messages(report):
    assert "The agents exchanged nothing." in report(make(sent=0)).texts["p"]


def test_of_very_many_agents_a_page_shows_the_best_and_the_worst(report):
    page = report(make(501, rounds=1, alone=False))
    rows = [text for text in page.texts["td"] if re.fullmatch(r"agent \d+", text)]
    # Scores fall with the number of an agent: 50 at each end, the best first.
    assert rows == [f"agent {index}" for index in (*range(50), *range(451, 501))]
    assert any("the 50 best and the 50 worst of 501" in note for note in page.texts["p"])
    assert "show the 100 best and worst agents (point at a line to read its name)" in page.texts["label"]
    # 0.9 - 0.3 i / 501, of which the median is that of i = 250.
    assert f"{100 * (0.9 - 0.3 * 250 / 501):.1f} %" in page.texts["td"]


def test_many_agents(drawn_report):
    page = drawn_report(make(100, 2, counts=True))
    assert len(page.table()) == 1 + 100 + 3
    notes = " ".join(page.texts["p"])
    assert "Of 100 agents, the 30 with the largest gain or loss are shown." in notes
    assert "The first 60 of 100 agents are shown." in notes
    assert len(page.source) < 300_000
    selectors = [box["value"] for box in page.having("type") if box["type"] == "checkbox"]
    assert selectors == ["[data-series^=agent-]"], "one switch for all"
    assert len(page.having("data-series")) == 100


def test_a_report_is_small(drawn_report):
    assert len(drawn_report(make(2, 50)).source) < 150_000


@pytest.mark.usefixtures("no_charts")
def test_folders_are_made_and_nothing_else_is_left(tmp_path):
    path = write_report(make(), tmp_path / "new" / "folder" / "report.html")
    assert [path] == list((tmp_path / "new" / "folder").iterdir())


@pytest.mark.usefixtures("no_charts")
def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        write_report(make(), tmp_path / "file" / "report.html")


def test_runs_are_compared_in_a_table(comparison):
    """Together (90 + 80 + 70) / 3 and 90; 3 x 4 x 160 bytes, and 1 x 2 x 16,000."""
    other = make(1, 2, title="other", protocol="fedavg", alone=False, sent=4_000)
    assert comparison(make(), other).table() == [
        [
            "run",
            "protocol",
            "agents",
            "rounds",
            "mean alone",
            "mean together",
            "gain",
            "better than alone",
            "bytes",
            "time",
        ],
        ["a run", "fedmd", "3", "4", "50.0 %", "80.0 %", "+30.0", "3 of 3", "1.9 kB", "1 min 15 s"],
        ["other", "fedavg", "1", "2", "-", "90.0 %", "-", "-", "32.0 kB", "1 min 15 s"],
    ]


def test_runs_can_be_switched(drawn_comparison):
    page = drawn_comparison(make(), make(title="other"))
    boxes = [box for box in page.having("type") if box["type"] == "checkbox"]
    assert [box["value"] for box in boxes] == ["[data-series=run-0]", "[data-series=run-1]"]
    assert all("checked" in box for box in boxes)
    lines = page.having("data-series")
    assert [line["data-series"] for line in lines] == ["run-0", "run-1"] * 2  # per round and against bytes
    assert not any("class" in line for line in lines)


def test_runs_that_were_not_measured_alike(comparison):
    fewer = make(title="fewer", rounds=1, test_samples=5000)
    notes = " ".join(comparison(make(), fewer).texts["p"])
    assert "a run: accuracy on the common test set (1,000 samples; classification, 2 classes)" in notes
    assert (
        "fewer: accuracy on a random 1,000 of the common test set (5,000 samples; classification, 2 classes)" in notes
    )
    assert "not measured in the same way" not in " ".join(comparison(make(), make()).texts["p"])


def test_runs_of_different_kinds_get_charts_of_their_own(comparison):
    silent = make(title="silent", sent=0)
    page = comparison(make(), silent, make(metric="rmse", title="real", sent=0), make(rounds=0, title="none"))
    assert page.texts["h2"] == [
        "Mean accuracy per round", "Mean accuracy against bytes", "Mean RMSE per round", "Mean RMSE against bytes",
        "All runs",
    ]  # fmt: skip
    assert "Without messages, drawn as a level line: silent." in page.texts["p"]
    assert "The agents exchanged nothing." in page.texts["p"]


def test_runs_without_evaluation(comparison):
    assert "These runs were not evaluated." in comparison(make(rounds=0, alone=False)).texts["p"]


def test_nothing_cannot_be_compared(tmp_path):
    with pytest.raises(RecipeError, match="at least one run"):
        write_comparison([], tmp_path / "comparison.html")
