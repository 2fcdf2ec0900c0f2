"""The files of an authority while its lock is held: key, ledger, revocation list, and the nodes' folders."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from codistill.certs.certificate_files import (
    AUTHORITY_CERTIFICATE,
    AUTHORITY_KEY,
    CERTIFICATE,
    KEY,
    REVOCATIONS,
    check_private,
    read_certificate,
    read_key,
    read_lists,
    signer_of,
)
from codistill.certs.node_identity import serial_number, split_serial
from codistill.certs.register import LEDGER, Issued, encode_ledger, read_ledger
from codistill.certs.safe_files import PRIVATE, put, writing
from codistill.certs.signing import check_common_name, extend_list, key_bytes, new_key, pem, signed
from codistill.certs.validity import CLOCK_SKEW
from codistill.errors import NetworkError, nearest
from codistill.files import subfolder

# isort: split
# after node_identity, whose error says how to install cryptography
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

LIST_DAYS, MOST_LIST_DAYS = 7, 366
_LIST_AGE = timedelta(days=1)  # after which any change signs the list again


class AuthorityFiles:
    """What an authority's folder holds. Whoever uses this holds the lock of the folder."""

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
                "An authority must be valid to issue and revoke certificates.",
                f"that of {folder} expired on {self.certificate.not_valid_after_utc:%Y-%m-%d}",
                "Make a new one in another folder with 'codistill certs init', and issue all certificates again.",
            )
        self.ledger = read_ledger(folder / LEDGER)
        self.list = own_list(folder, self.certificate)

    def last(self, name: str) -> Issued:
        """The newest certificate of a name."""
        found = [issued for issued in self.ledger if issued.name == name]
        if not found:
            names = {issued.name for issued in self.ledger}
            hint = (
                nearest(name, names)
                if names
                else "No certificate was issued yet: codistill certs hub, codistill certs agent."
            )
            raise NetworkError("The name must be in the ledger of the authority.", f"'{name}'", hint)
        return found[-1]

    def generation(self, name: str) -> int:
        """The lowest generation of a name that is not revoked."""
        revoked = {split_serial(entry.serial_number) for entry in self.list}
        generation = 1
        while split_serial(serial_number(name, generation)) in revoked:
            generation += 1
        return generation

    def issue(self, wanted: Issued, public_key: ec.EllipticCurvePublicKey | None = None) -> Issued:
        """Issue a certificate for a key that was made at the node's site, or (None) for a new one.

        The ledger is written first, then the files; the certificate is last: with it, the folder is complete.
        """
        check_common_name(f"{wanted.node_name}~{wanted.generation}")
        key = new_key()  # not used if the site has made one
        issued = replace(
            wanted,
            serial=serial_number(wanted.node_name, wanted.generation),
            not_before=self.now,
            not_after=min(wanted.not_after, self.certificate.not_valid_after_utc),
            by_request=public_key is not None,
        )
        certificate = signed(issued, public_key or key.public_key(), self.certificate, self.key, self.now)
        self.write_ledger([*self.ledger, issued])
        folder = self.folder / issued.name
        subfolder(folder, mode=0o700)
        put(folder / AUTHORITY_CERTIFICATE, pem(self.certificate))
        put(folder / REVOCATIONS, pem(self.list))
        if issued.by_request:
            with writing(folder):
                (folder / KEY).unlink(missing_ok=True)  # of a certificate before, with a key that was made here
        else:
            put(folder / KEY, key_bytes(key), PRIVATE)
        put(folder / CERTIFICATE, pem(certificate))
        return issued

    def write_ledger(self, ledger: list[Issued]) -> None:
        """Replace the ledger."""
        put(self.folder / LEDGER, encode_ledger(ledger))
        self.ledger = ledger

    def update_lists(self, *, again: bool = False, life: timedelta | None = None) -> None:
        """Update the revocation list and its copies to the ledger; what is on the list stays there in any case.

        It is signed again if `again`, or when it is a day old. Unless `life` is given, it is valid for as long as the
        list before was.
        """
        listed = {entry.serial_number for entry in self.list}
        missing = [issued for issued in self.ledger if issued.revoked and issued.serial not in listed]
        if missing or again or self._is_old():
            self.list = extend_list(
                self.list, missing, self.certificate, self.key, self.now, life or list_life(self.list)
            )
            put(self.folder / REVOCATIONS, pem(self.list))
        for name in sorted({issued.name for issued in self.ledger}):
            copy = self.folder / name / REVOCATIONS
            with writing(copy):
                stale = copy.exists() and copy.read_bytes() != pem(self.list)
            if stale:
                put(copy, pem(self.list))

    def _is_old(self) -> bool:
        """Also if it was signed in the future, by a clock that was ahead: nodes would refuse it."""
        age = self.now - self.list.last_update_utc
        return age > min(_LIST_AGE, list_life(self.list) / 2) or age < -CLOCK_SKEW


def own_list(folder: Path, authority: x509.Certificate) -> x509.CertificateRevocationList:
    """The revocation list of an authority's folder."""
    found = read_lists(folder / REVOCATIONS)[0]
    signer_of(found, [authority], folder / REVOCATIONS)
    return found


def list_life(found: x509.CertificateRevocationList) -> timedelta:
    """For how long a list was signed; the default if it is of a version whose lists were valid for ever."""
    life = (found.next_update_utc or found.last_update_utc) - found.last_update_utc
    return life if timedelta(0) < life <= timedelta(days=MOST_LIST_DAYS) else timedelta(days=LIST_DAYS)
