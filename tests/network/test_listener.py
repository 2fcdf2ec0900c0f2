"""Who gets in where more connect than a hub can serve: over real sockets with mutual TLS, against a hub's transport."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.network.test_transport import SOON, Site, preface, until, wait_for

from codistill.certs.credentials import Credentials
from codistill.network import listener
from codistill.network.agent import probe
from codistill.network.frames import Presence
from codistill.network.listener import network_of
from codistill.network.transport import Transport

MOST = 16  # pending connections of the hub here
STRANGERS = 4 * MOST


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A hub on which nobody's time ever ends, unless a test says so: only what others do can push a connection out."""
    monkeypatch.setattr("codistill.network.transport.reserve_descriptors", lambda nodes: MOST)
    for name in ("_OPENING", "_HELLO", "_ANSWER"):
        monkeypatch.setattr(listener, name, 60.0)
    made = Site(tmp_path)
    yield made
    for transport in made.open:
        transport.close(0.2)


class Halves:
    """A connection that goes through its handshake step by step."""

    def __init__(self, site: Site, name: str | None, source: str = "127.0.0.1") -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if name:
            context.load_cert_chain(site.folder(name) / "cert.pem", site.folder(name) / "key.pem")
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing)
        self.link = socket.create_connection(("127.0.0.1", site.port), SOON, source_address=(source, 0))

    def greet(self) -> None:
        """Send the first half."""
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        self.link.sendall(self._outgoing.read())

    def is_answered(self) -> bool:
        """Whether the hub's answer arrives; False if it closes the connection."""
        with suppress(OSError):
            return bool(self.link.recv(1, socket.MSG_PEEK))
        return False

    def finish(self, name: str) -> None:
        """Take the hub's answer, send the second half and say who this is."""
        while True:
            self._incoming.write(self.link.recv(1 << 16))
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                continue
        self._tls.write(preface(name))
        self.link.sendall(self._outgoing.read())


@pytest.fixture
def crowd(site: Site) -> Iterator[Callable[..., list[Halves]]]:
    """Makes strangers that send the first half of a handshake, and nothing else."""
    made: list[Halves] = []

    def come(count: int = STRANGERS, sources: tuple[str, ...] = ("127.0.0.1",)) -> list[Halves]:
        for number in range(count):
            made.append(Halves(site, None, sources[number % len(sources)]))
            with suppress(OSError):
                made[-1].greet()
        return made

    yield come
    for each in made:
        each.link.close()


def _is_full(hub: Transport) -> bool:
    """As many as may be are pending, and as many handshakes as may be have begun."""
    pending = hub._listener
    assert pending is not None
    return len(pending._pending) == MOST and len(pending._stages[listener._Stage.BEGUN]) == 3 * MOST // 4


def test_a_handshake_that_has_begun_is_not_pushed_out_by_those_that_come_later(
    site: Site, crowd: Callable[..., list[Halves]]
) -> None:
    """From the same address, without the mark: what has been answered has time for its second half."""
    hub, honest = site.hub(("a", "b")), Halves(site, "a")
    honest.greet()
    assert honest.is_answered()
    crowd()
    wait_for(lambda: _is_full(hub), "a crowd")
    honest.finish("a")
    assert until(hub, Presence) == Presence("a", 7, here=True)
    honest.link.close()


def test_an_agent_is_served_before_strangers_of_its_own_address(site: Site, crowd: Callable[..., list[Halves]]) -> None:
    """The strangers hold all places and all handshakes, and never give one back."""
    hub = site.hub(("a", "b"))
    crowd()
    wait_for(lambda: _is_full(hub), "a crowd")
    a = site.agent("a")
    assert until(hub, Presence) == Presence("a", a.session_id, here=True)
    assert hub._listener is not None
    assert len(hub._listener._pending) <= MOST


@pytest.mark.parametrize("sources", [("127.0.0.1",), ("127.0.0.1", "127.0.0.3")])
def test_an_address_that_holds_less_gets_a_place_and_a_handshake(
    site: Site, crowd: Callable[..., list[Halves]], sources: tuple[str, ...]
) -> None:
    """Also without the mark, from an address of its own."""
    hub = site.hub(("a", "b"))
    crowd(sources=sources)
    wait_for(lambda: _is_full(hub), "a crowd")
    honest = Halves(site, "a", "127.0.0.2")
    honest.greet()
    assert honest.is_answered()
    honest.finish("a")
    assert until(hub, Presence) == Presence("a", 7, here=True)
    honest.link.close()


def test_many_addresses_do_not_push_out_a_handshake_that_has_begun(
    site: Site, crowd: Callable[..., list[Halves]]
) -> None:
    """Each of them has one connection, as the honest caller has."""
    hub, honest = site.hub(("a", "b")), Halves(site, "a")
    honest.greet()
    assert honest.is_answered()
    crowd(sources=tuple(f"127.0.1.{number}" for number in range(1, STRANGERS + 1)))
    wait_for(lambda: _is_full(hub), "a crowd")
    honest.finish("a")
    assert until(hub, Presence) == Presence("a", 7, here=True)
    honest.link.close()


def test_a_caller_without_the_mark_gets_in_once_strangers_had_time_to_answer(
    site: Site, crowd: Callable[..., list[Halves]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_ANSWER", 0.1)
    hub = site.hub(("a", "b"))
    crowd(MOST)
    wait_for(lambda: _is_full(hub), "a crowd")
    honest = Halves(site, "a")
    honest.greet()
    assert honest.is_answered()
    honest.finish("a")
    assert until(hub, Presence) == Presence("a", 7, here=True)
    honest.link.close()


def test_nothing_is_kept_of_connections_that_have_ended(
    site: Site, crowd: Callable[..., list[Halves]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = site.hub(("a", "b"))
    pending = hub._listener
    assert pending is not None
    silent = [socket.create_connection(("127.0.0.1", site.port), SOON) for _ in range(3)]
    crowd(sources=("127.0.0.1", "127.0.0.2", "127.0.0.3"))
    wait_for(lambda: len(pending._pending) == MOST, "a crowd")
    monkeypatch.setattr(listener, "_OPENING", 0.1)
    wait_for(lambda: not pending._pending, "all are closed")
    assert (pending._callers, pending._by_size, pending._largest) == ({}, {}, 0)
    assert not any(pending._stages)
    assert not any(pending._turns.values())
    for one in silent:
        assert one.recv(1) == b""
        one.close()


def test_a_test_connection_that_is_closed_to_make_room_is_tried_again(site: Site) -> None:
    """A hub closes it in the middle of its handshake without an alert: that says nothing about the certificate.

    It has the mark of the federation, as every connection of an agent has.
    """
    own, hellos = Credentials(site.folder("a"), "agent"), list[bytes]()
    with socket.create_server(("127.0.0.1", site.port)) as hub:

        def close() -> None:
            connection, _ = hub.accept()
            with connection:
                hellos.append(connection.recv(1 << 16))

        busy = threading.Thread(target=close)
        busy.start()
        said = probe(site.address, "hub", own)
        busy.join()
    assert said is not None
    assert "closed the connection: it may be too busy" in said
    assert own.marks()[0] in hellos[0]


def test_what_counts_as_one_address() -> None:
    """A machine has all 2^64 addresses of its IPv6 network, and one of IPv4."""
    assert network_of("192.0.2.7") == "192.0.2.7" != network_of("192.0.2.8")
    assert network_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2%eth0") != network_of("2001:db8:0:1::1")


def test_a_process_that_was_stopped_does_not_blame_its_callers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a hub's thread stands still for longer than a handshake may take, its callers wait, and are not closed."""
    monkeypatch.setattr(listener, "_OPENING", 1.2)
    hub, honest = site.hub(("a", "b")), Halves(site, "a")
    honest.greet()
    assert honest.is_answered()
    hub.loop.call_soon_threadsafe(time.sleep, 2.5)
    time.sleep(0.2)
    honest.finish("a")
    assert until(hub, Presence) == Presence("a", 7, here=True)
    honest.link.close()
