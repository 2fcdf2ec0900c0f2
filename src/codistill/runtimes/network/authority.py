"""A small certificate authority in a folder: it issues, renews and revokes the certificates of a federation's nodes.

    certs/ca.crt  ca.key     the authority: whoever has the key can speak for every node
    certs/ledger.json        all certificates ever issued
    certs/crl.pem            who is revoked, signed: made from the ledger
    certs/NAME/              a node's folder, to be copied to its machine

A change is made under a lock, and the ledger is written first. So a kill at any moment loses at most a certificate
that nobody has seen; the next change brings the list and its copies to what the ledger says.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from codistill.errors import NetworkError, RecipeError, StorageError, nearest
from codistill.runtimes.network.credentials import (
    AGENT,
    AUTHORITY_CERTIFICATE,
    AUTHORITY_KEY,
    CERTIFICATE,
    HUB,
    KEY,
    REVOCATIONS,
    check_private,
    check_readable,
    identity,
    marks,
    read_certificate,
    read_key,
    read_list,
    serial_number,
)

# isort: split
# after credentials, which says how to install it
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LEDGER, LOCK = "ledger.json", ".lock"
SOON = timedelta(days=30)
_OWN_FILES = (AUTHORITY_CERTIFICATE, AUTHORITY_KEY, REVOCATIONS, LEDGER, LOCK)
_PRIVATE, _PUBLIC = 0o600, 0o644
_SLACK = timedelta(minutes=5)  # for clocks that are behind
_PATIENCE = 10.0  # seconds to wait for another command
_LONGEST = 64  # bytes of a common name, by X.509
_LABEL = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
_HOST = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?!\d+$){_LABEL}")  # not a number at the end: that is no host


@dataclass(frozen=True)
class Issued:
    """One certificate, as the ledger has it."""

    name: str  # an agent's name; for a hub, where it is reached
    role: str
    generation: int
    serial: int
    addresses: tuple[str, ...]
    not_after: datetime
    revoked: datetime | None = None

    @property
    def speaks_as(self) -> str:
        """The name it has among the nodes: every hub is "hub"."""
        return HUB if self.role == HUB else self.name

    def days_left(self, now: datetime) -> int:
        """Whole days until it expires; below zero when it has."""
        return (self.not_after - now).days

    def state(self, now: datetime) -> str:
        """One of: valid, expires soon, expired, revoked."""
        if self.revoked:
            return "revoked"
        left = self.not_after - now
        return "expired" if left < timedelta(0) else "expires soon" if left < SOON else "valid"


class Authority:
    """The authority of a folder. Everything is read from there anew for each call, and changed under a lock."""

    def __init__(self, folder: Path, *, now: datetime | None = None) -> None:
        self.folder, self._now = folder, now

    @property
    def now(self) -> datetime:
        """The time, in whole seconds, as certificates have it."""
        return (self._now or datetime.now(UTC)).replace(microsecond=0)

    def issued(self) -> list[Issued]:
        """All certificates ever issued, oldest first."""
        self._check_complete()
        return _read_ledger(self.folder / LEDGER)

    def create(self, *, name: str = "codistill authority", days: int = 3650) -> datetime:
        """Make a new authority, and return when it ends. `ca.crt` comes last: with it, the authority is whole."""
        _check_days(days)
        _check_common_name(name)
        with _writing(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_vacant()  # before the lock, which would leave a file with others' files
        with _locked(self.folder):
            self._check_vacant()
            with _writing(self.folder):
                self.folder.chmod(0o700)
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _self_signed(key, name, self.now, self.now + timedelta(days=days))
            _put(self.folder / LEDGER, _encode_ledger([]))
            _put(self.folder / AUTHORITY_KEY, _key_bytes(key), _PRIVATE)
            _put(self.folder / REVOCATIONS, _pem(_sign_list(certificate, key, [], 1, self.now)))
            _put(self.folder / AUTHORITY_CERTIFICATE, _pem(certificate))
        return certificate.not_valid_after_utc

    def issue(self, role: str, name: str, *, days: int = 365, addresses: Iterable[str] = ()) -> Issued:
        """The first certificate of a name, or the next generation after a revocation, with the node's folder."""
        _check_days(days)
        reached = tuple(dict.fromkeys([*([name] if role == HUB else []), *addresses]))
        for host in reached:
            _alternative_name(host)
        if role == AGENT:
            check_agent_name(name)
        with self._open() as books:
            self._check_free(books, role, name)
            generation = books.generation(HUB if role == HUB else name)
            return books.issue(Issued(name, role, generation, 0, reached, self.now + timedelta(days=days)))

    def renew(self, name: str, *, days: int = 365) -> Issued:
        """A new key and certificate of the same generation; the old certificate stays valid until it expires."""
        _check_days(days)
        with self._open() as books:
            last = books.last(name)
            if last.revoked:
                raise NetworkError(
                    "Only a certificate that is not revoked can be renewed.",
                    f"'{name}' was revoked on {last.revoked:%Y-%m-%d}",
                    f"Issue its next generation: codistill certs {last.role} {shlex.quote(name)}",
                )
            return books.issue(replace(last, not_after=self.now + timedelta(days=days)))

    def revoke(self, name: str) -> list[Issued]:
        """Revoke the name's generation, and return the certificates that are revoked now and were not before.

        All hubs speak as "hub", so all of one generation are revoked together.
        """
        with self._open() as books:
            last = books.last(name)
            revoked = [i for i in books.ledger if marks(i.serial) == marks(last.serial) and not i.revoked]
            if revoked:
                books.write_ledger([replace(i, revoked=self.now) if i in revoked else i for i in books.ledger])
                books.settle()
            return revoked

    @contextmanager
    def _open(self) -> Iterator[_Books]:
        self._check_complete()
        with _locked(self.folder):
            books = _Books(self.folder, self.now)
            books.settle()
            yield books

    def _check_complete(self) -> None:
        check_readable(self.folder)
        if not (self.folder / LEDGER).exists() and not (self.folder / AUTHORITY_CERTIFICATE).exists():
            raise NetworkError(
                "Certificates are issued by an authority.",
                f"none in {self.folder}",
                "Make one with 'codistill certs init', or name its folder with --certs.",
            )
        missing = [name for name in _OWN_FILES if name != LOCK and not (self.folder / name).exists()]
        if missing:
            raise NetworkError(
                "An authority's folder must be whole.",
                f"{self.folder} lacks {', '.join(missing)}",
                "Restore it from a copy; if nothing was issued yet, 'codistill certs init' makes it anew.",
            )

    def _check_vacant(self) -> None:
        """An authority overwrites nothing but what an attempt left that was killed before it was whole."""
        with _writing(self.folder):
            held = {path.name for path in self.folder.iterdir() if path.suffix != ".part"} - {LOCK}
        unfinished = LEDGER in held and held <= {LEDGER, AUTHORITY_KEY, REVOCATIONS}
        if held and not (unfinished and not _read_ledger(self.folder / LEDGER)):
            what = "an authority" if held & {AUTHORITY_CERTIFICATE, AUTHORITY_KEY, LEDGER} else min(held)
            raise NetworkError(
                "A new authority needs a folder of its own.",
                f"{self.folder} already holds {what}",
                "Name another folder with --certs.",
            )

    def _check_free(self, books: _Books, role: str, name: str) -> None:
        taken = {_folded(issued.name): issued for issued in books.ledger}.get(_folded(name))
        if _folded(name) in _OWN_FILES or name.endswith(".part"):
            raise NetworkError(
                "A node's name must not be that of a file of the authority.", f"'{name}'", "Choose another name."
            )
        if taken is not None and taken.name != name:
            raise NetworkError(
                "Names must differ by more than case or form of letters.",
                f"'{name}' beside '{taken.name}'",
                "Choose another name.",
            )
        if taken is None and (self.folder / name).exists():
            raise NetworkError(
                "A new node needs a folder of its own.",
                f"{self.folder / name} exists, and the ledger does not know '{name}'",
                "Move it away, or choose another name.",
            )
        if taken is not None and not taken.revoked and (taken.role != role or taken.not_after > self.now):
            raise NetworkError(
                "A name has one certificate at a time.",
                f"{taken.role} '{name}' has one, valid until {taken.not_after:%Y-%m-%d}",
                f"If it was lost or expires soon: codistill certs renew {shlex.quote(name)}. "
                f"If others may have its key: codistill certs revoke {shlex.quote(name)}, then issue again.",
            )


class _Books:
    """What the authority has on disk, while the lock is held."""

    def __init__(self, folder: Path, now: datetime) -> None:
        check_private(folder / AUTHORITY_KEY)
        self.folder, self.now = folder, now
        self.certificate, self.key = read_certificate(folder / AUTHORITY_CERTIFICATE), read_key(folder / AUTHORITY_KEY)
        if self.key.public_key() != self.certificate.public_key():
            raise NetworkError(
                f"{AUTHORITY_KEY} must be the key of {AUTHORITY_CERTIFICATE}.",
                f"{folder} holds the key of another authority",
                "Restore both from a copy.",
            )
        if now >= self.certificate.not_valid_after_utc:
            raise NetworkError(
                "An authority issues and revokes until it ends.",
                f"that of {folder} ended on {self.certificate.not_valid_after_utc:%Y-%m-%d}",
                "Make a new one in another folder with 'codistill certs init', and issue all certificates anew.",
            )
        self.ledger = _read_ledger(folder / LEDGER)
        self.list = read_list(folder / REVOCATIONS, self.certificate)

    def last(self, name: str) -> Issued:
        """The newest certificate of a name."""
        found = [issued for issued in self.ledger if issued.name == name]
        if not found:
            names = {issued.name for issued in self.ledger}
            hint = nearest(name, names) if names else "None was issued yet: codistill certs hub, codistill certs agent."
            raise NetworkError("A name must be in the ledger of the authority.", f"'{name}'", hint)
        return found[-1]

    def generation(self, name: str) -> int:
        """The lowest generation of a name that is not on the list."""
        revoked = {marks(entry.serial_number) for entry in self.list}
        generation = 1
        while marks(serial_number(name, generation)) in revoked:
            generation += 1
        return generation

    def issue(self, wanted: Issued) -> Issued:
        """Into the ledger first, then the files; the certificate comes last: with it, the folder is whole."""
        _check_common_name(f"{wanted.speaks_as}~{wanted.generation}")
        end = min(wanted.not_after, self.certificate.not_valid_after_utc)
        issued = replace(wanted, serial=serial_number(wanted.speaks_as, wanted.generation), not_after=end)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(issued, key, self.certificate, self.key, self.now)
        self.write_ledger([*self.ledger, issued])
        folder = self.folder / issued.name
        with _writing(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        _put(folder / AUTHORITY_CERTIFICATE, _pem(self.certificate))
        _put(folder / REVOCATIONS, _pem(self.list))
        _put(folder / KEY, _key_bytes(key), _PRIVATE)
        _put(folder / CERTIFICATE, _pem(certificate))
        return issued

    def write_ledger(self, ledger: list[Issued]) -> None:
        """Put a new ledger in place of the old."""
        _put(self.folder / LEDGER, _encode_ledger(ledger))
        self.ledger = ledger

    def settle(self) -> None:
        """Bring the list and its copies to what the ledger says; what is on the list stays there in any case."""
        known = {entry.serial_number for entry in self.list}
        missing = [issued for issued in self.ledger if issued.revoked and issued.serial not in known]
        if missing:
            number = self.list.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            entries = [*self.list, *map(_list_entry, missing)]
            self.list = _sign_list(self.certificate, self.key, entries, number + 1, self.now)
            _put(self.folder / REVOCATIONS, _pem(self.list))
        for name in sorted({issued.name for issued in self.ledger}):
            copy = self.folder / name / REVOCATIONS
            with _writing(copy):
                stale = copy.exists() and copy.read_bytes() != _pem(self.list)
            if stale:
                _put(copy, _pem(self.list))


# --- what is signed -------------------------------------------------------------------------------------


def _self_signed(key: ec.EllipticCurvePrivateKey, name: str, now: datetime, end: datetime) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .issuer_name(_subject(name))
        .subject_name(_subject(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _signed(
    issued: Issued,
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    now: datetime,
) -> x509.Certificate:
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])  # peers do both
    return (
        x509.CertificateBuilder()
        .issuer_name(authority.subject)
        .subject_name(_subject(f"{issued.speaks_as}~{issued.generation}", issued.role))
        .public_key(key.public_key())
        .serial_number(issued.serial)
        .not_valid_before(max(now - _SLACK, authority.not_valid_before_utc))
        .not_valid_after(issued.not_after)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(both, critical=False)
        .add_extension(x509.SubjectAlternativeName(_alternative_names(issued)), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_signer(authority), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _sign_list(
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    entries: Sequence[x509.RevokedCertificate],
    number: int,
    now: datetime,
) -> x509.CertificateRevocationList:
    builder = x509.CertificateRevocationListBuilder()
    for entry in entries:
        builder = builder.add_revoked_certificate(entry)
    return (
        builder.issuer_name(authority.subject)
        .last_update(now)
        .next_update(authority.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(_signer(authority), critical=False)
        .sign(key, hashes.SHA256())
    )


def _list_entry(issued: Issued) -> x509.RevokedCertificate:
    assert issued.revoked is not None
    return x509.RevokedCertificateBuilder().serial_number(issued.serial).revocation_date(issued.revoked).build()


def _signer(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    own = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def _subject(name: str, role: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "codistill")]
    if role:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role))
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    none = dict.fromkeys(["content_commitment", "key_encipherment", "data_encipherment", "key_agreement"], False)
    none |= {"encipher_only": False, "decipher_only": False}
    return x509.KeyUsage(digital_signature=digital_signature, key_cert_sign=key_cert_sign, crl_sign=crl_sign, **none)


def _alternative_names(issued: Issued) -> list[x509.GeneralName]:
    """Addresses, and an agent's name if it can be a host's; TLS wants at least one, so else a made-up one."""
    names = [_alternative_name(host) for host in issued.addresses]
    if issued.role == AGENT and re.fullmatch(_LABEL, issued.name) and not issued.name.isdecimal():
        names.append(x509.DNSName(issued.name))
    made_up = f"{sha256(identity(issued.speaks_as).encode()).hexdigest()[:12]}.agent.codistill"
    return list(dict.fromkeys(names)) or [x509.DNSName(made_up)]


def _alternative_name(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        if "%" not in host:
            return x509.IPAddress(ipaddress.ip_address(host))
    if not _HOST.fullmatch(host):
        raise NetworkError(
            "An address must be a host name or an IP address.",
            f"'{host}'",
            "Give it without a port, brackets or a scope; names in ASCII (xn--...).",
        )
    return x509.DNSName(host)


# --- checks ---------------------------------------------------------------------------------------------


def check_agent_name(name: str) -> None:
    """The rule of `codistill.Agent`, which this repeats: reading it there would need torch."""
    if not re.fullmatch(r"[\w][\w .+-]{0,63}", name) or _folded(name) == HUB:
        raise NetworkError(
            "An agent's name must be 1 to 64 letters, digits, spaces or any of _ . + -, and not 'hub' in any case.",
            repr(name),
            "Choose another name.",
        )


def _check_common_name(name: str) -> None:
    if not name.isprintable() or not 1 <= len(name.encode()) <= _LONGEST:
        raise NetworkError(
            f"The common name of a certificate (of a node: NAME~GENERATION) must be 1 to {_LONGEST} bytes in UTF-8.",
            f"{name!r}, {len(name.encode())} bytes",
            "Choose a shorter name.",
        )


def _check_days(days: int) -> None:
    if not 1 <= days <= 36500:
        raise RecipeError("--days must be between 1 and 36500.", f"{days}", "Choose another number.")


def _folded(name: str) -> str:
    """Equal for names that a file system or an eye takes for one."""
    return unicodedata.normalize("NFKC", name).casefold()


# --- files ----------------------------------------------------------------------------------------------


def _read_ledger(path: Path) -> list[Issued]:
    try:
        return [_decode(row) for row in json.loads(path.read_text("utf-8"))["issued"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NetworkError(
            f"{path} must be the ledger that 'codistill certs' has written.",
            f"{type(error).__name__}: {error}"[:200],
            "Restore it from a copy: it says which certificates there are, and who is revoked.",
        ) from None


def _decode(row: dict[str, str]) -> Issued:
    return Issued(
        name=str(row["name"]),
        role={HUB: HUB, AGENT: AGENT}[row["role"]],
        generation=int(row["generation"]),
        serial=int(row["serial"], 16),
        addresses=tuple(map(str, row["addresses"])),
        not_after=datetime.fromisoformat(row["not_after"]),
        revoked=datetime.fromisoformat(row["revoked"]) if row["revoked"] else None,
    )


def _encode_ledger(ledger: list[Issued]) -> bytes:
    rows = [
        asdict(issued)
        | {
            "serial": f"{issued.serial:036x}",
            "not_after": issued.not_after.isoformat(),
            "revoked": issued.revoked and issued.revoked.isoformat(),
        }
        for issued in ledger
    ]
    return json.dumps({"issued": rows}, indent=1, ensure_ascii=False).encode() + b"\n"


def _pem(signed: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    return signed.public_bytes(serialization.Encoding.PEM)


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _put(path: Path, data: bytes, mode: int = _PUBLIC) -> None:
    """All of it or nothing, and from its first byte on readable only for whom it is meant."""
    part = path.with_name(f"{path.name}.part")
    with _writing(path):
        part.unlink(missing_ok=True)  # of a command that was killed
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        from codistill.experiments.store import writing  # only now: it needs torch, and the commands do not

        try:
            with writing(path):
                raise error
        except StorageError as said:
            do = "Make room or give permission, then give the command again; or name another folder with --certs."
            raise StorageError(said.must, said.found, do) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One command at a time. Others take milliseconds, so wait for them."""
    with _writing(folder):
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, _PRIVATE)
    try:
        _wait_for_lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _wait_for_lock(handle: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:
        return  # a system without this kind of lock
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise StorageError(
                    f"{folder} must be free: one command at a time.",
                    f"another 'codistill certs' has held it for {_PATIENCE:g} seconds",
                    "Wait for it to end, or end it.",
                ) from None
            time.sleep(0.02)
