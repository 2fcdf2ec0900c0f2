"""A look at the other end before anything is said: Zenoh only tries again, and does not say what is wrong."""

from __future__ import annotations

import socket
import ssl

from codistill.certs.credentials import Credentials, describe_peer
from codistill.errors import NetworkError
from codistill.runtimes.network.addresses import split
from codistill.topology import HUB

_TIMEOUT = 5.0
_ALERT = 0.3  # seconds in which a refusal of our certificate arrives, after our side of the handshake is done


def look(address: str, expected: str, own: Credentials | None) -> str | None:
    """Why nobody can be reached at an address for now; None if somebody can. An error if waiting does not help."""
    host, port = split(address)
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT) as plain:
            if own is not None:
                _shake_hands(plain, address, expected, own)
    except socket.gaierror as error:
        return f"the name '{host}' cannot be resolved ({error.strerror})"
    except ConnectionRefusedError:
        return f"nobody listens at {address}"
    except TimeoutError:
        return f"{address} does not answer: a firewall, or another machine"
    except OSError as error:
        return f"{address} cannot be reached: {error.strerror or error}"
    return None


def _shake_hands(plain: socket.socket, address: str, expected: str, own: Credentials) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # who it is stands in the common name, below
    context.load_verify_locations(own.authority)
    context.load_cert_chain(own.certificate, own.key)
    try:
        with context.wrap_socket(plain, server_hostname=None) as secure:
            _check_name(secure.getpeercert(binary_form=True) or b"", address, expected, own)
            secure.settimeout(_ALERT)
            secure.recv(1)
    except TimeoutError:
        return  # no alert: our certificate was taken
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
            "Renew it by 'codistill certs renew', or get one from the right authority. Is it --insecure over there?",
        ) from None


def _check_name(der: bytes, address: str, expected: str, own: Credentials) -> None:
    name, generation, role = describe_peer(der)
    said = HUB if role == HUB else name
    if said != expected or own.is_revoked(said, generation):
        found = "its certificate is revoked" if said == expected else f"the {role} '{name}'"
        raise NetworkError(
            f"At {address} there must be '{expected}'.", found, "Check the address and the certificates."
        )
