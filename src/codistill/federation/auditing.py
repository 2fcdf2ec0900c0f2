"""An agent's policy and audit log at the start of its part in a federation and at each join."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from codistill.certs.credentials import Credentials
from codistill.errors import CodistillError, RecipeError
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.runtimes.network.audit_log import AuditLog
from codistill.runtimes.network.event_log import EventLog
from codistill.runtimes.network.policy import DAILY, Policy, make_policy, read_policy
from codistill.runtimes.network.terms import Terms
from codistill.runtimes.runtime import ShouldStop
from codistill.version import __version__

_POLL = 1.0  # seconds between checks while waiting for the next day


def policy_from(
    given: str | Path | Mapping[str, Any] | None, accepts: Sequence[str] | None, own: type[Protocol] | None = None
) -> Policy:
    """The policy in a file or in tables, for the protocols in `accepts` only if that is given."""
    policy = (
        make_policy(given or {}, own) if given is None or isinstance(given, Mapping) else read_policy(Path(given), own)
    )
    return policy.accepting(accepts)


def check_countable(policy: Policy, folder: Path | None) -> None:
    """Limits that hold across restarts need a folder to count in."""
    counted = [rule for rule in ("rounds", *DAILY) if getattr(policy, rule) is not None]
    if counted and folder is None:
        raise RecipeError(
            f"{counted[0]} of a policy is counted in the audit log, which is in the agent's folder.",
            "no folder",
            "Pass folder=..., or leave that rule out.",
        )


@dataclass(frozen=True)
class Audit:
    """The log of one agent, if it has a folder, and its policy."""

    log: AuditLog | None
    policy: Policy
    events: EventLog

    @classmethod
    def open(cls, folder: Path | None, policy: Policy, events: EventLog, stack: ExitStack) -> Audit:
        """Open the log in a folder that is locked, until the stack is closed."""
        log = None
        if folder is not None:
            log = AuditLog(folder)
            stack.callback(log.close)
            if log.cut:
                events.tell(
                    f"audit log: its last line was cut off after {log.cut} bytes and is removed; it was not sent"
                )
        return cls(log, policy, events)

    def start(self, name: str, own: Credentials | None, links: Mapping[str, str]) -> None:
        """Log the start of a process: who it is, whom it connects to, and its policy."""
        self.events.tell(f"policy: {self.policy}")
        if self.log is not None:
            cut = {"cut": self.log.cut} if self.log.cut else {}
            self.log.append(
                "started", node=name, version=__version__, certificate=None if own is None else own.common_name,
                links=dict(links), policy=self.policy.plain(), policy_digest=self.policy.digest, **cut,
            )  # fmt: skip

    def wait_for_allowance(self, should_stop: ShouldStop) -> bool:
        """Wait until the day is over on which a daily limit was reached; False if asked to stop before that."""
        told = False
        while self.log is not None:
            self.log.usage.begin(datetime.now(UTC).date().isoformat())
            rule = self.policy.waits(self.log.usage)
            if rule is None:
                break
            if not told:
                told = True
                self.events.tell(f"waiting until the day is over (UTC): its policy has {rule}")
                self.events.state(status="waiting")
            if should_stop():
                return False
            time.sleep(_POLL)
        return True

    def joined(self, terms: Terms, own: Credentials | None, others: Sequence[str], run: str | None, at: int) -> None:
        """Log the terms under which everything after this line is released, and tell the head of the log."""
        if self.log is None:
            return
        certificates = {} if own is None else {name: own.accepted_common_name(name) for name in others}
        kind = PROTOCOLS.get(str(terms["protocol"].get("name")))
        self.log.append(
            "joined", run=run, at=at, exchanges=None if kind is None else kind.exchanges, certificates=certificates,
            terms=terms,
        )  # fmt: skip
        self.events.tell(f"audit log: {self.log}")

    def refused(self, error: CodistillError) -> None:
        """Log that this agent does not take part under the terms that it was told."""
        if self.log is not None:
            self.log.append("refused", why=f"{error}"[:1000])
