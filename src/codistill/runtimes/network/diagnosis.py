"""A test connection before the first message: Zenoh itself only retries, and does not say what is wrong."""

from __future__ import annotations

import socket
import ssl

from codistill.certs.credentials import Credentials, describe_peer
from codistill.errors import NetworkError
from codistill.runtimes.network.addresses import split
from codistill.topology import HUB

_TIMEOUT = 5.0
_ALERT = 0.3  # seconds in which a TLS alert about our certificate arrives, after our side of the handshake


def probe(address: str, expected: str, own: Credentials | None) -> str | None:
    """Why a node cannot be reached now; None if it can be. Raises `NetworkError` if waiting does not help."""
    host, port = split(address)
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT) as plain:
            if own is not None:
                _handshake(plain, address, expected, own)
    except socket.gaierror as error:
        return f"the name '{host}' cannot be resolved ({error.strerror})"
    except ConnectionRefusedError:
        return f"no process listens at {address}"
    except TimeoutError:
        return f"{address} does not answer: a firewall, or another machine"
    except OSError as error:
        return f"{address} cannot be reached: {error.strerror or error}"
    return None


def _handshake(plain: socket.socket, address: str, expected: str, own: Credentials) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the common name, below, says who it is
    context.load_verify_locations(own.authority)
    context.load_cert_chain(own.certificate, own.key)
    try:
        with context.wrap_socket(plain, server_hostname=None) as secure:
            _check_name(secure.getpeercert(binary_form=True) or b"", address, expected, own)
            secure.settimeout(_ALERT)
            secure.recv(1)
    except TimeoutError:
        return  # no alert: our certificate was accepted
    except ssl.SSLCertVerificationError as error:
        raise NetworkError(
            f"{address} must have a certificate of this federation's authority.",
            error.verify_message,
            "Use certificates of one authority on both sides, and check the clocks of both machines.",
        ) from None
    except ssl.SSLError as error:
        raise NetworkError(
            f"{address} must accept this node's certificate.",
            str(error.reason or error).lower().replace("_", " "),
            "Renew it by 'codistill certs renew', or get one of the same authority; is the other side --insecure?",
        ) from None


def _check_name(der: bytes, address: str, expected: str, own: Credentials) -> None:
    name, generation, role = describe_peer(der)
    node = HUB if role == HUB else name
    if node != expected or own.is_revoked(node, generation):
        found = "its certificate is revoked" if node == expected else f"the {role} '{name}'"
        raise NetworkError(
            f"The node at {address} must be '{expected}'.", found, "Check the address and the certificates."
        )
