"""What an operator sees while a run goes on."""

import re

import pytest

from codistill.engine import observers as module
from codistill.engine.observers import History, Progress
from codistill.results.records import RoundEnded, RunFinished, RunStarted


def record(done, events=(), seconds=0.1, **scores):
    rows = [{"round": done, "agent": name, "present": True, "sent": 600, "received": 400, **scores} for name in "ab"]
    return RoundEnded(done, rows, list(events), seconds)


def begun(protocol, rounds, start=0):
    progress = Progress()
    progress.started(RunStarted(protocol, ("a", "b"), rounds, start))
    return progress


@pytest.fixture
def clock(monkeypatch):
    """Time as the test says it is."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_where_there_is_no_terminal(clock, capsys):
    """Two agents of 600 + 400 bytes; after 2 s for the first of 5 rounds, 4 more take 8 s."""
    progress = begun("fedmd", 5)
    progress.round_ended(record(1, seconds=2, accuracy=0.5, test_samples=9))
    progress.finished(RunFinished(1, 5, "stopped", 2.0))
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "fedmd: round 1/5 · 2 agents · accuracy 0.500 · 2.0 kB · 8 s left\n"


def test_only_agents_that_are_present_are_counted(clock, capsys):
    progress = begun("fedmd", 3)
    progress.round_ended(record(1))
    for done, present in ((2, 1), (3, 2)):
        clock[0] += 6
        ended = record(done)
        for row in ended.rows[present:]:
            row.update(present=False, sent=0, received=0)
        progress.round_ended(ended)
    assert re.findall(r"· (.*agents?) ·", capsys.readouterr().err) == ["2 agents", "1 of 2 agents", "2 agents"]


def test_a_log_stays_short(clock, capsys):
    """The first and the last round, and between them one line in 5 seconds."""
    progress = begun("fedmd", 12)
    for done in range(1, 13):
        clock[0] += 1
        progress.round_ended(record(done))
    assert re.findall(r"round (\d+)/12", capsys.readouterr().err) == ["1", "6", "11", "12"]


def test_a_resumed_run_goes_on_from_where_it_was(clock, capsys):
    """Two rounds in 6 s since the start at 7: three more take 9 s."""
    progress = begun("fedmd", 12, 7)
    clock[0] += 1
    progress.round_ended(record(8, seconds=1))
    clock[0] += 5
    progress.round_ended(record(9, seconds=5))
    assert capsys.readouterr().err.splitlines()[-1] == "fedmd: round 9/12 · 2 agents · 4.0 kB · 9 s left"


def test_the_last_score_is_shown_until_there_is_a_newer_one(clock, capsys):
    progress = begun("fedmd", 3)
    progress.round_ended(record(1, rmse=0.25, test_samples=9))
    clock[0] += 6
    progress.round_ended(record(2))
    assert all("rmse 0.250" in line for line in capsys.readouterr().err.splitlines())


def test_own_scores_alone_show_no_score(clock, capsys):
    begun("alone", 2).round_ended(record(1, own_accuracy=0.5, test_samples=0))
    assert capsys.readouterr().err == "alone: round 1/2 · 2 agents · 2.0 kB · 0 s left\n"


def test_events_are_whole_lines_and_not_too_many(clock, capsys):
    event = "round 1: 'hub' continues without a message of '[a]': The message was lost on the way (injected fault)."
    progress = begun("fedmd", 2)
    progress.round_ended(record(1, events=[event] * 5))
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == [event] * 3 + ["round 1: 2 more such events"]


def test_on_a_terminal_there_is_one_live_line(clock, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    progress = begun("fedmd", 2)
    progress.round_ended(record(1, accuracy=0.5, test_samples=9))
    progress._bar.refresh()
    progress.finished(RunFinished(1, 2, "stopped", 2.0))
    shown = capsys.readouterr().err
    assert "fedmd: round 1/2" in re.sub(r"\x1b\[[0-9;?]*\w", "", shown)
    assert shown.count("\n") < 6


def test_history_keeps_every_row():
    history = History()
    assert history.rows == []
    history.round_ended(record(1, accuracy=0.5, test_samples=9))
    history.round_ended(record(2))
    assert history.rows[-1]["round"] == 2
    assert [row["round"] for row in history.rows] == [1, 1, 2, 2]
