"""Writes docs/recipes.md from the settings themselves, so that nothing is documented twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from codistill.data.partition import KINDS
from codistill.experiments.recipe import AgentEntry, Data, Evaluation
from codistill.experiments.sweep import Compare
from codistill.faults import Fault
from codistill.federation import RuntimeOptions
from codistill.protocols import PROTOCOLS
from codistill.runtimes.network.options import Network
from codistill.topology import KINDS as TOPOLOGIES
from codistill.topology.graphs import KINDS as GRAPHS
from codistill.wire.compression import Compression

HEAD = """\
# Recipes

A recipe is one TOML file that says all there is to say about a run. It is checked before anything runs: an unknown
key names its nearest neighbour, a wrong value says what must hold. `codistill run RECIPE --set table.key=value`
changes it for one run. The run's folder keeps the recipe as it was resolved.

A recipe with a table `[sweep]` is many runs, one for every combination of the values listed there, as a paper's
figure needs them: `codistill sweep RECIPE`. Keys are fields of the recipe (`"partition.alpha" = [0.0, 0.1]`);
values are a list, or a table of named ones; a table as a value (`protocol = [{ name = "akd" }, { name = "ekd" }]`)
changes what it names and keeps the rest. What changes several tables at once goes into `[sweep.variants]`: `"8 bit,
rarely" = { protocol = { every = 10 }, compression = { bits = 8 } }`. Runs that are done are not run again; a
combination that cannot be is told and left out. The sweep's folder gets `sweep.csv`, `sweep.png`, `outputs.png`
(for classification: the average outputs of every combination) and a folder for every run. `--quick` first applies
the changes in the table `[quick]`. See `recipes/akd/`.

Where agents send anything, a sweep also tells what its accuracy costs: a table per panel, `costs.csv` (the same
figures, unrounded) and `costs.png` (accuracy against the bytes sent so far). Bytes are those that all agents, liars
too, and the hub have sent in all rounds. What the protocols measure (such as the consensus error) is in
`measures.png`. A table `[compare]` says what the lines, which are the protocols, the variants or else the values of
the last axis, are held against.

What a run brought is in its folder: `metrics.jsonl`, a row per round and agent, with whatever the protocol measures
beside the scores; and `report.html`. For classification with at most 100 classes it also has `outputs.safetensors`,
from the last evaluation: each agent's average output by true class, and the share of pairs of agents that disagree. An
agent that answers with real values counts as naming the class of the largest one. The report and `codistill compare
--out` draw it as heat maps.

```toml
seed = 0

[data]
name = "digits"
public = 400                                  # reference samples, stripped of their labels

[partition]
kind = "dirichlet"
alpha = 0.5

[[agents]]
name = "clinic"
learner = "random_forest"                     # a name of `codistill learners` ...

[[agents]]
learner = { kind = "cnn", lr = 3e-3 }         # ... or a table with options
count = 4

[protocol]
name = "fedmd"                                # a name of `codistill protocols`, or "my_file.py:MyProtocol"
rounds = 10
local_epochs = 5
```

A torch learner takes the options of its architecture and of training: `loss` (cross_entropy, squared), `optimiser`
(adam, adamw, sgd), `lr`, `weight_decay`, `momentum`, `epochs` and `batch_size` (of a whole `fit`), `warm`.
A scikit-learn learner takes its constructor's options. Paths are relative to the recipe.

## Tables

`seed`: an integer of at least 0 (default 0), from which all randomness of a run derives.
"""


def table(title: str, cls: Any, note: str = "") -> str:
    """One table of settings."""
    lines = [f"### {title}", "", *([note, ""] if note else []), "| key | default | what it is |", "|---|---|---|"]
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING:
            default = "required"
        else:
            default = "absent" if field.default is None else f"`{_toml(field.default)}`"
        lines.append(f"| `{field.name}` | {default} | {field.metadata.get('help', '')}{_bounds(field.metadata)} |")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "[]" if value == () else str(value)


def _bounds(metadata: Any) -> str:
    words = {"at_least": "at least", "above": "above", "at_most": "at most"}
    said = [f"{word} {metadata[key]}" for key, word in words.items() if metadata.get(key) is not None]
    if metadata.get("choices"):
        said.append("one of " + ", ".join(metadata["choices"]))
    return f" ({'; '.join(said)})" if said else ""


TOPOLOGY = """\
### [topology]

Who speaks to whom: a name at the top of the recipe (`topology = "ring"`; star, complete, ring, silent, torus, random,
expander), or a table with its kind and options (`[topology]`, `kind = "random"`, `degree = 3`). Absent: as the protocol
has it. Links go both ways and are mixed by Metropolis-Hastings weights, unless a matrix is given. Graphs that are drawn
at random are connected. `codistill data RECIPE` shows links, diameter and spectral gap (1 - the second largest singular
value of the mixing matrix); the report draws the graph.
"""


FAULTS = """\
Faults on purpose, deterministic in the seed; rounds are counted from 1. `drop`: messages are lost. `late`: they arrive
after the deadline. `gone`: the agent is absent. `split`: nothing passes between `agents` and all others. `invert`: the
agent sends floating-point arrays with the opposite sign. `random`: it sends Gaussian noise around 0 with their standard
deviation instead. Integers and plain values stay, and so does a model that travels as bytes (scikit-learn). To let k
agents lie, write k such tables. Who lies is marked in the metrics (`lies`), in the log and in tables, and left out of
means; what it sends is counted."""


COMPRESSION = """\
What is done to the floating-point arrays of every message, whatever the protocol; absent: nothing. See
[compression](compression.md)."""


NETWORK = """\
For federations between machines (`codistill hub`, `join` and `up`; see [deploy.md](deploy.md)). In a simulation nothing
of it is used."""

COMPARE = """\
Of a sweep only: what its table of costs tells beside accuracy and bytes. A line is named by its label. The price of the
target is told as of the first evaluated round in which the honest agents reach it on average. Gains, in points, and
factors of bytes are those of each seed; shown are their means, and of gains the standard deviation."""


def page() -> str:
    """The whole page."""
    parts = [HEAD, table("[data]", Data), table("[[agents]]", AgentEntry)]
    for kind, cls in KINDS.items():
        note = (cls.__doc__ or "").strip().partition("\n")[0]
        if dataclasses.fields(cls):
            parts.append(table(f'[partition] kind = "{kind}"', cls, note))
        else:
            parts.append(f'### [partition] kind = "{kind}"\n\n{note}\n')
    parts.append(TOPOLOGY)
    for kind, graph in GRAPHS.items():
        note = (graph.__doc__ or "").strip().partition("\n")[0]
        if dataclasses.fields(graph):
            parts.append(table(f'[topology] kind = "{kind}"', graph, note))
        elif kind not in TOPOLOGIES:
            parts.append(f'### [topology] kind = "{kind}"\n\n{note}\n')
    common = "Besides: `rounds` (10 by default) and `topology` (star, complete, ring, silent; absent: what suits it)."
    for name, protocol in PROTOCOLS.items():
        parts.append(table(f'[protocol] name = "{name}"', protocol, common))
    sampled = "Besides: `participation`, the share of agents sampled per round (1.0 by default)."
    parts.append(table("[runtime]", RuntimeOptions, sampled))
    parts.append(table("[evaluation]", Evaluation))
    parts.append(table("[compression]", Compression, COMPRESSION))
    parts.append(table("[[faults]]", Fault, FAULTS))
    parts.append(table("[network]", Network, NETWORK))
    parts.append(table("[compare]", Compare, COMPARE))
    return "\n".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "recipes.md").write_text(page())
