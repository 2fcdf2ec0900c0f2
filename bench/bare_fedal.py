"""Bare PyTorch playing FedAL: the same steps of agents and discriminator, in two processes with shared memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from bench.bare import channels_last, seen, step
from codistill.learners import zoo

CLIENTS, CLASSES, BATCH = 10, 10, 32


@dataclass(frozen=True)
class Playing:
    """Rounds of FedAL for one half of the agents; the first half also has the discriminator.

    Outputs, their mean and the gradients lie in memory that both processes see; they wait for one another twice
    in every transfer step, as any form of the algorithm must.
    """

    first: bool
    steps: int
    samples: int
    outputs: Any
    mean: Any
    gradients: Any
    both: Any

    def prepare(self) -> Callable[[int], None]:
        mine = range(CLIENTS // 2) if self.first else range(CLIENTS // 2, CLIENTS)
        models = {n: channels_last(zoo.build("lenet5", (1, 28, 28), CLASSES)) for n in mine}
        olds = {n: channels_last(zoo.build("lenet5", (1, 28, 28), CLASSES)).eval().requires_grad_(False) for n in mine}
        adams = {n: torch.optim.Adam(models[n].parameters(), lr=1e-3, fused=True) for n in mine}
        data = {n: channels_last(torch.rand(self.samples, 1, 28, 28)) for n in mine}
        labels = {n: torch.eye(CLASSES)[torch.randint(0, CLASSES, (self.samples,))] for n in mine}
        public = channels_last(torch.rand(1000, 1, 28, 28))
        h = nn.Sequential(
            nn.Linear(CLASSES, 32), nn.ReLU(), nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, CLIENTS)
        )  # fmt: skip
        ascent = torch.optim.Adam(h.parameters(), lr=1e-4, fused=True)
        who = torch.arange(CLIENTS).repeat_interleave(BATCH)
        outputs, gradients = (seen(array, (CLIENTS, BATCH, CLASSES)) for array in (self.outputs, self.gradients))
        mean = seen(self.mean, (BATCH, CLASSES))

        def discriminate() -> None:
            f = outputs.clone()
            ascent.zero_grad(set_to_none=True)
            cross_entropy(h(softmax(f.flatten(0, 1) / 2, 1)), who).backward()
            ascent.step()
            f.requires_grad_()
            u = -cross_entropy(h(softmax(f.flatten(0, 1) / 2, 1)), who, reduction="sum")
            gradients.copy_(torch.autograd.grad(u, f)[0])
            mean.copy_(f.detach().mean(0))

        def rounds(count: int) -> None:
            for _ in range(count):
                for n in mine:
                    olds[n].load_state_dict(models[n].state_dict())
                    for rows in torch.randperm(self.samples)[: self.steps * BATCH].split(BATCH):
                        x = data[n][rows]
                        f = models[n](x)
                        step(adams[n], cross_entropy(f, labels[n][rows]) + _kl(f, olds[n](x)))
                    olds[n].load_state_dict(models[n].state_dict())
                for rows in torch.randperm(1000)[: self.steps * BATCH].split(BATCH):
                    x = public[rows]
                    graphs = {n: models[n](x) for n in mine}
                    for n, f in graphs.items():
                        outputs[n] = f.detach()
                    self.both.wait()
                    if self.first:
                        discriminate()
                    self.both.wait()
                    for n, f in graphs.items():
                        others = (CLIENTS * mean - outputs[n]) / (CLIENTS - 1)
                        loss = _kl(f, others) + (f * gradients[n]).sum() / BATCH + _kl(f, olds[n](x))
                        step(adams[n], loss)

        return rounds


def jobs(steps: int, samples: int) -> list[Playing]:
    """The two halves."""
    context = multiprocessing.get_context("spawn")
    size = CLIENTS * BATCH * CLASSES
    shared = [context.RawArray("f", count) for count in (size, BATCH * CLASSES, size)]
    both = context.Barrier(2)
    return [Playing(first, steps, samples, *shared, both) for first in (True, False)]


def _kl(f: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return kl_div(log_softmax(f, 1), softmax(teacher, 1), reduction="batchmean")
