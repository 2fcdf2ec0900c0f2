"""A node's credentials: its identity, its TLS contexts, and whom it admits. The files may change while it runs.

    credentials.tls_context(server=True)    for each new connection, from the current files
    credentials.admitted_name(der)          for each new connection, and every second for each open one
    credentials.trouble()                   every second: warnings for the operator

All three check whether files have changed, which takes a few microseconds.
"""

from __future__ import annotations

import ssl
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from codistill.certs.files import (
    AUTHORITY_CERTIFICATE,
    CERTIFICATE,
    KEY,
    NEXT_KEY,
    PRIVATE,
    REQUEST,
    REVOCATIONS,
    Revocations,
    check_node_folder,
    check_private,
    check_readable,
    issuer_key,
    issuer_of,
    issuers,
    ledger_name,
    put,
    read_certificate,
    read_certificates,
    read_key,
    stamp,
    writing,
)
from codistill.certs.identity import HUB, date_text, describe, is_due, left_text, load_peer, readable, utc_now
from codistill.core.errors import NetworkError

GRACE = 3600.0  # seconds during which an unusable revocation list is tolerated
_RETRY = timedelta(seconds=10)  # after this, unusable files are read again
_MOST_PEERS = 1 << 16  # cached certificates: as many as links, since those of all links are checked every second
_MARK = 32  # characters of a digest
_PUBLIC = (REVOCATIONS, AUTHORITY_CERTIFICATE, CERTIFICATE)  # in the order in which `install` replaces them


@dataclass(frozen=True)
class _Peer:
    """A certificate signed by a known authority."""

    name: str
    generation: int  # 0: it has none
    role: str
    expires: datetime
    signatures: tuple[tuple[int, bytes], ...]  # (serial number, key of its issuer), of the certificate and above it


class Credentials:
    """A node's folder of certificates, checked before any connection, and read again when its files change."""

    def __init__(
        self, folder: Path, role: str, *, list_grace: float = GRACE, clock: Callable[[], datetime] = utc_now
    ) -> None:
        """`list_grace`: seconds for which nodes are still admitted when the revocation list is outdated or damaged."""
        check_node_folder(folder)
        now = clock()
        self.folder, self.role = folder, role  # "hub" or "agent"
        self._clock, self._lock = clock, threading.RLock()
        self._paths = own_paths(folder)
        self._stamp, self._tried = stamp(self._paths), now
        self._own = read_own_files(folder, role, now)
        self._problem = ""  # why the newest files are not used
        self._peers: dict[bytes, _Peer] = {}
        self._lists = Revocations(folder / REVOCATIONS, self._own.known, grace=list_grace, now=now)
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
        return self._own.expires

    @property
    def common_name(self) -> str:
        """The name in the current certificate, with its generation if it has one."""
        return f"{self.name}~{self._self.generation}" if self._self.generation else self.name

    def set_list_grace(self, seconds: float) -> None:
        """How long nodes are still admitted when the revocation list is outdated or damaged."""
        with self._lock:
            self._lists.grace = timedelta(seconds=seconds)

    def admits_nobody(self) -> bool:
        """Whether there is no usable revocation list, so that nobody is admitted."""
        with self._lock:
            return self._lists.refused(self._refresh()) is not None

    def tls_context(self, *, server: bool) -> ssl.SSLContext:
        """Mutual TLS 1.3 with the current files; with the previous ones if these are invalid."""
        with self._lock:
            self._refresh()
            return self._own.contexts[server]

    def marks(self) -> tuple[bytes, ...]:
        """Digests of the authorities' certificates, the own one first, which members know and strangers do not.

        Not a secret: a hub sends its chain, up to the authority, to anyone who asks.
        """
        with self._lock:
            return self._own.marks

    def admitted_name(self, der: bytes) -> str:
        """The node ("hub" or an agent's name) of a certificate that TLS has verified.

        Raises an error if it is revoked, expired or from another authority, or if there is no usable revocation list.
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
            if peer.signatures[0][1] not in self._lists.editions:
                raise _invalid(peer, f"no revocation list of its authority in {self._lists.path}")
            reason = self._revocation(peer)
            if reason:
                raise _invalid(peer, reason)
            if peer.generation > self._lists.generation(peer.name, peer.signatures[0][1]):
                raise _invalid(peer, f"generation {peer.generation} was never issued, according to {self._lists.path}")
            return peer.name

    def trouble(self) -> str | None:
        """Warnings about these files for the operator, such as a damaged revocation list."""
        with self._lock:
            now = self._refresh()
            start, end = self._own.certificate.not_valid_before_utc, self._own.expires
            expiry = f"{self.folder / CERTIFICATE} expired on {date_text(end)}: renew it." if now > end else ""
            if not expiry and is_due(start, end, now):
                expiry = f"{self.folder / CERTIFICATE} expires in {left_text(end - now)}: renew it."
            own = self._own_revocation()
            parts = [self._problem, "" if own is None else str(own), expiry, self._lists.trouble(now)]
            return " ".join(part[0].upper() + part[1:] for part in parts if part) or None

    def _refresh(self) -> datetime:
        """Read changed files again; return the time."""
        now = self._clock()
        found = stamp(self._paths)
        changed = found != self._stamp
        if changed or (self._problem and now - self._tried > _RETRY):  # a certificate may have become valid
            self._stamp, self._tried = found, now
            try:
                self._take(read_own_files(self.folder, self.role, now))
                self._problem = ""
            except NetworkError as error:
                text = f"the previous certificate is still in use, as the new files are invalid: {error}"
                self._problem = text if changed else self._problem  # the time in it would be logged as a new text
        self._lists.refresh(now)
        return now

    def _take(self, new: OwnFiles) -> None:
        if new.name != self.name:
            raise NetworkError(
                f"{self.folder / CERTIFICATE} must still be that of '{self.name}'.",
                f"that of '{new.name}'",
                "Restore the files of this node, or restart it under its new name.",
            )
        before, self._own = self._own.known, new
        if new.known != before:
            self._lists.follow(new.known)
        self._peers.clear()
        self._self = self._describe(new.certificate)

    def _describe(self, certificate: x509.Certificate) -> _Peer:
        name, generation, role = describe(certificate)
        path: list[x509.Certificate] = [certificate]
        while (issuer := issuer_of(path[-1], self._own.known)) is not None and issuer not in path:
            path.append(issuer)
        with readable():
            expires = min(each.not_valid_after_utc for each in path)
            signatures = tuple((low.serial_number, issuer_key(high)) for low, high in pairwise(path))
            signer = certificate.issuer.rfc4514_string()
        if not signatures:
            raise NetworkError(
                f"The certificate of {role} '{name}' must be signed by a known authority.",
                f"it is signed by {signer[:200]}",
                f"Use one authority for all nodes; intermediate ones must be in {CERTIFICATE} or ca.crt.",
            )
        return _Peer(name, generation, role, expires, signatures)

    def _revocation(self, peer: _Peer) -> str:
        """What is revoked, or an empty text."""
        if 0 < peer.generation < self._lists.generation(peer.name, peer.signatures[0][1]):
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
            f"that of '{self.name}', {self.folder / CERTIFICATE}: {reason}, according to {REVOCATIONS}",
            f"Issue a new one: codistill certs {self.role} {ledger_name(self._own.certificate)}; copy its folder here."
            if self._self.generation
            else "Ask the authority for a new certificate.",
        )

    def accepted_common_name(self, name: str) -> str:
        """The only common name that the revocation list allows for a node ("hub" or an agent's name)."""
        with self._lock:
            self._refresh()
            return f"{name}~{self._lists.generation(name)}"


def _invalid(peer: _Peer, found: str) -> NetworkError:
    who = "the hub" if peer.role == HUB else f"agent '{peer.name}'"
    return NetworkError(
        f"The certificate of {who} must be valid.",
        found,
        "Ask the operator of the certificate authority for a new one.",
    )


# --- a node's own certificate and key, and the authority that it trusts


@dataclass(frozen=True)
class OwnFiles:
    """A consistent set of the files of a node's folder."""

    name: str
    certificate: x509.Certificate = field(repr=False)
    issuers: tuple[x509.Certificate, ...] = field(repr=False)  # from the one that signed the certificate to the root
    known: tuple[x509.Certificate, ...] = field(repr=False)  # the accepted authorities, those issuers first
    contexts: dict[bool, ssl.SSLContext] = field(repr=False)  # by whether it is for a server

    @property
    def expires(self) -> datetime:
        return min(each.not_valid_after_utc for each in (self.certificate, *self.issuers))

    @cached_property
    def marks(self) -> tuple[bytes, ...]:
        """Hexadecimal digests of the authorities' certificates; first the one at the top of the own chain."""
        known = dict.fromkeys((self.issuers[-1], *self.known))
        return tuple(each.fingerprint(SHA256()).hex()[:_MARK].encode() for each in known)


def own_paths(folder: Path) -> tuple[Path, ...]:
    return tuple(folder / name for name in (AUTHORITY_CERTIFICATE, CERTIFICATE, KEY))


def read_own_files(folder: Path, role: str, now: datetime) -> OwnFiles:
    """Read a node's files for a role, and check all that needs no connection."""
    before = stamp(own_paths(folder))
    check_private(folder / KEY)
    roots = tuple(read_certificates(folder / AUTHORITY_CERTIFICATE))
    chain = read_certificates(folder / CERTIFICATE)
    if read_key(folder / KEY).public_key() != chain[0].public_key():
        raise NetworkError(
            f"{folder / KEY} must be the key of {CERTIFICATE} beside it.",
            "it is the key of another certificate",
            "Copy the whole folder of the node from the authority again; if that fails, run 'codistill certs renew'.",
        )
    path = issuers(chain, roots, folder)
    _check_valid_now(chain[0], folder, now)
    name, _, found_role = describe(chain[0])
    if found_role != role:
        raise NetworkError(
            f"The {role} needs a certificate with the role '{role}'.",
            f"{folder} is that of {'a hub' if found_role == HUB else f'agent {name!r}'}",
            f"Use the folder made by 'codistill certs {role}'.",
        )
    contexts = {server: _tls_context(folder, server=server) for server in (False, True)}
    if stamp(own_paths(folder)) != before:
        raise NetworkError(
            f"The files in {folder} must not change while they are read.", "a change", "Retry when all are copied."
        )
    return OwnFiles(name, chain[0], path, tuple(dict.fromkeys([*path, *roots])), contexts)


def _tls_context(folder: Path, *, server: bool) -> ssl.SSLContext:
    """Mutual TLS 1.3. Host names are not compared, since the certificate itself names its node."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # ca.crt may hold an intermediate authority alone
    if server:
        context.num_tickets = 0  # no resumption: every connection presents its certificate
    try:
        context.load_verify_locations(folder / AUTHORITY_CERTIFICATE)
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    except OSError as error:  # of which ssl.SSLError is one
        raise NetworkError(
            f"TLS must be able to use the files in {folder}.",
            f"{error}"[:200],
            "Copy the node's whole folder again from the authority.",
        ) from None
    return context


def _check_valid_now(certificate: x509.Certificate, folder: Path, now: datetime) -> None:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise NetworkError(
            f"{folder / CERTIFICATE} must be valid now.",
            f"it expired on {date_text(end)}",
            f"Renew it: codistill certs renew {ledger_name(certificate)}, and copy its folder here. If its key was "
            "made here: codistill certs request --renew",
        )
    if now < start:
        raise NetworkError(
            f"{folder / CERTIFICATE} must be valid now.",
            f"it is valid from {date_text(start)} on, and this machine's clock shows {date_text(now)}",
            "Correct the clock of this machine, or of the authority's if it was ahead.",
        )


# --- installing the authority's answer in a node's folder: all files are checked before any is replaced


def install(sources: Iterable[Path], folder: Path, *, clock: Callable[[], datetime] = utc_now) -> Credentials:
    """Install ca.crt, cert.pem and crl.pem, or some of them, from files or folders; other files stay.

    The key is the one in the folder that matches the certificate: that of the last request, or the present one.
    """
    check_readable(folder)
    if not folder.is_dir():
        raise NetworkError(
            "Install the authority's answer in the folder of the request.",
            f"no folder {folder}",
            "Give it with --certs; without a request, make one first: codistill certs request NAME",
        )
    new, authority = _contents(sources), folder / AUTHORITY_CERTIFICATE
    # Never replace the authority silently: a new one can impersonate every node.
    if AUTHORITY_CERTIFICATE in new and authority.is_file() and authority.read_bytes() != new[AUTHORITY_CERTIFICATE]:
        raise NetworkError(
            f"The authority must be the one in {authority}.",
            f"another {AUTHORITY_CERTIFICATE}",
            f"If the federation has a new authority, compare its fingerprint by phone, and remove {authority} first.",
        )
    files = {name: (folder / name).read_bytes() for name in _PUBLIC if (folder / name).is_file()} | new
    missing = [name for name in _PUBLIC if name not in files]
    if missing:
        raise NetworkError(
            f"{folder} must be complete after the installation.",
            f"no {', '.join(missing)}",
            "Give the folder that the authority sent, or all files in it.",
        )
    with writing(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".install-") as temporary:
        trial = Path(temporary)  # of mode 700
        for name, data in files.items():
            (trial / name).write_bytes(data)
        own = read_certificate(trial / CERTIFICATE)
        key = _fitting_key(folder, trial)
        put(trial / KEY, key.read_bytes(), PRIVATE)
        try:
            Credentials(trial, describe(own)[2], clock=clock)
        except NetworkError as error:
            parts = [part.replace(str(trial), str(folder)) for part in (error.must, error.found, error.do)]
            raise NetworkError(*parts) from None
    for name in _PUBLIC:
        if name == CERTIFICATE and key.name != KEY:
            put(folder / KEY, key.read_bytes(), PRIVATE)
        if name in new:
            put(folder / name, new[name])
    if CERTIFICATE in new:
        with writing(folder):  # last: until here, the same command can be repeated
            (folder / NEXT_KEY).unlink(missing_ok=True)
            (folder / REQUEST).unlink(missing_ok=True)
    return Credentials(folder, describe(own)[2], clock=clock)


def _contents(sources: Iterable[Path]) -> dict[str, bytes]:
    paths: list[Path] = []
    for source in sources:
        paths += [source / name for name in _PUBLIC if (source / name).is_file()] if source.is_dir() else [source]
    unknown = [str(path) for path in paths if path.name not in _PUBLIC or not path.is_file()]
    if unknown or not paths:
        raise NetworkError(
            f"Only {', '.join(_PUBLIC)}, or a folder with them, can be installed.",
            ", ".join(unknown) or "none of them",
            "Give the files that the authority sent, under their original names.",
        )
    with writing(paths[0]):
        return {path.name: path.read_bytes() for path in paths}


def _fitting_key(folder: Path, trial: Path) -> Path:
    keys = [path for path in (folder / NEXT_KEY, folder / KEY) if path.is_file()]
    for path in keys:
        check_private(path)
    wanted = read_certificate(trial / CERTIFICATE).public_key()
    for path in keys:
        if read_key(path).public_key() == wanted:
            return path
    raise NetworkError(
        f"{folder} must hold the key of the certificate.",
        "the certificate is for another key" if keys else "no key",
        "Install it where 'codistill certs request' was run, or give that folder with --certs.",
    )
