"""Attacks on a hub and on an agent, over mutual TLS on this machine.

docs/attacks.md describes the outcomes and names these tests. Hub and agents are forked from this process, and attackers
are processes of their own (`rogue.py`).
`python -m trials.attacks` runs the same with 10,000 random inputs of each kind.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from tests.network.fakes import FakeTransport, Net, agent, describe
from threadpoolctl import threadpool_limits

from codistill.certs.authority import Authority
from codistill.cli import main
from codistill.core.errors import CodistillError, MessageError
from codistill.core.spec import RunSpec
from codistill.engine.runtime import warm_up
from codistill.experiments.networked import read_agent_file
from codistill.federation import joining
from codistill.network import options
from codistill.network.agent import RemoteAgent
from codistill.network.commands import checked_report, checked_scores, checked_steps, checked_view
from codistill.network.connections import Connections, Sessions
from codistill.network.frames import HEADER_SIZE, FrameHeader, FrameKind, Malformed, ReceivedFrame, Turn
from codistill.network.options import Network
from codistill.network.terms import description_under, hello_of, terms_of
from codistill.protocols import PROTOCOLS
from codistill.topology import HUB
from codistill.wire.codec import encode

ROGUE = Path(__file__).parent / "rogue.py"
NOISE = int(os.environ.get("CODISTILL_NOISE", "300"))  # random inputs of each kind
LIMIT = 1 << 16  # network.message_limit
ROUNDS = 6
LONG_AGO = datetime.now(UTC) - timedelta(days=9)
PATIENCE = 90.0  # seconds, on a machine that is busy with other things


class Scene:
    """A folder with an authority and a recipe, and the processes of a federation and its attackers."""

    def __init__(
        self, folder: Path, rogues: tuple[str, ...] = (), rounds: int = 6, honest: tuple[str, ...] = ("a", "b"),
        tables: dict[str, Any] | None = None, **network: Any,
    ) -> None:  # fmt: skip
        """`tables`: of the recipe, instead of those here."""
        self.folder, self.authority = folder, Authority(folder / "certs")
        self.port = _free_port()
        self.processes: dict[str, BaseProcess] = {}
        self.rogues: list[subprocess.Popen[str]] = []
        folder.mkdir(exist_ok=True)
        recipe = {
            "seed": 1,
            "data": {"name": "digits", "samples": 1200, "public": 12, "test_samples": 20},
            "agents": [{"name": "a", "learner": "logistic"}]
            + [{"name": name, "learner": "naive_bayes"} for name in (*honest[1:], *rogues)],
            "protocol": {"name": "fedmd", "rounds": rounds},
            "evaluation": {"alone": True},
            "runtime": {"kind": "simulation"},
            "network": {
                "message_limit": LIMIT,
                "lease": 2.0,
                "linger": 0.0,
                "grace": 0.0,
                "deadline": PATIENCE / 3,
                **network,
            },
            **(tables or {}),
        }
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(tomli_w.dumps(recipe))
        Authority(self.authority.folder, now=LONG_AGO).create(days=30)
        self.authority.issue("hub", "127.0.0.1", days=3)
        for name in (*honest, *rogues):
            self.authority.issue("agent", name, days=3)

    def certs(self, name: str) -> Path:
        return self.folder / "certs" / ("127.0.0.1" if name == "hub" else name)

    def hello(self) -> dict[str, Any]:
        """What an honest agent would say."""
        mine = read_agent_file(self.recipe, "a")
        return hello_of(mine.agent, mine.public)

    def start(self, name: str) -> None:
        """The hub or an agent, as the command line starts it."""
        own = ["--certs", str(self.certs(name)), "--log-format", "json", "--quiet"]
        there = f"127.0.0.1:{self.port}"
        if name == "hub":
            arguments = ["hub", str(self.recipe), "--listen", there, "--out", str(self.folder / "run"), *own]
        else:
            arguments = ["join", str(self.recipe), "--hub", there, "--state", str(self.folder / "states" / name), *own]
        self._spawn(name, arguments)

    def _spawn(self, name: str, arguments: list[str]) -> None:
        (self.folder / f"{name}.log").touch()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_command, args=(arguments, self.folder / f"{name}.log"), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forking with several threads
            process.start()
        self.processes[name] = process

    def start_peer(self, name: str, port: int, **dial: int) -> None:
        """A peer, as the command line starts it; `dial`: the ports of neighbours to connect to."""
        peers = [f"--peer={other}=127.0.0.1:{there}" for other, there in dial.items()]
        state = ["--state", str(self.folder / "states" / name), "--certs", str(self.certs(name))]
        listen = ["--listen", f"127.0.0.1:{port}", "--log-format", "json", "--quiet"]
        self._spawn(name, ["join", str(self.recipe), *listen, *state, *peers])

    def rogue(self, kind: str, **spec: Any) -> None:
        """Start a process of attackers; its outcomes are in its log."""
        path = self.folder / f"{kind}.json"
        path.write_text(json.dumps({"kind": kind, "port": self.port, "noise": NOISE, **spec}))
        with (self.folder / f"{kind}.log").open("w") as out, (self.folder / f"{kind}.trouble").open("w") as trouble:
            command = [sys.executable, str(ROGUE), str(path)]
            self.rogues.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=trouble))

    def outcome(self, kind: str) -> dict[str, Any]:
        """All outcomes of a process of attackers so far."""
        told: dict[str, Any] = {}
        for line in (self.folder / f"{kind}.log").read_text().rpartition("\n")[0].splitlines():
            for who, what in json.loads(line).items():
                told[who] = {**told.get(who, {}), **what} if isinstance(what, dict) else what
        return told

    def told(self, kind: str, who: str) -> dict[str, Any]:
        """Wait for the outcome of an attacker."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if who in (found := self.outcome(kind)):
                return found
            time.sleep(0.05)
        raise AssertionError((self.folder / f"{kind}.log").read_text())

    def log(self, name: str) -> list[str]:
        """The events that a node has logged."""
        text = (self.folder / f"{name}.log").read_text()
        assert "Traceback" not in text, text
        return [json.loads(line)["event"] for line in text.rpartition("\n")[0].splitlines() if line[:1] == "{"]

    def said(self, name: str, what: str) -> bool:
        return any(what in event for event in self.log(name))

    def wait_until(self, name: str, what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.said(name, what):
            assert time.monotonic() < end, self.log(name)
            time.sleep(0.05)

    def end(self, *names: str) -> dict[str, int | None]:
        """Wait for processes to end by themselves; their exit codes, None for one that has not."""
        end = time.monotonic() + PATIENCE
        hub = self.processes.get("hub")
        while any(self.processes[name].is_alive() for name in names) and time.monotonic() < end:
            if hub is not None and hub.exitcode:
                break  # the others will not end either
            time.sleep(0.05)
        return {name: self.processes[name].exitcode for name in names}

    def close(self) -> None:
        for rogue in self.rogues:
            rogue.kill()
            rogue.communicate()
        for process in self.processes.values():
            process.kill()
            process.join()


def _command(arguments: list[str], log: Path) -> None:
    with log.open("w") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
        sys.stdout = sys.stderr = out
        warnings.resetwarnings()  # those of a user, not of the tests
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))  # as a service has
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        threadpool_limits(limits=1)
        code = 1
        try:
            code = main(arguments)
        except BaseException:
            traceback.print_exc()
        out.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    """Makes a scene, and ends what is left of it."""
    monkeypatch.setattr("codistill.report.pages.write_report", lambda summary, path: path.write_text("a report"))
    warm_up()  # once here, for all that are forked
    scenes: list[Scene] = []

    def made(*rogues: str, **options: Any) -> Scene:
        scenes.append(Scene(tmp_path / "scene", rogues, **options))
        return scenes[-1]

    yield made
    for scene in scenes:
        scene.close()


# --- from outside: the results are equal to the bit ----------------------------------------------------------


REVOKED = "The certificate of agent 'a' must be valid. Found: generation 1 is revoked"
STRANGER = "'stranger' is not on the roster of 'hub'"


@pytest.mark.long
def test_outsiders_change_nothing(make: Callable[..., Scene], tmp_path: Path) -> None:
    """No certificate, a foreign, expired, revoked or unexpected one, random bytes, and idle connections."""
    scene = make(rounds=15 if NOISE < 1000 else 60)
    kinds = {"none": None, **{kind: str(tmp_path / kind) for kind in ("foreign", "expired", "revoked", "stranger")}}
    _certificates(scene, tmp_path)
    assert main(["run", str(scene.recipe), "--quiet", "--out", str(tmp_path / "alone")]) == 0

    scene.start("hub")
    scene.wait_until("hub", "waiting for 2 agents")
    scene.rogue("outsiders", certs=kinds, hello=scene.hello(), over=str(tmp_path / "over"))
    scene.told("outsiders", "trying")
    scene.rogue("crowd", callers=300, joined=str(tmp_path / "joined"))
    assert scene.told("crowd", "crowd")["crowd"] == {"callers": 300}
    scene.start("a")
    scene.start("b")
    scene.wait_until("hub", "'b' joined")
    (tmp_path / "joined").touch()
    assert scene.end("hub", "a", "b") == {"hub": 0, "a": 0, "b": 0}
    (tmp_path / "over").touch()
    outcome = scene.told("outsiders", "done")

    assert outcome["none"]["alert"] == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    assert outcome["foreign"]["alert"] in ("TLSV1_ALERT_UNKNOWN_CA", "TLSV1_ALERT_DECRYPT_ERROR")
    assert outcome["expired"]["alert"] == "SSLV3_ALERT_CERTIFICATE_EXPIRED"
    # The last two are signed by the authority: they are told why they are not accepted, and nothing else.
    refusals = {kind: outcome[kind]["refusals"] for kind in ("foreign", "expired", "revoked", "stranger")}
    assert refusals == {"foreign": [], "expired": [], "revoked": [REVOKED], "stranger": [STRANGER]}
    assert not any(outcome[kind]["heard"] for kind in refusals)
    assert not scene.said("hub", "strike")
    refused = [event for event in scene.log("hub") if event.startswith("refused")]
    named = {f"refused a caller at 127.0.0.1: {REVOKED}", f"refused 'stranger' at 127.0.0.1: {STRANGER}"}
    assert named <= {*refused}  # the operator sees who has called; the others by their address
    assert {event.partition(" (")[0] for event in refused} - named == {
        "refused a caller at 127.0.0.1: no TLS handshake"
    }
    assert len(refused) == len({*refused}) <= 20
    assert [event for event in scene.log("hub") if "'a'" in event and event not in refused] == ["'a' joined"]
    assert scene.told("crowd", "noise")["noise"]["sent"] > 0
    rows = [_rows(folder) for folder in (scene.folder / "run", tmp_path / "alone")]
    assert rows[0] == rows[1]
    assert (scene.folder / "run" / "log.txt").read_bytes() == (tmp_path / "alone" / "log.txt").read_bytes()


def _rows(folder: Path) -> list[dict[str, Any]]:
    """All metrics, without what an agent of another organisation does not tell."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "own_accuracy"} for row in rows]


def _certificates(scene: Scene, folder: Path) -> None:
    """Certificates of agent 'a' that are not, or no longer, its own; each with the federation's authority beside it."""
    Authority(scene.authority.folder, now=LONG_AGO).renew("a", days=1)
    shutil.copytree(scene.certs("a"), folder / "expired")
    scene.authority.renew("a", days=3)
    shutil.copytree(scene.certs("a"), folder / "revoked")
    scene.authority.revoke("a")
    scene.authority.issue("agent", "a", days=3)
    scene.authority.issue("agent", "stranger", days=3)
    shutil.copytree(scene.certs("stranger"), folder / "stranger")
    others = Authority(folder / "others")
    others.create(days=3)
    others.issue("agent", "a", days=3)
    shutil.copytree(folder / "others" / "a", folder / "foreign")
    shutil.copy(scene.certs("a") / "ca.crt", folder / "foreign")


# --- from inside: the run continues without them --------------------------------------------------------------

# The reason of each strike in the hub's log; None: no strike, as nothing invalid reaches the hub.
MORE_THAN_IT_CAN_HOLD = "more messages than this node can hold"
INSIDERS: dict[str, str | None] = {
    "nan": "NaN or infinity in 'f'",
    "shape": "'f' must have shape (12, 10). Found: (10, 12)",
    "claim": "A message must be a valid safetensors encoding",
    "pickle": "A message must be a valid safetensors encoding",
    "large": f"a message of {LIMIT + 1:,} bytes, above the limit of {LIMIT:,}",
    "replay": "a replay",
    "headers": "not a valid frame",
    "commands": "a malformed command",
    "messages": "A message must be a valid safetensors encoding",
    "flood": MORE_THAN_IT_CAN_HOLD,
    "hoard": "a message for a turn that has not begun",
    "chatter": "an unexpected answer",
    "report": "A report must be about its sender. Found: ['a']",
    "scores": "Scores must be within their bounds. Found: accuracy = 7.0",
    "unknown": "an unknown command 'shutdown'",
    "forge": None,
    "old": None,
    "text": None,
    "turncoat": None,
}


@pytest.mark.long
def test_agents_that_misbehave_are_excluded_and_the_run_continues(make: Callable[..., Scene]) -> None:
    names = tuple(INSIDERS)
    scene = make(*names, quorum=0.1)
    _start_with_insiders(scene, names)
    assert scene.told("insiders", "turncoat")["turncoat"] == {"at": "waiting"}
    scene.authority.revoke("turncoat")
    scene.wait_until("hub", "'turncoat' is disconnected")  # in the middle of a round
    (scene.folder / "revoked").touch()
    assert scene.end("hub", "a", "b") == {"hub": 0, "a": 0, "b": 0}

    log = scene.log("hub")
    for name, reason in INSIDERS.items():
        strikes = [event for event in log if event.startswith(f"'{name}': strike")]
        barred = [event for event in log if event.startswith(f"'{name}' is excluded from the rest of the run")]
        if reason is None:
            assert not strikes, name
            continue
        assert [event[: len(f"'{name}': strike 1")] for event in strikes] == [
            f"'{name}': strike {number}" for number in (1, 2, 3)
        ]
        # Who sends very many messages may be excluded for that, before they are decoded.
        reasons = (reason, MORE_THAN_IT_CAN_HOLD) if name in ("messages", "flood") else (reason,)
        assert any(each in event for event in strikes for each in reasons), (name, strikes)
        assert len(barred) == 1, name
    assert sum("'turncoat' is disconnected: The certificate of agent 'turncoat' must be valid" in e for e in log) == 1
    assert "'old' may not join: the hub runs codistill" in "\n".join(log)
    assert scene.told("insiders", "old")["old"]["do"] == "refused"
    assert scene.told("insiders", "forge")["forge"] == {
        name: [f"the name '{name}' in a connection of 'forge'", True] for name in ("a", "hub")
    }
    assert not any(event.startswith(("'a': strike", "'b': strike", "'a' may not", "'b' may not")) for event in log)
    assert not (scene.folder / "canary").exists(), "nothing is unpickled"

    rows = [json.loads(line) for line in (scene.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == ROUNDS * (2 + len(names))
    assert all(row["present"] and 0 <= row["accuracy"] <= 1 for row in rows if row["agent"] in ("a", "b"))
    out = {name for name, reason in INSIDERS.items() if reason} | {"turncoat"}
    assert not any(row["present"] for row in rows if row["round"] == ROUNDS and row["agent"] in out)
    assert all(line.startswith("round ") for line in (scene.folder / "run" / "log.txt").read_text().splitlines())
    assert "'text': well?round 1: 'a' is out ? ?[2J" in (scene.folder / "run" / "log.txt").read_text()
    assert all(event.isprintable() for event in log)
    assert not any(row["present"] for row in rows if row["agent"] == "hoard"), "excluded in its first round"


# Those whose messages are refused, and with each a federation of two; all of them in `trials.attacks`.
PAIRS = tuple(name for name, reason in INSIDERS.items() if reason) if NOISE >= 1000 else ("shape", "commands", "scores")


@pytest.mark.long
@pytest.mark.parametrize("kind", PAIRS)
def test_with_two_sites_the_attacker_is_excluded_and_the_honest_one_goes_on(
    make: Callable[..., Scene], kind: str
) -> None:
    """There is no majority of one against one."""
    scene = make(kind, honest=("a",), quorum=0.5)
    _start_with_insiders(scene, (kind,), honest=("a",))
    assert scene.end("hub", "a") == {"hub": 0, "a": 0}
    log = scene.log("hub")
    assert any(event.startswith(f"'{kind}' is excluded from the rest of the run") for event in log), log
    assert not any("'a': strike" in event or "'a' is excluded" in event for event in log)
    rows = _rows(scene.folder / "run")
    assert [row["present"] for row in rows if row["agent"] == "a"] == [True] * ROUNDS


def _start_with_insiders(scene: Scene, names: tuple[str, ...], honest: tuple[str, ...] = ("a", "b")) -> None:
    for name in ("hub", *honest):
        scene.start(name)
    scene.rogue(
        "insiders", certs={name: str(scene.certs(name)) for name in names}, hello=scene.hello(), limit=LIMIT,
        canary=str(scene.folder / "canary"), revoked=str(scene.folder / "revoked"),
    )  # fmt: skip


# --- join requests without end, and messages one by one -------------------------------------------------------

# What a member says, again and again: welcomed each time, or refused each time.
REQUESTS: dict[str, dict[str, Any]] = {"welcomed": {}, "refused": {"version": "0.0.1"}}


def check_flood(scene: Scene, node: str) -> None:
    """Its strikes and its exclusion by name; how many of its requests were answered."""
    outcome = scene.told("joins", "joins")["joins"]
    assert not outcome["open"], "the node that it floods closes its link"
    at_once = max(options._JOINS, Network().silence)
    assert outcome["sent"] > 2 * at_once
    # Those that the bucket holds and those that it gets while the flood goes on; two before the flood, to join.
    assert 0 < outcome["answered"] <= at_once + options._JOINS_PER_SECOND * outcome["seconds"] + 2
    log = [event for event in scene.log(node) if event.startswith("'flood'") and "joined" not in event]
    found = [event for event in log if "strike" in event or "excluded" in event]
    strikes = [f"'flood': strike {number} of 3: more join requests than a node needs" for number in (1, 2, 3)]
    assert found == [*strikes, "'flood' is excluded from the rest of the run: 3 bad messages"]
    assert not any(event.startswith(("'a': strike", "'b': strike")) for event in scene.log(node))
    assert len(log) < 25, "lines of one cause are bounded"


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_flood_of_join_requests_costs_strikes_whatever_is_answered(make: Callable[..., Scene], kind: str) -> None:
    """A hub as it is: each answer is sent, and none of them pays for the next request."""
    scene = make("flood", quorum=0.5, lease=10.0)
    for name in ("hub", "a", "b"):
        scene.start(name)
    scene.rogue(
        "joins", name="flood", to="hub", certs=str(scene.certs("flood")), hello=scene.hello() | REQUESTS[kind],
        seconds=PATIENCE,
    )  # fmt: skip
    assert scene.end("hub", "a", "b") == {"hub": 0, "a": 0, "b": 0}
    check_flood(scene, "hub")
    rows = _rows(scene.folder / "run")
    assert [row["present"] for row in rows if row["agent"] == "a"] == [True] * ROUNDS
    assert [row["present"] for row in rows if row["agent"] == "b"] == [True] * ROUNDS
    assert not any(row["present"] for row in rows if row["agent"] == "flood")


@pytest.mark.parametrize("terms", [{}, {"seed": 99}])
def test_a_flood_of_join_requests_at_a_peer(make: Callable[..., Scene], terms: dict[str, Any]) -> None:
    """The graph b - a - flood: 'a' answers the first request of a session, and with other terms it refuses each one."""
    graph = {"kind": "edges", "edges": [["a", "b"], ["a", "flood"]]}
    tables = {"protocol": {"name": "d_distillation", "rounds": 2}, "evaluation": {"alone": False}, "topology": graph}
    scene = make("flood", quorum=0.5, lease=10.0, tables=tables)
    scene.start_peer("a", scene.port)
    scene.start_peer("b", _free_port(), a=scene.port)
    certs = str(scene.certs("flood"))
    scene.rogue("joins", name="flood", to="a", certs=certs, hello=None, terms=terms, seconds=PATIENCE)
    assert scene.end("a", "b") == {"a": 0, "b": 0}
    check_flood(scene, "a")
    for name in ("a", "b"):
        assert [row["present"] for row in _rows(scene.folder / "states" / name)] == [True] * 2


def test_messages_one_by_one_do_not_make_a_round_last_longer_than_the_deadline(make: Callable[..., Scene]) -> None:
    """12 public samples in batches of 2: six messages in a round, each after 0.6 of the deadline, so 3.6 of it.

    With the second one its share of the round is used up: the others go on, and meet it again when it has answered.
    """
    deadline = 3.0
    tables = {"protocol": {"name": "fedmd", "rounds": ROUNDS, "batch_size": 2}, "evaluation": {"alone": False}}
    scene = make("drip", quorum=0.5, deadline=deadline, tables=tables)
    for name in ("hub", "a", "b"):
        scene.start(name)
    scene.rogue(
        "insiders", certs={"drip": str(scene.certs("drip"))}, hello=scene.hello(), batches=6, pause=0.6 * deadline,
        shape=[2, 10],
    )  # fmt: skip
    assert scene.end("hub", "a", "b") == {"hub": 0, "a": 0, "b": 0}
    log, rows = scene.log("hub"), _rows(scene.folder / "run")
    late = f"continues without 'drip': this round has waited {deadline:g} s for it"
    assert any(event.endswith(late) for event in log)
    assert not any(row["present"] for row in rows if row["agent"] == "drip"), "it has completed no round"
    for name in ("a", "b"):
        assert [row["present"] for row in rows if row["agent"] == name] == [True] * ROUNDS
    assert not any("strike" in event or "excluded" in event for event in log), "slow is not malicious"


# --- a hub that misbehaves ----------------------------------------------------------------------------------

RUN = "0" * 32
OVER_SOCKETS = ("path", "file", "classes", "share")  # the others are tried in this process
WELCOMES: dict[str, dict[str, Any]] = {
    "path": {"run": "../../escape"},
    "rooted": {"run": "/tmp/escape"},
    "count": {"done": "1"},
    "none": {"terms": None},
    "version": {"version": "9.9.9"},
    "file": {"protocol": {"name": "evil.py:Evil", "settings": {}}},
    "code": {"protocol": {"name": "evil", "class": "Evil", "code": "0" * 64, "settings": {}}},
    "setting": {"protocol": {"name": "fedmd", "settings": {"batch_size": "; rm -rf"}}},
    "seed": {"seed": -1},
    "classes": {"classes": 10**12},
    "roster": {"roster": [["a"], 5]},
    "faults": {"faults": [5]},
    "share": {"participation": "all"},
}
OF_WELCOME = {"run", "done", "terms"}  # the others are terms
COMMANDS: list[dict[str, Any]] = [
    {"do": "run"},
    {"do": "run", "number": 1, "turn": "x", "present": [], "samples": 1},
    {"do": "run", "number": 1, "turn": [10**12, 0], "present": [], "samples": 1},
    {"do": "run", "number": 1, "turn": [-1, 0], "present": [], "samples": 1},
    {"do": "run", "number": 1, "turn": [0, 0], "present": 5, "samples": 1},
    {"do": "run", "number": 1, "turn": [0, 0], "present": [], "samples": "many"},
    {"do": "keep", "number": 1, "round": "../../escape", "store": True},
    {"do": "keep", "number": 1, "round": 10**30, "store": True},
    {"do": "evaluate", "number": 1, "samples": [1], "views": True},
    {"do": "evaluate", "number": [], "samples": 1, "views": True},
    {"do": "alone", "number": 1, "rounds": 10**18},
    {"do": "exec", "number": 1, "code": "import os"},
]


@pytest.mark.parametrize("name", ["valid", *WELCOMES])
def test_an_agent_refuses_an_invalid_welcome(name: str, tmp_path: Path) -> None:
    net = Net()
    hub, own = FakeTransport(net, HUB, ("a",)), FakeTransport(net, "a", (HUB,))
    terms = terms_of(describe(("a", "b"), ROUNDS, PROTOCOLS["alone"]()))
    welcome = {"do": "welcome", "session": own.session_id, **_welcome(terms, WELCOMES.get(name, {}))}

    def send(kind: FrameKind, content: dict[str, Any]) -> None:
        hub.send(("a",), kind, Turn(0), encode({}, {"json": json.dumps(content)}))

    def tell(text: str) -> None:
        assert text.startswith("joined run")
        send(FrameKind.CONTROL, {"do": "stop", "why": "done", "number": 0})

    send(FrameKind.HELLO, welcome)
    end = time.monotonic() + PATIENCE
    remote = RemoteAgent(
        Connections(own, Network(), tell), {},  # type: ignore[arg-type]
        lambda terms: description_under(terms, agent("a"), None, None).bind_nodes(), tmp_path / "states",
        stopping=lambda: time.monotonic() > end,
    )  # fmt: skip
    if name == "valid":
        assert remote.run() is True
    else:
        with pytest.raises(CodistillError) as refusal:
            remote.run()
        assert refusal.value.exit_code == (2 if name == "share" else 9)
    assert not list(tmp_path.iterdir())
    assert not Path("/tmp/escape").exists()


@pytest.mark.long
def test_a_hub_cannot_make_an_agent_do_anything_else(make: Callable[..., Scene], tmp_path: Path) -> None:
    """Invalid welcomes and commands: an agent refuses with an error or continues; it writes nowhere else."""
    scene = make("obedient", *OVER_SOCKETS, strikes=1000)
    (scene.folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    description = read_agent_file(scene.recipe, "a").description
    assert description is not None
    terms = terms_of(replace(description, spec=RunSpec(rounds=ROUNDS)))
    plans = {name: {"welcome": _welcome(terms, change)} for name, change in WELCOMES.items() if name in OVER_SOCKETS}
    wrong = encode({"told": np.full((1, 12, 10), True)}, {"clients": 2, "own": 1}).hex()
    whole = {"do": "run", "number": 2, "turn": [0, 0], "present": ["a", "obedient"], "samples": 100}
    commands = [
        *COMMANDS,
        whole,
        {"frames": [("MESSAGE", wrong), ("END", "")], "answer": True},
        {"noise": 100},
        {"do": "evaluate", "number": 3, "samples": None, "of": 100, "views": False, "answer": True},
        {"do": "stop", "why": "done", "number": 0},
    ]
    plans["obedient"] = {"welcome": _welcome(terms, {}), "commands": commands}
    scene.rogue("false_hub", certs=str(scene.certs("hub")), agents=plans)
    scene.told("false_hub", "hub")
    before = _files(tmp_path)
    for name in plans:
        scene.start(name)
    codes = scene.end(*plans)
    outcome = scene.told("false_hub", "done")

    assert {name: codes[name] for name in OVER_SOCKETS} == {**dict.fromkeys(OVER_SOCKETS, 9), "share": 2}
    assert all(outcome[name]["heard"] for name in plans)
    assert codes["obedient"] == 0
    assert len([event for event in scene.log("obedient") if "an invalid command" in event]) == len(COMMANDS)
    done, measured = [answer for answer in outcome["obedient"]["answers"] if answer]
    assert "must have dtype float32" in done["report"]["refused"][0][2]
    assert 0 <= measured["scores"]["accuracy"] <= 1
    own = {f"scene/states/{name}/{file}" for name in plans for file in ("health.json", ".lock", "audit.jsonl")}
    assert _files(tmp_path) - before <= own | {f"scene/{name}.log" for name in plans}
    assert not (tmp_path / "executed").exists()


def _welcome(terms: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    told = {"run": RUN, "done": 0, "terms": {**terms, **{k: v for k, v in change.items() if k not in OF_WELCOME}}}
    return told | {key: value for key, value in change.items() if key in OF_WELCOME}


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_an_agent_in_the_place_of_the_hub(make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe finds it out; without the probe it is ignored, and receives nothing."""
    scene = make("evil")
    scene.rogue("false_hub", certs=str(scene.certs("evil")), agents={"b": {"welcome": {}}}, seconds=3.0)
    scene.told("false_hub", "hub")
    scene.start("a")
    monkeypatch.setattr(joining, "probe", lambda *_: None)
    scene.start("b")
    assert scene.end("a") == {"a": 9}
    assert "found: 'evil'" in (scene.folder / "a.log").read_text()
    assert scene.told("false_hub", "b")["b"] == {"heard": False, "answers": []}
    assert scene.processes["b"].is_alive()
    assert scene.log("b")[1:] == ["the node at the address of 'hub' is 'evil'"]
    assert not _listens(scene.processes["b"].pid), "an agent does not listen"


def _listens(pid: int | None) -> bool:
    """Whether a process has a TCP socket on which it listens."""
    if not Path("/proc/self/net/tcp").exists():
        return False
    held = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists() or path.is_symlink()}
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    listening = {line.split()[9] for table in tables for line in table if line.split()[3] == "0A"}
    return any(f"socket:[{inode}]" in held for inode in listening)


# --- reports, scores and texts out of bounds, one by one -------------------------------------------------------

WHOLE: dict[str, Any] = {
    "sent": {},
    "received": {},
    "steps": {},
    "exchanges": {},
    "refused": [],
    "remarks": [],
    "measures": [],
}


@pytest.mark.parametrize(
    "change",
    [
        {"sent": {"b": 1}},
        {"sent": {"a": -1}},
        {"sent": {"a": 10**400}},
        {"sent": {"a": "x"}},
        {"received": []},
        {"steps": {"b": 1}},
        {"steps": {"a": 1.5}},
        {"exchanges": {"a": -1}},
        {"exchanges": {"a": 1 << 62}},
        {"refused": [["b", "c", "no"]]},
        {"refused": [["a", "nobody", "no"]]},
        {"remarks": [["b", "hello"]]},
        {"remarks": [["a", "hello"]] * 10_001},
        {"measures": [["b", "gain", 1.0]]},
        {"measures": [["a", "round", 1.0]]},
        {"measures": [["a", "accuracy", 1.0]]},
        {"measures": [["a", "steps", 1.0]]},
        {"measures": [["a", "gain", float("nan")]]},
        {"measures": [["a", "gain", 1e308]]},
        {"measures": [["a", f"gain {number}", 1.0] for number in range(101)]},
        {"measures": [["a", "gain", 10**400]]},
    ],
    ids=lambda change: str(change)[:40],
)
def test_reports_out_of_bounds(change: dict[str, Any]) -> None:
    checked_report("a", WHOLE | {"measures": [["a", "gain", 1e38]], "sent": {"a": 1 << 40}}, ("a", "b", "c"))
    with pytest.raises(MessageError, match="A report must"):
        checked_report("a", WHOLE | change, ("a", "b", "c"))


@pytest.mark.parametrize("steps", [[3, 4], [3, 4, 5, 6], [3, 4, -5], [3, 4, 1 << 62], [3, 4, 5.0], [3, 4, True], 7, {}])
def test_steps_of_training_alone_out_of_bounds(steps: Any) -> None:
    assert checked_steps([3, 0, 5], rounds=3) == [3, 0, 5]
    with pytest.raises(MessageError, match="Steps must be"):
        checked_steps(steps, rounds=3)


def test_texts_of_other_nodes_stay_on_one_line() -> None:
    told = checked_report("a", WHOLE | {"remarks": [["a", "one\ntwo\x1b[2J\ud800" + "x" * 999]]}, ("a",))
    ((_, text),) = told.remarks
    assert text.startswith("one?two?[2J?xxx")
    assert len(text) == 500
    events: list[str] = []
    barred: list[tuple[str, str]] = []
    sessions = Sessions(2, events.append, lambda *given: barred.append(given))
    for _ in range(3):
        sessions.strike("a", "bad\n\ud800")
    assert events == [
        "'a': strike 1 of 2: bad??",
        "'a': strike 2 of 2: bad??",
        "'a' is excluded from the rest of the run: 2 bad messages",
    ]
    assert barred == [("a", "it is excluded from the run: 2 bad messages")]


@pytest.mark.parametrize(
    "scores", [{"accuracy": 1.1}, {"accuracy": "x"}, {"rmse": 1e308}, {"rmse": 10**400}, {"gain": 0.5}, [1], None]
)
def test_scores_out_of_bounds(scores: Any) -> None:
    with pytest.raises(MessageError, match="[Ss]cores (of this run )?must"):
        checked_scores(scores)


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.5, 1.5])
def test_mean_outputs_out_of_bounds(value: float) -> None:
    labels = np.array([0, 2])
    mean = np.full((3, 3), 1 / 3)
    mean[1] = np.nan  # no test sample is of this class
    assert checked_view({"mean": mean}, labels, 3) is not None
    mean[2, 1] = value
    with pytest.raises(MessageError, match="Mean outputs"):
        checked_view({"mean": mean}, labels, 3)


def test_empty_frames_fill_an_inbox_too() -> None:
    header = FrameHeader(FrameKind.MESSAGE, 7, 1)
    assert Malformed("a", "").size > 0
    assert ReceivedFrame("a", header, b"").size > HEADER_SIZE
    assert ReceivedFrame("a", header, bytes(500)).size > HEADER_SIZE + 500
