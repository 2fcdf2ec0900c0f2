"""The ledger of an authority: all certificates ever issued, and which of them are revoked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path

from codistill.certs.credentials import AGENT, HUB
from codistill.errors import NetworkError

LEDGER = "ledger.json"
SOON = timedelta(days=30)


@dataclass(frozen=True)
class Issued:
    """One certificate in the ledger."""

    name: str  # an agent's name; for a hub, its host name or address
    role: str
    generation: int
    serial: int
    addresses: tuple[str, ...]
    not_after: datetime
    revoked: datetime | None = None

    @property
    def node_name(self) -> str:
        """Its name in the federation: every hub is "hub"."""
        return HUB if self.role == HUB else self.name

    def days_left(self, now: datetime) -> int:
        """Whole days until it expires; below zero if it has expired."""
        return (self.not_after - now).days

    def state(self, now: datetime) -> str:
        """One of: valid, expires soon, expired, revoked."""
        if self.revoked:
            return "revoked"
        left = self.not_after - now
        return "expired" if left < timedelta(0) else "expires soon" if left < SOON else "valid"


def read_ledger(path: Path) -> list[Issued]:
    """All certificates ever issued, oldest first."""
    try:
        return [_decode(row) for row in json.loads(path.read_text("utf-8"))["issued"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NetworkError(
            f"{path} must be the ledger that 'codistill certs' has written.",
            f"{type(error).__name__}: {error}"[:200],
            "Restore it from a copy: it says which certificates were issued and which are revoked.",
        ) from None


def _decode(row: dict[str, str]) -> Issued:
    return Issued(
        name=str(row["name"]),
        role={HUB: HUB, AGENT: AGENT}[row["role"]],
        generation=int(row["generation"]),
        serial=int(row["serial"], 16),
        addresses=tuple(map(str, row["addresses"])),
        not_after=datetime.fromisoformat(row["not_after"]),
        revoked=datetime.fromisoformat(row["revoked"]) if row["revoked"] else None,
    )


def encode_ledger(ledger: list[Issued]) -> bytes:
    """The bytes that `read_ledger` reads."""
    rows = [
        asdict(issued)
        | {
            "serial": f"{issued.serial:036x}",
            "not_after": issued.not_after.isoformat(),
            "revoked": issued.revoked and issued.revoked.isoformat(),
        }
        for issued in ledger
    ]
    return json.dumps({"issued": rows}, indent=1, ensure_ascii=False).encode() + b"\n"
