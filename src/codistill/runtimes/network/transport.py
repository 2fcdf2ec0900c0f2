"""One node's end of the network: a Zenoh session with one link to each of some others, known by name.

Every pair of nodes has two keys, one for each direction, and who may use them is decided by the common
name in the certificate of the link (Zenoh's access control): nobody can speak for another, or listen in.
Zenoh's threads only store what arrives and notify; whoever owns the wire takes it from the inbox.
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

ROOM = 4  # messages of the largest size that one sender may have waiting in the inbox
EACH = 512  # bytes that a frame takes here beside what it carries: many empty ones fill the inbox, too
_AT_ONCE = 1 << 16  # bytes that a link takes without waiting: less than its queue and the sockets' buffers hold
_PENDING = 512  # links that may be half open at a time: a few hundred idle callers do not keep others out
_OPENING = 5000  # milliseconds that a caller has to become a link


@dataclass(frozen=True, slots=True)
class Heard:
    """A frame as it came in: nothing of it has been looked at."""

    sender: str
    head: bytes
    payload: bytes

    @property
    def size(self) -> int:
        """Bytes that it takes in the inbox."""
        return len(self.head) + len(self.payload) + EACH


@dataclass(frozen=True, slots=True)
class Presence:
    """A life of a node has appeared, or is gone."""

    name: str
    life: int
    here: bool


@dataclass(frozen=True, slots=True)
class Overflow:
    """A sender has sent more than can be held; what came beyond that was thrown away."""

    sender: str


Event = Heard | Presence | Overflow


class Transport:
    """Sends frames to nodes by name, and collects what they say in an inbox."""

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
        self._speakers = {} if credentials is None else {name: credentials.speaker(name) for name in others}
        self.life = secrets.randbits(64)
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._room = ROOM * network.message_limit
        # Bytes that came into the inbox and that were taken from it, by sender: each has one writer, so no lock.
        self._came, self._taken = dict.fromkeys(others, 0), dict.fromkeys(others, 0)
        self._full: set[str] = set()
        config = zenoh.Config.from_json5(json.dumps(_config(me, others, network, credentials, listen, dial)))
        try:
            self._session = zenoh.open(config)
        except zenoh.ZError as error:
            raise NetworkError(
                f"It must be possible to listen at {listen}.",
                str(error).partition(" at /")[0][:300],  # without places in Zenoh's source
                "Choose another address or port.",
            ) from None
        self._make_bytes = zenoh.ZBytes
        self._declared: list[Any] = []
        self._senders = {name: _Sender(self._session, zenoh, _key(me, name), self.life) for name in others}
        for name in others:
            self._listen_to(name)
        # Last, when everything else is in place: who sees it may speak at once.
        self._declared.append(self._session.liveliness().declare_token(f"{_here(me)}/{self.life:x}"))

    def _listen_to(self, name: str) -> None:
        def heard(sample: Any) -> None:
            payload, beside = sample.payload.to_bytes(), sample.attachment
            frame = Heard(name, b"" if beside is None else beside.to_bytes(), payload)
            if self._came[name] - self._taken[name] > self._room:
                if name not in self._full:  # said once, until there is room again
                    self._full.add(name)
                    self.inbox.put(Overflow(name))
                return
            self._came[name] += frame.size
            self.inbox.put(frame)

        def seen(sample: Any) -> None:
            with suppress(ValueError):
                life = int(str(sample.key_expr).rpartition("/")[2], 16)
                self.inbox.put(Presence(name, life, "PUT" in str(sample.kind)))

        lives = self._session.liveliness()
        self._declared.append(self._session.declare_subscriber(_key(name, self.me), heard))
        self._declared.append(lives.declare_subscriber(f"{_here(name)}/*", seen, history=True))

    def revoked(self) -> list[str]:
        """Whose certificate has been revoked since this wire was laid, by the list that is at hand now."""
        if self._credentials is None:
            return []
        return [name for name, before in self._speakers.items() if self._credentials.speaker(name) != before]

    def take(self, timeout: float) -> Event | None:
        """The next event; None if nothing comes in time."""
        try:
            event = self.inbox.get(timeout=timeout) if timeout > 0 else self.inbox.get_nowait()
        except queue.Empty:
            return None
        if isinstance(event, Heard):
            self._taken[event.sender] += event.size
            self._senders[event.sender].unheard = 0
        elif isinstance(event, Overflow):
            self._full.discard(event.sender)
        return event

    def send(self, receivers: Sequence[str], kind: FrameKind, turn: Turn, payload: bytes = b"") -> None:
        """Queue a frame for each receiver; a receiver that is slow or gone holds up nobody else."""
        shared, size = self._make_bytes(payload), len(payload) + EACH
        for name in receivers:
            self._senders[name].send(kind, turn, shared, size)

    def close(self, seconds: float = 2.0) -> None:
        """Send what is queued, as far as that goes quickly, and hang up."""
        for sender in self._senders.values():
            sender.end()
        for sender in self._senders.values():
            sender.join(timeout=seconds)
        self._session.close()


class _Sender(threading.Thread):
    """The only one who sends to a receiver, in the order asked for.

    A put waits while the link is full, so it is the work of this thread; but a few bytes to a receiver that has spoken
    since always find room, and go at once.
    """

    def __init__(self, session: Any, zenoh: Any, key: str, life: int) -> None:
        super().__init__(name=f"to {key}", daemon=True)
        self._queue: queue.SimpleQueue[tuple[FrameKind, Turn, Any] | None] = queue.SimpleQueue()
        self._putting = threading.Lock()
        self._queued = self._done = 0  # frames that were left to the thread, and that it has sent: one writer each
        self.unheard = 0  # bytes since the receiver last spoke
        self._life, self._number = life, 0
        self._ended = zenoh.ZError
        self._publisher = session.declare_publisher(key, congestion_control=zenoh.CongestionControl.BLOCK, express=True)
        self.start()

    def send(self, kind: FrameKind, turn: Turn, payload: Any, size: int) -> None:
        """At once, if that cannot take long and nothing is before it; else by the thread."""
        self.unheard += size
        if self._queued == self._done and self.unheard <= _AT_ONCE and self._putting.acquire(blocking=False):
            try:
                self._put(kind, turn, payload)
            finally:
                self._putting.release()
        else:
            self._queued += 1
            self._queue.put((kind, turn, payload))

    def end(self) -> None:
        """Let the thread end when all is sent."""
        self._queue.put(None)

    def run(self) -> None:
        """Send what is queued."""
        while (item := self._queue.get()) is not None:
            with self._putting:
                self._put(*item)
            self._done += 1

    def _put(self, kind: FrameKind, turn: Turn, payload: Any) -> None:
        self._number += 1
        with suppress(self._ended):  # the session is closed
            self._publisher.put(payload, attachment=FrameHeader(kind, self._life, self._number, turn).encode())


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


def _here(name: str) -> str:
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
            # Who is at the other end is told by the common name (below), wherever the machine stands.
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
        # Nobody is looked for: a link is what was asked for, and nothing else.
        "scouting": {"multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "transport": {
            "link": link,
            "shared_memory": {"enabled": False},
            "unicast": {"accept_timeout": _OPENING, "accept_pending": _PENDING, "max_sessions": 10_000},
        },
        **({} if credentials is None else {"access_control": _access(me, {n: credentials.speaker(n) for n in others})}),
    }


def _access(me: str, speakers: Mapping[str, str]) -> dict[str, Any]:
    """Between me and a node with this common name: the two keys of the pair and the signs of life, nothing else."""
    say, listen = (
        ["put", "liveliness_token"],
        ["declare_subscriber", "liveliness_query", "declare_liveliness_subscriber"],
    )
    rules, subjects, policies = [], [], []
    for number, (name, common_name) in enumerate(speakers.items()):
        theirs, mine = [_key(name, me), f"{_here(name)}/*"], [_key(me, name), f"{_here(me)}/*"]
        # A subscription is declared by whoever listens: it comes in for what goes out, and the other way round.
        said = [("ingress", theirs, say), ("egress", mine, say)]
        listened = [("ingress", mine, listen), ("egress", theirs, listen)]
        ids = []
        for place, (flow, keys, kinds) in enumerate(said + listened):
            ids.append(f"rule-{number}-{place}")
            rules.append({"id": ids[-1], "permission": "allow", "flows": [flow], "messages": kinds, "key_exprs": keys})
        subjects.append({"id": f"node-{number}", "cert_common_names": [common_name]})
        policies.append({"id": f"policy-{number}", "rules": ids, "subjects": [f"node-{number}"]})
    return {
        "enabled": True, "default_permission": "deny", "rules": rules, "subjects": subjects, "policies": policies,
    }  # fmt: skip
