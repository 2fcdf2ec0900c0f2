"""The policy of an agent: what it takes part in and what it releases, decided on its own machine; its audit log.

A hub proposes terms; the agent compares them with its policy before anything but its join request is sent, and compares
each release with the policy's limits before it is sent. Nothing that a hub sends can change a policy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, cast

import numpy as np

from codistill.core.errors import CheckpointError, PolicyError, RecipeError, nearest
from codistill.core.files import open_patiently, replace_file, write_all, writing
from codistill.core.settings import Settings, check_settings, from_table, setting
from codistill.core.text import parse_json, parse_toml
from codistill.engine.description import RunDescription
from codistill.network.frames import MESSAGES, FrameKind, Turn
from codistill.network.transport import Transport
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.results.records import Scores
from codistill.results.scores import VALIDATION
from codistill.wire.packing import BODY

DAILY = ("rounds_per_day", "bytes_per_day")
_NOT_TOLD = "(not told)"


@dataclass(frozen=True, kw_only=True)
class Reports(Settings):
    """[report]: what is reported to a hub besides the protocol's messages. What is false is not sent."""

    accuracy: bool = setting(True, "scores on the common test set")
    own_accuracy: bool = setting(True, "scores on the agent's own test data")
    outputs: bool = setting(True, "mean outputs by class, and predicted classes, on the common test set")
    alone: bool = setting(True, "scores of a copy that is trained alone, as a baseline; false: it is not trained")
    measures: bool = setting(True, "values that the protocol measures")
    remarks: bool = setting(True, "texts: remarks of the protocol, and why a message was refused")

    def __post_init__(self) -> None:
        check_settings(self, "report")


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
        if accepts is None:
            return self
        allowed = tuple(name for name in accepts if self.protocols is None or name in self.protocols)
        return replace(self, protocols=allowed)

    def check_hub(self, address: str) -> None:
        if self.hubs is not None and not {address, address.rpartition(":")[0]} & set(self.hubs):
            raise _broken(
                "hubs",
                "The hub must be one that this agent's policy names.",
                f"{address}; hubs: {', '.join(self.hubs) or 'none'}",
                "Correct --hub, or hubs = [...] in the policy.",
            )

    def check_protocol(self, protocol: Protocol) -> None:
        if self.protocols is not None and name_of(protocol) not in self.protocols:
            raise _broken(
                "protocols",
                "The federation must run a protocol that this agent accepts.",
                f"{name_of(protocol)}; accepted: {', '.join(self.protocols) or 'none'}",
                "Ask the operator of the hub; or change accepts = (...) or protocols = [...] of this agent.",
            )

    def check(self, description: RunDescription) -> None:
        """Raise unless the policy allows the run; the error names every rule that it breaks."""
        self.check_protocol(description.protocol)
        broken = self.objections(description)
        if broken:
            raise _broken(
                broken[0].partition(" ")[0],
                "The terms of the federation must keep to this agent's policy.",
                "; ".join(broken)[:1000],
                "Ask the operator of the hub to change the terms; or change the policy of this agent.",
            )

    def objections(self, description: RunDescription) -> list[str]:
        """Every rule that a run breaks, each as a text that starts with the rule's name."""
        protocol, broken = description.protocol, []
        if self.protocols is not None and name_of(protocol) not in self.protocols:
            broken.append(f"protocols = {list(self.protocols)}: {name_of(protocol)}")
        for name, rule in self.settings.get(name_of(protocol), {}).items():
            value = getattr(protocol, name)
            why = _objection(value, rule)
            if why:
                broken.append(f"settings.{name_of(protocol)}.{name} {why}: {value!r}"[:200])
        agents = len(description.topology.names)
        if self.least_agents is not None and agents < self.least_agents:
            broken.append(f"least_agents = {self.least_agents}: the run has {agents}")
        if self.compression == "required" and description.compression is None:
            broken.append("compression = required: messages are not compressed")
        if self.compression == "forbidden" and description.compression is not None:
            broken.append("compression = forbidden: messages are compressed")
        if self.rounds is not None and not description.asynchronous and description.spec.rounds > self.rounds:
            broken.append(f"rounds = {self.rounds}: the run has {description.spec.rounds}")
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
        """Raise if a release, as the audit log describes it, exceeds a limit; `usage`: what was released before."""
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
                later = (
                    "Join again: it waits for the next day (UTC)" if rule in DAILY else "Ask the operator of the hub"
                )
                raise _broken(
                    rule,
                    f"What this agent releases must keep to its policy: {rule} = {most}.",
                    f"this would be {count:,} {what}",
                    f"{later}; or raise {rule} in its policy.",
                )

    def waits(self, usage: Usage) -> str | None:
        """The daily limit that this agent has reached today; None if there is none."""
        for rule in DAILY:
            most, reached = getattr(self, rule), usage.stopped.get(rule)
            if most is not None and reached is not None and most <= reached:
                return f"{rule} = {most}"
        return None

    def reported(self, content: dict[str, Any]) -> dict[str, Any]:
        sent = dict(content)
        if not self.report.measures:
            sent["measures"] = []
        if not self.report.remarks:
            sent["remarks"] = []
            sent["refused"] = [(to, by, _NOT_TOLD) for to, by, _ in content["refused"]]
        return sent

    def scored(self, scores: Scores) -> Scores:
        allowed = {False: self.report.accuracy, True: self.report.own_accuracy}
        own = ("own_", VALIDATION)  # both depend on the agent's own samples
        return {name: value for name, value in scores.items() if allowed[name.startswith(own)]}

    # --- human-readable ---------------------------------------------------------------------------

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
    """Its name; for a custom protocol without a name, that of its class, as in the terms."""
    return protocol.name or type(protocol).__name__


def releases_class_statistics(protocol: Protocol) -> bool:
    """Whether agents send statistics of their labels by class; of an unknown protocol: yes."""
    if PROTOCOLS.get(protocol.name) is not type(protocol):
        return True
    by_class = protocol.name in ("crs", "fd", "feddistill") or getattr(protocol, "form", None) == "classes"
    return by_class or getattr(protocol, "aggregate", None) == "coverage"


def read_policy(path: Path, own: type[Protocol] | None = None) -> Policy:
    """The policy in a TOML file; `own`: a custom protocol."""
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
    """The policy that tables describe; an unknown key or protocol raises an error that names the most similar one."""
    known = {**PROTOCOLS, **({} if own is None else {own.name or own.__name__: own})}
    fields = [each.name for each in dataclasses.fields(Policy)]
    for key in tables:
        if key not in fields:
            raise RecipeError("Unknown rule in the policy.", f"'{key}'", nearest(key, fields))
    report = tables.get("report", {})
    if not isinstance(report, dict):
        raise RecipeError("[report] of a policy must be a table.", f"{report!r}"[:80], "Write [report] and its keys.")
    made: Policy = from_table(Policy, {**tables, "report": from_table(Reports, report, "report")}, "policy")
    for name in (*(made.protocols or ()), *made.settings):
        if name not in known:
            raise RecipeError("Unknown protocol in the policy.", f"'{name}'", nearest(name, known))
    for name, rules in made.settings.items():
        check_rules(known[name], rules)
    return made


# --- Bounds of a protocol's settings --------------------------------------------------------------------

_BOUNDS = ("at_least", "at_most")


def check_rules(kind: type[Protocol], rules: Any) -> None:
    where = f"[settings.{kind.name or kind.__name__}]"
    if not isinstance(rules, dict):
        raise RecipeError(f"{where} of a policy must be a table.", f"{rules!r}"[:80], "Write SETTING = ALLOWED.")
    fields = [field.name for field in dataclasses.fields(kind)]
    for name, rule in rules.items():
        if name not in fields:
            raise RecipeError(f"Unknown setting in {where}.", f"'{name}'", nearest(name, fields))
        if isinstance(rule, dict):
            for key, bound in rule.items():
                if key not in _BOUNDS:
                    raise RecipeError(f"Unknown bound of {where} {name}.", f"'{key}'", nearest(key, _BOUNDS))
                if isinstance(bound, bool) or not isinstance(bound, int | float):
                    raise RecipeError(
                        f"{where} {name}.{key} must be a number.", f"{bound!r}"[:80], f"Write {key} = NUMBER."
                    )


def _objection(value: Any, rule: Any) -> str | None:
    if isinstance(rule, dict):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if "at_least" in rule and not (is_number and value >= rule["at_least"]):
            return f"must be at least {rule['at_least']}"
        if "at_most" in rule and not (is_number and value <= rule["at_most"]):
            return f"must be at most {rule['at_most']}"
        return None
    allowed = rule if isinstance(rule, list) else [rule]
    plain = list(value) if isinstance(value, tuple) else value
    if any(plain == each and isinstance(plain, bool) == isinstance(each, bool) for each in allowed):
        return None
    return f"must be {'one of ' if len(allowed) > 1 else ''}{', '.join(map(repr, allowed))}"


# --- The audit log of an agent: one JSON line for everything that it releases, appended before it is sent.
#
# The lines are chained by hashes. The digest of a line is the SHA-256 of its bytes without the line break; each line
# holds the digest of the line before as `previous` (the first one: 64 zeros). A line that was changed, removed, added
# or moved breaks the chain. Lines that are missing at the end do not: compare the digest of the last line, the *head*,
# with one that was noted elsewhere.

AUDIT = "audit.jsonl"
START = "0" * 64  # in place of the digest of a line before the first
_KEEP = "Keep the file: it may be evidence. To continue, move it elsewhere; a new log is started."
_FREE = "Free some space and join again: nothing is released before it is in the audit log."
_LONGEST = 1 << 24  # bytes of a line: terms with a long roster


@dataclass
class Usage:
    """What a log has released: rounds in total, and rounds and bytes of the last day (UTC)."""

    rounds: int = 0
    day: str = ""
    rounds_of_day: int = 0
    bytes_of_day: int = 0
    stopped: dict[str, int] = field(default_factory=dict)  # limits that were reached that day, by the name of the rule
    _turn: tuple[int, int] | None = None

    def begin(self, day: str) -> None:
        """Reset the daily counts if this is another day."""
        if day != self.day:
            self.day, self.rounds_of_day, self.bytes_of_day, self.stopped = day, 0, 0, {}

    def is_new_round(self, entry: dict[str, Any]) -> bool:
        """Whether this is the first message of a round; a round that is repeated is another one."""
        return entry["round"] > 0 and "attempt" in entry and (entry["round"], entry["attempt"]) != self._turn

    def add(self, entry: dict[str, Any]) -> None:
        self.begin(entry["time"][:10])
        match entry["event"]:
            case "started":
                self._turn = None
            case "stopped":
                self.stopped[entry["rule"]] = entry["limit"]
            case "released":
                self.bytes_of_day += entry["bytes"] * len(entry["to"])
                if self.is_new_round(entry):
                    self._turn = (entry["round"], entry["attempt"])
                    self.rounds, self.rounds_of_day = self.rounds + 1, self.rounds_of_day + 1


class ChainReader:
    """Reads a log line by line and checks the chain; a line that does not fit raises a `CheckpointError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines, self.head = 0, START
        self.cut = 0  # bytes of an incomplete last line: the process was killed while it wrote it
        self.size = 0  # bytes of all complete lines

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The digest and the content of each line."""
        try:
            with self.path.open("rb") as file:
                while line := file.readline(_LONGEST):
                    if not line.endswith(b"\n") and not file.read(1):
                        self.cut = len(line)
                        return
                    entry = self._checked(line)
                    self.lines, self.size = self.lines + 1, self.size + len(line)
                    self.head = _digest(line[:-1])
                    yield self.head, entry
        except OSError as error:
            raise CheckpointError(
                f"{self.path} must be readable.", f"{error.strerror}", "Name the folder of an agent (--state)."
            ) from None

    def _checked(self, line: bytes) -> dict[str, Any]:
        number = self.lines + 1
        try:
            entry = parse_json(line)
            found, previous = entry["number"], entry["previous"]
            _ = entry["event"], entry["time"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._broken(f"line {number} is not a line of an audit log") from None
        if found != number:
            raise self._broken(f"line {number} has the number {found!r}: lines were removed, added or moved")
        if previous != self.head:
            before = f"line {number - 1}" if self.lines else "the start of a log"
            raise self._broken(f"line {number} does not continue {before}: one of them was changed or replaced")
        return dict(entry)

    def _broken(self, found: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is corrupted.", found[:200], _KEEP)


class AuditLog:
    """Appends lines to the log in an agent's folder, which the caller has locked."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / AUDIT
        self.usage = Usage()
        with writing(self.path, _FREE):
            if not self.path.exists():
                replace_file(self.path, b"", self.path.with_name(f"{AUDIT}.part"), 0o600)
            # Opened before it is read, so that a link or a pipe is refused.
            self._file = FileIO(open_patiently(self.path, os.O_WRONLY | os.O_APPEND), "a")
        try:
            chain = ChainReader(self.path)
            for _, entry in chain:
                self.usage.add(entry)
            self.lines, self.head, self._size, self.cut = chain.lines, chain.head, chain.size, chain.cut
            if chain.cut:
                with writing(self.path, _FREE):
                    os.ftruncate(self._file.fileno(), self._size)  # it was never released, see `append`
        except BaseException:
            self._file.close()
            raise
        self._lock = threading.Lock()

    def append(self, event: str, **content: Any) -> None:
        """Write a line to disk; after that, what it describes may be released."""
        with self._lock:
            time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            entry = {"number": self.lines + 1, "time": time, "event": event, **content, "previous": self.head}
            line = json.dumps(entry, separators=(",", ":")).encode()
            with writing(self.path, _FREE):
                try:
                    write_all(self._file, line + b"\n")
                except OSError:
                    os.ftruncate(self._file.fileno(), self._size)  # a part of a line
                    raise
            self.lines, self.head, self._size = self.lines + 1, _digest(line), self._size + len(line) + 1
            self.usage.add(entry)

    def close(self) -> None:
        self._file.close()

    def __str__(self) -> str:
        return f"head {self.head} after {self.lines} lines"


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


# --- What a frame holds, described without its values ---------------------------------------------------

_DTYPES = {"F": "float", "I": "int", "U": "uint"}  # in the header of an array that is sent as it is
_PACKED_DTYPES = {"e": "float16", "f": "float32", "d": "float64"}  # of a compressed array, before it was compressed
_MODELS = ("torch", "onnx", "skops", "kernel")  # the value `kind` of a message that holds a model
_ANSWERS = {"report": "report", "scores": "scores", "trouble": "confirmation"}  # what an answer of an agent holds


def summarise(kind: FrameKind, payload: bytes) -> dict[str, Any]:
    """`what` a payload is, the names of its plain values, and the names, types and shapes of its arrays."""
    try:
        arrays, values = _contents(payload)
        if kind in (FrameKind.CONTROL, FrameKind.HELLO):
            return _of_control(json.loads(values["json"]), arrays)
        what = "model" if values.get("kind") in _MODELS else "protocol message"
        return {"what": what, "values": sorted(values), "arrays": arrays}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):  # logged by size and digest all the same
        return {"what": "other", "values": [], "arrays": {}}


def _of_control(content: Mapping[str, Any], arrays: dict[str, str]) -> dict[str, Any]:
    fields = sorted(key for key, value in content.items() if key not in ("do", "number") and value is not None)
    what = str(content["do"])
    if what == "report":  # of a run without rounds
        fields = sorted({"own_rounds", *content["scores"], *(key for key, value in content[what].items() if value)})
    if what == "answer":
        what = next((word for key, word in _ANSWERS.items() if key in content), "answer")
        if what == "report":
            fields = sorted(key for key, value in content[what].items() if value)
        elif what == "scores":
            fields = sorted(content[what])
            what = "scores and outputs" if arrays else "scores"
    return {"what": what, "values": fields, "arrays": arrays}


def _contents(payload: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Arrays as words by name, and the plain values; read from the header of the encoding alone."""
    header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
    metadata = header.pop("__metadata__", None) or {}
    arrays = {name: f"{_dtype(found['dtype'])} {_shape(found['shape'])}" for name, found in header.items()}
    if "p" not in metadata:
        return arrays, json.loads(metadata.get("v", "{}"))
    values, (items, _) = json.loads(metadata["p"])
    del arrays[BODY]  # which holds the arrays below
    for name, dtype, shape, bits, k, _ in items:
        parts = [f"{bits} bits"] * bool(bits) + [f"{k} per row"] * bool(k)
        arrays[name] = f"{_PACKED_DTYPES[dtype]} {_shape(shape)}, compressed" + "".join(f", {part}" for part in parts)
    return arrays, values


def _dtype(code: str) -> str:
    return "bool" if code == "BOOL" else _DTYPES[code[0]] + code[1:]


def _shape(sides: list[int]) -> str:
    return "x".join(map(str, sides)) or "scalar"


# --- Sending under a policy -----------------------------------------------------------------------------

_ALWAYS = ("leaving", "refusal")  # allowed beyond every limit: after them nothing more is sent


class AuditedTransport:
    """A transport that sends nothing that the policy forbids, and nothing before it is in the audit log."""

    def __init__(self, transport: Transport, log: AuditLog | None, policy: Policy) -> None:
        self._transport: Any = transport
        self._log, self._policy = log, policy
        self._usage = Usage() if log is None else log.usage

    def send(self, receivers: Sequence[str], kind: FrameKind, turn: Turn, payload: bytes = b"") -> None:
        """Check and log a frame, then send it. A frame without content, such as the end of a turn, is just sent."""
        if payload and receivers:
            entry: dict[str, Any] = {"to": list(receivers), **summarise(kind, payload), "round": max(0, turn.phase + 1)}
            if kind in MESSAGES:
                entry["attempt"] = turn.attempt
            self._release(entry, payload)
        self._transport.send(receivers, kind, turn, payload)

    def bar(self, name: str, why: str) -> None:
        """Close the links to a node, which learns why; the reason is logged first."""
        entry = {"to": [name], "what": "refusal", "values": ["why"], "arrays": {}, "round": 0}
        self._release(entry, why.encode())
        self._transport.bar(name, why)

    def _release(self, entry: dict[str, Any], payload: bytes) -> None:
        entry |= {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
        self._usage.begin(datetime.now(UTC).date().isoformat())
        if entry["what"] not in _ALWAYS:
            try:
                self._policy.check_release(entry, self._usage)
            except PolicyError as error:
                self._append("stopped", {"rule": error.rule, "limit": getattr(self._policy, error.rule)})
                raise
        self._append("released", entry)

    def _append(self, event: str, entry: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.append(event, **entry)
        else:
            self._usage.add({"time": self._usage.day, "event": event, **entry})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def audited(transport: Transport, log: AuditLog | None, policy: Policy) -> Transport:
    """A transport that checks and logs everything that is sent; the same one, if there is nothing to do."""
    if log is None and policy == ANYTHING:
        return transport
    return cast(Transport, AuditedTransport(transport, log, policy))
