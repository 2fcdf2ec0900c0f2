"""Credentials of a node that runs: new certificates without a restart, and what its operator is told."""

import base64
import random
import shutil
import ssl
import warnings

import pytest
from tests.certs.certificates import DAY, HOUR, NOW, Clock, certificate, der, refused, shake_hands

from codistill.certs import credentials
from codistill.certs.authority import Authority
from codistill.certs.credentials import Credentials
from codistill.certs.identity import load_peer
from codistill.core.errors import NetworkError


def connect(hub, agent):
    """A whole handshake; who each is for the other."""
    server, client = hub.tls_context(server=True), agent.tls_context(server=False)
    return shake_hands(server, client, None, hub.admitted_name, agent.admitted_name)


def read_both(certs, clock=None):
    clock = clock or Clock()
    return Credentials(certs / "localhost", "hub", clock=clock), Credentials(certs / "lab", "agent", clock=clock)


def test_two_nodes_know_each_other(certs):
    hub, agent = read_both(certs)
    assert connect(hub, agent) == ("hub", "lab")
    context = hub.tls_context(server=True)
    assert context is hub.tls_context(server=True), "made once for the same files"
    assert (context.minimum_version, context.verify_mode) == (ssl.TLSVersion.TLSv1_3, ssl.CERT_REQUIRED)


def test_a_certificate_is_needed_and_of_this_authority(certs, foreign):
    hub, _ = read_both(certs)
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname = False
    nobody.load_verify_locations(certs / "ca.crt")
    with pytest.raises(OSError, match="(?i)certificate required|closed|reset"):
        shake_hands(hub.tls_context(server=True), nobody, None)
    with refused("signed by a known authority"):
        hub.admitted_name(der(foreign / "lab"))


def test_the_certificates_of_many_links_are_read_once(certs, monkeypatch):
    """A hub looks at those of all its links every second: here of 1,500."""
    hub, read = read_both(certs)[0], []
    one = load_peer(der(certs / "lab"))
    monkeypatch.setattr(credentials, "load_peer", lambda given: read.append(given) or one)
    links = [number.to_bytes(2) for number in range(1500)]
    for _ in range(2):
        assert {hub.admitted_name(each) for each in links} == {"lab"}
    assert read == links


def test_a_renewed_certificate_is_taken_without_a_restart(authority):
    hub, agent = read_both(authority.folder)
    before = hub.tls_context(server=True)
    authority.renew("localhost", days=30)
    after = hub.tls_context(server=True)
    assert after is not before
    assert hub.expires == NOW + 30 * DAY
    assert connect(hub, agent) == ("hub", "lab")
    assert hub.trouble() is None


def test_the_next_generation_is_taken_without_a_restart(authority):
    hub, agent = read_both(authority.folder)
    first = der(authority.folder / "lab")
    authority.revoke("lab")
    assert agent.trouble() == (
        f"The certificate must not be revoked. Found: that of 'lab', {authority.folder}/lab/cert.pem: generation 1 is "
        "revoked, according to crl.pem. Issue a new one: codistill certs agent lab; copy its folder here."
    )
    with refused("generation 1 is revoked"):
        hub.admitted_name(first)
    authority.issue("agent", "lab")
    assert connect(hub, agent) == ("hub", "lab")
    assert agent.trouble() is None
    with refused("generation 1 is revoked"):
        hub.admitted_name(first)


def test_a_generation_that_was_never_issued(authority, certs, tmp_path):
    """The list of the hub was not copied yet, and the agent has its next certificate."""
    shutil.copytree(certs / "localhost", tmp_path / "hub")
    hub = Credentials(tmp_path / "hub", "hub", clock=Clock())
    authority.revoke("lab")
    authority.issue("agent", "lab")
    with refused("generation 2 was never issued, according to .*crl.pem"):
        hub.admitted_name(der(certs / "lab"))
    shutil.copy(certs / "crl.pem", tmp_path / "hub" / "crl.pem")
    assert hub.admitted_name(der(certs / "lab")) == "lab"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("cert.pem", b"half a cert", "cert.pem must be certificates in PEM form"),
        ("key.pem", b"half a key", "key.pem must be a private key in PEM form"),
        ("key.pem", "foreign", "key.pem must be the key of cert.pem"),
        ("ca.crt", "foreign", "cert.pem must be signed by the authority ca.crt"),
        ("ca.crt", None, "ca.crt must be readable. Found: No such file or directory"),
    ],
)
def test_new_files_that_cannot_be_used_leave_those_before_in_use(certs, foreign, name, content, words):
    hub, agent = read_both(certs)
    before, path = agent.tls_context(server=False), certs / "lab" / name
    good = path.read_bytes()
    if content is None:
        path.unlink()
    elif content == "foreign":
        path.write_bytes(((foreign if name == "ca.crt" else foreign / "lab") / name).read_bytes())
    else:
        path.write_bytes(content)
    assert agent.tls_context(server=False) is before
    assert agent.trouble().startswith("The previous certificate is still in use, as the new files are invalid: ")
    assert words in agent.trouble()
    assert connect(hub, agent) == ("hub", "lab")
    path.write_bytes(good)
    path.chmod(0o600)
    assert agent.trouble() is None


def test_a_key_that_is_copied_before_its_certificate(authority, tmp_path):
    shutil.copytree(authority.folder / "lab", tmp_path / "lab")
    agent = Credentials(tmp_path / "lab", "agent", clock=Clock())
    authority.renew("lab", days=30)
    shutil.copy(authority.folder / "lab" / "key.pem", tmp_path / "lab" / "key.pem")
    agent.tls_context(server=False)
    assert "is the key of another certificate" in agent.trouble()
    shutil.copy(authority.folder / "lab" / "cert.pem", tmp_path / "lab" / "cert.pem")
    assert (agent.trouble(), agent.expires) == (None, NOW + 30 * DAY)


def test_a_certificate_whose_time_has_not_come(authority, certs):
    """The clock of the node is behind: the new certificate is taken when it is valid, with no further change."""
    clock = Clock(NOW + DAY)
    agent = Credentials(certs / "lab", "agent", clock=clock)
    Authority(certs, now=NOW + 2 * DAY).renew("lab", days=30)
    assert "it is valid from" in agent.trouble()
    clock.now = NOW + 2 * DAY
    assert (agent.trouble(), agent.expires) == (None, NOW + 32 * DAY)


def test_the_files_of_another_node(authority):
    authority.issue("agent", "other")
    agent = Credentials(authority.folder / "lab", "agent", clock=Clock())
    for name in ("key.pem", "cert.pem"):
        shutil.copy(authority.folder / "other" / name, authority.folder / "lab" / name)
    assert "must still be that of 'lab'. Found: that of 'other'" in agent.trouble()
    assert agent.name == "lab"


@pytest.mark.parametrize(
    ("life", "after", "said"),
    [
        ({"days": 365}, 335 * DAY, None),
        ({"days": 365}, 335.5 * DAY, "expires in 29 days: renew it."),
        ({"hours": 24}, 15.9 * HOUR, None),
        ({"hours": 24}, 18.9 * HOUR, "expires in 5 h: renew it."),
        ({"hours": 24}, 23.5 * HOUR, "expires in less than an hour: renew it."),
        ({"hours": 24}, 25 * HOUR, "expired on {end}: renew it."),
    ],
)
def test_expiry_is_told_before_it_comes(authority, life, after, said):
    clock, path = Clock(), authority.folder / "lab"
    end = authority.renew("lab", **life).not_after
    agent = Credentials(path, "agent", clock=clock)
    clock.now = NOW + after
    Authority(authority.folder, now=clock.now).refresh()
    expected = said and said.format(end=f"{end:%Y-%m-%d %H:%M} UTC")
    assert agent.trouble() == (expected and f"{path / 'cert.pem'} {expected}")


def test_a_link_ends_with_its_certificate(authority):
    authority.renew("lab", hours=1)
    clock = Clock(NOW + HOUR)
    hub, lab = Credentials(authority.folder / "localhost", "hub", clock=clock), der(authority.folder / "lab")
    assert hub.admitted_name(lab) == "lab"
    clock.now += DAY / 86400
    with refused("agent 'lab' must be valid", f"it expired on {NOW + HOUR:%Y-%m-%d %H:%M} UTC"):
        hub.admitted_name(lab)


def test_hours(authority):
    issued = authority.issue("agent", "north", hours=24)
    assert (issued.not_after, issued.not_before) == (NOW + DAY, NOW)
    assert certificate(authority.folder / "north").not_valid_after_utc == NOW + DAY


def test_a_trouble_is_not_undone_by_another(authority):
    """Both sentences are told."""
    agent = Credentials(authority.folder / "lab", "agent", clock=Clock())
    (authority.folder / "lab" / "key.pem").chmod(0o644)
    (authority.folder / "lab" / "crl.pem").unlink()
    assert "mode 0644" in agent.trouble()
    assert "The revocation list" in agent.trouble()


@pytest.mark.parametrize("name", ["cert.pem", "ca.crt", "crl.pem"])
def test_malformed_files_raise_nothing_but_refusals(certs, name):
    """Random bytes inside the PEM form are changed: at a start, and while the node runs."""
    running, path, draw = Credentials(certs / "lab", "agent"), certs / "lab" / name, random.Random(2)
    first, *lines, last = path.read_bytes().splitlines()
    good, refusals = base64.b64decode(b"".join(lines)), 0
    for _ in range(60):
        bad = bytearray(good)
        for _ in range(draw.choice([1, 2, 4])):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        path.write_bytes(b"\n".join([first, base64.encodebytes(bytes(bad)).strip(), last]))
        with warnings.catch_warnings(action="ignore"):
            running.trouble()
            assert running.tls_context(server=True) is not None
            try:
                Credentials(certs / "lab", "agent")
            except NetworkError:
                refusals += 1
    assert refusals > 30
