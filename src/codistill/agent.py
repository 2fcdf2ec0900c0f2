"""Agents, as a protocol sees them: what they hold, and the only verbs by which they talk.

All that a protocol's coroutines work with can be imported from here: agents, the hub, and the effects of their verbs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from codistill.arguments import checked_arguments
from codistill.base_node import Node, reason_of
from codistill.data.labels import CLASSIFICATION, LabelEncoding, check_task
from codistill.data.named_columns import Given, Names, as_frame, check_same, column_names, places, unclear_order, width
from codistill.data.named_options import Naming, check_positions
from codistill.data.preparation import Preparation
from codistill.data.shard import Shard, released
from codistill.data.torch_datasets import is_dataset, read_dataset
from codistill.data.validation import check_shape, encoded_samples, plain_samples
from codistill.effects import Receive, Send
from codistill.errors import MessageError, RecipeError
from codistill.hub import Hello, Hub
from codistill.learners import Learner, as_learner
from codistill.learners.ability import Ability, AnyLearner
from codistill.learners.portable import ReceivedModel, checked_predictions, open_model
from codistill.message import Expectation, Message
from codistill.topology import HUB
from codistill.verbs import as_expectation, as_message, misuse, plain_verb, shown, verb

__all__ = ["Agent", "Hello", "Hub", "Learner", "Node", "Receive", "Send"]


class Agent(Node):
    """A learner and a private shard: samples x with labels y, or a torch `Dataset` (or `DataLoader`) of pairs as x.

    `releases`: a boolean for each sample. One that is False is withheld: it takes no part in a run, whatever the
    protocol, so that nothing which leaves the agent depends on it.
    """

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
        check_task(task)
        self.task = task  # what its labels are, as far as its owner says so: "classification" or "regression"
        # Typed by all abilities, for protocols; `learner.abilities` says which of them this one has.
        self.learner: AnyLearner = cast(AnyLearner, as_learner(model, name))
        self.shard: Shard = None  # type: ignore[assignment]  # made when the number of classes is known
        self.test: tuple[np.ndarray, np.ndarray] | None = None
        self.class_mix: np.ndarray | None = None  # how many samples of each class it holds
        self.choices = dict(choices or {})  # settings of the protocol that it chooses for itself
        self.learned = False  # whether it has been in a run
        self.safeguard: Any = None  # set by the runtime: an AgentSafeguard, where its answers have one
        self.diverged = False  # whether its model diverged in this round, and returned to the round's start
        self.recall: Callable[[], None] | None = None  # brings back its state, while that is not in memory
        self._random_items: Any = None  # a dataset whose items differ whenever they are read
        if y is None and is_dataset(x):
            x, y, self._random_items = read_dataset(x, f"agent '{name}'")
        frame = as_frame(x)
        self.column_names = column_names(x, f"the samples x of agent '{name}'")  # in their order; empty: unknown
        self._has_names = bool(self.column_names)  # of its own, from a data frame
        self._dtypes = dict(zip(self.column_names, frame.dtypes, strict=True)) if self._has_names else {}
        self._data, self._test = (plain_samples(x, f"the samples x of agent '{name}'"), y), test
        if releases is not None:
            self._data, self._random_items = released(releases, *self._data, self._random_items, name)
        self.naming = Naming(f"agent '{name}'")  # what columns and classes are called, known when it is settled
        self._named: Naming | None = None  # what columns and classes are called, if this is a copy with numbered ones
        self._prepare = prepare
        self.prepared = Preparation(prepare, takes_missing=self.learner.takes_missing, owner=f"agent '{name}'")
        self.shape: tuple[int, ...] = ()  # of one sample, before it is prepared

    def given_columns(self) -> Given:
        """What is known of the columns of its samples."""
        return Given(f"agent '{self.name}'", self.column_names if self._has_names else (), width(self._data[0]))

    def order_columns(self, wanted: Names) -> None:
        """Bring the columns of its samples into the order that all agents share."""
        x, y = self._data
        owner = f"agent '{self.name}'"
        if self._has_names:
            check_same(self.column_names, wanted, owner, "those of the other samples of the federation")
        if self._has_names and self.column_names != wanted:
            if self._test is not None and as_frame(self._test[0]) is None:
                raise unclear_order(f"the test data of {owner}", owner)
            check_positions([getattr(self.learner, "estimator", None), self._prepare], owner, wanted)
            self._data = np.ascontiguousarray(x[:, places(self.column_names, wanted)]), y
        self.column_names = wanted if width(x) == len(wanted) else ()

    def settle(self, classes: int, encoding: LabelEncoding | None = None, columns: Names = ()) -> None:
        """Make the shard, now that the federation knows which classes there are, and in which order the columns are."""
        encoding = encoding or LabelEncoding(CLASSIFICATION, classes)
        self.order_columns(columns or (self.column_names if self._has_names else ()))
        x, y = self._data
        self.shard = Shard(x, encoding.encode(y, f"agent '{self.name}'"), classes, self.name, self._random_items)
        self.shape = self.shard.x.shape[1:]
        counted = encoding.classes if encoding.task == CLASSIFICATION else 0
        own = Naming(f"agent '{self.name}'", self.column_names, self._dtypes, counted, encoding.names)
        self.naming = self._named or own
        self.shard.x = self.prepared.fit(self.shard.x, self.naming)
        if not self.learner.ready:
            prepared = self.prepared.transformer is not None  # then it has made other columns of them
            self.learner.take_names(replace(self.naming, columns=()) if prepared else self.naming, self.shard.x)
        if self.shard.labels is not None:
            self.class_mix = np.bincount(self.shard.labels, minlength=classes)
        self.settle_test(encoding)

    def settle_test(self, encoding: LabelEncoding) -> None:
        """Check its own test data, and prepare them as its training samples."""
        if self._test is not None:
            owner = f"the test data of agent '{self.name}'"
            x, y = encoded_samples(*self._test, encoding, owner, self.column_names)
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
        if Ability.WEIGHTS not in about:
            return Hello(len(x), None, features)
        weights, norms = self.learner.weights(), self.learner.batch_norm
        body = {name: array for name, array in weights.items() if name not in norms}
        return Hello(len(x), Message(weights).layout, features, Message(body).layout)

    def twin(self) -> Agent:
        """An agent with the same data and an untouched copy of the model."""
        if self.recall is not None:
            self.recall()
        model = copy.deepcopy(self.learner)
        twin = Agent(
            self.name, model, *self._data, test=self._test, task=self.task, prepare=self._prepare,
            choices=self.choices,
        )  # fmt: skip
        twin._random_items = self._random_items
        twin.column_names, twin._has_names, twin._dtypes = self.column_names, self._has_names, self._dtypes
        twin._named = self._named
        return twin

    def named_as(self, other: Agent) -> Agent:
        """The same agent, made of the unnamed samples and numbered labels of another: it uses their names."""
        self._named = other.naming
        return self

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
        reply = (await self._swap({HUB: as_message("ask_hub", message, items)}, (HUB,), None, asks=True)).get(HUB)
        return reply if reply and self.accepts(HUB, reply, wanted) else None

    @verb
    async def catch_up(
        self, message: Message | Mapping[str, Any] | None = None, /, *, expect: Expectation | None = None, **items: Any
    ) -> Message | None:
        """As `ask_hub`, for what it missed in an earlier round: counted there, it is not an exchange of this one."""
        counted = self.exchanges
        reply = await self.ask_hub(as_message("catch_up", message, items), expect=expect)
        self.exchanges = counted
        return reply

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
            self.unreported.append((sender, reason_of(error)))
            return np.zeros((len(x), self.shard.classes))

    def join(self, federation_samples: int) -> None:
        """Tell its models how many private samples the federation holds in all."""
        self.learner.join(federation_samples)
        if self.safeguard is not None:
            self.safeguard.join(federation_samples)

    def place(self) -> None:
        """Move its models to their device, in the process that trains them."""
        self.learner.place()
        if self.safeguard is not None:
            self.safeguard.place()

    def computing(self) -> AbstractContextManager[Any]:
        """Entered while it computes: then torch computes on the device of its model."""
        return self.learner.computing()

    def dump(self) -> dict[str, Any]:
        """What lives across rounds: the learner and the state, and those of its own model under a safeguard."""
        guarded = {} if self.safeguard is None else {"safeguard": self.safeguard.dump()}
        return {"learner": self.learner.state(), **super().dump(), **guarded}

    def resume(self, saved: dict[str, Any]) -> None:
        """Return to what was dumped."""
        self.recall = None
        self.learner.restore(saved["learner"])
        super().resume(saved)
        if self.safeguard is not None:
            self.safeguard.resume(saved["safeguard"])

    def set_aside(self) -> None:
        """Free the memory of its model and state; `resume` brings back what was dumped."""
        self.learner.set_aside()
        self.state, self.memo, self.residue = {}, {}, {}
        if self.shard is not None:
            self.shard.set_aside()
        if self.safeguard is not None:
            self.safeguard.set_aside()

    def _no_attribute(self, name: str) -> str:
        if name in {*vars(Hub), "hellos"}:
            return f"An agent has no '{name}', only the hub has: an agent talks by ask_hub, exchange, send and receive."
        return super()._no_attribute(name)
