"""What an authority signs: its own certificate, those of the nodes, and the revocation list."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from codistill.certs.files import (
    CERTIFICATE,
    KEY,
    NEXT_KEY,
    PRIVATE,
    REQUEST,
    check_private,
    first_address,
    put,
    read_certificate,
    read_key,
    read_request,
    writing,
)
from codistill.certs.identity import (
    AGENT,
    CLOCK_SKEW,
    HUB,
    MALFORMED,
    check_agent_name,
    describe,
    identity,
    is_due,
    node_uri,
)
from codistill.core.errors import NetworkError, RecipeError

_PEER = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])  # peers do both
_LONGEST = 64  # bytes of a common name, by X.509
_LABEL = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
_HOST = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?!\d+$){_LABEL}")  # a host name does not end with a number


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def self_signed(key: ec.EllipticCurvePrivateKey, name: str, now: datetime, end: datetime) -> x509.Certificate:
    """The certificate of an authority that can sign certificates of nodes only."""
    return (
        x509.CertificateBuilder()
        .issuer_name(subject(name))
        .subject_name(subject(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def signed(
    issued: Issued,
    key: ec.EllipticCurvePublicKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    now: datetime,
) -> x509.Certificate:
    """The certificate of a node, as described in the ledger."""
    return (
        x509.CertificateBuilder()
        .issuer_name(authority.subject)
        .subject_name(subject(f"{issued.node_name}~{issued.generation}", issued.role))
        .public_key(key)
        .serial_number(issued.serial)
        .not_valid_before(max(now - CLOCK_SKEW, authority.not_valid_before_utc))
        .not_valid_after(issued.not_after)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(_PEER, critical=False)
        .add_extension(x509.SubjectAlternativeName(_alternative_names(issued)), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(_signer(authority), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def sign_list(
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    entries: Sequence[x509.RevokedCertificate],
    number: int,
    now: datetime,
    life: timedelta,
) -> x509.CertificateRevocationList:
    """The revocation list with these entries; each list has a higher number than the one before."""
    builder = x509.CertificateRevocationListBuilder()
    for entry in entries:
        builder = builder.add_revoked_certificate(entry)
    return (
        builder.issuer_name(authority.subject)
        .last_update(now)
        .next_update(now + life)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(_signer(authority), critical=False)
        .sign(key, hashes.SHA256())
    )


def list_number(found: x509.CertificateRevocationList) -> int:
    return found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def list_entry(issued: Issued) -> x509.RevokedCertificate:
    assert issued.revoked is not None
    return x509.RevokedCertificateBuilder().serial_number(issued.serial).revocation_date(issued.revoked).build()


def _signer(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    own = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def subject(name: str, role: str = "") -> x509.Name:
    """A name in a certificate or a request, with the role of a node."""
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "codistill")]
    if role:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role))
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    """The key of an authority signs certificates and lists, that of a node data."""
    none = ["content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"]
    unused = dict.fromkeys([*none, "decipher_only"], False)
    return x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, **unused)


def _alternative_names(issued: Issued) -> list[x509.GeneralName]:
    """Addresses, and an agent's name if it is a valid host name; TLS needs one, so otherwise a generated name."""
    names = [alternative_name(host) for host in issued.addresses]
    if issued.role == AGENT and re.fullmatch(_LABEL, issued.name) and not issued.name.isdecimal():
        names.append(x509.DNSName(issued.name))
    generated = f"{hashlib.sha256(identity(issued.node_name).encode()).hexdigest()[:12]}.agent.codistill"
    return list(dict.fromkeys(names)) or [x509.DNSName(generated)]


def alternative_name(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        if "%" not in host:
            return x509.IPAddress(ipaddress.ip_address(host))
    if not _HOST.fullmatch(host):
        raise NetworkError(
            "An address must be a host name or an IP address.",
            f"'{host}'",
            "Omit the port, brackets and scope; write names in ASCII (xn--...).",
        )
    return x509.DNSName(host)


def check_common_name(name: str) -> None:
    if not name.isprintable() or not 1 <= len(name.encode()) <= _LONGEST:
        raise NetworkError(
            f"The common name of a certificate (of a node: NAME~GENERATION) must be 1 to {_LONGEST} bytes in UTF-8.",
            f"{name!r}, {len(name.encode())} bytes",
            "Choose a shorter name.",
        )


def pem(signed: x509.Certificate | x509.CertificateRevocationList | x509.CertificateSigningRequest) -> bytes:
    return signed.public_bytes(serialization.Encoding.PEM)


def key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """An unencrypted key in PEM form; the mode of its file protects it."""
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


# --- certificate signing requests: a site makes its own key, and sends only the request to the authority

_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)


@dataclass(frozen=True)
class SigningRequest:
    """The content of a request."""

    name: str  # an agent's name; for a hub, its host name or address
    role: str
    key: ec.EllipticCurvePublicKey
    fingerprint: str


def make_request(folder: Path, name: str, role: str) -> SigningRequest:
    """Make a key and a request for a new node in its folder. An existing key is kept."""
    if (folder / CERTIFICATE).exists():
        raise NetworkError(
            "A first request needs a folder without a certificate.",
            f"{folder} holds {CERTIFICATE}",
            "Renew it with 'codistill certs request --renew', or choose another folder with --out.",
        )
    return _make(folder, KEY, name, role)


def make_renewal(folder: Path, name: str | None = None) -> SigningRequest:
    """Make the next key and a request for the node of a folder; it keeps its present key until the answer arrives."""
    if not (folder / CERTIFICATE).is_file():
        raise NetworkError(
            "A renewal needs the present certificate.",
            f"no {CERTIFICATE} in {folder}",
            "Give the node's folder with --out, or make a first request: codistill certs request NAME.",
        )
    certificate = read_certificate(folder / CERTIFICATE)
    found, _, role = describe(certificate)
    if role == HUB:
        found = first_address(certificate)
    if name not in (None, found):
        raise RecipeError(
            "A renewal keeps the name.", f"'{name}', and {folder} is that of '{found}'", f"Use '{found}'."
        )
    return _make(folder, NEXT_KEY, found, role)


def read_signing_request(path: Path) -> SigningRequest:
    """A request from its file: signed by its own key, on a good curve, with a valid name."""
    request = read_request(path)
    key = request.public_key()
    try:
        if not request.is_signature_valid:
            raise ValueError("an invalid signature")
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _CURVES):
            raise ValueError(
                f"a key of another kind: {getattr(getattr(key, 'curve', key), 'name', type(key).__name__)}"
            )
        names = (NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME)
        found = [request.subject.get_attributes_for_oid(oid) for oid in names]
        if any(len(values) != 1 for values in found) or found[1][0].value not in (HUB, AGENT):
            raise ValueError(f"the subject {request.subject.rfc4514_string()!r}")
    except MALFORMED as error:
        raise NetworkError(
            f"{path} must be signed by its own key on the curve P-256, P-384 or P-521, and have one name and one role.",
            f"{error}"[:200],
            "Make the request again with 'codistill certs request'.",
        ) from None
    name, role = (str(value.value) for (value,) in found)
    _check_name(name, role)
    return SigningRequest(name, role, key, fingerprint(request))


def fingerprint(found: x509.CertificateSigningRequest | x509.Certificate) -> str:
    """SHA-256 in groups of four digits, to be compared by telephone."""
    digits = hashlib.sha256(found.public_bytes(serialization.Encoding.DER)).hexdigest()
    return " ".join(digits[start : start + 4] for start in range(0, len(digits), 4))


def _make(folder: Path, key_name: str, name: str, role: str) -> SigningRequest:
    """Make a request. A repeated call with the same name changes nothing, so the fingerprint stays the same."""
    _check_name(name, role)
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / key_name).exists():
        put(folder / key_name, key_bytes(new_key()), PRIVATE)
    check_private(folder / key_name)
    key = read_key(folder / key_name)
    if (folder / REQUEST).exists():
        before = read_signing_request(folder / REQUEST)
        if (before.name, before.role, before.key) == (name, role, key.public_key()):
            return before
    put(folder / REQUEST, pem(_request(key, name, role)))
    return read_signing_request(folder / REQUEST)


def _request(key: ec.EllipticCurvePrivateKey, name: str, role: str) -> x509.CertificateSigningRequest:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(node_uri(role, name))]
    if role == HUB:
        names.append(alternative_name(name))
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(subject(name, role))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(_PEER, critical=False)
        .sign(key, hashes.SHA256())
    )


def _check_name(name: str, role: str) -> None:
    check_common_name(name)
    if role == HUB:
        alternative_name(name)
    else:
        check_agent_name(name)


# --- the ledger of an authority: all certificates ever issued, and which of them are revoked

LEDGER = "ledger.json"
_YEAR = timedelta(days=365)


@dataclass(frozen=True)
class Issued:
    """One certificate in the ledger."""

    name: str  # an agent's name; for a hub, its host name or address
    role: str
    generation: int
    serial: int
    addresses: tuple[str, ...]
    not_after: datetime
    revoked: datetime | None = None
    not_before: datetime | None = None  # None: from a version that did not write it
    by_request: bool = False  # its key was made at its site, and is unknown here

    @property
    def node_name(self) -> str:
        """Its name in the federation: every hub is "hub"."""
        return HUB if self.role == HUB else self.name

    def state(self, now: datetime) -> str:
        """One of: valid, expires soon, expired, revoked."""
        if self.revoked:
            return "revoked"
        if now > self.not_after:
            return "expired"
        start = self.not_before or self.not_after - _YEAR
        return "expires soon" if is_due(start, self.not_after, now) else "valid"


def read_ledger(path: Path) -> list[Issued]:
    try:
        return [_decode(row) for row in json.loads(path.read_text("utf-8"))["issued"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NetworkError(
            f"The ledger {path} is corrupted.",
            f"{type(error).__name__}: {error}"[:200],
            "Restore it from a backup: it records which certificates were issued and revoked.",
        ) from None


def _decode(row: dict[str, Any]) -> Issued:
    return Issued(
        name=str(row["name"]),
        role={HUB: HUB, AGENT: AGENT}[row["role"]],
        generation=int(row["generation"]),
        serial=int(row["serial"], 16),
        addresses=tuple(map(str, row["addresses"])),
        not_after=datetime.fromisoformat(row["not_after"]),
        revoked=datetime.fromisoformat(row["revoked"]) if row["revoked"] else None,
        not_before=datetime.fromisoformat(row["not_before"]) if row.get("not_before") else None,
        by_request=bool(row.get("by_request")),
    )


def encode_ledger(ledger: list[Issued]) -> bytes:
    rows = [
        asdict(issued)
        | {
            "serial": f"{issued.serial:036x}",
            "not_after": issued.not_after.isoformat(),
            "revoked": issued.revoked and issued.revoked.isoformat(),
            "not_before": issued.not_before and issued.not_before.isoformat(),
        }
        for issued in ledger
    ]
    return json.dumps({"issued": rows}, indent=1, ensure_ascii=False).encode() + b"\n"
