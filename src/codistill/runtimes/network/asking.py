"""Commands of a hub to its agents, each with a number, and the answers to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from codistill.errors import MessageError
from codistill.results.records import Scores
from codistill.results.scores import Score
from codistill.runtimes.network.answers import checked_scores
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.control import Control
from codistill.runtimes.network.waiting import AgentStatus
from codistill.runtimes.runtime import ShouldStop, never


class Commands:
    """Asks agents to do something and waits for their answers, for as long as the deadline allows."""

    def __init__(
        self, connections: Connections, statuses: Mapping[str, AgentStatus], tell: Callable[[str], None]
    ) -> None:
        self._connections, self._statuses, self._tell = connections, statuses, tell
        self._number = 0
        self._answers: dict[str, Control] = {}

    def is_active(self, name: str) -> bool:
        """Whether an agent is connected, and not excluded."""
        return self._connections.is_connected(name) and name not in self._connections.sessions.excluded

    def ask(self, names: Sequence[str], **content: Any) -> int:
        """Send a command; returns its number."""
        self._number += 1
        for name in names:
            self._statuses[name].unanswered = self._number
        self._connections.command(*names, number=self._number, **content)
        return self._number

    def collect(
        self,
        number: int,
        names: Sequence[str],
        pump: Callable[[], Any],
        should_stop: ShouldStop = never,
        waited: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, Control]:
        """The answers to a command, of the agents that answer before they disconnect or are late.

        An answer that is waited for restarts the deadline of all; progress in training alone, that of its sender.
        `waited`: seconds of their deadline that agents have used up before.
        """
        since, deadline = time.monotonic(), self._connections.network.deadline
        before = len(names)
        while True:
            pending = [name for name in names if self._statuses[name].unanswered == number and self.is_active(name)]
            now = time.monotonic()
            if len(pending) < before:
                since, before = now, len(pending)
            spent = [waited.get(name, 0.0) + now - max(since, self._statuses[name].progressed) for name in pending]
            late = deadline is not None and all(each >= deadline for each in spent)
            if not pending or late or should_stop():
                for name in pending:
                    self._tell(f"'{name}' is late: it takes part again once it has answered")
                found = {name: self._answers.get(name) for name in names}
                return {name: a for name, a in found.items() if a is not None and a.content.get("number") == number}
            pump()

    def take(self, answer: Control) -> None:
        """Keep an answer. Each command is answered once, in order: anything else is a strike."""
        name, number = answer.sender, answer.content.get("number")
        status = self._statuses[name]
        if type(number) is not int or not status.answered < number <= self._number:
            self._connections.sessions.strike(name, "an unexpected answer")
            return
        status.answered = number
        if number == status.unanswered:  # not to a command that timed out
            status.unanswered = None
            self._answers[name] = answer
        if answer.content.get("trouble"):
            self._tell(f"'{name}': {str(answer.content['trouble'])[:300]}")

    def scores(self, name: str, answer: Control | None, wanted: Sequence[Score]) -> Scores:
        """The scores of an answer, if they are those that the terms ask for."""
        if answer is None:
            return {}
        return self.checked(name, checked_scores, answer.content.get("scores"), wanted) or {}

    def checked(self, name: str, check: Callable[..., Any], *given: Any) -> Any:
        """Part of an answer, or None and a strike if it may not be used."""
        try:
            return check(*given)
        except MessageError as error:
            self._connections.sessions.strike(name, str(error))
        except Exception as error:  # a form that no check has foreseen must not end the rounds of the others
            self._connections.sessions.strike(name, f"an answer that cannot be read ({type(error).__name__})")
        return None
