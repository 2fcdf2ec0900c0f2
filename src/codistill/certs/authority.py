"""A certificate authority in a folder: it issues, renews and revokes the certificates of a federation's nodes.

    certs/ca.crt  ca.key     the authority: whoever has the key can impersonate every node
    certs/ledger.json        all certificates ever issued
    certs/crl.pem            the signed revocation list, made from the ledger
    certs/NAME/              a node's folder, to be copied to its machine

Changes are made under a lock, and the ledger is written first. A crash loses at most a certificate that was never
delivered; the next change brings the revocation list and its copies up to date.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from codistill.certs.files import (
    AUTHORITY_CERTIFICATE,
    AUTHORITY_KEY,
    CERTIFICATE,
    KEY,
    PRIVATE,
    REVOCATIONS,
    check_private,
    check_readable,
    locked,
    put,
    read_certificate,
    read_key,
    read_lists,
    signer_of,
    writing,
)
from codistill.certs.identity import AGENT, CLOCK_SKEW, HUB, check_agent_name, folded, life, serial_number, split_serial
from codistill.certs.signing import (
    LEDGER,
    Issued,
    SigningRequest,
    alternative_name,
    check_common_name,
    encode_ledger,
    key_bytes,
    list_entry,
    list_number,
    new_key,
    pem,
    read_ledger,
    self_signed,
    sign_list,
    signed,
)
from codistill.core.errors import NetworkError, RecipeError, nearest
from codistill.core.files import LOCK, check_own, subfolder

LIST_DAYS, MOST_LIST_DAYS = 7, 366
_LIST_AGE = timedelta(days=1)  # after this, any change signs the list again
_OWN_FILES = (AUTHORITY_CERTIFICATE, AUTHORITY_KEY, REVOCATIONS, LEDGER, LOCK)


class AuthorityFiles:
    """The contents of an authority's folder; the caller holds its lock."""

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
                "The certificate of the authority must be valid.",
                f"that of {folder} expired on {self.certificate.not_valid_after_utc:%Y-%m-%d}",
                "Create a new authority in another folder with 'codistill certs init', and issue all certificates "
                "again.",
            )
        self.ledger = read_ledger(folder / LEDGER)
        self.list = own_list(folder, self.certificate)

    def last(self, name: str) -> Issued:
        """The newest certificate of a name."""
        found = [issued for issued in self.ledger if issued.name == name]
        if not found:
            names = {issued.name for issued in self.ledger}
            hint = "No certificate was issued yet: codistill certs hub, codistill certs agent."
            raise NetworkError(
                "The name must be in the ledger of the authority.", f"'{name}'", nearest(name, names) if names else hint
            )
        return found[-1]

    def generation(self, name: str) -> int:
        """The lowest generation of a name that is not revoked."""
        revoked = {split_serial(entry.serial_number) for entry in self.list}
        generation = 1
        while split_serial(serial_number(name, generation)) in revoked:
            generation += 1
        return generation

    def issue(self, wanted: Issued, public_key: ec.EllipticCurvePublicKey | None = None) -> Issued:
        """Issue a certificate for a key made at the node's site, or (None) for a new key.

        The ledger is written first, then the files; the certificate is last and completes the folder.
        """
        check_common_name(f"{wanted.node_name}~{wanted.generation}")
        key = new_key()  # not used if the site made one
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
                (folder / KEY).unlink(missing_ok=True)  # of an earlier certificate, whose key was made here
        else:
            put(folder / KEY, key_bytes(key), PRIVATE)
        put(folder / CERTIFICATE, pem(certificate))
        return issued

    def write_ledger(self, ledger: list[Issued]) -> None:
        put(self.folder / LEDGER, encode_ledger(ledger))
        self.ledger = ledger

    def update_lists(self, *, again: bool = False, life: timedelta | None = None) -> None:
        """Add missing revocations of the ledger to the list, and update its copies; entries are never removed.

        The list is signed again if `again`, or when it is a day old, for `life` or as long as before.
        """
        listed = {entry.serial_number for entry in self.list}
        missing = [issued for issued in self.ledger if issued.revoked and issued.serial not in listed]
        age, current_life = self.now - self.list.last_update_utc, list_life(self.list)
        # A list from the future, signed while the clock was ahead, would be refused by nodes.
        is_old = age > min(_LIST_AGE, current_life / 2) or age < -CLOCK_SKEW
        if missing or again or is_old:
            entries, number = [*self.list, *map(list_entry, missing)], list_number(self.list) + 1
            self.list = sign_list(self.certificate, self.key, entries, number, self.now, life or current_life)
            put(self.folder / REVOCATIONS, pem(self.list))
        for name in sorted({issued.name for issued in self.ledger}):
            copy = self.folder / name / REVOCATIONS
            with writing(copy):
                stale = copy.exists() and copy.read_bytes() != pem(self.list)
            if stale:
                put(copy, pem(self.list))


def own_list(folder: Path, authority: x509.Certificate) -> x509.CertificateRevocationList:
    found = read_lists(folder / REVOCATIONS)[0]
    signer_of(found, [authority], folder / REVOCATIONS)
    return found


def list_life(found: x509.CertificateRevocationList) -> timedelta:
    """How long a list is valid; the default for lists of versions that set no end."""
    life = (found.next_update_utc or found.last_update_utc) - found.last_update_utc
    return life if timedelta(0) < life <= timedelta(days=MOST_LIST_DAYS) else timedelta(days=LIST_DAYS)


class Authority:
    """The authority in a folder. Every call reads the folder again; changes are made under a lock."""

    def __init__(self, folder: str | Path, *, now: datetime | None = None) -> None:
        self.folder, self._now = Path(folder), now

    @property
    def now(self) -> datetime:
        """The time in whole seconds, the resolution of certificates."""
        return (self._now or datetime.now(UTC)).replace(microsecond=0)

    def issued(self) -> list[Issued]:
        """All certificates ever issued, oldest first."""
        self._check_complete()
        return read_ledger(self.folder / LEDGER)

    def revocation_list(self) -> x509.CertificateRevocationList:
        """The current revocation list."""
        self._check_complete()
        return own_list(self.folder, read_certificate(self.folder / AUTHORITY_CERTIFICATE))

    def create(self, *, name: str = "codistill authority", days: int = 3650, list_days: int = LIST_DAYS) -> datetime:
        """Create an authority and return when it expires. `ca.crt` is written last and completes it.

        `list_days`: validity of this revocation list and of those after it.
        """
        end, list_life = self.now + life(days), _list_life(list_days)
        check_common_name(name)
        with writing(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_unused()  # before the lock, which leaves a file in the folder
        with locked(self.folder):
            self._check_unused()
            with writing(self.folder):
                self.folder.chmod(0o700)
            key = new_key()
            certificate = self_signed(key, name, self.now, end)
            put(self.folder / LEDGER, encode_ledger([]))
            put(self.folder / AUTHORITY_KEY, key_bytes(key), PRIVATE)
            put(self.folder / REVOCATIONS, pem(sign_list(certificate, key, [], 1, self.now, list_life)))
            put(self.folder / AUTHORITY_CERTIFICATE, pem(certificate))
        return certificate.not_valid_after_utc

    def issue(
        self, role: str, name: str, *, days: int = 365, hours: int | None = None, addresses: Iterable[str] = ()
    ) -> Issued:
        """The first certificate of a name, or the next generation after a revocation, with the node's folder.

        `hours`: how long it is valid, instead of `days`.
        """
        wanted = self._wanted(role, name, addresses, self.now + life(days, hours))
        with self._open() as records:
            self._check_free(records, role, name)
            return records.issue(replace(wanted, generation=records.generation(wanted.node_name)))

    def renew(self, name: str, *, days: int = 365, hours: int | None = None) -> Issued:
        """A new key and certificate of the same generation; the old certificate stays valid until it expires."""
        end = self.now + life(days, hours)
        with self._open() as records:
            last = _renewable(records.last(name))
            if last.by_request:
                raise NetworkError(
                    "A node with its own key must renew its certificate by a request.",
                    f"the key of '{name}' is at its site",
                    "There: codistill certs request --renew; here: codistill certs sign request.pem --renew",
                )
            return records.issue(replace(last, not_after=end))

    def sign(
        self,
        request: SigningRequest,
        *,
        role: str = AGENT,
        renew: bool = False,
        days: int = 365,
        hours: int | None = None,
        addresses: Iterable[str] = (),
    ) -> Issued:
        """A certificate for a key made at the node's site; its folder here holds no key.

        Role, addresses and validity are those given here, not those in the request. With `renew`, generation, role and
        addresses are those of the node's last certificate.
        """
        if request.role != role:
            raise NetworkError(
                f"The request must be for the role '{role}'.",
                f"'{request.name}' requests the role '{request.role}'",
                f"To grant it: codistill certs sign REQUEST --role {request.role}",
            )
        wanted = self._wanted(role, request.name, addresses, self.now + life(days, hours))
        with self._open() as records:
            if renew:
                last = _renewable(records.last(request.name))
                wanted = replace(last, not_after=wanted.not_after)
                if last.role != role:
                    raise NetworkError(
                        "A renewal keeps the role.", f"'{last.name}' is {last.role}", "Choose another name."
                    )
            else:
                self._check_free(records, role, request.name, "codistill certs sign REQUEST --renew")
                wanted = replace(wanted, generation=records.generation(wanted.node_name))
            return records.issue(wanted, request.key)

    def refresh(self, *, list_days: int | None = None) -> x509.CertificateRevocationList:
        """Sign the revocation list again, valid for `list_days`, and copy it to the nodes' folders."""
        list_life = None if list_days is None else _list_life(list_days)
        with self._open(update=False) as records:
            records.update_lists(again=True, life=list_life)
            return records.list

    def revoke(self, name: str) -> list[Issued]:
        """Revoke the name's generation, and return the newly revoked certificates.

        All hubs have the common name "hub", so all hubs of one generation are revoked together.
        """
        with self._open() as records:
            last = records.last(name)
            revoked = [
                i for i in records.ledger if split_serial(i.serial) == split_serial(last.serial) and not i.revoked
            ]
            if revoked:
                records.write_ledger([replace(i, revoked=self.now) if i in revoked else i for i in records.ledger])
                records.update_lists()
            return revoked

    @contextmanager
    def _open(self, *, update: bool = True) -> Iterator[AuthorityFiles]:
        self._check_complete()
        check_own(self.folder)
        with locked(self.folder):
            records = AuthorityFiles(self.folder, self.now)
            if update:
                records.update_lists()
            yield records

    def _check_complete(self) -> None:
        check_readable(self.folder)
        if not (self.folder / LEDGER).exists() and not (self.folder / AUTHORITY_CERTIFICATE).exists():
            raise NetworkError(
                "The folder must hold a certificate authority.",
                f"none in {self.folder}",
                "Create one with 'codistill certs init', or give its folder with --certs.",
            )
        missing = [name for name in _OWN_FILES if name != LOCK and not (self.folder / name).exists()]
        if missing:
            raise NetworkError(
                "The authority's folder must be complete.",
                f"{self.folder} lacks {', '.join(missing)}",
                "Restore it from a backup; if nothing was issued yet, 'codistill certs init' creates a new one.",
            )

    def _check_unused(self) -> None:
        """Overwrite nothing but the files of an unfinished `create`."""
        with writing(self.folder):
            held = {path.name for path in self.folder.iterdir() if path.suffix != ".part"} - {LOCK}
        unfinished = LEDGER in held and held <= {LEDGER, AUTHORITY_KEY, REVOCATIONS}
        if held and not (unfinished and not read_ledger(self.folder / LEDGER)):
            what = "an authority" if held & {AUTHORITY_CERTIFICATE, AUTHORITY_KEY, LEDGER} else min(held)
            raise NetworkError(
                "A new authority needs an empty folder.",
                f"{self.folder} already holds {what}",
                "Choose another folder with --certs.",
            )

    def _wanted(self, role: str, name: str, addresses: Iterable[str], end: datetime) -> Issued:
        hosts = tuple(dict.fromkeys([*([name] if role == HUB else []), *addresses]))
        for host in hosts:
            alternative_name(host)
        if role == AGENT:
            check_agent_name(name)
        return Issued(name, role, 1, 0, hosts, end)

    def _check_free(self, records: AuthorityFiles, role: str, name: str, renew: str = "") -> None:
        taken = {folded(issued.name): issued for issued in records.ledger}.get(folded(name))
        if folded(name) in _OWN_FILES or name.endswith(".part"):
            raise NetworkError(
                "A node's name must not be a file name of the authority.", f"'{name}'", "Choose another name."
            )
        if taken is not None and taken.name != name:
            raise NetworkError(
                "Names must differ by more than case or Unicode form.",
                f"'{name}' beside '{taken.name}'",
                "Choose another name.",
            )
        if taken is None and (self.folder / name).exists():
            raise NetworkError(
                "The folder of a new node must not exist yet.",
                f"{self.folder / name} exists, and '{name}' is not in the ledger",
                "Move it away, or choose another name.",
            )
        if taken is not None and not taken.revoked and (taken.role != role or taken.not_after > self.now):
            raise NetworkError(
                "A name can have one certificate at a time.",
                f"{taken.role} '{name}' has one, valid until {taken.not_after:%Y-%m-%d}",
                f"If it is lost or expires soon: {renew or f'codistill certs renew {shlex.quote(name)}'}. "
                f"If its key may be compromised: codistill certs revoke {shlex.quote(name)}, then issue again.",
            )


def _renewable(last: Issued) -> Issued:
    if last.revoked:
        raise NetworkError(
            "A revoked certificate cannot be renewed.",
            f"'{last.name}' was revoked on {last.revoked:%Y-%m-%d}",
            "Issue its next generation: codistill certs "
            f"{'sign REQUEST, without --renew' if last.by_request else f'{last.role} {shlex.quote(last.name)}'}",
        )
    return last


def _list_life(days: int) -> timedelta:
    if not 1 <= days <= MOST_LIST_DAYS:
        raise RecipeError(f"--list-days must be between 1 and {MOST_LIST_DAYS}.", f"{days}", "7 is the default.")
    return timedelta(days=days)
