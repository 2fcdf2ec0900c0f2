"""Certificate signing requests: the key stays at the site, and the authority decides what it signs."""

import hashlib
import shutil
import subprocess

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from tests.certs.certificates import DAY, NOW, Clock, certificate, der, refused, shake_hands

from codistill.certs import credentials
from codistill.certs.authority import Authority
from codistill.certs.credentials import Credentials, install
from codistill.certs.signing import make_renewal, make_request, read_signing_request
from codistill.core.errors import RecipeError


@pytest.fixture
def site(tmp_path):
    return tmp_path / "site"


def answer(authority, site, to, **options):
    """Sign a site's request, and bring the folder back; the certificate that was issued."""
    issued = authority.sign(read_signing_request(site / "request.pem"), **options)
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(authority.folder / issued.name, to)
    return issued


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_from_a_request_to_a_connection(authority, site, tmp_path):
    made = make_request(site, "Ward 3", "agent")
    assert files(site) == ["key.pem", "request.pem"]
    assert [(site / name).stat().st_mode & 0o777 for name in (".", "key.pem")] == [0o700, 0o600]
    asked = read_signing_request(site / "request.pem")
    assert (asked.name, asked.role, asked.fingerprint) == ("Ward 3", "agent", made.fingerprint)
    request = x509.load_pem_x509_csr((site / "request.pem").read_bytes())
    digits = hashlib.sha256(request.public_bytes(Encoding.DER)).hexdigest()
    assert made.fingerprint.replace(" ", "") == digits
    with refused("lacks ca.crt, cert.pem, crl.pem", "Send .*request.pem to the authority", "certs install"):
        Credentials(site, "agent")

    key = (site / "key.pem").read_bytes()
    issued = answer(authority, site, tmp_path / "answer", days=30)
    assert (issued.name, issued.role, issued.generation, issued.by_request) == ("Ward 3", "agent", 1, True)
    assert files(tmp_path / "answer") == ["ca.crt", "cert.pem", "crl.pem"]
    with refused("lacks key.pem", "certs install"):
        Credentials(tmp_path / "answer", "agent")

    own = install([tmp_path / "answer"], site, clock=Clock())
    assert (own.name, own.expires) == ("Ward 3", NOW + 30 * DAY)
    assert files(site) == ["ca.crt", "cert.pem", "crl.pem", "key.pem"]
    assert (site / "key.pem").read_bytes() == key
    hub = Credentials(authority.folder / "localhost", "hub")
    contexts = hub.tls_context(server=True), own.tls_context(server=False)
    assert shake_hands(*contexts, None, hub.admitted_name, own.admitted_name) == ("hub", "Ward 3")


def test_a_request_again_changes_nothing(site):
    made = make_request(site, "north", "agent")
    before = {name: (site / name).read_bytes() for name in files(site)}
    assert make_request(site, "north", "agent") == made
    assert {name: (site / name).read_bytes() for name in files(site)} == before
    other = make_request(site, "south", "agent")
    assert (other.name, other.key) == ("south", made.key), "a name that was misspelt; the key is kept"


def test_a_renewal_has_the_next_key_and_the_same_generation(authority, site, tmp_path):
    make_request(site, "north", "agent")
    answer(authority, site, tmp_path / "answer")
    running = install([tmp_path / "answer"], site, clock=Clock())
    first, key = der(site), (site / "key.pem").read_bytes()
    with refused("without a certificate", "--renew"):
        make_request(site, "north", "agent")
    with refused("keeps the name", "'south'", kind=RecipeError):
        make_renewal(site, "south")

    asked = make_renewal(site)
    assert (asked.name, asked.role) == ("north", "agent")
    assert (site / "key.pem").read_bytes() == key, "until the new certificate is here"
    assert running.trouble() is None
    with refused("'north' has one", "certs sign REQUEST --renew"):
        answer(authority, site, tmp_path / "answer")
    with refused("key of 'north' is at its site", "certs request --renew"):
        authority.renew("north")
    issued = answer(authority, site, tmp_path / "answer", renew=True, hours=24)
    assert (issued.generation, issued.not_after) == (1, NOW + DAY)

    install([tmp_path / "answer"], site, clock=Clock())
    assert files(site) == ["ca.crt", "cert.pem", "crl.pem", "key.pem"]
    assert (site / "key.pem").read_bytes() != key
    assert (running.trouble(), running.expires) == (None, NOW + DAY), "without a restart"
    hub = Credentials(authority.folder / "localhost", "hub", clock=Clock())
    assert [hub.admitted_name(found) for found in (first, der(site))] == ["north", "north"]


def test_an_installation_that_was_killed_is_repeated(authority, site, tmp_path, monkeypatch):
    make_request(site, "north", "agent")
    answer(authority, site, tmp_path / "answer")
    install([tmp_path / "answer"], site, clock=Clock())
    make_renewal(site)
    answer(authority, site, tmp_path / "answer", renew=True)
    new, real = certificate(tmp_path / "answer").serial_number, credentials.put
    for step in range(5):
        shutil.copytree(site, tmp_path / f"site-{step}")
        count = iter(range(100))

        def put(path, data, mode=0o644, count=count, step=step):
            if next(count) == step:
                raise KeyboardInterrupt
            real(path, data, mode)

        monkeypatch.setattr(credentials, "put", put)
        with pytest.raises(KeyboardInterrupt):
            install([tmp_path / "answer"], tmp_path / f"site-{step}", clock=Clock())
        monkeypatch.undo()
        install([tmp_path / "answer"], tmp_path / f"site-{step}", clock=Clock())
        assert certificate(tmp_path / f"site-{step}").serial_number == new
        assert files(tmp_path / f"site-{step}") == ["ca.crt", "cert.pem", "crl.pem", "key.pem"]


def test_a_revoked_site_gets_its_next_generation_by_a_request(authority, site, tmp_path):
    make_request(site, "north", "agent")
    answer(authority, site, tmp_path / "answer")
    install([tmp_path / "answer"], site, clock=Clock())
    authority.revoke("north")
    make_renewal(site)
    with refused("revoked certificate cannot", "sign REQUEST, without --renew"):
        answer(authority, site, tmp_path / "answer", renew=True)
    assert answer(authority, site, tmp_path / "answer").generation == 2
    assert install([tmp_path / "answer"], site, clock=Clock()).name == "north"


def test_a_hub_makes_its_own_key_too(authority, site, tmp_path):
    make_request(site, "hub.example", "hub")
    with refused("must be for the role 'agent'", "role 'hub'", "--role hub"):
        answer(authority, site, tmp_path / "answer")
    issued = answer(authority, site, tmp_path / "answer", role="hub", addresses=["10.0.0.1"])
    assert issued.addresses == ("hub.example", "10.0.0.1")
    assert install([tmp_path / "answer"], site, clock=Clock()).role == "hub"
    assert make_renewal(site).name == "hub.example"
    assert answer(authority, site, tmp_path / "answer", role="hub", renew=True).addresses == issued.addresses


def test_a_key_of_the_authority_does_not_stay_beside_a_certificate_by_request(authority, site, tmp_path):
    make_request(site, "lab", "agent")
    answer(authority, site, tmp_path / "answer", renew=True)
    assert files(authority.folder / "lab") == ["ca.crt", "cert.pem", "crl.pem"]


# --- what the authority refuses -------------------------------------------------------------------------


def request(path, key, *attributes, algorithm=None, extensions=()):
    """A request that asks for what it likes."""
    name = x509.Name([x509.NameAttribute(oid, value) for oid, value in attributes])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    path.write_bytes(builder.sign(key, algorithm or hashes.SHA256()).public_bytes(Encoding.PEM))
    return path


COMMON, UNIT = NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME
CURVE = ec.generate_private_key(ec.SECP256R1())


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ([(COMMON, "../up"), (UNIT, "agent")], "agent's name"),
        ([(COMMON, "hub"), (UNIT, "agent")], "agent's name"),
        ([(COMMON, "x" * 64), (UNIT, "agent")], "64 bytes"),
        ([(COMMON, "a b"), (UNIT, "hub")], "host name"),
        ([(COMMON, "lab2"), (UNIT, "king")], "one name and one role"),
        ([(COMMON, "lab2")], "one name and one role"),
        ([(COMMON, "lab2"), (COMMON, "lab3"), (UNIT, "agent")], "one name and one role"),
        ([(COMMON, "LAB"), (UNIT, "agent")], "more than case"),
        ([(COMMON, "lab"), (UNIT, "agent")], "'lab' has one"),
        ([(COMMON, "ca.key"), (UNIT, "agent")], "file name of the authority"),
    ],
)
def test_a_name_that_is_refused(authority, tmp_path, attributes, words):
    before = (authority.folder / "ledger.json").read_bytes()
    path = request(tmp_path / "request.pem", CURVE, *attributes)
    with refused(words):
        authority.sign(read_signing_request(path))
    assert (authority.folder / "ledger.json").read_bytes() == before


def test_a_key_that_is_refused(tmp_path):
    subject = ((COMMON, "north"), (UNIT, "agent"))
    for key, kind in (
        (rsa.generate_private_key(65537, 2048), "RSAPublicKey"),
        (ec.generate_private_key(ec.SECP224R1()), "secp224r1"),
    ):
        with refused("P-256, P-384 or P-521", kind, "certs request"):
            read_signing_request(request(tmp_path / "request.pem", key, *subject))
    good = request(tmp_path / "request.pem", ec.generate_private_key(ec.SECP384R1()), *subject)
    assert read_signing_request(good).name == "north"


def test_a_request_that_another_key_has_signed(tmp_path):
    """The name is changed on the way: the signature no longer fits."""
    path = request(tmp_path / "request.pem", CURVE, (COMMON, "north"), (UNIT, "agent"))
    forged = x509.load_pem_x509_csr(path.read_bytes()).public_bytes(Encoding.DER).replace(b"north", b"south")
    path.write_bytes(x509.load_der_x509_csr(forged).public_bytes(Encoding.PEM))
    with refused("signed by its own key", "an invalid signature"):
        read_signing_request(path)
    path.write_bytes(b"nothing of the kind")
    with refused("must be a certificate signing request in PEM form"):
        read_signing_request(path)


def test_what_a_request_asks_beyond_its_name_is_ignored(authority, tmp_path):
    asked = [
        x509.BasicConstraints(ca=True, path_length=None),
        x509.SubjectAlternativeName([x509.DNSName("hub.example"), x509.UniformResourceIdentifier("codistill:hub")]),
    ]
    path = request(tmp_path / "request.pem", CURVE, (COMMON, "north"), (UNIT, "agent"), extensions=asked)
    authority.sign(read_signing_request(path))
    found = certificate(authority.folder / "north").extensions
    assert not found.get_extension_for_class(x509.BasicConstraints).value.ca
    names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == ["north"]
    hub = Credentials(authority.folder / "localhost", "hub")
    assert hub.admitted_name(der(authority.folder / "north")) == "north"


def test_openssl_reads_a_request(site):
    make_request(site, "north", "agent")
    command = ["openssl", "req", "-in", site / "request.pem", "-verify", "-noout", "-text"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "URI:codistill:agent:north" in shown.stdout
    assert "TLS Web Server Authentication, TLS Web Client Authentication" in shown.stdout


# --- what a site refuses --------------------------------------------------------------------------------


def test_what_cannot_be_installed(authority, foreign, site, tmp_path):
    with refused("no folder", "certs request NAME"):
        install([authority.folder / "lab"], site)
    make_request(site, "north", "agent")
    answer(authority, site, tmp_path / "answer")
    with refused("complete after the installation", "ca.crt"):
        install([tmp_path / "answer" / "cert.pem"], site, clock=Clock())
    with refused("Only crl.pem, ca.crt, cert.pem", "thesis.tex"):
        install([tmp_path / "thesis.tex"], site)
    with refused("none of them"):
        install([tmp_path], site)
    with refused("the certificate is for another key", "certs request"):
        install([authority.folder / "lab"], site)
    shutil.copy(foreign / "ca.crt", tmp_path / "answer" / "ca.crt")
    with refused(f"{site}/cert.pem must be signed by the authority", "another authority"):
        install([tmp_path / "answer"], site, clock=Clock())
    assert files(site) == ["key.pem", "request.pem"], "nothing was changed"


def test_another_authority_is_not_installed_over_the_one_before(authority, foreign, site, tmp_path):
    make_request(site, "north", "agent")
    answer(authority, site, tmp_path / "answer")
    install([tmp_path / "answer"], site, clock=Clock())
    before = (site / "ca.crt").read_bytes()
    with refused("another ca.crt", "compare its fingerprint"):
        install([foreign / "ca.crt"], site)
    assert (site / "ca.crt").read_bytes() == before


def test_a_list_alone_can_be_installed(authority, site, tmp_path):
    make_request(site, "north", "agent")
    answer(authority, site, tmp_path / "answer")
    own = install([tmp_path / "answer"], site, clock=Clock())
    authority.revoke("lab")
    install([authority.folder / "crl.pem"], site, clock=Clock())
    with refused("generation 1 is revoked"):
        own.admitted_name(der(authority.folder / "lab"))
    later = Authority(authority.folder, now=NOW + 9 * DAY)
    with refused("outdated since"):
        install([authority.folder / "crl.pem"], site, clock=Clock(later.now))
