"""Times, folders and handshakes for the tests of certificates."""

import socket
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from codistill.certs.identity import describe, load_peer
from codistill.core.errors import NetworkError

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)
HOUR = timedelta(hours=1)


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now=NOW):
        self.now = now

    def __call__(self):
        return self.now


def certificate(folder, name="cert.pem"):
    """The certificate in a folder."""
    return x509.load_pem_x509_certificate((folder / name).read_bytes())


def der(folder):
    """The certificate of a node, as TLS shows it to others."""
    return certificate(folder).public_bytes(Encoding.DER)


def describe_peer(der):
    """Name, generation and role in a peer's certificate, as TLS provides it."""
    return describe(load_peer(der))


def refused(*words, kind=NetworkError):
    """The three parts of an error together hold these words."""
    return pytest.raises(kind, match="(?s)" + "".join(f"(?=.*{word})" for word in words))


def shake_hands(server, client, name="localhost", server_reads=describe_peer, client_reads=describe_peer):
    """A byte from the server to the client after both have verified; returns what each saw of the other."""
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    theirs.settimeout(5)
    seen = []

    def serve():
        try:
            with server.wrap_socket(ours, server_side=True) as peer:
                seen.append(server_reads(peer.getpeercert(binary_form=True)))
                peer.sendall(b"!")
        except OSError as error:
            seen.append(error)
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(theirs, server_hostname=name) as peer:
            if peer.recv(1) != b"!":
                raise ConnectionResetError("closed by the server")
            return client_reads(peer.getpeercert(binary_form=True)), seen[0]
    finally:
        theirs.close()
        thread.join()
