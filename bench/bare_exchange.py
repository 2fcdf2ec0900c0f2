"""Bare PyTorch doing all of FedAvg and of FedMD: gradient steps and exchange, in memory that two processes share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from bench.bare import channels_last, fill, flatten, seen, step
from codistill.learners import zoo

CLIENTS, CLASSES, BATCH = 10, 10, 32


@dataclass(frozen=True)
class Exchanging:
    """Rounds of one half of the agents: local steps, then the mean of weights, or `transfer` steps of distillation.

    The processes wait for one another where the algorithm does: for all weights, for their mean, for all outputs.
    """

    first: bool
    samples: int
    transfer: int
    shared: Any  # weights of all and their mean, or outputs of all for this transfer step and for the next
    both: Any

    def prepare(self) -> Callable[[int], None]:
        mine = range(CLIENTS // 2) if self.first else range(CLIENTS // 2, CLIENTS)
        models = {n: channels_last(zoo.build("lenet5", (1, 28, 28), CLASSES)) for n in mine}
        adams = {n: torch.optim.Adam(models[n].parameters(), lr=1e-3, fused=True) for n in mine}
        data = {n: channels_last(torch.rand(self.samples, 1, 28, 28)) for n in mine}
        labels = {n: torch.eye(CLASSES)[torch.randint(0, CLASSES, (self.samples,))] for n in mine}
        public = channels_last(torch.rand(1000, 1, 28, 28))

        def average(weights: torch.Tensor) -> None:
            for n in mine:
                flatten(models[n].parameters(), weights[n])
            self.both.wait()
            if self.first:
                torch.mean(weights[:CLIENTS], dim=0, out=weights[CLIENTS])
            self.both.wait()
            for n in mine:
                fill(models[n], weights[CLIENTS])

        def distil(outputs: torch.Tensor) -> None:
            for number, rows in enumerate(torch.randperm(1000)[: self.transfer * BATCH].split(BATCH)):
                x, told = public[rows], outputs[number % 2]
                graphs = {n: models[n](x) for n in mine}
                for n, f in graphs.items():
                    told[n] = f.detach()
                self.both.wait()
                total = told.sum(0)
                for n, f in graphs.items():
                    others = softmax((total - told[n]) / (CLIENTS - 1), 1)
                    step(adams[n], kl_div(log_softmax(f, 1), others, reduction="batchmean"))

        size = sum(parameter.numel() for parameter in next(iter(models.values())).parameters())
        shape = (2, CLIENTS, BATCH, CLASSES) if self.transfer else (CLIENTS + 1, size)
        memory, exchange = seen(self.shared, shape), distil if self.transfer else average

        def rounds(count: int) -> None:
            for _ in range(count):
                for n in mine:
                    order = torch.randperm(self.samples)
                    x, y = data[n][order], labels[n][order]
                    for inputs, wanted in zip(x.split(BATCH), y.split(BATCH), strict=True):
                        step(adams[n], cross_entropy(models[n](inputs), wanted))
                exchange(memory)

        return rounds


def jobs(samples: int, transfer: int) -> list[Exchanging]:
    """The two halves."""
    context = multiprocessing.get_context("spawn")
    weights = sum(parameter.numel() for parameter in zoo.build("lenet5", (1, 28, 28), CLASSES).parameters())
    floats = 2 * CLIENTS * BATCH * CLASSES if transfer else (CLIENTS + 1) * weights
    shared, both = context.RawArray("f", floats), context.Barrier(2)
    return [Exchanging(first, samples, transfer, shared, both) for first in (True, False)]
