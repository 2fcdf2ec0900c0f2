"""The terms of a federation: all that must be equal on every node, told when somebody joins.

They are plain values. A protocol is named and its settings are numbers and words: nothing in the terms is
ever executed, and one's own protocol is taken from one's own file, if it is the same file as the hub's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from codistill.core import __version__
from codistill.core.errors import CodistillError, NetworkError
from codistill.core.settings import from_table
from codistill.core.spec import TOLD, RunSpec
from codistill.core.text import printable
from codistill.data.frames import Names, unclear_order
from codistill.data.frames import difference as difference_of_columns
from codistill.data.labels import CLASSIFICATION, TASKS, LabelEncoding
from codistill.data.shard import PublicData
from codistill.engine.description import RunDescription, SharedColumns, agree_on_all_columns
from codistill.network.options import WIRE_VERSION
from codistill.nodes.agent import Agent, JoinInfo
from codistill.nodes.clock import Clock, clock_from_table
from codistill.nodes.faults import Fault, Faults
from codistill.nodes.record import record_of
from codistill.protocol import Protocol, code_digest
from codistill.protocols import PROTOCOLS
from codistill.results.scores import MOST_SCORES, Score, as_scores, find_score
from codistill.topology import Topology
from codistill.wire.compression import Compression

Terms = dict[str, Any]
_MOST = {"rounds": 1 << 31, "seed": 1 << 256, "classes": 1 << 20}  # an agent sets memory aside for its classes
_LONGEST_NAME = 200  # letters of a class
_COLUMNS = 1 << 17  # bytes of the names of columns that are sent, which are half of a join request


def terms_of(description: RunDescription) -> Terms:
    """What must be equal on every node of a run, as plain values."""
    topology, public, compression = description.topology, description.public, description.compression
    made: Terms = {
        "protocol": describe_protocol(description.protocol),
        **{name: getattr(description.spec, name) for name in TOLD},
        "seed": description.seed,
        "classes": description.classes,
        "roster": list(topology.names),
        # Peers report to nobody, and one of them may have a test set that others do not have.
        "task": description.task if topology.hub else None,
        "scores": [score.name for score in description.task_scores] if topology.hub else None,
        "class_names": None if description.encoding is None else description.encoding.names,
        "links": None if topology.hub else _digest(topology),
        "shape": None if description.shape is None else list(description.shape),
        "public": describe_public(public) if description.protocol.needs_public else None,
        "public_by_name": None if public is None else public.digest_by_name(),
        "columns": describe_columns(description.columns),
        "compression": None if compression is None else dataclasses.asdict(compression),
        "faults": [dataclasses.asdict(fault) for fault in description.faults.injected],
        "participation": description.faults.participation,
        "clock": None if description.clock is None else dataclasses.asdict(description.clock),
        "version": __version__,
        "wire": WIRE_VERSION,
    }
    plain: Terms = json.loads(json.dumps(made))  # tuples are lists, as on arrival
    return plain


def description_under(
    terms: Any, agent: Agent, public: PublicData | None, test: tuple[Any, Any] | None, own: type[Protocol] | None = None
) -> RunDescription:
    """The run of an agent that a hub has told its terms; `own`: a protocol of its own that it trusts.

    The labels of the agent and of `test` are as their owner gave them.
    """
    check_terms(terms)
    encoding = _encoding(terms)
    if record_of(agent).task not in (None, encoding.task):
        raise NetworkError(
            "An agent must have the task of the federation.",
            f"{record_of(agent).task} for '{agent.name}', {encoding.task} at the hub",
            "Ask whoever runs the hub, or leave task out.",
        )
    try:
        names = tuple(map(str, terms["roster"]))
        faults = [from_table(Fault, fault, "faults") for fault in terms["faults"]]
        compression = terms.get("compression")
        protocol = protocol_from(terms["protocol"], own)
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise _incomplete(error) from None
    columns = _columns(terms, agent, protocol, public, test)
    columns.take_public(public)
    tested = columns.take_test(test, encoding)
    try:
        return RunDescription(
            protocol=protocol,
            topology=Topology.star(names),
            classes=terms["classes"],
            seed=terms["seed"],
            spec=RunSpec(**{name: terms[name] for name in TOLD}),
            faults=Faults(faults, names, terms["seed"], terms.get("participation", 1.0)),
            agents=(agent,),
            public=public,
            test=tested,
            compression=None if compression is None else from_table(Compression, compression, "compression"),
            tells_class_mix=False,  # the hub is another operator's
            encoding=encoding,
            scores=_scores(terms),
            clock=_clock(terms, protocol, names),
            columns=columns.columns,
            notes=columns.notes,
        )
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise _incomplete(error) from None


def _incomplete(error: Exception) -> NetworkError:
    return _invalid("The terms of a federation must be complete.", f"{error!r}"[:200])


def _encoding(terms: Terms) -> LabelEncoding:
    """How labels become numbers, as the hub tells it."""
    names, classes = terms.get("class_names"), terms["classes"]
    if names is None:
        return LabelEncoding(terms["task"], classes)
    plain = all(type(name) in (str, int, bool) and len(str(name)) <= _LONGEST_NAME for name in names)
    if not plain or len(names) != classes or len(set(map(str, names))) < classes or terms["task"] != CLASSIFICATION:
        raise _invalid(
            "The names of the classes must be different words or numbers, one for each class.", _shown(names)
        )
    return LabelEncoding(CLASSIFICATION, classes, tuple(names))


def _columns(
    terms: Terms, agent: Agent, protocol: Protocol, public: PublicData | None, test: tuple[Any, Any] | None
) -> SharedColumns:
    """The order of the columns of this agent's samples: as the hub tells it, where it does."""
    told = terms.get("columns")
    settled = tuple(told) if isinstance(told, list) else ()
    shared = agree_on_all_columns((agent,), protocol, test, public, settled)
    by_position = terms.get("public") is not None and terms.get("public_by_name") is None
    if public is not None and by_position and public.columns not in ((), shared.columns):
        raise unclear_order("the public data at the hub", "that of this agent")
    return shared


def _clock(terms: Terms, protocol: Protocol, names: tuple[str, ...]) -> Clock | None:
    """The clock of a run without rounds, or of one with rounds that imitates slow agents."""
    if terms["clock"] is None:
        return None
    clock = clock_from_table(terms["clock"])
    clock.check_names(names)
    if clock.offline or (clock.asynchronous and not protocol.asynchronous):
        raise _invalid(
            "The clock of a federation must suit its protocol, and name no spells offline.",
            f"{protocol.name}, {clock}"[:200],
        )
    return clock


def _scores(terms: Terms) -> tuple[Score, ...]:
    unknown = [name for name in terms["scores"] if find_score(name) is None]
    if unknown:
        raise NetworkError(
            "A hub must ask for scores that this agent knows by name.",
            f"{unknown[0]}"[:80],
            "Install the hub's version; a score of one's own can be measured in a simulation only.",
        )
    return as_scores(terms["scores"], terms["task"], terms["classes"])


def _digest(topology: Topology) -> str:
    """Of who speaks to whom, and with which weights."""
    told: Mapping[str, Any] = {name: [topology.neighbours(name), topology.weights(name)] for name in topology.names}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def describe_protocol(protocol: Protocol) -> dict[str, Any]:
    """A protocol by name and settings; one's own also by the digest of its file."""
    kind = type(protocol)
    described = {"name": protocol.name or kind.__name__, "settings": dataclasses.asdict(protocol)}
    if PROTOCOLS.get(protocol.name) is not kind:
        described |= {"class": kind.__name__, "code": code_digest(kind)}
    return described


def describe_public(public: PublicData | None) -> dict[str, Any] | None:
    return None if public is None else {"samples": len(public), "digest": public.digest}


def describe_columns(names: Names) -> list[str] | str | None:
    """The names of columns; of very many the digest, by which it can be seen whether others have the same order."""
    if not names:
        return None
    return list(names) if len(json.dumps(names)) <= _COLUMNS else columns_digest(names)


def columns_digest(names: Names) -> str:
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def read_columns(told: Any) -> Names | str | None:
    """The columns that another node reports, as `describe_columns` has it; a ValueError if it is anything else."""
    if told is None or (isinstance(told, str) and len(told) == 64 and told.isalnum()):
        return told
    listed = isinstance(told, list) and all(isinstance(name, str) for name in told)
    if not listed or not told or len(set(told)) < len(told) or len(json.dumps(told)) > _COLUMNS:
        raise ValueError(f"columns {told!r}"[:80])
    return tuple(told)


def hello_of(agent: Agent, public: PublicData | None) -> dict[str, Any]:
    """What an agent says of itself when it joins: not a sample, not a label."""
    x = np.asarray(record_of(agent).data[0])  # its shard is made when the hub has told the number of classes
    return (
        dataclasses.asdict(record_of(agent).join_info(agent.learner.abilities))
        | {
            "version": __version__,
            "wire": WIRE_VERSION,
            "public": describe_public(public),
            "public_by_name": None if public is None else public.digest_by_name(),
            "columns": describe_columns(record_of(agent).column_names),
            "own_columns": record_of(agent).is_coded,  # whether some of them hold no numbers
            "shape": list(x.shape[1:]),
            "model": agent.learner.describe(),
        }
    )


def read_hello(hello: Mapping[str, Any]) -> JoinInfo | None:
    """What an agent says of its data and its model; None if that is malformed."""
    samples, weights, features, body = (hello.get(key) for key in ("samples", "weights", "features", "body"))
    if type(samples) is not int or not 0 < samples < 1 << 48:
        return None
    if any(digest is not None and (not isinstance(digest, str) or len(digest) != 64) for digest in (weights, body)):
        return None
    if features is not None and (type(features) is not int or not 0 < features < 1 << 31):
        return None
    return JoinInfo(samples, weights, features, body)


def objection(terms: Mapping[str, Any], hello: Mapping[str, Any]) -> str | None:
    """Why an agent that says this may not join; None if it may."""
    if hello.get("wire") != terms["wire"] or hello.get("version") != terms["version"]:
        return (
            f"the hub runs codistill {terms['version']}, the agent {str(hello.get('version'))[:40]}: install the same"
        )
    try:
        columns = read_columns(hello.get("columns"))
    except (ValueError, RecursionError):
        return "malformed join request"
    misshapen = isinstance(columns, tuple) and hello.get("shape") != [len(columns)]
    if misshapen or read_hello(hello) is None or not isinstance(hello.get("model"), str):
        return "malformed join request"
    wanted, has = terms["public"], hello.get("public")
    by_name, theirs = terms.get("public_by_name"), hello.get("public_by_name")
    same = by_name == theirs if by_name and theirs else has == wanted  # of data frames, columns in any order
    if wanted is not None and not same:
        return (
            f"its public data differ: {_shown(has)} instead of {_shown(wanted)}; every node needs the same samples "
            "in the same order"
        )
    if terms["shape"] is not None and hello.get("shape") != terms["shape"]:
        return f"its samples have the shape {str(hello.get('shape'))[:60]} instead of {terms['shape']}"
    return None


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """In what the terms of two peers differ, in words; None if they do not."""
    for key in ("wire", "version", *mine):
        if key == "columns" and None in (mine[key], theirs.get(key)):
            continue  # a plain array has no names
        if mine[key] != theirs.get(key):
            if key == "columns":
                return _columns_difference(mine[key], theirs[key])
            if key == "protocol" and isinstance(theirs.get(key), dict):
                return _protocol_difference(mine[key], theirs[key])
            return f"{key}: {_shown(mine[key])} here, {_shown(theirs.get(key))} there"
    return None


def _columns_difference(mine: Any, theirs: Any) -> str:
    """Peers have nobody who brings their columns into one order."""
    both = isinstance(mine, list) and isinstance(theirs, list) and all(isinstance(name, str) for name in theirs)
    found = difference_of_columns(tuple(theirs), tuple(mine)) if both else "other names, or another order"
    return f"columns: {printable(found, 300) if found else 'in another order there; all peers need the same one'}"


def _protocol_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    settings = theirs.get("settings")
    for key, value in mine["settings"].items():
        if isinstance(settings, dict) and mine["name"] == theirs.get("name") and settings.get(key) != value:
            return f"protocol.{key}: {_shown(value)} here, {_shown(settings.get(key))} there"
    return f"protocol: {mine['name']} here, {_shown(theirs.get('name'))} there"


def check_terms(terms: Any) -> None:
    """Terms that came from elsewhere must be complete, and of this version."""
    if not isinstance(terms, dict) or terms.get("version") != __version__ or terms.get("wire") != WIRE_VERSION:
        theirs = terms.get("version") if isinstance(terms, dict) else None
        raise NetworkError(
            "A hub and its agents must run the same version of codistill.",
            f"{__version__} here, {_shown(theirs)} at the hub",
            "Install the same version on both.",
        )
    wanted = {"protocol": dict, "rounds": int, "seed": int, "classes": int, "roster": list, "faults": list}
    for key, kind in wanted.items():
        if not isinstance(terms.get(key), kind) or isinstance(terms.get(key), bool):
            raise _invalid("The terms of a federation must be complete.", f"no '{key}'")
    for key, most in _MOST.items():
        if not 0 <= terms[key] < most:
            raise _invalid("The terms of a federation must be within their limits.", f"{key}: {terms[key]}"[:80])
    task, scores, classes = (terms.get(key) for key in ("task", "scores", "class_names"))
    listed = isinstance(scores, list) and len(scores) <= MOST_SCORES and all(isinstance(one, str) for one in scores)
    if task not in TASKS or not listed or not isinstance(classes, list | None):
        raise _invalid(
            "The terms of a federation must say its task and its scores.",
            f"task {_shown(task)}, scores {_shown(scores)}, class_names {_shown(classes)}",
        )
    try:
        read_columns(terms.get("columns"))
    except (ValueError, RecursionError):
        raise _invalid("The columns of a federation must be named, each once.", _shown(terms.get("columns"))) from None
    names = terms["roster"]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise _invalid("A roster must name each agent once.", _shown(names))


def protocol_from(described: Mapping[str, Any], own: type[Protocol] | None) -> Protocol:
    """The protocol that the terms name: one of codistill's, or this agent's own if it is the same file."""
    name, settings = described.get("name"), described.get("settings")
    if not isinstance(settings, dict) or not isinstance(name, str):
        raise _invalid("The terms must name a protocol.", _shown(described))
    kind = PROTOCOLS.get(name)
    if "code" in described:
        kind = own if own is not None and code_digest(own) == described["code"] else None
        if kind is None:
            raise NetworkError(
                f"The hub runs a protocol of its own, '{name[:60]}', so this agent must have the same file.",
                "no such protocol here" if own is None else f"{own.__name__} in another version",
                "Get the file by a way you trust, read it, and name it: protocol = Class in my_agent.py.",
            )
    if kind is None:
        raise NetworkError("The protocol must be known here.", f"'{name[:60]}'", "Install the hub's version.")
    try:
        made: Protocol = from_table(kind, settings, "protocol")
    except (CodistillError, TypeError) as error:
        raise _invalid("The settings must suit the protocol.", str(error)[:200]) from None
    return made


def _invalid(must: str, found: str) -> NetworkError:
    return NetworkError(must, found, "Ask whoever runs the hub.")


def _shown(value: Any) -> str:
    if isinstance(value, dict) and {"samples", "digest"} == value.keys():
        return f"{value['samples']} samples with digest {str(value['digest'])[:12]}"
    return "none" if value is None else f"{value}"[:80]
