"""A node's credentials: who it is, which TLS context it has, and whom it admits. The files may change while it runs.

    credentials.tls_context(server=True)    for each new connection, from the files as they are now
    credentials.admitted_name(der)          for each new connection, and every second for each open one
    credentials.trouble()                   every second: what the operator must be told

All three look whether files have changed, which takes a few microseconds.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

from codistill.certs.certificate_files import (
    CERTIFICATE,
    REVOCATIONS,
    check_node_folder,
    issuer_of,
    ledger_name,
    stamp,
)
from codistill.certs.node_identity import HUB, describe, load_peer, readable
from codistill.certs.node_identity import describe_peer as describe_peer
from codistill.certs.own_files import OwnFiles, own_paths, read_own_files
from codistill.certs.revocations import Revocations, issuer_key
from codistill.certs.validity import date_text, is_due, left_text, utc_now
from codistill.errors import NetworkError

# isort: split
# after node_identity, whose error says how to install cryptography
from cryptography import x509

GRACE = 3600.0  # seconds that a revocation list which cannot be used is tolerated
_RETRY = timedelta(seconds=10)  # after which files that could not be used are read again
# Certificates that are remembered: as many as there may be links. A node looks at those of all links every second, and
# would read each of them anew every time if it remembered fewer.
_MOST_PEERS = 1 << 16


@dataclass(frozen=True)
class _Peer:
    """A certificate that one of the known authorities has signed."""

    name: str
    generation: int  # 0: it has none
    role: str
    expires: datetime
    signatures: tuple[tuple[int, bytes], ...]  # (serial number, key of its issuer), of the certificate and above it


class Credentials:
    """A node's folder of certificates: checked when it is read, and followed when its files change."""

    def __init__(self, folder: Path, role: str, *, list_grace: float, clock: Callable[[], datetime]) -> None:
        check_node_folder(folder)
        now = clock()
        self.folder, self.role = folder, role  # "hub" or "agent"
        self._clock, self._lock = clock, threading.RLock()
        self._paths = own_paths(folder)
        self._stamp, self._tried = stamp(self._paths), now
        self._own = read_own_files(folder, role, now)
        self._problem = ""  # why the newest files are not used
        self._peers: dict[bytes, _Peer] = {}
        self._lists = Revocations(folder / REVOCATIONS, _known(self._own), grace=list_grace, now=now)
        self._self = self._describe(self._own.certificate)
        refused = self._lists.refused(now) or self._own_revocation()
        if refused is not None:
            raise refused

    @property
    def name(self) -> str:
        """ "hub", or the agent's name."""
        return self._own.name

    @property
    def expires(self) -> datetime:
        """When the certificate expires that is in use now."""
        return self._own.expires

    @property
    def common_name(self) -> str:
        """The name in the certificate that is in use now, with its generation if it has one."""
        return f"{self.name}~{self._self.generation}" if self._self.generation else self.name

    def set_list_grace(self, seconds: float) -> None:
        """For how long nodes are still admitted when the revocation list is outdated or damaged."""
        with self._lock:
            self._lists.grace = timedelta(seconds=seconds)

    def admits_nobody(self) -> bool:
        """Whether there is no revocation list that can be used: then nobody is admitted, until there is one."""
        with self._lock:
            return self._lists.refused(self._refresh()) is not None

    def tls_context(self, *, server: bool) -> ssl.SSLContext:
        """Mutual TLS 1.3 with the files as they are now; with those before if they are damaged or do not fit."""
        with self._lock:
            self._refresh()
            return self._own.contexts[server]

    def marks(self) -> tuple[bytes, ...]:
        """Digests of the authorities' certificates, that of the own one first: what members know and strangers do not.

        No secret: a hub sends its chain to whoever asks, up to the authority.
        """
        with self._lock:
            return self._own.marks

    def admitted_name(self, der: bytes) -> str:
        """The node ("hub" or an agent's name) of a certificate that TLS has verified.

        An error if it may not take part now: revoked, expired, of another form or authority, or if there is no
        revocation list that can be used.
        """
        with self._lock:
            now = self._refresh()
            refused = self._lists.refused(now)
            if refused is not None:
                raise refused
            peer = self._peers.get(der)
            if peer is None:
                if len(self._peers) >= _MOST_PEERS:
                    self._peers.clear()
                peer = self._peers[der] = self._describe(load_peer(der))
            if now > peer.expires:
                raise _invalid(peer, f"it expired on {date_text(peer.expires)}")
            if not self._lists.has_list(peer.signatures[0][1]):
                raise _invalid(peer, f"there is no revocation list of its authority in {self._lists.path}")
            reason = self._revocation(peer)
            if reason:
                raise _invalid(peer, reason)
            if peer.generation > self._accepted(peer):
                raise _invalid(peer, f"generation {peer.generation} was never issued, by the list {self._lists.path}")
            return peer.name

    def trouble(self) -> str | None:
        """What the operator must be told about these files now, such as that the revocation list is damaged."""
        with self._lock:
            now = self._refresh()
            own = self._own_revocation()
            parts = [
                self._problem,
                "" if own is None else str(own),
                self._expiry(now),
                self._lists.trouble(now),
            ]
            return " ".join(part[0].upper() + part[1:] for part in parts if part) or None

    # --- files that change ----------------------------------------------------------------------------

    def _refresh(self) -> datetime:
        """Read again what has changed; the time."""
        now = self._clock()
        found = stamp(self._paths)
        changed = found != self._stamp
        if changed or (self._problem and now - self._tried > _RETRY):  # a certificate may have become valid
            self._stamp, self._tried = found, now
            try:
                self._take(read_own_files(self.folder, self.role, now))
                self._problem = ""
            except NetworkError as error:
                text = f"the certificate before is still in use, as the new files cannot be used: {error}"
                self._problem = text if changed else self._problem  # not logged again for the time that it names
        self._lists.refresh(now)
        return now

    def _take(self, new: OwnFiles) -> None:
        if new.name != self.name:
            raise NetworkError(
                f"{self.folder / CERTIFICATE} must be that of '{self.name}', as at the start.",
                f"that of '{new.name}'",
                "Put back the files of this node, or restart it under its new name.",
            )
        before, self._own = _known(self._own), new
        if _known(new) != before:
            self._lists.follow(_known(new))
        self._peers.clear()
        self._self = self._describe(new.certificate)

    # --- certificates ---------------------------------------------------------------------------------

    def _describe(self, certificate: x509.Certificate) -> _Peer:
        name, generation, role = describe(certificate)
        path: list[x509.Certificate] = [certificate]
        while (issuer := issuer_of(path[-1], _known(self._own))) is not None and issuer not in path:
            path.append(issuer)
        with readable():
            expires = min(each.not_valid_after_utc for each in path)
            signatures = tuple((low.serial_number, issuer_key(high)) for low, high in pairwise(path))
            signer = certificate.issuer.rfc4514_string()
        if not signatures:
            raise NetworkError(
                f"The certificate of {role} '{name}' must be signed by an authority that is known here.",
                f"it is signed by {signer[:200]}",
                f"All nodes need certificates of one authority; intermediate ones must be in {CERTIFICATE} or ca.crt.",
            )
        return _Peer(name, generation, role, expires, signatures)

    def _accepted(self, peer: _Peer) -> int:
        return self._lists.generation(peer.name, peer.signatures[0][1])

    def _revocation(self, peer: _Peer) -> str:
        """What is revoked, or nothing."""
        if 0 < peer.generation < self._accepted(peer):
            return f"generation {peer.generation} is revoked"
        if self._lists.is_listed(*peer.signatures[0]):
            return "it is revoked"
        above = any(self._lists.is_listed(serial, key) for serial, key in peer.signatures[1:])
        return "the certificate of its authority is revoked" if above else ""

    def _own_revocation(self) -> NetworkError | None:
        reason = self._revocation(self._self)
        if not reason:
            return None
        return NetworkError(
            "The certificate must not be revoked.",
            f"that of '{self.name}', {self.folder / CERTIFICATE}: {reason}, by {REVOCATIONS}",
            f"Issue the next: codistill certs {self.role} {ledger_name(self._own.certificate)}; copy its folder here."
            if self._self.generation
            else "Ask the authority for a new certificate.",
        )

    def _expiry(self, now: datetime) -> str:
        start, end = self._own.certificate.not_valid_before_utc, self._own.expires
        if now > end:
            return f"{self.folder / CERTIFICATE} expired on {date_text(end)}: renew it."
        if is_due(start, end, now):
            return f"{self.folder / CERTIFICATE} expires in {left_text(end - now)}: renew it."
        return ""

    def accepted_common_name(self, name: str) -> str:
        """The only common name that is accepted for a node ("hub" or an agent's name), by the revocation list."""
        with self._lock:
            self._refresh()
            return f"{name}~{self._lists.generation(name)}"


def read_credentials(
    folder: Path, role: str, *, list_grace: float = GRACE, clock: Callable[[], datetime] = utc_now
) -> Credentials:
    """Read a node's folder for a role, and check it completely before any connection is made.

    `list_grace`: seconds for which nodes are still admitted when the revocation list is outdated or damaged.
    """
    return Credentials(folder, role, list_grace=list_grace, clock=clock)


def _known(own: OwnFiles) -> tuple[x509.Certificate, ...]:
    """The authorities whose certificates and lists are accepted; first the one that signed the own certificate."""
    return tuple(dict.fromkeys([*own.issuers, *own.roots]))


def _invalid(peer: _Peer, found: str) -> NetworkError:
    who = "the hub" if peer.role == HUB else f"agent '{peer.name}'"
    return NetworkError(
        f"The certificate of {who} must be valid.",
        found,
        "Ask the operator of the certificate authority for a new one.",
    )
