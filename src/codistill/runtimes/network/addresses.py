"""Addresses of the form HOST:PORT."""

from __future__ import annotations

import ipaddress
import re

from codistill.errors import NetworkError


def split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPv6]:PORT."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})", address)
    if not found or not 0 < int(found[3]) < 65536:
        raise NetworkError(
            "An address must have the form HOST:PORT.", f"'{address}'", "Write for example hub.example.org:7447."
        )
    return found[1] or found[2], int(found[3])


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    host = split(address)[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_privacy(addresses: list[str], *, certs: bool, insecure: bool) -> None:
    """Without certificates allow only addresses of this machine, unless `insecure` is set."""
    public = [address for address in addresses if not is_loopback(address)]
    if public and not certs and not insecure:
        raise NetworkError(
            "Between machines a federation must use certificates.",
            f"none for {public[0]}",
            "Make them by 'codistill certs', and pass --certs DIR. If anyone may read, join and forge: --insecure.",
        )
