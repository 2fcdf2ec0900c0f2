"""Step sizes η_t and the steps before which peers communicate, counted over all rounds."""

from __future__ import annotations

from codistill.protocol import Agent

SCHEDULES = ("constant", "decayed", "summable")


def lr_factor(schedule: str, decay: float, t: int, step: int) -> float:
    """η_t / η_0 in round t and at gradient step `step`, counted from the start of the run."""
    if schedule == "decayed":
        return decay**t
    # Σ η_t = ∞ and Σ η_t² < ∞: exponents in (1/2, 1]
    return (1 + step / 100) ** -0.75 if schedule == "summable" else 1.0


def set_lr(me: Agent, factor: float, lr: float | None) -> None:
    """Let the learner take steps of `factor` times `lr`, or times its owner's learning rate."""
    if lr is not None or factor != 1.0:
        me.learner.set_lr(factor, lr)


def communication_steps(t: int, steps: int, every: int, first: int = 0) -> range:
    """Of the steps `first`, `first` + 1, ... of round t, each with `steps` steps, every `every`-th of the whole run."""
    start = first + -(t * steps + first) % every
    return range(start, first + steps, every)
