"""The attackers of the siege; see `trials.siege`. Each runs in a process of its own until it is ended.

python -m trials.siege_attackers KIND FOLDER PORT
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import selectors
import socket
import ssl
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from codistill.network.frames import HEADER_SIZE, FrameHeader, FrameKind, Preface, Turn, read_preface
from codistill.wire.codec import decode, encode, encode_packed

HELLOS = 2000  # half handshakes at a time
HELD = 600  # idle connections of a stranger at a time: within the descriptors of its own process
LARGE = 1 << 26  # bytes that a message claims to have
PAUSE = 3.0  # seconds between two messages of a round: within the deadline of 5, which two of them exceed
COUNT: Counter[str] = Counter()


class Caller:
    """A connection with a certificate that sends whatever it is told to, and reads only if it is asked to."""

    def __init__(self, certs: Path, name: str, port: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(certs / "cert.pem", certs / "key.pem")
        plain = socket.create_connection(("127.0.0.1", port), timeout=5)
        self.session_id, self._number = random.getrandbits(64), 0
        self.link = context.wrap_socket(plain)
        self.link.settimeout(5)
        self.link.sendall(Preface(self.session_id, 10.0, 1 << 30, name).encode())
        COUNT["connections"] += 1

    def send(self, kind: FrameKind, payload: bytes, turn: int = 0, *, claim: int | None = None) -> None:
        """A frame; `claim`: the length that it announces instead of its own."""
        self._number += 1
        header = FrameHeader(kind, self.session_id, self._number, Turn(turn)).encode()
        length = len(payload) if claim is None else claim
        self.link.sendall(length.to_bytes(8, "little") + header + payload)
        COUNT[kind.name.lower()] += 1

    def tell(self, kind: FrameKind = FrameKind.CONTROL, **content: Any) -> None:
        """A command or an answer."""
        self.send(kind, encode({}, {"json": json.dumps(content)}))

    def join(self, hello: dict[str, Any]) -> None:
        """Join without listening to the answer."""
        self.tell(FrameKind.HELLO, do="hello", **hello)
        time.sleep(0.3)
        self.tell(do="ready", at=0)

    def take(self, seconds: float) -> bytes:
        """What arrives within this time, with a sign of life."""
        self.send(FrameKind.PING, b"")
        self.link.settimeout(seconds)
        try:
            data = self.link.recv(1 << 16)
            if not data:
                raise ConnectionError
        except TimeoutError:
            return b""
        finally:
            self.link.settimeout(5)
        return data

    def commands(self) -> Iterator[dict[str, Any]]:
        """The commands of the hub, as they arrive, after its preface."""
        data = b""
        while (found := read_preface(memoryview(data))) is None:
            data += self.take(0.5)
        data = data[found[1] :]
        while True:
            data += self.take(0.5)
            while len(data) >= 8 + HEADER_SIZE:
                end = 8 + HEADER_SIZE + int.from_bytes(data[:8], "little")
                if end > len(data):
                    break
                kind, payload, data = data[8], data[8 + HEADER_SIZE : end], data[end:]
                if kind == FrameKind.CONTROL:
                    yield json.loads(decode(payload, finite=False)[1]["json"])


def strangers(folder: Path, port: int) -> None:
    """Silent connections, half a TLS hello, and random bytes, without a certificate."""
    held: list[socket.socket] = []
    beginning = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    source = random.Random(0)
    while True:
        with contextlib.suppress(OSError):
            one = socket.create_connection(("127.0.0.1", port), timeout=2)
            held.append(one)
            COUNT["connections"] += 1
            one.sendall(source.choice((b"", b"", beginning, source.randbytes(100))))
        if len(held) >= HELD:
            held.pop(0).close()
        time.sleep(0.002)


def hellos(folder: Path, port: int) -> None:
    """2,000 connections, each with a whole TLS hello and then nothing; one that is closed is opened again at once."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (HELLOS + 100, hard))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    hello, waiting = sent.read(), selectors.DefaultSelector()

    def call() -> None:
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        waiting.register(one, selectors.EVENT_WRITE)
        COUNT["connections"] += 1

    for _ in range(HELLOS):
        call()
    while True:
        for key, event in waiting.select(1.0):
            one = key.fileobj
            assert isinstance(one, socket.socket)
            try:
                if event & selectors.EVENT_WRITE:
                    one.send(hello)
                    waiting.modify(one, selectors.EVENT_READ)
                elif not one.recv(1 << 16):
                    raise ConnectionError
            except OSError:
                waiting.unregister(one)
                one.close()
                call()


def busy(folder: Path, port: int) -> None:
    """Takes processor time, and nothing else."""
    while True:
        pass


def revoked(folder: Path, port: int) -> None:
    """A certificate that is revoked: many connections, each with the beginning of a large message."""
    held: list[Caller] = []
    while True:
        with contextlib.suppress(OSError):
            caller = Caller(folder / "revoked", "revoked", port)
            held.append(caller)
            caller.send(FrameKind.MESSAGE, bytes(1 << 20), claim=LARGE)
        if len(held) > 50:
            held.pop(0).link.close()
        time.sleep(0.02)


def bomb() -> bytes:
    """A message of some kilobytes that claims to hold arrays of a gigabyte."""
    body = zlib.compress(bytes(1 << 20))
    return encode_packed({}, {}, [[["f", "f", [1 << 14, 1 << 14], 0, 0, 0]], 1 << 30], body)


def member(folder: Path, port: int) -> None:
    """A valid member: join requests, bombs, messages above the limit, half messages and many of one byte, in turn."""
    hello = json.loads((folder / "hello.json").read_text("utf-8"))
    request = encode({}, {"json": json.dumps({"do": "hello", **hello})})
    deeds: list[tuple[int, FrameKind, bytes, int | None]] = [  # how often, what, and the length that it claims
        (5000, FrameKind.HELLO, request, None),
        (50, FrameKind.MESSAGE, bomb(), None),
        (10, FrameKind.MESSAGE, bytes(4 << 20), None),
        (20_000, FrameKind.MESSAGE, b"x", None),
        (1, FrameKind.MESSAGE, bytes(1 << 19), 1 << 20),
    ]
    held: list[Caller] = []
    for number in itertools.count():
        times, kind, payload, claim = deeds[number % len(deeds)]
        with contextlib.suppress(OSError):
            held.append(Caller(folder / "certs" / "member", "member", port))
            held[-1].join(hello)
            for _ in range(times):
                held[-1].send(kind, payload, claim=claim)
        if len(held) > 20:
            held.pop(0).link.close()
        time.sleep(0.05)


def deaf(folder: Path, port: int) -> None:
    """A valid member that joins, answers nothing, and never reads what it is sent; it shows signs of life."""
    hello = json.loads((folder / "hello.json").read_text("utf-8"))
    while True:
        with contextlib.suppress(OSError):
            me = Caller(folder / "certs" / "deaf", "deaf", port)
            me.link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            me.join(hello)
            while True:
                me.send(FrameKind.PING, b"")
                time.sleep(1)
        time.sleep(0.2)


def joiner(folder: Path, port: int) -> None:
    """A valid member that asks to join, as fast as its link takes it, and reads the answers."""
    hello = json.loads((folder / "hello.json").read_text("utf-8"))
    request = encode({}, {"json": json.dumps({"do": "hello", **hello})})
    while True:
        with contextlib.suppress(OSError):
            me = Caller(folder / "certs" / "joiner", "joiner", port)
            while True:
                for _ in range(200):
                    me.send(FrameKind.HELLO, request)
                COUNT["bytes of answers"] += len(me.take(0.001))
        time.sleep(0.05)


def drip(folder: Path, port: int) -> None:
    """A valid member that sends the messages of a round one by one, each within the deadline, and then answers."""
    hello = json.loads((folder / "hello.json").read_text("utf-8"))
    counts, lists = ("sent", "received", "steps", "exchanges"), ("refused", "remarks", "measures")
    report: dict[str, Any] = {key: {} for key in counts} | {key: [] for key in lists}
    usual = {"run": {"report": report}, "evaluate": {"scores": {}}}
    outputs = encode({"f": np.zeros((32, 10), np.float32)}, {})
    while True:
        with contextlib.suppress(OSError):
            me = Caller(folder / "certs" / "drip", "drip", port)
            me.join(hello)
            for command in me.commands():
                if command["do"] == "run":
                    COUNT["rounds"] += 1
                    turn = command["turn"][0]
                    for _ in range(2):
                        for _ in range(int(PAUSE)):
                            time.sleep(1.0)
                            me.send(FrameKind.PING, b"")
                        me.send(FrameKind.MESSAGE, outputs, turn)
                if "number" in command and command["do"] != "stop":
                    me.tell(do="answer", number=command["number"], **usual.get(command["do"], {}))
        time.sleep(0.5)


KINDS = {
    "strangers": strangers, "revoked": revoked, "member": member, "deaf": deaf, "joiner": joiner, "drip": drip,
    "hellos": hellos, "busy": busy,
}  # fmt: skip


def main() -> None:
    """Attack until ended; what was done is written to a file every second."""
    kind, folder, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

    def write() -> None:
        while True:
            time.sleep(1)
            part = folder / f"{kind}.count.part"
            part.write_text(json.dumps(COUNT), "utf-8")
            os.replace(part, folder / f"{kind}.count")

    threading.Thread(target=write, daemon=True).start()
    KINDS[kind](folder, port)


if __name__ == "__main__":
    main()
