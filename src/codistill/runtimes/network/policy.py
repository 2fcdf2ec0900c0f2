"""The policy of an agent: what it takes part in and what it releases, decided on its own machine.

A hub proposes terms; the agent compares them with its policy before anything but its join request is sent, and compares
each release with the policy's limits before it is sent. Nothing that a hub sends can change a policy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from codistill.errors import PolicyError, RecipeError, nearest
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.network.audit_log import Usage
from codistill.runtimes.network.setting_rules import check_rules, objections_to_settings
from codistill.settings import Settings, check_settings, from_table, setting
from codistill.text import parse_toml

DAILY = ("rounds_per_day", "bytes_per_day")
_NOT_TOLD = "(not told)"


@dataclass(frozen=True, kw_only=True)
class Reports(Settings):
    """[report]: what a hub is told besides the protocol's messages. What is false is not sent."""

    accuracy: bool = setting(True, "scores on the common test set")
    own_accuracy: bool = setting(True, "scores on the agent's own test data")
    outputs: bool = setting(True, "mean outputs by class, and predicted classes, on the common test set")
    alone: bool = setting(True, "scores of a copy that is trained alone, as a baseline; false: it is not trained")
    measures: bool = setting(True, "values that the protocol measures")
    remarks: bool = setting(True, "texts: remarks of the protocol, and why a message was refused")

    def __post_init__(self) -> None:
        check_settings(self, "report")

    @property
    def withheld(self) -> list[str]:
        """What is not sent."""
        return [name for name, sent in dataclasses.asdict(self).items() if not sent]


@dataclass(frozen=True, kw_only=True)
class Policy(Settings):
    """What an agent agrees to; without a rule, everything that codistill can do."""

    protocols: tuple[str, ...] | None = setting(None, "protocols that it takes part in; unset: any")
    hubs: tuple[str, ...] | None = setting(None, "addresses of hubs that it joins, HOST or HOST:PORT; unset: any")
    least_agents: int | None = setting(None, "agents that a run must have, this one included", at_least=1)
    classes: tuple[int, ...] | None = setting(
        None, "labels of which statistics by class may be released; unset: all", at_least=0
    )
    compression: str | None = setting(
        None, "whether messages must be compressed; unset: either", choices=("required", "forbidden")
    )
    rounds: int | None = setting(None, "rounds in all that it takes part in, repeated ones included", at_least=0)
    rounds_per_day: int | None = setting(None, "rounds on one day (UTC), repeated ones included", at_least=1)
    bytes_per_day: int | None = setting(None, "bytes released on one day (UTC)", at_least=1)
    largest_message: int | None = setting(None, "bytes of the largest message that is released", at_least=1)
    settings: dict[str, Any] = setting(factory=dict, help="[settings.PROTOCOL]: bounds of the protocol's settings")
    report: Reports = setting(factory=Reports, help="[report]: what is reported to the hub")

    def __post_init__(self) -> None:
        check_settings(self, "policy")

    # --- before joining ---------------------------------------------------------------------------

    def accepting(self, accepts: Sequence[str] | None) -> Policy:
        """The same policy for some protocols only."""
        if accepts is None:
            return self
        allowed = tuple(name for name in accepts if self.protocols is None or name in self.protocols)
        return replace(self, protocols=allowed)

    def check_hub(self, address: str) -> None:
        """Only a hub at an address that the policy names is connected to."""
        if self.hubs is not None and not {address, address.rpartition(":")[0]} & set(self.hubs):
            raise _broken(
                "hubs",
                "The hub must be one that this agent's policy names.",
                f"{address}; hubs: {', '.join(self.hubs) or 'none'}",
                "Correct --hub, or hubs = [...] in the policy.",
            )

    def check_protocol(self, protocol: Protocol) -> None:
        """Only protocols on the policy's list, if it has one."""
        if self.protocols is not None and name_of(protocol) not in self.protocols:
            raise _broken(
                "protocols",
                "The federation must run a protocol that this agent accepts.",
                f"{name_of(protocol)}; accepted: {', '.join(self.protocols) or 'none'}",
                "Ask whoever runs the hub; or change accepts = (...) or protocols = [...] of this agent.",
            )

    def check(self, description: RunDescription) -> None:
        """The run must be one that the policy allows; the error names every rule that it breaks."""
        self.check_protocol(description.protocol)
        broken = self.objections(description)
        if broken:
            raise _broken(
                broken[0].partition(" ")[0],
                "The terms of the federation must keep to this agent's policy.",
                "; ".join(broken)[:1000],
                "Ask whoever runs the hub to change the terms; or change the policy of this agent.",
            )

    def objections(self, description: RunDescription) -> list[str]:
        """Every rule that a run breaks, in words that start with the rule's name."""
        protocol, broken = description.protocol, []
        if self.protocols is not None and name_of(protocol) not in self.protocols:
            broken.append(f"protocols = {list(self.protocols)}: {name_of(protocol)}")
        broken += objections_to_settings(protocol, self.settings.get(name_of(protocol), {}))
        agents = len(description.topology.names)
        if self.least_agents is not None and agents < self.least_agents:
            broken.append(f"least_agents = {self.least_agents}: the run has {agents}")
        if self.compression == "required" and description.compression is None:
            broken.append("compression = required: messages are not compressed")
        if self.compression == "forbidden" and description.compression is not None:
            broken.append("compression = forbidden: messages are compressed")
        if self.rounds is not None and not description.asynchronous and description.plan.rounds > self.rounds:
            broken.append(f"rounds = {self.rounds}: the run has {description.plan.rounds}")
        if self.classes is not None and releases_class_statistics(protocol):
            for agent in description.agents:
                held = np.flatnonzero(np.asarray(agent.shard.targets).any(axis=0)).tolist()
                released = getattr(protocol.chosen(agent.choices), "release_classes", None)
                others = sorted(set(held if released is None else released) & set(held) - set(self.classes))
                if others:
                    shown = ", ".join(map(str, others[:10]))
                    broken.append(f"classes = {list(self.classes)}: {name_of(protocol)} releases statistics of {shown}")
        return broken

    # --- while it takes part ------------------------------------------------------------------------

    def check_release(self, entry: Mapping[str, Any], usage: Usage) -> None:
        """A release, as the audit log describes it, must be within the limits; `usage`: what was released before."""
        size = entry["bytes"] * len(entry["to"])
        new_round = int(usage.is_new_round(dict(entry)))
        found = {
            "largest_message": (entry["bytes"], "bytes in one message"),
            "rounds": (usage.rounds + new_round, "rounds"),
            "rounds_per_day": (usage.rounds_of_day + new_round, f"rounds on {usage.day}"),
            "bytes_per_day": (usage.bytes_of_day + size, f"bytes on {usage.day}"),
        }
        for rule, (count, what) in found.items():
            most = getattr(self, rule)
            if most is not None and count > most and (new_round or rule not in ("rounds", "rounds_per_day")):
                later = "Join again: it waits for the next day (UTC)" if rule in DAILY else "Ask the hub's operator"
                raise _broken(
                    rule,
                    f"What this agent releases must keep to its policy: {rule} = {most}.",
                    f"this would be {count:,} {what}",
                    f"{later}; or raise {rule} in its policy.",
                )

    def waits(self, usage: Usage) -> str | None:
        """The rule by which this agent takes part in nothing more today; None if there is none."""
        for rule in DAILY:
            most, reached = getattr(self, rule), usage.stopped.get(rule)
            if most is not None and reached is not None and most <= reached:
                return f"{rule} = {most}"
        return None

    def reported(self, content: dict[str, Any]) -> dict[str, Any]:
        """Of a report, what may be sent."""
        sent = dict(content)
        if not self.report.measures:
            sent["measures"] = []
        if not self.report.remarks:
            sent["remarks"] = []
            sent["refused"] = [(to, by, _NOT_TOLD) for to, by, _ in content["refused"]]
        return sent

    def scored(self, scores: Scores) -> Scores:
        """Of scores, what may be sent."""
        allowed = {False: self.report.accuracy, True: self.report.own_accuracy}
        return {name: value for name, value in scores.items() if allowed[name.startswith("own_")]}

    # --- for people -------------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """The rules as plain values, without those that are unset."""
        rules = {key: value for key, value in dataclasses.asdict(self).items() if value not in (None, {})}
        rules["report"] = {key: value for key, value in rules["report"].items() if not value}
        plain: dict[str, Any] = json.loads(json.dumps({key: value for key, value in rules.items() if value != {}}))
        return plain

    @property
    def digest(self) -> str:
        """SHA-256 of the rules."""
        return hashlib.sha256(json.dumps(self.plain(), sort_keys=True).encode()).hexdigest()

    def __str__(self) -> str:
        rules = self.plain()
        withheld = rules.pop("report", {})
        words = [f"{key} = {json.dumps(value)}" for key, value in rules.items()]
        words += [f"not reported: {', '.join(withheld)}"] if withheld else []
        return f"{'; '.join(words) or 'no rules: it takes part in anything'} (digest {self.digest[:12]})"


ANYTHING = Policy()


def _broken(rule: str, must: str, found: str, do: str) -> PolicyError:
    error = PolicyError(must, found, do)
    error.rule = rule
    return error


def name_of(protocol: Protocol) -> str:
    """Its name; of one's own protocol without a name, that of its class, as in the terms."""
    return protocol.name or type(protocol).__name__


def releases_class_statistics(protocol: Protocol) -> bool:
    """Whether agents send something computed from their labels class by class; of an unknown protocol: yes."""
    if PROTOCOLS.get(protocol.name) is not type(protocol):
        return True
    by_class = protocol.name in ("crs", "fd", "feddistill") or getattr(protocol, "form", None) == "classes"
    return by_class or getattr(protocol, "aggregate", None) == "coverage"


def read_policy(path: Path, own: type[Protocol] | None = None) -> Policy:
    """The policy in a TOML file; `own`: a protocol that is not codistill's."""
    try:
        tables = parse_toml(path.read_text("utf-8"))
    except OSError as error:
        raise RecipeError(
            f"The policy {path} must be readable.", f"{error.strerror}", "Check its path and its owner."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"The policy {path} must be valid TOML.", f"{error}", "Correct that line.") from None
    return make_policy(tables, own)


def make_policy(tables: Mapping[str, Any], own: type[Protocol] | None = None) -> Policy:
    """The policy that tables describe; an unknown key or protocol is an error that names the most similar one."""
    known = {**PROTOCOLS, **({} if own is None else {own.name or own.__name__: own})}
    fields = [each.name for each in dataclasses.fields(Policy)]
    for key in tables:
        if key not in fields:
            raise RecipeError("A policy may only hold known rules.", f"'{key}'", nearest(key, fields))
    report = tables.get("report", {})
    if not isinstance(report, dict):
        raise RecipeError("[report] of a policy must be a table.", f"{report!r}"[:80], "Write [report] and its keys.")
    made: Policy = from_table(Policy, {**tables, "report": from_table(Reports, report, "report")}, "policy")
    for name in (*(made.protocols or ()), *made.settings):
        if name not in known:
            raise RecipeError(
                "A policy may only name protocols that are known here.", f"'{name}'", nearest(name, known)
            )
    for name, rules in made.settings.items():
        check_rules(known[name], rules)
    return made
