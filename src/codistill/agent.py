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
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from codistill.arguments import checked_arguments
from codistill.data.labels import CLASSIFICATION, LabelEncoding, check_task
from codistill.data.preparation import Preparation
from codistill.data.shard import PublicData, Shard
from codistill.data.torch_datasets import is_dataset, read_dataset
from codistill.data.validation import check_shape, encoded_samples, named_columns, plain_samples
from codistill.errors import MessageError, RecipeError, nearest
from codistill.learners import Learner, as_learner
from codistill.learners.ability import Ability, AnyLearner
from codistill.learners.portable import ReceivedModel, checked_predictions, open_model
from codistill.message import Expectation, Message
from codistill.randomness import Key, generator, seed_libraries
from codistill.text import printable
from codistill.topology import HUB, Topology
from codistill.verbs import (
    HasCalls,
    as_expectation,
    as_measures,
    as_message,
    as_messages,
    misuse,
    plain_verb,
    shown,
    verb,
)
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


class Node(HasCalls):
    """What an agent and the hub have in common: a name, state across rounds, randomness, and messages."""

    def __init__(self, name: str) -> None:
        super().__init__()
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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}'>"

    def start(self, phase: Key, present: tuple[str, ...]) -> None:
        """Enter a round (or "begin"): from here on all randomness derives from (seed, name, phase)."""
        self.present, self.remarks, self.measures, self.calls = present, [], [], []
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

    @verb
    async def send(self, to: str, message: Message | Mapping[str, Any] | None = None, /, **items: Any) -> None:
        """Send named arrays and plain values, or a ready message."""
        await self._send({to: as_message("send", message, items)})

    @verb
    async def receive(self, sender: str, *, expect: Expectation | None = None) -> Message | None:
        """The next message of a sender; None if none arrives in this round."""
        self._check_name(sender, "A sender")
        if not self.topology.may_send(sender, self.name):
            raise misuse(
                "A message may only come along a link of the topology.",
                f"'{self.name}' waits for '{sender}', who has no link to it",
                "Receive from the hub or from a neighbour, or choose another topology.",
            )
        return (await self._receive((sender,), expect)).get(sender)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say what there is instead; called only for what there is not."""
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(_no_attribute(self, name))

    def dump(self) -> dict[str, Any]:
        """What lives across rounds."""
        return {"state": self.state, **({"residue": self.residue} if self.residue else {})}

    def resume(self, saved: dict[str, Any]) -> None:
        """Return to what was dumped."""
        self.state, self.memo, self.residue = saved["state"], {}, saved.get("residue", {})

    def refuse(self, sender: str, error: MessageError) -> None:
        """Record a message that cannot be used; the round continues without it."""
        self.rejected.append((sender, printable(str(error), _REASON)))  # the sender has chosen some of the words

    @plain_verb
    def accepts(self, sender: str, message: Message, expect: Expectation) -> bool:
        """Whether a message is as expected; if not, it is refused by name."""
        try:
            message.check(expect)
        except MessageError as error:
            self.refuse(sender, error)
            return False
        return True

    @plain_verb
    def remark(self, text: str) -> None:
        """Log, for the operator, something that the protocol met and handled, in a few words."""
        if not isinstance(text, str):
            raise misuse("me.remark takes a text.", shown(text), 'Write me.remark(f"...").')
        self.remarks.append(text)

    @plain_verb
    def measure(self, agents: str | Iterable[str], **values: Any) -> None:
        """Add figures that only the protocol knows to this round's rows: a value for one agent, or one for each.

        Where a figure is given several times in a round, its mean is what the row holds.
        """
        self.measures += as_measures(agents, values, self.roster)

    def measured(self) -> list[tuple[str, str, float]]:
        """All (agent, figure, value) of this round."""
        return self.measures

    async def _send(self, messages: Mapping[str, Message]) -> None:
        self._check_links(messages)
        await self._yield(Send(messages))

    async def _receive(self, senders: tuple[str, ...], expect: Expectation | None) -> dict[str, Message]:
        arrived: dict[str, Message] = await self._yield(Receive(senders, as_expectation(expect)))
        return arrived

    async def _swap(
        self, messages: Mapping[str, Message], senders: tuple[str, ...], expect: Expectation | None
    ) -> dict[str, Message]:
        """Send, then receive."""
        self._check_links(messages)
        arrived: dict[str, Message] = await self._yield(Send(messages), Receive(senders, as_expectation(expect)))
        return arrived

    def _check_links(self, messages: Mapping[str, Message]) -> None:
        strangers = messages.keys() - {*self.roster, HUB} if self.name == HUB else set()  # the hub has no list of links
        for name in strangers:
            self._check_name(name, "A receiver")
        if HUB in messages and self._moment[1:2] == ("begin",):
            raise misuse(
                "The hub takes part from the first round on.", f"'{self.name}' asks it in begin", "Ask it in round."
            )
        for receiver in messages:
            if not self.topology.may_send(self.name, receiver):
                self._check_name(receiver, "A receiver")
                raise misuse(
                    "A message may only go along a link of the topology.",
                    f"'{self.name}' tried to send to '{receiver}'",
                    "Send to the hub or to a neighbour, or choose another topology.",
                )

    def _check_name(self, name: Any, what: str) -> None:
        known = (*self.roster, HUB)
        if not isinstance(name, str) or name not in known:
            raise misuse(f"{what} must be the name of an agent, or 'hub'.", shown(name), nearest(str(name), known))

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

    @checked_arguments
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
    ) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[\w][\w .+-]{0,63}", name) or name == HUB:
            raise RecipeError(
                "An agent's name must be 1 to 64 letters, digits, spaces or any of _ . + -, and not 'hub'.",
                repr(name),
                "Choose another name.",
            )
        super().__init__(name)
        check_task(task)
        self.task = task  # what its labels are, as far as its owner says so: "classification" or "regression"
        # Typed by all abilities, for protocols; `learner.abilities` says which of them this one has.
        self.learner: AnyLearner = cast(AnyLearner, as_learner(model, name))
        self.shard: Shard = None  # type: ignore[assignment]  # made when the number of classes is known
        self.test: tuple[np.ndarray, np.ndarray] | None = None
        self.class_mix: np.ndarray | None = None  # how many samples of each class it holds
        self.learned = False  # whether it has been in a run
        self.safeguard: Any = None  # set by the runtime: an AgentSafeguard, where its answers have one
        self.diverged = False  # whether its model diverged in this round, and returned to the round's start
        self._random_items: Any = None  # a dataset whose items differ whenever they are read
        if y is None and is_dataset(x):
            x, y, self._random_items = read_dataset(x, f"agent '{name}'")
        self.column_names = named_columns(x)  # of samples in a data frame; empty: unknown
        self._data, self._test = (plain_samples(x, f"the samples x of agent '{name}'"), y), test
        self._prepare = prepare
        self.prepared = Preparation(prepare, takes_missing=self.learner.takes_missing, owner=f"agent '{name}'")
        self.shape: tuple[int, ...] = ()  # of one sample, before it is prepared

    def settle(self, classes: int, encoding: LabelEncoding | None = None) -> None:
        """Make the shard, now that the federation knows which classes there are."""
        encoding = encoding or LabelEncoding(CLASSIFICATION, classes)
        x, y = self._data
        self.shard = Shard(x, encoding.encode(y, f"agent '{self.name}'"), classes, self.name, self._random_items)
        self.shape = self.shard.x.shape[1:]
        self.shard.x = self.prepared.fit(self.shard.x)
        if self.shard.labels is not None:
            self.class_mix = np.bincount(self.shard.labels, minlength=classes)
        self.settle_test(encoding)

    def settle_test(self, encoding: LabelEncoding) -> None:
        """Check its own test data, and prepare them as its training samples."""
        if self._test is not None:
            x, y = encoded_samples(*self._test, encoding, f"the test data of agent '{self.name}'")
            check_shape(x, self.shape, f"the test data of agent '{self.name}'", f"agent '{self.name}'")
            self.test = self.prepared(x), y

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
        model = copy.deepcopy(self.learner)
        twin = Agent(self.name, model, *self._data, test=self._test, task=self.task, prepare=self._prepare)
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

    @verb
    async def ask_hub(
        self, message: Message | Mapping[str, Any] | None = None, /, *, expect: Expectation | None = None, **items: Any
    ) -> Message | None:
        """Send to the hub and wait for its reply; None if there is none, it is empty, or not as expected."""
        wanted = as_expectation(expect)
        reply = (await self._swap({HUB: as_message("ask_hub", message, items)}, (HUB,), None)).get(HUB)
        return reply if reply and self.accepts(HUB, reply, wanted) else None

    @verb
    async def exchange(
        self, message: Message | Mapping[str, Any] | None = None, /, *, expect: Expectation | None = None, **items: Any
    ) -> dict[str, Message]:
        """Send to all neighbours and return what all sources sent, by name, in the order of the roster."""
        sent = as_message("exchange", message, items)
        return await self._swap(dict.fromkeys(self.neighbours, sent), self.sources, expect)

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
            return ReceivedModel(model, self.shard.x, self.shard.classes, self.prepared.complete)
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
            return checked_predictions(model, x, self.shard.classes, self.prepared.complete)
        except MessageError as error:
            self.unreported.append((sender, printable(str(error), _REASON)))
            return np.zeros((len(x), self.shard.classes))

    def join(self, federation_samples: int) -> None:
        """Tell its models how many private samples the federation holds in all."""
        self.learner.join(federation_samples)
        if self.safeguard is not None:
            self.safeguard.join(federation_samples)

    def dump(self) -> dict[str, Any]:
        """What lives across rounds: the learner and the state, and those of its own model under a safeguard."""
        guarded = {} if self.safeguard is None else {"safeguard": self.safeguard.dump()}
        return {"learner": self.learner.state(), **super().dump(), **guarded}

    def resume(self, saved: dict[str, Any]) -> None:
        """Return to what was dumped."""
        self.learner.restore(saved["learner"])
        super().resume(saved)
        if self.safeguard is not None:
            self.safeguard.resume(saved["safeguard"])


class Hub(Node):
    """The centre of a star: it has no data and no model of its own."""

    def __init__(self) -> None:
        super().__init__(HUB)
        self.hellos: dict[str, Hello] = {}  # what each agent has said of itself; set by the runtime

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


def _no_attribute(node: Node, name: str) -> str:
    """Why a node does not have an attribute, or which one was meant."""
    if isinstance(node, Hub) and name in {*vars(Agent), "learner", "shard"}:
        return f"The hub has no '{name}': it has no data and no model, and talks by gather, broadcast and scatter."
    if isinstance(node, Agent) and name in {*vars(Hub), "hellos"}:
        return f"An agent has no '{name}', only the hub has: an agent talks by ask_hub, exchange, send and receive."
    return (
        f"'me' has no '{name}'. {nearest(name, [each for each in {*dir(type(node)), *vars(node)} if each[0] != '_'])}"
    )


__all__ = ["Agent", "Hello", "Hub", "Learner", "Node", "Receive", "Send"]
