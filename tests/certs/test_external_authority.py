"""Certificates of an authority that is not codistill's: OpenSSL with a root and an intermediate authority.

The authorities have RSA keys and choose serial numbers themselves. Sites send what `codistill certs request` makes.
"""

import shutil
import subprocess
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID
from tests.certs.certificates import DAY, NOW, der, describe_peer, refused, shake_hands

from codistill.certs.credentials import Credentials, install
from codistill.certs.identity import node_uri
from codistill.certs.signing import make_request
from codistill.core.errors import NetworkError

SETTINGS = """
[ca]
default_ca = here
[here]
database = {folder}/index.txt
serial = {folder}/serial
crlnumber = {folder}/crlnumber
new_certs_dir = {folder}
certificate = {folder}/ca.crt
private_key = {folder}/ca.key
default_md = sha256
default_days = 30
default_crl_days = 7
policy = any
copy_extensions = copy
crl_extensions = list
[any]
commonName = supplied
organizationName = optional
organizationalUnitName = optional
[list]
authorityKeyIdentifier = keyid
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[node]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
[req]
distinguished_name = any_name
[any_name]
"""


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class External:
    """An authority of OpenSSL in a folder."""

    def __init__(self, folder, name, above=None):
        self.folder = folder
        folder.mkdir()
        (folder / "settings").write_text(SETTINGS.format(folder=folder))
        (folder / "index.txt").touch()
        (folder / "serial").write_text("4D2A10")
        (folder / "crlnumber").write_text("05")
        settings = ["-config", folder / "settings"]
        new = ["req", "-new", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", folder / "ca.key"]
        if above is None:
            openssl(*new, *settings, "-x509", "-days", 90, "-extensions", "authority", "-out", folder / "ca.crt")
        else:
            openssl(*new, *settings, "-out", folder / "request.pem")
            above.sign(folder / "request.pem", folder / "ca.crt", "authority")

    def _do(self, *arguments):
        openssl("ca", "-config", self.folder / "settings", "-batch", *arguments)

    def sign(self, request, certificate, kind="node"):
        self._do("-in", request, "-out", certificate, "-extensions", kind, "-notext")

    def revoke(self, certificate):
        self._do("-revoke", certificate)

    def write_list(self, path):
        self._do("-gencrl", "-out", path)
        return path.read_bytes()


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """A root, an authority under it, and the folders of a hub and of the agent 'Ward 3'."""
    folder = tmp_path_factory.mktemp("external")
    root = External(folder / "root", "Company Root")
    middle = External(folder / "middle", "Federation Issuing", root)
    answer = folder / "answer"
    answer.mkdir()
    shutil.copy(root.folder / "ca.crt", answer / "ca.crt")
    (answer / "crl.pem").write_bytes(middle.write_list(folder / "m.crl") + root.write_list(folder / "r.crl"))
    for site, name, role in (("hub", "hub.example", "hub"), ("ward", "Ward 3", "agent")):
        make_request(folder / site, name, role)
        middle.sign(folder / site / "request.pem", folder / "leaf.pem")
        chain = (folder / "leaf.pem").read_bytes() + (middle.folder / "ca.crt").read_bytes()
        (answer / "cert.pem").write_bytes(chain)
        install([answer], folder / site)
    return folder


@pytest.fixture
def sites(pki, tmp_path):
    shutil.copytree(pki, tmp_path / "pki")
    for name in ("root", "middle"):
        path = tmp_path / "pki" / name / "settings"
        path.write_text(SETTINGS.format(folder=path.parent))
    return tmp_path / "pki"


def existing(folder):
    found = External.__new__(External)
    found.folder = folder
    return found


def first(path):
    """The node's own certificate, without those of the authorities."""
    data = path.read_bytes()
    (path.parent / "leaf.pem").write_bytes(x509.load_pem_x509_certificate(data).public_bytes(Encoding.PEM))
    return path.parent / "leaf.pem"


def test_two_nodes_of_an_external_authority_connect(sites):
    hub, ward = Credentials(sites / "hub", "hub"), Credentials(sites / "ward", "agent")
    assert (hub.name, ward.name) == ("hub", "Ward 3")
    assert (hub.trouble(), ward.trouble()) == (None, None)
    contexts = hub.tls_context(server=True), ward.tls_context(server=False)
    assert shake_hands(*contexts, None, hub.admitted_name, ward.admitted_name) == ("hub", "Ward 3")
    contexts = ward.tls_context(server=True), hub.tls_context(server=False)
    assert shake_hands(*contexts, None, ward.admitted_name, hub.admitted_name) == ("Ward 3", "hub")


def test_a_serial_number_on_the_list_of_its_issuer_is_refused(sites):
    hub = Credentials(sites / "hub", "hub")
    assert hub.admitted_name(der(sites / "ward")) == "Ward 3"
    middle = existing(sites / "middle")
    middle.revoke(first(sites / "ward" / "cert.pem"))
    middle.write_list(sites / "hub" / "crl.pem")
    with refused("agent 'Ward 3' must be valid", "it is revoked"):
        hub.admitted_name(der(sites / "ward"))
    assert hub.admitted_name(der(sites / "hub")) == "hub"
    shutil.copy(sites / "hub" / "crl.pem", sites / "ward" / "crl.pem")
    with refused("must not be revoked", "that of 'Ward 3'"):
        Credentials(sites / "ward", "agent")


def test_a_revoked_intermediate_authority(sites):
    hub, root = Credentials(sites / "hub", "hub"), existing(sites / "root")
    root.revoke(sites / "middle" / "ca.crt")
    both = existing(sites / "middle").write_list(sites / "m.crl") + root.write_list(sites / "r.crl")
    (sites / "hub" / "crl.pem").write_bytes(both)
    with refused("the certificate of its authority is revoked"):
        hub.admitted_name(der(sites / "ward"))


def test_every_issuer_needs_a_list(sites, tmp_path):
    """A node that the root has signed directly is known here, but its revocation cannot be."""
    hub, root = Credentials(sites / "hub", "hub"), existing(sites / "root")
    make_request(tmp_path / "direct", "direct", "agent")
    root.sign(tmp_path / "direct" / "request.pem", tmp_path / "direct" / "cert.pem")
    assert hub.admitted_name(der(tmp_path / "direct")) == "direct"
    existing(sites / "middle").write_list(sites / "hub" / "crl.pem")
    with refused("no revocation list of its authority in .*crl.pem"):
        hub.admitted_name(der(tmp_path / "direct"))
    assert hub.admitted_name(der(sites / "ward")) == "Ward 3"
    root.write_list(sites / "hub" / "crl.pem")
    assert "none of CN=Federation Issuing" in hub.trouble()


def test_another_authority_under_the_same_root_is_not_known(sites, tmp_path):
    other = External(tmp_path / "other", "Web Servers", existing(sites / "root"))
    make_request(tmp_path / "site", "Ward 3", "agent")
    other.sign(tmp_path / "site" / "request.pem", tmp_path / "site" / "cert.pem")
    hub = Credentials(sites / "hub", "hub")
    with refused("signed by a known authority", "CN=Web Servers", "intermediate"):
        hub.admitted_name(der(tmp_path / "site"))


def test_an_incomplete_chain(sites):
    path = sites / "ward" / "cert.pem"
    path.write_bytes(first(path).read_bytes())
    with refused("must be signed by the authority", "another authority"):
        Credentials(sites / "ward", "agent")


def test_the_intermediate_authority_may_be_trusted_alone(sites):
    for site in ("hub", "ward"):
        shutil.copy(sites / "middle" / "ca.crt", sites / site / "ca.crt")
        existing(sites / "middle").write_list(sites / site / "crl.pem")
    hub, ward = Credentials(sites / "hub", "hub"), Credentials(sites / "ward", "agent")
    contexts = hub.tls_context(server=True), ward.tls_context(server=False)
    assert shake_hands(*contexts, None, hub.admitted_name, ward.admitted_name) == ("hub", "Ward 3")


def test_a_list_of_a_part_only_or_without_a_number(sites):
    middle = x509.load_pem_x509_certificate((sites / "middle" / "ca.crt").read_bytes())
    key = load_pem_private_key((sites / "middle" / "ca.key").read_bytes(), None)
    now = datetime.now(UTC).replace(microsecond=0)
    builder = (
        x509.CertificateRevocationListBuilder().issuer_name(middle.subject).last_update(now).next_update(now + DAY)
    )
    partial = builder.add_extension(x509.DeltaCRLIndicator(1), critical=True).sign(key, hashes.SHA256())
    (sites / "hub" / "crl.pem").write_bytes(partial.public_bytes(Encoding.PEM))
    with refused("must be a complete list", "a partial list"):
        Credentials(sites / "hub", "hub")
    plain = builder.sign(key, hashes.SHA256())
    (sites / "hub" / "crl.pem").write_bytes(plain.public_bytes(Encoding.PEM))
    assert Credentials(sites / "hub", "hub").admitted_name(der(sites / "ward")) == "Ward 3", "a list without a number"


# --- names ----------------------------------------------------------------------------------------------


def with_uris(*uris, common="anything"):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    builder = x509.CertificateBuilder().issuer_name(name).subject_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(NOW).not_valid_after(NOW + DAY)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
    return builder.add_extension(names, critical=False).sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("codistill:hub", ("hub", 0, "hub")),
        ("codistill:agent:north", ("north", 0, "agent")),
        ("codistill:agent:Ward%203", ("Ward 3", 0, "agent")),
        ("codistill:agent:Gr%C3%B6%C3%9Fe%2B", ("Größe+", 0, "agent")),
    ],
)
def test_a_name_as_a_uri(uri, expected):
    assert describe_peer(with_uris("https://elsewhere.example/x", uri, common="hub~1")) == expected
    assert node_uri(expected[2], expected[0]) == uri


@pytest.mark.parametrize(
    "uris",
    [
        ["codistill:agent:"],
        ["codistill:agent:hub"],
        ["codistill:agent:HUB"],
        ["codistill:agent:a%2Fb"],
        ["codistill:agent:%6Eorth"],
        ["codistill:agent:Ward%203:x"],
        ["codistill:agent:a%FF"],
        ["codistill:hub:north"],
        ["codistill:king"],
        ["codistill:"],
        ["codistill:hub", "codistill:agent:north"],
    ],
)
def test_a_uri_that_is_refused(uris):
    with pytest.raises(NetworkError, match="must have one name of the form 'codistill:hub' or 'codistill:agent:NAME'"):
        describe_peer(with_uris(*uris))
