"""A node's own certificate and key, with the authority it trusts: read together, checked, and made a TLS context."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path

from codistill.certs.certificate_files import (
    AUTHORITY_CERTIFICATE,
    CERTIFICATE,
    KEY,
    check_private,
    issuers,
    ledger_name,
    read_certificates,
    read_key,
    stamp,
)
from codistill.certs.node_identity import HUB, describe
from codistill.certs.validity import date_text
from codistill.errors import NetworkError

# isort: split
# after node_identity, whose error says how to install cryptography
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

_MARK = 32  # characters of a digest


@dataclass(frozen=True)
class OwnFiles:
    """The files of a node's folder at one time, which fit together."""

    name: str
    role: str
    generation: int  # 0: the certificate has none
    certificate: x509.Certificate = field(repr=False)
    issuers: tuple[x509.Certificate, ...] = field(repr=False)  # from the one that signed the certificate to the root
    roots: tuple[x509.Certificate, ...] = field(repr=False)
    contexts: dict[bool, ssl.SSLContext] = field(repr=False)  # by whether it is for a server

    @property
    def expires(self) -> datetime:
        """When the certificate or one of the authorities above it expires."""
        return min(each.not_valid_after_utc for each in (self.certificate, *self.issuers))

    @cached_property
    def marks(self) -> tuple[bytes, ...]:
        """Digests of the authorities' certificates, in hexadecimal: first the one at the top of the own chain."""
        known = dict.fromkeys((self.issuers[-1], *self.issuers, *self.roots))
        return tuple(each.fingerprint(SHA256()).hex()[:_MARK].encode() for each in known)


def own_paths(folder: Path) -> tuple[Path, ...]:
    """The files that `read_own_files` reads."""
    return tuple(folder / name for name in (AUTHORITY_CERTIFICATE, CERTIFICATE, KEY))


def read_own_files(folder: Path, role: str, now: datetime) -> OwnFiles:
    """Read a node's files for a role, and check everything that can be checked without a connection."""
    before = stamp(own_paths(folder))
    check_private(folder / KEY)
    roots = tuple(read_certificates(folder / AUTHORITY_CERTIFICATE))
    chain = read_certificates(folder / CERTIFICATE)
    if read_key(folder / KEY).public_key() != chain[0].public_key():
        raise NetworkError(
            f"{folder / KEY} must be the key of {CERTIFICATE} beside it.",
            "it is the key of another certificate",
            "Copy the node's whole folder again from the authority; if that fails, run 'codistill certs renew'.",
        )
    path = issuers(chain, roots, folder)
    _check_valid_now(chain[0], folder, now)
    name, generation, found_role = describe(chain[0])
    if found_role != role:
        raise NetworkError(
            f"The {role} needs a certificate with the role '{role}'.",
            f"{folder} is that of {'a hub' if found_role == HUB else f'agent {name!r}'}",
            f"Give the folder that 'codistill certs {role}' made for it.",
        )
    contexts = {server: _tls_context(folder, server=server) for server in (False, True)}
    if stamp(own_paths(folder)) != before:
        raise NetworkError(
            f"The files in {folder} must not change while they are read.", "a change", "Wait until all are copied."
        )
    return OwnFiles(name, role, generation, chain[0], path, roots, contexts)


def _tls_context(folder: Path, *, server: bool) -> ssl.SSLContext:
    """Mutual TLS 1.3. Host names are not compared: a certificate says by itself which node it is for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # ca.crt may hold an intermediate authority alone
    if server:
        context.num_tickets = 0  # each connection shows its certificate; none resumes an earlier one
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
            f"it is valid from {date_text(start)} on, and the clock here says {date_text(now)}",
            "Set the clock of this machine (or of the authority's, if it was ahead).",
        )
