"""What a run's folder says of the run besides its metrics: agents, data, protocol, versions. In the file run.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from codistill.devices import CPU
from codistill.faults import Fault
from codistill.federation.result import ELSEWHERE
from codistill.files import write_atomically
from codistill.results.scores import Score, find_score
from codistill.runtimes.description import RunDescription
from codistill.runtimes.network.terms import describe_public
from codistill.settings import from_table
from codistill.text import parse_json
from codistill.topology.facts import as_plain
from codistill.version import versions

FACTS = "run.json"
_OF_A_SCORE = ("name", "greater_is_better", "task", "title", "percent")


def write_facts(folder: Path, description: RunDescription) -> None:
    """Say what the run is, so that its folder can be compared and reported on; a recipe's run has said it already."""
    if not (folder / FACTS).exists():
        write_atomically(folder / FACTS, json.dumps(_facts_of(description), indent=1, default=str).encode())


def write_devices(folder: Path, devices: Mapping[str, str]) -> None:
    """Say on which device each agent computes, unless all do so on the CPU; a resume does not change what is said."""
    if set(devices.values()) <= {CPU}:
        return
    with suppress(ValueError, TypeError):  # that the file is damaged is said by those who need what is in it
        facts = parse_json((folder / FACTS).read_bytes())
        if "devices" not in facts:
            write_atomically(folder / FACTS, json.dumps({**facts, "devices": devices}, indent=1).encode())


def faults_in(facts: dict[str, Any]) -> tuple[Fault, ...]:
    """The faults that were injected into a run that was made in Python."""
    return tuple(
        from_table(Fault, {key: value for key, value in table.items() if value is not None}, "faults")
        for table in facts.get("faults", [])
    )


def scores_in(facts: dict[str, Any]) -> tuple[Score, ...]:
    """The scores of a run that was made in Python; functions of one's own are in no file."""
    return tuple(
        find_score(table["name"]) or Score(function=_not_here, **{key: table[key] for key in _OF_A_SCORE})
        for table in facts.get("scores", [])
    )


def _told(score: Score) -> dict[str, Any]:
    return {key: getattr(score, key) for key in _OF_A_SCORE}


def _not_here(y: np.ndarray, answers: np.ndarray) -> None:
    """In the place of a function of one's own: rows hold what it returned."""


def _facts_of(description: RunDescription) -> dict[str, Any]:
    mixes = [agent.class_mix for agent in description.agents]
    known = [mix for mix in mixes if mix is not None]
    protocol, compression = description.protocol, description.compression
    models = {agent.name: agent.learner.describe() for agent in description.agents}
    return {
        "agents": {name: models.get(name, ELSEWHERE) for name in description.names},
        "samples": {agent.name: len(agent.shard) for agent in description.agents},
        "counts": np.stack(known).tolist() if known and len(known) == len(mixes) else None,
        "class_names": list(description.class_names),
        "task": description.task,
        "scores": [_told(score) for score in description.task_scores],
        "test_samples": 0 if description.test is None else len(description.test[0]),
        "public": describe_public(description.public),
        "topology": None if description.topology.hub else as_plain(description.topology),
        "compression": None if compression is None else dataclasses.asdict(compression),
        "faults": [dataclasses.asdict(fault) for fault in description.faults.injected],
        "clock": None if description.clock is None else dataclasses.asdict(description.clock),
        "seed": description.seed,
        "protocol": {"name": protocol.name or type(protocol).__name__, "settings": dataclasses.asdict(protocol)},
        "versions": versions(),
    }
