"""The commands of an organisation that runs an agent: `audit` (what was released) and `policy` (what may be)."""

from __future__ import annotations

import argparse
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.cli.console import add_command, add_trust_argument, make_console
from codistill.core.errors import CheckpointError, PolicyError, RecipeError

if TYPE_CHECKING:
    from codistill.experiments.recipe import Recipe
    from codistill.network.policy import ChainReader
    from codistill.protocol import Protocol

_SHORTEST = 12  # digits of a digest that are enough to recognise it
_WIDTH = 160  # of tables, where the output is not a terminal


def add_parsers(commands: argparse._SubParsersAction[Any]) -> None:
    audit = commands.add_parser("audit", help="what an agent has released: its audit log, checked or shown")
    actions = audit.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "check that the log is as it was written, and count what was released"
    verify = add_command(actions, "verify", _verify, text)
    show = add_command(actions, "show", _show, "show what was released, to whom and when")
    for parser in (verify, show):
        parser.add_argument(
            "folder", type=Path, metavar="FOLDER", help="the agent's folder (--state), or the file in it"
        )
    verify.add_argument("--head", metavar="DIGEST", help="a head that was noted before: it must be in the log")
    show.add_argument("--last", type=int, default=20, metavar="N", help="how many lines (default: 20)")

    policy = commands.add_parser("policy", help="what an agent agrees to: its policy, checked against a recipe")
    actions = policy.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = add_command(actions, "check", _check, "say whether an agent with this policy would take part in a recipe")
    check.add_argument("policy", type=Path, metavar="POLICY", help="policy.toml")
    check.add_argument("recipe", type=Path, nargs="?", metavar="RECIPE", help="a TOML recipe; unset: none")
    add_trust_argument(check)
    check.add_argument("--agent", type=Path, metavar="FILE", help="my_agent.py: its labels are compared as well")


def _chain(folder: Path) -> ChainReader:
    from codistill.network.policy import AUDIT, ChainReader

    return ChainReader(folder / AUDIT if folder.is_dir() else folder)


def _verify(options: argparse.Namespace) -> int:
    from codistill.core.text import bytes_text
    from codistill.network.policy import Usage
    from codistill.results.tables import Table

    chain, usage, noted = _chain(options.folder), Usage(), None
    wanted = _noted(options.head)
    events: Counter[str] = Counter()
    releases: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    runs, first, last = set(), "", ""
    for digest, entry in chain:
        usage.add(entry)
        events[entry["event"]] += 1
        first, last = first or entry["time"], entry["time"]
        if wanted and digest.startswith(wanted):
            noted = chain.lines
        if entry["event"] == "joined":
            runs.add(entry["run"])
        for name in entry["to"] if entry["event"] == "released" else ():
            releases[name, entry["what"]] += 1
            sizes[name, entry["what"]] += entry["bytes"]
    if wanted and noted is None:
        raise CheckpointError(
            f"{chain.path} must hold the line whose digest was noted.",
            f"no line with the digest {wanted[:_SHORTEST]}... among {chain.lines}",
            "Lines were cut off at the end, or the log was replaced: look for a copy.",
        )
    during = f" from {first} to {last}" if last else ""
    print(f"{chain.path}: as it was written, {chain.lines} lines ({bytes_text(chain.size)}){during}")
    print(f"runs: {len(runs)}; starts: {events['started']}; joins: {events['joined']}; rounds: {usage.rounds}")
    if events["refused"] or events["stopped"]:
        print(f"terms refused: {events['refused']}; releases stopped by the policy: {events['stopped']}")
    rows = [(name, what, f"{count}", bytes_text(sizes[name, what])) for (name, what), count in sorted(releases.items())]
    make_console(_WIDTH).print(Table(("to", "what", "releases", "bytes"), "llrr", rows))
    if chain.cut:
        print(f"The last line was cut off after {chain.cut} bytes, as by a kill while it was written; it was not sent.")
    if noted is not None:
        print(f"The noted digest is that of line {noted}: {chain.lines - noted} lines came after it.")
    print(f"head {chain.head} after {chain.lines} lines")
    return 0


def _noted(head: str | None) -> str:
    digits = (head or "").strip().lower()
    if head is not None and (not _SHORTEST <= len(digits) <= 64 or set(digits) - set("0123456789abcdef")):
        raise RecipeError(
            "--head must be a digest.", f"'{head}'"[:80], f"Give at least {_SHORTEST} hexadecimal digits of a head."
        )
    return digits


def _show(options: argparse.Namespace) -> int:
    from codistill.results.tables import Table

    chain = _chain(options.folder)
    rows = deque((_row(entry, digest) for digest, entry in chain), maxlen=max(0, options.last))
    headings = ("line", "time", "round", "to", "what", "content", "bytes", "digest")
    make_console(_WIDTH).print(Table(headings, "l" * len(headings), list(rows)))
    print(f"head {chain.head} after {chain.lines} lines")
    return 0


def _row(entry: dict[str, Any], digest: str) -> tuple[str, ...]:
    event = entry["event"]
    if event == "released":
        arrays = [f"{name} ({form})" for name, form in entry["arrays"].items()]
        content = ", ".join([*entry["values"], *arrays])
        told = str(entry["round"]), ", ".join(entry["to"]), entry["what"], content, f"{entry['bytes']:,}"
    else:
        contents = {
            "started": f"policy {str(entry.get('policy_digest'))[:_SHORTEST]}",
            "joined": f"run {str(entry.get('run'))[:8]}: {entry.get('terms', {}).get('protocol', {}).get('name')}",
            "stopped": f"{entry.get('rule')} = {entry.get('limit')}",
            "refused": str(entry.get("why")),
        }
        told = "", "", event, contents.get(event, ""), ""
    return str(entry["number"]), entry["time"], *told, digest[:_SHORTEST]


def _check(options: argparse.Namespace) -> int:
    from codistill.experiments.building import agent_names
    from codistill.experiments.networked import describe_terms, read_agent_file
    from codistill.experiments.recipe import check_trusted, code_of, read_recipe
    from codistill.federation.joining import with_agent
    from codistill.network.policy import read_policy

    if options.recipe is None:
        print(f"policy: {read_policy(options.policy)}")
        return 0
    if options.agent is not None and options.agent.suffix == ".toml":
        used = code_of(read_recipe(options.agent, run_code=False))
        check_trusted(used, options.trust_code, f"An agent of {options.agent}")
    recipe = read_recipe(options.recipe, run_code=False)
    mine = None
    if options.agent is not None:
        if not recipe.data.held_by_agents:
            raise RecipeError(
                "--agent is for a recipe whose agents hold their data: only there an agent's labels are its own.",
                f"{options.recipe} without held_by_agents",
                "Leave --agent out, or give the recipe of the federation.",
            )
        mine = read_agent_file(options.agent, agent_names(recipe)[0], policy=options.policy)
    recipe = _with_protocol(recipe, None if mine is None else mine.protocol, trusted=options.trust_code)
    policy = read_policy(options.policy, type(recipe.protocol))
    print(f"policy: {policy}")
    description = describe_terms(recipe)
    if mine is not None:
        description = with_agent(replace(description, public=mine.public or description.public), mine.agent)
        policy = mine.policy
    broken = policy.objections(description)
    if broken:
        raise PolicyError(
            f"{options.recipe} must keep to the policy {options.policy}.",
            "; ".join(broken),
            "Ask whoever runs the hub to change the recipe; or change the policy.",
        )
    print(f"{options.recipe} would be accepted: {recipe.protocol.name}, {recipe.spec.rounds} rounds")
    if policy.classes is not None and options.agent is None:
        print("classes: compared with the agent's labels when it joins; now by --agent my_agent.py")
    return 0


def _with_protocol(recipe: Recipe, own: type[Protocol] | None, *, trusted: bool) -> Recipe:
    """The recipe with its protocol; one in a file is the agent's own, if that is the same file, or must be trusted."""
    from codistill.core.settings import from_table
    from codistill.experiments.recipe import check_trusted, with_code
    from codistill.experiments.user_code import UnreadProtocol, digests_of
    from codistill.protocol import code_digest

    unread = recipe.protocol
    if not isinstance(unread, UnreadProtocol):
        return recipe
    same = own is not None and own.__name__ == unread.class_name
    if own is not None and same and code_digest(own) in digests_of([unread.place]).values():
        return replace(recipe, protocol=from_table(own, unread.table, "protocol"))
    check_trusted([unread.place], trusted, "Whether a policy allows a protocol in a file")
    return with_code(recipe)
