"""Bare PyTorch doing the steps of FD and FedProto: one more term in the loss, then means over classes; no exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, one_hot, softmax

from bench.bare import channels_last, step
from codistill.learners import zoo

CLASSES, WIDTH, BATCH = 10, 84, 32


@dataclass(frozen=True)
class ClassMeans:
    """Rounds of the agents of one process, with targets that were received long ago.

    `features`: the means are of features, after training (FedProto), and not of outputs, while training (FD).
    """

    agents: int
    samples: int
    features: bool

    def prepare(self) -> Callable[[int], None]:
        models = [channels_last(zoo.build("lenet5", (1, 28, 28), CLASSES)) for _ in range(self.agents)]
        optimisers = [torch.optim.Adam(model.parameters(), lr=1e-3, fused=True) for model in models]
        x = [channels_last(torch.rand(self.samples, 1, 28, 28)) for _ in models]
        y = [one_hot(torch.randint(0, CLASSES, (self.samples,)), CLASSES).float() for _ in models]
        told = torch.randn(CLASSES, WIDTH if self.features else CLASSES)
        one_round = self._of_features if self.features else self._of_outputs

        def rounds(count: int) -> None:
            for _ in range(count):
                for model, optimiser, mine, wanted in zip(models, optimisers, x, y, strict=True):
                    order = torch.randperm(self.samples)
                    one_round(model, optimiser, mine[order], wanted[order], told)

        return rounds

    def _of_outputs(self, model, optimiser, x, y, told) -> None:  # type: ignore[no-untyped-def]
        sums = torch.zeros(CLASSES, CLASSES)
        for inputs, wanted in zip(x.split(BATCH), y.split(BATCH), strict=True):
            f = model(inputs)
            target = softmax(told[wanted.argmax(1)], 1)
            step(optimiser, cross_entropy(f, wanted) + kl_div(log_softmax(f, 1), target, reduction="batchmean"))
            sums += wanted.T @ f.detach()
        sums.div_(y.sum(0)[:, None].clamp(min=1))

    def _of_features(self, model, optimiser, x, y, told) -> None:  # type: ignore[no-untyped-def]
        body, head = model[:-1], model[-1]
        for inputs, wanted in zip(x.split(BATCH), y.split(BATCH), strict=True):
            h = body(inputs)
            step(optimiser, cross_entropy(head(h), wanted) + mse_loss(h, told[wanted.argmax(1)]))
        with torch.inference_mode():
            (y.T @ body(x)).div_(y.sum(0)[:, None].clamp(min=1))
