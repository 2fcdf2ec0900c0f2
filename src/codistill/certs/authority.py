"""A small certificate authority in a folder: it issues, renews and revokes the certificates of a federation's nodes.

    certs/ca.crt  ca.key     the authority: whoever has the key can impersonate every node
    certs/ledger.json        all certificates ever issued
    certs/crl.pem            the signed revocation list, made from the ledger
    certs/NAME/              a node's folder, to be copied to its machine

A change is made under a lock, and the ledger is written first. So a kill at any moment loses at most a certificate
that was never delivered; the next change updates the revocation list and its copies to the ledger.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from codistill.certs.credentials import (
    AGENT,
    AUTHORITY_CERTIFICATE,
    AUTHORITY_KEY,
    CERTIFICATE,
    HUB,
    KEY,
    REVOCATIONS,
    check_private,
    check_readable,
    read_certificate,
    read_key,
    read_list,
    serial_number,
    split_serial,
)
from codistill.certs.register import LEDGER, encode_ledger, read_ledger
from codistill.certs.register import Issued as Issued
from codistill.certs.safe_files import PRIVATE, locked, put, writing
from codistill.certs.signing import (
    alternative_name,
    check_common_name,
    extend_list,
    key_bytes,
    new_key,
    pem,
    self_signed,
    sign_list,
    signed,
)
from codistill.errors import NetworkError, RecipeError, nearest
from codistill.files import LOCK

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

    def create(self, *, name: str = "codistill authority", days: int = 3650) -> datetime:
        """Make a new authority and return when it expires. `ca.crt` is written last: it completes the authority."""
        _check_days(days)
        check_common_name(name)
        with writing(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_unused()  # before the lock, which would leave a file in a folder that is in use for something else
        with locked(self.folder):
            self._check_unused()
            with writing(self.folder):
                self.folder.chmod(0o700)
            key = new_key()
            certificate = self_signed(key, name, self.now, self.now + timedelta(days=days))
            put(self.folder / LEDGER, encode_ledger([]))
            put(self.folder / AUTHORITY_KEY, key_bytes(key), PRIVATE)
            put(self.folder / REVOCATIONS, pem(sign_list(certificate, key, [], 1, self.now)))
            put(self.folder / AUTHORITY_CERTIFICATE, pem(certificate))
        return certificate.not_valid_after_utc

    def issue(self, role: str, name: str, *, days: int = 365, addresses: Iterable[str] = ()) -> Issued:
        """The first certificate of a name, or the next generation after a revocation, with the node's folder."""
        _check_days(days)
        hosts = tuple(dict.fromkeys([*([name] if role == HUB else []), *addresses]))
        for host in hosts:
            alternative_name(host)
        if role == AGENT:
            check_agent_name(name)
        with self._open() as records:
            self._check_free(records, role, name)
            generation = records.generation(HUB if role == HUB else name)
            return records.issue(Issued(name, role, generation, 0, hosts, self.now + timedelta(days=days)))

    def renew(self, name: str, *, days: int = 365) -> Issued:
        """A new key and certificate of the same generation; the old certificate stays valid until it expires."""
        _check_days(days)
        with self._open() as records:
            last = records.last(name)
            if last.revoked:
                raise NetworkError(
                    "Only a certificate that is not revoked can be renewed.",
                    f"'{name}' was revoked on {last.revoked:%Y-%m-%d}",
                    f"Issue its next generation: codistill certs {last.role} {shlex.quote(name)}",
                )
            return records.issue(replace(last, not_after=self.now + timedelta(days=days)))

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
    def _open(self) -> Iterator[_Records]:
        self._check_complete()
        with locked(self.folder):
            records = _Records(self.folder, self.now)
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

    def _check_free(self, records: _Records, role: str, name: str) -> None:
        taken = {_folded(issued.name): issued for issued in records.ledger}.get(_folded(name))
        if _folded(name) in _OWN_FILES or name.endswith(".part"):
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
                f"If it is lost or expires soon: codistill certs renew {shlex.quote(name)}. "
                f"If others may have its key: codistill certs revoke {shlex.quote(name)}, then issue again.",
            )


class _Records:
    """The authority's files, while the lock is held."""

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
        self.list = read_list(folder / REVOCATIONS, self.certificate)

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

    def issue(self, wanted: Issued) -> Issued:
        """Write the ledger first, then the files; the certificate is last: with it, the folder is complete."""
        check_common_name(f"{wanted.node_name}~{wanted.generation}")
        end = min(wanted.not_after, self.certificate.not_valid_after_utc)
        issued = replace(wanted, serial=serial_number(wanted.node_name, wanted.generation), not_after=end)
        key = new_key()
        certificate = signed(issued, key, self.certificate, self.key, self.now)
        self.write_ledger([*self.ledger, issued])
        folder = self.folder / issued.name
        with writing(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        put(folder / AUTHORITY_CERTIFICATE, pem(self.certificate))
        put(folder / REVOCATIONS, pem(self.list))
        put(folder / KEY, key_bytes(key), PRIVATE)
        put(folder / CERTIFICATE, pem(certificate))
        return issued

    def write_ledger(self, ledger: list[Issued]) -> None:
        """Replace the ledger."""
        put(self.folder / LEDGER, encode_ledger(ledger))
        self.ledger = ledger

    def update_lists(self) -> None:
        """Update the revocation list and its copies to the ledger; what is on the list stays there in any case."""
        listed = {entry.serial_number for entry in self.list}
        missing = [issued for issued in self.ledger if issued.revoked and issued.serial not in listed]
        if missing:
            self.list = extend_list(self.list, missing, self.certificate, self.key, self.now)
            put(self.folder / REVOCATIONS, pem(self.list))
        for name in sorted({issued.name for issued in self.ledger}):
            copy = self.folder / name / REVOCATIONS
            with writing(copy):
                stale = copy.exists() and copy.read_bytes() != pem(self.list)
            if stale:
                put(copy, pem(self.list))


# --- checks ---------------------------------------------------------------------------------------------


def check_agent_name(name: str) -> None:
    """The rule of `codistill.Agent`, which this repeats: reading it there would need torch."""
    if not re.fullmatch(r"[\w][\w .+-]{0,63}", name) or _folded(name) == HUB:
        raise NetworkError(
            "An agent's name must be 1 to 64 letters, digits, spaces or any of _ . + -, and not 'hub' in any case.",
            repr(name),
            "Choose another name.",
        )


def _check_days(days: int) -> None:
    if not 1 <= days <= 36500:
        raise RecipeError("--days must be between 1 and 36500.", f"{days}", "Choose another number.")


def _folded(name: str) -> str:
    """Equal for names that a file system or a reader could confuse."""
    return unicodedata.normalize("NFKC", name).casefold()
