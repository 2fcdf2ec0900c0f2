"""A run from this machine: its folder, the baseline of agents alone, and then the run itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.devices import AUTO, CPU
from codistill.errors import RecipeError
from codistill.federation.checks import check_abilities
from codistill.federation.memory import MANY, memory_need
from codistill.federation.result import Result
from codistill.federation.run_facts import write_devices, write_facts
from codistill.federation.runtime_options import RuntimeOptions, make_runtime, process_count
from codistill.results.records import Row, RunStarted
from codistill.runtimes.description import RunDescription
from codistill.runtimes.interrupt import GentleInterrupt
from codistill.runtimes.observers.progress import Progress
from codistill.runtimes.placement import devices_by_name, place_agents
from codistill.runtimes.ray_cluster import RayCluster, joined
from codistill.runtimes.running import Outcome, run
from codistill.runtimes.runtime import Runtime, ShouldStop, Stopped
from codistill.runtimes.store import BASELINE, RunFolder

if TYPE_CHECKING:
    from codistill.runtimes.network.options import Network
    from codistill.runtimes.ray_runtime import RayHosts


def run_on_this_machine(
    description: RunDescription,
    options: RuntimeOptions,
    *,
    network: Network | None,
    ray: RayCluster | None,
    node_logs: str | None,
    folder: Path | None,
    resume: bool,
    progress: bool,
    observers: Sequence[Any],
) -> Result:
    """Run what is described; `observers` watch the run itself, not the baseline."""
    began = time.monotonic()

    def result(outcome: Outcome | None, alone_rows: list[Row] | None = None) -> Result:
        seconds = time.monotonic() - began
        if outcome is None:
            return Result(description, [], alone_rows, None, seconds, interrupted=True)
        alone_rows = outcome.baseline_rows if options.kind == "network" else alone_rows
        return Result(
            description, outcome.rows, alone_rows, outcome.outputs, seconds, interrupted=not outcome.complete,
            events=outcome.events, features=outcome.features,
        )  # fmt: skip

    with ExitStack() as stack:
        if options.kind == "ray":
            chosen = _ray_options(description, options, ray)
            # First: Ray has a handler for SIGTERM, which is replaced below.
            stack.enter_context(joined(chosen.address, output=chosen.output))
        else:
            place_agents(description, options.device, process_count(options, len(description.agents)))
        interrupt = stack.enter_context(GentleInterrupt())
        # Locked first and until the end: no other process may write there meanwhile.
        store = _store(folder, stack, resume=resume)
        if store is not None:
            write_facts(store.folder, description)
        hosts: RayHosts | None = None
        watching: list[Any] = []
        if options.kind == "ray":
            hosts = stack.enter_context(_ray_hosts(description, options, chosen, lambda: interrupt.asked))
            watching.append(hosts)
            try:
                hosts.survive(lambda: None)  # which opens them
            except Stopped:
                return result(None)
        if store is not None:
            write_devices(store.folder, devices_by_name(description.agents) if hosts is None else hosts.devices)
        if len(description.agents) >= MANY and options.kind not in ("network", "ray"):
            need = memory_need(description, options, saves=folder is not None)
            print(f"note: {need.sentence(options.idle)}.", file=sys.stderr)

        def run_on(make: Callable[[], Runtime], store: RunFolder | None, observers: Sequence[Any]) -> Outcome | None:
            shown = [*([Progress()] if progress else []), Notes(), *watching, *observers]

            def attempt() -> Outcome:
                runtime = make()
                return run(
                    runtime.description, runtime, store=store, observers=shown, should_stop=lambda: interrupt.asked
                )

            with suppress(Stopped):
                return attempt() if hosts is None else hosts.survive(attempt)
            return None

        alone_rows = None
        baseline = description.baseline() if description.plan.baseline and options.kind != "network" else None
        if baseline is not None:
            check_abilities(baseline.agents, baseline.protocol, None)
            beside = _store(None if folder is None else folder / BASELINE, stack, resume=resume)
            kept_in = None if beside is None else beside.folder
            alone = run_on(lambda: make_runtime(baseline, options, kept_in, hosts=hosts, baseline=True), beside, ())
            alone_rows = None if alone is None else alone.rows
        if interrupt.asked:
            return result(None, alone_rows)
        for agent in description.agents:
            agent.learned = True
        outcome = run_on(
            lambda: make_runtime(description, options, folder, network, node_logs, hosts), store, observers
        )
    return result(outcome, alone_rows)


def _ray_options(description: RunDescription, options: RuntimeOptions, given: RayCluster | None) -> RayCluster:
    """The settings of a run in a Ray cluster, which shows an agent the GPUs that it was asked for, and no others."""
    chosen = given or RayCluster()
    wishes = {agent.name: getattr(agent.learner, "device", None) or options.device for agent in description.agents}
    on_gpu = [name for name, device in wishes.items() if device not in (AUTO, CPU)]
    if on_gpu and chosen.gpus_per_host is None and chosen.gpus_per_agent is None:
        raise RecipeError(
            "In a Ray cluster, agents that compute on a GPU must ask for one.",
            f"device = '{wishes[on_gpu[0]]}' of agent '{on_gpu[0]}', and no gpus_per_agent in [ray]",
            "Add gpus_per_agent, such as 0.25: then four agents share a GPU.",
        )
    return chosen


def _ray_hosts(
    description: RunDescription, options: RuntimeOptions, chosen: RayCluster, should_stop: ShouldStop
) -> RayHosts:
    from codistill.runtimes.ray_runtime import RayHosts

    return RayHosts(
        description, chosen, workers=options.workers, device=options.device, on_disk=options.idle == "disk",
        should_stop=should_stop,
    )  # fmt: skip


class Notes:
    """Prints notes about a resumed run on standard error."""

    def started(self, record: RunStarted) -> None:
        """Print the notes."""
        for note in record.notes:
            print(f"note: {note}", file=sys.stderr)


def _store(folder: Path | None, stack: ExitStack, *, resume: bool) -> RunFolder | None:
    if folder is None:
        return None
    store = RunFolder(folder)
    stack.callback(store.close)
    store.open(resume=resume)
    return store
