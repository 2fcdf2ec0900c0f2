"""The audit log of an agent: nothing is released before it is logged, and a changed log is noticed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codistill.core.errors import CheckpointError, PolicyError, StorageError
from codistill.network import policy
from codistill.network.frames import FrameKind, Turn
from codistill.network.policy import (
    ANYTHING,
    START,
    AuditedTransport,
    AuditLog,
    ChainReader,
    Policy,
    Usage,
    audited,
    summarise,
)
from codistill.wire.codec import encode
from codistill.wire.compression import Compression, Residue
from codistill.wire.message import Message

Z = Message.of(z=np.arange(6, dtype=np.float32).reshape(2, 3), samples=40).encoded


OpenLog = Callable[[Path], AuditLog]


class Wire:
    """Takes what is sent, and notes how many lines were on disk then."""

    me, others = "north", ("hub",)

    def __init__(self, log: Path | None = None) -> None:
        self.sent: list[tuple[Sequence[str], bytes]] = []
        self.lines_on_disk: list[int] = []
        self._log = log

    def bar(self, name: str, why: str) -> None:
        self.sent.append(([name], why.encode()))

    def send(self, receivers: Sequence[str], kind: FrameKind, turn: Turn, payload: bytes = b"") -> None:
        self.sent.append((receivers, payload))
        if self._log is not None:
            self.lines_on_disk.append(self._log.read_bytes().count(b"\n"))


@pytest.fixture
def open_log() -> Iterator[OpenLog]:
    """Opens logs, and closes them after the test."""
    with ExitStack() as stack:

        def opened(folder: Path) -> AuditLog:
            log = AuditLog(folder)
            stack.callback(log.close)
            return log

        yield opened


def control(**content: Any) -> bytes:
    return encode({}, {"json": json.dumps(content)})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A log with a start, a join and twelve messages of three rounds."""
    log = AuditLog(tmp_path)
    log.append("started", policy={})
    log.append("joined", run="a1", terms={"protocol": {"name": "fedmd"}})
    wire = AuditedTransport(Wire(), log, ANYTHING)  # type: ignore[arg-type]
    for number in range(12):
        wire.send(["hub"], FrameKind.MESSAGE, Turn(number // 4), Z)
    log.close()
    return log.path


def entries(path: Path) -> list[dict[str, Any]]:
    return [entry for _, entry in ChainReader(path)]


# --- what is logged -------------------------------------------------------------------------------


def test_a_release_is_on_disk_before_it_is_sent_and_says_what_it_was(tmp_path: Path, open_log: OpenLog) -> None:
    log = open_log(tmp_path)
    wire = Wire(log.path)
    AuditedTransport(wire, log, ANYTHING).send(["a", "b"], FrameKind.MESSAGE, Turn(4, 1), Z)  # type: ignore[arg-type]
    assert wire.sent == [(["a", "b"], Z)]
    assert wire.lines_on_disk == [1]
    (entry,) = entries(log.path)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "number": 1, "event": "released", "to": ["a", "b"], "what": "protocol message", "values": ["samples"],
        "arrays": {"z": "float32 2x3"}, "round": 5, "attempt": 1, "bytes": len(Z),
        "sha256": hashlib.sha256(Z).hexdigest(), "previous": START,
    }  # fmt: skip
    assert log.path.stat().st_mode & 0o777 == 0o600


def test_a_frame_without_content_is_sent_and_not_logged(tmp_path: Path, open_log: OpenLog) -> None:
    log, wire = open_log(tmp_path), Wire()
    AuditedTransport(wire, log, ANYTHING).send(["hub"], FrameKind.END, Turn(0))  # type: ignore[arg-type]
    assert (len(wire.sent), log.lines) == (1, 0)


def test_what_a_node_is_told_when_its_links_are_closed_is_logged(tmp_path: Path, open_log: OpenLog) -> None:
    log, wire = open_log(tmp_path), Wire()
    AuditedTransport(wire, log, ANYTHING).bar("south", "three bad messages")  # type: ignore[arg-type]
    (entry,) = entries(log.path)
    assert (entry["what"], entry["to"], entry["bytes"]) == ("refusal", ["south"], 18)
    assert wire.sent == [(["south"], b"three bad messages")]


def test_all_else_is_the_transports_own(tmp_path: Path, open_log: OpenLog) -> None:
    wire = Wire()
    assert audited(wire, open_log(tmp_path), ANYTHING).others == ("hub",)  # type: ignore[arg-type]
    assert audited(wire, None, ANYTHING) is wire  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "payload", "expected"),
    [
        (FrameKind.HELLO, control(do="hello", samples=3, model="x", public=None), ("hello", ["model", "samples"], {})),
        (FrameKind.CONTROL, control(do="answer", number=4, trouble=None), ("confirmation", [], {})),
        (
            FrameKind.CONTROL,
            control(do="answer", number=4, report={"sent": {"a": 1}, "remarks": [], "measures": [["a", "m", 1.0]]}),
            ("report", ["measures", "sent"], {}),
        ),
        (FrameKind.CONTROL, control(do="answer", number=4, scores={"accuracy": 0.5}), ("scores", ["accuracy"], {})),
        (
            FrameKind.CONTROL,
            encode({"mean": np.zeros((2, 2))}, {"json": '{"do":"answer","number":1,"scores":{"accuracy":1.0}}'}),
            ("scores and outputs", ["accuracy"], {"mean": "float64 2x2"}),
        ),
        (FrameKind.MESSAGE, encode({"m": np.zeros(5, "u1")}, {"kind": "onnx"}), ("model", ["kind"], {"m": "uint8 5"})),
        (FrameKind.MESSAGE, b"no message", ("other", [], {})),
    ],
    ids=["hello", "confirmation", "report", "scores", "outputs", "model", "unreadable"],
)  # fmt: skip
def test_a_payload_in_words(kind: FrameKind, payload: bytes, expected: tuple[Any, ...]) -> None:
    assert tuple(summarise(kind, payload).values()) == expected


def test_a_compressed_message_in_words() -> None:
    compression = Compression(bits=8)
    data = compression.encode({"z": np.random.default_rng(0).normal(size=(40, 10)).astype("f4")}, {"n": 1}, Residue())
    found = summarise(FrameKind.MESSAGE, data)
    assert found == {"what": "protocol message", "values": ["n"], "arrays": {"z": "float32 40x10, compressed, 8 bits"}}


def test_no_released_value_is_in_the_log(tmp_path: Path, open_log: OpenLog) -> None:
    log = open_log(tmp_path)
    secret = control(do="hello", samples=987654321, model="SecretForest")
    AuditedTransport(Wire(), log, ANYTHING).send(["hub"], FrameKind.HELLO, Turn(-1), secret)  # type: ignore[arg-type]
    text = log.path.read_text()
    assert "987654321" not in text
    assert "SecretForest" not in text


# --- a disk that is full ----------------------------------------------------------------------------


def test_nothing_is_released_that_cannot_be_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_log: OpenLog
) -> None:
    log, wire = open_log(tmp_path), Wire()
    transport = AuditedTransport(wire, log, ANYTHING)  # type: ignore[arg-type]
    transport.send(["hub"], FrameKind.MESSAGE, Turn(0), Z)

    def full(file: Any, data: bytes) -> None:
        file.write(data[:50])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(policy, "write_all", full)
        with pytest.raises(StorageError, match="the disk is full") as caught:
            transport.send(["hub"], FrameKind.MESSAGE, Turn(0), Z)
    assert "nothing is released before it is in the audit log" in str(caught.value)
    assert len(wire.sent) == 1
    transport.send(["hub"], FrameKind.MESSAGE, Turn(0), Z)  # there is space again: the half line is not in the way
    assert len(entries(log.path)) == len(wire.sent) == 2


# --- restarts ---------------------------------------------------------------------------------------


def test_a_restart_continues_the_chain_and_the_counts(written: Path, open_log: OpenLog) -> None:
    before = ChainReader(written)
    list(before)
    log = open_log(written.parent)
    assert (log.lines, log.head) == (before.lines, before.head) == (14, log.head)
    assert (log.usage.rounds, log.usage.rounds_of_day, log.usage.bytes_of_day) == (3, 3, 12 * len(Z))
    log.append("started")
    transport = AuditedTransport(Wire(), log, ANYTHING)  # type: ignore[arg-type]
    transport.send(["hub"], FrameKind.MESSAGE, Turn(2), Z)  # the last round once more: that counts
    assert log.usage.rounds == 4
    assert len(entries(written)) == 16


def test_a_line_cut_by_a_kill_was_never_sent_and_is_removed_by_the_next_start(written: Path, open_log: OpenLog) -> None:
    with written.open("ab") as file:
        file.write(b'{"number":15,"time":"20')
    chain = ChainReader(written)
    assert (len(list(chain)), chain.cut) == (14, 23)
    log = open_log(written.parent)
    assert log.cut == 23
    log.append("started", cut=log.cut)
    assert [entry["number"] for entry in entries(written)] == list(range(1, 16))


def test_a_new_day_counts_from_zero() -> None:
    usage = Usage()
    released = {"event": "released", "to": ["hub"], "round": 1, "attempt": 0, "bytes": 10}
    usage.add({"time": "2026-11-16T23:59:59Z", **released})
    usage.add({"time": "2026-11-16T23:59:59Z", "event": "stopped", "rule": "bytes_per_day", "limit": 10})
    assert (usage.rounds_of_day, usage.bytes_of_day, usage.stopped) == (1, 10, {"bytes_per_day": 10})
    usage.add({"time": "2026-11-17T00:00:00Z", **released, "round": 2})
    assert (usage.rounds, usage.rounds_of_day, usage.bytes_of_day, usage.stopped) == (2, 1, 10, {})


# --- a log that was changed -------------------------------------------------------------------------


def forged(lines: list[bytes]) -> list[bytes]:
    return [*lines[:5], lines[5].replace(f'"bytes":{len(Z)}'.encode(), b'"bytes":1'), *lines[6:]]


def forged_with_its_number(lines: list[bytes]) -> list[bytes]:
    other = json.loads(lines[6]) | {"to": ["nobody"]}
    return [*lines[:6], json.dumps(other).encode(), *lines[7:]]


CHANGES = {
    "forged": (forged, "line 7 does not continue line 6"),
    "forged as new JSON": (forged_with_its_number, "line 8 does not continue line 7"),
    "removed": (lambda lines: [*lines[:5], *lines[6:]], "line 6 has the number 7"),
    "first removed": (lambda lines: lines[1:], "line 1 has the number 2"),
    "swapped": (lambda lines: [*lines[:5], lines[6], lines[5], *lines[7:]], "line 6 has the number 7"),
    "repeated": (lambda lines: [*lines[:6], lines[5], *lines[6:]], "line 7 has the number 6"),
    "cut in the middle": (
        lambda lines: [*lines[:5], lines[5][:40], *lines[6:]],
        "line 6 is not a line of an audit log",
    ),
    "empty line": (lambda lines: [*lines[:5], b"", *lines[5:]], "line 6 is not a line of an audit log"),
    "not a table": (lambda lines: [*lines[:5], b"[1]", *lines[5:]], "line 6 is not a line of an audit log"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_line_that_does_not_fit_is_named(change: str, written: Path, open_log: OpenLog) -> None:
    alter, found = CHANGES[change]
    lines = written.read_bytes().splitlines()
    written.write_bytes(b"".join(line + b"\n" for line in alter(lines)))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match="is corrupted") as caught:
        list(ChainReader(written))
    assert found in caught.value.found
    with pytest.raises(CheckpointError):  # an agent does not go on with it either
        open_log(written.parent)


def test_lines_cut_off_at_the_end_change_the_head_only(written: Path) -> None:
    before = ChainReader(written)
    list(before)
    written.write_bytes(b"".join(written.read_bytes().splitlines(keepends=True)[:-2]))
    after = ChainReader(written)
    list(after)
    assert (after.lines, after.head != before.head) == (12, True)


# --- limits of a policy, which are counted in the log -------------------------------------------------


def test_a_day_of_two_rounds_ends_with_the_first_message_of_a_third(tmp_path: Path, open_log: OpenLog) -> None:
    log, wire = open_log(tmp_path), Wire()
    transport = AuditedTransport(wire, log, Policy(rounds_per_day=2))  # type: ignore[arg-type]
    for turn in (Turn(0), Turn(0), Turn(0, 1)):  # a hub that repeats a round uses up the day
        transport.send(["hub"], FrameKind.MESSAGE, turn, Z)
    with pytest.raises(PolicyError, match="rounds_per_day = 2") as caught:
        transport.send(["hub"], FrameKind.MESSAGE, Turn(1), Z)
    assert caught.value.rule == "rounds_per_day"
    transport.send(["hub"], FrameKind.CONTROL, Turn(1), control(do="leaving", why="its policy"))
    assert len(wire.sent) == 4
    assert [entry["event"] for entry in entries(log.path)][3:] == ["stopped", "released"]
    log.close()
    again = open_log(tmp_path)
    assert Policy(rounds_per_day=2).waits(again.usage) == "rounds_per_day = 2"
    assert Policy(rounds_per_day=3).waits(again.usage) is None  # its operator has raised the limit


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (Policy(largest_message=len(Z) - 1), "largest_message"),
        (Policy(bytes_per_day=2 * len(Z) - 1), "bytes_per_day"),
        (Policy(rounds=0), "rounds"),
    ],
    ids=["largest_message", "bytes_per_day", "rounds"],
)
def test_a_release_beyond_a_limit_is_not_sent(policy: Policy, rule: str) -> None:
    wire = Wire()
    with pytest.raises(PolicyError, match=f"{rule} = ") as caught:
        AuditedTransport(wire, None, policy).send(["a", "b"], FrameKind.MESSAGE, Turn(0), Z)  # type: ignore[arg-type]
    assert (caught.value.rule, wire.sent) == (rule, [])


def test_a_release_within_the_limits_is_sent() -> None:
    wire = Wire()
    policy = Policy(largest_message=len(Z), bytes_per_day=len(Z), rounds=1, rounds_per_day=1)
    AuditedTransport(wire, None, policy).send(["hub"], FrameKind.MESSAGE, Turn(0), Z)  # type: ignore[arg-type]
    assert len(wire.sent) == 1


def test_a_log_that_may_not_be_written_stops_the_start(tmp_path: Path, open_log: OpenLog) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a file where a folder is expected"):
        open_log(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]
