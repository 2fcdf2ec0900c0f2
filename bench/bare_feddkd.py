"""Bare PyTorch doing the steps of FedDKD: local training, mean of weights, J steps of distillation; two processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from bench.bare import channels_last, fill, flatten, seen, step
from codistill.learners import zoo

CLIENTS, CLASSES, BATCH = 10, 10, 64


@dataclass(frozen=True)
class Distilling:
    """Rounds of FedDKD for one half of the agents; the first half also does what the hub does.

    Weights, gradients and the global model lie in memory that both processes see; they wait for one another twice per
    mean and per step of distillation, as any form of the algorithm must.
    """

    first: bool
    samples: int
    epochs: int
    steps: int
    sent: Any  # (clients, parameters): weights, then gradients
    common: Any  # (parameters,): the global model
    both: Any

    def prepare(self) -> Callable[[int], None]:
        mine = range(CLIENTS // 2) if self.first else range(CLIENTS // 2, CLIENTS)
        models = {n: channels_last(zoo.build("lenet5", (1, 28, 28), CLASSES)) for n in mine}
        student = channels_last(zoo.build("lenet5", (1, 28, 28), CLASSES)).eval()
        optimisers = {n: torch.optim.SGD(models[n].parameters(), lr=0.01, momentum=0.9, fused=True) for n in mine}
        x = {n: channels_last(torch.rand(self.samples, 1, 28, 28)) for n in mine}
        y = {n: torch.eye(CLASSES)[torch.randint(0, CLASSES, (self.samples,))] for n in mine}
        size = sum(parameter.numel() for parameter in student.parameters())
        sent, common = seen(self.sent, (CLIENTS, size)), seen(self.common, (size,))

        def distil(n: int) -> None:
            rows = torch.randperm(self.samples)[:BATCH]
            with torch.no_grad():
                teacher = softmax(models[n].eval()(x[n][rows]), 1)
            loss = kl_div(log_softmax(student(x[n][rows]), 1), teacher, reduction="batchmean")
            flatten(torch.autograd.grad(loss, list(student.parameters())), sent[n])

        def rounds(count: int) -> None:
            for _ in range(count):
                for n in mine:
                    models[n].train()
                    for _ in range(self.epochs):
                        for rows in torch.randperm(self.samples).split(BATCH):
                            step(optimisers[n], cross_entropy(models[n](x[n][rows]), y[n][rows]))
                    flatten(models[n].parameters(), sent[n])
                self._wait(lambda: common.copy_(sent.mean(0)))
                for _ in range(self.steps):
                    fill(student, common)
                    for n in mine:
                        distil(n)
                    self._wait(lambda: common.sub_(0.2 * sent.mean(0)))
                for n in mine:
                    fill(models[n], common)

        return rounds

    def _wait(self, as_hub: Callable[[], Any]) -> None:
        self.both.wait()
        if self.first:
            as_hub()
        self.both.wait()


def jobs(samples: int, epochs: int, steps: int) -> list[Distilling]:
    """The two halves."""
    context = multiprocessing.get_context("spawn")
    size = sum(parameter.numel() for parameter in zoo.build("lenet5", (1, 28, 28), CLASSES).parameters())
    shared = context.RawArray("f", CLIENTS * size), context.RawArray("f", size)
    both = context.Barrier(2)
    return [Distilling(first, samples, epochs, steps, *shared, both) for first in (True, False)]
