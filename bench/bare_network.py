"""The same traffic as a federation's by Zenoh alone: many processes and a hub, nothing encoded, checked or counted."""

from __future__ import annotations

import json
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zenoh


def config(home: Path, **where: list[str]) -> zenoh.Config:
    """Peers with mutual TLS that look for nobody; `home` holds a node's certificate and its authority's."""
    own = {"certificate": str(home / "cert.pem"), "private_key": str(home / "key.pem")}
    link = {
        "protocols": ["tls"],
        "tx": {"lease": 10_000, "queue": {"congestion_control": {"block": {"wait_before_close": 10_000_000}}}},
        "tls": {
            "root_ca_certificate": str(home / "ca.crt"),
            **{f"{side}_{part}": path for side in ("listen", "connect") for part, path in own.items()},
            "enable_mtls": True,
            "verify_name_on_connect": False,
        },
    }
    settings: dict[str, Any] = {
        "mode": "peer",
        "listen": {"endpoints": where.get("listen", [])},
        "connect": {"endpoints": where.get("dial", []), "timeout_ms": -1, "exit_on_failure": False},
        "scouting": {"multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "transport": {"link": link, "shared_memory": {"enabled": False}},
    }
    return zenoh.Config.from_json5(json.dumps(settings))


def agent(name: str, home: Path, port: int, size: int) -> None:
    """Say something to the hub and wait for its answer, over and over."""
    session = zenoh.open(config(home, dial=[f"tls/127.0.0.1:{port}"]))
    answers = session.declare_subscriber(f"bench/down/{name}")
    up = _publisher(session, f"bench/up/{name}")
    payload = zenoh.ZBytes(bytes(size))
    while True:
        up.put(payload)
        answers.recv().payload.to_bytes()


def hub(names: list[str], home: Path, port: int, size: int, pipe: Connection) -> None:
    """As often as asked for: wait for a payload from everybody, then put an answer to each; tells when."""
    session = zenoh.open(config(home, listen=[f"tls/127.0.0.1:{port}"]))
    said = session.declare_subscriber("bench/up/*")
    pipe.send(resident())
    down = [_publisher(session, f"bench/down/{name}") for name in names]
    payload = zenoh.ZBytes(bytes(size))
    pipe.send(resident())
    while True:
        count = pipe.recv()
        stamps = [time.perf_counter()]
        for _ in range(count):
            for _ in names:
                said.recv().payload.to_bytes()
            for publisher in down:
                publisher.put(payload)
            stamps.append(time.perf_counter())
        pipe.send(stamps)


def asked(name: str, home: Path, port: int, size: int) -> None:
    """Answer whenever the hub asks."""
    session = zenoh.open(config(home, dial=[f"tls/127.0.0.1:{port}"]))
    payload = zenoh.ZBytes(bytes(size))

    def answer(query: zenoh.Query) -> None:
        query.payload.to_bytes()
        query.reply(f"bench/ask/{name}", payload, express=True)
        query.drop()

    _ear = session.declare_queryable(f"bench/ask/{name}", answer)  # it hears for as long as it is held
    threading.Event().wait()


def asking(names: list[str], home: Path, port: int, size: int, pipe: Connection) -> None:
    """As often as asked for: get something from everybody, with a payload in the question; tells when."""
    session = zenoh.open(config(home, listen=[f"tls/127.0.0.1:{port}"]))
    pipe.send(resident())
    payload = zenoh.ZBytes(bytes(size))

    def get_all() -> int:
        how = {"payload": payload, "express": True, "congestion_control": zenoh.CongestionControl.BLOCK}
        replies = [session.get(f"bench/ask/{name}", **how) for name in names]
        return sum(len(reply.ok.payload.to_bytes()) for channel in replies for reply in channel)

    while get_all() < size * len(names):  # until everybody is there
        time.sleep(0.1)
    pipe.send(resident())
    while True:
        count = pipe.recv()
        stamps = [time.perf_counter()]
        for _ in range(count):
            get_all()
            stamps.append(time.perf_counter())
        pipe.send(stamps)


def resident() -> float:
    """Megabytes of this process in memory."""
    time.sleep(1)  # until what was begun has settled
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def _publisher(session: zenoh.Session, key: str) -> Any:
    """A publisher, once there is somebody to hear it."""
    made = session.declare_publisher(key, congestion_control=zenoh.CongestionControl.BLOCK, express=True)
    while not made.matching_status.matching:
        time.sleep(0.01)
    return made
