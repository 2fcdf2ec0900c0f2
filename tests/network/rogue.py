"""The attacker: links that know the frame format and misuse it. Run as a process of its own, without torch.

    python rogue.py SPEC.json

The spec names a kind of attacker and its arguments. Each attacker writes its outcome as a line of JSON, and then
stays connected and silent until its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import random
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cryptography import x509

from codistill.network import link as stream
from codistill.network import transport
from codistill.network.frames import Event, FrameHeader, FrameKind, ReceivedFrame, Refusal, Turn
from codistill.network.options import Network
from codistill.wire.codec import decode, encode

stream._BACKLOG = 1 << 40  # an attacker waits for nothing

SOON = 10.0  # seconds in which everything has to happen


class Certificates:
    """The files of a folder, used without any check."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def tls_context(self, *, server: bool) -> ssl.SSLContext:
        """Mutual TLS, with whatever certificate there is."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        context.load_verify_locations(self._folder / "ca.crt")
        context.load_cert_chain(self._folder / "cert.pem", self._folder / "key.pem")
        return context

    def marks(self) -> tuple[bytes, ...]:
        """It sends no mark that a hub would look for."""
        return (b"rogue",)

    def admitted_name(self, der: bytes) -> str:
        """Whoever it is."""
        (found,) = x509.load_der_x509_certificate(der).subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        return str(found.value).partition("~")[0]

    def trouble(self) -> None:
        """Never."""

    def admits_nobody(self) -> bool:
        """Never."""
        return False

    def set_list_grace(self, seconds: float) -> None:
        """It has no list."""


class Rogue(transport.Transport):
    """A node with given certificates; it sends whatever it is told to, valid or not."""

    def __init__(
        self, certs: str, name: str, port: int, *, listen: bool = False, others: tuple[str, ...] = ("hub",)
    ) -> None:
        self.name = name
        self.heard: queue.SimpleQueue[tuple[str, FrameHeader, bytes]] = queue.SimpleQueue()
        self.refusals: list[str] = []
        self.was_linked = False
        self.evaluations: list[dict[str, Any]] = []  # what it answers, instead of nothing
        place = f"127.0.0.1:{port}"
        super().__init__(
            name, others, Network(message_limit=1 << 30), Certificates(certs),  # type: ignore[arg-type]
            listen=place if listen else None, dial={} if listen else dict.fromkeys(others, place), limit=1 << 30,
        )  # fmt: skip

    def arrived(self, link: stream.Stream, event: Event) -> bool:
        """Everything is kept."""
        if isinstance(event, ReceivedFrame):
            self.heard.put((event.sender, event.header, event.payload))
        elif isinstance(event, Refusal):
            self.refusals.append(event.why)
        return True

    def opened(self, link: stream.Stream) -> None:
        """The other end has said its preface, which it does before it refuses."""
        super().opened(link)
        self.was_linked = True

    def is_linked(self, seconds: float = SOON) -> bool:
        """Whether somebody at the other end takes the link."""
        end = time.monotonic() + seconds
        while not any(self._links.values()) and time.monotonic() < end:
            time.sleep(0.02)
        return any(self._links.values())

    def say(self, kind: FrameKind, turn: Turn, payload: bytes, *, to: str = "hub", number: int | None = None) -> int:
        """A frame with a valid header; returns its number."""
        if number is None:
            self._numbers[to] += 1
            number = self._numbers[to]
        self.put(payload, FrameHeader(kind, self.session_id, number, turn).encode(), to=to)
        return number

    def put(self, payload: bytes, header: bytes, *, to: str = "hub") -> None:
        """Any bytes with any header (of the right length: a stream has no other)."""
        self.loop.call_soon_threadsafe(self._send, [(to, header)], payload)

    def tell(self, to: str = "hub", kind: FrameKind = FrameKind.CONTROL, arrays: Any = None, **content: Any) -> None:
        """A command or an answer of the right form."""
        self.say(kind, Turn(0), encode(arrays or {}, {"json": json.dumps(content)}), to=to)

    def hear(self, do: str, seconds: float = SOON, sender: str | None = None) -> dict[str, Any]:
        """The next command of this kind; frames of protocols are passed over."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                who, header, payload = self.heard.get(timeout=left)
                if header.kind in (FrameKind.CONTROL, FrameKind.HELLO) and sender in (None, who):
                    content: dict[str, Any] = json.loads(decode(payload, finite=False)[1]["json"])
                    if content["do"] == do:
                        return content | {"session": header.session_id}
        raise TimeoutError(f"'{self.name}' has not heard '{do}'")

    def join(self, hello: dict[str, Any]) -> None:
        """Join as an honest agent does."""
        self.is_linked()
        for _ in range(20):
            self.tell(kind=FrameKind.HELLO, do="hello", **hello)
            with contextlib.suppress(TimeoutError):
                self.hear("welcome", 2.0)
                self.tell(do="ready", at=0)
                return
        raise TimeoutError(f"'{self.name}' could not join")

    def rounds(self) -> Iterator[tuple[Turn, dict[str, Any]]]:
        """The rounds that the hub asks for; evaluations and the rest are answered in between."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._next()
                if command["do"] == "run":
                    yield Turn(*command["turn"]), command
                elif command["do"] in ("stop", "refused"):
                    return
                elif command["do"] == "missed":  # which rounds were counted without it: not answered
                    continue
                elif command["do"] == "evaluate" and self.evaluations:
                    self.answer(command, **self.evaluations.pop(0))
                else:
                    self.answer(command)

    def _next(self) -> dict[str, Any]:
        while True:
            _, header, payload = self.heard.get(timeout=6 * SOON)
            if header.kind is FrameKind.CONTROL:
                content: dict[str, Any] = json.loads(decode(payload, finite=False)[1]["json"])
                return content

    def answer(self, command: dict[str, Any], **content: Any) -> None:
        """What an honest agent answers that has nothing to say."""
        report = {
            "sent": {},
            "received": {},
            "steps": {},
            "exchanges": {},
            "refused": [],
            "remarks": [],
            "measures": [],
        }
        usual: dict[str, Any] = {"run": {"report": report}, "evaluate": {"scores": {}}, "alone": {"scores": {}}}
        given = content or usual.get(command["do"], {})
        self.tell(do="answer", number=command["number"], **given)

    def finish(self, turn: Turn, command: dict[str, Any]) -> None:
        """End a round as an honest agent does."""
        self.say(FrameKind.END, turn, b"")
        self.answer(command)


# --- agents of the federation that misbehave: each has joined ----------------------------------------------


def outputs(**changes: Any) -> bytes:
    """What fedmd asks an agent for: outputs for each of the public samples."""
    return encode({"f": np.full(changes.pop("shape", (12, 10)), changes.pop("value", 0.5), np.float32)}, {})


def nan(me: Rogue, spec: dict[str, Any]) -> None:
    for turn, command in me.rounds():
        me.say(FrameKind.MESSAGE, turn, outputs(value=np.nan))
        me.finish(turn, command)


def shape(me: Rogue, spec: dict[str, Any]) -> None:
    for turn, command in me.rounds():
        me.say(FrameKind.MESSAGE, turn, outputs(shape=(10, 12)))
        me.finish(turn, command)


def claim(me: Rogue, spec: dict[str, Any]) -> None:
    """Headers that claim two gigabytes: of header, and of an array."""
    text = json.dumps({"f": {"dtype": "F32", "shape": [1 << 15, 1 << 14], "data_offsets": [0, 1 << 31]}}).encode()
    lies = [struct.pack("<Q", 1 << 31) + text, struct.pack("<Q", len(text)) + text]
    for number, (turn, command) in enumerate(me.rounds()):
        me.say(FrameKind.MESSAGE, turn, lies[number % 2])
        me.finish(turn, command)


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def pickled(me: Rogue, spec: dict[str, Any]) -> None:
    """Bytes that make a folder when they are unpickled: as a message, and as a command."""
    bomb = pickle.dumps(_Bomb(spec["canary"]))
    for turn, command in me.rounds():
        me.say(FrameKind.MESSAGE, turn, bomb)
        me.say(FrameKind.CONTROL, turn, bomb)
        me.finish(turn, command)


def large(me: Rogue, spec: dict[str, Any]) -> None:
    """Real messages above the limit, and far above it."""
    for turn, _ in me.rounds():
        for size in (spec["limit"] + 1, 50 * spec["limit"], spec["limit"] + 1000, spec["limit"] + 2000):
            me.say(FrameKind.MESSAGE, turn, bytes(size))


def replay(me: Rogue, spec: dict[str, Any]) -> None:
    for turn, command in me.rounds():
        number = me.say(FrameKind.MESSAGE, turn, outputs())
        me.say(FrameKind.MESSAGE, turn, outputs(), number=number)
        me.finish(turn, command)


def noisy_headers(me: Rogue, spec: dict[str, Any]) -> None:
    source = random.Random(1)
    for _ in me.rounds():
        for _ in range(spec["noise"]):
            me.put(b"", bytes([source.choice((7, 99, 255))]) + source.randbytes(22))


def noisy_commands(me: Rogue, spec: dict[str, Any]) -> None:
    source = random.Random(2)
    for turn, _ in me.rounds():
        for _ in range(spec["noise"]):
            me.say(source.choice((FrameKind.CONTROL, FrameKind.HELLO)), turn, source.randbytes(source.randrange(200)))


def noisy_messages(me: Rogue, spec: dict[str, Any]) -> None:
    source = random.Random(3)
    whole = outputs()
    for turn, command in me.rounds():
        for _ in range(spec["noise"] // 3):
            # Pure noise, and noise where a message has its header.
            cut = source.randrange(len(whole))
            data = source.choice((b"", whole[:cut], whole[:8])) + source.randbytes(source.randrange(200))
            me.say(FrameKind.MESSAGE, turn, data)
        me.finish(turn, command)


def flood(me: Rogue, spec: dict[str, Any]) -> None:
    """Far more messages than asked for, faster than they can be processed."""
    block = bytes(spec["limit"] - 100)
    for turn, command in me.rounds():
        for _ in range(min(spec["noise"], 1000)):
            me.say(FrameKind.MESSAGE, turn, block)
        me.finish(turn, command)


def hoard(me: Rogue, spec: dict[str, Any]) -> None:
    """Messages for later rounds, one by one: a receiver that accepted them would have to store them."""
    block = bytes(spec["limit"] - 100)
    for turn, command in me.rounds():
        for _ in range(30):
            me.say(FrameKind.MESSAGE, Turn(turn.phase + 3), block)
            time.sleep(0.01)
        me.finish(turn, command)


def chatter(me: Rogue, spec: dict[str, Any]) -> None:
    """Unexpected answers, with texts that forge a line of the log or that cannot be written to a file."""
    for turn, command in me.rounds():
        for number in range(50):
            me.tell(do="answer", number=-number, trouble="well\nround 1: 'a' is out \ud800 \x1b[2J")
        me.finish(turn, command)


def report(me: Rogue, spec: dict[str, Any]) -> None:
    """Reports for others, and with absurd figures."""
    whole: dict[str, Any] = {
        "sent": {},
        "received": {},
        "steps": {},
        "exchanges": {},
        "refused": [],
        "remarks": [],
        "measures": [],
    }
    tricks: list[dict[str, Any]] = [
        {"sent": {"a": 7}},
        {"measures": [[me.name, "round", 99.0], [me.name, "agent", 1.0]]},
        {"sent": {me.name: 10**4000}},
    ]
    for number, (turn, command) in enumerate(me.rounds()):
        me.say(FrameKind.MESSAGE, turn, outputs())
        me.say(FrameKind.END, turn, b"")
        me.answer(command, report=whole | tricks[number % 3])


def scores(me: Rogue, spec: dict[str, Any]) -> None:
    """Scores that are out of bounds or unknown."""
    tricks: list[Any] = [{"accuracy": 7.0}, {"rmse": 1e308}, {"__class__": 0.5}]
    me.evaluations = [{"scores": trick} for trick in tricks]
    for turn, command in me.rounds():
        me.say(FrameKind.MESSAGE, turn, outputs())
        me.finish(turn, command)


def text(me: Rogue, spec: dict[str, Any]) -> None:
    """Remarks that would forge a line of the log, or that cannot be written to a file."""
    whole: dict[str, Any] = {"sent": {}, "received": {}, "steps": {}, "exchanges": {}, "refused": [], "measures": []}
    for turn, command in me.rounds():
        me.say(FrameKind.MESSAGE, turn, outputs())
        me.say(FrameKind.END, turn, b"")
        me.answer(command, report=whole | {"remarks": [[me.name, "well\nround 1: 'a' is out \ud800 \x1b[2J"]]})


def unknown(me: Rogue, spec: dict[str, Any]) -> None:
    for turn, command in me.rounds():
        me.tell(do="shutdown")
        me.say(FrameKind.MESSAGE, turn, outputs())
        me.finish(turn, command)


def forge(me: Rogue, spec: dict[str, Any]) -> None:
    """Connect as another agent and as the hub; otherwise take part as others do."""
    false = {name: Rogue(spec["certs"][me.name], name, spec["port"]) for name in ("a", "hub")}
    for turn, command in me.rounds():
        me.say(FrameKind.MESSAGE, turn, outputs())
        me.finish(turn, command)
    tell(forge={name: [rogue.refusals[0], rogue.heard.empty()] for name, rogue in false.items()})


def old(me: Rogue, spec: dict[str, Any]) -> None:
    """It has joined; now it sends a hello with another version of codistill."""
    for turn, command in me.rounds():
        if turn.phase == 0:
            second = Rogue(spec["certs"][me.name], me.name, spec["port"])  # a session of its own
            second.is_linked()
            for _ in range(20):
                second.tell(kind=FrameKind.HELLO, do="hello", **spec["hello"] | {"version": "0.0.1"})
                with contextlib.suppress(TimeoutError):
                    tell(old=second.hear("refused", 0.5))
                    break
        me.say(FrameKind.MESSAGE, turn, outputs())
        me.finish(turn, command)


def turncoat(me: Rogue, spec: dict[str, Any]) -> None:
    """Honest until its certificate is revoked in the middle of a round; then it continues unchanged."""
    for turn, command in me.rounds():
        if turn.phase == 1:
            tell(turncoat={"at": "waiting"})
            wait_for(Path(spec["revoked"]))
        me.say(FrameKind.MESSAGE, turn, outputs())
        me.finish(turn, command)


def drip(me: Rogue, spec: dict[str, Any]) -> None:
    """One message of a round at a time, each within the deadline."""
    for turn, command in me.rounds():
        for _ in range(spec["batches"]):
            time.sleep(spec["pause"])
            me.say(FrameKind.MESSAGE, turn, outputs(shape=spec["shape"]))
        me.finish(turn, command)


INSIDERS: dict[str, Callable[[Rogue, dict[str, Any]], None]] = {
    "nan": nan, "shape": shape, "claim": claim, "pickle": pickled, "large": large, "replay": replay,
    "headers": noisy_headers, "commands": noisy_commands, "messages": noisy_messages, "flood": flood, "hoard": hoard,
    "chatter": chatter, "report": report, "scores": scores, "text": text, "unknown": unknown, "forge": forge,
    "old": old, "turncoat": turncoat, "drip": drip,
}  # fmt: skip


def insiders(spec: dict[str, Any]) -> None:
    """Agents of the roster, each in a thread of its own."""

    def live(name: str) -> None:
        me = Rogue(spec["certs"][name], name, spec["port"])
        me.join(spec["hello"])
        INSIDERS[name](me, spec)

    threads = [threading.Thread(target=live, args=(name,), daemon=True) for name in spec["certs"]]
    for thread in threads:
        thread.start()


# --- members that ask to join, again and again ---------------------------------------------------------------


def joins(spec: dict[str, Any]) -> None:
    """Join requests of a member as fast as its link takes them, with the answers read, until the link is closed."""
    me = Rogue(spec["certs"], spec["name"], spec["port"], others=(spec["to"],))
    me.is_linked()
    if (content := spec["hello"]) is None:  # to a peer, whose own request has the terms
        content = {"at": -1, "samples": 1, "terms": me.hear("hello")["terms"] | spec["terms"]}
    request = encode({}, {"json": json.dumps({"do": "hello", **content})})
    counts = dict.fromkeys(("sent", "answered"), 0)
    began = time.monotonic()
    while (links := me._links[spec["to"]]) and time.monotonic() - began < spec["seconds"]:
        if sum(link.waiting for link in links) < 1 << 16:
            for _ in range(100):
                me.say(FrameKind.HELLO, Turn(0), request, to=spec["to"])
            counts["sent"] += 100
        time.sleep(0.001)
    seconds = time.monotonic() - began
    with contextlib.suppress(queue.Empty):
        while True:
            counts["answered"] += me.heard.get_nowait()[1].kind is FrameKind.HELLO
    tell(joins={**counts, "seconds": seconds, "open": bool(links)})


# --- members of a run without rounds that flood its relay ---------------------------------------------------


class Flooder(Rogue):
    """Reads nothing any more once the run has begun."""

    is_deaf = False

    def arrived(self, link: stream.Stream, event: Event) -> bool:
        """What arrives before is kept."""
        return super().arrived(link, event) and not self.is_deaf


def relay(spec: dict[str, Any]) -> None:
    """Uploads or downloads of crs, each as fast as the link takes them, until the file `over` is there."""
    upload = {"representations": np.ones(spec["shape"], np.float32), "held": np.ones(spec["shape"][1], bool)}
    requests = {
        "uploads": (FrameKind.MESSAGE, encode(upload, {})),
        "downloads": (FrameKind.ASK, encode({}, {"downloads": 64, "oldest": 0.0, "listen_to": []})),
    }

    def live(name: str) -> None:
        me, (kind, payload), sent = Flooder(spec["certs"][name], name, spec["port"]), requests[name], 0
        me.join(spec["hello"])
        me.hear("go", 6 * SOON)
        me.is_deaf = True
        while not Path(spec["over"]).exists():
            if sum(link.waiting for link in me._links["hub"]) < 1 << 20:
                for _ in range(50):
                    me.say(kind, Turn(0), payload)
                sent += 50
            time.sleep(0.001)
        tell(**{name: {"sent": sent}})

    threads = [threading.Thread(target=live, args=(name,), daemon=True) for name in spec["certs"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- outsiders: with a certificate that is not valid here, or none -----------------------------------------


def outsiders(spec: dict[str, Any]) -> None:
    """With each certificate: try a handshake, then send a hello and messages as agent 'a'."""
    for who, certs in spec["certs"].items():
        tell(**{who: {"alert": handshake(spec["port"], certs)}})
    rogues = {who: Rogue(certs, "a", spec["port"]) for who, certs in spec["certs"].items() if certs}
    stop = encode({}, {"json": json.dumps({"do": "leaving", "why": "forged"})})
    tell(trying=True)
    began = time.monotonic()
    while not Path(spec["over"]).exists() and time.monotonic() - began < 9 * SOON:
        for rogue in rogues.values():
            rogue.tell(kind=FrameKind.HELLO, do="hello", **spec["hello"])
            rogue.say(FrameKind.MESSAGE, Turn(0), outputs(value=9.0))
            rogue.say(FrameKind.CONTROL, Turn(0), stop)
        time.sleep(0.05)
    for who, rogue in rogues.items():
        tell(**{who: {"heard": not rogue.heard.empty(), "refusals": sorted(set(rogue.refusals))}})


def handshake(port: int, certs: str | None) -> str:
    """The hub's TLS alert for this certificate, or for none: "" if it is accepted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certs:
        context.load_cert_chain(Path(certs) / "cert.pem", Path(certs) / "key.pem")
    try:
        with context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=SOON)) as secure:
            secure.settimeout(0.5)
            secure.recv(1)
    except TimeoutError:
        return ""
    except ssl.SSLError as error:
        return str(error.reason)
    return "closed"


def crowd(spec: dict[str, Any]) -> None:
    """Connections without a certificate: many that stay idle; and random bytes, once the agents have joined."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the beginning of a TLS client hello of 512 bytes
    held = [socket.create_connection(("127.0.0.1", spec["port"]), timeout=SOON) for _ in range(spec["callers"])]
    for line in held[::2]:
        line.sendall(hello)
    tell(crowd={"callers": len(held)})
    wait_for(Path(spec["joined"]))
    source, sent = random.Random(4), 0
    for _ in range(spec["noise"]):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", spec["port"]), timeout=SOON) as line:
            line.sendall(source.choice((b"", hello)) + source.randbytes(source.randrange(1, 400)))
            sent += 1
    tell(noise={"sent": sent})


# --- a hub that misbehaves ----------------------------------------------------------------------------------


def false_hub(spec: dict[str, Any]) -> None:
    """To each agent its own welcome, and then commands one after the other; the answers are the outcome."""
    me = Rogue(spec["certs"], "hub", spec["port"], listen=True, others=tuple(spec["agents"]))
    tell(hub={"listens": True})
    for name, plan in spec["agents"].items():
        outcome: dict[str, Any] = {"heard": False, "answers": []}
        with contextlib.suppress(TimeoutError):
            session_id = me.hear("hello", spec.get("seconds", 3 * SOON), sender=name)["session"]
            outcome["heard"] = True
            me.tell(to=name, kind=FrameKind.HELLO, do="welcome", session=session_id, **plan["welcome"])
            if not plan.get("commands"):
                outcome["why"] = me.hear("leaving", sender=name)["why"]
            else:
                me.hear("ready", sender=name)
                outcome["answers"] = [_command(me, name, command) for command in plan["commands"]]
        tell(**{name: outcome})


def _command(me: Rogue, name: str, command: dict[str, Any]) -> Any:
    source = random.Random(5)
    for _ in range(command.get("noise", 0)):
        me.say(FrameKind(source.randrange(5)), Turn(source.randrange(5)), source.randbytes(100), to=name)
    for kind, text in command.get("frames", ()):
        me.say(FrameKind[kind], Turn(0), bytes.fromhex(text), to=name)
    if "do" in command:
        me.tell(to=name, **{key: value for key, value in command.items() if key not in ("frames", "answer")})
    return me.hear("answer", sender=name) if command.get("answer") else None


KINDS = {
    "insiders": insiders, "outsiders": outsiders, "crowd": crowd, "false_hub": false_hub, "relay": relay,
    "joins": joins,
}  # fmt: skip


def tell(**outcome: Any) -> None:
    """A line for the process that started this one."""
    print(json.dumps(outcome), flush=True)


def wait_for(path: Path) -> None:
    """Wait until the file exists."""
    end = time.monotonic() + 6 * SOON
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text())
    KINDS[told["kind"]](told)
    tell(done=True)
    sys.stdin.read()
    os._exit(0)
