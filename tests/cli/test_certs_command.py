"""`codistill certs`: what it says, on which stream, and with which exit code."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from codistill.certs.authority import Authority
from codistill.certs.credentials import Credentials
from codistill.cli import main


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys, *arguments):
    """Exit code, standard output and standard error."""
    try:
        code = main(["certs", *arguments])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


NOW = datetime.now(UTC).replace(microsecond=0)


def day(after):
    return f"{NOW + timedelta(days=after):%Y-%m-%d}"


def test_from_an_authority_to_a_second_generation(here, capsys, monkeypatch):
    monkeypatch.setattr(Authority, "now", NOW)
    code, out, err = said(capsys, "init")
    assert (code, err) == (0, "")
    assert f"authority: certs, valid until {day(3650)}" in out
    assert "Keep certs/ca.key secret" in out

    code, out, _ = said(capsys, "hub", "localhost", "--address", "10.0.0.1", "h.example", "--address", "::1")
    assert code == 0
    assert f"hub 'localhost', generation 1, valid until {day(365)}\nfolder: certs/localhost\n" in out
    ledger = json.loads((here / "certs" / "ledger.json").read_text())["issued"]
    assert ledger[0]["addresses"] == ["localhost", "10.0.0.1", "h.example", "::1"]

    code, out, _ = said(capsys, "agent", "Ward 3", "--days", "20")
    assert code == 0
    assert f"agent 'Ward 3', generation 1, valid until {day(20)}\nfolder: certs/Ward 3\n" in out
    assert "holds the key" in out

    code, out, _ = said(capsys, "renew", "Ward 3", "--days", "40")
    assert code == 0
    assert f"agent 'Ward 3', generation 1, valid until {day(40)}" in out

    code, out, _ = said(capsys, "revoke", "Ward 3")
    assert code == 0
    assert out.count("revoked: agent 'Ward 3', generation 1") == 1, "once for both certificates"
    assert "Copy certs/crl.pem over the crl.pem on every machine" in out
    assert "codistill certs agent 'Ward 3'" in out
    assert "hubs" not in out

    code, out, _ = said(capsys, "agent", "Ward 3")
    assert code == 0
    assert "generation 2" in out
    assert Credentials(here / "certs" / "Ward 3", "agent").name == "Ward 3"


def test_hours_and_the_life_of_lists(here, capsys, monkeypatch):
    monkeypatch.setattr(Authority, "now", NOW)
    code, out, _ = said(capsys, "init", "--list-days", "3")
    assert code == 0
    assert "Revocation lists are valid for 3 days: run 'codistill certs refresh' before, and copy certs/crl.pem" in out
    end = f"{NOW + timedelta(hours=24):%Y-%m-%d %H:%M} UTC"
    for arguments in (["agent", "north"], ["renew", "north"]):
        code, out, _ = said(capsys, *arguments, "--hours", "24")
        assert (code, out.splitlines()[0]) == (0, f"agent 'north', generation 1, valid until {end}")
    code, out, _ = said(capsys, "refresh")
    end = f"{NOW + timedelta(days=3):%Y-%m-%d %H:%M} UTC"
    assert (code, out.splitlines()[0]) == (0, f"revocation list: number 2, 0 revoked, valid until {end} (3 days)")


def fingerprints(out):
    """The lines that two people compare by telephone."""
    return {line.split(":")[0]: line.split(":")[1].strip() for line in out.splitlines() if line[:9] in SHOWN}


SHOWN = ("request: ", "authority")


def test_a_site_makes_its_own_key(here, capsys):
    assert said(capsys, "init")[0] == 0
    code, out, err = said(capsys, "request", "Ward 3", "--out", "site")
    assert (code, err) == (0, "")
    assert out.startswith("request for agent 'Ward 3': site/request.pem\n")
    assert "which runs: codistill certs sign request.pem\n" in out
    assert "codistill certs install ANSWER --certs site" in out
    asked = fingerprints(out)

    code, out, _ = said(capsys, "sign", "site/request.pem", "--hours", "24")
    assert code == 0
    assert out.startswith("agent 'Ward 3', generation 1, valid until ")
    assert "folder: certs/Ward 3\n" in out
    assert "which holds no key" in out
    assert "codistill certs revoke 'Ward 3'" in out
    signed = fingerprints(out)
    assert signed["request"] == asked["request"]
    assert len(asked["request"].split()) == len(signed["authority"].split()) == 16

    code, out, _ = said(capsys, "install", "certs/Ward 3", "--certs", "site")
    assert code == 0
    assert out.startswith("agent 'Ward 3': site is complete, valid until ")
    assert fingerprints(out)["authority"] == signed["authority"]
    assert Credentials(here / "site", "agent").name == "Ward 3"

    code, out, _ = said(capsys, "request", "--renew", "--out", "site")
    assert code == 0
    assert "codistill certs sign request.pem --renew\n" in out
    assert said(capsys, "sign", "site/request.pem", "--renew")[0] == 0
    assert said(capsys, "install", "certs/Ward 3/cert.pem", "--certs", "site")[0] == 0
    assert said(capsys, "request", "h.example", "--role", "hub", "--out", "hub")[1].count("--role hub") == 1
    assert "codistill certs sign REQUEST, for a new request\n" in said(capsys, "revoke", "Ward 3")[1]


def test_hubs_are_revoked_together_and_that_is_said(here, capsys):
    for arguments in (["init"], ["hub", "localhost"], ["hub", "10.0.0.1"]):
        assert said(capsys, *arguments)[0] == 0
    code, out, _ = said(capsys, "revoke", "localhost")
    assert code == 0
    assert "revoked: hub 'localhost', generation 1\nrevoked: hub '10.0.0.1', generation 1\nAll hubs share" in out
    code, out, _ = said(capsys, "revoke", "10.0.0.1")
    assert code == 0
    assert out.startswith("'10.0.0.1' was already revoked.\n")


def test_the_list_shows_every_state(here, capsys, monkeypatch):
    past = Authority(here / "certs", now=NOW - timedelta(days=100))
    past.create()
    past.issue("hub", "localhost", days=130)
    past.issue("agent", "old", days=90)
    past.issue("agent", "soon", days=105)
    past.issue("agent", "gone")
    past.revoke("gone")
    Authority(here / "certs", now=NOW - timedelta(hours=2)).issue("agent", "short", hours=24)
    Authority(here / "certs", now=NOW - timedelta(hours=19)).issue("agent", "short soon", hours=24)
    monkeypatch.setattr(Authority, "now", NOW)
    code, out, err = said(capsys, "list")
    assert (code, err) == (0, "")
    rows = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in out.splitlines()]
    assert [row for row in rows if len(row) == 6] == [
        ["name", "role", "generation", "valid until", "time left", "state"],
        ["localhost", "hub", "1", day(30), "30 days", "valid"],
        ["old", "agent", "1", day(-10), "", "expired"],
        ["soon", "agent", "1", day(5), "5 days", "expires soon"],
        ["gone", "agent", "1", day(265), "", "revoked"],
        ["short", "agent", "1", f"{NOW + timedelta(hours=22):%Y-%m-%d %H:%M} UTC", "22 h", "valid"],
        ["short soon", "agent", "1", f"{NOW + timedelta(hours=5):%Y-%m-%d %H:%M} UTC", "5 h", "expires soon"],
    ]
    signed = NOW - timedelta(hours=19)  # by the last command: the list before was signed after that time
    end = f"{signed + timedelta(days=7):%Y-%m-%d %H:%M} UTC"
    assert out.splitlines()[-1] == f"revocation list: number 4, 1 revoked, valid until {end} (6 days)"

    monkeypatch.setattr(Authority, "now", signed + timedelta(days=8))
    code, out, _ = said(capsys, "list")
    stale = f"revocation list: number 4, 1 revoked, outdated since {end}: run 'codistill certs refresh'"
    assert (code, out.splitlines()[-1]) == (0, stale)

    code, out, _ = said(capsys, "refresh", "--list-days", "30")
    end = f"{signed + timedelta(days=38):%Y-%m-%d %H:%M} UTC"
    line = f"revocation list: number 5, 1 revoked, valid until {end} (30 days)"
    assert (code, out) == (0, f"{line}\nCopy certs/crl.pem over the crl.pem on every machine.\n")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["list", "--certs", "nowhere"], 9, "none in nowhere"),
        (["init"], 9, "already holds an authority"),
        (["init", "--certs", "other", "--name", "x" * 65], 9, "65 bytes"),
        (["init", "--certs", "file"], 7, "a file where a folder is expected"),
        (["agent", "hub"], 9, "'hub'"),
        (["agent", ".."], 9, "'..'"),
        (["agent", "LAB"], 9, "'LAB' beside 'lab'"),
        (["agent", "lab"], 9, "agent 'lab' has one"),
        (["agent", "ä" * 32], 9, "66 bytes"),
        (["agent", "new", "--days", "0"], 2, "found: 0"),
        (["hub", "host:7447"], 9, "'host:7447'"),
        (["renew", "lap"], 9, "'lap'"),
        (["revoke", "nobody"], 9, "'nobody'"),
        (["agent", "new", "--hours", "0"], 2, "found: 0"),
        (["init", "--certs", "other", "--list-days", "400"], 2, "found: 400"),
        (["refresh", "--list-days", "0"], 2, "found: 0"),
        (["sign", "request.pem"], 9, "No such file"),
        (["sign", "file"], 9, "PEM"),
        (["request"], 2, "none"),
        (["request", "a/b"], 9, "'a/b'"),
        (["request", "--renew", "--out", "other"], 9, "no cert.pem in other"),
        (["request", "lab", "--out", "certs/lab"], 9, "certs/lab holds cert.pem"),
        (["install", "file"], 9, "file"),
        (["install", "certs/lab", "--certs", "nowhere"], 9, "no folder nowhere"),
    ],
)
def test_a_mistake_is_three_sentences_and_an_exit_code(here, capsys, arguments, code, words):
    (here / "file").touch()
    authority = Authority(here / "certs")
    authority.create()
    authority.issue("agent", "lab")
    before = (here / "certs" / "ledger.json").read_bytes()
    found = said(capsys, *arguments)
    assert found[:2] == (code, "")
    assert [line.split(":")[0] for line in found[2].splitlines()] == ["error", "found", "to do"]
    assert words in found[2].splitlines()[1]
    assert (here / "certs" / "ledger.json").read_bytes() == before


def test_what_argparse_says(here, capsys):
    for arguments in (
        [],
        ["agent"],
        ["agent", "lab", "--days", "many"],
        ["renew", "lab", "--days", "1", "--hours", "1"],
    ):
        code, _, err = said(capsys, *arguments)
        assert code == 2
        assert "usage: codistill certs" in err
    code, out, _ = said(capsys, "--help")
    assert code == 0
    for command in ("init", "hub", "agent", "renew", "revoke", "refresh", "list", "request", "sign", "install"):
        assert f"\n    {command} " in out


def test_without_the_library(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for name in [name for name in sys.modules if name.startswith("codistill.certs")]:
        monkeypatch.delitem(sys.modules, name)
    code, out, err = said(capsys, "list")
    assert (code, out) == (9, "")
    assert "to do: Install it: pip install 'codistill[network]'" in err


def test_the_commands_need_no_torch(here):
    """In a process of its own, as this one has it."""
    script = (
        "import sys; from codistill.cli import main; "
        "assert 'cryptography' not in sys.modules; "
        "assert not main(['certs', 'init']) and not main(['certs', 'agent', 'lab']) and not main(['certs', 'list']); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
