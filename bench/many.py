"""Many agents on one machine: 100, 1,000 and 10,000 with LeNet-5, and a run of 2,000 against bare PyTorch.

`python -m bench.many COUNT ROUNDS` measures one federation, and prints the figures as JSON: each size has a process of
its own, whose peak of memory is that of all processes together, shared pages counted once.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

import codistill as cd
from bench.bare import BareProcesses, channels_last, step
from bench.measure import Figure, ratio, seconds
from bench.workloads import images
from codistill.learners import zoo
from codistill.results.records import RoundEnded, RunStarted

SAMPLES, PER_ROUND, ROUNDS = 20, 100, 4  # of each agent; agents of a round
AGENTS, SAMPLED, BATCH, EPOCHS = 2000, 200, 10, 5  # of the run against bare PyTorch, with 30 samples each


def many() -> list[Figure]:
    """Time per agent and round, peak memory and start-up of 100, 1,000 and 10,000 agents, 100 in a round."""
    figures, processor = [], {}
    for count in (100, 1000, 10_000):
        found = _measured(count, ROUNDS)
        per_agent, processor[count] = ([1e3 * each / PER_ROUND for each in found[key][1:]] for key in ("rounds", "cpu"))
        name = f"{count:,} agents with LeNet-5 at rest on disk"
        figures += [
            Figure(f"{name}: time per agent and round", per_agent, "ms", "", True),
            Figure(f"{name}: processor time per agent and round", processor[count], "ms", "", True),
            Figure(f"{name}: peak memory of all processes", [found["peak"]], "MB", "under 12000", found["peak"] < 12e3),
            Figure(f"{name}: start-up", [found["start"]], "s", "", True),
        ]
    # Of processors, as other work on the machine moves the other one.
    name = "  of these, 10,000 against 100: processor time per agent"
    figures.append(ratio(name, processor[10_000], processor[100], 1.25))
    return figures


def _measured(count: int, rounds: int) -> dict:  # type: ignore[type-arg]
    command = [sys.executable, "-m", "bench.many", str(count), str(rounds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(kilobytes, family(process.pid))))
        time.sleep(0.2)
    assert process.stdout is not None
    return {**json.loads(process.stdout.read().splitlines()[-1]), "peak": peak / 1024}


def family(process: int) -> list[int]:
    """A process and its children."""
    with contextlib.suppress(OSError):
        return [process, *map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]
    return []


def kilobytes(process: int) -> int:
    """Memory of a process; of pages that it shares with others its part."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 0


def _processor_seconds() -> float:
    """Of this process and its children."""
    ticks = 0
    for process in family(os.getpid()):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Times:
    """When the rounds began, and how long each took: by the clock, and of the processors."""

    def __init__(self) -> None:
        self.began, self.rounds, self.cpu = 0.0, list[float](), list[float]()

    def started(self, record: RunStarted) -> None:
        self.began, self._before = time.perf_counter(), _processor_seconds()

    def round_ended(self, record: RoundEnded) -> None:
        now = _processor_seconds()
        self.rounds.append(record.seconds)
        self.cpu.append(now - self._before)
        self._before = now


def lenets_at_rest(count: int, samples: int, sampled: int, protocol: cd.Protocol) -> cd.Federation:
    x, y = images(min(count * samples, 60_000))
    members = []
    for i in range(count):
        own = np.arange(i * samples, (i + 1) * samples) % len(x)
        members.append(cd.Agent(f"a{i}", cd.TorchLearner(zoo.build("lenet5", (1, 28, 28), 10)), x[own], y[own]))
    return cd.Federation(members, protocol, test=(x[:500], y[:500]), classes=10, participation=sampled / count)


def run(federation: cd.Federation, rounds: int, times: Times, runtime: str = "processes") -> None:
    federation.run(
        rounds, runtime=runtime, idle="disk", evaluate_agents="present", evaluate_every=rounds + 1,
        evaluate_samples=100, alone=False, progress=False, observers=[times],
    )  # fmt: skip


def one_size(count: int, rounds: int) -> None:
    """Print the figures of one federation; the last round is evaluated, and not counted."""
    began, times = time.perf_counter(), Times()
    run(lenets_at_rest(count, SAMPLES, PER_ROUND, cd.FedAvg()), rounds + 1, times)
    print(json.dumps({"start": times.began - began, "rounds": times.rounds[:-1], "cpu": times.cpu[:-1]}))


@dataclass(frozen=True)
class Sampled:
    """Rounds of sampled agents of one process, each with its own optimiser, from common weights to their mean."""

    agents: int
    sampled: int
    samples: int

    def prepare(self) -> Callable[[int], None]:
        torch.manual_seed(0)
        models = [channels_last(zoo.build("lenet5", (1, 28, 28), 10)) for _ in range(self.agents)]
        optimisers = [torch.optim.Adam(model.parameters(), lr=1e-3, fused=True) for model in models]
        x = channels_last(torch.rand(self.samples, 1, 28, 28))
        y = torch.eye(10)[torch.randint(0, 10, (self.samples,))]
        common = [value.clone() for value in models[0].state_dict().values()]

        def rounds(count: int) -> None:
            for _ in range(count):
                chosen = torch.randperm(self.agents)[: self.sampled].tolist()
                sums = [torch.zeros_like(value) for value in common]
                for agent in chosen:
                    model, optimiser = models[agent], optimisers[agent]
                    own = list(model.state_dict().values())
                    torch._foreach_copy_(own, common)
                    for _ in range(EPOCHS):
                        for batch in torch.randperm(self.samples).split(BATCH):
                            step(optimiser, torch.nn.functional.cross_entropy(model(x[batch]), y[batch]))
                    torch._foreach_add_(sums, own)
                torch._foreach_div_(sums, self.sampled)
                common[:] = sums

        return rounds


def against_bare(rounds: int = 50) -> list[Figure]:
    """2,000 agents, 200 in a round, from start to end, against two bare processes with the same steps."""
    samples = 60_000 // AGENTS
    times = Times()
    protocol = cd.FedAvg(local_epochs=EPOCHS, batch_size=BATCH)
    ours = seconds(lambda: run(lenets_at_rest(AGENTS, samples, SAMPLED, protocol), rounds, times))
    bare: list[BareProcesses] = []
    job = Sampled(AGENTS // 2, SAMPLED // 2, samples)
    started = seconds(lambda: (bare.append(BareProcesses([job] * 2)), bare[0].run(0)))
    spent = [seconds(partial(bare[0].run, 1)) for _ in range(rounds)]
    bare[0].close()
    name = f"2,000 agents, 200 in a round, {rounds} rounds of fedavg"
    return [
        ratio(f"{name}, from start to end, against two bare processes", [ours], [started + sum(spent)], 1.5),
        Figure("  of these, codistill / bare", [ours, started + sum(spent)], "s", "", True),
        ratio("  of these, rounds without the last, which is evaluated", times.rounds[:-1], spent[:-1], 1.5),
    ]


if __name__ == "__main__":
    one_size(int(sys.argv[1]), int(sys.argv[2]))
