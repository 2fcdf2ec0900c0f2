"""What the engine does around every round of a protocol.

Guards around `me.learner` keep it from divergence and from targets that no model can be fitted to. Agents that missed
rounds, where only a share of them takes part in each, first get the newest weights that all share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from codistill.data.shard import cut
from codistill.learners.ability import Ability, AnyLearner
from codistill.nodes.agent import Agent, Hub, Node
from codistill.nodes.record import record_of
from codistill.protocol import Protocol, run_hook
from codistill.protocols.parts.weights import kind_of
from codistill.wire.message import Message

if TYPE_CHECKING:
    from codistill.learners.ability import LossOfTwo

# Outputs before the softmax of a model in use are below a hundred or so, and so are its losses. Far beyond, the
# squares of their gradients, which Adam keeps, would soon be infinite.
_LARGEST_OUTPUT, _LARGEST_LOSS = 1e4, 1e9
_GROWTH = 10  # where data have large units, outputs may be large from the start, and grow by this in a round

_INITIAL = -1  # the round of the initial weights, which need no message

# Of a learner: what changes neither weights nor the optimiser's state. Whatever else a protocol asks for may.
_ONLY_READS = {
    "abilities", "batch_norm", "computing", "describe", "head_name", "loss", "outputs", "outputs_at", "predict",
    "probabilistic", "set_lr", "snapshot",
}  # fmt: skip


class GuardedLearner:
    """A learner with gradients that returns to its state at the start of the round when it diverges.

    Outputs that are not finite or far beyond those at the start of the round, and weights that are not finite, send it
    back; a step down such a loss is not taken. It then sets `me.diverged` for the rest of the round, so that a protocol
    can leave out the term that caused it, and remarks on it once.
    """

    def __init__(self, me: Agent) -> None:
        self._me, self._record, self._learner = me, record_of(me), me.learner
        self._go_back: Callable[[], None] | None = None  # to the start of the round, kept before anything can change
        self._stepped = self._loaded = False  # since all was last found to be finite
        self._handed_out = False  # something by which the protocol may change it unseen
        # Real values have any scale, so only finite ones are asked for; outputs before a softmax have a usual one.
        self._limit = None if me.learner.probabilistic else float(np.finfo(np.float32).max)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # private, or asked for before there is a learner (by copy)
        if name not in _ONLY_READS:
            self._handed_out = True
        return getattr(self._learner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._learner, name, value)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs before the softmax; of the model at the start of the round, if it has diverged."""
        self._keep_start()
        f = self._learner(x)
        return f if self._is_within_limits(f) else self._learner(x)

    def with_features(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._keep_start()
        f, h = self._learner.with_features(x)
        return (f, h) if self._is_within_limits(f) else self._learner.with_features(x)

    def descend(self, loss: torch.Tensor) -> None:
        """A step down the loss, unless the loss has diverged."""
        self._keep_start()
        self._count(1)
        if abs(float(loss.detach())) <= _LARGEST_LOSS:
            self._learner.descend(loss)
        else:
            self._remark("its loss was not finite, or beyond a billion; that step is left out")

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Fit to targets; where these are such that the model diverges, it stays as it was."""
        self._keep_start()
        self._count(_batches(self._learner, len(x)))
        self._learner.fit(x, targets)
        self.check()

    def load(self, weights: dict[str, np.ndarray]) -> None:
        self._keep_start(stepping=False)
        self._loaded = True
        self._learner.load(weights)

    def reset_optimiser(self) -> None:
        self._keep_start(stepping=False)
        self._learner.reset_optimiser()

    def weights(self) -> dict[str, np.ndarray]:
        """Finite weights: those of the start of the round, if the model has diverged."""
        self.check()
        return self._learner.weights()

    def gradient_at(self, weights: dict[str, np.ndarray], x: torch.Tensor, loss: LossOfTwo) -> dict[str, np.ndarray]:
        """A gradient by other weights, of a model with finite ones; it costs as much as a step."""
        self.check()
        self._count(1)
        return self._learner.gradient_at(weights, x, loss)

    def evaluated_features(self, x: np.ndarray) -> np.ndarray:
        self.check()
        return self._learner.evaluated_features(x)

    def check(self) -> None:
        """Return to the start of the round if the weights are not finite: a last step may have left them so."""
        if self._go_back is None:
            return
        if self._stepped or self._handed_out:
            finite = self._learner.is_finite()
        else:
            finite = not self._loaded or self._learner.has_finite_weights()
        self._stepped = self._loaded = False
        if not finite:
            self._return("its weights, or the state of its optimiser, were not finite")

    def _count(self, steps: int) -> None:
        """Count gradient steps, and the time that they take where the run has a clock."""
        self._record.work += steps
        self._record.steps += steps

    def _keep_start(self, *, stepping: bool = True) -> None:
        """Called before all that changes the learner; a forward pass may change the statistics of batch norm."""
        self._stepped = self._stepped or stepping
        if self._go_back is None:
            self._go_back = self._learner.kept()

    def _is_within_limits(self, f: torch.Tensor) -> bool:
        if not f.numel():
            return True
        largest = float(f.detach().abs().max())
        if self._limit is None and largest < float("inf"):  # the first outputs of the round
            self._limit = max(_LARGEST_OUTPUT, _GROWTH * largest)
        # Not "> limit": a comparison with NaN is False.
        if largest <= (self._limit or _LARGEST_OUTPUT):
            return True
        self._return("its outputs were not finite, or far beyond what they were")
        return False

    def _return(self, why: str) -> None:
        assert self._go_back is not None
        self._go_back()
        self._remark(f"{why}; the model returned to its state at the start of the round")

    def _remark(self, text: str) -> None:
        if not self._me.diverged:
            self._me.remark(f"diverged: {text}.")
        self._me.diverged = True


class GuardedFit:
    """A learner without gradients that is fitted to its own labels where it cannot be fitted to what was received.

    Targets from other agents can be such that no model of its kind can be fitted: all of one class, or far too large.
    """

    def __init__(self, me: Agent) -> None:
        self._me, self._learner = me, me.learner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._learner, name)

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Fit to targets, or to the agent's own labels."""
        own = self._me.shard
        record_of(self._me).work += _batches(self._learner, len(x))
        try:
            self._learner.fit(x, targets)
            why = "they lack classes" if self._learner.is_constant else ""
        except Exception as error:
            if np.array_equal(targets, own.targets):
                raise  # what its owner must know
            why = f"{type(error).__name__}: {error}"[:200]
        if why and not np.array_equal(targets, own.targets):
            self._me.remark(f"it could not be fitted to what it received, and is fitted to its own labels ({why})")
            self._learner.fit(own.x, own.targets)


async def guarded_round(protocol: Protocol, me: Agent, t: int) -> None:
    """Round t of a protocol, with a guard around the learner; who missed rounds first gets the common weights."""
    learner = me.learner
    guarded = GuardedLearner(me) if Ability.GRADIENTS in learner.abilities else GuardedFit(me)
    me.learner = cast(AnyLearner, guarded)
    try:
        if _may_have_missed_weights(protocol, me, t):
            exchanges = record_of(me).exchanges
            newest = await me.ask_hub(holds=int(me.state.get("holds", _INITIAL)), expect=protocol.common(me))
            record_of(me).exchanges = exchanges  # it was counted in the round that was missed
            protocol.take_over(me, newest, t - 1)
        await run_hook(me, protocol.round, t)
        if isinstance(guarded, GuardedLearner):
            guarded.check()
        if t == 0 and learner.is_constant:
            me.remark("its labels hold too few classes to fit its model: it answers with how frequent they are so far")
    finally:
        me.learner = learner


async def hub_round(protocol: Protocol, me: Hub, t: int) -> None:
    """Round t of the hub; agents that missed rounds first get the newest common weights."""
    if _may_have_missed_weights(protocol, me, t):
        await me.scatter(_newest_weights(me, await me.gather(expect={"holds": int})))
    await run_hook(me, protocol.hub, t)


def _may_have_missed_weights(protocol: Protocol, me: Node, t: int) -> bool:
    """Whether agents begin round t by catching up: only a share of them takes part in each, and they share weights."""
    return me.sampled and t > 0 and type(protocol).take_over is not Protocol.take_over


def _newest_weights(me: Hub, heard: Mapping[str, Message]) -> dict[str, Message]:
    """To each agent that is present the newest weights of its group; an empty message to one that `holds` them."""
    newest = me.state.get("newest", {})
    made = {kind: Message(kept["weights"]) for kind, kept in newest.items()}  # encoded once for all
    answers = dict.fromkeys(me.present, Message())
    for name, message in heard.items():
        kind = kind_of(me, name)
        if kind in newest and message["holds"] != newest[kind]["round"]:
            answers[name] = made[kind]
    return answers


def _batches(learner: AnyLearner, samples: int) -> int:
    """How many batches a fit goes over; for a model that has none, as if it took 32 samples at a time."""
    size, epochs = getattr(learner, "batch_size", 32), getattr(learner, "epochs", 1)
    return len(cut(samples, size)) * epochs
