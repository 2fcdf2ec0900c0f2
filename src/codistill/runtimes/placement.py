"""On which device each agent of a run computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from codistill.agent import Agent
from codistill.devices import AUTO, CPU, Wish, assign, check_device, resolved
from codistill.errors import RecipeError
from codistill.learners.module_memory import bytes_of
from codistill.learners.torch import TorchLearner
from codistill.runtimes.description import RunDescription

# In units of its weights: the weights, their gradient, two moments of an optimiser, and a copy of weights and moments
# that the guard against divergence keeps; one more for what protocols keep, such as a model to be held to.
_COPIES = 8
_UNDER_SAFEGUARD = 3  # models of an agent


def place_agents(description: RunDescription, device: str, processes: int, sharing: int = 1) -> None:
    """Choose a device for each agent of a run in so many processes: its own, or else that of the run.

    Nothing is moved yet: that is done in the process in which an agent computes. `sharing`: processes with agents of
    their own that share a device.
    """
    models = 1 if description.safeguard is None else _UNDER_SAFEGUARD
    mine: list[tuple[Agent, TorchLearner]] = [
        (agent, agent.learner) for agent in description.agents if isinstance(agent.learner, TorchLearner)
    ]
    wishes = [Wish(agent.name, learner.device or device, models * _bytes(learner)) for agent, learner in mine]
    chosen = assign(wishes, processes, sharing=sharing)
    for (agent, learner), place in zip(mine, chosen, strict=True):
        for each in (learner, *(agent.safeguard.learners if agent.safeguard else ())):
            each.assigned = place


def _bytes(learner: TorchLearner) -> int:
    return int(_COPIES * bytes_of(learner.module))


def devices_of(agents: Sequence[Agent]) -> list[str]:
    """The device of each agent."""
    return [str(resolved(_said(agent.learner))) for agent in agents]


def devices_by_name(agents: Sequence[Agent]) -> dict[str, str]:
    """The device of each agent, by its name."""
    return {agent.name: device for agent, device in zip(agents, devices_of(agents), strict=True)}


def _said(learner: Any) -> str | None:
    return (learner.assigned or learner.device) if isinstance(learner, TorchLearner) else None


def set_device(learner: Any, device: str | None, owner: str) -> None:
    """Give an agent's model the device that its owner has chosen; whether there is one is checked when it is used."""
    if device is None or (not isinstance(learner, TorchLearner) and device in (AUTO, CPU)):
        return
    if not isinstance(learner, TorchLearner):
        raise RecipeError(
            "device is for torch modules; other models compute on the CPU.",
            f"device = {device!r} for agent '{owner}', which has {learner.describe()}",
            "Remove it.",
        )
    learner.device = device


def set_default_device(learner: Any, device: Any) -> None:
    """Give a torch module of this machine that has no device of its own this one, if it is there."""
    if device is not None:
        check_device(device)
    if isinstance(learner, TorchLearner):
        learner.device = learner.device or device
        check_device(learner.device or CPU)
