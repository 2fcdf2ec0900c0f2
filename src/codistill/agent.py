"""Agents and the hub, as a protocol sees them: what they hold, and the only verbs by which they talk.

A verb does not communicate. It yields an effect (`Send`, `Receive`) to whoever drives the coroutine, and
is resumed with the answer; see `codistill.runtimes`.
"""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from codistill.data.shard import PublicData, Shard
from codistill.data.torch_datasets import is_dataset, read_dataset
from codistill.data.validation import validate_samples
from codistill.errors import MessageError, RecipeError, RuntimeFault
from codistill.learners import Learner, as_learner
from codistill.learners.ability import Ability, AnyLearner
from codistill.learners.portable import ReceivedModel, checked_predictions, open_model
from codistill.message import Expectation, Message
from codistill.randomness import Key, generator, seed_libraries
from codistill.text import printable
from codistill.topology import HUB, Topology
from codistill.wire.compression import Residue

_REASON = 500  # characters that are kept of why a message was refused


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver each message to its receiver; the same object to many is encoded once."""

    messages: Mapping[str, Message]


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the next message of each sender; those who will send none this round are left out."""

    senders: tuple[str, ...]
    expect: Expectation = field(default_factory=dict)


Effect = Send | Receive


@dataclass(frozen=True, slots=True)
class Hello:
    """What an agent says of itself when it joins; the hub judges its messages by it."""

    samples: int
    weights: str | None = None  # digest of the names, shapes and dtypes of its weights
    features: int | None = None  # how many its model has


class Node:
    """What an agent and the hub have in common: a name, state across rounds, randomness, and messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: dict[str, Any] = {}  # kept in the checkpoint
        self.memo: dict[Any, Any] = {}  # what can be computed again: not kept
        self.residue: Residue = {}  # what compression has lost of its messages; kept in the checkpoint
        self.public: PublicData = None  # type: ignore[assignment]  # absent unless the federation has one
        self.topology = Topology.silent(())
        self.present: tuple[str, ...] = ()  # agents of this round, in the order of the roster
        self.seed = 0
        self.classes = 0  # of the federation: columns of an output
        self.rejected: list[tuple[str, str]] = []  # (sender, reason) of messages refused this round
        self.unreported: list[tuple[str, str]] = []  # the same, for the report of the next round
        self.remarks: list[str] = []  # for the operator, of this round
        self.measures: list[tuple[str, str, float]] = []  # (agent, name, value) of this round
        self._moment: tuple[Key, ...] = ()

    def start(self, phase: Key, present: tuple[str, ...]) -> None:
        """Enter a round (or "begin"): from here on all randomness derives from (seed, name, phase)."""
        self.present, self.remarks, self.measures = present, [], []
        self.rejected, self.unreported = self.unreported, []
        self._moment = (self.name, phase, 0)
        seed_libraries(self.seed, *self._moment)

    def rng(self, *keys: Key) -> np.random.Generator:
        """A generator for (seed, name, round, keys), the same whenever it is asked for in this round."""
        return generator(self.seed, *self._moment[:2], *keys)

    def seed_alike(self, *keys: Key) -> None:
        """Seed the libraries equally on every node, so that all draw the same next numbers."""
        seed_libraries(self.seed, "alike", *keys)

    @property
    def roster(self) -> tuple[str, ...]:
        """All agents of the federation, present or not."""
        return self.topology.names

    async def send(self, to: str, message: Message | None = None, /, **items: Any) -> None:
        """Send named arrays and plain values, or a ready message."""
        await self._send({to: message or Message.of(**items)})

    async def receive(self, sender: str, *, expect: Expectation | None = None) -> Message | None:
        """The next message of a sender; None if none arrives in this round."""
        return (await self._receive((sender,), expect)).get(sender)

    def dump(self) -> dict[str, Any]:
        """What lives across rounds."""
        return {"state": self.state, **({"residue": self.residue} if self.residue else {})}

    def resume(self, saved: dict[str, Any]) -> None:
        """Return to what was dumped."""
        self.state, self.memo, self.residue = saved["state"], {}, saved.get("residue", {})

    def refuse(self, sender: str, error: MessageError) -> None:
        """Record a message that cannot be used; the round continues without it."""
        self.rejected.append((sender, printable(str(error), _REASON)))  # the sender has chosen some of the words

    def accepts(self, sender: str, message: Message, expect: Expectation) -> bool:
        """Whether a message is as expected; if not, it is refused by name."""
        try:
            message.check(expect)
        except MessageError as error:
            self.refuse(sender, error)
            return False
        return True

    def remark(self, text: str) -> None:
        """Log, for the operator, something that the protocol met and handled, in a few words."""
        self.remarks.append(text)

    def measure(self, agents: str | Iterable[str], **values: Any) -> None:
        """Add figures that only the protocol knows to this round's rows: a value for one agent, or one for each.

        Where a figure is given several times in a round, its mean is what the row holds.
        """
        names = [agents] if isinstance(agents, str) else list(agents)
        for figure, given in values.items():
            each = [given] if isinstance(agents, str) else given
            self.measures += [(name, figure, float(value)) for name, value in zip(names, each, strict=True)]

    def measured(self) -> list[tuple[str, str, float]]:
        """All (agent, figure, value) of this round."""
        return self.measures

    async def _send(self, messages: Mapping[str, Message]) -> None:
        self._check_links(messages)
        await self._yield(Send(messages))

    async def _receive(self, senders: tuple[str, ...], expect: Expectation | None) -> dict[str, Message]:
        arrived: dict[str, Message] = await self._yield(Receive(senders, expect or {}))
        return arrived

    async def _swap(
        self, messages: Mapping[str, Message], senders: tuple[str, ...], expect: Expectation | None
    ) -> dict[str, Message]:
        """Send, then receive."""
        self._check_links(messages)
        arrived: dict[str, Message] = await self._yield(Send(messages), Receive(senders, expect or {}))
        return arrived

    def _check_links(self, messages: Mapping[str, Message]) -> None:
        for receiver, message in messages.items():
            if not isinstance(message, Message):
                raise RuntimeFault(
                    "What is sent must be a Message.",
                    f"'{self.name}' tried to send a {type(message).__name__} to '{receiver}'",
                    "Write Message.of(name=array, ...).",
                )
            if not self.topology.may_send(self.name, receiver):
                raise RuntimeFault(
                    "A message may only go along a link of the topology.",
                    f"'{self.name}' tried to send to '{receiver}'",
                    "Send to the hub or to a neighbour, or choose another topology.",
                )

    @types.coroutine
    def _yield(self, *effects: Effect) -> Generator[Effect, Any, Any]:
        """One effect after the other; returns the answer to the last."""
        answer = None
        for effect in effects:
            answer = yield effect
        # Other nodes may have run meanwhile and used the libraries' global generators. Every effect is a step, but
        # between effects that are yielded together nobody draws.
        name, phase, step = self._moment
        self._moment = (name, phase, int(step) + len(effects))
        seed_libraries(self.seed, *self._moment)
        return answer


class Agent(Node):
    """A learner and a private shard: samples x with labels y, or a torch `Dataset` (or `DataLoader`) of pairs as x."""

    def __init__(self, name: str, model: Any, x: Any, y: Any = None, *, test: tuple[Any, Any] | None = None) -> None:
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
        self.test: tuple[np.ndarray, np.ndarray] | None = None
        self.class_mix: np.ndarray | None = None  # how many samples of each class it holds
        self.learned = False  # whether it has been in a run
        self.diverged = False  # whether its model diverged in this round, and returned to the round's start
        self._random_items: Any = None  # a dataset whose items differ whenever they are read
        if y is None and is_dataset(x):
            x, y, self._random_items = read_dataset(x, f"agent '{name}'")
        self._data, self._test = (x, y), test

    def settle(self, classes: int) -> None:
        """Make the shard, now that the federation knows how many classes there are."""
        self.shard = Shard(*self._data, classes, self.name, self._random_items)
        if self.shard.labels is not None:
            self.class_mix = np.bincount(self.shard.labels, minlength=classes)
        if self._test is not None:
            self.test = validate_samples(*self._test, classes, f"the test data of agent '{self.name}'")

    def hello(self, about: Ability) -> Hello:
        """What it says of its data and, as far as these abilities are concerned, of its model."""
        about &= self.learner.abilities
        x = np.asarray(self._data[0])
        features = None
        if Ability.FEATURES in about:
            with suppress(Exception):  # what is wrong with the samples is told when they are checked
                features = int(self.learner.evaluated_features(x[:1]).shape[1])
        weights = Message(self.learner.weights()).layout if Ability.WEIGHTS in about else None
        return Hello(len(x), weights, features)

    def twin(self) -> Agent:
        """An agent with the same data and an untouched copy of the model."""
        twin = Agent(self.name, copy.deepcopy(self.learner), *self._data, test=self._test)
        twin._random_items = self._random_items
        return twin

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

    async def ask_hub(
        self, message: Message | None = None, /, *, expect: Expectation | None = None, **items: Any
    ) -> Message | None:
        """Send to the hub and wait for its reply; None if there is none, it is empty, or not as expected."""
        reply = (await self._swap({HUB: message or Message.of(**items)}, (HUB,), None)).get(HUB)
        return reply if reply and self.accepts(HUB, reply, expect or {}) else None

    async def exchange(
        self, message: Message | None = None, /, *, expect: Expectation | None = None, **items: Any
    ) -> dict[str, Message]:
        """Send to all neighbours and return what all sources sent, by name, in the order of the roster."""
        message = message or Message.of(**items)
        return await self._swap(dict.fromkeys(self.neighbours, message), self.sources, expect)

    def mix(self, own: np.ndarray, heard: Mapping[str, np.ndarray]) -> np.ndarray:
        """Own and sources' values with the topology's weights; who is missing leaves its weight to me."""
        weights = self.topology.weights(self.name)
        mixed = (1.0 - sum([weights[name] for name in heard])) * own
        for name, value in heard.items():
            part = weights[name] * value
            if part.dtype == mixed.dtype and part.shape == mixed.shape:
                mixed += part  # the same numbers as below, without fresh memory
            else:
                mixed = mixed + part
        return mixed.astype(own.dtype, copy=False)

    def open_model(self, sender: str, message: Message) -> Any:
        """The model in a message, ready to predict on one's own data; None, and a refusal, if it is invalid."""
        try:
            # A module is initialised before its weights are loaded: that must not change what is drawn next.
            with torch.random.fork_rng(devices=()):
                model = open_model(message, self.shard.x.shape[1:], self.shard.classes, len(self.shard.x))
            # A received model predicts once, at once: where that fails, the message is refused by name.
            return model if sender == self.name else ReceivedModel(model, self.shard.x, self.shard.classes)
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
            return checked_predictions(model, x, self.shard.classes)
        except MessageError as error:
            self.unreported.append((sender, printable(str(error), _REASON)))
            return np.zeros((len(x), self.shard.classes))

    def dump(self) -> dict[str, Any]:
        """What lives across rounds: the learner and the state."""
        return {"learner": self.learner.state(), **super().dump()}

    def resume(self, saved: dict[str, Any]) -> None:
        """Return to what was dumped."""
        self.learner.restore(saved["learner"])
        super().resume(saved)


class Hub(Node):
    """The centre of a star: it has no data and no model of its own."""

    def __init__(self) -> None:
        super().__init__(HUB)
        self.hellos: dict[str, Hello] = {}  # what each agent has said of itself; set by the runtime

    async def gather(self, *, expect: Expectation | Callable[[str], Expectation] | None = None) -> dict[str, Message]:
        """One message of every agent that is present, by name; `expect`: equal for all, or a function of the name."""
        if not callable(expect):
            return await self._receive(self.present, expect)
        arrived = await self._receive(self.present, None)
        return {name: message for name, message in arrived.items() if self.accepts(name, message, expect(name))}

    async def scatter(self, messages: Mapping[str, Message]) -> None:
        """To each agent its own message."""
        await self._send(messages)

    async def broadcast(self, message: Message | None = None, /, **items: Any) -> None:
        """To every agent that is present the same message."""
        message = message or Message.of(**items)
        await self._send(dict.fromkeys(self.present, message))

    def measured(self) -> list[tuple[str, str, float]]:
        """One value for each agent and figure: the mean over the steps of this round."""
        given: dict[tuple[str, str], list[float]] = {}
        for agent, figure, value in self.measures:
            given.setdefault((agent, figure), []).append(value)
        return [(agent, figure, sum(values) / len(values)) for (agent, figure), values in given.items()]

    async def skip(self) -> None:
        """Nobody was heard: reply to everyone with an empty message, so that `ask_hub` returns None."""
        await self.broadcast(Message())


def count_classes(y: Any) -> int:
    """Classes that labels call for: the largest label + 1, or the columns of real-valued targets."""
    labels = np.asarray(y)
    if labels.ndim == 2:
        return int(labels.shape[1])
    numeric = labels.dtype.kind in "biuf" and labels.size > 0 and np.isfinite(labels).all()
    return int(labels.max()) + 1 if numeric else 0


__all__ = ["Agent", "Hello", "Hub", "Learner", "Node", "Receive", "Send", "count_classes"]
