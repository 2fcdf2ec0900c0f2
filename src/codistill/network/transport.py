"""One node's end of the network: a link to each of some other nodes, known by the names in their certificates.

Links are TCP connections with mutual TLS 1.3. They belong to one thread, which only moves bytes; the owner of the
transport sends frames to names, and takes what has arrived from the inbox. Certificates are checked for every new
connection, and again every second: a new revocation list or certificate needs no restart.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from codistill.core.errors import NetworkError
from codistill.network.frames import MESSAGES, Event, FrameHeader, FrameKind, Inbox, Preface, Presence, Refused, Turn
from codistill.network.link import CONTROL_LIMIT, HELLO_LIMIT, Stream, keep_connected, secured
from codistill.network.listener import Listener, listen
from codistill.network.log import CallerLog
from codistill.network.options import Network, join_allowance
from codistill.wire.codec import SIZE_LIMIT

if TYPE_CHECKING:
    from codistill.certs.credentials import Credentials

_BEFORE_TERMS = 1 << 20  # bytes of the largest message until the run is known
_LATE = 1.0  # seconds by which the thread of the links may be late
_CHECK = 1.0  # seconds between two checks of certificates and of the revocation list
_REMIND = 600.0  # seconds between two log lines about the same problem
_TURNED_AWAY = 60.0  # seconds between two log lines about connections that were not admitted

Tell = Callable[[str], None]  # takes a sentence for the operator


def ignore(*_: Any, **__: Any) -> None:
    """Where nobody wants to know."""


class Transport:
    """Sends frames to nodes by name, and collects what they send in an inbox."""

    def __init__(
        self,
        me: str,
        others: Sequence[str],
        network: Network,
        credentials: Credentials | None,
        *,
        listen: str | None = None,
        dial: Mapping[str, str] | None = None,
        limit: int | None = None,
        tell: Tell = ignore,
    ) -> None:
        """`dial`: addresses by name; `limit`: bytes of the largest message; None: set later by `accept`."""
        self.me, self.others = me, tuple(others)
        self.limit = limit or _BEFORE_TERMS
        self.session_id = secrets.randbits(64)
        self.loop = asyncio.new_event_loop()
        self.lease = network.lease
        self.preface = Preface(self.session_id, network.silence, limit or SIZE_LIMIT, me)
        self.inbox = Inbox(self.others, self.limit + CONTROL_LIMIT, partial(self._soon, self._resume))
        self._credentials, self._tell, self._callers = credentials, tell, CallerLog(tell)
        if credentials is not None:
            credentials.set_list_grace(network.list_grace)
        self._links: dict[str, list[Stream]] = {name: [] for name in self.others}
        self._numbers = dict.fromkeys(self.others, 0)
        self._openings = join_allowance(network.silence)
        self._barred: dict[str, str] = {}  # nodes that are not admitted any more, and why
        self._revoked: set[str] = set()  # nodes whose link was closed because of their certificate
        self._troubles: dict[str, float] = {}  # what was logged, and when
        self._listener = self._listen(listen) if listen else None
        self._tick = min(0.25, network.lease / 8)
        self._dialling = [
            self.loop.create_task(keep_connected(address, credentials, self.loop, partial(Stream, self, expected=name)))
            for name, address in (dial or {}).items()
        ]
        self._looking = self.loop.create_task(self._look_after_links())
        self._thread = threading.Thread(target=self._run, name=f"links of {me}", daemon=True)
        self._thread.start()

    # --- for the owner, in its thread -------------------------------------------------------------

    def send(self, receivers: Sequence[str], kind: FrameKind, turn: Turn, payload: bytes = b"") -> None:
        """Queue a frame for each receiver; never blocks, and a slow receiver does not delay the others."""
        frames = []
        for name in receivers:
            self._numbers[name] += 1
            frames.append((name, FrameHeader(kind, self.session_id, self._numbers[name], turn).encode()))
        self._soon(self._send, frames, payload)

    def take(self, timeout: float) -> Event | None:
        return self.inbox.take(timeout)

    def accept(self, limit: int) -> None:
        """Accept messages of up to `limit` bytes, now that the run is known."""
        self.limit = limit
        self.inbox.room = limit + CONTROL_LIMIT

    def limit_of(self, name: str) -> int:
        """Bytes of the largest message that a node accepts, by its own preface."""
        return min((link.theirs.limit for link in self._links[name] if link.theirs), default=self.limit)

    def is_behind(self, name: str) -> bool:
        """Whether a node has not yet read what was sent to it."""
        return any(link.is_stuck for link in self._links[name])

    def untaken(self, name: str) -> int | None:
        """Bytes that are queued for a node; None without a link."""
        return max((link.waiting for link in self._links[name]), default=None)

    def bar(self, name: str, why: str) -> None:
        """Close the links of a node, tell it why, and accept no more links of it."""
        self._barred[name] = why
        self._soon(self._close_links, name, why)

    def revoked(self) -> list[str]:
        """Nodes whose certificate was accepted before and is no longer."""
        return list(self._revoked)

    def close(self, seconds: float = 2.0) -> None:
        """Send what is queued, waiting at most `seconds`, and close all links."""
        if self._thread.is_alive():
            with suppress(RuntimeError):
                asyncio.run_coroutine_threadsafe(self._close(seconds), self.loop)
            self._thread.join(timeout=seconds + 2.0)

    def _soon(self, step: Callable[..., None], *given: Any) -> None:
        """Let the thread of the links do something, unless the transport is closed."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(step, *given)

    # --- the thread of the links -------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(self._failed)
        self.loop.run_forever()
        self.loop.close()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError | EOFError | None):
            self._tell_once(f"error in a link: {context.get('message')}: {error!r}")

    def _send(self, frames: list[tuple[str, bytes]], payload: bytes) -> None:
        for name, header in frames:
            sent = set()
            for link in self._links[name]:
                # Two nodes that dial each other have two links: a frame uses the first one of each session.
                if link.theirs is not None and link.theirs.session_id not in sent:
                    sent.add(link.theirs.session_id)
                    link.send(header, payload)

    def _resume(self, name: str) -> None:
        """There is room in the inbox again."""
        for link in self._links[name]:
            link.read_on(on=not self.inbox.is_full(name))

    def _close_links(self, name: str, why: str) -> None:
        for link in tuple(self._links[name]):
            link.refuse(why, final=True)

    async def _close(self, seconds: float) -> None:
        if self._listener is not None:
            self._listener.close()
        links = [link for links in self._links.values() for link in links]
        end = self.loop.time() + seconds
        while any(link.waiting for link in links if not link.is_closed) and self.loop.time() < end:
            await asyncio.sleep(0.01)
        for link in links:
            link.close("this node is closing")
        end = min(end, self.loop.time() + 0.5)
        while any(self._links.values()) and self.loop.time() < end:
            await asyncio.sleep(0.005)
        for link in links:
            link.end()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.loop.stop()

    def _listen(self, address: str) -> Listener:
        try:
            most = reserve_descriptors(len(self.others))
            marks = tuple if self._credentials is None else self._credentials.marks
            return Listener(listen(address), most, self._shake_hands, self.loop, self._handshake_failed, marks)
        except BaseException:
            self.loop.close()
            raise

    # --- connections to this node -------------------------------------------------------------------

    async def _shake_hands(self, connection: socket.socket) -> None:
        """TLS and the preface of a connection to this node; ends when it is admitted, or closed."""
        stream = Stream(self, await secured(connection, self._credentials, self.loop, server=True))
        try:
            stream.start()
            if not stream.is_closed and self._listener is not None:
                self._listener.is_known(connection)
            if not await asyncio.shield(stream.opening):
                await asyncio.shield(stream.ended)
        except BaseException:
            stream.close("not open in time", at_once=True)
            raise

    # --- for streams: who is admitted ---------------------------------------------------------------

    def identify(self, stream: Stream) -> None:
        """Set the name in the certificate of the other end; raises `Refused` if it is not admitted."""
        if self._credentials is None:
            return
        name = self._admitted(stream.certificate or b"")
        if stream.expected is not None and name != stream.expected:
            self._tell_once(f"the node at the address of '{stream.expected}' is '{name}'")
            raise Refused(f"this is not '{stream.expected}'", final=False)
        stream.name = name
        self._check_known(name)

    def opened(self, stream: Stream) -> None:
        """The other end has sent its preface: it may send frames. Raises `Refused` if it is not admitted."""
        name = stream.name or ""
        self._check_known(name)
        if stream.expected not in (None, name):
            raise Refused(f"this is not '{stream.expected}'", final=False)
        links = self._links[name]
        if not self._openings.take(name):
            raise Refused(f"'{name}' connects too often", final=False)
        if len(links) >= LINKS:
            raise Refused(f"'{name}' has {len(links)} connections already", final=False)
        theirs = stream.theirs
        assert theirs is not None
        new = theirs.session_id not in {link.theirs.session_id for link in links if link.theirs}
        links.append(stream)
        self._revoked.discard(name)
        if new:
            self.inbox.put(Presence(name, theirs.session_id, here=True))

    def _check_known(self, name: str) -> None:
        if name not in self._links:
            raise Refused(f"'{name}' is not on the roster of '{self.me}'", final=True)
        if name in self._barred:
            raise Refused(self._barred[name], final=True)

    def _admitted(self, certificate: bytes) -> str:
        assert self._credentials is not None
        try:
            return self._credentials.admitted_name(certificate)
        except NetworkError as error:
            # Without a valid revocation list nobody is admitted; that may change.
            raise Refused(f"{error.must} Found: {error.found}", final=not self._credentials.admits_nobody()) from None

    def largest(self, kind: FrameKind) -> int:
        """Bytes of the largest payload of this kind that is accepted."""
        if kind is FrameKind.HELLO:
            return HELLO_LIMIT if self._listener is not None else CONTROL_LIMIT  # a welcome holds the terms
        return self.limit if kind in MESSAGES else CONTROL_LIMIT

    def arrived(self, stream: Stream, event: Event) -> bool:
        """Something for the inbox; False if no more should be read for now."""
        return self.inbox.put(event) if stream in self._links.get(event.sender, ()) else True

    def refused(self, stream: Stream, why: str) -> None:
        """Log who has connected and is not admitted."""
        if stream.expected is None:
            who = f"'{stream.name}'" if stream.name else "a caller"
            self._callers(f"{who} at {stream.address}", why)

    def _handshake_failed(self, host: str, why: str) -> None:
        self._callers(f"a caller at {host}", f"no TLS handshake ({why})")

    def closed(self, stream: Stream, why: str) -> None:
        links = self._links.get(stream.name or "", [])
        if stream in links:
            links.remove(stream)
            theirs = stream.theirs
            if theirs and theirs.session_id not in {link.theirs.session_id for link in links if link.theirs}:
                self.inbox.put(Presence(stream.name or "", theirs.session_id, here=False))

    # --- established links --------------------------------------------------------------------------

    async def _look_after_links(self) -> None:
        checked = told = self.loop.time()
        while True:
            before = self.loop.time()
            await asyncio.sleep(self._tick)
            now = self.loop.time()
            links, late = [link for links in self._links.values() for link in links], now - before - self._tick
            if late > _LATE:  # this thread could not run for a while: that time is not the silence of other nodes
                for link in links:
                    link.excuse(late)
                if late > self.preface.lease / 2:
                    self._tell_once(
                        f"the thread of the links could not run for {late:.0f} s, and others wait for this node for "
                        f"{self.preface.lease:g} s: a model may hold Python's lock while it trains. Raise "
                        "network.silence if connections are lost"
                    )
            for link in links:
                assert link.theirs is not None
                if now - link.said > self.preface.lease / 4 and not link.is_stuck:
                    link.send(FrameHeader(FrameKind.PING, self.session_id, 0).encode())
                if link.is_reading and now - link.heard > link.theirs.lease:
                    link.close(f"silent for {link.theirs.lease:g} s", at_once=True)
                elif link.is_stuck and now - link.progress > link.theirs.lease:
                    link.close(f"it has taken nothing for {link.theirs.lease:g} s", at_once=True)
                elif now - link.answered_at(now) > self.lease:
                    link.close(f"its machine has not answered for {self.lease:g} s", at_once=True)
            if self._credentials is not None and now - checked > _CHECK:
                checked = now
                self._check_certificates()
            if self._listener is not None and now - told > _TURNED_AWAY and self._listener.turned_away:
                told = now
                causes = ", ".join(f"{why}: {count}" for why, count in self._listener.turned_away.most_common(5))
                self._listener.turned_away.clear()
                self._tell(f"connections that were not admitted, by cause: {causes}")

    def _check_certificates(self) -> None:
        assert self._credentials is not None
        trouble = self._credentials.trouble()
        if trouble:
            self._tell_once(trouble)
        for name, links in self._links.items():
            for link in tuple(links):
                try:
                    self._admitted(link.certificate or b"")
                except Refused as refused:
                    if refused.final:
                        self._revoked.add(name)
                    self._tell_once(f"'{name}' is disconnected: {refused}")
                    link.refuse(str(refused), final=refused.final)

    def _tell_once(self, text: str) -> None:
        now = time.monotonic()
        if now - self._troubles.get(text, -_REMIND) >= _REMIND:
            self._troubles = {one: at for one, at in self._troubles.items() if now - at < _REMIND} | {text: now}
            self._tell(text)


# --- How many connections a process can hold besides its files.

LINKS = 3  # of one node at a time: one that has restarted, and one whose end was not noticed yet
_FILES = 160  # descriptors for files, libraries and pipes of this process
# Pending connections: at least the first number, or an eighth of all descriptors, up to the second one. An attacker
# reopens a connection that is closed; one that may wait costs only a descriptor.
_FEW, _MOST = 128, 4096
_FEWEST = 16
_ENOUGH = 1 << 16


def reserve_descriptors(nodes: int) -> int:
    """How many connections of unknown callers may be pending besides links to this number of nodes.

    Raises the limit of this process as far as allowed; an error if there are still too few descriptors.
    """
    try:
        import resource
    except ImportError:
        return _MOST  # the system has no such limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        return _MOST
    free = soft - _FILES - LINKS * nodes
    if free < _FEWEST:
        raise NetworkError(
            f"A node with links to {nodes} others needs {_FILES + LINKS * nodes + _FEWEST} file descriptors.",
            f"this process may have {soft}",
            "Raise the limit: 'ulimit -n 65536' in the shell, LimitNOFILE=65536 in a systemd unit.",
        )
    return min(_MOST, max(_FEW, soft // 8), free // 2)
