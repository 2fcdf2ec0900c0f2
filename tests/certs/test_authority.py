"""The authority and what it issues: chains, handshakes, revocation, kills half-way, and every sentence of refusal."""

import fcntl
import hashlib
import importlib
import ipaddress
import json
import os
import random
import shutil
import ssl
import sys
import threading
import warnings
from collections import Counter
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from tests.certs.certificates import DAY, NOW, certificate, der, describe_peer, refused, shake_hands

from codistill.certs import authority as authority_files
from codistill.certs import authority as authority_module
from codistill.certs import files
from codistill.certs.authority import Authority
from codistill.certs.credentials import Credentials
from codistill.certs.identity import left_text
from codistill.core.errors import NetworkError, RecipeError, StorageError


def common_name(folder):
    """Of an agent whose folder is accepted."""
    Credentials(folder, "agent")
    name, generation, _ = describe_peer(certificate(folder).public_bytes(Encoding.DER))
    return f"{name}~{generation}"


def extension(found, kind):
    return found.extensions.get_extension_for_class(kind).value


def revoked_serials(folder):
    return {entry.serial_number for entry in x509.load_pem_x509_crl((folder / "crl.pem").read_bytes())}


def mark(identity):
    """By the definition: 8 bytes of SHA-256(identity), top bit cleared."""
    first = bytearray(hashlib.sha256(identity.encode()).digest()[:8])
    first[0] &= 0x7F
    return bytes(first)


# --- what is issued -------------------------------------------------------------------------------------


def test_the_chain_holds_for_servers_and_clients(made, foreign):
    policy = PolicyBuilder().store(Store([certificate(made, "ca.crt")])).time(NOW + DAY)
    for name in (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))):
        policy.build_server_verifier(name).verify(certificate(made / "localhost"), [])
    policy.build_server_verifier(x509.DNSName("lab")).verify(certificate(made / "lab"), [])
    for node in ("localhost", "lab"):
        policy.build_client_verifier().verify(certificate(made / node), [])
    with pytest.raises(VerificationError):
        policy.build_server_verifier(x509.DNSName("elsewhere")).verify(certificate(made / "localhost"), [])
    with pytest.raises(VerificationError):
        policy.build_client_verifier().verify(certificate(foreign / "lab"), [])


def test_what_a_certificate_says(made):
    for node, common, role in (("localhost", "hub~1", "hub"), ("lab", "lab~1", "agent")):
        found = certificate(made / node)
        subject = {attribute.oid: attribute.value for attribute in found.subject}
        assert subject == {
            NameOID.COMMON_NAME: common,
            NameOID.ORGANIZATION_NAME: "codistill",
            NameOID.ORGANIZATIONAL_UNIT_NAME: role,
        }
        assert found.version is x509.Version.v3
        assert found.not_valid_before_utc == NOW - timedelta(minutes=5)
        assert found.not_valid_after_utc == NOW + 365 * DAY
        assert not extension(found, x509.BasicConstraints).ca
        usage = extension(found, x509.KeyUsage)
        assert usage.digital_signature
        assert not usage.key_cert_sign
        assert set(extension(found, x509.ExtendedKeyUsage)) == {
            ExtendedKeyUsageOID.SERVER_AUTH,
            ExtendedKeyUsageOID.CLIENT_AUTH,
        }
        own = extension(certificate(made, "ca.crt"), x509.SubjectKeyIdentifier)
        assert extension(found, x509.AuthorityKeyIdentifier).key_identifier == own.digest
        assert extension(found, x509.SubjectKeyIdentifier).digest != own.digest
        der = found.public_bytes(Encoding.DER)
        assert describe_peer(der) == (common.removesuffix("~1"), 1, role)


def test_the_authority_signs_nodes_only(made):
    root = certificate(made, "ca.crt")
    assert extension(root, x509.BasicConstraints) == x509.BasicConstraints(ca=True, path_length=0)
    assert root.not_valid_after_utc == NOW + 3650 * DAY
    key = load_pem_private_key((made / "ca.key").read_bytes(), None)
    assert isinstance(key.curve, ec.SECP256R1)
    found = x509.load_pem_x509_crl((made / "crl.pem").read_bytes())
    assert found.is_signature_valid(key.public_key())
    assert (len(found), found.next_update_utc) == (0, NOW + 7 * DAY)


@pytest.mark.parametrize(
    ("name", "addresses", "expected"),
    [
        ("clinic-2", (), ["clinic-2"]),
        ("clinic", ("10.0.0.7", "c.example", "clinic"), ["10.0.0.7", "c.example", "clinic"]),
        ("Ward 3", ("ward.example",), ["ward.example"]),
        ("Ward 3", (), [hashlib.sha256(b"agent:Ward 3").hexdigest()[:12] + ".agent.codistill"]),
        ("7", (), [hashlib.sha256(b"agent:7").hexdigest()[:12] + ".agent.codistill"]),
        ("Größe+", (), [hashlib.sha256("agent:Größe+".encode()).hexdigest()[:12] + ".agent.codistill"]),
    ],
)
def test_the_names_an_agent_is_reached_by(authority, name, addresses, expected):
    authority.issue("agent", name, addresses=addresses)
    names = extension(certificate(authority.folder / name), x509.SubjectAlternativeName)
    assert [str(found.value) for found in names] == expected
    verifier = PolicyBuilder().store(Store([certificate(authority.folder, "ca.crt")])).time(NOW).build_client_verifier()
    verifier.verify(certificate(authority.folder / name), [])


def test_the_hub_is_reached_by_its_name_and_addresses(made):
    names = extension(certificate(made / "localhost"), x509.SubjectAlternativeName)
    assert [str(found.value) for found in names] == ["localhost", "127.0.0.1", "::1"]


def test_a_serial_number_tells_identity_and_generation(authority):
    authority.revoke("lab")
    authority.issue("agent", "lab")
    authority.renew("lab")
    serials = [issued.serial.to_bytes(18, "big") for issued in authority.issued()]
    prefixes = [mark("hub") + b"\0\1", mark("agent:lab") + b"\0\1", *[mark("agent:lab") + b"\0\2"] * 2]
    assert [serial[:10] for serial in serials] == prefixes
    assert len({serial[10:] for serial in serials}) == 4
    assert certificate(authority.folder / "lab").serial_number == authority.issued()[-1].serial


def test_keys_are_their_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        authority = Authority(tmp_path / "certs")
        authority.create()
        (tmp_path / "certs" / "ledger.json.part").touch(mode=0o666)  # left by a kill
        authority.issue("agent", "lab")
        (tmp_path / "certs" / "lab" / "key.pem.part").touch(mode=0o666)
        authority.renew("lab")
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {
        "certs": 0o700,
        "certs/ca.key": 0o600,
        "certs/.lock": 0o600,
        "certs/lab": 0o700,
        "certs/lab/key.pem": 0o600,
        **dict.fromkeys(["certs/ca.crt", "certs/crl.pem", "certs/ledger.json"], 0o644),
        **dict.fromkeys(["certs/lab/ca.crt", "certs/lab/cert.pem", "certs/lab/crl.pem"], 0o644),
    }


def test_a_key_is_never_readable_by_others_not_even_while_it_is_written(authority, monkeypatch):
    opened = {}
    real = os.open

    def watched(path, flags, mode=0o777, **more):
        opened[os.path.basename(path)] = mode
        return real(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", watched)
    authority.renew("lab")
    assert opened["key.pem.part"] == 0o600


def test_a_certificate_ends_with_its_authority(authority):
    late = Authority(authority.folder, now=NOW + 3640 * DAY)
    assert late.renew("lab", days=365).not_after == NOW + 3650 * DAY
    assert certificate(authority.folder / "lab").not_valid_after_utc == NOW + 3650 * DAY
    over = Authority(authority.folder, now=NOW + 3650 * DAY)
    with refused("certificate of the authority must be valid", "certs init"):
        over.renew("lab")


# --- real handshakes ------------------------------------------------------------------------------------


def context(folder, side, authority=None):
    made = ssl.SSLContext(side)
    made.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    made.load_verify_locations((authority or folder) / "ca.crt")
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    return made


def test_hub_and_agents_shake_hands(made):
    hub = context(made / "localhost", ssl.PROTOCOL_TLS_SERVER)
    agent = context(made / "lab", ssl.PROTOCOL_TLS_CLIENT)
    assert shake_hands(hub, agent) == (("hub", 1, "hub"), ("lab", 1, "agent"))
    assert shake_hands(hub, agent, "127.0.0.1")[0] == ("hub", 1, "hub")
    listening = context(made / "lab", ssl.PROTOCOL_TLS_SERVER)
    dialling = context(made / "localhost", ssl.PROTOCOL_TLS_CLIENT)
    assert shake_hands(listening, dialling, "lab") == (("lab", 1, "agent"), ("hub", 1, "hub"))


def test_a_handshake_refuses_whom_another_authority_has_signed(made, foreign):
    hub = context(made / "localhost", ssl.PROTOCOL_TLS_SERVER)
    with pytest.raises(OSError):  # noqa: PT011 - an alert or a closed connection, as the hub was faster or slower
        shake_hands(hub, context(foreign / "lab", ssl.PROTOCOL_TLS_CLIENT, authority=made))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(hub, context(foreign / "lab", ssl.PROTOCOL_TLS_CLIENT))


def test_a_handshake_refuses_what_has_expired(certs, tmp_path):
    past = Authority(tmp_path / "past", now=NOW - 100 * DAY)
    past.create()
    past.issue("hub", "localhost", days=99)
    past.issue("agent", "lab", days=101)
    hub = context(tmp_path / "past" / "localhost", ssl.PROTOCOL_TLS_SERVER)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(hub, context(tmp_path / "past" / "lab", ssl.PROTOCOL_TLS_CLIENT))


# --- generations ----------------------------------------------------------------------------------------


def test_after_a_revocation_only_the_next_generation_speaks(authority):
    hub = Credentials(authority.folder / "localhost", "hub")
    assert (
        hub.accepted_common_name("lab"),
        hub.accepted_common_name("hub"),
        hub.accepted_common_name("nobody yet"),
    ) == ("lab~1", "hub~1", "nobody yet~1")
    authority.renew("lab")
    assert common_name(authority.folder / "lab") == "lab~1"
    revoked = authority.revoke("lab")
    assert len(revoked) == 2, "the one before the renewal, too"
    assert revoked_serials(authority.folder) == {issued.serial for issued in revoked}
    assert hub.accepted_common_name("lab") == "lab~2", "the list was read again"
    assert hub.accepted_common_name("hub") == "hub~1"
    assert authority.issue("agent", "lab").generation == 2
    assert common_name(authority.folder / "lab") == "lab~2"
    authority.revoke("lab")
    assert hub.accepted_common_name("lab") == "lab~3"
    assert authority.issue("agent", "lab").generation == 3


def test_every_folder_of_the_authority_gets_the_list(authority):
    authority.revoke("lab")
    lists = {(authority.folder / node / "crl.pem").read_bytes() for node in (".", "lab", "localhost")}
    assert len(lists) == 1
    assert len(revoked_serials(authority.folder)) == 1


def test_all_hubs_of_a_generation_are_revoked_together(authority):
    authority.issue("hub", "10.1.2.3")
    assert certificate(authority.folder / "10.1.2.3").serial_number >> 64 == (
        int.from_bytes(mark("hub") + b"\0\1", "big")
    )
    assert {issued.name for issued in authority.revoke("localhost")} == {"localhost", "10.1.2.3"}
    assert authority.revoke("10.1.2.3") == []
    assert authority.issue("hub", "10.1.2.3").generation == 2
    assert authority.issue("hub", "localhost").generation == 2


def test_an_agent_called_like_an_identity_is_not_the_hub(authority):
    authority.issue("agent", "hub2")
    authority.revoke("hub2")
    assert Credentials(authority.folder / "localhost", "hub").accepted_common_name("hub") == "hub~1"


def test_renewing_keeps_role_generation_and_addresses(authority):
    before = certificate(authority.folder / "localhost")
    renewed = authority.renew("localhost", days=30)
    after = certificate(authority.folder / "localhost")
    assert after.subject == before.subject
    assert extension(after, x509.SubjectAlternativeName) == extension(before, x509.SubjectAlternativeName)
    assert after.public_key() != before.public_key()
    assert after.serial_number == renewed.serial != before.serial_number
    assert after.not_valid_after_utc == NOW + 30 * DAY
    assert Credentials(authority.folder / "localhost", "hub").expires == NOW + 30 * DAY


def test_what_is_on_the_list_stays_there_though_the_ledger_forgets(authority):
    old = (authority.folder / "ledger.json").read_bytes()
    serials = {issued.serial for issued in authority.revoke("lab")}
    (authority.folder / "ledger.json").write_bytes(old)
    authority.revoke("localhost")
    assert revoked_serials(authority.folder) > serials
    authority.revoke("lab")
    assert authority.issue("agent", "lab").generation == 2


# --- kills ----------------------------------------------------------------------------------------------


class Kill(BaseException):
    """Nothing is tidied up after it, as in `put` below."""


def killed_at(monkeypatch, step, act):
    """Let `act` run until its `step`-th file is to be put in place; whether it was killed."""
    real, count = files.put, iter(range(1000))

    def put(path, data, mode=0o644):
        if next(count) == step:
            path.with_name(f"{path.name}.part").write_bytes(data[: len(data) // 2])
            raise Kill
        real(path, data, mode)

    with monkeypatch.context() as patch:
        for module in (authority_module, authority_files):
            patch.setattr(module, "put", put)
        try:
            act()
        except Kill:
            return True
    return False


def every_kill(monkeypatch, made, tmp_path, act):
    """The authority after a kill at each step of an act; in the end, after none."""
    for step in range(20):
        folder = tmp_path / f"step-{step}"
        shutil.copytree(made, folder)
        authority = Authority(folder, now=NOW)
        was_killed = killed_at(monkeypatch, step, lambda authority=authority: act(authority))
        yield authority
        if not was_killed:
            assert step >= 3, "an act of several files"
            return


def test_a_kill_while_issuing_uses_no_number_twice(made, tmp_path, monkeypatch):
    for authority in every_kill(monkeypatch, made, tmp_path, lambda a: a.issue("agent", "new")):
        known = [issued.name for issued in authority.issued()]
        on_disk = authority.folder / "new" / "cert.pem"
        assert "new" in known or not (authority.folder / "new").exists()
        first = certificate(on_disk.parent).serial_number if on_disk.exists() else None
        assert first is None or first == authority.issued()[-1].serial
        issued = authority.renew("new") if "new" in known else authority.issue("agent", "new")
        serials = [issued.serial for issued in authority.issued()]
        assert len(set(serials)) == len(serials) == (4 if "new" in known else 3)
        assert issued.generation == 1
        assert common_name(authority.folder / "new") == "new~1"


def test_a_kill_while_renewing_is_mended_by_renewing(made, tmp_path, monkeypatch):
    for authority in every_kill(monkeypatch, made, tmp_path, lambda a: a.renew("lab")):
        assert authority.renew("lab").generation == 1
        found = Credentials(authority.folder / "lab", "agent")
        assert certificate(found.folder).serial_number == authority.issued()[-1].serial


def test_a_kill_while_revoking_is_mended_by_whatever_comes_next(made, tmp_path, monkeypatch):
    def mend_by_revoking(authority):
        authority.revoke("lab")

    def mend_by_issuing(authority):
        authority.issue("agent", "other")

    for number, mend in enumerate((mend_by_revoking, mend_by_issuing)):
        for authority in every_kill(monkeypatch, made, tmp_path / str(number), lambda a: a.revoke("lab")):
            in_ledger = {issued.serial for issued in authority.issued() if issued.revoked}
            assert revoked_serials(authority.folder) <= in_ledger, "the ledger is first"
            mend(authority)
            if in_ledger or mend is mend_by_revoking:
                serial = authority.issued()[1].serial
                assert authority.issued()[1].revoked == NOW
                for node in (".", "lab", "localhost"):
                    assert revoked_serials(authority.folder / node) == {serial}
                assert authority.issue("agent", "lab").generation == 2


def test_a_kill_while_an_authority_is_made_is_mended_by_making_it(tmp_path, monkeypatch):
    for step in range(4):
        authority = Authority(tmp_path / str(step))
        assert killed_at(monkeypatch, step, authority.create)
        with refused("authority"):
            authority.issue("agent", "lab")
        authority.create()
        authority.issue("agent", "lab")
        assert Credentials(tmp_path / str(step) / "lab", "agent").name == "lab"


def test_a_failure_leaves_no_part_behind(authority, monkeypatch):
    before = {path: path.read_bytes() for path in authority.folder.rglob("*.*") if path.is_file()}

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused("must be writable", "the disk is full", "--certs", kind=StorageError):
        authority.renew("lab")
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in authority.folder.rglob("*.*") if path.is_file()} == before


def test_commands_wait_for_one_another(authority, monkeypatch):
    names = [f"agent-{number}" for number in range(6)]
    threads = [threading.Thread(target=authority.issue, args=("agent", name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {issued.name for issued in authority.issued()} == {"localhost", "lab", *names}
    monkeypatch.setattr(files, "_PATIENCE", 0.05)
    with open(authority.folder / ".lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with refused("one command at a time", "another", kind=StorageError):
            authority.renew("lab")
    authority.renew("lab")


# --- what the authority refuses -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "../lab2", "a/b", "-x", "hub", "Hub", "a~1", "x\n", "x" * 65])
def test_an_agents_name(authority, name):
    with refused("agent's name", "Choose another"):
        authority.issue("agent", name)


def test_an_agents_name_and_generation_fit_a_certificate(authority):
    assert authority.issue("agent", "é" * 31).generation == 1  # 62 bytes, and ~1
    for name in ("ö" * 31 + "x", "y" * 63):
        with refused("64 bytes in UTF-8", "65 bytes", "shorter"):
            authority.issue("agent", name)
    assert len(authority.issued()) == 3, "nothing of them is in the ledger"


@pytest.mark.parametrize("name", ["LAB", "Lab", "\N{LATIN SMALL LETTER LONG S}lab", "Localhost"])
def test_names_differ_by_more_than_case(authority, name):
    authority.issue("agent", "slab")
    authority.revoke("lab")
    with refused("more than case"):
        authority.issue("agent", name)


@pytest.mark.parametrize("name", ["ca.crt", "CRL.pem", "ledger.json", "ca.key", "key.pem.part"])
def test_a_name_is_not_a_file_of_the_authority(authority, name):
    with refused("file name of the authority"):
        authority.issue("agent", name)


@pytest.mark.parametrize(
    "host", ["..", "a b", "host:7447", "[::1]", "fe80::1%eth0", "10.0.0", "-a.example", "", "ü.de"]
)
def test_a_hosts_name(authority, host):
    with refused("host name or an IP address"):
        authority.issue("hub", host)
    with refused("host name or an IP address"):
        authority.issue("agent", "new", addresses=[host])
    assert len(authority.issued()) == 2


def test_one_certificate_at_a_time(authority):
    with refused("'lab' has one", "renew lab", "revoke lab"):
        authority.issue("agent", "lab")
    with refused("hub 'localhost' has one"):
        authority.issue("agent", "localhost")
    later = Authority(authority.folder, now=NOW + 366 * DAY)
    assert later.issue("agent", "lab").generation == 1, "it has expired, and nobody has revoked it"
    with refused("hub 'localhost' has one"):
        later.issue("agent", "localhost")


def test_a_revoked_name_is_not_renewed(authority):
    authority.revoke("lab")
    with refused("revoked on", "certs agent lab"):
        authority.renew("lab")


def test_an_unknown_name(authority, tmp_path):
    for act in (authority.renew, authority.revoke):
        with refused("'lap'", "Did you mean 'lab'"):
            act("lap")
    Authority(tmp_path / "new").create()
    with refused("No certificate was issued yet"):
        Authority(tmp_path / "new").renew("lab")


def test_a_folder_that_is_not_in_the_ledger_is_not_touched(authority):
    (authority.folder / "theirs").mkdir()
    with refused("'theirs' is not in the ledger"):
        authority.issue("agent", "theirs")


def test_an_authority_is_not_overwritten(authority, tmp_path):
    before = (authority.folder / "ca.key").read_bytes()
    for lost in ("nothing", "ca.crt", "crl.pem"):
        (authority.folder / lost).unlink(missing_ok=True)
        with refused("already holds an authority", "--certs"):
            authority.create()
    assert (authority.folder / "ca.key").read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with refused("already holds thesis.tex"):
        Authority(tmp_path / "other").create()
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


def test_a_key_is_not_overwritten_though_little_else_is_left(authority):
    """Only what an attempt leaves that was killed before anything could be issued: an empty ledger, no ca.crt."""
    before = (authority.folder / "ca.key").read_bytes()
    for lost in ("lab", "localhost"):
        shutil.rmtree(authority.folder / lost)
    for lost in ("ca.crt", "crl.pem", "ledger.json"):
        (authority.folder / lost).unlink()
        with refused("already holds an authority"):
            authority.create()
    assert (authority.folder / "ca.key").read_bytes() == before


def test_an_empty_folder_that_is_there_becomes_private(tmp_path):
    (tmp_path / "certs").mkdir(mode=0o755)
    Authority(tmp_path / "certs").create()
    assert (tmp_path / "certs").stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "certs").touch()
    with refused("a file where a folder is expected", kind=StorageError):
        Authority(tmp_path / "certs").create()


def test_what_can_be_wrong_with_an_authoritys_folder(authority, foreign, tmp_path, monkeypatch):
    with refused("none in", "certs init"):
        Authority(tmp_path / "nowhere").issued()
    (authority.folder / "ca.key").chmod(0o640)
    with refused("mode 0640", "chmod 600"):
        authority.renew("lab")
    shutil.copy(foreign / "ca.key", authority.folder / "ca.key")
    (authority.folder / "ca.key").chmod(0o600)
    with refused("key of another authority"):
        authority.renew("lab")
    (authority.folder / "ca.key").unlink()
    with refused("lacks ca.key", "Restore"):
        authority.renew("lab")
    for content in ("{", "[]", '{"issued": [{}]}', '{"issued": [{"name": "lab", "role": "king"}]}'):
        (authority.folder / "ledger.json").write_text(content)
        (authority.folder / "ca.key").touch()
        with refused("ledger.json is corrupted", "Restore"):
            authority.issued()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with refused("no permission", "owner"):
        authority.issued()


@pytest.mark.parametrize("days", [0, -1, 36501])
def test_days(authority, days):
    for act in (authority.create, lambda days: authority.issue("agent", "n", days=days)):
        with refused("--days", str(days), kind=RecipeError):
            act(days=days)


def test_the_ledger(authority):
    authority.revoke("lab")
    rows = json.loads((authority.folder / "ledger.json").read_text())["issued"]
    assert [(row["name"], row["role"], row["generation"], row["revoked"]) for row in rows] == [
        ("localhost", "hub", 1, None),
        ("lab", "agent", 1, NOW.isoformat()),
    ]
    assert int(rows[1]["serial"], 16) == certificate(authority.folder / "lab").serial_number
    assert rows[1]["not_after"] == (NOW + 365 * DAY).isoformat()


@pytest.mark.parametrize(
    ("after", "state", "left"),
    [
        (0, "valid", "365 days"),
        (335, "valid", "30 days"),
        (335.01, "expires soon", "29 days"),
        (364.8, "expires soon", "4 h"),
    ],
)
def test_states(authority, after, state, left):
    issued, later = authority.issued()[1], NOW + after * DAY
    assert (issued.state(later), left_text(issued.not_after - later)) == (state, left)
    assert issued.state(NOW + 366 * DAY) == "expired"
    authority.revoke("lab")
    assert authority.issued()[1].state(later) == "revoked"


# --- what a node refuses of its own folder --------------------------------------------------------------


def test_a_nodes_folder(certs):
    found = Credentials(certs / "lab", "agent")
    assert (found.name, found.role) == ("lab", "agent")
    assert found.expires == NOW + 365 * DAY
    assert found.trouble() is None
    hub = Credentials(certs / "localhost", "hub")
    assert (hub.name, hub.role) == ("hub", "hub")


def test_a_missing_folder(certs):
    with refused("no folder .*nowhere", "copy it here"):
        Credentials(certs / "nowhere", "agent")


def test_the_authoritys_folder_in_place_of_a_nodes(certs, tmp_path):
    with refused("folder of an authority", "certs/lab, .*certs/localhost"):
        Credentials(certs, "agent")
    Authority(tmp_path / "new").create()
    with refused("folder of an authority", "certs hub HOST"):
        Credentials(tmp_path / "new", "agent")


def test_a_folder_of_somebody_else(certs, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with refused("no permission", "owner"):
        Credentials(certs / "lab", "agent")


@pytest.mark.parametrize("name", ["ca.crt", "cert.pem", "key.pem", "crl.pem"])
def test_a_missing_or_damaged_file(certs, name):
    path = certs / "lab" / name
    path.write_bytes(path.read_bytes()[:80])
    with refused(f"{name} must be", "PEM form", "Copy it from the authority again"):
        Credentials(certs / "lab", "agent")
    path.unlink()
    with refused(f"lacks {name}", "Copy"):
        Credentials(certs / "lab", "agent")


def test_a_key_that_others_can_read(certs):
    for mode in (0o640, 0o604, 0o620):
        (certs / "lab" / "key.pem").chmod(mode)
        with refused("Only its owner", f"mode {mode:04o}", "chmod 600"):
            Credentials(certs / "lab", "agent")


def test_a_key_of_another_certificate(certs):
    shutil.copy(certs / "localhost" / "key.pem", certs / "lab" / "key.pem")
    with refused("must be the key of cert.pem", "renew"):
        Credentials(certs / "lab", "agent")


def test_a_key_of_another_kind(certs):
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.generate()
    (certs / "lab" / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with refused("key.pem must be", "Ed25519"):
        Credentials(certs / "lab", "agent")


def test_a_certificate_of_another_authority(certs, foreign):
    shutil.copy(foreign / "ca.crt", certs / "lab" / "ca.crt")
    with refused("signed by the authority", "another authority"):
        Credentials(certs / "lab", "agent")


def test_an_expired_certificate(certs):
    end = NOW + 365 * DAY
    Authority(certs, now=end - DAY).refresh()
    assert Credentials(certs / "lab", "agent", clock=lambda: end).name == "lab"
    with refused(f"expired on {end:%Y-%m-%d %H:%M} UTC", "certs renew lab"):
        Credentials(certs / "lab", "agent", clock=lambda: end + timedelta(seconds=1))
    with refused("certs renew localhost"):
        Credentials(certs / "localhost", "hub", clock=lambda: end + DAY)


def test_a_clock_that_is_behind(certs):
    start = NOW - timedelta(minutes=5)
    assert Credentials(certs / "lab", "agent", clock=lambda: start).name == "lab"
    with refused("valid from", "clock shows", "Correct the clock"):
        Credentials(certs / "lab", "agent", clock=lambda: start - timedelta(seconds=1))


def test_the_wrong_role(certs):
    with refused("that of agent 'lab'", "certs hub"):
        Credentials(certs / "lab", "hub")
    with refused("that of a hub", "certs agent"):
        Credentials(certs / "localhost", "agent")


def test_a_revoked_certificate(authority):
    authority.issue("agent", "Ward 3")
    for node, role, command in (
        ("Ward 3", "agent", "certs agent 'Ward 3'"),
        ("localhost", "hub", "certs hub localhost"),
    ):
        authority.revoke(node)
        with refused("must not be revoked", "generation 1", command):
            Credentials(authority.folder / node, role)


def test_a_list_of_another_authority(certs, foreign):
    shutil.copy(foreign / "crl.pem", certs / "lab" / "crl.pem")
    with refused("crl.pem must be signed", "another signature"):
        Credentials(certs / "lab", "agent")


# --- peers ----------------------------------------------------------------------------------------------


def stranger(*attributes):
    """A certificate that says of itself what it likes."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(oid, value) for oid, value in attributes])
    builder = x509.CertificateBuilder().issuer_name(name).subject_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(NOW).not_valid_after(NOW + DAY)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


COMMON, UNIT = NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME


@pytest.mark.parametrize(
    "attributes",
    [
        [(COMMON, "hub~1"), (UNIT, "agent")],
        [(COMMON, "lab~1"), (UNIT, "hub")],
        [(COMMON, "lab~1"), (UNIT, "king")],
        [(COMMON, "lab"), (UNIT, "agent")],
        [(COMMON, "lab~0"), (UNIT, "agent")],
        [(COMMON, "lab~١"), (UNIT, "agent")],
        [(COMMON, "lab~01"), (UNIT, "agent")],
        [(COMMON, "~1"), (UNIT, "agent")],
        [(COMMON, "lab~1"), (COMMON, "hub~1"), (UNIT, "agent")],
        [(COMMON, "lab~1")],
    ],
)
def test_a_strangers_certificate(attributes):
    with refused("NAME~GENERATION", "codistill certs"):
        describe_peer(stranger(*attributes))


def test_a_peer_says_who_it_is():
    assert describe_peer(stranger((COMMON, "Ward 3~12"), (UNIT, "agent"))) == ("Ward 3", 12, "agent")
    with refused("node's certificate must be readable"):
        describe_peer(b"nothing of the kind")


def test_a_malformed_certificate_is_refused_and_raises_nothing_else(certs):
    """Random bytes of a valid one are changed, or its end is cut off."""
    hub, good = Credentials(certs / "localhost", "hub"), der(certs / "lab")
    draw, outcomes = random.Random(1), Counter()
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(draw.choice([1, 1, 2, 4])):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        try:
            with warnings.catch_warnings(action="ignore"):
                outcomes[hub.admitted_name(bytes(bad[: draw.choice([len(bad)] * 9 + [draw.randrange(len(bad))])]))] += 1
        except NetworkError as error:
            outcomes[type(error)] += 1
    assert outcomes[NetworkError] > 1900
    assert set(outcomes) <= {NetworkError, "lab"}, "a changed byte may be equal to the one before"


def test_without_the_library(monkeypatch):
    names = [name for name in sys.modules if name.startswith("codistill.certs")]
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    for name in names:
        with refused("pip install 'codistill\\[network\\]'"):
            importlib.import_module(name)
