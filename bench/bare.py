"""Bare PyTorch doing the same gradient steps and nothing else: what the framework is measured against."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, softmax

from codistill.learners import zoo


class Job(Protocol):
    """Prepared in its own process, it does an amount of work on command."""

    def prepare(self) -> Callable[[int], None]: ...


class BareProcesses:
    """Worker processes that run a job on command; one thread each unless told otherwise."""

    def __init__(self, jobs: Sequence[Job], threads: int = 1) -> None:
        # Spawned, not forked: a pool of threads does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        self._jobs = jobs  # what they share lives as long as its first owner
        for job in jobs:
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, job, threads), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, amount: int) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(amount.to_bytes(4, "little"))
        for pipe in self._pipes:
            pipe.recv_bytes()

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def _serve(pipe, job: Job, threads: int) -> None:  # type: ignore[no-untyped-def]
    torch.set_num_threads(threads)
    work = job.prepare()
    while True:
        work(int.from_bytes(pipe.recv_bytes(), "little"))
        pipe.send_bytes(b"done")


@dataclass(frozen=True)
class Training:
    """Rounds of local steps, and of as many distillation steps as asked for, on models of one process."""

    agents: int
    samples: int
    batch: int
    transfer: int

    def prepare(self) -> Callable[[int], None]:
        models = [channels_last(zoo.build("lenet5", (1, 28, 28), 10)) for _ in range(self.agents)]
        optimisers = [torch.optim.Adam(model.parameters(), lr=1e-3, fused=True) for model in models]
        # Every agent has its own samples, as it has in the federation.
        x = [channels_last(torch.rand(self.samples, 1, 28, 28)) for _ in models]
        y = [torch.eye(10)[torch.randint(0, 10, (self.samples,))] for _ in models]
        public = [channels_last(torch.rand(self.batch, 1, 28, 28)) for _ in range(self.transfer)]
        teacher = torch.randn(self.batch, 10)

        def rounds(count: int) -> None:
            for _ in range(count):
                for model, optimiser, mine, labels in zip(models, optimisers, x, y, strict=True):
                    order = torch.randperm(self.samples)  # batches are drawn anew in every round, as they are there
                    shuffled, targets = mine[order], labels[order]
                    for inputs, wanted in zip(shuffled.split(self.batch), targets.split(self.batch), strict=True):
                        step(optimiser, cross_entropy(model(inputs), wanted))
                    for inputs in public:
                        loss = kl_div(log_softmax(model(inputs), 1), softmax(teacher, 1), reduction="batchmean")
                        step(optimiser, loss)

        return rounds


@dataclass(frozen=True)
class Evaluation:
    """Predictions of every model of one process on the same images."""

    agents: int
    images: int
    chunk: int
    channels_last: bool

    def prepare(self) -> Callable[[int], None]:
        models = [zoo.build("lenet5", (1, 28, 28), 10).eval() for _ in range(self.agents)]
        x = torch.rand(self.images, 1, 28, 28)
        if self.channels_last:
            models, x = [channels_last(model) for model in models], channels_last(x)

        def passes(count: int) -> None:
            with torch.inference_mode():
                for _ in range(count):
                    for model in models:
                        for part in x.split(self.chunk):
                            model(part)

        return passes


@dataclass(frozen=True)
class Fitting:
    """What an agent of AvgKD does in a round: a fit from a fresh initialisation, and a pass over its samples."""

    model: str
    samples: int
    batch: int
    epochs: int

    def prepare(self) -> Callable[[int], None]:
        model = channels_last(zoo.build(self.model, (1, 28, 28), 10))
        x = channels_last(torch.rand(self.samples, 1, 28, 28))
        y = torch.eye(10)[torch.randint(0, 10, (self.samples,))]

        def rounds(count: int) -> None:
            for _ in range(count):
                for part in model.modules():
                    if hasattr(part, "reset_parameters"):
                        part.reset_parameters()
                optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
                model.train()
                for _ in range(self.epochs):
                    for batch in torch.randperm(self.samples).split(self.batch):
                        step(optimiser, mse_loss(model(x[batch]), y[batch]))
                model.eval()
                with torch.inference_mode():
                    for part in x.split(250):
                        model(part)

        return rounds


def step(optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()


def channels_last(thing):  # type: ignore[no-untyped-def]
    return thing.to(memory_format=torch.channels_last)


def seen(array: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """An array of floats in memory that processes share, as a tensor."""
    return torch.from_numpy(np.frombuffer(array, dtype=np.float32).reshape(shape))


def flatten(tensors: Iterable[torch.Tensor], into: torch.Tensor) -> None:
    start = 0
    for tensor in tensors:
        into[start : start + tensor.numel()].view(tensor.shape).copy_(tensor.detach())
        start += tensor.numel()


def fill(model: nn.Module, values: torch.Tensor) -> None:
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(values[start : start + parameter.numel()].view(parameter.shape))
            start += parameter.numel()
