"""What Distributed Distillation needs of devices where (5) and (6) are taken as they are printed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from codistill.learners.ability import Ability
from codistill.protocol import Agent, LearnerError


def check_printed(agents: Sequence[Agent], beta: float, rate: float | None) -> None:
    """A common step size η, plain gradient steps, and 2 β η <= w_nn, which keeps z a probability in (6)."""
    if rate is None:
        raise LearnerError("The form 'printed' needs a rate.", "none", "Set rate, the step size η of all devices.")
    for agent in agents:
        diagonal = 1 - sum(agent.topology.weights(agent.name).values())
        if 2 * beta * rate > diagonal + 1e-9:
            raise LearnerError(
                "(6) keeps soft-decisions probabilities only while 2 beta rate is at most w_nn.",
                f"2 x {beta:g} x {rate:g} at agent '{agent.name}', whose w_nn is {diagonal:.3g}",
                "Lower beta or rate, or use a graph with fewer links.",
            )
        optimiser = agent.learner.optimiser if Ability.GRADIENTS in agent.learner.abilities else None
        plain = isinstance(optimiser, torch.optim.SGD) and not optimiser.defaults["momentum"]
        if optimiser is not None and not plain:
            raise LearnerError(
                "The form 'printed' takes plain gradient steps (5).",
                f"agent '{agent.name}' steps by {type(optimiser).__name__}"
                + (" with momentum" if isinstance(optimiser, torch.optim.SGD) else ""),
                "Give it optimiser = \"sgd\" without momentum, or use the form 'mean'.",
            )
