"""A revocation list that cannot be used: reported at once, tolerated for the grace period, then nobody is admitted."""

import shutil
from datetime import timedelta

import pytest
from cryptography import x509
from tests.certs.certificates import DAY, HOUR, NOW, Clock, certificate, der, refused

from codistill.certs.authority import Authority
from codistill.certs.credentials import Credentials
from codistill.certs.signing import LEDGER, pem, sign_list
from codistill.core.errors import RecipeError

MINUTE, SECOND = timedelta(minutes=1), timedelta(seconds=1)


def read(folder, clock, grace=3600.0):
    return Credentials(folder, "hub", list_grace=grace, clock=clock)


@pytest.mark.parametrize("harm", ["damaged", "empty", "missing", "foreign", "cut"])
def test_a_list_that_cannot_be_used_holds_for_the_grace_period_only(authority, foreign, harm):
    """With a damaged list, a revoked agent stays revoked and the others are admitted for an hour, then nobody."""
    authority.issue("agent", "left")
    clock = Clock()
    hub, folder = read(authority.folder / "localhost", clock), authority.folder
    lab, left = der(folder / "lab"), der(folder / "left")
    assert [hub.admitted_name(lab), hub.admitted_name(left), hub.trouble()] == ["lab", "left", None]
    authority.revoke("left")
    path = folder / "localhost" / "crl.pem"
    with refused("agent 'left' must be valid", "generation 1 is revoked", "for a new one"):
        hub.admitted_name(left)
    good, found = path.read_bytes(), "no list, a truncated list, or other content"
    if harm == "missing":
        path.unlink()
        found = "No such file or directory"
    elif harm == "foreign":
        shutil.copy(foreign / "crl.pem", path)
        found = "a list with another signature"
    else:
        path.write_bytes({"damaged": b"nothing of the kind", "empty": b"", "cut": good + good[:60]}[harm])
    for after in (timedelta(0), HOUR):
        clock.now = NOW + after
        end = f"{NOW + HOUR:%Y-%m-%d %H:%M} UTC"
        assert hub.trouble() == (
            f"The revocation list {path} cannot be used ({found}), and from {end} on all nodes are refused: "
            "run 'codistill certs refresh' at the authority, and copy crl.pem from there."
        )
        assert hub.admitted_name(lab) == "lab"
        with refused("generation 1 is revoked"):
            hub.admitted_name(left)
    clock.now += SECOND
    assert "and all nodes are refused: run 'codistill certs refresh'" in hub.trouble()
    for peer in (lab, left, der(folder / "localhost")):
        with refused("crl.pem must be a valid revocation list", found.split(",")[0], "certs refresh"):
            hub.admitted_name(peer)
    path.write_bytes(good)
    assert (hub.admitted_name(lab), hub.trouble()) == ("lab", None)
    with refused("generation 1 is revoked"):
        hub.admitted_name(left)


def test_a_list_that_is_damaged_again_has_a_new_grace_period(certs):
    clock = Clock()
    hub, path = read(certs / "localhost", clock, grace=60), certs / "localhost" / "crl.pem"
    good = path.read_bytes()
    for _ in range(2):
        path.write_bytes(b"")
        hub.trouble()
        clock.now += MINUTE
        assert hub.admitted_name(der(certs / "lab")) == "lab"
        path.write_bytes(good)
        assert hub.trouble() is None


def test_an_outdated_list(certs):
    """Signed for seven days; five minutes more for clocks; then the grace period."""
    clock = Clock(NOW + 7 * DAY + 5 * MINUTE)
    hub, lab = read(certs / "localhost", clock), der(certs / "lab")
    assert hub.admitted_name(lab) == "lab"
    due = f"{NOW + 7 * DAY:%Y-%m-%d %H:%M} UTC"
    assert f"is valid until {due}: run 'codistill certs refresh'" in hub.trouble()
    clock.now += SECOND
    end = f"{NOW + 7 * DAY + 5 * MINUTE + HOUR:%Y-%m-%d %H:%M} UTC"
    assert f"cannot be used (outdated since {due}), and from {end} on all nodes are refused" in hub.trouble()
    assert hub.admitted_name(lab) == "lab"
    assert read(certs / "localhost", clock).admitted_name(lab) == "lab", "a start within the grace period"
    clock.now = NOW + 7 * DAY + 5 * MINUTE + HOUR + SECOND
    with refused("must be a valid revocation list", f"outdated since {due}", "certs refresh"):
        hub.admitted_name(lab)
    with refused("must be a valid revocation list", f"outdated since {due}", "certs refresh"):
        read(certs / "localhost", clock)
    Authority(certs, now=clock.now).refresh()
    assert (hub.admitted_name(lab), hub.trouble()) == ("lab", None)


def test_a_list_is_due_in_the_last_third_of_its_life(certs):
    clock = Clock(NOW + 7 * DAY * 2 / 3)
    hub = read(certs / "localhost", clock)
    assert hub.trouble() is None
    clock.now += SECOND
    assert "crl.pem is valid until" in hub.trouble()


def test_a_list_of_the_future(certs):
    """The clock of the node is behind by more than five minutes, or that of the authority was ahead."""
    clock = Clock()
    hub = read(certs / "localhost", clock)
    Authority(certs, now=NOW + 5 * MINUTE).refresh()
    assert hub.trouble() is None
    Authority(certs, now=NOW + 2 * DAY).refresh()
    assert (
        f"(it was signed at {NOW + 2 * DAY:%Y-%m-%d %H:%M} UTC, which is in the future by this machine's clock"
        in hub.trouble()
    )
    assert hub.admitted_name(der(certs / "lab")) == "lab"
    with refused("must not be signed in the future", "Correct the clock"):
        read(certs / "localhost", clock)
    clock.now += HOUR + SECOND
    with refused("in the future"):
        hub.admitted_name(der(certs / "lab"))
    clock.now = NOW + 2 * DAY
    assert hub.admitted_name(der(certs / "lab")) == "lab"


def test_an_older_list_takes_nothing_back(authority):
    clock = Clock()
    hub, path = read(authority.folder / "localhost", clock), authority.folder / "localhost" / "crl.pem"
    old, lab = path.read_bytes(), der(authority.folder / "lab")
    assert hub.admitted_name(lab) == "lab"
    Authority(authority.folder, now=NOW + 5 * DAY).revoke("lab")
    clock.now = NOW + 5 * DAY
    with refused("generation 1 is revoked"):
        hub.admitted_name(lab)
    path.write_bytes(old)
    for after in (5 * DAY, 8 * DAY):
        clock.now = NOW + after
        with refused("generation 1 is revoked"):
            hub.admitted_name(lab)
        assert "is older than one used before (number 1 after 3)" in hub.trouble(), "it counts until its own time"
    clock.now = NOW + 13 * DAY
    with refused("outdated since"):
        hub.admitted_name(lab)


def test_lists_are_signed_again_by_every_change_after_a_day(authority):
    def numbers(folder):
        crl = x509.load_pem_x509_crl((folder / "crl.pem").read_bytes())
        return crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number, crl.next_update_utc

    def later(time):
        return Authority(authority.folder, now=NOW + time)

    later(DAY).renew("lab")
    assert numbers(authority.folder) == (1, NOW + 7 * DAY)
    later(DAY + SECOND).renew("lab")
    assert numbers(authority.folder) == (2, NOW + 8 * DAY + SECOND)
    later(2 * DAY).refresh(list_days=1)
    assert numbers(authority.folder) == (3, NOW + 3 * DAY)
    later(2 * DAY + 12 * HOUR + SECOND).renew("lab")
    assert numbers(authority.folder) == (4, NOW + 3 * DAY + 12 * HOUR + SECOND), "of one day: after half of it"
    later(3 * DAY).refresh()
    assert {numbers(authority.folder / node) for node in (".", "lab", "localhost")} == {(5, NOW + 4 * DAY)}
    for days in (0, 367):
        with refused("--list-days", str(days), kind=RecipeError):
            authority.refresh(list_days=days)


def test_a_list_that_was_valid_for_ever_is_signed_for_a_week(authority):
    """As signed by versions whose lists ended with their authority."""
    from codistill.certs.files import read_key

    root, key = certificate(authority.folder, "ca.crt"), read_key(authority.folder / "ca.key")
    (authority.folder / "crl.pem").write_bytes(pem(sign_list(root, key, [], 7, NOW, 3650 * DAY)))
    found = authority.refresh()
    assert (found.next_update_utc, len(found)) == (NOW + 7 * DAY, 0)


def test_a_ledger_of_an_earlier_version(authority):
    import json

    rows = json.loads((authority.folder / LEDGER).read_text())
    for row in rows["issued"]:
        del row["not_before"], row["by_request"]
    (authority.folder / LEDGER).write_text(json.dumps(rows))
    assert [(i.name, i.state(NOW), i.by_request) for i in authority.issued()] == [
        ("localhost", "valid", False),
        ("lab", "valid", False),
    ]
    assert authority.renew("lab").generation == 1


def test_the_check_of_an_open_link_is_cheap(certs, monkeypatch):
    """It is made every second for each link: the certificate and the list are read once."""
    from codistill.certs import credentials, files

    hub, lab = read(certs / "localhost", Clock()), der(certs / "lab")
    hub.admitted_name(lab)
    for module, name in ((credentials, "load_peer"), (credentials, "read_own_files"), (files, "read_lists")):
        monkeypatch.setattr(module, name, None)
    assert [hub.admitted_name(lab) for _ in range(3)] == ["lab"] * 3
