"""A run from this machine: its folder, the baseline of agents alone, and then the run itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.federation.checks import check_abilities
from codistill.federation.machine_facts import facts_of_machine
from codistill.federation.memory import MANY, memory_need
from codistill.federation.result import Result
from codistill.federation.run_facts import write_devices, write_facts
from codistill.federation.runtime_options import RuntimeOptions, make_runtime, process_count
from codistill.results.records import RunStarted
from codistill.runtimes.description import RunDescription
from codistill.runtimes.interrupt import GentleInterrupt
from codistill.runtimes.observers.progress import Progress
from codistill.runtimes.placement import devices_by_name, place_agents
from codistill.runtimes.running import Outcome, run
from codistill.runtimes.runtime import Runtime, Stopped
from codistill.runtimes.store import BASELINE, RunFolder

if TYPE_CHECKING:
    from codistill.runtimes.machines.group import Group
    from codistill.runtimes.machines.machine_options import Machines
    from codistill.runtimes.network.options import Network


def run_on_this_machine(
    description: RunDescription,
    options: RuntimeOptions,
    *,
    network: Network | None,
    machines: Machines | None,
    node_logs: str | None,
    folder: Path | None,
    resume: bool,
    progress: bool,
    observers: Sequence[Any],
) -> Result:
    """Run what is described; `observers` watch the run itself, not the baseline."""
    began = time.monotonic()
    group = _group(description, machines) if options.kind == "machines" else None
    if group is None:
        place_agents(description, options.device, process_count(options, len(description.agents)))
    else:
        group.place_agents(options.device)
        if group.place.rank > 0:
            return _serve(group, description, folder)
    with ExitStack() as stack:
        interrupt = stack.enter_context(GentleInterrupt())

        def run_on(runtime: Runtime, store: RunFolder | None, observers: Sequence[Any]) -> Outcome:
            shown = [*([Progress()] if progress else []), Notes(), *observers]
            return run(runtime.description, runtime, store=store, observers=shown, should_stop=lambda: interrupt.asked)

        # Locked first and until the end: no other process may write there meanwhile.
        store = _store(folder, stack, resume=resume)
        if store is not None:
            write_facts(store.folder, description)
        if group is not None and not _meet(stack.enter_context(group), description, folder, interrupt):
            return Result(description, [], None, None, time.monotonic() - began, interrupted=True)
        if store is not None:
            write_devices(store.folder, devices_by_name(description.agents) if group is None else group.devices)
        if len(description.agents) >= MANY and options.kind != "network":
            need = memory_need(description, options, saves=folder is not None)
            print(f"note: {need.sentence(options.idle)}.", file=sys.stderr)
        alone_rows = None
        baseline = description.baseline() if description.plan.baseline and options.kind != "network" else None
        if baseline is not None:
            check_abilities(baseline.agents, baseline.protocol, None)
            beside = _store(None if folder is None else folder / BASELINE, stack, resume=resume)
            kept_in = None if beside is None else beside.folder
            alone_rows = run_on(make_runtime(baseline, options, kept_in, group=group, baseline=True), beside, ()).rows
        if interrupt.asked:
            return Result(description, [], alone_rows, None, time.monotonic() - began, interrupted=True)
        for agent in description.agents:
            agent.learned = True
        started = make_runtime(description, options, folder, network, node_logs, group)
        outcome = run_on(started, store, observers)
        if group is not None:
            group.complete = outcome.complete
    return Result(
        description,
        outcome.rows,
        outcome.baseline_rows if options.kind == "network" else alone_rows,
        outcome.outputs,
        time.monotonic() - began,
        interrupted=not outcome.complete,
        events=outcome.events,
        features=outcome.features,
    )


def _group(description: RunDescription, machines: Machines | None) -> Group:
    from codistill.runtimes.machines.group import Group
    from codistill.runtimes.machines.machine_options import Machines
    from codistill.runtimes.machines.place import place_here

    chosen = machines or Machines()
    return Group(place_here(chosen.port), description, chosen)


def _meet(group: Group, description: RunDescription, folder: Path | None, interrupt: GentleInterrupt) -> bool:
    """Whether all machines have met; not if somebody asks to stop before."""
    facts = {"the number of machines": f"{group.place.world}", **facts_of_machine(description)}
    try:
        group.meet(facts, folder, lambda: interrupt.asked)
    except Stopped:
        return False
    return True


def _serve(group: Group, description: RunDescription, folder: Path | None) -> Result:
    """On a machine of another rank than 0: compute what rank 0 asks for. The first signal is for rank 0, which gets it
    too; a second one ends this process."""
    began, complete = time.monotonic(), False
    with GentleInterrupt(quiet=True) as interrupt, group:
        if _meet(group, description, folder, interrupt):
            complete = group.serve()
    return Result(description, [], None, None, time.monotonic() - began, interrupted=not complete)


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
