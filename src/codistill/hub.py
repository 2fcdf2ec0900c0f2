"""The hub as a protocol sees it: what agents have said of themselves, and the verbs by which it talks to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from codistill.base_node import Node
from codistill.message import Expectation, Message
from codistill.randomness import Key
from codistill.topology import HUB
from codistill.verbs import as_expectation, as_message, as_messages, verb


@dataclass(frozen=True, slots=True)
class Hello:
    """What an agent says of itself when it joins; the hub judges its messages by it."""

    samples: int
    weights: str | None = None  # digest of the names, shapes and dtypes of its weights
    features: int | None = None  # how many its model has
    body: str | None = None  # digest of its weights without those of batch norm


class Hub(Node):
    """The centre of a star: it has no data and no model of its own."""

    def __init__(self) -> None:
        super().__init__(HUB)
        self.hellos: dict[str, Hello] = {}  # what each agent has said of itself; set by the runtime
        self.diverged = False  # whether what it makes diverged in this round; a protocol then leaves the rest of it out

    def start(self, phase: Key, present: tuple[str, ...]) -> None:
        """Enter a round."""
        super().start(phase, present)
        self.diverged = False

    @verb
    async def gather(self, *, expect: Expectation | Callable[[str], Expectation] | None = None) -> dict[str, Message]:
        """One message of every agent that is present, by name; `expect`: equal for all, or a function of the name."""
        if not callable(expect):
            return await self._receive(self.present, expect)
        arrived = await self._receive(self.present, None)
        return {
            name: message
            for name, message in arrived.items()
            if self.accepts(name, message, as_expectation(expect(name)))
        }

    @verb
    async def scatter(self, messages: Mapping[str, Message | Mapping[str, Any]]) -> None:
        """To each agent its own message, or table of named arrays and plain values."""
        await self._send(as_messages(messages))

    @verb
    async def broadcast(self, message: Message | Mapping[str, Any] | None = None, /, **items: Any) -> None:
        """To every agent that is present the same message."""
        await self._send(dict.fromkeys(self.present, as_message("broadcast", message, items)))

    def measured(self) -> list[tuple[str, str, float]]:
        """One value for each agent and figure: the mean over the steps of this round."""
        given: dict[tuple[str, str], list[float]] = {}
        for agent, figure, value in self.measures:
            given.setdefault((agent, figure), []).append(value)
        return [(agent, figure, sum(values) / len(values)) for (agent, figure), values in given.items()]

    @verb
    async def skip(self) -> None:
        """Nobody was heard: reply to everyone with an empty message, so that `ask_hub` returns None."""
        await self.broadcast(Message())

    def _no_attribute(self, name: str) -> str:
        from codistill.agent import Agent  # which imports this module

        if name in {*vars(Agent), "learner", "shard"}:
            return f"The hub has no '{name}': it has no data and no model, and talks by gather, broadcast and scatter."
        return super()._no_attribute(name)
