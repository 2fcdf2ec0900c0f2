"""The discriminator of FedAL, on the hub: it learns which agent an output is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from codistill.learners.trained_module import ShortSteps
from codistill.protocol import Hub
from codistill.protocols.parts.weights import is_far_beyond, size_of


@dataclass(frozen=True, kw_only=True)
class Discriminator:
    """h(p, w): R^K → R^N of section IV-B, with Adam; its weights and Adam's state are kept in the hub's state.

    U_n(x) = -CE(n, h(p_n(x))), (7): the discriminator ascends it, the agent descends it.
    """

    lr: float = 1e-4  # η_d
    temperature: float = 2.0  # E of its input p_n = ψ(f_n, E)
    hidden: tuple[int, ...] = (32, 256)

    def step(self, me: Hub, names: Sequence[str], f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One step, on the outputs f (n, |P|, K) of the agents named.

        Returns ∇_{f_n} U_n(x) for each agent and sample with the updated w, and the share of each agent's
        outputs that were recognised before the update.
        """
        h, steps = self._module(me, f.shape[2])
        outputs = torch.from_numpy(f)
        who = torch.tensor([me.roster.index(name) for name in names]).repeat_interleave(f.shape[1])
        # Line 13: w ← w + η_d ∇𝒰 with 𝒰 = 1/N Σ_n U_n (8), the mean over P
        guess = h(self._inputs(outputs))
        steps.descend(nn.functional.cross_entropy(guess, who))
        # Line 16: ∇_{f_n} U_n(x, θ, w_{i+1}); U_n(x) depends on the agent's own output for x only
        outputs.requires_grad_()
        u = -nn.functional.cross_entropy(h(self._inputs(outputs)), who, reduction="sum")
        gradient = torch.autograd.grad(u, outputs)[0].numpy()
        if not np.isfinite(gradient).all():
            self._forget(me, "initialised anew, and this step continues without it")
            gradient = np.zeros_like(f)
        recognised = (guess.argmax(dim=1) == who).view(len(names), -1).float().mean(dim=1).numpy()
        return gradient, recognised

    def _inputs(self, f: torch.Tensor) -> torch.Tensor:
        return torch.softmax(f.flatten(0, 1) / self.temperature, dim=1)  # (3)

    def _module(self, me: Hub, classes: int) -> tuple[nn.Sequential, ShortSteps]:
        """The module and its Adam: in memory, or restored from the hub's state, or new."""
        if "discriminator" not in me.memo:
            me.seed_alike("discriminator")
            layers, width = list[nn.Module](), classes
            for neurons in self.hidden:
                layers += [nn.Linear(width, neurons), nn.ReLU()]
                width = neurons
            h = nn.Sequential(*layers, nn.Linear(width, len(me.roster)))
            optimiser = torch.optim.Adam(h.parameters(), self.lr, fused=True)
            if "discriminator" in me.state:
                h.load_state_dict(me.state["discriminator"]["weights"])
                optimiser.load_state_dict(me.state["discriminator"]["memory"])
            me.memo["discriminator"], me.memo["discriminator size"] = (h, ShortSteps(optimiser)), size_of(_arrays(h))
        known: tuple[nn.Sequential, ShortSteps] = me.memo["discriminator"]
        return known

    def save(self, me: Hub) -> None:
        """At the end of a round, put its weights and Adam's state into the hub's state, unless it has diverged."""
        if "discriminator" in me.memo:
            h, steps = me.memo["discriminator"]
            size = size_of(_arrays(h))
            if is_far_beyond(size, me.memo["discriminator size"], _arrays(h)):
                self._forget(me, "initialised anew: its weights were far beyond those of the round before")
                return
            me.memo["discriminator size"] = size
            me.state["discriminator"] = {"weights": h.state_dict(), "memory": steps.optimiser.state_dict()}

    def _forget(self, me: Hub, then: str) -> None:
        me.memo.pop("discriminator")
        me.state.pop("discriminator", None)
        me.remark(f"the discriminator diverged; it is {then}.")


def _arrays(h: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in h.state_dict().items()}
