"""The ledger of an authority: all certificates ever issued, and which of them are revoked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from codistill.certs.node_identity import AGENT, HUB
from codistill.certs.validity import is_due
from codistill.errors import NetworkError

LEDGER = "ledger.json"
_YEAR = timedelta(days=365)


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
    not_before: datetime | None = None  # None: from a version that did not write it
    by_request: bool = False  # its key was made at its site, and is not known here

    @property
    def node_name(self) -> str:
        """Its name in the federation: every hub is "hub"."""
        return HUB if self.role == HUB else self.name

    def state(self, now: datetime) -> str:
        """One of: valid, expires soon, expired, revoked."""
        if self.revoked:
            return "revoked"
        if now > self.not_after:
            return "expired"
        start = self.not_before or self.not_after - _YEAR
        return "expires soon" if is_due(start, self.not_after, now) else "valid"


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


def _decode(row: dict[str, Any]) -> Issued:
    return Issued(
        name=str(row["name"]),
        role={HUB: HUB, AGENT: AGENT}[row["role"]],
        generation=int(row["generation"]),
        serial=int(row["serial"], 16),
        addresses=tuple(map(str, row["addresses"])),
        not_after=datetime.fromisoformat(row["not_after"]),
        revoked=datetime.fromisoformat(row["revoked"]) if row["revoked"] else None,
        not_before=datetime.fromisoformat(row["not_before"]) if row.get("not_before") else None,
        by_request=bool(row.get("by_request")),
    )


def encode_ledger(ledger: list[Issued]) -> bytes:
    """The bytes that `read_ledger` reads."""
    rows = [
        asdict(issued)
        | {
            "serial": f"{issued.serial:036x}",
            "not_after": issued.not_after.isoformat(),
            "revoked": issued.revoked and issued.revoked.isoformat(),
            "not_before": issued.not_before and issued.not_before.isoformat(),
        }
        for issued in ledger
    ]
    return json.dumps({"issued": rows}, indent=1, ensure_ascii=False).encode() + b"\n"
