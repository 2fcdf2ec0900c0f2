"""Agents, as a protocol sees them: what they hold, and the only verbs by which they talk.

All that a protocol's coroutines work with can be imported from here: agents, the hub, and the effects of their verbs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from codistill.core.errors import MessageError, RecipeError
from codistill.core.settings import clear_argument_errors
from codistill.data.shard import Shard
from codistill.learners import Learner, as_learner
from codistill.learners.ability import AnyLearner
from codistill.learners.portable import ReceivedModel, checked_predictions, open_model
from codistill.nodes.node import (
    Node,
    Receive,
    Send,
    as_expectation,
    as_message,
    as_messages,
    misuse,
    plain_verb,
    reason_of,
    shown,
    verb,
)
from codistill.nodes.record import AgentRecord, JoinInfo, NodeRecord
from codistill.topology import HUB
from codistill.wire.message import Expectation, Message

__all__ = ["Agent", "Hub", "JoinInfo", "Learner", "Node", "Receive", "Send"]


class Agent(Node):
    """A learner and a private shard: samples x with labels y, or a torch `Dataset` (or `DataLoader`) of pairs as x.

    `releases`: a boolean for each sample. One that is False is withheld: it takes no part in a run, whatever the
    protocol, so that nothing which leaves the agent depends on it.
    """

    @clear_argument_errors
    def __init__(
        self,
        name: str,
        model: Any,
        x: Any,
        y: Any = None,
        *,
        test: tuple[Any, Any] | None = None,
        task: str | None = None,
        prepare: Any = None,
        choices: Mapping[str, Any] | None = None,
        releases: Any = None,
    ) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[\w][\w .+-]{0,63}", name) or name == HUB:
            raise RecipeError(
                "An agent's name must be 1 to 64 letters, digits, spaces or any of _ . + -, and not 'hub'.",
                repr(name),
                "Choose another name.",
            )
        super().__init__(name)
        # Typed by all abilities, for protocols; `learner.abilities` says which of them this one has.
        self.learner: AnyLearner = cast(AnyLearner, as_learner(model, name))
        self.shard: Shard = None  # type: ignore[assignment]  # made when the number of classes is known
        self.choices = dict(choices or {})  # settings of the protocol that it chooses for itself
        self._record: AgentRecord = AgentRecord(self, x, y, test, task, prepare, releases)

    @property
    def test(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Its own test data, checked and prepared, for its owner; None: it has none."""
        return self._record.test

    @property
    def neighbours(self) -> tuple[str, ...]:
        """Those it may speak to that are present in this round."""
        return self._here(self.topology.neighbours(self.name))

    @property
    def sources(self) -> tuple[str, ...]:
        """Those it hears that are present in this round: its neighbours, unless the topology is directed."""
        return self._here(self.topology.sources(self.name))

    def _here(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(self.present) == len(self.roster):
            return names
        return tuple(name for name in names if name in self.present)

    @verb
    async def ask_hub(
        self, message: Message | Mapping[str, Any] | None = None, /, *, expect: Expectation | None = None, **items: Any
    ) -> Message | None:
        """Send to the hub and wait for its reply; None if there is none, it is empty, or not as expected."""
        wanted = as_expectation(expect)
        sent = Send({HUB: as_message("ask_hub", message, items)}, asks=True)
        reply = (await self._yield(sent, Receive((HUB,)))).get(HUB)
        return reply if reply and self.accepts(HUB, reply, wanted) else None

    @verb
    async def exchange(
        self, message: Message | Mapping[str, Any] | None = None, /, *, expect: Expectation | None = None, **items: Any
    ) -> dict[str, Message]:
        """Send to all neighbours and return what all sources sent, by name, in the order of the roster."""
        sent = Send(dict.fromkeys(self.neighbours, as_message("exchange", message, items)))
        return await self._yield(sent, Receive(self.sources, as_expectation(expect)))

    @plain_verb
    def mix(self, own: np.ndarray, heard: Mapping[str, np.ndarray]) -> np.ndarray:
        """Own and sources' values with the topology's weights; who is missing leaves its weight to me."""
        weights = self.topology.weights(self.name)
        for name, value in heard.items():
            if name not in weights or not isinstance(value, np.ndarray):
                raise misuse(
                    "me.mix takes an array of each neighbour, by its name.",
                    shown(name) if name not in weights else f"a {type(value).__name__} of '{name}'",
                    'Write me.mix(z, {name: message["z"] for name, message in heard.items()}).',
                )
        mixed = (1.0 - sum([weights[name] for name in heard])) * own
        for name, value in heard.items():
            part = weights[name] * value
            if part.dtype == mixed.dtype and part.shape == mixed.shape:
                mixed += part  # the same numbers as below, without fresh memory
            else:
                mixed = mixed + part
        return mixed.astype(own.dtype, copy=False)

    @plain_verb
    def open_model(self, sender: str, message: Message) -> Any:
        """The model in a message, ready to predict on one's own data; None, and a refusal, if it is invalid."""
        try:
            # A module is initialised before its weights are loaded: that must not change what is drawn next.
            with torch.random.fork_rng(devices=()):
                model = open_model(message, self.shard.x.shape[1:], self.shard.classes, len(self.shard.x))
            # A received model predicts once, at once: where that fails, the message is refused by name.
            if sender == self.name:
                return model
            return ReceivedModel(model, self.shard.x, self.shard.classes, self._record.prepared.complete)
        except MessageError as error:
            self.refuse(sender, error)
            return None

    def predict_with(self, sender: str, data: bytes, x: np.ndarray) -> np.ndarray:
        """Predictions (n, C) of a model that was received and kept as bytes; zeros, and a refusal, where it fails.

        A model that predicts on one's own samples may still fail on others. As that can happen between two rounds, the
        refusal is part of the next round's report.
        """
        try:
            with torch.random.fork_rng(devices=()):
                model = open_model(Message.decode(data), self.shard.x.shape[1:], self.shard.classes)
            return checked_predictions(model, x, self.shard.classes, self._record.prepared.complete)
        except MessageError as error:
            self._record.unreported.append((sender, reason_of(error)))
            return np.zeros((len(x), self.shard.classes))

    def _no_attribute(self, name: str) -> str:
        if name in {*vars(Hub), "joined"}:
            return f"An agent has no '{name}', only the hub has: an agent talks by ask_hub, exchange, send and receive."
        return super()._no_attribute(name)


def twin_of(agent: Agent) -> Agent:
    """An agent with the same data and an untouched copy of the model."""
    of = agent._record
    if of.reload is not None:
        of.reload()
    model = copy.deepcopy(agent.learner)
    twin = Agent(
        agent.name, model, *of.data, test=of.given_test, task=of.task, prepare=of.prepare, choices=agent.choices
    )
    mine = twin._record
    mine.random_items, mine.named = of.random_items, of.named
    mine.use_columns_of(of)
    return twin


class Hub(Node):
    """The centre of a star: it has no data and no model of its own."""

    def __init__(self) -> None:
        super().__init__(HUB)
        self._record = NodeRecord(self)
        self.joined: dict[str, JoinInfo] = {}  # what each agent has said of itself; set by the runtime

    @verb
    async def gather(self, *, expect: Expectation | Callable[[str], Expectation] | None = None) -> dict[str, Message]:
        """One message of every agent that is present, by name; `expect`: equal for all, or a function of the name."""
        if not callable(expect):
            return await self._yield(Receive(self.present, as_expectation(expect)))
        arrived = await self._yield(Receive(self.present))
        return {
            name: message
            for name, message in arrived.items()
            if self.accepts(name, message, as_expectation(expect(name)))
        }

    @verb
    async def scatter(self, messages: Mapping[str, Message | Mapping[str, Any]]) -> None:
        """To each agent its own message, or table of named arrays and plain values."""
        await self._yield(Send(as_messages(messages)))

    @verb
    async def broadcast(self, message: Message | Mapping[str, Any] | None = None, /, **items: Any) -> None:
        """To every agent that is present the same message."""
        await self._yield(Send(dict.fromkeys(self.present, as_message("broadcast", message, items))))

    @verb
    async def skip(self) -> None:
        """Nobody was heard: reply to everyone with an empty message, so that `ask_hub` returns None."""
        await self.broadcast(Message())

    def _no_attribute(self, name: str) -> str:
        if name in {*vars(Agent), "learner", "shard"}:
            return f"The hub has no '{name}': it has no data and no model, and talks by gather, broadcast and scatter."
        return super()._no_attribute(name)
