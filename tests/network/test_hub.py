"""A hub and its members: who is in a round, what counts, and what is kept, whatever happens to them."""

from __future__ import annotations

import io
import json
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.network.fakes import HOOKS, Centre, Life, Net, describe

from codistill.core.errors import NetworkError
from codistill.engine.runtime import Stopped
from codistill.network.frames import FrameHeader, FrameKind, Turn
from codistill.network.log import EventLog
from codistill.network.options import Network
from codistill.wire.message import Message
from codistill.wire.state import unpack

NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def no_hooks() -> Any:
    HOOKS.clear()
    yield
    HOOKS.clear()


def sums_of(life: Life) -> list[float | None]:
    return list(life.agent.state["sums"])


def test_in_quiet_everyone_hears_the_sum_of_all() -> None:
    net, whole = Net(), describe(NAMES, 3)
    lives = [Life(net, name, whole) for name in NAMES]
    centre = Centre(net, whole)
    reports = centre.rounds(0, 3)
    centre.finish()
    assert [life.end() for life in lives] == [True] * 3
    # Each has 4 samples and sends 4 + t: the sum is 3 (4 + t).
    assert [sums_of(life) for life in lives] == [[12.0, 15.0, 18.0]] * 3
    assert [report.present for report in reports] == [NAMES] * 3
    size = len(Message.of(x=np.zeros(3)).encoded)
    assert reports[0].sent == {"hub": 3 * size, "a": size, "b": size, "c": size}
    assert not any(report.events for report in reports)


def test_an_agent_that_dies_in_a_round_is_missed_in_it_and_comes_back_with_its_state(tmp_path: Path) -> None:
    net, whole = Net(), describe(NAMES, 5)
    lives = {name: Life(net, name, whole, tmp_path / name) for name in NAMES}
    centre = Centre(net, whole, network=Network(grace=0))
    HOOKS["b", 1] = lambda me: lives["b"].wire.kill()
    reports = centre.rounds(0, 3)
    assert [report.present for report in reports] == [NAMES, ("a", "c"), ("a", "c")]
    assert "continues without 'b': it disconnected" in reports[1].events
    assert lives["b"].end() == "killed"
    HOOKS.clear()
    back = Life(net, "b", whole, tmp_path / "b")
    _until(lambda: (centre.runtime.pump(0.01), centre.runtime.statuses["b"].ready)[1])
    assert [report.present for report in centre.rounds(3, 5)] == [NAMES, NAMES]
    centre.finish()
    back.end()
    assert "joined run run1 after 3 rounds, with the state of round 1" in back.told
    assert sums_of(back) == [12.0, 21.0, 24.0]  # of round 1, and of rounds 4 and 5
    assert sums_of(lives["a"]) == [12.0, 10.0, 12.0, 21.0, 24.0]


def test_below_the_quorum_a_round_is_tried_again_from_the_state_before_it() -> None:
    net, whole = Net(), describe(NAMES, 2)
    network = Network(quorum=1.0)
    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole, network=network)
    HOOKS["c", 1] = lambda me: lives["c"].wire.kill()

    def come_back() -> None:
        lives["c"].join()
        HOOKS.clear()
        lives["d"] = Life(net, "c", whole)  # another life, without anything stored

    helper = threading.Thread(target=come_back)
    helper.start()
    reports = centre.rounds(0, 2)
    centre.finish()
    helper.join()
    assert reports[1].present == NAMES
    assert "retried: it ended without c" in reports[1].events
    assert centre.node.state["rounds"] == [0, 1]  # round 1 of the hub was taken back, and counted once
    assert lives["a"].end() is True
    assert sums_of(lives["a"]) == [12.0, 15.0]  # and so it was at the agents
    assert sums_of(lives["d"]) == [15.0]


def test_who_misses_the_deadline_is_out_of_the_round_and_in_the_next_one() -> None:
    net, whole = Net(), describe(NAMES, 3)
    network = Network(deadline=0.3)
    gate = threading.Event()
    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole, network=network)
    HOOKS["b", 1] = lambda me: gate.wait(10)
    first = centre.rounds(0, 2)
    assert [report.present for report in first] == [NAMES, ("a", "c")]
    assert "continues without 'b': this round has waited 0.3 s for it" in first[1].events
    assert not centre.runtime.is_free("b")
    gate.set()
    _until(lambda: (centre.runtime.pump(0.01), centre.runtime.is_free("b"))[1])
    assert centre.rounds(2, 3)[0].present == NAMES
    centre.finish()
    assert [life.end() for life in lives.values()] == [True] * 3
    assert sums_of(lives["b"]) == [12.0, 18.0]  # its work in round 2 did not count, and was taken back
    assert sums_of(lives["a"]) == [12.0, 10.0, 18.0]


def test_a_hub_that_was_killed_goes_on_from_its_checkpoint_with_agents_that_are_further(tmp_path: Path) -> None:
    net, whole = Net(), describe(NAMES, 4)
    lives = {name: Life(net, name, whole, tmp_path / name) for name in NAMES}
    first = Centre(net, whole)
    first.rounds(0, 2)
    saved = first.runtime.save()  # its checkpoint after round 2
    first.rounds(2, 3)
    first.wire.kill()
    _until(lambda: all(any("disconnected" in text for text in life.told) for life in lives.values()))
    second = Centre(net, whole, done=2)
    second.runtime.load(saved)
    reports = second.rounds(2, 4)
    second.finish()
    assert [life.end() for life in lives.values()] == [True] * 3
    assert [report.present for report in reports] == [NAMES, NAMES]
    assert second.node.state["rounds"] == [0, 1, 2, 3]
    assert sums_of(lives["a"]) == [12.0, 15.0, 18.0, 21.0]  # as if nobody had been killed
    assert "joined run run1 after 2 rounds, with the state of round 2" in lives["a"].told


def test_a_link_that_blinks_costs_the_round_in_hand() -> None:
    net, whole = Net(), describe(NAMES, 3)
    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole)

    def blink(me: Any) -> None:
        net.cut("b", "hub")
        net.heal("b", "hub")

    HOOKS["b", 1] = blink
    reports = centre.rounds(0, 2)
    assert reports[1].present == ("a", "c")
    _until(lambda: (centre.runtime.pump(0.01), centre.runtime.is_free("b"))[1])
    assert centre.rounds(2, 3)[0].present == NAMES
    centre.finish()
    assert [life.end() for life in lives.values()] == [True] * 3
    assert sums_of(lives["b"]) == [12.0, 18.0]


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (Message.of(x=np.full(4, 1.0)).encoded, "'x' must have shape (3)"),
        (Message.of(x=np.full(3, np.nan)).encoded, "Arrays in a message must be finite"),
        (b"\x80\x04\x95garbage", "must be a valid safetensors encoding"),
        ((2 << 30).to_bytes(8, "little") + b"{", "must be a valid safetensors encoding"),
        (b"", "must be a valid safetensors encoding"),
    ],
    ids=["wrong shape", "NaN", "pickle", "2 GB header", "nothing"],
)
def test_a_bad_message_costs_a_strike_and_three_are_the_end(spoilt: bytes, reason: str) -> None:
    net, whole = Net(), describe(NAMES, 5)

    def spoil(sender: str, receiver: str, head: FrameHeader, payload: bytes) -> tuple[FrameHeader, bytes]:
        bad = sender == "b" and head.kind is FrameKind.MESSAGE
        return head, spoilt if bad else payload

    net.spoil = spoil
    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole)
    reports = centre.rounds(0, 5)
    centre.finish()
    assert [report.present for report in reports] == [NAMES, NAMES, ("a", "c"), ("a", "c"), ("a", "c")]
    strikes = [text for text in centre.told if "strike" in text]
    assert [text[: len("'b': strike 1 of 3")] for text in strikes] == [f"'b': strike {n} of 3" for n in (1, 2, 3)]
    assert all(reason in text for text in strikes)
    assert "'b' is excluded from the rest of the run: 3 bad messages" in centre.told
    assert sums_of(lives["a"]) == [8.0, 10.0, 12.0, 14.0, 16.0]  # of a and c alone, from the first round on
    lives["a"].end()


def test_a_replayed_message_is_seen_and_not_used() -> None:
    net, whole = Net(), describe(NAMES, 3)

    def again(me: Any) -> None:
        wire = lives["b"].wire
        wire.deliver(
            "hub",
            FrameHeader(FrameKind.MESSAGE, wire.session_id, 1, centre.lines.turn),
            Message.of(x=np.full(3, 9.0)).encoded,
        )

    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole)
    HOOKS["b", 1] = again
    reports = centre.rounds(0, 3)
    centre.finish()
    assert any("strike 1 of 3: frame 1 received after frame" in text and "replay" in text for text in centre.told)
    assert [report.present for report in reports] == [NAMES] * 3
    assert sums_of(lives["a"]) == [12.0, 15.0, 18.0]
    lives["b"].end()


def test_another_version_or_other_data_are_not_let_in() -> None:
    net, whole = Net(), describe(("a",), 1)
    centre = Centre(net, whole)
    for changed, words in (
        ({"version": "0.0.1"}, "the agent 0.0.1: install the same"),
        ({"shape": [3]}, "its samples have the shape [3] instead of [2]"),
        ({"samples": -1}, "malformed join request"),
    ):
        life = Life(net, "a", whole, **changed)
        _until(lambda life=life: (centre.runtime.pump(0.01), not life.is_alive())[1])
        assert isinstance(life.end(), NetworkError)
        assert words in life.result.found
        assert any(words in text and text.startswith("'a' may not join") for text in centre.told)
    assert not centre.runtime.statuses["a"].ready


def test_what_an_agent_cannot_store_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    net, whole = Net(), describe(NAMES, 3)
    (tmp_path / "b").write_text("a file where the folder should be")
    lives = {name: Life(net, name, whole, tmp_path / name) for name in NAMES}
    centre = Centre(net, whole)
    reports = centre.rounds(0, 3)
    centre.runtime.save()
    centre.finish()
    assert [life.end() for life in lives.values()] == [True] * 3
    assert [report.present for report in reports] == [NAMES] * 3
    assert any("'b': it could not store round 1" in text and "continues from memory" in text for text in centre.told)
    assert sums_of(lives["b"]) == [12.0, 15.0, 18.0]
    stored = unpack(_newest(tmp_path / "a" / "run1"))
    assert stored["state"]["sums"] == [12.0, 15.0, 18.0]


def test_an_agent_that_is_asked_to_stop_finishes_its_round_first(tmp_path: Path) -> None:
    net, whole = Net(), describe(NAMES, 3)
    lives = {name: Life(net, name, whole, tmp_path / name) for name in NAMES}
    centre = Centre(net, whole)
    HOOKS["b", 1] = lambda me: setattr(lives["b"], "stop", True)
    reports = centre.rounds(0, 2)
    assert reports[1].present == NAMES
    assert lives["b"].end() is False
    assert unpack(_newest(tmp_path / "b" / "run1"))["state"]["sums"] == [12.0, 15.0]
    assert centre.rounds(2, 3)[0].present == ("a", "c")
    assert any("'b' leaves: its operator has stopped it" in text for text in centre.told)
    centre.finish()
    lives["a"].end()


def test_an_agent_whose_model_fails_says_so_and_leaves() -> None:
    net, whole = Net(), describe(NAMES, 2)

    def fail(me: Any) -> None:
        raise ValueError("no memory left")

    HOOKS["b", 1] = fail
    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole)
    assert [report.present for report in centre.rounds(0, 2)] == [NAMES, ("a", "c")]
    centre.runtime.pump(0.1)
    assert isinstance(lives["b"].end(), ValueError)
    # What went wrong may quote private data, so it stays with the agent's operator.
    assert any("'b' leaves: it failed (ValueError); its operator sees why" in text for text in centre.told)
    assert not any("no memory left" in text for text in centre.told)
    centre.finish()
    lives["a"].end()


def test_a_report_about_others_is_a_strike_and_does_not_count() -> None:
    net, whole = Net(), describe(NAMES, 2)

    def spoil(sender: str, receiver: str, head: FrameHeader, payload: bytes) -> tuple[FrameHeader, bytes]:
        if sender == "b" and head.kind is FrameKind.CONTROL and b"report" in payload:
            text = json.dumps({"do": "answer", "number": 1, "report": {
                "sent": {"a": 10**9}, "received": {}, "steps": {}, "exchanges": {}, "refused": [],
                "remarks": [], "measures": []}})  # fmt: skip
            return head, Message({}, {"json": text}).encoded
        return head, payload

    net.spoil = spoil
    lives = [Life(net, name, whole) for name in NAMES]
    centre = Centre(net, whole)
    report = centre.rounds(0, 1)[0]
    centre.finish()
    assert report.present == ("a", "c")
    assert report.sent["a"] < 1000
    assert any("strike 1 of 3: A report must be about its sender" in text for text in centre.told)
    lives[0].end()


def test_the_start_waits_for_everyone_unless_patience_ends() -> None:
    net, whole = Net(), describe(NAMES, 1)
    lives = [Life(net, name, whole) for name in NAMES[:2]]
    centre = Centre(net, whole, network=Network(patience=1.2))
    began = time.monotonic()
    assert centre.rounds(0, 1)[0].present == ("a", "b")
    assert time.monotonic() - began > 1.1
    assert "waiting for c (2 of 3 joined)" in centre.told
    centre.finish()
    lives[0].end()


def test_a_hub_that_is_asked_to_stop_while_it_waits_stops() -> None:
    net, whole = Net(), describe(NAMES, 1)
    centre = Centre(net, whole)
    centre.runtime.stopping = lambda: True
    with pytest.raises(Stopped):
        centre.rounds(0, 1)


def test_at_the_end_a_hub_waits_a_while_for_those_who_are_away() -> None:
    net, whole = Net(), describe(NAMES, 2)
    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole, network=Network(linger=20))
    HOOKS["c", 1] = lambda me: lives["c"].wire.kill()
    centre.rounds(0, 2)
    assert lives["c"].end() == "killed"
    HOOKS.clear()
    threading.Timer(0.3, lambda: lives.update(c=Life(net, "c", whole))).start()
    began = time.monotonic()
    centre.runtime.finish(complete=True)
    assert 0.2 < time.monotonic() - began < 15
    assert any("done; waiting up to 20 s to tell c" in text for text in centre.told)
    assert [life.end() for life in lives.values()] == [True] * 3
    centre.runtime.close()


def test_who_comes_a_second_time_waits_until_its_first_process_is_gone() -> None:
    net, whole = Net(), describe(("a", "b"), 3)
    lives = {name: Life(net, name, whole) for name in ("a", "b")}
    centre = Centre(net, whole)
    centre.rounds(0, 1)
    second = Life(net, "a", whole)
    _until(lambda: (centre.runtime.pump(0.01), any("second time" in text for text in centre.told))[1])
    assert centre.rounds(1, 2)[0].present == ("a", "b")
    assert sums_of(lives["a"]) == [8.0, 10.0]
    lives["a"].wire.kill()
    _until(lambda: (centre.runtime.pump(0.01), centre.runtime.is_free("a"))[1])
    assert centre.rounds(2, 3)[0].present == ("a", "b")
    assert sums_of(second) == [12.0]  # nothing was stored, so it began anew
    centre.finish()
    assert second.end() is True
    assert sum("second time" in text for text in centre.told) == 1


@pytest.mark.parametrize("retried", [True, False])
def test_a_hub_that_comes_back_to_an_earlier_turn_is_heard(retried: bool, tmp_path: Path) -> None:
    """Its turn may be before one that agents have seen: after a round that was tried again, or rare checkpoints."""
    net, whole = Net(), describe(NAMES, 4)
    lives = {name: Life(net, name, whole, tmp_path / name) for name in NAMES}
    first = Centre(net, whole, network=Network(quorum=1.0), checkpoints=(1,))
    first.rounds(0, 1)
    saved = first.runtime.save()
    if retried:
        HOOKS["c", 1] = _once(lambda me: (net.cut("c", "hub"), net.heal("c", "hub")))
        assert "retried: it ended without c" in first.rounds(1, 2)[0].events
    else:
        first.rounds(1, 3)
    first.wire.kill()
    _until(lambda: all(any("hub disconnected" in text for text in life.told[-1:]) for life in lives.values()))
    second = Centre(net, whole, done=1)
    second.runtime.load(saved)
    second.rounds(1, 4)
    second.finish()
    assert [life.end() for life in lives.values()] == [True] * 3
    assert [sums_of(life) for life in lives.values()] == [[12.0, 15.0, 18.0, 21.0]] * 3


def test_a_hub_that_comes_back_before_its_first_checkpoint_finds_its_agents_at_the_beginning() -> None:
    net, whole = Net(), describe(NAMES, 4)
    lives = {name: Life(net, name, whole) for name in NAMES}
    first = Centre(net, whole, checkpoints=())
    first.rounds(0, 3)
    first.wire.kill()
    _until(lambda: all(any("hub disconnected" in text for text in life.told[-1:]) for life in lives.values()))
    second = Centre(net, whole)
    second.rounds(0, 4)
    second.finish()
    assert [life.end() for life in lives.values()] == [True] * 3
    assert sums_of(lives["a"]) == [12.0, 15.0, 18.0, 21.0]


def test_what_an_agent_learnt_between_checkpoints_is_stored_with_the_next_one(tmp_path: Path) -> None:
    net, whole = Net(), describe(NAMES, 4)
    lives = {name: Life(net, name, whole, tmp_path / name) for name in NAMES}
    centre = Centre(net, whole, checkpoints=(2,))
    centre.runtime.run(0, NAMES)
    centre.runtime.run(1, ("a", "b"))  # c is not sampled in the round of the checkpoint
    centre.runtime.save()
    assert unpack(_newest(tmp_path / "c" / "run1"))["state"]["sums"] == [12.0]
    centre.finish()
    lives["c"].end()


def test_a_checkpoint_waits_until_every_agent_has_kept_its_own_state(tmp_path: Path) -> None:
    net, whole = Net(), describe(NAMES, 1)
    lives = {name: Life(net, name, whole, tmp_path / name) for name in NAMES}
    keep = lives["b"].member._keep
    lives["b"].member._keep = lambda *given, **how: (time.sleep(0.5), keep(*given, **how))[1]  # type: ignore[method-assign]
    centre = Centre(net, whole)
    centre.rounds(0, 1)
    assert not (tmp_path / "b" / "run1").exists()
    centre.runtime.save()
    assert unpack(_newest(tmp_path / "b" / "run1"))["state"]["sums"] == [12.0]
    centre.finish()
    lives["b"].end()


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), NAMES])
def test_scores_are_judged_by_the_terms_and_not_by_what_others_sent(names: tuple[str, ...]) -> None:
    """The terms ask for accuracies (two classes): of two agents, whoever is listed first, 'b' alone is struck."""
    net, whole = Net(), describe(names, 1)
    lives = {name: Life(net, name, whole) for name in names}
    for name, life in lives.items():
        sent = {"own_rmse": 1.0} if name == "b" else {"own_accuracy": 0.5}
        life.member._evaluate = lambda *given, sent=sent, **how: ({}, {"scores": sent})  # type: ignore[method-assign]
    centre = Centre(net, whole)
    centre.rounds(0, 1)
    scores = centre.runtime.evaluate(None)
    centre.finish()
    assert scores == {name: {} if name == "b" else {"own_accuracy": 0.5} for name in names}
    strikes = [text for text in centre.told if "strike" in text]
    assert strikes == [
        "'b': strike 1 of 3: The scores of this run must be: accuracy. Found: own_rmse. "
        "The sender must use the same version of codistill."
    ]
    lives["a"].end()


def test_an_agent_sends_only_scores_of_the_kind_that_the_terms_ask_for() -> None:
    """Real-valued targets with as many columns as there are classes: only the agents know that they are none."""
    net, whole = Net(), describe(("a",), 1)
    life, centre = Life(net, "a", whole), Centre(net, whole)
    centre.rounds(0, 1)
    assert life.member._told({"own_rmse": 1.0}) == {}
    assert life.member._told({"own_accuracy": 1.0}) == {"own_accuracy": 1.0}
    centre.finish()
    life.end()


def test_a_quorum_that_cannot_be_reached_any_more_is_an_error() -> None:
    net, whole = Net(), describe(NAMES, 2)
    lives = [Life(net, name, whole) for name in NAMES]
    centre = Centre(net, whole, network=Network(quorum=1.0))
    centre.rounds(0, 1)
    centre.lines.sessions.exclude("b", "3 bad messages")
    with pytest.raises(NetworkError, match="only 2 are left; excluded: b"):
        centre.rounds(1, 2)
    centre.finish()
    lives[0].end()


def test_messages_that_nobody_waits_for_do_not_pile_up_and_cost_strikes() -> None:
    net, whole = Net(), describe(NAMES, 4)
    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole, network=Network(message_limit=1 << 16))
    centre.rounds(0, 1)
    centre.lines.begin(Turn(1), NAMES)
    for _ in range(100):
        lives["b"].wire.send(("hub",), FrameKind.MESSAGE, Turn(1), bytes(60_000))
    lives["c"].wire.send(("hub",), FrameKind.MESSAGE, Turn(10**6), b"x")
    held = sum(len(frame.payload) for frame in centre.lines.arrived())
    assert held == 4 * 60_000  # four of the largest size, and no more
    strikes = [text for text in centre.told if "strike" in text]
    assert [text.partition(": strike ")[0] for text in strikes] == ["'b'"] * 3 + ["'c'"]
    assert "more messages than this node can hold" in strikes[0]
    assert "a message for a turn that has not begun" in strikes[3]
    assert not centre.lines._early
    centre.lines.finish()
    lives["a"].wire.send(("hub",), FrameKind.MESSAGE, Turn(1), bytes(10))
    assert centre.lines.arrived() == []  # the turn is over
    centre.finish()
    lives["a"].end()


def test_messages_of_one_byte_are_counted_too() -> None:
    """While the hub waits for 'a', 'b' sends ten thousand messages of one byte: it is out after a few hundred."""
    net, whole = Net(), describe(NAMES, 2)
    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole, network=Network(message_limit=1 << 16))
    flooded = threading.Event()

    def flood(me: Any) -> None:
        for _ in range(10_000):
            lives["b"].wire.send(("hub",), FrameKind.MESSAGE, Turn(0), b"x")
        flooded.set()

    HOOKS["b", 0] = flood
    HOOKS["a", 0] = lambda me: flooded.wait(20) and time.sleep(0.2)
    (report,) = centre.rounds(0, 1)
    assert report.present == ("a", "c")
    assert centre.lines.sessions.excluded == {"b": "3 bad messages"}
    assert any("more messages than this node can hold" in text for text in centre.told)
    centre.finish()
    lives["a"].end()


def test_answers_that_nobody_asked_for_do_not_put_off_the_deadline() -> None:
    net, whole = Net(), describe(NAMES, 2)
    lives = {name: Life(net, name, whole) for name in NAMES}
    centre = Centre(net, whole, network=Network(deadline=0.5))
    stop = threading.Event()

    def chatter(me: Any) -> None:
        while not stop.wait(0.1):
            lives["b"].member._connections.command("hub", do="answer", number=10**6)

    HOOKS["b", 1] = chatter
    began = time.monotonic()
    assert [report.present for report in centre.rounds(0, 2)] == [NAMES, ("a", "c")]
    assert time.monotonic() - began < 6
    stop.set()
    centre.finish()
    lives["a"].end()


def test_what_others_say_cannot_forge_a_line_of_the_log() -> None:
    net, whole = Net(), describe(("a",), 1)
    centre = Centre(net, whole)
    life = Life(net, "a", whole, version="1\n2026 hub: all is well\x1b[2J")
    _until(lambda: (centre.runtime.pump(0.01), not life.is_alive())[1])
    told: list[str] = []
    journal = EventLog("hub")
    with redirect_stderr(io.StringIO()) as shown:
        for text in centre.told:
            journal.tell(text)
    told = shown.getvalue().splitlines()
    assert len(told) == len(centre.told)
    assert "\x1b" not in shown.getvalue()


def test_commands_that_make_no_sense_do_nothing_and_three_are_the_end_of_trust() -> None:
    net, whole = Net(), describe(("a",), 2)
    life = Life(net, "a", whole)
    centre = Centre(net, whole)
    centre.rounds(0, 1)
    for content in (
        {"do": "run", "number": 5, "turn": [10**9, 0], "present": [], "samples": 1},
        {"do": "keep", "number": 6, "round": "../../etc", "store": True},
        {"do": "exec", "number": 7},
    ):
        centre.lines.command("a", **content)
    _until(lambda: sum("strike" in text for text in life.told) == 3)
    assert sums_of(life) == [4.0]
    assert "3 bad messages" in life.end().found


def _once(do: Any) -> Any:
    left = [do]
    return lambda me: left and left.pop()(me)


def _newest(folder: Path) -> bytes:
    return sorted(folder.glob("state-*"))[-1].read_bytes()[32:]


def _until(true: Any, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
