"""Certificate signing requests: a site makes its own key, and sends only the request to the authority.

    key.pem          stays at the site; of a renewal, next-key.pem until the new certificate is installed
    request.pem      name and role of the node with its public key, signed by the key

A request also names the node in the form that certificates of external authorities have (`node_identity`), so that such
an authority can take it over. The authority of `codistill certs` reads the name, the role and the public key alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from codistill.certs.certificate_files import (
    CERTIFICATE,
    KEY,
    NEXT_KEY,
    REQUEST,
    check_private,
    first_address,
    read_certificate,
    read_key,
    read_request,
)
from codistill.certs.node_identity import AGENT, HUB, MALFORMED, check_agent_name, describe, node_uri
from codistill.certs.safe_files import PRIVATE, put, writing
from codistill.certs.signing import alternative_name, check_common_name, key_bytes, new_key, pem, subject
from codistill.errors import NetworkError, RecipeError

# isort: split
# after node_identity, whose error says how to install cryptography
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)


@dataclass(frozen=True)
class SigningRequest:
    """What a request asks for."""

    name: str  # an agent's name; for a hub, its host name or address
    role: str
    key: ec.EllipticCurvePublicKey
    fingerprint: str


def make_request(folder: Path, name: str, role: str) -> SigningRequest:
    """Make a key and a request for a new node in its folder. A key that is there already is kept."""
    if (folder / CERTIFICATE).exists():
        raise NetworkError(
            "A first request needs a folder without a certificate.",
            f"{folder} holds {CERTIFICATE}",
            "Renew it by 'codistill certs request --renew', or name another folder with --out.",
        )
    return _make(folder, KEY, name, role)


def make_renewal(folder: Path, name: str | None = None) -> SigningRequest:
    """Make the next key and a request for the node of a folder, which goes on with its present key until then."""
    if not (folder / CERTIFICATE).is_file():
        raise NetworkError(
            "A renewal needs the certificate that it renews.",
            f"no {CERTIFICATE} in {folder}",
            "Name the node's folder with --out, or make a first request: codistill certs request NAME.",
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
            raise ValueError("a wrong signature")
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
            "Make the request again by 'codistill certs request'.",
        ) from None
    name, role = (str(value.value) for (value,) in found)
    _check_name(name, role)
    return SigningRequest(name, role, key, fingerprint(request))


def fingerprint(found: x509.CertificateSigningRequest | x509.Certificate) -> str:
    """SHA-256 in groups of four digits, to be compared by telephone."""
    digits = hashlib.sha256(found.public_bytes(Encoding.DER)).hexdigest()
    return " ".join(digits[start : start + 4] for start in range(0, len(digits), 4))


def _make(folder: Path, key_name: str, name: str, role: str) -> SigningRequest:
    """Repeated with the same name, it changes nothing, so that the fingerprint stays the same."""
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
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(subject(name, role))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(both, critical=False)
        .sign(key, hashes.SHA256())
    )


def _check_name(name: str, role: str) -> None:
    check_common_name(name)
    if role == HUB:
        alternative_name(name)
    else:
        check_agent_name(name)
