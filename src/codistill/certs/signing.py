"""What an authority signs: its own certificate, those of the nodes, and the revocation list."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from hashlib import sha256

from codistill.certs.node_identity import AGENT, identity
from codistill.certs.register import Issued
from codistill.certs.validity import CLOCK_SKEW
from codistill.errors import NetworkError

# isort: split
# after node_identity, whose error says how to install cryptography
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LONGEST = 64  # bytes of a common name, by X.509
_LABEL = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
_HOST = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?!\d+$){_LABEL}")  # a host name does not end with a number


def new_key() -> ec.EllipticCurvePrivateKey:
    """A new private key, for an authority or a node."""
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
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
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
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])  # peers do both
    return (
        x509.CertificateBuilder()
        .issuer_name(authority.subject)
        .subject_name(subject(f"{issued.node_name}~{issued.generation}", issued.role))
        .public_key(key)
        .serial_number(issued.serial)
        .not_valid_before(max(now - CLOCK_SKEW, authority.not_valid_before_utc))
        .not_valid_after(issued.not_after)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(both, critical=False)
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


def extend_list(
    old: x509.CertificateRevocationList,
    missing: Sequence[Issued],
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    life: timedelta,
) -> x509.CertificateRevocationList:
    """The next list: all entries of the old one, and those missing there."""
    return sign_list(authority, key, [*old, *map(_list_entry, missing)], list_number(old) + 1, now, life)


def list_number(found: x509.CertificateRevocationList) -> int:
    """The number of a list that `sign_list` has signed."""
    return found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def _list_entry(issued: Issued) -> x509.RevokedCertificate:
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


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    none = dict.fromkeys(["content_commitment", "key_encipherment", "data_encipherment", "key_agreement"], False)
    none |= {"encipher_only": False, "decipher_only": False}
    return x509.KeyUsage(digital_signature=digital_signature, key_cert_sign=key_cert_sign, crl_sign=crl_sign, **none)


def _alternative_names(issued: Issued) -> list[x509.GeneralName]:
    """Addresses, and an agent's name if it can be a host name; TLS needs at least one, so else a generated one."""
    names = [alternative_name(host) for host in issued.addresses]
    if issued.role == AGENT and re.fullmatch(_LABEL, issued.name) and not issued.name.isdecimal():
        names.append(x509.DNSName(issued.name))
    generated = f"{sha256(identity(issued.node_name).encode()).hexdigest()[:12]}.agent.codistill"
    return list(dict.fromkeys(names)) or [x509.DNSName(generated)]


def alternative_name(host: str) -> x509.GeneralName:
    """A host name or an IP address, as in a certificate."""
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


def check_common_name(name: str) -> None:
    """A common name must be printable and fit into a certificate."""
    if not name.isprintable() or not 1 <= len(name.encode()) <= _LONGEST:
        raise NetworkError(
            f"The common name of a certificate (of a node: NAME~GENERATION) must be 1 to {_LONGEST} bytes in UTF-8.",
            f"{name!r}, {len(name.encode())} bytes",
            "Choose a shorter name.",
        )


def pem(signed: x509.Certificate | x509.CertificateRevocationList | x509.CertificateSigningRequest) -> bytes:
    """A certificate, a list or a request in PEM form."""
    return signed.public_bytes(serialization.Encoding.PEM)


def key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A key in PEM form, not encrypted: the mode of its file protects it."""
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
