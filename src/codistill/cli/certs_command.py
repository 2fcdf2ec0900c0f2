"""The command `codistill certs`: the certificate authority of a federation and its nodes' certificates."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codistill.certs.authority import Authority, Issued
    from codistill.certs.signing_request import SigningRequest


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `certs` and its commands to the command line."""
    certs = commands.add_parser("certs", help="certificates for a federation between machines")
    actions = certs.add_subparsers(title="commands", metavar="COMMAND", required=True)

    init = _action(actions, "init", _init, "make a certificate authority")
    _days(init, 3650)
    init.add_argument("--name", default="codistill authority", help="name of the authority in its certificate")
    _list_days(init, "default: 7")

    for role, who in (("hub", "the host name or address of the hub"), ("agent", "the agent's name")):
        issue = _action(actions, role, _issue, f"issue a certificate for {'the hub' if role == 'hub' else 'an agent'}")
        issue.add_argument("name", metavar="NAME", help=who)
        _addresses(issue)
        _days_or_hours(issue)
        issue.set_defaults(role=role)

    renew = _action(actions, "renew", _renew, "make a new key and certificate for a node")
    renew.add_argument("name", metavar="NAME", help="as in 'codistill certs list'")
    _days_or_hours(renew)

    revoke = _action(actions, "revoke", _revoke, "revoke a node's certificates")
    revoke.add_argument("name", metavar="NAME", help="as in 'codistill certs list'")

    refresh = _action(actions, "refresh", _refresh, "sign the revocation list again, before it is outdated")
    _list_days(refresh, "unset: as before")

    _action(actions, "list", _list, "show all nodes, when their certificates expire, and the revocation list")
    _add_request_parsers(actions)


def _add_request_parsers(actions: argparse._SubParsersAction[Any]) -> None:
    request = _action(
        actions, "request", _request, "at a site: make a key and a request for a certificate", certs=False
    )
    request.add_argument("name", metavar="NAME", nargs="?", help="the agent's name, or the host name of the hub")
    request.add_argument("--role", choices=("agent", "hub"), default="agent", help="default: agent")
    request.add_argument("--renew", action="store_true", help="ask for the next certificate of the node in the folder")
    request.add_argument("--out", type=Path, default=Path("certs"), metavar="FOLDER", help="default: ./certs")

    sign = _action(actions, "sign", _sign, "at the authority: issue the certificate that a request asks for")
    sign.add_argument("request", metavar="REQUEST", type=Path, help="the file request.pem of the site")
    sign.add_argument("--role", choices=("agent", "hub"), default="agent", help="default: agent")
    sign.add_argument("--renew", action="store_true", help="the node has a certificate, and this is its next one")
    _addresses(sign)
    _days_or_hours(sign)

    install = _action(actions, "install", _install, "at a site: put the authority's answer into the node's folder")
    install.add_argument("files", metavar="FILES", type=Path, nargs="+", help="a folder, or ca.crt, cert.pem, crl.pem")


def _action(
    actions: argparse._SubParsersAction[Any], name: str, command: Any, text: str, *, certs: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    if certs:
        parser.add_argument("--certs", type=Path, default=Path("certs"), metavar="DIR", help="default: ./certs")
    parser.set_defaults(command=command)
    return parser


def _days(parser: argparse._ActionsContainer, default: int) -> None:
    parser.add_argument("--days", type=int, default=default, help=f"how long it is valid (default: {default})")


def _days_or_hours(parser: argparse.ArgumentParser) -> None:
    either = parser.add_mutually_exclusive_group()
    _days(either, 365)
    either.add_argument("--hours", type=int, help="how long it is valid, in hours")


def _list_days(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--list-days", type=int, help=f"how long revocation lists are valid ({default})")


def _addresses(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        nargs="+",
        action="extend",
        default=[],
        metavar="HOST",
        help="further host names or addresses of the node",
    )


def _authority(options: argparse.Namespace) -> Authority:
    from codistill.certs.authority import Authority

    return Authority(options.certs)


# --- at the authority -----------------------------------------------------------------------------------


def _init(options: argparse.Namespace) -> int:
    from codistill.certs.authority_files import LIST_DAYS

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
    from codistill.certs.validity import end_text

    until = end_text(issued.not_after, authority.now)
    print(f"{issued.role} '{issued.name}', generation {issued.generation}, valid until {until}")
    print(f"folder: {authority.folder / issued.name}")
    if not issued.by_request:
        print("Copy it to the machine of that node over a secure channel, as it holds the key; there: --certs FOLDER.")
    return 0


def _sign(options: argparse.Namespace) -> int:
    from codistill.certs.certificate_files import AUTHORITY_CERTIFICATE, read_certificate
    from codistill.certs.signing_request import fingerprint, read_signing_request

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
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from codistill.certs.validity import end_text, left_text

    authority = _authority(options)
    newest = {
        (i.name, i.role, i.generation): i for i in authority.issued()
    }  # a renewed certificate replaces those before it
    line = _list_line(authority)
    table = Table()
    for heading in ("name", "role", "generation", "valid until", "time left", "state"):
        table.add_column(heading, overflow="fold")
    for issued in newest.values():
        state = issued.state(authority.now)
        left = "" if state in ("revoked", "expired") else left_text(issued.not_after - authority.now)
        until = end_text(issued.not_after, authority.now)
        table.add_row(escape(issued.name), issued.role, str(issued.generation), until, left, state)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(line)
    return 0


def _list_line(authority: Authority) -> str:
    """One line on the revocation list: whether nodes can use it, and for how long."""
    from codistill.certs.signing import list_number
    from codistill.certs.validity import date_text, left_text

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
    from codistill.certs.signing_request import make_renewal, make_request
    from codistill.errors import RecipeError

    folder: Path = options.out
    if options.renew:
        made: SigningRequest = make_renewal(folder, options.name)
    elif options.name is None:
        raise RecipeError("A first request needs a name.", "none", "codistill certs request NAME; or --renew.")
    else:
        made = make_request(folder, options.name, options.role)
    print(f"request for {made.role} '{made.name}': {folder / 'request.pem'}")
    print(f"request:   {made.fingerprint}")
    print(f"Send the file to the authority, which runs: codistill certs sign request.pem{_sign_options(made, options)}")
    print(f"The key stays in {folder}. When the answer is here:")
    print(f"    codistill certs install ANSWER --certs {shlex.quote(str(folder))}")
    return 0


def _sign_options(made: SigningRequest, options: argparse.Namespace) -> str:
    return (" --role hub" if made.role == "hub" else "") + (" --renew" if options.renew else "")


def _install(options: argparse.Namespace) -> int:
    from codistill.certs.certificate_files import AUTHORITY_CERTIFICATE, read_certificate
    from codistill.certs.installing import install
    from codistill.certs.signing_request import fingerprint

    own = install(options.files, options.certs)
    print(f"{own.role} '{own.name}': {options.certs} is complete, valid until {own.expires:%Y-%m-%d %H:%M} UTC")
    print(f"authority: {fingerprint(read_certificate(options.certs / AUTHORITY_CERTIFICATE))}")
    print("Compare it with the authority by telephone. A node that runs takes the new files by itself.")
    return 0
