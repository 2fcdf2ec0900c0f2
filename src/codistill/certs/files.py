"""The files of a node's or an authority's folder: reading, checking, writing and locking them; revocation lists."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from codistill.certs.identity import (
    CLOCK_SKEW,
    HUB,
    MALFORMED,
    date_text,
    describe,
    identity_digest,
    is_due,
    split_serial,
)
from codistill.core import files
from codistill.core.errors import NetworkError, StorageError
from codistill.core.files import LOCK

AUTHORITY_CERTIFICATE, AUTHORITY_KEY = "ca.crt", "ca.key"
CERTIFICATE, KEY, REVOCATIONS = "cert.pem", "key.pem", "crl.pem"
REQUEST, NEXT_KEY = "request.pem", "next-key.pem"
_LIST = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
Stamp = tuple[tuple[int, ...], ...]


def stamp(paths: Iterable[Path]) -> Stamp:
    """A value that differs whenever one of the files has changed; a missing file has an empty stamp."""
    return tuple(map(_stamp, paths))


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def read_certificate(path: Path) -> x509.Certificate:
    """The first certificate of a file."""
    return read_certificates(path)[0]


def read_certificates(path: Path) -> list[x509.Certificate]:
    """All certificates of a file; the node's own first, then those of intermediate authorities."""
    with _reading(path, "certificates in PEM form"):
        found = x509.load_pem_x509_certificates(path.read_bytes())
        for each in found:  # the library parses these fields lazily, and raises if they are malformed
            _ = each.public_key(), each.subject, each.issuer, each.extensions, each.not_valid_after_utc
        return found


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    with _reading(path, "a private key in PEM form, of an elliptic curve and without a password"):
        key = load_pem_private_key(path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"a key of another kind: {type(key).__name__}")
        return key


def read_request(path: Path) -> x509.CertificateSigningRequest:
    with _reading(path, "a certificate signing request in PEM form"):
        found = x509.load_pem_x509_csr(path.read_bytes())
        _ = found.public_key(), found.subject
        return found


def read_lists(path: Path) -> list[x509.CertificateRevocationList]:
    """All revocation lists of a file; their signatures are not checked here."""
    with _reading(path, "a revocation list in PEM form"):
        data = path.read_bytes()
        blocks = _LIST.findall(data)
        if not blocks or data.count(b"-----BEGIN") != len(blocks):
            raise ValueError("no list, a truncated list, or other content")
        found = [x509.load_pem_x509_crl(block) for block in blocks]
        for each in found:
            _ = each.issuer, each.extensions, each.last_update_utc, each.next_update_utc
            _ = [entry.serial_number for entry in each]
        return found


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NetworkError(f"{path} must be readable.", f"{error.strerror}", "Check its owner and its mode.") from None
    except MALFORMED as error:
        raise NetworkError(
            f"{path} must be {what}.", f"{error}"[:200] or "other content", "Copy it from the authority again."
        ) from None


# --- signatures


def issuer_of(certificate: x509.Certificate, candidates: Iterable[x509.Certificate]) -> x509.Certificate | None:
    """The candidate that signed the certificate."""
    for candidate in candidates:
        try:
            certificate.verify_directly_issued_by(candidate)
        except (InvalidSignature, *MALFORMED):
            continue
        return candidate
    return None


def issuers(
    chain: Sequence[x509.Certificate], roots: Sequence[x509.Certificate], folder: Path
) -> tuple[x509.Certificate, ...]:
    """The authorities from the one that signed `chain[0]` up to one of `roots`."""
    path: list[x509.Certificate] = []
    while True:
        last = path[-1] if path else chain[0]
        root = issuer_of(last, roots)
        if root is not None:
            return (*path, root)
        between = issuer_of(last, [c for c in chain[1:] if _is_authority(c) and c not in path])
        if between is None:
            raise NetworkError(
                f"{folder / CERTIFICATE} must be signed by the authority {AUTHORITY_CERTIFICATE} beside it.",
                "it is signed by another authority" if not path else "a missing or unrelated intermediate authority",
                "Copy the whole folder of the node from the federation's authority again"
                f"{'' if len(chain) == 1 else '; all intermediate authorities must follow the certificate'}.",
            )
        path.append(between)


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def signer_of(
    found: x509.CertificateRevocationList, candidates: Iterable[x509.Certificate], path: Path
) -> x509.Certificate:
    """The candidate that signed a revocation list."""
    for candidate in candidates:
        try:
            if found.issuer == candidate.subject and found.is_signature_valid(candidate.public_key()):  # type: ignore[arg-type]
                return candidate
        except MALFORMED:
            continue
    raise NetworkError(
        f"{path} must be signed by the authority {AUTHORITY_CERTIFICATE} beside it.",
        "a list with another signature",
        f"Copy {REVOCATIONS} from the authority's folder again.",
    )


# --- the revocation lists of a node's folder, and the grace period when they become unusable
#
# A missing, damaged, wrongly signed or outdated list is reported at once. The last good state holds for a grace period;
# after it nobody is admitted until there is a good list. A revocation is never undone, whatever the file holds later.

_UPDATE = f"run 'codistill certs refresh' at the authority, and copy {REVOCATIONS} from there"
_FUTURE = "it was signed at {}, which is in the future by this machine's clock"


@dataclass(frozen=True, order=True)
class _Edition:
    """One list of an issuer. A later one has a higher number."""

    number: int
    signed: datetime
    next_update: datetime


def issuer_key(issuer: x509.Certificate) -> bytes:
    """The public key of an authority, which identifies it."""
    return issuer.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


class Revocations:
    """The revocation lists of one file, which is read again when it changes."""

    def __init__(self, path: Path, issuers: Sequence[x509.Certificate], *, grace: float, now: datetime) -> None:
        """`issuers[0]` is the authority that signed the node's own certificate; its list is required."""
        self.path, self.grace = path, timedelta(seconds=grace)
        self._issuers = tuple(issuers)
        self._stamp: Stamp = ()
        self._problem = ""  # of the current file
        self._since: datetime | None = None  # when the problem was noticed
        self._older = ""  # which list was replaced by an older one
        self.editions: dict[bytes, _Edition] = {}  # in force, by the issuer's key
        self._newest: dict[bytes, _Edition] = {}  # ever read
        self._serials: dict[bytes, set[int]] = {}
        self._generations: dict[bytes, set[tuple[int, int]]] = {}
        self._read()
        if self._from_future(now):
            raise NetworkError(
                f"{path} must not be signed in the future.",
                self._from_future(now),
                "Correct the clock of this machine, or of the authority's if it was ahead.",
            )

    def follow(self, issuers: Sequence[x509.Certificate]) -> None:
        self._issuers, self._stamp = tuple(issuers), ()

    def is_listed(self, serial: int, key: bytes) -> bool:
        return serial in self._serials.get(key, ())

    def generation(self, name: str, key: bytes | None = None) -> int:
        """The lowest generation of a name that is not revoked, by the lists of one issuer (None: of all)."""
        revoked = set().union(*self._generations.values()) if key is None else self._generations.get(key, set())
        digest, generation = identity_digest(name), 1
        while (digest, generation) in revoked:
            generation += 1
        return generation

    def refresh(self, now: datetime) -> None:
        """Read the file again if it has changed."""
        if stamp([self.path]) != self._stamp:
            try:
                self._read()
                self._problem = ""
            except NetworkError as error:
                self._problem = error.found
        if not self._problem and not self._from_future(now):
            self._since = None
        elif self._since is None:
            self._since = now

    def refused(self, now: datetime) -> NetworkError | None:
        """Why nobody may be admitted now, if so."""
        failure = self._failure(now)
        if failure is None or now <= failure[0]:
            return None
        return NetworkError(
            f"{self.path} must be a valid revocation list to admit nodes.",
            failure[1],
            f"{_UPDATE[0].upper()}{_UPDATE[1:]}.",
        )

    def trouble(self, now: datetime) -> str:
        """A warning for the operator, or an empty text; it changes only when there is news."""
        failure = self._failure(now)
        if failure is not None:
            end, reason = failure
            when = f"from {date_text(end)} on all nodes are refused" if now <= end else "all nodes are refused"
            return f"The revocation list {self.path} cannot be used ({reason}), and {when}: {_UPDATE}."
        if self._older:
            return f"The revocation list {self.path} is older than one used before ({self._older}): {_UPDATE}."
        due = [e.next_update for e in self.editions.values() if is_due(e.signed, e.next_update, now)]
        return f"The revocation list {self.path} is valid until {date_text(min(due))}: {_UPDATE}." if due else ""

    def _failure(self, now: datetime) -> tuple[datetime, str] | None:
        """When the grace period ends, and why the lists are unusable."""
        failures = [
            (edition.next_update + CLOCK_SKEW + self.grace, f"outdated since {date_text(edition.next_update)}")
            for edition in self.editions.values()
            if now > edition.next_update + CLOCK_SKEW
        ]
        if self._since is not None:
            failures.append((self._since + self.grace, self._problem or self._from_future(now)))
        return min(failures, default=None)

    def _from_future(self, now: datetime) -> str:
        latest = max(edition.signed for edition in self.editions.values())
        return _FUTURE.format(date_text(latest)) if latest > now + CLOCK_SKEW else ""

    def _read(self) -> None:
        self._stamp = stamp([self.path])  # before reading: a change in between is noticed next time
        found = [(issuer_key(signer_of(entry, self._issuers, self.path)), entry) for entry in read_lists(self.path)]
        editions: dict[bytes, _Edition] = {}
        for key, entry in found:
            edition = _edition(entry, self.path)
            editions[key] = max(edition, editions.get(key, edition))
        if issuer_key(self._issuers[0]) not in editions:
            raise NetworkError(
                f"{self.path} must hold the list of the authority that signed this node's certificate.",
                f"none of {self._issuers[0].subject.rfc4514_string()}",
                f"Put that list into {self.path} in PEM form; lists of several authorities follow one another.",
            )
        for key, entry in found:
            serials = {revoked.serial_number for revoked in entry}
            self._serials.setdefault(key, set()).update(serials)
            self._generations.setdefault(key, set()).update(map(split_serial, serials))
        older = [key for key in editions if editions[key] < self._newest.get(key, editions[key])]
        self._older = ", ".join(f"number {editions[k].number} after {self._newest[k].number}" for k in older)
        self._newest |= {key: edition for key, edition in editions.items() if key not in older}
        self.editions = {key: self._newest[key] for key in editions}


def _edition(found: x509.CertificateRevocationList, path: Path) -> _Edition:
    """Number and dates of a list, which must be complete and give the time of its next update."""
    number = 0
    try:
        for extension in found.extensions:
            if isinstance(extension.value, x509.CRLNumber):
                number = extension.value.crl_number
            elif isinstance(extension.value, x509.DeltaCRLIndicator) or (
                extension.critical and not _is_plain_distribution_point(extension.value)
            ):
                raise ValueError(f"a partial list ({extension.oid.dotted_string})")
        if found.next_update_utc is None:
            raise ValueError("no time of the next update")
    except ValueError as error:
        raise NetworkError(
            f"{path} must be a complete list of revoked certificates, with the time of its next update.",
            str(error)[:200],
            "Have the authority sign a complete list.",
        ) from None
    return _Edition(number, found.last_update_utc, found.next_update_utc)


def _is_plain_distribution_point(value: x509.ExtensionType) -> bool:
    """Whether an extension restricts the list only to a place of publication or to certificates of nodes."""
    if not isinstance(value, x509.IssuingDistributionPoint):
        return False
    other = value.only_contains_ca_certs or value.only_contains_attribute_certs
    return not (value.indirect_crl or value.only_some_reasons or other)


# --- folders


def check_readable(folder: Path) -> None:
    if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
        raise NetworkError(
            f"{folder} must be readable.", "no permission", "Run this as the owner of the folder, or change the owner."
        )


def check_private(path: Path) -> None:
    """Raise if anyone but its owner may read a key."""
    with _reading(path, "a private key"):
        mode = path.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o077:
        raise NetworkError(
            f"Only its owner may be able to read {path}.",
            f"mode {mode:04o}",
            f"chmod 600 {shlex.quote(str(path))}; if others may have read it, revoke the certificate.",
        )


def check_node_folder(folder: Path) -> None:
    """A node's folder must hold its four files, and must not be the authority's."""
    check_readable(folder)
    if not os.path.isdir(folder):  # unlike Path.is_dir, without an error where the parent is not readable
        raise NetworkError(
            "A node needs its folder of certificates.",
            f"no folder {folder}",
            "Create it with 'codistill certs' on the authority's machine, copy it here and give it with --certs.",
        )
    if (folder / AUTHORITY_KEY).exists():
        nodes = sorted(path.parent.name for path in folder.glob(f"*/{CERTIFICATE}"))
        hint = f"Use one of {', '.join(str(folder / name) for name in nodes)}."
        raise NetworkError(
            "A node needs its own folder of certificates, without the authority's key.",
            f"{folder} is the folder of an authority",
            hint if nodes else "Issue a certificate first: codistill certs hub HOST, codistill certs agent NAME.",
        )
    missing = [n for n in (AUTHORITY_CERTIFICATE, CERTIFICATE, KEY, REVOCATIONS) if not (folder / n).is_file()]
    if missing:
        raise NetworkError(
            f"A node's folder must hold {AUTHORITY_CERTIFICATE}, {CERTIFICATE}, {KEY} and {REVOCATIONS}.",
            f"{folder} lacks {', '.join(missing)}",
            _how_to_complete(folder, missing),
        )


def _how_to_complete(folder: Path, missing: list[str]) -> str:
    if (folder / REQUEST).exists() and KEY not in missing:
        return (
            f"Send {folder / REQUEST} to the authority, and install its answer: codistill certs install ANSWER "
            f"--certs {shlex.quote(str(folder))}"
        )
    if missing == [KEY]:
        return (
            "Copy the folder from the authority again. If the key was made by 'codistill certs request', it is where "
            "that was run: install the files of this folder there with 'codistill certs install'."
        )
    return "Copy the whole folder of the node from the authority again; 'codistill certs renew' makes a new one."


def ledger_name(certificate: x509.Certificate) -> str:
    """The certificate's name in the ledger, quoted for a command line."""
    try:
        name, _, role = describe(certificate)
        return shlex.quote(name if role != HUB else first_address(certificate))
    except NetworkError:
        return "NAME"


def first_address(certificate: x509.Certificate) -> str:
    """The host name or address of a hub's certificate, which is its name in the ledger."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return next(str(n.value) for n in names if isinstance(n, x509.DNSName | x509.IPAddress))
    except (x509.ExtensionNotFound, StopIteration):
        raise NetworkError(
            "A hub's certificate must have an address: its name in the authority's ledger.",
            "none",
            "Make a first request in a new folder: codistill certs request HOST --role hub",
        ) from None


# --- writing with restricted modes, one command at a time

PRIVATE, _PUBLIC = 0o600, 0o644
_PATIENCE = 10.0  # seconds to wait for another command
_DO = "Free some space or grant permission, then repeat the command; or choose another folder with --certs."


def put(path: Path, data: bytes, mode: int = _PUBLIC) -> None:
    """Write a file atomically, with its mode from the first byte on."""
    with writing(path):
        files.replace_file(path, data, path.with_name(f"{path.name}.part"), mode)


def writing(path: Path) -> AbstractContextManager[None]:
    """As `core.files.writing`, with advice for `codistill certs`."""
    return files.writing(path, _DO)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Other commands take milliseconds, so wait for them."""
    with writing(folder):
        handle = files.open_patiently(folder / LOCK, os.O_RDWR | os.O_CREAT, PRIVATE)
    try:
        _wait_for_lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _wait_for_lock(handle: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:
        return  # Windows
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise StorageError(
                    f"Only one command at a time may use {folder}.",
                    f"another 'codistill certs' has held its lock for {_PATIENCE:g} seconds",
                    "Wait until it ends, or stop it.",
                ) from None
            time.sleep(0.02)
