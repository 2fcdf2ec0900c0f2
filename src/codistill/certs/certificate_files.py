"""The files of a node's or an authority's folder: reading them, and what must hold for each by itself."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from codistill.certs.node_identity import HUB, MALFORMED, describe
from codistill.errors import NetworkError

# isort: split
# after node_identity, whose error says how to install cryptography
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

AUTHORITY_CERTIFICATE, AUTHORITY_KEY = "ca.crt", "ca.key"
CERTIFICATE, KEY, REVOCATIONS = "cert.pem", "key.pem", "crl.pem"
REQUEST, NEXT_KEY = "request.pem", "next-key.pem"
_LIST = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
Content = TypeVar("Content")
Stamp = tuple[tuple[int, ...], ...]


def stamp(paths: Iterable[Path]) -> Stamp:
    """Differs whenever one of the files has changed; a missing file has an empty stamp."""
    return tuple(map(_stamp, paths))


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


# --- reading --------------------------------------------------------------------------------------------


def read_certificate(path: Path) -> x509.Certificate:
    """The first certificate of a file."""
    return read_certificates(path)[0]


def read_certificates(path: Path) -> list[x509.Certificate]:
    """All certificates of a file; a node's own is the first, followed by those of intermediate authorities."""

    def load(data: bytes) -> list[x509.Certificate]:
        found = x509.load_pem_x509_certificates(data)
        for each in found:  # the library reads these fields only now, and raises if they are malformed
            _ = each.public_key(), each.subject, each.issuer, each.extensions, each.not_valid_after_utc
        return found

    return _read(path, "certificates in PEM form", load)


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A private key from its file."""

    def load(data: bytes) -> ec.EllipticCurvePrivateKey:
        key = load_pem_private_key(data, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"a key of another kind: {type(key).__name__}")
        return key

    return _read(path, "a private key in PEM form, of an elliptic curve and without a password", load)


def read_request(path: Path) -> x509.CertificateSigningRequest:
    """A certificate signing request from its file."""

    def load(data: bytes) -> x509.CertificateSigningRequest:
        found = x509.load_pem_x509_csr(data)
        _ = found.public_key(), found.subject
        return found

    return _read(path, "a certificate signing request in PEM form", load)


def read_lists(path: Path) -> list[x509.CertificateRevocationList]:
    """All revocation lists of a file. Who has signed them is not checked here."""

    def load(data: bytes) -> list[x509.CertificateRevocationList]:
        blocks = _LIST.findall(data)
        if not blocks or data.count(b"-----BEGIN") != len(blocks):
            raise ValueError("no list, a cut-off list, or something else beside it")
        found = [x509.load_pem_x509_crl(block) for block in blocks]
        for each in found:
            _ = (
                each.issuer,
                each.extensions,
                each.last_update_utc,
                each.next_update_utc,
                [e.serial_number for e in each],
            )
        return found

    return _read(path, "a revocation list in PEM form", load)


def _read(path: Path, what: str, load: Callable[[bytes], Content]) -> Content:
    try:
        return load(path.read_bytes())
    except OSError as error:
        raise NetworkError(f"{path} must be readable.", f"{error.strerror}", "Check its owner and its mode.") from None
    except MALFORMED as error:
        raise NetworkError(
            f"{path} must be {what}.", f"{error}"[:200] or "other content", "Copy it again from the authority."
        ) from None


# --- who has signed what --------------------------------------------------------------------------------


def issuer_of(certificate: x509.Certificate, candidates: Iterable[x509.Certificate]) -> x509.Certificate | None:
    """The candidate that has signed the certificate."""
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
                "it is signed by another authority" if not path else "an intermediate authority is missing or foreign",
                "Copy the node's whole folder again from the authority that all nodes share"
                f"{'' if len(chain) == 1 else '; with intermediate authorities, all of them follow the certificate'}.",
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
    """The candidate that has signed a revocation list."""
    for candidate in candidates:
        try:
            if found.issuer == candidate.subject and found.is_signature_valid(candidate.public_key()):  # type: ignore[arg-type]
                return candidate
        except MALFORMED:
            continue
    raise NetworkError(
        f"{path} must be signed by the authority {AUTHORITY_CERTIFICATE} beside it.",
        "a list with another signature",
        f"Copy {REVOCATIONS} again from the authority's folder.",
    )


# --- folders --------------------------------------------------------------------------------------------


def check_readable(folder: Path) -> None:
    """The folder of a node or an authority must be readable, if there is one."""
    if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
        raise NetworkError(
            f"{folder} must be readable.", "no permission", "Run this as the folder's owner, or change the owner."
        )


def check_private(path: Path) -> None:
    """Only its owner may read a key."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError as error:
        raise NetworkError(f"{path} must be readable.", f"{error.strerror}", "Check its owner and its mode.") from None
    if os.name == "posix" and mode & 0o077:
        raise NetworkError(
            f"Only its owner may read {path}.",
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
            _how_to_complete(folder, missing),
        )


def _how_to_complete(folder: Path, missing: list[str]) -> str:
    if (folder / REQUEST).exists() and KEY not in missing:
        return (
            f"Send {folder / REQUEST} to the authority, and put its answer here: codistill certs install ANSWER "
            f"--certs {shlex.quote(str(folder))}"
        )
    if missing == [KEY]:
        return (
            "Copy the folder again from the authority. If its key was made by 'codistill certs request', it is where "
            "that was run: put this folder's files there by 'codistill certs install'."
        )
    return "Copy the node's whole folder again from the authority; 'codistill certs renew' makes a new one."


def ledger_name(certificate: x509.Certificate) -> str:
    """Its name in the ledger, quoted for a command line."""
    try:
        name, _, role = describe(certificate)
        return shlex.quote(name if role != HUB else first_address(certificate))
    except NetworkError:
        return "NAME"


def first_address(certificate: x509.Certificate) -> str:
    """Of a hub's certificate: the host name or address by which the ledger knows it."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return next(str(n.value) for n in names if isinstance(n, x509.DNSName | x509.IPAddress))
    except (x509.ExtensionNotFound, StopIteration):
        raise NetworkError(
            "A hub's certificate must have an address, which is its name in the authority's ledger.",
            "none",
            "Make a first request in a new folder: codistill certs request HOST --role hub",
        ) from None
