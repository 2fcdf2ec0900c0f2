"""A protocol: one algorithm of one paper, written as what an agent and the hub do in a round.

A protocol awaits communication and never performs it, so the same file runs in a simulation, in worker
processes and over a network, with the same result to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from codistill.agent import Agent
from codistill.errors import LearnerError, MessageError
from codistill.hooks import check_hooks, run_serve
from codistill.hub import Hub
from codistill.learners.ability import Ability
from codistill.message import Message
from codistill.settings import Settings, check_settings, replaced, setting
from codistill.topology import HUB

# All that a protocol's file needs, in one place.
__all__ = ["HUB", "Ability", "Agent", "Hub", "LearnerError", "Message", "MessageError", "Protocol", "setting"]

P = TypeVar("P", bound="Protocol")


@dataclass(frozen=True, kw_only=True)
class Protocol(Settings):
    """Base of all protocols: a frozen dataclass of hyper-parameters and at most five hooks.

    What `Agent(releases=...)` means is the same for all of them: `me.shard` holds only samples that are released, so
    nothing that a protocol computes or sends depends on one that is withheld.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    exchanges: ClassVar[str] = ""  # what is sent, for a person
    needs: ClassVar[Ability] = Ability.PREDICT  # checked before round 0
    topology: ClassVar[str] = "star"  # star, complete, ring or silent, unless the federation has its own
    hub_is_optional: ClassVar[bool] = False  # a star by default, but neighbours can do without the hub
    needs_public: ClassVar[bool] = False
    pools_data: ClassVar[bool] = False  # a baseline that breaks the rule "data stays home"
    is_baseline: ClassVar[bool] = False  # there is nothing to compare it with
    asynchronous: ClassVar[bool] = False  # can live with stale knowledge, so it can run without rounds
    chosen_by_agents: ClassVar[tuple[str, ...]] = ()  # settings that each agent may choose for itself
    predicts_with: ClassVar[tuple[str, ...] | None] = None  # entries of `me.state` that `predict` reads; unset: all

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.name or cls.__name__.lower()

    def __post_init__(self) -> None:
        check_hooks(type(self), Protocol)
        check_settings(self, self.name)

    async def begin(self, me: Agent) -> None:
        """Once, before round 0."""

    async def round(self, me: Agent, t: int) -> None:
        """What an agent does in round t."""

    async def hub(self, me: Hub, t: int) -> None:
        """What the hub does in round t. By default it is a relay: it answers each `ask_hub` by `serve`.

        Messages are answered in the order of the roster, so the result does not depend on who is faster.
        """
        asking = list(me.present)
        while asking:
            for sender in tuple(asking):
                message = await me.receive(sender)
                if message is None:
                    asking.remove(sender)
                    continue
                answer = run_serve(self, me, sender, message)
                if answer is not None:
                    await me.send(sender, answer)

    def serve(self, me: Hub, sender: str, message: Message) -> Message | Mapping[str, Any] | None:
        """Instead of `hub`: the relay's answer to one message."""
        return None

    def predict(self, me: Agent, x: np.ndarray) -> np.ndarray:
        """How an agent predicts: (n, C) class probabilities or real values."""
        return me.learner.predict(x)

    def message_bytes(self, classes: int, public: int) -> int | None:
        """Bytes of the arrays of its largest message, for so many classes and public samples.

        None: that depends on the models, so a node between machines cannot know how much to accept.
        """
        return None

    def check(self, agents: Sequence[Agent]) -> None:
        """Before round 0: raise if these agents cannot follow this protocol."""

    def alone(self) -> Protocol | None:
        """What the same agents would do without one another; None: `alone`, with the settings that both have."""
        return None

    def chosen(self: P, choices: Mapping[str, Any]) -> P:
        """The same protocol with what an agent chooses for itself, as far as this protocol has such settings."""
        known = {field.name for field in dataclasses.fields(self)} & choices.keys()
        return replaced(self, {name: choices[name] for name in known}) if known else self

    def settings_for(self, other: type[P]) -> P:
        """Another protocol with the settings that both have."""
        common = {field.name for field in dataclasses.fields(self)} & {
            field.name for field in dataclasses.fields(other)
        }
        return other(**{name: getattr(self, name) for name in common})
