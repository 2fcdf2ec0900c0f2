"""A small certificate authority in a folder: it issues, renews and revokes the certificates of a federation's nodes.

    certs/ca.crt  ca.key     the authority: whoever has the key can impersonate every node
    certs/ledger.json        all certificates ever issued
    certs/crl.pem            the signed revocation list, made from the ledger
    certs/NAME/              a node's folder, to be copied to its machine

A change is made under a lock, and the ledger is written first. So a kill at any moment loses at most a certificate
that was never delivered; the next change updates the revocation list and its copies to the ledger.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from codistill.certs.authority_files import LIST_DAYS, MOST_LIST_DAYS, AuthorityFiles, own_list
from codistill.certs.certificate_files import (
    AUTHORITY_CERTIFICATE,
    AUTHORITY_KEY,
    REVOCATIONS,
    check_readable,
    read_certificate,
)
from codistill.certs.node_identity import AGENT, HUB, check_agent_name, folded, split_serial
from codistill.certs.register import LEDGER, encode_ledger, read_ledger
from codistill.certs.register import Issued as Issued
from codistill.certs.safe_files import PRIVATE, locked, put, writing
from codistill.certs.signing import alternative_name, check_common_name, key_bytes, new_key, pem, self_signed, sign_list
from codistill.certs.signing_request import SigningRequest
from codistill.certs.validity import life
from codistill.errors import NetworkError, RecipeError
from codistill.files import LOCK, check_own

# isort: split
# after node_identity, whose error says how to install cryptography
from cryptography import x509

_OWN_FILES = (AUTHORITY_CERTIFICATE, AUTHORITY_KEY, REVOCATIONS, LEDGER, LOCK)


class Authority:
    """The authority of a folder. Every call reads the folder again; changes are made under a lock."""

    def __init__(self, folder: str | Path, *, now: datetime | None = None) -> None:
        self.folder, self._now = Path(folder), now

    @property
    def now(self) -> datetime:
        """The time in whole seconds, as in certificates."""
        return (self._now or datetime.now(UTC)).replace(microsecond=0)

    def issued(self) -> list[Issued]:
        """All certificates ever issued, oldest first."""
        self._check_complete()
        return read_ledger(self.folder / LEDGER)

    def revocation_list(self) -> x509.CertificateRevocationList:
        """The revocation list as it is."""
        self._check_complete()
        return own_list(self.folder, read_certificate(self.folder / AUTHORITY_CERTIFICATE))

    def create(self, *, name: str = "codistill authority", days: int = 3650, list_days: int = LIST_DAYS) -> datetime:
        """Make a new authority and return when it expires. `ca.crt` is written last: it completes the authority.

        `list_days`: for how long a revocation list is valid; the next lists are signed for as long as this one.
        """
        end, list_life = self.now + life(days), _list_life(list_days)
        check_common_name(name)
        with writing(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_unused()  # before the lock, which would leave a file in a folder that is in use for something else
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
                    "A node that made its own key renews its certificate by a request.",
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
        """A certificate for a key that was made at the node's site; its folder here holds no key.

        Role, addresses and time are what is given here, whatever the request asks for. With `renew` it is of the
        same generation, role and addresses as the node's last certificate.
        """
        if request.role != role:
            raise NetworkError(
                f"The request must be one for the role '{role}'.",
                f"that of '{request.name}' asks for the role '{request.role}'",
                f"If it is to be the {request.role}: codistill certs sign REQUEST --role {request.role}",
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
        """Sign the revocation list again, from now on for `list_days`, and put it into the nodes' folders."""
        list_life = None if list_days is None else _list_life(list_days)
        with self._open(update=False) as records:
            records.update_lists(again=True, life=list_life)
            return records.list

    def revoke(self, name: str) -> list[Issued]:
        """Revoke the name's generation, and return the certificates that are revoked now and were not before.

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
                "Make one with 'codistill certs init', or name its folder with --certs.",
            )
        missing = [name for name in _OWN_FILES if name != LOCK and not (self.folder / name).exists()]
        if missing:
            raise NetworkError(
                "An authority's folder must be complete.",
                f"{self.folder} lacks {', '.join(missing)}",
                "Restore it from a copy; if nothing was issued yet, 'codistill certs init' makes a new one.",
            )

    def _check_unused(self) -> None:
        """An authority overwrites only the files of a `create` that was killed before it was complete."""
        with writing(self.folder):
            held = {path.name for path in self.folder.iterdir() if path.suffix != ".part"} - {LOCK}
        unfinished = LEDGER in held and held <= {LEDGER, AUTHORITY_KEY, REVOCATIONS}
        if held and not (unfinished and not read_ledger(self.folder / LEDGER)):
            what = "an authority" if held & {AUTHORITY_CERTIFICATE, AUTHORITY_KEY, LEDGER} else min(held)
            raise NetworkError(
                "A new authority needs a folder of its own.",
                f"{self.folder} already holds {what}",
                "Name another folder with --certs.",
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
                "A node's name must not be that of a file of the authority.", f"'{name}'", "Choose another name."
            )
        if taken is not None and taken.name != name:
            raise NetworkError(
                "Names must differ by more than the case or the form of letters.",
                f"'{name}' beside '{taken.name}'",
                "Choose another name.",
            )
        if taken is None and (self.folder / name).exists():
            raise NetworkError(
                "A new node needs a folder of its own.",
                f"{self.folder / name} exists, and '{name}' is not in the ledger",
                "Move it away, or choose another name.",
            )
        if taken is not None and not taken.revoked and (taken.role != role or taken.not_after > self.now):
            raise NetworkError(
                "A name can have one certificate at a time.",
                f"{taken.role} '{name}' has one, valid until {taken.not_after:%Y-%m-%d}",
                f"If it is lost or expires soon: {renew or f'codistill certs renew {shlex.quote(name)}'}. "
                f"If others may have its key: codistill certs revoke {shlex.quote(name)}, then issue again.",
            )


def _renewable(last: Issued) -> Issued:
    if last.revoked:
        raise NetworkError(
            "Only a certificate that is not revoked can be renewed.",
            f"'{last.name}' was revoked on {last.revoked:%Y-%m-%d}",
            "Issue its next generation: codistill certs "
            f"{'sign REQUEST, without --renew' if last.by_request else f'{last.role} {shlex.quote(last.name)}'}",
        )
    return last


def _list_life(days: int) -> timedelta:
    if not 1 <= days <= MOST_LIST_DAYS:
        raise RecipeError(f"--list-days must be between 1 and {MOST_LIST_DAYS}.", f"{days}", "Choose another number.")
    return timedelta(days=days)
