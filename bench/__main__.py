"""`make bench`: the table of all measurements. `python -m bench NAME ...` measures some of them."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

import codistill as cd
from bench import bare, bare_classes, bare_crs, bare_exchange, bare_fedal, bare_feddkd
from bench.batched import batched
from bench.many import against_bare, many
from bench.measure import Figure, alternate, ratio, seconds, speedup
from bench.network import network
from bench.peer import peer
from bench.peers import peers
from bench.ray_bench import ray, ray_many
from bench.running import Rounds, started
from bench.scale import scale
from bench.workloads import lenets, pair, small

ROUNDS, REPEATS, BATCH, TRANSFER = 10, 7, 32, 4


def training(protocol: cd.Protocol, transfer: int) -> list[Figure]:
    """W1 against two bare processes, with the gradient steps alone and with the exchange; and against one process."""
    with started(lenets(protocol)) as (runtime, names):
        two = bare.BareProcesses([bare.Training(5, 120, BATCH, transfer)] * 2)
        same = bare.BareProcesses(bare_exchange.jobs(120, transfer))
        one = bare.BareProcesses([bare.Training(10, 120, BATCH, transfer)], threads=2)
        # Turn by turn, one round each: all sides start and wait for all of their processes in every round.
        bares = [partial(side.run, 1) for side in (two, same, one)]
        sides = alternate(REPEATS, Rounds(runtime, names, 1), *bares, turns=ROUNDS)
        for side in (two, same, one):
            side.close()
    ours, steps_alone, all_of_it, single = sides
    name = f"{protocol.name}: W1 round"
    return [
        ratio(f"{name}, against two bare processes that share memory", ours, all_of_it, 1.05),
        ratio(f"{name}, against the gradient steps alone in two bare processes", ours, steps_alone, 1.05),
        speedup(f"{name}, faster than one bare process with 2 threads", ours, single, 1.6),
    ]


def playing() -> list[Figure]:
    """A round of fedal, τ = 5, against two bare processes that do the same steps of agents and discriminator."""
    samples = 400
    with started(lenets(cd.FedAL(), samples=10 * samples)) as (runtime, names):
        two = bare.BareProcesses(bare_fedal.jobs(5, samples))
        ours, bares = alternate(REPEATS, Rounds(runtime, names, 1), partial(two.run, 1), turns=ROUNDS)
        two.close()
    return [ratio("fedal: a round of ten LeNet-5, tau 5, against two bare processes", ours, bares, 1.05)]


def sharing() -> list[Figure]:
    """A round of crs, ten LeNet-5 on 1,200 samples, against two bare processes with the same losses."""
    with started(lenets(cd.CRS())) as (runtime, names):
        two = bare.BareProcesses([bare_crs.Sharing(5, 120)] * 2)
        ours, bares = alternate(REPEATS, Rounds(runtime, names, 1), partial(two.run, 1), turns=ROUNDS)
        two.close()
    return [ratio("crs: W1 round, against two bare processes", ours, bares, 1.05)]


def classes(protocol: cd.Protocol, *, features: bool) -> list[Figure]:
    """A round of ten LeNet-5 on 1,200 samples that learn from means over classes, against two bare processes."""
    with started(lenets(protocol)) as (runtime, names):
        two = bare.BareProcesses([bare_classes.ClassMeans(5, 120, features)] * 2)
        ours, bares = alternate(REPEATS, Rounds(runtime, names, 1), partial(two.run, 1), turns=ROUNDS)
        two.close()
    return [ratio(f"{protocol.name}: W1 round, against two bare processes", ours, bares, 1.05)]


def distilling() -> list[Figure]:
    """A round of feddkd, ten LeNet-5 on 6,000 samples, E = 5, J = 10, against two bare processes that do the same."""
    samples, epochs, steps = 600, 5, 10
    protocol = cd.FedDKD(local_epochs=epochs, batch_size=bare_feddkd.BATCH, dkd_steps=steps)
    optimiser = {"optimiser": "sgd", "lr": 0.01, "momentum": 0.9}
    with started(lenets(protocol, samples=10 * samples, **optimiser)) as (runtime, names):
        two = bare.BareProcesses(bare_feddkd.jobs(samples, epochs, steps))
        ours, bares = alternate(REPEATS, Rounds(runtime, names, 1), partial(two.run, 1), turns=3)
        two.close()
    return [ratio("feddkd: a round of ten LeNet-5, E = 5, J = 10, against two bare processes", ours, bares, 1.05)]


def travelling(protocol: cd.Protocol, *models: tuple[str, int]) -> list[Figure]:
    """A round in which fitted models travel against two bare processes that do the same fits and predictions."""
    figures = []
    for model, samples in models:
        with started(pair(protocol, model, samples, 64, 5)) as (runtime, names):
            two = bare.BareProcesses([bare.Fitting(model, samples, 64, 5)] * 2)
            ours, bares = alternate(REPEATS, Rounds(runtime, names, 1), partial(two.run, 1), turns=2)
            two.close()
        figures.append(ratio(f"{protocol.name}: a round of two {model}, against two bare processes", ours, bares, 1.05))
    return figures


def safeguarding() -> list[Figure]:
    """W1 with the safeguard against W1 without: two more local trainings, on all samples and on three quarters."""
    figures = []
    for protocol in (cd.FedAvg(), cd.FedMD()):
        with started(lenets(protocol)) as (plain, names), started(lenets(protocol, safeguard=True)) as (guarded, _):
            sides = alternate(REPEATS, Rounds(guarded, names, 1), Rounds(plain, names, 1), turns=2)
            more = sum(map(len, guarded.save().values())) / sum(map(len, plain.save().values()))
        figures.append(ratio(f"{protocol.name}: W1 round with the safeguard, against one without", *sides, 3.0))
        figures.append(
            Figure(f"{protocol.name}: states with the safeguard, against those without", [more], "x", "", True)
        )
    return figures


def evaluation() -> list[Figure]:
    """10 agents on 10,000 images against bare inference at its best chunk size and memory format."""
    images = 10_000
    best, label = None, ""
    for channels_last in (True, False):
        for chunk in (100, 250, 500, 1000):
            trial = bare.BareProcesses([bare.Evaluation(5, 2_000, chunk, channels_last)] * 2)
            trial.run(1)
            spent = min(seconds(partial(trial.run, 1)) for _ in range(3))
            trial.close()
            if best is None or spent < best[0]:
                best, label = (
                    (spent, chunk, channels_last),
                    f"{'channels-last' if channels_last else 'contiguous'} {chunk}",
                )
    assert best is not None
    with started(lenets(cd.FedAvg(), test=images)) as (runtime, _):
        two = bare.BareProcesses([bare.Evaluation(5, images, best[1], best[2])] * 2)
        ours, two_bare = alternate(5, lambda: runtime.evaluate(None), lambda: two.run(1))
        two.close()
        few = bare.BareProcesses([bare.Evaluation(5, 100, 100, best[2])] * 2)
        ours_few, few_bare = alternate(REPEATS, lambda: runtime.evaluate(100), lambda: few.run(1), turns=ROUNDS)
        few.close()
    return [
        ratio(f"evaluation on 10,000 images, against bare inference ({label})", ours, two_bare, 1.1),
        ratio("evaluation on 100 images, against bare inference", ours_few, few_bare, 1.2),
    ]


def scaling() -> list[Figure]:
    """Time per agent and round for 10, 100 and 1,000 small agents; memory of 1,000."""
    per_agent: dict[int, list[float]] = {}
    with contextlib.ExitStack() as stack:
        sides = {}
        for count in (10, 100, 1000):
            runtime, names = stack.enter_context(started(small(count, cd.FedAvg())))
            sides[count] = Rounds(runtime, names, max(1, 1000 // count))
        spent = alternate(5, *sides.values())
        for (count, side), values in zip(sides.items(), spent, strict=True):
            per_agent[count] = [value / (count * side.count) for value in values]
    least = [min(values) for values in zip(*per_agent.values(), strict=True)]
    most = [max(values) for values in zip(*per_agent.values(), strict=True)]
    figures = [
        Figure(f"time per agent and round, {n} agents", [1e3 * v for v in values], "ms", "", True)
        for n, values in per_agent.items()
    ]
    figures.append(ratio("  largest of these against the smallest", most, least, 1.2))
    figures.append(_memory())
    return figures


def _memory() -> Figure:
    """Peak of all processes together, measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.memory"], capture_output=True, text=True, check=True, timeout=120
    )
    megabytes = float(done.stdout)
    name = "peak memory of 1,000 agents, all processes, upper bound"
    return Figure(name, [megabytes], "MB", "under 2000", megabytes < 2000)


@dataclass(frozen=True, kw_only=True)
class Chatter(cd.Protocol):
    """An exchange per mini-batch and nothing else."""

    name = "chatter"
    needs = cd.Ability.LABELS
    steps: int = 100

    async def round(self, me: cd.Agent, t: int) -> None:
        import numpy as np

        outputs = np.zeros((32, 10), dtype=np.float32)
        for _ in range(self.steps):
            await me.ask_hub(f=outputs, expect={"mean": (32, 10)})

    async def hub(self, me: cd.Hub, t: int) -> None:
        import numpy as np

        for _ in range(self.steps):
            heard = await me.gather(expect={"f": (32, 10)})
            await me.broadcast(mean=np.mean([message["f"] for message in heard.values()], axis=0))


def exchange() -> list[Figure]:
    """An exchange with the hub per mini-batch: 10 agents, 32 x 10 floats."""
    protocol = Chatter()
    with started(lenets(protocol, samples=100)) as (runtime, names):
        (spent,) = alternate(REPEATS, Rounds(runtime, names, 2))
    values = [1e3 * value / (2 * protocol.steps * 10) for value in spent]
    figure = Figure("exchange of 32 x 10 floats with the hub, per agent", values, "ms", "under 0.3", False)
    return [Figure(figure.name, values, "ms", figure.target, figure.middle < 0.3)]


BENCHES: dict[str, Callable[[], list[Figure]]] = {
    "fedavg": lambda: training(cd.FedAvg(), 0),
    "fedmd": lambda: training(cd.FedMD(transfer_steps=TRANSFER), TRANSFER),
    "fedal": playing,
    "fd": lambda: classes(cd.FD(), features=False),
    "fedproto": lambda: classes(cd.FedProto(), features=True),
    "crs": sharing,
    "feddkd": distilling,
    "avgkd": lambda: travelling(cd.AvgKD(), ("lenet5", 1000), ("cnn", 500)),
    "akd": lambda: travelling(cd.AKD(simultaneous=True), ("lenet5", 1000)),
    "safeguard": safeguarding,
    "evaluation": evaluation,
    "batched": batched,
    "scaling": scaling,
    "many": many,
    "many-bare": against_bare,
    "exchange": exchange,
    "peers": peers,
    "network": network,
    "ray": ray,
    "ray-many": ray_many,
    "scale": scale,
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHES)}, peer; none: all")
    parser.add_argument("--htfllib", type=Path, metavar="DIR", help="a checkout of HtFLlib, which 'peer' measures too")
    asked = parser.parse_args(arguments)
    console = Console(width=130)
    benches = dict(BENCHES)
    if asked.htfllib is not None:
        benches["peer"] = partial(peer, asked.htfllib, partial(console.print, markup=False, soft_wrap=True))
    elif "peer" in asked.names:
        sys.exit("peer compares with a checkout of HtFLlib that you have: give its folder by --htfllib DIR.")
    if unknown := [name for name in asked.names if name not in benches]:
        parser.error(f"no measurement is called {', '.join(unknown)}")
    table = Table(title="median over repeats (smallest to largest); 2 cores, side by side in one run")
    for heading, side in (
        ("measurement", "left"),
        ("median", "right"),
        ("spread", "right"),
        ("aim", "right"),
        ("met", "left"),
    ):
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    for name in asked.names or benches:
        console.print(f"measuring {name} ...")
        for figure in benches[name]():
            spread = f"{min(figure.values):.3g} to {max(figure.values):.3g}"
            console.print(f"  {figure.name.strip()}: {figure.middle:.3g} {figure.unit} ({spread})", highlight=False)
            table.add_row(
                figure.name, f"{figure.middle:.3g} {figure.unit}", spread, figure.target,
                "" if not figure.target else "yes" if figure.met else "NO",
            )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
