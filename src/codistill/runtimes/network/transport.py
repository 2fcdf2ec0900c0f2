"""Frames over Zenoh: one node's end of the network, with a link to each of some other nodes, known by name.

Every pair of nodes has two Zenoh keys, one for each direction. Zenoh's access control decides by the common name in
the certificate of the link who may use them: no node can send in another's name or read what is sent to another.
Zenoh's threads only put what arrives into the inbox; the owner of the transport takes it from there.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from codistill.errors import NetworkError
from codistill.runtimes.network.addresses import endpoint
from codistill.runtimes.network.frame_header import FrameHeader, FrameKind, Turn

if TYPE_CHECKING:
    from codistill.certs.credentials import Credentials
    from codistill.runtimes.network.options import Network

ROOM = 4  # messages of the largest size that one sender may have in the inbox
EACH = 512  # bytes counted for each frame besides its content: many empty frames fill the inbox, too
_AT_ONCE = 1 << 16  # bytes that a link accepts without blocking: less than its queue and the sockets' buffers hold
_PENDING = 512  # handshakes at a time: a few hundred idle connections do not keep others out
_OPENING = 5000  # milliseconds that a handshake may take


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """A frame as it arrived: nothing of it has been checked."""

    sender: str
    header: bytes
    payload: bytes

    @property
    def size(self) -> int:
        """Bytes that it takes in the inbox."""
        return len(self.header) + len(self.payload) + EACH


@dataclass(frozen=True, slots=True)
class Presence:
    """A session of a node has appeared or disappeared."""

    name: str
    session_id: int
    here: bool


@dataclass(frozen=True, slots=True)
class Overflow:
    """A sender has sent more than the inbox may hold; the excess was discarded."""

    sender: str


Event = ReceivedFrame | Presence | Overflow


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
        dial: Sequence[str] = (),
    ) -> None:
        zenoh = _zenoh()
        self.me, self.others = me, tuple(others)
        self._credentials = credentials
        self._common_names = (
            {} if credentials is None else {name: credentials.accepted_common_name(name) for name in others}
        )
        self.session_id = secrets.randbits(64)
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._room = ROOM * network.message_limit
        # Bytes put into the inbox and taken from it, by sender: each count has one writer, so no lock is needed.
        self._arrived, self._taken = dict.fromkeys(others, 0), dict.fromkeys(others, 0)
        self._full: set[str] = set()
        config = zenoh.Config.from_json5(json.dumps(_config(me, others, network, credentials, listen, dial)))
        try:
            self._zenoh = zenoh.open(config)
        except zenoh.ZError as error:
            raise NetworkError(
                f"The address {listen} must be free to listen at.",
                str(error).partition(" at /")[0][:300],  # without positions in Zenoh's source
                "Choose another address or port.",
            ) from None
        self._make_bytes = zenoh.ZBytes
        self._declared: list[Any] = []
        self._senders = {name: _Sender(self._zenoh, zenoh, _key(me, name), self.session_id) for name in others}
        for name in others:
            self._subscribe(name)
        # Last, when everything else is in place: a node that sees the token may send at once.
        self._declared.append(self._zenoh.liveliness().declare_token(f"{_presence_key(me)}/{self.session_id:x}"))

    def _subscribe(self, name: str) -> None:
        def received(sample: Any) -> None:
            payload, header = sample.payload.to_bytes(), sample.attachment
            frame = ReceivedFrame(name, b"" if header is None else header.to_bytes(), payload)
            if self._arrived[name] - self._taken[name] > self._room:
                if name not in self._full:  # reported once, until there is room again
                    self._full.add(name)
                    self.inbox.put(Overflow(name))
                return
            self._arrived[name] += frame.size
            self.inbox.put(frame)

        def presence_changed(sample: Any) -> None:
            with suppress(ValueError):
                session_id = int(str(sample.key_expr).rpartition("/")[2], 16)
                self.inbox.put(Presence(name, session_id, "PUT" in str(sample.kind)))

        liveliness = self._zenoh.liveliness()
        self._declared.append(self._zenoh.declare_subscriber(_key(name, self.me), received))
        self._declared.append(liveliness.declare_subscriber(f"{_presence_key(name)}/*", presence_changed, history=True))

    def revoked(self) -> list[str]:
        """Nodes whose certificate has been revoked since the start, by the revocation list as it is now."""
        if self._credentials is None:
            return []
        return [
            name
            for name, before in self._common_names.items()
            if self._credentials.accepted_common_name(name) != before
        ]

    def take(self, timeout: float) -> Event | None:
        """The next event; None if none arrives in time."""
        try:
            event = self.inbox.get(timeout=timeout) if timeout > 0 else self.inbox.get_nowait()
        except queue.Empty:
            return None
        if isinstance(event, ReceivedFrame):
            self._taken[event.sender] += event.size
            self._senders[event.sender].unanswered = 0
        elif isinstance(event, Overflow):
            self._full.discard(event.sender)
        return event

    def send(self, receivers: Sequence[str], kind: FrameKind, turn: Turn, payload: bytes = b"") -> None:
        """Queue a frame for each receiver; a slow or disconnected receiver does not delay the others."""
        shared, size = self._make_bytes(payload), len(payload) + EACH
        for name in receivers:
            self._senders[name].send(kind, turn, shared, size)

    def close(self, seconds: float = 2.0) -> None:
        """Send what is queued, waiting at most `seconds` for each receiver, and close all links."""
        for sender in self._senders.values():
            sender.end()
        for sender in self._senders.values():
            sender.join(timeout=seconds)
        self._zenoh.close()


class _Sender(threading.Thread):
    """Sends frames to one receiver, in the order of the calls.

    A put blocks while the link is full, so this thread does it; but a few bytes to a receiver that has sent something
    since the last ones always fit, and are sent by the caller.
    """

    def __init__(self, session: Any, zenoh: Any, key: str, session_id: int) -> None:
        super().__init__(name=f"to {key}", daemon=True)
        self._queue: queue.SimpleQueue[tuple[FrameKind, Turn, Any] | None] = queue.SimpleQueue()
        self._putting = threading.Lock()
        self._queued = self._done = 0  # frames given to the thread, and frames it has sent: one writer each
        self.unanswered = 0  # bytes sent since the receiver last sent something
        self._session_id, self._number = session_id, 0
        self._closed = zenoh.ZError
        self._publisher = session.declare_publisher(key, congestion_control=zenoh.CongestionControl.BLOCK, express=True)
        self.start()

    def send(self, kind: FrameKind, turn: Turn, payload: Any, size: int) -> None:
        """Send at once if that cannot block and nothing is queued before it; else leave it to the thread."""
        self.unanswered += size
        if self._queued == self._done and self.unanswered <= _AT_ONCE and self._putting.acquire(blocking=False):
            try:
                self._put(kind, turn, payload)
            finally:
                self._putting.release()
        else:
            self._queued += 1
            self._queue.put((kind, turn, payload))

    def end(self) -> None:
        """Let the thread end when everything is sent."""
        self._queue.put(None)

    def run(self) -> None:
        """Send what is queued."""
        while (item := self._queue.get()) is not None:
            with self._putting:
                self._put(*item)
            self._done += 1

    def _put(self, kind: FrameKind, turn: Turn, payload: Any) -> None:
        self._number += 1
        with suppress(self._closed):  # the session is closed
            self._publisher.put(payload, attachment=FrameHeader(kind, self._session_id, self._number, turn).encode())


def _zenoh() -> Any:
    try:
        import zenoh
    except ImportError:
        raise NetworkError(
            "A federation between machines needs the extra 'network'.",
            "no eclipse-zenoh",
            "pip install 'codistill[network]'",
        ) from None
    return zenoh


def _key(sender: str, receiver: str) -> str:
    return f"codistill/say/{sender}/{receiver}"


def _presence_key(name: str) -> str:
    return f"codistill/here/{name}"


def _config(
    me: str,
    others: Sequence[str],
    network: Network,
    credentials: Credentials | None,
    listen: str | None,
    dial: Sequence[str],
) -> dict[str, Any]:
    secure = credentials is not None
    lease = int(1000 * network.lease)
    link: dict[str, Any] = {
        "protocols": ["tls" if secure else "tcp"],
        "tx": {"lease": lease, "queue": {"congestion_control": {"block": {"wait_before_close": 1000 * lease}}}},
        "rx": {"max_message_size": network.message_limit + (1 << 16)},
    }
    if credentials is not None:
        own = {"certificate": str(credentials.certificate), "private_key": str(credentials.key)}
        link["tls"] = {
            "root_ca_certificate": str(credentials.authority),
            **{f"{side}_{part}": path for side in ("listen", "connect") for part, path in own.items()},
            "enable_mtls": True,
            # The common name (below) says who is at the other end, whatever the address of the machine.
            "verify_name_on_connect": False,
            "close_link_on_expiration": True,
        }
    return {
        "mode": "peer",
        "listen": {"endpoints": [endpoint(listen, secure=secure)] if listen else []},
        "connect": {
            "endpoints": [endpoint(address, secure=secure) for address in dial],
            "timeout_ms": -1,
            "exit_on_failure": False,
            "retry": {"period_init_ms": 200, "period_max_ms": 1000, "period_increase_factor": 1.5},
        },
        # No discovery: only the links that were asked for.
        "scouting": {"multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "transport": {
            "link": link,
            "shared_memory": {"enabled": False},
            "unicast": {"accept_timeout": _OPENING, "accept_pending": _PENDING, "max_sessions": 10_000},
        },
        **(
            {}
            if credentials is None
            else {"access_control": _access(me, {n: credentials.accepted_common_name(n) for n in others})}
        ),
    }


def _access(me: str, common_names: Mapping[str, str]) -> dict[str, Any]:
    """Between me and a node with this common name: the two keys of the pair and the liveliness tokens, nothing else."""
    send = ["put", "liveliness_token"]
    subscribe = ["declare_subscriber", "liveliness_query", "declare_liveliness_subscriber"]
    rules, subjects, policies = [], [], []
    for number, (name, common_name) in enumerate(common_names.items()):
        theirs, mine = [_key(name, me), f"{_presence_key(name)}/*"], [_key(me, name), f"{_presence_key(me)}/*"]
        # A subscription is declared by the receiver: it enters for what leaves, and the other way round.
        sent = [("ingress", theirs, send), ("egress", mine, send)]
        subscribed = [("ingress", mine, subscribe), ("egress", theirs, subscribe)]
        ids = []
        for place, (flow, keys, messages) in enumerate(sent + subscribed):
            ids.append(f"rule-{number}-{place}")
            rules.append(
                {"id": ids[-1], "permission": "allow", "flows": [flow], "messages": messages, "key_exprs": keys}
            )
        subjects.append({"id": f"node-{number}", "cert_common_names": [common_name]})
        policies.append({"id": f"policy-{number}", "rules": ids, "subjects": [f"node-{number}"]})
    return {
        "enabled": True, "default_permission": "deny", "rules": rules, "subjects": subjects, "policies": policies,
    }  # fmt: skip
