"""The key that all machines of a run share: from the environment, or from a file in the folder of the run."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from codistill.errors import RecipeError
from codistill.files import replace_file, writing

VARIABLE, FILE = "CODISTILL_KEY", "machines.key"
_SHORTEST = 32  # characters: as many as 16 random bytes have as hexadecimal digits
_LONGEST = 4096


class SharedKey:
    """The key of a start; a file is read anew each time, since rank 0 may not have written it yet."""

    def __init__(self, folder: Path | None, meeting: str) -> None:
        self._given, self._path, self._meeting = os.environ.get(VARIABLE), folder and folder / FILE, meeting
        if self._given is not None and len(self._given) < _SHORTEST:
            raise RecipeError(
                f"{VARIABLE} must have at least {_SHORTEST} characters.",
                f"{len(self._given)}",
                "Make one by 'openssl rand -hex 32', and set it on every machine.",
            )
        if self._given is None and self._path is None:
            raise RecipeError(
                "The machines of a run must share a key.",
                f"neither {VARIABLE} in the environment nor a folder of the run",
                f"Set {VARIABLE} on every machine, or name a folder that all of them see.",
            )

    @property
    def given(self) -> bool:
        """Whether it is in the environment, and so cannot change."""
        return self._given is not None

    @property
    def source(self) -> str:
        """Where the key is from, in words."""
        return VARIABLE if self.given else f"{self._path}"

    @contextmanager
    def published(self) -> Iterator[None]:
        """On rank 0: write a new key for the others into the folder, until the run has ended."""
        if self._path is None or self.given:
            yield
            return
        part = self._path.with_name(f"{FILE}.{os.getpid()}.part")
        with writing(self._path):
            replace_file(self._path, secrets.token_hex(32).encode(), part, mode=0o600)
        try:
            yield
        finally:
            self._path.unlink(missing_ok=True)

    def read(self) -> bytes | None:
        """The key of this start, for proofs; None if it is not there yet."""
        secret = self._given.encode() if self._given is not None else self._read_file()
        return None if secret is None else hmac.digest(secret, self._meeting.encode(), "sha256")

    def _read_file(self) -> bytes | None:
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                status, content = os.fstat(file.fileno()), file.read(_LONGEST)
        except OSError:
            return None
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise RecipeError(
                f"{self._path} must be this user's own, and readable by nobody else.",
                f"user {status.st_uid}, mode {status.st_mode & 0o777:o}",
                f"Use a file system that keeps owners and modes, or set {VARIABLE} on every machine.",
            )
        return content if len(content) >= _SHORTEST else None
