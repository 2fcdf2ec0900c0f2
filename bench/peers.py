"""Agents on a graph, without a hub: against bare PyTorch, and in growing numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import codistill as cd
from bench.bare import BareProcesses
from bench.bare_peers import BATCH, CLASSES, Distilling, Mixing, Peers, seen, shared
from bench.measure import Figure, alternate, ratio
from bench.running import Rounds, started
from bench.workloads import devices, small
from codistill.engine.runtime import Runtime
from codistill.topology import graphs
from codistill.wire.state import unpack

DEVICES, STEPS, REPEATS, TURNS = 16, 10, 7, 2
SAMPLES = 10 * BATCH  # of each agent


def peers() -> list[Figure]:
    """A round of 16 LeNet-5 against bare processes; the time of one agent and iteration, by their number."""
    figures = against_bare(cd.DDistillation(local_steps=STEPS), Distilling)
    figures += against_bare(cd.DSGD(local_steps=STEPS), Mixing)
    # Iterations per round: so many that the fixed cost of a round, some 3 ms, is less than one percent everywhere.
    figures += scaling("logistic regression", {16: 60, 100: 20, 1000: 4}, small)
    figures += scaling("LeNet-5", {16: 25, 100: 4}, partial(devices, samples=3 * BATCH))
    return figures


def against_bare(protocol: cd.Protocol, job: Callable[[Peers, range], Any]) -> list[Figure]:
    """A round of 16 LeNet-5 on a random graph of degree 3, against two bare processes that share memory."""
    federation = devices(DEVICES, protocol, graphs.Random(degree=3), samples=SAMPLES)
    with started(federation) as (runtime, names):
        common = _peers(federation, runtime)
        # Every second agent in the same process, as in the federation.
        two = BareProcesses([job(common, range(worker, DEVICES, 2)) for worker in range(2)])
        ours, bare = alternate(REPEATS, Rounds(runtime, names, 1), partial(two.run, 1), turns=TURNS)
        two.run(0)
        _check_equal(federation, runtime, common)
        two.close()
    return [ratio(f"{protocol.name}: a round of {DEVICES} LeNet-5, against two bare processes", ours, bare, 1.2)]


def _peers(federation: cd.Federation, runtime: Runtime) -> Peers:
    """What the bare side needs to do the same from the same weights."""
    names, public = federation.topology.names, federation.public.x  # type: ignore[union-attr]
    first = [_weights(state) for state in _states(runtime, names)]
    if federation.protocol.needs_public:
        sizes = len(names) * BATCH * CLASSES, len(names) * len(public) * CLASSES
    else:
        sizes = (len(names) * sum(value.size for value in first[0].values()),) * 2
    mixing = [{names.index(m): w for m, w in federation.topology.weights(name).items()} for name in names]
    shards = [agent.shard for agent in federation.agents]
    x, y = [shard.x for shard in shards], [shard.targets.argmax(axis=1) for shard in shards]
    return Peers(names, mixing, first, x, y, public, STEPS, *shared(*sizes))


def _check_equal(federation: cd.Federation, runtime: Runtime, common: Peers) -> None:
    """Both sides must have computed the same: after all rounds, every z (or every weight) is equal."""
    ours = []
    for state in _states(runtime, common.names):
        kept = [state["state"]["z"]] if "z" in state["state"] else _weights(state).values()
        ours.append(np.concatenate([array.ravel() for array in kept]))
    apart = float(np.abs(np.stack(ours) - seen(common.result, (len(ours), -1))).max())
    if not apart <= 1e-5:
        raise AssertionError(f"The two sides of {federation.protocol.name} must agree; they differ by {apart:.3g}.")


def _states(runtime: Runtime, names: Sequence[str]) -> list[dict[str, Any]]:
    saved = runtime.save()
    return [unpack(saved[name]) for name in names]


def _weights(state: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in state["learner"]["weights"].items()}


def scaling(
    model: str, steps: Mapping[int, int], make: Callable[[int, cd.Protocol, graphs.Graph], cd.Federation]
) -> list[Figure]:
    """Time per agent and iteration of d_distillation on a torus; `steps` per round by the number of agents."""
    with contextlib.ExitStack() as stack:
        sides = []
        for count, iterations in steps.items():
            federation = make(count, cd.DDistillation(local_steps=iterations), graphs.Torus())
            sides.append(Rounds(*stack.enter_context(started(federation)), 1))
        spent = alternate(5, *sides)
    each = {n: [v / (n * k) for v in values] for (n, k), values in zip(steps.items(), spent, strict=True)}
    figures, fewest = [], min(each)
    for count, values in each.items():
        name = f"d_distillation: an agent's iteration, {count} x {model}"
        figures.append(Figure(name, [1e3 * value for value in values], "ms", "", True))
        if count != fewest:
            figures.append(ratio(f"  against {fewest} of them", values, each[fewest], 1.25))
    return figures
