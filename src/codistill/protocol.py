"""A protocol: one algorithm of one paper, written as what an agent and the hub do in a round.

A protocol awaits communication and never performs it, so the same file runs in a simulation, in worker
processes and over a network, with the same result to the bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from codistill.core.errors import LearnerError, MessageError, ProtocolError, RecipeError, nearest, show_line
from codistill.core.rng import generator
from codistill.core.settings import Settings, check_settings, replaced, setting
from codistill.learners.ability import Ability
from codistill.nodes.agent import Agent, Hub
from codistill.nodes.node import Node, shown, without_types
from codistill.nodes.record import record_of
from codistill.topology import HUB, KINDS
from codistill.wire.message import Message

# All that a protocol's file needs, in one place.
__all__ = [
    "HUB", "Ability", "Agent", "Hub", "LearnerError", "Message", "MessageError", "Protocol", "RecipeError", "generator",
    "nearest", "setting",
]  # fmt: skip

P = TypeVar("P", bound="Protocol")


@dataclass(frozen=True, kw_only=True)
class Protocol(Settings):
    """Base of all protocols: a frozen dataclass of hyper-parameters and a few hooks.

    What `Agent(releases=...)` means is the same for all of them: `me.shard` holds only samples that are released, so
    nothing that a protocol computes or sends depends on one that is withheld.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    exchanges: ClassVar[str] = ""  # what is sent, human-readable
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
        _check_hooks(type(self))  # type: ignore[arg-type]  # mypy sees the __hash__ of instances only
        check_settings(self, self.name)

    @classmethod
    def needs_same_inputs(cls) -> bool:
        """Whether all agents need the same columns: where weights or models travel, or data are pooled.

        Otherwise each agent may have columns of its own, since what travels does not depend on them.
        """
        return bool(cls.needs & (Ability.WEIGHTS | Ability.PORTABLE)) or cls.pools_data

    @classmethod
    def why_same_inputs(cls) -> str:
        """Why it needs them, for an error."""
        shared = "data are pooled" if cls.pools_data else "weights" if Ability.WEIGHTS in cls.needs else "models"
        return f"{cls.name} needs the same columns everywhere, since {shared}{'' if cls.pools_data else ' are shared'}"

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

    def common(self, me: Agent) -> dict[str, np.ndarray]:
        """With `take_over`: the weights that all agents share, as this agent has them now."""
        return me.learner.weights()

    def take_over(self, me: Agent, weights: Message | None, t: int) -> None:
        """Load the weights that were common after round t; None: they were lost.

        A protocol has it if its agents share weights, which the hub sends by `parts.to_groups`. Then, where only a
        share of the agents takes part in each round, one that missed some gets the newest before its next round.
        """

    def message_bytes(self, classes: int, public: int) -> int | None:
        """Bytes of the arrays of its largest message, for a number of classes and of public samples.

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
        mine = {field.name for field in dataclasses.fields(self)}
        return other(**{f.name: getattr(self, f.name) for f in dataclasses.fields(other) if f.name in mine})


# --- The hooks: what they must be, and how a runtime calls them.

# How each is called; those of the first line are coroutines.
_AWAITED = {"begin": "self, me", "round": "self, me, t", "hub": "self, me, t"}
_CALLED = {
    "serve": "self, me, sender, message", "predict": "self, me, x", "common": "self, me",
    "take_over": "self, me, weights, t", "check": "self, agents", "alone": "self",
}  # fmt: skip


@cache
def _check_hooks(cls: type[Protocol]) -> None:
    """A protocol is a dataclass whose hooks a runtime can call."""
    if cls is Protocol:
        return
    declared = [name for name, given in vars(cls).items() if isinstance(given, dataclasses.Field)]
    if "__dataclass_fields__" not in vars(cls) and declared:
        file = getattr(sys.modules.get(cls.__module__), "__file__", None) or f"the module '{cls.__module__}'"
        raise ProtocolError(
            f"{cls.__name__} must be a frozen dataclass, so that its settings are checked.",
            f"the setting '{declared[0]}' of a plain class, in {file}",
            "Write @dataclass(frozen=True, kw_only=True) above the class.",
        )
    for name in (*_AWAITED, *_CALLED):
        hook = inspect.getattr_static(cls, name)
        if hook is not inspect.getattr_static(Protocol, name):
            _check_hook(cls, name, hook)
    misspelt = [
        name for name, given in vars(cls).items() if inspect.iscoroutinefunction(given) and name not in _AWAITED
    ]
    if cls.round is Protocol.round and misspelt:
        raise ProtocolError(
            f"{cls.__name__} needs a method 'round'.",
            f"no 'round', but '{misspelt[0]}', at {show_line(getattr(cls, misspelt[0]).__code__)}",
            "Write: async def round(self, me, t).",
        )
    if not isinstance(cls.needs, Ability):
        raise ProtocolError(
            f"{cls.__name__}.needs must be an ability.", shown(cls.needs), "Example: needs = cd.Ability.GRADIENTS."
        )
    if cls.topology not in KINDS:
        raise ProtocolError(
            f"{cls.__name__}.topology must be one of {', '.join(KINDS)}.",
            shown(cls.topology),
            f"{nearest(str(cls.topology), KINDS)} Any other graph is given to the federation: topology=...",
        )


def _check_hook(cls: type[Any], name: str, hook: Any) -> None:
    is_awaited, parameters = name in _AWAITED, {**_AWAITED, **_CALLED}[name]
    form = f"{'async ' if is_awaited else ''}def {name}({parameters})"
    if not inspect.isfunction(hook):
        raise ProtocolError(f"{name} of {cls.__name__} must be a method.", shown(hook), f"Write: {form}.")
    must, signature = f"{name} of {cls.__name__} must be: {form}.", inspect.signature(hook)
    place = show_line(hook.__code__)
    if inspect.isasyncgenfunction(hook) or inspect.isgeneratorfunction(hook):
        raise ProtocolError(must, f"a 'yield' in it, at {place}", "Write 'await me. ...' instead of 'yield'.")
    is_async = inspect.iscoroutinefunction(hook)
    try:
        signature.bind(*parameters.split(", "))
        fits = is_async == is_awaited
    except TypeError:
        fits = False
    if not fits:
        given = f"{'async ' if is_async else ''}def {name}{without_types(signature.parameters.values())}"
        raise ProtocolError(must, f"{given}, at {place}", f"Write: {form}.")


async def run_hook(me: Node, hook: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> None:
    """Call a hook for a node; whatever the protocol leaves undone or returns is an error with its line."""
    returned = await hook(me, *arguments)
    record_of(me).check_awaited()
    if returned is not None:
        name, code = hook.__name__, getattr(hook, "__code__", None)
        where = "" if code is None else f", from {show_line(code)}"
        raise ProtocolError(
            f"{name} must return nothing.",
            f"{shown(returned)}{where}",
            "Keep it in me.state, or send it; me.measure and me.remark are for reports.",
        )


def run_serve(protocol: Protocol, me: Hub, sender: str, message: Message) -> Mapping[str, Any] | None:
    """The relay's answer to one message; anything else is an error with its line."""
    answer = protocol.serve(me, sender, message)
    if answer is not None and not isinstance(answer, Mapping):
        raise ProtocolError(
            "serve must return a message, a table of items, or None.",
            f"{shown(answer)}, from {show_line(type(protocol).serve.__code__)}",
            "Write: return cd.Message.of(name=value).",
        )
    return answer


def own_files(protocol: Protocol) -> frozenset[str]:
    """The files that a protocol's own classes are written in."""
    classes = [cls for cls in type(protocol).__mro__ if not cls.__module__.startswith(("codistill.", "builtins"))]
    functions = [given for cls in classes for given in vars(cls).values() if inspect.isfunction(given)]
    return frozenset(function.__code__.co_filename for function in functions) - {"<string>"}


def code_digest(kind: type[Any]) -> str:
    """Of the file that a class stands in; of its name where there is none."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    content = Path(path).read_bytes() if path else kind.__qualname__.encode()
    return hashlib.sha256(content).hexdigest()
