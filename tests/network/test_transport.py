"""Links over real sockets with mutual TLS: who gets one, what passes, and what a caller can make a node hold."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from codistill.certs.authority import Authority
from codistill.certs.credentials import Credentials
from codistill.core.errors import NetworkError, RecipeError
from codistill.network import link as stream
from codistill.network import options
from codistill.network.frames import (
    Event,
    FrameHeader,
    FrameKind,
    FrameReader,
    Inbox,
    Oversized,
    Preface,
    Presence,
    ReceivedFrame,
    Refusal,
    Turn,
)
from codistill.network.log import CallerLog
from codistill.network.options import WIRE_VERSION, Network
from codistill.network.transport import Transport

LIMIT = 1 << 20
SOON = 20.0  # seconds, on a machine that is busy with other things


class Site:
    """An authority with a hub and two agents, and the transports that were opened."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "certs")
        self.authority.create(days=3)
        self.authority.issue("hub", "127.0.0.1", days=3)
        for name in ("a", "b", "c"):
            self.authority.issue("agent", name, days=3)
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = int(one.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self.open: list[Transport] = []
        self.told: list[str] = []

    def folder(self, name: str) -> Path:
        return self.authority.folder / ("127.0.0.1" if name == "hub" else name)

    def hub(self, others: tuple[str, ...] = ("a", "b"), **settings: Any) -> Transport:
        return self._keep("hub", others, settings, listen=self.address)

    def agent(self, name: str, **settings: Any) -> Transport:
        return self._keep(name, ("hub",), settings, dial={"hub": self.address})

    def _keep(self, name: str, others: tuple[str, ...], settings: dict[str, Any], **place: Any) -> Transport:
        own = Credentials(self.folder(name), "hub" if name == "hub" else "agent")
        network = Network(**{"message_limit": LIMIT, **settings})
        limit = network.message_limit
        self.open.append(Transport(name, others, network, own, limit=limit, tell=self.told.append, **place))
        return self.open[-1]

    def caller(self, name: str | None) -> socket.socket:
        """A connection of a program that is not codistill, with the certificate of a node or none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if name:
            context.load_cert_chain(self.folder(name) / "cert.pem", self.folder(name) / "key.pem")
        return context.wrap_socket(socket.create_connection(("127.0.0.1", self.port), timeout=SOON))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    for transport in made.open:
        transport.close(0.2)


def until(transport: Transport, kind: type[Any], seconds: float = SOON) -> Any:
    """The next event of a kind; others are passed over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        event = transport.take(0.1)
        if isinstance(event, kind):
            return event
    raise AssertionError(f"no {kind.__name__} in {seconds} s")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def record(kind: FrameKind, payload: bytes, number: int = 1, length: int | None = None) -> bytes:
    """A frame as it is on the wire; `length`: what it claims."""
    claimed = len(payload) if length is None else length
    return claimed.to_bytes(8, "little") + FrameHeader(kind, 7, number, Turn(0)).encode() + payload


def preface(name: str) -> bytes:
    return Preface(7, 10.0, LIMIT, name).encode()


# --- frames ---------------------------------------------------------------------------------------------------


def test_frames_arrive_complete_in_order_and_in_both_directions(site: Site) -> None:
    hub, a = site.hub(("a",)), site.agent("a")
    assert until(a, Presence) == Presence("hub", hub.session_id, here=True)
    assert until(hub, Presence) == Presence("a", a.session_id, here=True)
    sizes = [0, 1, 65_535, 65_536, 65_537, 3, LIMIT, 0, 5, 262_144, LIMIT]
    payloads = [os.urandom(size) for size in sizes]
    for number, payload in enumerate(payloads):
        a.send(("hub",), FrameKind.MESSAGE, Turn(number), payload)
        hub.send(("a",), FrameKind.MESSAGE, Turn(number, 1), payload)
    for receiver, attempt in ((hub, 0), (a, 1)):
        found = [until(receiver, ReceivedFrame) for _ in payloads]
        assert [frame.payload for frame in found] == payloads
        headers = [frame.header for frame in found]
        assert [header.number for header in headers] == list(range(1, len(payloads) + 1))
        assert [header.turn for header in headers] == [Turn(number, attempt) for number in range(len(payloads))]


def test_a_frame_above_the_limit_is_discarded_and_the_next_one_arrives(site: Site) -> None:
    hub, a = site.hub(("a",)), site.agent("a", message_limit=4 * LIMIT)
    until(a, Presence)
    a.send(("hub",), FrameKind.MESSAGE, Turn(3), bytes(LIMIT + 1))
    a.send(("hub",), FrameKind.MESSAGE, Turn(4), b"next")
    found = until(hub, Oversized)
    assert (found.sender, found.header.turn, found.length, found.limit) == ("a", Turn(3), LIMIT + 1, LIMIT)
    assert until(hub, ReceivedFrame).payload == b"next"
    assert (hub.limit_of("a"), a.limit_of("hub")) == (4 * LIMIT, LIMIT)


def test_two_nodes_that_dial_each_other_hear_every_frame_once(site: Site, tmp_path: Path) -> None:
    """Two links stand between them, and each frame takes one of them."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        other = f"127.0.0.1:{one.getsockname()[1]}"
    a = site._keep("a", ("b",), {}, listen=site.address, dial={"b": other})
    b = site._keep("b", ("a",), {}, listen=other, dial={"a": site.address})
    wait_for(lambda: len(a._links["b"]) == len(b._links["a"]) == 2, "two links")
    for number in range(20):
        a.send(("b",), FrameKind.MESSAGE, Turn(number), b"x")
    assert [until(b, ReceivedFrame).header.number for _ in range(20)] == list(range(1, 21))
    assert b.take(0.2) is None
    presences = [until(a, Presence)]
    assert presences == [Presence("b", b.session_id, here=True)]


# --- who gets a link --------------------------------------------------------------------------------------------


def test_an_agent_that_is_not_on_the_roster_is_told_so(site: Site) -> None:
    hub, c = site.hub(("a", "b")), site.agent("c")
    assert until(c, Refusal) == Refusal("hub", "'c' is not on the roster of 'hub'", final=True)
    assert hub.take(0.1) is None


def test_callers_that_are_refused_are_named_in_the_log(site: Site) -> None:
    """By name and address, with the reason; however often they call, once in a while."""
    hub = site.hub(("a", "b"))
    old = site.folder("b").with_name("old")
    shutil.copytree(site.folder("b"), old)
    site.authority.revoke("b")
    hub.bar("a", "it is excluded from the run: 3 bad messages")
    site.agent("c")

    def call(folder: Path | None) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if folder:
            context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        with suppress(OSError), context.wrap_socket(socket.create_connection(("127.0.0.1", site.port), SOON)) as caller:
            _all_of(caller)

    def told() -> list[str]:
        return [text for text in site.told if text.startswith("refused")]

    for folder in (old, site.folder("a"), None) * 3:
        call(folder)
    expected = [
        "refused 'c' at 127.0.0.1: 'c' is not on the roster of 'hub'",
        "refused a caller at 127.0.0.1: The certificate of agent 'b' must be valid. Found: generation 1 is revoked",
        "refused 'a' at 127.0.0.1: it is excluded from the run: 3 bad messages",
        "refused a caller at 127.0.0.1: no TLS handshake (peer did not return a certificate)",
    ]
    wait_for(lambda: len(told()) >= len(expected), "four callers")
    assert sorted(told()) == sorted(expected)


def test_a_node_that_connects_again_and_again_is_refused_for_a_while(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three connections are in the allowance here: the fourth is refused, one of another node is not."""
    monkeypatch.setattr(options, "_JOINS", 3.0)
    monkeypatch.setattr(options, "_JOINS_PER_SECOND", 0.0)
    hub = site.hub(("a", "b"))
    hub._openings = options.join_allowance(silence=3.0)
    for number in range(4):
        with site.caller("a") as caller:
            caller.sendall(preface("a"))
            if number < 3:
                wait_for(lambda: bool(hub._links["a"]), "a link")
            else:
                assert b"'a' connects too often" in _all_of(caller)
        wait_for(lambda: not hub._links["a"], "the link has ended")
    with site.caller("b") as caller:
        caller.sendall(preface("b"))
        wait_for(lambda: bool(hub._links["b"]), "a link")


def test_lines_about_callers_are_bounded_and_none_is_uncounted() -> None:
    now, told = [0.0], list[str]()
    log = CallerLog(told.append, lambda: now[0])
    for _ in range(1000):
        log("'x' at 10.0.0.1", "unknown")
    assert told == ["refused 'x' at 10.0.0.1: unknown"]
    for number in range(10_000):
        log(f"'x{number}' at 10.0.0.1", "unknown")
    assert len(told) == 20  # all that there are at once
    assert len(log._callers) <= 500
    now[0] = 600.0  # a twentieth of a line per second would be 30, a thirtieth is 20, as many as can be saved up
    log("'x9999' at 10.0.0.1", "unknown")
    log("'x9999' at 10.0.0.1", "unknown")
    assert told[20:] == ["refused 'x9999' at 10.0.0.1: unknown (and 1 more times before)"]


def test_a_name_in_the_preface_other_than_that_of_the_certificate(site: Site) -> None:
    hub = site.hub()
    with site.caller("a") as caller:
        caller.sendall(preface("b"))
        assert b"the name 'b' in a connection of 'a'" in _all_of(caller)
    assert hub.take(0.1) is None


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"codistil\xff\xff" + bytes(40), preface("")[:20]])
def test_a_member_that_speaks_another_protocol_is_disconnected(
    site: Site, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("codistill.network.listener._OPENING", 0.5)
    hub = site.hub()
    with site.caller("a") as caller:
        caller.sendall(data)
        answer = _all_of(caller)
    if data.startswith(b"codistil\xff"):
        assert f"version {WIRE_VERSION} of the wire format is needed, not 65535".encode() in answer
    assert hub.take(0.1) is None


def _all_of(caller: socket.socket) -> bytes:
    """All that is received until the other end closes."""
    found = b""
    try:
        while chunk := caller.recv(1 << 16):
            found += chunk
    except OSError:
        pass
    return found


def test_a_certificate_that_is_revoked_closes_its_link_and_the_next_one_is_accepted(site: Site) -> None:
    """Neither needs a restart."""
    hub, a = site.hub(("a",)), site.agent("a")
    assert until(hub, Presence).here
    site.authority.revoke("a")
    assert not until(hub, Presence).here
    refusal = until(a, Refusal)
    assert refusal.final
    assert "The certificate of agent 'a' must be valid" in refusal.why
    assert hub.revoked() == ["a"]
    assert sum("'a' is disconnected" in text for text in site.told) == 1
    a.close()
    site.authority.issue("agent", "a", days=3)
    again = site.agent("a")
    assert until(hub, Presence) == Presence("a", again.session_id, here=True)
    assert hub.revoked() == []


def test_a_renewed_certificate_is_used_without_a_restart(site: Site) -> None:
    hub, a = site.hub(("a",)), site.agent("a")
    assert until(hub, Presence).here
    before = hub._links["a"][0].certificate
    site.authority.renew("a", days=2)
    site.authority.renew("127.0.0.1", days=2)
    hub.loop.call_soon_threadsafe(hub._links["a"][0].close, "to connect again")
    assert not until(hub, Presence).here
    assert until(hub, Presence) == Presence("a", a.session_id, here=True)
    assert hub._links["a"][0].certificate != before


def test_a_barred_node_is_told_why_and_cannot_connect_again(site: Site) -> None:
    hub, a = site.hub(("a",)), site.agent("a")
    assert until(hub, Presence).here
    hub.bar("a", "it is excluded from the run: 3 bad messages")
    for _ in range(2):  # when it is barred, and when it comes again
        assert until(a, Refusal).why == "it is excluded from the run: 3 bad messages"
    assert not until(hub, Presence).here
    assert hub.take(0.1) is None


def test_one_node_has_a_bounded_number_of_links(site: Site) -> None:
    hub = site.hub(("a",))
    callers = [site.caller("a") for _ in range(4)]
    for number, caller in enumerate(callers):
        caller.sendall(Preface(number, 10.0, LIMIT, "a").encode())
        if number < 3:
            assert until(hub, Presence).session_id == number
    assert b"'a' has 3 connections already" in _all_of(callers[3])
    for caller in callers:
        caller.close()


# --- what a caller can make a node hold ---------------------------------------------------------------------------


def test_a_node_that_takes_nothing_delays_nobody_and_is_disconnected(site: Site) -> None:
    hub = site.hub(("a", "b"), message_limit=1 << 24)
    deaf = site.caller("a")
    deaf.sendall(Preface(7, 1.0, 1 << 24, "a").encode())
    b = site.agent("b", message_limit=1 << 24)
    for _ in range(2):
        assert until(hub, Presence).here
    began = time.monotonic()
    for _ in range(6):  # far more than the buffers of a socket hold
        hub.send(("a", "b"), FrameKind.MESSAGE, Turn(0), bytes(1 << 24))
    assert time.monotonic() - began < 1.0, "sending waits for nobody"
    for _ in range(6):
        deaf.sendall(record(FrameKind.PING, b""))  # it is not silent
        assert len(until(b, ReceivedFrame).payload) == 1 << 24
    while (gone := hub.take(0.2)) is None:
        deaf.sendall(record(FrameKind.PING, b""))
        assert time.monotonic() - began < SOON
    assert gone == Presence("a", 7, here=False)
    deaf.close()


def test_what_a_node_says_that_it_accepts_does_not_decide_how_much_is_kept_for_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_BACKLOG", 0)
    hub, kept, most = site.hub(("a",)), 0, 8 * LIMIT
    with site.caller("a") as deaf:
        deaf.sendall(Preface(7, 600.0, 1 << 60, "a").encode())
        assert until(hub, Presence).here
        for _ in range(64):
            hub.send(("a",), FrameKind.MESSAGE, Turn(0), bytes(LIMIT))
            time.sleep(0.01)
            kept = max(kept, hub.untaken("a") or 0)
        assert until(hub, Presence) == Presence("a", 7, here=False)
        assert hub.untaken("a") is None
    assert LIMIT < kept <= most + LIMIT + 1000  # one more is added to the most that may wait before it


def test_a_silent_node_is_disconnected_after_its_lease(site: Site) -> None:
    hub = site.hub(("a",))
    with site.caller("a") as caller:
        caller.sendall(Preface(7, 0.5, LIMIT, "a").encode())
        assert until(hub, Presence).here
        began = time.monotonic()
        assert not until(hub, Presence).here
        assert time.monotonic() - began > 0.3


def test_an_idle_link_stays_because_both_ends_send_signs_of_life(site: Site) -> None:
    hub, a = site.hub(("a",), lease=0.5), site.agent("a", lease=0.5)
    assert until(hub, Presence).here
    assert until(a, Presence).here
    assert (hub.take(2.0), a.take(0.0)) == (None, None)


HOLDS_THE_LOCK = """
import ctypes, sys
from pathlib import Path
from codistill.certs.credentials import Credentials
from codistill.network.frames import FrameKind, Turn
from codistill.network.options import Network
from codistill.network.transport import Transport

folder, me, other, place, lease, seconds = sys.argv[1:]
own = Credentials(Path(folder), "hub" if me == "hub" else "agent")
where = {"listen": place} if me == "hub" else {"dial": {other: place}}
link = Transport(me, (other,), Network(message_limit=1 << 20, lease=float(lease)), own, limit=1 << 20, **where)
while link.take(0.1) is None:
    pass
link.send((other,), FrameKind.MESSAGE, Turn(0), b"before")
sys.stdin.read(1)
ctypes.PyDLL(None).usleep(int(1e6 * float(seconds)))  # a PyDLL keeps Python's lock while it calls
link.send((other,), FrameKind.MESSAGE, Turn(0), b"after")
sys.stdin.read(1)
"""


@pytest.mark.parametrize(
    ("lease", "seconds"), [(1.5, 4.0), pytest.param(10.0, 20.0, marks=pytest.mark.long)], ids=["short", "20 s"]
)
@pytest.mark.parametrize("holds", ["a", "hub"])
def test_a_process_that_holds_pythons_lock_keeps_its_link(site: Site, holds: str, lease: float, seconds: float) -> None:
    """For longer than the lease, with more on its way to it than its machine takes in: its system answers for it."""
    other = "hub" if holds == "a" else "a"
    mine = site.hub(("a",), lease=lease) if other == "hub" else None
    place = [str(site.folder(holds)), holds, other, site.address, str(lease), str(seconds)]
    process = subprocess.Popen([sys.executable, "-c", HOLDS_THE_LOCK, *place], stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        mine = mine or site.agent("a", lease=lease)
        assert until(mine, Presence).here
        assert until(mine, ReceivedFrame).payload == b"before"
        process.stdin.write(b".")
        process.stdin.flush()
        time.sleep(0.3)
        for _ in range(32):  # more than the buffers of both systems hold
            mine.send((holds,), FrameKind.MESSAGE, Turn(0), os.urandom(LIMIT))
        event = next(event for event in iter(lambda: mine.take(seconds + SOON), None))
        assert isinstance(event, ReceivedFrame), (event, site.told)
        assert event.payload == b"after"
    finally:
        process.kill()
        process.communicate()


def test_a_machine_that_does_not_answer_is_given_up_after_the_lease(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its system does not confirm what is sent; over a real network: the trial `namespaces`."""
    hub, a = site.hub(("a",), lease=0.5), site.agent("a")
    assert until(hub, Presence).here
    assert until(a, Presence).here
    link = hub._links["a"][0]
    assert not stream.waits_for_answer(link._socket)
    began = time.monotonic()
    monkeypatch.setattr(stream, "waits_for_answer", lambda connection: connection is link._socket)
    assert not until(hub, Presence).here
    assert link._why == "its machine has not answered for 0.5 s"
    assert time.monotonic() - began > 0.5


def test_the_system_asks_after_a_silent_machine_within_the_lease() -> None:
    """First after `idle` seconds, then `count` times at intervals: together the lease, or the least that TCP has."""
    for lease in (0.5, 5.0, 10.0, 60.0, 600.0):
        with socket.socket() as one:
            stream.keep_alive(one, lease)
            idle, interval, count = (
                one.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"))
                for name in ("IDLE", "INTVL", "CNT")
            )
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert idle + interval * count == pytest.approx(max(4, lease), rel=0.1)


def test_silence_is_at_least_the_lease() -> None:
    with pytest.raises(RecipeError, match="silence = 300, lease = 400"):
        Network(lease=400)
    assert Network(lease=400, silence=500).silence == 500


def test_what_is_not_taken_from_the_inbox_is_not_read_ahead(site: Site) -> None:
    """A flood waits at its sender: the receiver holds little more than its limit, and loses nothing."""
    hub, a = site.hub(("a", "b")), site.agent("a")
    until(a, Presence)
    for number in range(50):
        a.send(("hub",), FrameKind.MESSAGE, Turn(number), bytes(LIMIT))
    wait_for(lambda: hub.inbox.is_full("a"), "a full queue")
    time.sleep(0.3)
    held = hub.inbox._held["a"]
    assert held <= hub.inbox.room + 2 * LIMIT, held
    b = site.agent("b")
    wait_for(lambda: bool(hub._links["b"]), "b is there")
    b.send(("hub",), FrameKind.MESSAGE, Turn(0), b"of b")
    wait_for(lambda: hub.inbox._held["b"] > 512, "b's frame")
    first: list[Event | None] = [hub.take(0.0) for _ in range(6)]
    assert any(isinstance(event, ReceivedFrame) and event.sender == "b" for event in first), "senders take turns"
    rest = sum(isinstance(event, ReceivedFrame) and event.sender == "a" for event in first)
    assert rest + sum(until(hub, ReceivedFrame).sender == "a" for _ in range(50 - rest)) == 50


def test_memory_grows_with_what_arrives_and_not_with_what_is_announced(site: Site) -> None:
    hub = site.hub(("a",), message_limit=1 << 30)
    with site.caller("a") as caller:
        caller.sendall(preface("a"))
        assert until(hub, Presence).here
        caller.sendall(record(FrameKind.MESSAGE, bytes(1 << 16), length=1 << 30))
        link = hub._links["a"][0]
        wait_for(lambda: link.reader._filled == 1 << 16, "the beginning of the message")
        assert len(link.reader._body) <= 1 << 20


def test_an_empty_kind_of_frame_has_no_content(site: Site) -> None:
    hub = site.hub(("a",))
    with site.caller("a") as caller:
        caller.sendall(preface("a") + record(FrameKind.PING, b"x" * 100) + record(FrameKind.MESSAGE, b"yes", 2))
        assert until(hub, Oversized).limit == 0
        assert until(hub, ReceivedFrame).payload == b"yes"


@pytest.mark.parametrize(
    "data",
    [
        record(FrameKind.MESSAGE, b"", length=1 << 63),
        record(FrameKind.PING, b"") * 400,
        (1 << 40).to_bytes(8, "little") + b"\xff" * 23,
    ],
    ids=["endless", "pings", "malformed"],
)
def test_what_an_honest_node_never_sends_ends_its_connection(site: Site, data: bytes) -> None:
    """Otherwise it could keep a receiver busy with reading and discarding."""
    hub = site.hub(("a",))
    with site.caller("a") as caller:
        caller.sendall(preface("a") + data)
        assert until(hub, Presence).here
        assert not until(hub, Presence).here


def test_bytes_that_arrive_in_any_pieces_are_the_same_frames() -> None:
    """One byte at a time, or all at once: also across the end of the buffer, and with frames that are skipped."""
    frames = [(FrameKind.MESSAGE, os.urandom(size)) for size in (0, 1, 70_000, 5, 3 << 20, 9, 200_000)]
    data = preface("a") + b"".join(record(kind, payload, number) for number, (kind, payload) in enumerate(frames))
    malformed = record(FrameKind.MESSAGE, os.urandom(30_000))
    data += malformed[:8] + b"\xff" + malformed[9:] + record(FrameKind.MESSAGE, b"last", 7)

    class Handler:
        def __init__(self) -> None:
            self.taken: list[Any] = []

        def take_preface(self, found: Preface) -> None:
            self.taken.append(found.name)

        def largest(self, kind: FrameKind) -> int:
            return 1 << 20

        def take_frame(self, header: FrameHeader, payload: bytes) -> None:
            self.taken.append((header.number, payload))

        def take_malformed(self, why: str) -> None:
            self.taken.append(why)

        def take_oversized(self, header: FrameHeader, length: int, limit: int) -> None:
            self.taken.append((header.number, length, limit))

    expected = ["a", *enumerate(payload for _, payload in frames)]
    expected[5] = (4, 3 << 20, 1 << 20)
    expected += ["unknown frame kind 255", (7, b"last")]
    for step in (17, 1000, 65_536, 1 << 20):
        handler = Handler()
        reader, at = FrameReader(handler), 0
        while at < len(data):
            into = reader.buffer()
            count = min(len(into), step, len(data) - at)
            into[:count] = data[at : at + count]
            into.release()
            reader.received(count)
            at += count
        assert handler.taken == expected, step


def test_senders_take_turns() -> None:
    inbox = Inbox(("a", "b"), 1 << 20, lambda name: None)
    header = FrameHeader(FrameKind.MESSAGE, 7, 1)
    for number in range(1000):
        inbox.put(ReceivedFrame("a", header, str(number).encode()))
    inbox.put(ReceivedFrame("b", header, b"b"))
    taken = [inbox.take(0) for _ in range(1001)]
    assert [event.sender for event in taken[:3] if event] == ["a", "b", "a"]
    assert [event.payload for event in taken if isinstance(event, ReceivedFrame) and event.sender == "a"] == [
        str(number).encode() for number in range(1000)
    ]
    assert inbox.take(0) is None


CROWD = """
import resource, socket, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from codistill.certs.credentials import Credentials
from codistill.network.frames import FrameKind, Turn
from codistill.network.frames import Presence, ReceivedFrame
from codistill.network.options import Network
from codistill.network.transport import Transport
certs, port = Path(sys.argv[1]), int(sys.argv[2])
hub = Transport("hub", ("a",), Network(), Credentials(certs, "hub"), listen=f"127.0.0.1:{port}", tell=print)
print("listens", flush=True)
frames = 0
while frames < 2:
    event = hub.take(60)
    assert event is not None, "nobody came"
    if isinstance(event, ReceivedFrame):
        frames += 1
        with open(certs / "written", "a") as file:  # a file that must be written
            file.write("x")
        print("frame", len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0, flush=True)
"""


def test_strangers_cannot_use_up_the_descriptors_of_a_hub(site: Site) -> None:
    """1,500 silent connections, a limit of 1,024 descriptors: an agent joins all the same, and files are written."""
    command = [sys.executable, "-c", CROWD, str(site.folder("hub")), str(site.port)]
    hub = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    strangers: list[socket.socket] = []
    try:
        assert hub.stdout is not None
        assert hub.stdout.readline() == "listens\n"
        a = site.agent("a")
        until(a, Presence)
        a.send(("hub",), FrameKind.MESSAGE, Turn(0), b"before")
        assert hub.stdout.readline().startswith("frame")
        for _ in range(1500):
            strangers.append(socket.create_connection(("127.0.0.1", site.port), timeout=SOON))
            if len(strangers) > 700:  # this process has a limit, too
                strangers.pop(0).close()
        a.close()
        again = site.agent("a")
        assert until(again, Presence).here, "an agent joins during the attack"
        again.send(("hub",), FrameKind.MESSAGE, Turn(0), b"during")
        assert int(hub.stdout.readline().split()[1]) < 300
        assert hub.wait(timeout=SOON) == 0
    finally:
        hub.kill()
        hub.communicate()
        for one in strangers:
            one.close()


def test_too_few_descriptors_are_an_error_before_anything_is_opened(tmp_path: Path) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "from codistill.network.transport import reserve_descriptors as r\n"
        "print(r(20)); r(100)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout == "18\n"
    assert "needs 476 file descriptors" in ended.stderr
    assert "this process may have 256" in ended.stderr


def test_an_address_that_is_in_use(site: Site) -> None:
    site.hub()
    with pytest.raises(NetworkError, match="must be free to listen at"):
        site.hub()


def test_a_folder_that_is_replaced_while_the_hub_runs(site: Site, tmp_path: Path) -> None:
    """A certificate of another authority in the place of the own one: links that stand go on."""
    hub, a = site.hub(("a",)), site.agent("a")
    assert until(hub, Presence).here
    assert until(a, Presence).here  # both ends, or the message below has no link yet
    shutil.copytree(site.folder("a"), tmp_path / "kept")
    (site.folder("hub") / "cert.pem").write_text("damaged")
    a.send(("hub",), FrameKind.MESSAGE, Turn(0), b"still here")
    assert until(hub, ReceivedFrame).payload == b"still here"
