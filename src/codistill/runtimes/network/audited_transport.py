"""A transport that releases nothing before it is in the audit log, and nothing that the agent's policy forbids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, cast

from codistill.errors import PolicyError
from codistill.runtimes.network.audit_log import AuditLog, Usage
from codistill.runtimes.network.frame_header import MESSAGES, FrameKind, Turn
from codistill.runtimes.network.payload_summary import summarise
from codistill.runtimes.network.policy import ANYTHING, Policy
from codistill.runtimes.network.transport import Transport

_ALWAYS = ("leaving", "refusal")  # allowed beyond every limit: they say that nothing more will come


class AuditedTransport:
    """Stands before a transport. All else than sending is the transport's own."""

    def __init__(self, transport: Transport, log: AuditLog | None, policy: Policy) -> None:
        self._transport: Any = transport
        self._log, self._policy = log, policy
        self._usage = Usage() if log is None else log.usage

    def send(self, receivers: Sequence[str], kind: FrameKind, turn: Turn, payload: bytes = b"") -> None:
        """Check and log a frame, then send it. A frame without content, such as the end of a turn, is only sent."""
        if payload and receivers:
            entry: dict[str, Any] = {"to": list(receivers), **summarise(kind, payload), "round": max(0, turn.phase + 1)}
            if kind in MESSAGES:
                entry["attempt"] = turn.attempt
            self._release(entry, payload)
        self._transport.send(receivers, kind, turn, payload)

    def bar(self, name: str, why: str) -> None:
        """Log that a node is told why its links are closed, then do that."""
        entry = {"to": [name], "what": "refusal", "values": ["why"], "arrays": {}, "round": 0}
        self._release(entry, why.encode())
        self._transport.bar(name, why)

    def _release(self, entry: dict[str, Any], payload: bytes) -> None:
        entry |= {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
        self._check(entry)
        self._append("released", entry)

    def _check(self, entry: dict[str, Any]) -> None:
        self._usage.begin(datetime.now(UTC).date().isoformat())
        if entry["what"] in _ALWAYS:
            return
        try:
            self._policy.check_release(entry, self._usage)
        except PolicyError as error:
            self._append("stopped", {"rule": error.rule, "limit": getattr(self._policy, error.rule)})
            raise

    def _append(self, event: str, entry: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.append(event, **entry)
        else:
            self._usage.add({"time": self._usage.day, "event": event, **entry})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def audited(transport: Transport, log: AuditLog | None, policy: Policy) -> Transport:
    """The same transport, which checks and logs everything that is sent; as it is, if there is nothing to do."""
    if log is None and policy == ANYTHING:
        return transport
    return cast(Transport, AuditedTransport(transport, log, policy))
