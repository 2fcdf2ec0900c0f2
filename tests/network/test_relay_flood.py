"""Members that flood the relay of crs in a run without rounds, over mutual TLS: the others go on, the hub stays small.

The hub has `ulimit -n 1024`, as in `test_attacks.py`, and real limits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.network.test_attacks import PATIENCE, Scene

from codistill.engine.runtime import warm_up
from codistill.network.link import CONTROL_LIMIT

HONEST, FLOODERS = ("a", "b"), ("uploads", "downloads")
PERIODS = 6
LIMIT = 1 << 20  # network.message_limit
TABLES: dict[str, Any] = {
    "agents": [{"name": name, "learner": "mlp"} for name in (*HONEST, *FLOODERS)],
    "data": {"name": "digits", "samples": 400, "test_samples": 20},
    "protocol": {"name": "crs", "rounds": PERIODS, "local_steps": 1},
    "evaluation": {"alone": False},
    "clock": {"asynchronous": True, "period": 0.4},
}


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr("codistill.report.pages.write_report", lambda summary, path: path.write_text("a report"))
    warm_up()
    network = {"quorum": 1.0, "linger": 1.0, "message_limit": LIMIT}
    made = Scene(tmp_path / "scene", FLOODERS, honest=HONEST, tables=TABLES, **network)
    yield made
    made.close()


@pytest.mark.long
def test_floods_of_uploads_and_of_unread_downloads_stop_nobody_and_fill_nothing(scene: Scene) -> None:
    """What asks for an answer has about 100 bytes, the answer (1 + 64) 10 d floats: half a megabyte with d = 200."""
    for name in ("hub", *HONEST):
        scene.start(name)
    hello, over = scene.hello(), scene.folder / "over"
    shape = [65, 10, hello["features"]]
    certs = {name: str(scene.certs(name)) for name in FLOODERS}
    scene.rogue("relay", certs=certs, hello=hello, over=str(over), shape=shape)
    for name in FLOODERS:
        scene.wait_until("hub", f"'{name}' joined")
    before, peak = _kilobytes(scene, "VmRSS"), 0
    end = time.monotonic() + PATIENCE
    while (now := _kilobytes(scene, "VmHWM")) and time.monotonic() < end:
        peak = max(peak, now)
        time.sleep(0.02)
    over.touch()
    assert scene.end("hub", *HONEST) == {"hub": 0, "a": 0, "b": 0}

    sent = scene.told("relay", "done")
    assert min(sent[name]["sent"] for name in FLOODERS) >= 500
    # Of each flooder: what is read ahead of it, what waits for it, an upload and an answer; and what Python keeps.
    most = 2 * (LIMIT + CONTROL_LIMIT) + (CONTROL_LIMIT + LIMIT) + 4 * LIMIT + (16 << 20)
    assert peak - before < most / 1024
    rows = [json.loads(line) for line in (scene.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in HONEST:
        rounds = [row["own_rounds"] for row in rows if row["agent"] == name]
        assert len(rounds) == PERIODS
        assert rounds[-1] > rounds[PERIODS // 2] > rounds[1]
    log = scene.log("hub")
    assert any("'downloads' asks again and does not read the answers" in event for event in log)
    assert not any(event.startswith(("'a': strike", "'b': strike")) for event in log)
    assert len(log) < 5 * PERIODS
    assert (scene.folder / "run" / "log.txt").stat().st_size < 500 * PERIODS


def _kilobytes(scene: Scene, field: str) -> int:
    """Of the hub's memory, by /proc; 0 once it has ended."""
    try:
        status = Path(f"/proc/{scene.processes['hub'].pid}/status").read_text()
        return int(dict(line.split(":", 1) for line in status.splitlines())[field].split()[0])
    except (OSError, KeyError):
        return 0
