"""The identity in a certificate: a node's name, its generation and its role.

A certificate names its node in one of two forms. `codistill certs` writes the common name `NAME~G` with the role as the
organisational unit. Generation G is 1 at first; revoking a name puts its generation on the revocation list, and the
next certificate of that name has G + 1. A node accepts only the lowest generation that is not on the list. The list
holds serial numbers, composed of:

    serial = 8 bytes of SHA-256(identity), top bit cleared | 2 bytes generation | 8 random bytes
    identity = "hub" for the hub, "agent:NAME" for an agent

The other form is for external authorities, which choose serial numbers themselves: a URI among the alternative names,
`codistill:hub` or `codistill:agent:NAME` with the name percent-encoded. It has no generation (0 below), and is revoked
by its serial number. The common name of a certificate with such a URI is ignored.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.x509.oid import NameOID

from codistill.core.errors import NetworkError, RecipeError

HUB, AGENT = "hub", "agent"
MALFORMED = (  # raised by the library for malformed certificates, lists and requests
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
_SCHEME = "codistill:"
_AGENT_NAME = re.compile(r"[\w][\w .+-]{0,63}")  # as in `codistill.Agent`, whose import would need torch
_COMMON_NAME = re.compile(r"(?P<name>.+)~(?P<generation>[1-9][0-9]{0,4})")
_SUBJECT = (NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME)


def identity(name: str) -> str:
    return HUB if name == HUB else f"agent:{name}"


def node_uri(role: str, name: str) -> str:
    """The alternative name by which a certificate of an external authority names a node."""
    return f"{_SCHEME}{HUB}" if role == HUB else f"{_SCHEME}{AGENT}:{quote(name, safe='')}"


def serial_number(name: str, generation: int) -> int:
    """A new serial number with the digest of the identity and the generation."""
    return identity_digest(name) << 80 | generation << 64 | secrets.randbits(64)


def split_serial(serial: int) -> tuple[int, int]:
    """(digest of the identity, generation) of a serial number."""
    return serial >> 80, serial >> 64 & 0xFFFF


def identity_digest(name: str) -> int:
    """The first 63 bits of a serial number."""
    return int.from_bytes(hashlib.sha256(identity(name).encode()).digest()[:8], "big") & (1 << 63) - 1


def folded(name: str) -> str:
    """A form that is equal for names that a file system or a reader could confuse."""
    return unicodedata.normalize("NFKC", name).casefold()


def check_agent_name(name: str) -> None:
    if not _is_agent_name(name):
        raise NetworkError(
            "An agent's name must be 1 to 64 letters, digits, spaces or any of _ . + -, and not 'hub'.",
            repr(name),
            "Choose another name.",
        )


def load_peer(der: bytes) -> x509.Certificate:
    with readable():
        return x509.load_der_x509_certificate(der)


@contextmanager
def readable() -> Iterator[None]:
    """Turn the library's errors for a malformed certificate, some raised only when a field is read, into ours."""
    try:
        yield
    except MALFORMED as error:
        found = f"{type(error).__name__}: {error}"[:200]
        raise NetworkError("A node's certificate must be readable.", found, "Check the address.") from None


def describe(certificate: x509.Certificate) -> tuple[str, int, str]:
    """Name, generation (0 if it has none) and role in a certificate."""
    with readable():
        uris = _own_uris(certificate)
        return _from_common_name(certificate) if not uris else _from_uris(uris)


def _own_uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith(_SCHEME)]


def _from_uris(uris: list[str]) -> tuple[str, int, str]:
    """Accept only the form that `node_uri` writes: several URIs or spellings would be ambiguous."""
    role, _, encoded = uris[0].removeprefix(_SCHEME).partition(":")
    name = HUB if role == HUB else unquote(encoded, errors="replace")
    if len(uris) > 1 or uris[0] != node_uri(role, name) or (role != HUB and not _is_agent_name(name)):
        raise NetworkError(
            f"A node's certificate must have one name of the form '{_SCHEME}hub' or '{_SCHEME}agent:NAME'.",
            f"{', '.join(uris)[:200]!r}",
            "Issue it again with the name in the request of 'codistill certs request'.",
        )
    return name, 0, role


def _from_common_name(certificate: x509.Certificate) -> tuple[str, int, str]:
    subject = certificate.subject
    try:
        (common, role) = [str(found.value) for oid in _SUBJECT for (found,) in [subject.get_attributes_for_oid(oid)]]
    except ValueError:  # none of them, or several
        common, role = subject.rfc4514_string(), ""
    match = _COMMON_NAME.fullmatch(common)
    name = match["name"] if match else ""
    if match is None or not (role == name == HUB or (role == AGENT and _is_agent_name(name))):
        raise NetworkError(
            "A node's certificate must name it as NAME~GENERATION, with its role as the unit.",
            f"the name '{common}' with the role '{role}'",
            "Use certificates made by 'codistill certs', or of the form in docs/certificates.md.",
        )
    return name, int(match["generation"]), role


def _is_agent_name(name: str) -> bool:
    return _AGENT_NAME.fullmatch(name) is not None and folded(name) != HUB


# --- validity of certificates and lists

CLOCK_SKEW = timedelta(minutes=5)  # tolerated difference between the clocks of machines
_LONGEST_DAYS = 36500


def utc_now() -> datetime:
    return datetime.now(UTC)


def life(days: int, hours: int | None = None) -> timedelta:
    """A validity in days, or in hours if given."""
    option, count, most = ("--days", days, _LONGEST_DAYS) if hours is None else ("--hours", hours, 24 * _LONGEST_DAYS)
    if not 1 <= count <= most:
        raise RecipeError(f"{option} must be between 1 and {most}.", f"{count}", "Choose a number in this range.")
    return timedelta(days=days) if hours is None else timedelta(hours=hours)


def is_due(start: datetime, end: datetime, now: datetime) -> bool:
    """Whether something expires soon: in less than a third of its life, and in less than 30 days."""
    return end - now < min((end - start) / 3, timedelta(days=30))


def left_text(left: timedelta) -> str:
    """'12 days', '5 h' or 'less than an hour': coarse, since every change is logged."""
    if left >= timedelta(days=3):
        return f"{left.days} days"
    hours = left // timedelta(hours=1)
    return f"{hours} h" if hours else "less than an hour"


def date_text(moment: datetime) -> str:
    """'2027-11-16 10:47 UTC'."""
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def end_text(end: datetime, now: datetime) -> str:
    """A date; with the time of day if it is within 3 days."""
    return f"{end:%Y-%m-%d}" if abs(end - now) >= timedelta(days=3) else date_text(end)
