"""Putting the authority's answer into a node's folder: all files are checked together before any is replaced."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from codistill.certs.certificate_files import (
    AUTHORITY_CERTIFICATE,
    CERTIFICATE,
    KEY,
    NEXT_KEY,
    REQUEST,
    REVOCATIONS,
    check_private,
    check_readable,
    read_certificate,
    read_key,
)
from codistill.certs.credentials import Credentials, read_credentials
from codistill.certs.node_identity import describe
from codistill.certs.safe_files import PRIVATE, put, writing
from codistill.certs.validity import utc_now
from codistill.errors import NetworkError

_PUBLIC = (REVOCATIONS, AUTHORITY_CERTIFICATE, CERTIFICATE)  # in the order in which they are replaced


def install(sources: Iterable[Path], folder: Path, *, clock: Callable[[], datetime] = utc_now) -> Credentials:
    """Take ca.crt, cert.pem and crl.pem, or some of them, from files or folders; the folder's other files stay.

    The key is the one of the folder that fits the certificate: that of the last request, or the present one.
    """
    check_readable(folder)
    if not folder.is_dir():
        raise NetworkError(
            "The answer of the authority goes into the folder where the request was made.",
            f"no folder {folder}",
            "Name it with --certs; without a request, make one first: codistill certs request NAME",
        )
    new = _contents(sources)
    _check_same_authority(new, folder)
    files = {name: (folder / name).read_bytes() for name in _PUBLIC if (folder / name).is_file()} | new
    missing = [name for name in _PUBLIC if name not in files]
    if missing:
        raise NetworkError(
            f"With what is installed, {folder} must be complete.",
            f"{', '.join(missing)} is in none of the files",
            "Give the folder that the authority has sent, or all files in it.",
        )
    with writing(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".install-") as temporary:
        trial = Path(temporary)  # of mode 700
        for name, data in files.items():
            (trial / name).write_bytes(data)
        own = read_certificate(trial / CERTIFICATE)
        key = _fitting_key(folder, trial)
        put(trial / KEY, key.read_bytes(), PRIVATE)
        try:
            read_credentials(trial, describe(own)[2], clock=clock)
        except NetworkError as error:
            parts = [part.replace(str(trial), str(folder)) for part in (error.must, error.found, error.do)]
            raise NetworkError(*parts) from None
    for name in _PUBLIC:
        if name == CERTIFICATE and key.name != KEY:
            put(folder / KEY, key.read_bytes(), PRIVATE)
        if name in new:
            put(folder / name, new[name])
    if CERTIFICATE in new:
        with writing(folder):  # last: until here, the same command can be repeated
            (folder / NEXT_KEY).unlink(missing_ok=True)
            (folder / REQUEST).unlink(missing_ok=True)
    return read_credentials(folder, describe(own)[2], clock=clock)


def _contents(sources: Iterable[Path]) -> dict[str, bytes]:
    """The files by their names."""
    paths: list[Path] = []
    for source in sources:
        paths += [source / name for name in _PUBLIC if (source / name).is_file()] if source.is_dir() else [source]
    unknown = [str(path) for path in paths if path.name not in _PUBLIC or not path.is_file()]
    if unknown or not paths:
        raise NetworkError(
            f"What is installed must be {', '.join(_PUBLIC)}, or a folder with them.",
            ", ".join(unknown) or "none of them",
            "Give the files that the authority has sent, under the names that they had.",
        )
    with writing(paths[0]):
        return {path.name: path.read_bytes() for path in paths}


def _check_same_authority(new: dict[str, bytes], folder: Path) -> None:
    """Whoever can replace the authority can impersonate every node: a person must decide that."""
    path = folder / AUTHORITY_CERTIFICATE
    if AUTHORITY_CERTIFICATE in new and path.is_file() and path.read_bytes() != new[AUTHORITY_CERTIFICATE]:
        raise NetworkError(
            f"The authority must be the one of {path}.",
            f"another {AUTHORITY_CERTIFICATE}",
            f"If the federation has a new authority, compare its fingerprint by telephone and remove {path} first.",
        )


def _fitting_key(folder: Path, trial: Path) -> Path:
    keys = [path for path in (folder / NEXT_KEY, folder / KEY) if path.is_file()]
    for path in keys:
        check_private(path)
    wanted = read_certificate(trial / CERTIFICATE).public_key()
    for path in keys:
        if read_key(path).public_key() == wanted:
            return path
    raise NetworkError(
        f"{folder} must hold the key of the certificate.",
        "the certificate is for another key" if keys else "no key",
        "Install it where 'codistill certs request' was run, or name that folder with --certs.",
    )
