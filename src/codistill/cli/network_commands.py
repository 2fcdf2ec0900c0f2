"""The commands between machines: hub, join and up; and restore, which chooses the state that an agent begins with."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.cli.console import add_command, add_recipe_arguments, print_results
from codistill.core.errors import CheckpointError, NetworkError, RecipeError

if TYPE_CHECKING:
    from codistill.certs.credentials import Credentials
    from codistill.network.options import Network
    from codistill.network.state_store import StateFile

_AGAIN = "give the same command again"


def add_parsers(commands: argparse._SubParsersAction[Any]) -> None:
    text = "the hub of a federation between machines: waits for its agents, runs the rounds"
    hub = add_command(commands, "hub", _hub, text)
    hub.add_argument("recipe", type=Path, help="a TOML recipe")
    hub.add_argument("--listen", required=True, metavar="HOST:PORT", help="where agents reach it")
    hub.add_argument(
        "--out", type=Path, help="the run's folder (default: runs/RECIPE-hub); a run that is there goes on"
    )
    _secure_options(hub)
    _run_options(hub)

    join = add_command(commands, "join", _join, "take part with a model and data of one's own")
    join.add_argument("file", type=Path, help="my_agent.py with the agent's model and data, or a recipe")
    join.add_argument("--hub", metavar="HOST:PORT", help="the hub to join")
    join.add_argument("--listen", metavar="HOST:PORT", help="among peers: where neighbours reach this one")
    join.add_argument(
        "--peer", action="append", default=[], metavar="NAME=HOST:PORT", help="among peers: a neighbour to dial"
    )
    join.add_argument("--recipe", type=Path, help="among peers, with my_agent.py: the recipe that all peers have")
    join.add_argument("--name", help="the agent's name, where there is no certificate that says it")
    join.add_argument("--policy", type=Path, metavar="FILE", help="what it agrees to (default: as my_agent.py says)")
    join.add_argument("--state", type=Path, help="folder for what it has learnt (default: agents/NAME)")
    join.add_argument("--save", type=Path, metavar="FILE", help="write the trained model there at the end")
    _secure_options(join)
    _run_options(join)

    text = "a whole federation on this machine: one process each, real sockets, mutual TLS"
    up = add_command(commands, "up", _up, text)
    up.add_argument("recipe", type=Path, help="a TOML recipe")
    up.add_argument("--agents", type=int, metavar="N", help="how many agents (default: as the recipe says)")
    up.add_argument("--out", type=Path, help="the run's folder (default: a new one in runs/)")
    up.add_argument("--verbose", action="store_true", help="show what every node tells its operator")
    _run_options(up)

    text = "list the states of an agent on this machine, or choose one with which it begins when it joins next"
    restore = add_command(commands, "restore", _restore, text)
    restore.add_argument(
        "folder", type=Path, help="the agent's folder: --state of 'codistill join', by default agents/NAME"
    )
    restore.add_argument("--round", type=int, metavar="N", help="begin with the state of this round")
    restore.add_argument("--time", metavar="TIME", help="the one of this time, as listed, or its beginning")
    restore.add_argument("--run", metavar="RUN", help="the one of this run, as listed, or its beginning")


def _secure_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--certs", type=Path, metavar="DIR", help="this node's folder, made by 'codistill certs'")
    parser.add_argument("--insecure", action="store_true", help="no certificates: anyone may read, join and forge")


def _run_options(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="how events are told (default: text)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def _hub(options: argparse.Namespace) -> int:
    from codistill.experiments.networked import run_hub
    from codistill.experiments.recipe import read_recipe
    from codistill.runtimes.workers import GentleInterrupt

    own = _credentials(options, "hub", [options.listen])
    recipe = read_recipe(options.recipe, options.set)
    folder = options.out or Path("runs") / f"{options.recipe.stem}-hub"
    with GentleInterrupt() as interrupt:
        summary, complete = run_hub(
            recipe, folder, own, options.listen, data_dir=options.data_dir, should_stop=lambda: interrupt.asked,
            progress=not options.quiet, form=options.log_format,
        )  # fmt: skip
    return print_results(summary, complete, folder, _AGAIN)


def _join(options: argparse.Namespace) -> int:
    from codistill.experiments.networked import check_can_save, join_hub, join_peers, read_agent_file
    from codistill.experiments.recipe import read_recipe
    from codistill.experiments.run import report_on
    from codistill.runtimes.workers import GentleInterrupt

    dial = _peers(options.peer)
    if (options.hub is None) == (options.listen is None):
        raise RecipeError(
            "An agent joins a hub, or listens for its peers.",
            "both --hub and --listen" if options.hub else "neither --hub nor --listen",
            "Give --hub HOST:PORT; or --listen HOST:PORT with a --peer NAME=HOST:PORT for each neighbour to dial.",
        )
    addresses = [options.hub] if options.hub else [options.listen, *dial.values()]
    own = _credentials(options, "agent", addresses)
    name = own.name if own is not None else options.name
    if name is None:
        raise RecipeError("Without a certificate an agent needs a name.", "no --name", "Add --name NAME.")
    if own is not None and options.name not in (None, own.name):
        raise NetworkError(
            "An agent's name is its certificate's name.",
            f"--name {options.name}, certificate of '{own.name}'",
            "Drop --name.",
        )
    folder = options.state or Path("agents") / name
    mine = read_agent_file(options.file, name, data_dir=options.data_dir, overrides=options.set, policy=options.policy)
    check_can_save(mine, options.save)
    with GentleInterrupt() as interrupt:
        common: dict[str, Any] = {"should_stop": lambda: interrupt.asked, "form": options.log_format}
        common["save"] = options.save
        if options.hub:
            network = mine.recipe.network if mine.recipe else _own_network(options.set)
            return 0 if join_hub(mine, own, options.hub, folder, network=network, **common) else 130
        if mine.recipe is None and options.recipe is None:
            raise RecipeError(
                "Peers have no hub that tells them the terms, so each needs the recipe.",
                "no --recipe",
                "Add --recipe RECIPE.toml, the same on every peer.",
            )
        recipe = mine.recipe or read_recipe(options.recipe, options.set)
        complete = join_peers(mine, recipe, own, options.listen, dial, folder, progress=not options.quiet, **common)
        return print_results(report_on(folder), complete, folder, _AGAIN)


def _up(options: argparse.Namespace) -> int:
    from codistill.experiments.networked import run_up, spread
    from codistill.experiments.recipe import read_recipe
    from codistill.experiments.run import new_folder

    recipe = read_recipe(options.recipe, options.set)
    if options.agents is not None:
        recipe = spread(recipe, options.agents)
    folder = options.out or new_folder(Path("runs"), f"{options.recipe.stem}-up")
    summary, complete = run_up(
        recipe, folder, data_dir=options.data_dir, progress=not options.quiet, form=options.log_format,
        verbose=options.verbose or options.log_format == "json",
    )  # fmt: skip
    return print_results(summary, complete, folder, f"{_AGAIN}, with --out {folder}")


def _own_network(changes: list[str]) -> Network:
    """What `--set network.KEY=VALUE` says of an agent that has no recipe."""
    from codistill.core.settings import from_table
    from codistill.experiments.recipe import override
    from codistill.network.options import Network

    tables: dict[str, Any] = {}
    for change in changes:
        override(tables, change)
    strange = [key for key in tables if key != "network"]
    if strange:
        raise RecipeError(
            "With my_agent.py, --set changes this node's [network] only: the rest is the hub's.",
            f"'{strange[0]}'",
            "Example: --set network.lease=30.",
        )
    network: Network = from_table(Network, tables.get("network", {}), "network")
    return network


def _peers(given: list[str]) -> dict[str, str]:
    dial: dict[str, str] = {}
    for text in given:
        name, equals, address = text.partition("=")
        if not equals or not name or not address:
            raise RecipeError("--peer must have the form NAME=HOST:PORT.", f"'{text}'", "Example: bank=10.0.0.7:7447.")
        dial[name] = address
    return dial


def _credentials(options: argparse.Namespace, role: str, addresses: list[str]) -> Credentials | None:
    from codistill.network.listener import check_privacy, split

    for address in addresses:
        split(address)
    check_privacy(addresses, certs=options.certs is not None, insecure=options.insecure)
    if options.certs is None:
        return None
    if options.insecure:
        raise RecipeError(
            "--certs and --insecure exclude each other.", "--certs beside --insecure", "Remove one of them."
        )
    from codistill.certs.credentials import Credentials

    return Credentials(options.certs, role)


# --- The states of an agent on its disk, and the one that it begins with when it joins next.


def _restore(options: argparse.Namespace) -> int:
    from codistill.core.files import locked
    from codistill.network.state_store import START, find_states, read_state, write_state

    folder: Path = options.folder
    states = list(find_states(folder)) if folder.is_dir() else []
    if not states:
        raise CheckpointError(
            f"{folder} must be the folder of an agent that has taken part under a hub.",
            "no states of it" if folder.is_dir() else "no such folder",
            "Give the folder that 'codistill join' has as --state, by default agents/NAME.",
        )
    chosen = [
        state
        for state in states
        if options.round is None or state.done == options.round
        if state.time.startswith(options.time or "") and state.run.startswith(options.run or "")
    ]
    if options.round is None:
        print("\n".join(map(_line, chosen)))
        return 0
    if not chosen:
        raise CheckpointError(
            "The state to begin with must be on the disk.",
            f"none of round {options.round}",
            f"List them: codistill restore {folder}",
        )
    with locked(folder):  # not while the agent takes part
        newest = max(chosen, key=lambda state: state.time)
        data = read_state(newest.path)
        if data is None:
            raise CheckpointError(f"{newest.path} is corrupted.", "it is damaged", "Choose another one.")
        write_state(folder / START, data)
    print(f"{_line(newest)}\nThe agent begins with this state when it joins next. No other state was removed.")
    return 0


def _line(state: StateFile) -> str:
    where = "in use" if state.back_to is None else f"set aside, went on from round {state.back_to}"
    return f"round {state.done:>6}  {state.time}  run {state.run[:8]}  {where}"
