"""What an agent and the hub have in common: state across rounds, randomness, and how their verbs talk.

A verb does not communicate. It yields an effect (`Send`, `Receive`) to whoever drives the coroutine, and
is resumed with the answer; see `codistill.runtimes`.
"""

from __future__ import annotations

import types
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.data.shard import PublicData
from codistill.effects import Effect, Receive, Send
from codistill.errors import MessageError, nearest
from codistill.message import Expectation, Message
from codistill.randomness import Key, generator, seed_libraries
from codistill.text import printable
from codistill.topology import HUB, Topology
from codistill.verbs import HasCalls, as_expectation, as_measures, as_message, misuse, plain_verb, shown, verb
from codistill.wire.compression import Residue

_REASON = 500  # characters that are kept of why a message was refused


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
        self.time = 0.0  # the number of the round; in a run without rounds, seconds since its start
        self.asynchronous = False  # whether it is a run without rounds
        self.sampled = False  # whether only a share of the agents takes part in a round (participation below 1)
        self.work = 0  # batches of computing since it was last asked; counted by the guard around its learner
        self.steps = 0  # gradient steps of this round; counted by the same guard
        self.exchanges = 0  # of this round: how often it waited for messages of others
        self._heard: set[str] = set()  # whom it has waited for since it last sent something
        self.rejected: list[tuple[str, str]] = []  # (sender, reason) of messages refused this round
        self.unreported: list[tuple[str, str]] = []  # the same, for the report of the next round
        self.remarks: list[str] = []  # for the operator, of this round
        self.measures: list[tuple[str, str, float]] = []  # (agent, name, value) of this round
        self._moment: tuple[Key, ...] = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}'>"

    def start(self, phase: Key, present: tuple[str, ...]) -> None:
        """Enter a round (or "begin"): from here on all randomness derives from (seed, name, phase)."""
        self.remarks, self.measures, self.calls = [], [], []
        self.steps, self.exchanges, self._heard = 0, 0, set()
        self.rejected, self.unreported = self.unreported, []
        self.enter(phase, present, float(phase) if isinstance(phase, int) else 0.0)

    def enter(self, phase: Key, present: tuple[str, ...], time: float) -> None:
        """The same, and what is to be reported stays: a relay of a run without rounds, before each message."""
        self.present, self._moment, self.time = present, (self.name, phase, 0), time
        seed_libraries(self.seed, *self._moment)

    def computing(self) -> AbstractContextManager[Any]:
        """Entered while it computes: an agent computes on the device of its model."""
        return nullcontext()

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
            raise AttributeError(self._no_attribute(name))

    def _no_attribute(self, name: str) -> str:
        """Why it does not have an attribute, or which one was meant."""
        known = [each for each in {*dir(type(self)), *vars(self)} if each[0] != "_"]
        return f"'me' has no '{name}'. {nearest(name, known)}"

    def dump(self) -> dict[str, Any]:
        """What lives across rounds."""
        return {"state": self.state, **({"residue": self.residue} if self.residue else {})}

    def resume(self, saved: dict[str, Any]) -> None:
        """Return to what was dumped."""
        self.state, self.memo, self.residue = saved["state"], {}, saved.get("residue", {})

    def refuse(self, sender: str, error: MessageError) -> None:
        """Record a message that cannot be used; the round continues without it."""
        self.rejected.append((sender, reason_of(error)))

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
        self, messages: Mapping[str, Message], senders: tuple[str, ...], expect: Expectation | None, asks: bool = False
    ) -> dict[str, Message]:
        """Send, then receive."""
        self._check_links(messages)
        arrived: dict[str, Message] = await self._yield(Send(messages, asks), Receive(senders, as_expectation(expect)))
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
            self._count(effect)
            answer = yield effect
        # Other nodes may have run meanwhile and used the libraries' global generators. Every effect is a step, but
        # between effects that are yielded together nobody draws.
        name, phase, step = self._moment
        self._moment = (name, phase, int(step) + len(effects))
        seed_libraries(self.seed, *self._moment)
        return answer

    def _count(self, effect: Effect) -> None:
        """Count exchanges: receiving from several senders, one after the other, is waiting once for all of them."""
        if isinstance(effect, Send):
            self._heard = set()
            return
        here = set(effect.senders)
        if len(self.present) < len(self.roster):  # nobody waits for those who are absent
            here &= {*self.present, HUB}
        if here and (not self._heard or self._heard & here):
            self.exchanges += 1
            self._heard = set()
        self._heard |= here


def reason_of(error: MessageError) -> str:
    """Why a message was refused, in a few words: its sender has chosen some of them."""
    return printable(str(error), _REASON)
