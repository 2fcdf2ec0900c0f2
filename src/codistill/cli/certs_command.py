"""The command `codistill certs`: the certificate authority of a federation and its nodes' certificates."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codistill.certs.authority import Authority, Issued


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `certs` and its commands to the command line."""
    certs = commands.add_parser("certs", help="certificates for a federation between machines")
    actions = certs.add_subparsers(title="commands", metavar="COMMAND", required=True)

    init = _action(actions, "init", _init, "make a certificate authority")
    _days(init, 3650)
    init.add_argument("--name", default="codistill authority", help="name of the authority in its certificate")

    for role, who in (("hub", "the host name or address of the hub"), ("agent", "the agent's name")):
        issue = _action(actions, role, _issue, f"issue a certificate for {'the hub' if role == 'hub' else 'an agent'}")
        issue.add_argument("name", metavar="NAME", help=who)
        issue.add_argument(
            "--address",
            nargs="+",
            action="extend",
            default=[],
            metavar="HOST",
            help="further host names or addresses of the node",
        )
        _days(issue, 365)
        issue.set_defaults(role=role)

    renew = _action(actions, "renew", _renew, "make a new key and certificate for a node")
    renew.add_argument("name", metavar="NAME", help="as in 'codistill certs list'")
    _days(renew, 365)

    revoke = _action(actions, "revoke", _revoke, "revoke a node's certificates")
    revoke.add_argument("name", metavar="NAME", help="as in 'codistill certs list'")

    _action(actions, "list", _list, "show all nodes and when their certificates expire")


def _action(actions: argparse._SubParsersAction[Any], name: str, command: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("--certs", type=Path, default=Path("certs"), metavar="DIR", help="default: ./certs")
    parser.set_defaults(command=command)
    return parser


def _days(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--days", type=int, default=default, help=f"how long it is valid (default: {default})")


def _authority(options: argparse.Namespace) -> Authority:
    from codistill.certs.authority import Authority

    return Authority(options.certs)


def _init(options: argparse.Namespace) -> int:
    end = _authority(options).create(name=options.name, days=options.days)
    print(f"authority: {options.certs}, valid until {end:%Y-%m-%d}")
    print(f"Keep {options.certs / 'ca.key'} secret: whoever has it can impersonate every node. Keep a backup.")
    print("Next: codistill certs hub HOST; codistill certs agent NAME, once for each agent.")
    return 0


def _issue(options: argparse.Namespace) -> int:
    issued = _authority(options).issue(options.role, options.name, days=options.days, addresses=options.address)
    return _show(issued, options.certs)


def _renew(options: argparse.Namespace) -> int:
    return _show(_authority(options).renew(options.name, days=options.days), options.certs)


def _show(issued: Issued, certs: Path) -> int:
    print(f"{issued.role} '{issued.name}', generation {issued.generation}, valid until {issued.not_after:%Y-%m-%d}")
    print(f"folder: {certs / issued.name}")
    print("Copy it to the machine of that node over a secure channel, as it holds the key; pass it there with --certs.")
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
    role = next(issued.role for issued in reversed(authority.issued()) if issued.name == options.name)
    print(f"For a new certificate: codistill certs {role} {shlex.quote(options.name)}")
    return 0


def _list(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    authority = _authority(options)
    newest = {
        (i.name, i.role, i.generation): i for i in authority.issued()
    }  # a renewed certificate replaces those before it
    table = Table()
    for heading in ("name", "role", "generation", "valid until", "days left", "state"):
        table.add_column(heading, overflow="fold")
    for issued in newest.values():
        state = issued.state(authority.now)
        left = "" if state in ("revoked", "expired") else str(issued.days_left(authority.now))
        until = f"{issued.not_after:%Y-%m-%d}"
        table.add_row(escape(issued.name), issued.role, str(issued.generation), until, left, state)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0
