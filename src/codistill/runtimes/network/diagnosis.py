"""A test connection before the first message: a link only tries again, this one says what is wrong."""

from __future__ import annotations

import socket
import ssl

from codistill.certs.credentials import Credentials
from codistill.errors import NetworkError
from codistill.runtimes.network.addresses import split
from codistill.runtimes.network.tls_handshake import wrapped

_TIMEOUT = 5.0
_ANSWER = 2.0  # seconds in which its preface arrives, after our side of the handshake


def probe(address: str, expected: str, own: Credentials | None) -> str | None:
    """Why a node cannot be reached now; None if it can be. Raises `NetworkError` if waiting does not help."""
    host, port = split(address)
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT) as plain:
            if own is not None and not _handshake(plain, address, expected, own):
                return (
                    f"{address} closed the connection: it may be too busy, or does not accept this certificate (one "
                    "that has expired there, or of another authority)"
                )
    except socket.gaierror as error:
        return f"the name '{host}' cannot be resolved ({error.strerror})"
    except ConnectionRefusedError:
        return f"no process listens at {address}"
    except TimeoutError:
        return f"{address} does not answer: a firewall, or another machine"
    except OSError as error:
        return f"{address} cannot be reached: {error.strerror or error}"
    return None


def _handshake(plain: socket.socket, address: str, expected: str, own: Credentials) -> bool:
    """Whether the other end takes the connection; an error if it is the wrong one."""
    try:
        with wrapped(plain, own) as secure:
            secure.do_handshake()
            _check_name(secure.getpeercert(binary_form=True) or b"", address, expected, own)
            secure.settimeout(_ANSWER)
            return bool(secure.recv(1))  # the first byte of its preface
    except (TimeoutError, ConnectionError):
        return False
    except ssl.SSLCertVerificationError as error:
        raise NetworkError(
            f"{address} must have a certificate of this federation's authority.",
            error.verify_message,
            "Use certificates of one authority on both sides, and check the clocks of both machines.",
        ) from None
    except ssl.SSLError as error:
        # Whoever does not admit a certificate says so by an alert of TLS. Closed without one: to make room for others.
        if isinstance(error, ssl.SSLEOFError) or error.reason == "UNEXPECTED_EOF_WHILE_READING":
            return False
        raise NetworkError(
            f"{address} must accept this node's certificate.",
            str(error.reason or error).lower().replace("_", " "),
            "Renew it by 'codistill certs renew', or get one of the same authority; is the other side --insecure?",
        ) from None


def _check_name(der: bytes, address: str, expected: str, own: Credentials) -> None:
    """The certificate is of the expected node and admitted; a list that is out of date may be renewed later."""
    try:
        found = own.admitted_name(der)
    except NetworkError as error:
        if own.admits_nobody():
            return
        found, why = "", error.found
    if found != expected:
        raise NetworkError(
            f"The node at {address} must be '{expected}'.",
            f"'{found}'" if found else why,
            "Check the address and the certificates.",
        )
