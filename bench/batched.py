"""Models of one architecture, trained one by one against all at once (`torch.func`): the same steps, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from bench.bare import channels_last, step
from bench.measure import Figure, alternate, ratio
from codistill.learners import zoo

BATCH, REPEATS, TURNS = 32, 7, 5
CASES = (("lenet5", (1, 28, 28), 5), ("lenet5", (1, 28, 28), 20), ("mlp", (784,), 20), ("logistic", (784,), 100))


def batched() -> list[Figure]:
    """Time of a step of all models, all at once against one by one; and how far weights are apart after one step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    figures = []
    for kind, shape, count in CASES:
        one_by_one, at_once, apart = _sides(kind, shape, count)
        one_by_one()
        at_once()
        difference = apart()
        ours, theirs = alternate(REPEATS, at_once, one_by_one, turns=TURNS)
        name = f"{count} {kind}, a step of all: at once, against one by one"
        figures.append(ratio(name, ours, theirs, 1.0))
        figures.append(Figure("  of these, largest difference of a weight after one step", [difference], "", "", True))
    torch.set_num_threads(threads)
    return figures


def _sides(
    kind: str, shape: tuple[int, ...], count: int
) -> tuple[Callable[[], None], Callable[[], None], Callable[[], float]]:
    torch.manual_seed(0)
    models = [zoo.build(kind, shape, 10) for _ in range(count)]
    stacked, buffers = stack_module_state([copy.deepcopy(model) for model in models])  # type: ignore[arg-type]
    skeleton = copy.deepcopy(models[0])
    x, y = torch.rand(count, BATCH, *shape), torch.randint(0, 10, (count, BATCH))
    inputs = list(x)
    if len(shape) == 3:
        models, inputs = [channels_last(model) for model in models], [channels_last(each) for each in inputs]
    optimisers = [torch.optim.Adam(model.parameters(), fused=True) for model in models]
    optimiser = torch.optim.Adam(stacked.values(), fused=True)

    def loss(weights, state, samples, labels):  # type: ignore[no-untyped-def]
        return cross_entropy(functional_call(skeleton, (weights, state), (samples,)), labels)

    gradients = vmap(grad(loss))

    def one_by_one() -> None:
        for model, own, samples, labels in zip(models, optimisers, inputs, y, strict=True):
            step(own, cross_entropy(model(samples), labels))

    def at_once() -> None:
        found = gradients({name: each.detach() for name, each in stacked.items()}, buffers, x, y)
        for name, each in stacked.items():
            each.grad = found[name]
        optimiser.step()

    def apart() -> float:
        own = [dict(model.named_parameters()) for model in models]
        return max(float((stacked[name][i] - own[i][name]).abs().max()) for i in range(count) for name in stacked)

    return one_by_one, at_once, apart
