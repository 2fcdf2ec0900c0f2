"""Bare PyTorch doing the steps of CRS: the same three losses, then the means of features, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, log_softmax, one_hot

from bench.bare import channels_last, step
from codistill.learners import zoo
from codistill.protocols.crs import contrast

CLASSES, WIDTH, BATCH = 10, 84, 32


@dataclass(frozen=True)
class Sharing:
    """Rounds of the agents of one process, with representations that were received long ago."""

    agents: int
    samples: int

    def prepare(self) -> Callable[[int], None]:
        models = [channels_last(zoo.build("lenet5", (1, 28, 28), CLASSES)) for _ in range(self.agents)]
        optimisers = [torch.optim.Adam(model.parameters(), lr=1e-3, fused=True) for model in models]
        x = [channels_last(torch.rand(self.samples, 1, 28, 28)) for _ in models]
        y = [torch.randint(0, CLASSES, (self.samples,)) for _ in models]
        targets = [one_hot(labels, CLASSES).float() for labels in y]
        received, known = torch.randn(2, CLASSES, WIDTH), torch.ones(2, CLASSES, dtype=torch.bool)

        def one_round(number: int) -> None:
            body, head = models[number][:-1], models[number][-1]
            order = torch.randperm(self.samples)
            for rows in order.split(BATCH):
                s, label = body(x[number][rows]), y[number][rows]
                f = head(s)
                loss = cross_entropy(f, targets[number][rows])
                loss = loss + 10.0 * (s - received[0, label]).square().mean(dim=1).mean()
                m = torch.randint(1, 2, (len(label),))
                log_q = log_softmax(head(received), 2)
                step(optimisers[number], loss + contrast(log_softmax(f, 1), label, log_q[m], known[m]))
            with torch.inference_mode():
                features = body(x[number])
                for c in range(CLASSES):
                    of_class = features[y[number] == c]
                    of_class.mean(dim=0), of_class[torch.randperm(len(of_class))[:10]].mean(dim=0)

        def rounds(count: int) -> None:
            for _ in range(count):
                for number in range(self.agents):
                    one_round(number)

        return rounds
