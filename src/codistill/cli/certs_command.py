"""The command `codistill certs`: the certificate authority of a federation and its nodes' certificates."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.cli.console import add_command, make_console

if TYPE_CHECKING:
    from codistill.certs.authority import Authority
    from codistill.certs.signing import Issued, SigningRequest


def add_parsers(commands: argparse._SubParsersAction[Any]) -> None:
    certs = commands.add_parser("certs", help="certificates for a federation between machines")
    actions = certs.add_subparsers(title="commands", metavar="COMMAND", required=True)

    init = _action(actions, "init", _init, "make a certificate authority")
    init.add_argument("--days", type=int, default=3650, help="how long it is valid (default: 3650)")
    init.add_argument("--name", default="codistill authority", help="name of the authority in its certificate")
    init.add_argument("--list-days", type=int, help="how long revocation lists are valid (default: 7)")

    hub = _action(actions, "hub", _issue, "issue a certificate for the hub")
    hub.add_argument("name", metavar="NAME", help="the host name or address of the hub")
    agent = _action(actions, "agent", _issue, "issue a certificate for an agent")
    agent.add_argument("name", metavar="NAME", help="the agent's name")
    hub.set_defaults(role="hub")
    agent.set_defaults(role="agent")

    renew = _action(actions, "renew", _renew, "make a new key and certificate for a node")
    renew.add_argument("name", metavar="NAME", help="as in 'codistill certs list'")

    revoke = _action(actions, "revoke", _revoke, "revoke a node's certificates")
    revoke.add_argument("name", metavar="NAME", help="as in 'codistill certs list'")

    refresh = _action(actions, "refresh", _refresh, "sign the revocation list again, before it is outdated")
    refresh.add_argument("--list-days", type=int, help="how long revocation lists are valid (unset: as before)")

    _action(actions, "list", _list, "show all nodes, when their certificates expire, and the revocation list")

    text = "at a site: make a key and a request for a certificate"
    request = add_command(actions, "request", _request, text)
    request.add_argument("name", metavar="NAME", nargs="?", help="the agent's name, or the host name of the hub")
    request.add_argument("--role", choices=("agent", "hub"), default="agent", help="default: agent")
    request.add_argument("--renew", action="store_true", help="ask for the next certificate of the node in the folder")
    request.add_argument("--out", type=Path, default=Path("certs"), metavar="FOLDER", help="default: ./certs")

    sign = _action(actions, "sign", _sign, "at the authority: issue the certificate that a request asks for")
    sign.add_argument("request", metavar="REQUEST", type=Path, help="the file request.pem of the site")
    sign.add_argument("--role", choices=("agent", "hub"), default="agent", help="default: agent")
    sign.add_argument("--renew", action="store_true", help="the node has a certificate, and this is its next one")

    for issuing in (hub, agent, sign):
        issuing.add_argument(
            "--address",
            nargs="+",
            action="extend",
            default=[],
            metavar="HOST",
            help="further host names or addresses of the node",
        )
    for issuing in (hub, agent, renew, sign):
        either = issuing.add_mutually_exclusive_group()
        either.add_argument("--days", type=int, default=365, help="how long it is valid (default: 365)")
        either.add_argument("--hours", type=int, help="how long it is valid, in hours")

    install = _action(actions, "install", _install, "at a site: put the authority's answer into the node's folder")
    install.add_argument("files", metavar="FILES", type=Path, nargs="+", help="a folder, or ca.crt, cert.pem, crl.pem")


def _action(actions: argparse._SubParsersAction[Any], name: str, command: Any, text: str) -> argparse.ArgumentParser:
    """A command on the folder of the authority, or of a node."""
    parser = add_command(actions, name, command, text)
    parser.add_argument("--certs", type=Path, default=Path("certs"), metavar="DIR", help="default: ./certs")
    return parser


def _authority(options: argparse.Namespace) -> Authority:
    from codistill.certs.authority import Authority

    return Authority(options.certs)


# --- at the authority -----------------------------------------------------------------------------------


def _init(options: argparse.Namespace) -> int:
    from codistill.certs.authority import LIST_DAYS

    list_days = LIST_DAYS if options.list_days is None else options.list_days
    end = _authority(options).create(name=options.name, days=options.days, list_days=list_days)
    print(f"authority: {options.certs}, valid until {end:%Y-%m-%d}")
    print(f"Keep {options.certs / 'ca.key'} secret: whoever has it can impersonate every node. Keep a backup.")
    print(
        f"Revocation lists are valid for {list_days} days: run 'codistill certs refresh' before, and copy "
        f"{options.certs / 'crl.pem'} to all machines."
    )
    print("Next: codistill certs hub HOST; codistill certs agent NAME, once for each agent.")
    return 0


def _issue(options: argparse.Namespace) -> int:
    authority = _authority(options)
    issued = authority.issue(
        options.role, options.name, days=options.days, hours=options.hours, addresses=options.address
    )
    return _show(issued, authority)


def _renew(options: argparse.Namespace) -> int:
    authority = _authority(options)
    return _show(authority.renew(options.name, days=options.days, hours=options.hours), authority)


def _show(issued: Issued, authority: Authority) -> int:
    from codistill.certs.identity import end_text

    until = end_text(issued.not_after, authority.now)
    print(f"{issued.role} '{issued.name}', generation {issued.generation}, valid until {until}")
    print(f"folder: {authority.folder / issued.name}")
    if not issued.by_request:
        print("Copy it to the machine of that node over a secure channel, as it holds the key; there: --certs FOLDER.")
    return 0


def _sign(options: argparse.Namespace) -> int:
    from codistill.certs.files import AUTHORITY_CERTIFICATE, read_certificate
    from codistill.certs.signing import fingerprint, read_signing_request

    authority, request = _authority(options), read_signing_request(options.request)
    issued = authority.sign(
        request,
        role=options.role,
        renew=options.renew,
        days=options.days,
        hours=options.hours,
        addresses=options.address,
    )
    _show(issued, authority)
    print(f"request:   {request.fingerprint}")
    print(f"authority: {fingerprint(read_certificate(authority.folder / AUTHORITY_CERTIFICATE))}")
    print(
        "Compare both with the site by telephone, then send it the folder, which holds no key. If the request is not "
        f"theirs: codistill certs revoke {shlex.quote(issued.name)}"
    )
    return 0


def _revoke(options: argparse.Namespace) -> int:
    authority = _authority(options)
    revoked = authority.revoke(options.name)
    nodes = dict.fromkeys((issued.name, issued.role, issued.generation) for issued in revoked)
    for name, role, generation in nodes:
        print(f"revoked: {role} '{name}', generation {generation}")
    if not nodes:
        print(f"'{options.name}' was already revoked.")
    if any(name != options.name for name, _, _ in nodes):
        print("All hubs share one common name, so all hubs of that generation are revoked together.")
    copied = f"Copy {options.certs / 'crl.pem'} over the crl.pem on every machine"
    print(f"{copied}: until then that machine still accepts the certificate.")
    last = next(issued for issued in reversed(authority.issued()) if issued.name == options.name)
    new = "sign REQUEST, for a new request" if last.by_request else f"{last.role} {shlex.quote(options.name)}"
    print(f"For a new certificate: codistill certs {new}")
    return 0


def _refresh(options: argparse.Namespace) -> int:
    authority = _authority(options)
    authority.refresh(list_days=options.list_days)
    print(_list_line(authority))
    print(f"Copy {options.certs / 'crl.pem'} over the crl.pem on every machine.")
    return 0


def _list(options: argparse.Namespace) -> int:
    from codistill.certs.identity import end_text, left_text
    from codistill.results.tables import Table

    authority = _authority(options)
    # A renewed certificate replaces those before it.
    newest = {(issued.name, issued.role, issued.generation): issued for issued in authority.issued()}
    line = _list_line(authority)
    rows = []
    for issued in newest.values():
        state = issued.state(authority.now)
        left = "" if state in ("revoked", "expired") else left_text(issued.not_after - authority.now)
        until = end_text(issued.not_after, authority.now)
        rows.append([issued.name, issued.role, str(issued.generation), until, left, state])
    headings = ("name", "role", "generation", "valid until", "time left", "state")
    make_console().print(Table(headings, "l" * len(headings), rows))
    print(line)
    return 0


def _list_line(authority: Authority) -> str:
    """One line on the revocation list: whether nodes can use it, and for how long."""
    from codistill.certs.identity import date_text, left_text
    from codistill.certs.signing import list_number

    found = authority.revocation_list()
    end = found.next_update_utc
    assert end is not None  # as this authority signs its lists
    state = (
        f"outdated since {date_text(end)}: run 'codistill certs refresh'"
        if end < authority.now
        else f"valid until {date_text(end)} ({left_text(end - authority.now)})"
    )
    return f"revocation list: number {list_number(found)}, {len(found)} revoked, {state}"


# --- at a site ------------------------------------------------------------------------------------------


def _request(options: argparse.Namespace) -> int:
    from codistill.certs.signing import make_renewal, make_request
    from codistill.core.errors import RecipeError

    folder: Path = options.out
    if options.renew:
        made: SigningRequest = make_renewal(folder, options.name)
    elif options.name is None:
        raise RecipeError("A first request needs a name.", "none", "codistill certs request NAME; or --renew.")
    else:
        made = make_request(folder, options.name, options.role)
    print(f"request for {made.role} '{made.name}': {folder / 'request.pem'}")
    print(f"request:   {made.fingerprint}")
    asked = (" --role hub" if made.role == "hub" else "") + (" --renew" if options.renew else "")
    print(f"Send the file to the authority, which runs: codistill certs sign request.pem{asked}")
    print(f"The key stays in {folder}. When the answer is here:")
    print(f"    codistill certs install ANSWER --certs {shlex.quote(str(folder))}")
    return 0


def _install(options: argparse.Namespace) -> int:
    from codistill.certs.credentials import install
    from codistill.certs.files import AUTHORITY_CERTIFICATE, read_certificate
    from codistill.certs.signing import fingerprint

    own = install(options.files, options.certs)
    print(f"{own.role} '{own.name}': {options.certs} is complete, valid until {own.expires:%Y-%m-%d %H:%M} UTC")
    print(f"authority: {fingerprint(read_certificate(options.certs / AUTHORITY_CERTIFICATE))}")
    print("Compare it with the authority by telephone. A node that runs takes the new files by itself.")
    return 0
