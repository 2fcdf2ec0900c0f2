"""A node's credentials: its certificate and key, the authority it trusts, and the revocation list.

The common name of a certificate is `NAME~G`. Generation G is 1 at first; revoking a name puts its generation on the
revocation list, and the next certificate of that name has G + 1. A node trusts only the lowest generation that is not
on the list, so the TLS library need not read revocation lists. The list holds serial numbers, which are composed of:

    serial = 8 bytes of SHA-256(identity), top bit cleared | 2 bytes generation | 8 random bytes
    identity = "hub" for the hub, "agent:NAME" for an agent
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from codistill.errors import NetworkError

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import NameOID
except ImportError:
    raise NetworkError(
        "Certificates need the library 'cryptography'.",
        "it cannot be imported",
        "Install it: pip install 'codistill[network]'",
    ) from None

HUB, AGENT = "hub", "agent"
AUTHORITY_CERTIFICATE, AUTHORITY_KEY = "ca.crt", "ca.key"
CERTIFICATE, KEY, REVOCATIONS = "cert.pem", "key.pem", "crl.pem"
_COMMON_NAME = re.compile(r"(?P<name>.+)~(?P<generation>[1-9][0-9]{0,4})")
_SUBJECT = (NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME)
Content = TypeVar("Content")


def identity(name: str) -> str:
    """The identity of a name: the hub, or one agent."""
    return HUB if name == HUB else f"agent:{name}"


def serial_number(name: str, generation: int) -> int:
    """A new serial number with the digest of the identity and the generation."""
    return _digest(name) << 80 | generation << 64 | secrets.randbits(64)


def split_serial(serial: int) -> tuple[int, int]:
    """Of a serial number: (digest of the identity, generation)."""
    return serial >> 80, serial >> 64 & 0xFFFF


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(identity(name).encode()).digest()[:8], "big") & (1 << 63) - 1


class Revocations:
    """The revocation list of a folder. Its file is read again when it changes; a revocation is never undone."""

    def __init__(self, path: Path, authority: x509.Certificate) -> None:
        self.path, self._authority = path, authority
        self.trouble = ""  # why the newest list could not be read; what was known before still holds
        self._stamp_read: tuple[int, ...] = ()
        self._revoked: frozenset[tuple[int, int]] = frozenset()
        self._read()

    def is_revoked(self, name: str, generation: int) -> bool:
        """Whether a generation of "hub" or of an agent's name is on the list."""
        self._refresh()
        return (_digest(name), generation) in self._revoked

    def generation(self, name: str) -> int:
        """The lowest generation of a name that is not on the list."""
        self._refresh()
        digest, generation = _digest(name), 1
        while (digest, generation) in self._revoked:
            generation += 1
        return generation

    def _refresh(self) -> None:
        try:
            if self._stamp() != self._stamp_read:
                self._read()
            self.trouble = ""
        except NetworkError as error:
            self.trouble = error.found
        except OSError as error:
            self.trouble = f"{self.path}: {error.strerror}"

    def _read(self) -> None:
        stamp = self._stamp()  # before reading: a change in between is noticed next time
        found = {split_serial(entry.serial_number) for entry in read_list(self.path, self._authority)}
        self._revoked, self._stamp_read = self._revoked | found, stamp

    def _stamp(self) -> tuple[int, ...]:
        status = self.path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino


@dataclass(frozen=True)
class Credentials:
    """A node's folder of certificates, checked."""

    folder: Path
    name: str  # "hub", or the agent's name
    role: str  # "hub" or "agent"
    common_name: str  # with the generation, as in the certificate
    expires: datetime  # UTC
    revoked: Revocations = field(repr=False, compare=False)

    @property
    def authority(self) -> Path:
        """The certificate of the authority that is trusted."""
        return self.folder / AUTHORITY_CERTIFICATE

    @property
    def certificate(self) -> Path:
        """The node's own certificate."""
        return self.folder / CERTIFICATE

    @property
    def key(self) -> Path:
        """The node's private key."""
        return self.folder / KEY

    def tls_context(self, *, server: bool) -> ssl.SSLContext:
        """A TLS context of the files as they are now: mutual, TLS 1.3, and any host name (see `admitted_name`)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.certificate, self.key)
        return context

    def admitted_name(self, der: bytes) -> str:
        """The node ("hub" or an agent's name) of a certificate that TLS has verified; an error if it is revoked."""
        name, generation, role = describe_peer(der)
        if self.accepted_common_name(name) != f"{name}~{generation}":
            raise NetworkError(
                f"The certificate of {role} '{name}' must be valid.",
                f"generation {generation} is revoked, or was never issued",
                "Ask the operator of the certificate authority for a new one.",
            )
        return name

    def trouble(self) -> str | None:
        """What the operator must be told about these files now, such as that the revocation list is damaged."""
        return self.revoked.trouble or None

    def accepted_common_name(self, name: str) -> str:
        """The only common name that is accepted for a node ("hub" or an agent's name), by the revocation list."""
        return f"{name}~{self.revoked.generation(name)}"

    def is_revoked(self, name: str, generation: int) -> bool:
        """Whether that generation of a name is on the revocation list."""
        return self.revoked.is_revoked(name, generation)


def read_credentials(folder: Path, role: str, *, now: datetime | None = None) -> Credentials:
    """Read a node's folder for a role, and check it completely before any connection is made."""
    _check_folder(folder)
    check_private(folder / KEY)
    authority = read_certificate(folder / AUTHORITY_CERTIFICATE)
    certificate = read_certificate(folder / CERTIFICATE)
    key = read_key(folder / KEY)
    if key.public_key() != certificate.public_key():
        raise NetworkError(
            f"{folder / KEY} must be the key of {CERTIFICATE} beside it.",
            "it is the key of another certificate",
            "Copy the node's whole folder again from the authority; if that fails, run 'codistill certs renew'.",
        )
    check_signed(certificate, authority, folder)
    check_valid_now(certificate, folder, now or datetime.now(UTC))
    name, generation, found_role = _describe(certificate)
    if found_role != role:
        raise NetworkError(
            f"The {role} needs a certificate with the role '{role}'.",
            f"{folder} is that of {'a hub' if found_role == HUB else f'agent {name!r}'}",
            f"Give the folder that 'codistill certs {role}' made for it.",
        )
    revoked = Revocations(folder / REVOCATIONS, authority)
    if revoked.is_revoked(name, generation):
        raise NetworkError(
            "The certificate must not be revoked.",
            f"generation {generation} of '{name}', which is that of {folder}, is on the list {REVOCATIONS}",
            f"Issue the next generation: codistill certs {role} {_ledger_name(certificate)}; copy its folder here.",
        )
    return Credentials(folder, name, role, f"{name}~{generation}", certificate.not_valid_after_utc, revoked)


def describe_peer(der: bytes) -> tuple[str, int, str]:
    """Name, generation and role in a peer's certificate (DER). TLS checks its signature."""
    try:
        certificate = x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise NetworkError("A peer's certificate must be readable.", str(error)[:200], "Check the address.") from None
    return _describe(certificate)


def read_certificate(path: Path) -> x509.Certificate:
    """A certificate from its file."""
    return _read(path, "a certificate in PEM form", x509.load_pem_x509_certificate)


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A private key from its file."""

    def load(data: bytes) -> ec.EllipticCurvePrivateKey:
        key = load_pem_private_key(data, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"a key of another kind: {type(key).__name__}")
        return key

    return _read(path, "a private key in PEM form, of an elliptic curve and without a password", load)


def read_list(path: Path, authority: x509.Certificate) -> x509.CertificateRevocationList:
    """A revocation list from its file; the authority must have signed it."""
    found = _read(path, "a revocation list in PEM form", x509.load_pem_x509_crl)
    key = authority.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not found.is_signature_valid(key):
        raise NetworkError(
            f"{path} must be signed by the authority {AUTHORITY_CERTIFICATE} beside it.",
            "a list with another signature",
            f"Copy {REVOCATIONS} again from the authority's folder.",
        )
    return found


def check_readable(folder: Path) -> None:
    """The folder of a node or an authority must be readable, if there is one."""
    if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
        raise NetworkError(
            f"{folder} must be readable.", "no permission", "Run this as the folder's owner, or change the owner."
        )


def check_private(path: Path) -> None:
    """Only its owner may read a key."""
    mode = path.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o077:
        raise NetworkError(
            f"Only its owner may read {path}.",
            f"mode {mode:04o}",
            f"chmod 600 {shlex.quote(str(path))}; if others may have read it, revoke the certificate.",
        )


def check_signed(certificate: x509.Certificate, authority: x509.Certificate, folder: Path) -> None:
    """The authority in the same folder must have signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise NetworkError(
            f"{folder / CERTIFICATE} must be signed by the authority {AUTHORITY_CERTIFICATE} beside it.",
            "it is signed by another authority",
            "Copy the node's whole folder again from the authority that all nodes share.",
        ) from None


def check_valid_now(certificate: x509.Certificate, folder: Path, now: datetime) -> None:
    """The certificate must be valid at this time."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise NetworkError(
            f"{folder / CERTIFICATE} must be valid now.",
            f"it expired on {end:%Y-%m-%d %H:%M} UTC",
            f"Renew it: codistill certs renew {_ledger_name(certificate)}; then copy its folder here again.",
        )
    if now < start:
        raise NetworkError(
            f"{folder / CERTIFICATE} must be valid now.",
            f"it is valid from {start:%Y-%m-%d %H:%M} UTC on, and the clock here says {now:%Y-%m-%d %H:%M} UTC",
            "Set the clock of this machine (or of the authority's, if it was ahead).",
        )


def _check_folder(folder: Path) -> None:
    check_readable(folder)
    if not os.path.isdir(folder):  # unlike Path.is_dir, without an error where the parent is not readable
        raise NetworkError(
            "A node needs its folder of certificates.",
            f"no folder {folder}",
            "Make it with 'codistill certs' on the authority's machine, copy it here and name it with --certs.",
        )
    if (folder / AUTHORITY_KEY).exists():
        nodes = sorted(path.parent.name for path in folder.glob(f"*/{CERTIFICATE}"))
        hint = f"Give one of these: {', '.join(str(folder / name) for name in nodes)}."
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
            "Copy the node's whole folder again from the authority; 'codistill certs renew' makes a new one.",
        )


def _read(path: Path, what: str, load: Callable[[bytes], Content]) -> Content:
    try:
        return load(path.read_bytes())
    except OSError as error:
        raise NetworkError(f"{path} must be readable.", f"{error.strerror}", "Check its owner and its mode.") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise NetworkError(
            f"{path} must be {what}.", f"{error}"[:200] or "other content", "Copy it again from the authority."
        ) from None


def _describe(certificate: x509.Certificate) -> tuple[str, int, str]:
    try:
        names = [certificate.subject.get_attributes_for_oid(oid) for oid in _SUBJECT]
        (common, role) = [str(found.value) for (found,) in names]
    except ValueError:
        common, role = certificate.subject.rfc4514_string(), ""
    match = _COMMON_NAME.fullmatch(common)
    if match is None or role not in (HUB, AGENT) or (match["name"] == HUB) != (role == HUB):
        raise NetworkError(
            "A node's certificate names it as NAME~GENERATION, with its role as the unit.",
            f"the name '{common}' with the role '{role}'",
            "Use certificates that 'codistill certs' has made.",
        )
    return match["name"], int(match["generation"]), role


def _ledger_name(certificate: x509.Certificate) -> str:
    """Its name in the ledger, quoted for a command line: for a hub, the first of its addresses."""
    try:
        name, _, role = _describe(certificate)
        if role == HUB:
            name = str(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value[0].value)
    except (NetworkError, ValueError, x509.ExtensionNotFound):
        return "NAME"
    return shlex.quote(name)
