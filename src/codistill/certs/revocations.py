"""The revocation lists of a node's folder, and what happens when they cannot be used.

A list that is missing, damaged, signed by somebody else or outdated is reported at once. What was known before holds
for a grace period; after it nobody is admitted until a good list is there. A revocation that was read once is never
undone, whatever the file holds later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from codistill.certs.certificate_files import REVOCATIONS, Stamp, read_lists, signer_of, stamp
from codistill.certs.node_identity import identity_digest, split_serial
from codistill.certs.validity import CLOCK_SKEW, date_text, is_due
from codistill.errors import NetworkError

# isort: split
# after node_identity, whose error says how to install cryptography
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

_UPDATE = f"run 'codistill certs refresh' at the authority, and copy {REVOCATIONS} from there"
_FUTURE = "it was signed at {}, which is in the future by the clock of this machine"


@dataclass(frozen=True, order=True)
class _Edition:
    """One list of an issuer. A later one has a higher number."""

    number: int
    signed: datetime
    next_update: datetime


def issuer_key(issuer: x509.Certificate) -> bytes:
    """What identifies an authority: its public key."""
    return issuer.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


class Revocations:
    """The revocation lists of one file, which is read again when it changes."""

    def __init__(self, path: Path, issuers: Sequence[x509.Certificate], *, grace: float, now: datetime) -> None:
        """`issuers[0]` is the authority that signed the node's own certificate: its list must be there."""
        self.path, self.grace = path, timedelta(seconds=grace)
        self._issuers = tuple(issuers)
        self._stamp: Stamp = ()
        self._problem = ""  # of the file as it is now
        self._since: datetime | None = None  # when the problem was noticed
        self._older = ""  # which list was replaced by an older one
        self._editions: dict[bytes, _Edition] = {}  # that count now, by the issuer's key
        self._newest: dict[bytes, _Edition] = {}  # ever read
        self._serials: dict[bytes, set[int]] = {}
        self._generations: dict[bytes, set[tuple[int, int]]] = {}
        self._read()
        if self._from_future(now):
            raise NetworkError(
                f"{path} must not be signed in the future.",
                self._from_future(now),
                "Set the clock of this machine (or of the authority's, if it was ahead).",
            )

    def follow(self, issuers: Sequence[x509.Certificate]) -> None:
        """Accept lists of these issuers from now on."""
        self._issuers, self._stamp = tuple(issuers), ()

    # --- what is revoked ----------------------------------------------------------------------------

    def has_list(self, key: bytes) -> bool:
        """Whether there is a list of the issuer with this key."""
        return key in self._editions

    def is_listed(self, serial: int, key: bytes) -> bool:
        """Whether the issuer with this key has revoked a serial number."""
        return serial in self._serials.get(key, ())

    def generation(self, name: str, key: bytes | None = None) -> int:
        """The lowest generation of a name that is not revoked, by the lists of one issuer (None: of all)."""
        revoked = set().union(*self._generations.values()) if key is None else self._generations.get(key, set())
        digest, generation = identity_digest(name), 1
        while (digest, generation) in revoked:
            generation += 1
        return generation

    # --- whether the lists can be used ----------------------------------------------------------------

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
        """Why nobody may be admitted now."""
        failure = self._failure(now)
        if failure is None or now <= failure[0]:
            return None
        return NetworkError(
            f"Nodes are admitted only with a valid revocation list in {self.path}.",
            failure[1],
            f"{_UPDATE[0].upper()}{_UPDATE[1:]}.",
        )

    def trouble(self, now: datetime) -> str:
        """A sentence for the operator, or nothing. It changes only when there is something new to say."""
        failure = self._failure(now)
        if failure is not None:
            end, reason = failure
            when = f"from {date_text(end)} on all nodes are refused" if now <= end else "all nodes are refused"
            return f"The revocation list {self.path} cannot be used ({reason}), and {when}: {_UPDATE}."
        if self._older:
            return f"The revocation list {self.path} is older than one used before ({self._older}): {_UPDATE}."
        due = [e.next_update for e in self._editions.values() if is_due(e.signed, e.next_update, now)]
        return f"The revocation list {self.path} is valid until {date_text(min(due))}: {_UPDATE}." if due else ""

    def _failure(self, now: datetime) -> tuple[datetime, str] | None:
        """Until when what was known before holds, and why the lists cannot be used."""
        failures = [
            (edition.next_update + CLOCK_SKEW + self.grace, f"outdated since {date_text(edition.next_update)}")
            for edition in self._editions.values()
            if now > edition.next_update + CLOCK_SKEW
        ]
        if self._since is not None:
            failures.append((self._since + self.grace, self._problem or self._from_future(now)))
        return min(failures, default=None)

    def _from_future(self, now: datetime) -> str:
        latest = max(edition.signed for edition in self._editions.values())
        return _FUTURE.format(date_text(latest)) if latest > now + CLOCK_SKEW else ""

    # --- reading --------------------------------------------------------------------------------------

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
                f"Put that list into {self.path}, in PEM form; lists of several authorities one after another.",
            )
        for key, entry in found:
            serials = {revoked.serial_number for revoked in entry}
            self._serials.setdefault(key, set()).update(serials)
            self._generations.setdefault(key, set()).update(map(split_serial, serials))
        older = [key for key in editions if key in self._newest and editions[key] < self._newest[key]]
        self._older = ", ".join(f"number {editions[k].number} after {self._newest[k].number}" for k in older)
        self._newest |= {key: edition for key, edition in editions.items() if key not in older}
        self._editions = {key: self._newest[key] for key in editions}


def _edition(found: x509.CertificateRevocationList, path: Path) -> _Edition:
    """Number and dates of a list, which must be complete and say when the next one is due."""
    number = 0
    try:
        for extension in found.extensions:
            if isinstance(extension.value, x509.CRLNumber):
                number = extension.value.crl_number
            elif isinstance(extension.value, x509.DeltaCRLIndicator) or (
                extension.critical and not _is_plain_distribution_point(extension.value)
            ):
                raise ValueError(f"a list of a part only ({extension.oid.dotted_string})")
        if found.next_update_utc is None:
            raise ValueError("no time of the next update")
    except ValueError as error:
        raise NetworkError(
            f"{path} must be a complete list of revoked certificates, with the time of its next update.",
            str(error)[:200],
            "Let the authority sign a complete list.",
        ) from None
    return _Edition(number, found.last_update_utc, found.next_update_utc)


def _is_plain_distribution_point(value: x509.ExtensionType) -> bool:
    """Whether it says only where the list is published, and for which certificates of nodes."""
    return isinstance(value, x509.IssuingDistributionPoint) and not (
        value.indirect_crl
        or value.only_some_reasons
        or value.only_contains_ca_certs
        or value.only_contains_attribute_certs
    )
