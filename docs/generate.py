"""Writes docs/recipes.md from the settings themselves, so that nothing is documented twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from codistill.core.spec import OPTIONS
from codistill.data.partition import KINDS
from codistill.engine.safeguard import Safeguard
from codistill.experiments.recipe import PLACES, AgentEntry, Data
from codistill.experiments.sweep import Compare
from codistill.experiments.tracking import Track
from codistill.network.options import Network
from codistill.nodes.clock import Clock, Offline
from codistill.nodes.faults import Fault
from codistill.protocols import PROTOCOLS
from codistill.runtimes.ray_cluster import RayCluster
from codistill.topology import KINDS as TOPOLOGIES
from codistill.topology.graphs import KINDS as GRAPHS
from codistill.wire.compression import Compression

HEAD = """\
# Recipes

A recipe is one TOML file that describes a run completely. It is checked before anything runs: an error names the
nearest known key for an unknown one, and the valid values for a wrong one. `codistill run RECIPE --set
table.key=value` changes it for one run. The run's folder keeps the resolved recipe.

## Sweeps

A recipe with a table `[sweep]` describes many runs, one for every combination of the listed values:
`codistill sweep RECIPE`. See `recipes/akd/`.

- Keys are fields of the recipe (`"partition.alpha" = [0.0, 0.1]`). Values are a list, or a table of named values. A
  table as a value (`protocol = [{ name = "akd" }, { name = "ekd" }]`) changes the fields that it names and keeps the
  others.
- Changes to several tables at once go into `[sweep.variants]`: `"8 bit, every 10" = { protocol = { every = 10 },
  compression = { bits = 8 } }`.
- `--quick` first applies the changes in the table `[quick]`.
- Finished runs are not run again. Impossible combinations are reported and skipped.
- The sweep's folder gets `sweep.csv`, `sweep.png`, `outputs.png` (for classification: the average outputs of every
  combination), `features.png` (if `features_at` is set: the maps of the first 12 runs) and a folder for every run.

If agents communicate, a sweep also reports what accuracy costs: tables per panel, `costs.csv` (the same numbers, not
rounded) and `costs.png` (accuracy against rounds, exchanges, gradient steps and bytes so far). Bytes are those that all
agents, Byzantine ones too, and the hub have sent in all rounds. Exchanges and steps are those of one agent: of each
round the mean of the agents that took part in it, summed over rounds. Measures of the protocols (such as the consensus
error) are in `measures.png`. The table `[compare]` sets what the lines (the protocols, the variants, or else the values
of the last axis) are compared with.

## Results of a run

The folder of a run holds:

- `metrics.jsonl`: a row per round and agent, with the bytes that the agent sent and received, its gradient steps and
  exchanges (how often it waited for others, except to catch up on missed rounds), scores, and measures of the protocol.
- `report.html`.
- `outputs.safetensors`, for classification with at most 100 classes, from the last evaluation: each agent's average
  output by true class, and the share of pairs of agents that disagree. An agent that predicts real values counts as
  predicting the class of the largest one. The report and `codistill compare --out` draw it as heat maps.
- `features-000025.safetensors` and others, with `[evaluation] features_at = [1, 25, 100]`: the features (the input of
  the last layer, the head) of 200 common test samples after these rounds, for every agent whose model has any. The
  report draws them as t-SNE maps under "Feature space". The samples are drawn by the seed, and are the same for all
  agents and rounds. Not in the runtime `network`: there an agent's features on test samples stay with the agent.

## Example

```toml
seed = 0

[data]
name = "digits"
public = 400                                  # public samples, without their labels

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
(adam, adamw, sgd), `lr`, `weight_decay`, `momentum`, `epochs` and `batch_size` (of a whole `fit`), `warm`,
`projection`, `head`. A scikit-learn learner takes its constructor's options. Paths are relative to the recipe.

## Tables

`seed`: an integer of at least 0 (default 0), from which all randomness of a run derives. The default "unset" means that
the key is optional.
"""


def table(title: str, cls: Any, note: str = "") -> str:
    """One table of settings."""
    rows = [(f"`{field.name}`", _default(field), field) for field in dataclasses.fields(cls)]
    return _table(f"### {title}", note, ("key",), rows)


def options(name: str) -> str:
    """The table of a recipe with options of the run."""
    here = {place.partition(".")[2]: field for place, (_, field) in PLACES.items() if place.startswith(f"{name}.")}
    rows = [(f"`{key}`", _written(field.metadata["in_recipe"]), field) for key, field in here.items()]
    return _table(f"### [{name}]", "", ("key",), rows)


def run_options() -> str:
    """All options of a run, by their names in Python and in a recipe."""
    places = {field.name: place for place, (_, field) in PLACES.items()}
    rows = [(f"`{name}` | `{places[name]}`", _default(field), field) for name, field in OPTIONS.items()]
    return _table("## Options of a run", OPTIONS_NOTE, ("in Python", "in a recipe"), rows)


def _table(head: str, note: str, keys: tuple[str, ...], rows: list[tuple[str, str, Any]]) -> str:
    lines = [head, "", *([note, ""] if note else []), f"| {' | '.join(keys)} | default | what it is |"]
    lines.append("|---" * (len(keys) + 2) + "|")
    lines += [
        f"| {key} | {default} | {field.metadata.get('help', '')}{_bounds(field.metadata)} |"
        for key, default, field in rows
    ]
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "`{}`"
    return "required" if field.default is dataclasses.MISSING else _written(field.default)


def _written(value: Any) -> str:
    return "unset" if value is None else f"`{_toml(value)}`"


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

Which agents exchange messages: a name at the top of the recipe (`topology = "ring"`; star, complete, ring, silent,
torus, random, expander), or a table with its kind and options (`[topology]`, `kind = "random"`, `degree = 3`). Unset:
the protocol's own. Links go both ways and have Metropolis-Hastings weights, unless a matrix is given. Random graphs are
always connected. `codistill data RECIPE` shows links, diameter and spectral gap (1 - the second largest singular value
of the mixing matrix); the report draws the graph.
"""


FAULTS = """\
Injected faults, deterministic in the seed; rounds are counted from 1. Kinds:

- `drop`: messages are lost.
- `late`: messages arrive after the deadline.
- `gone`: the agent is absent.
- `split`: no message passes between `agents` and all others.
- `invert`: a Byzantine agent, which sends floating-point arrays with the opposite sign.
- `random`: a Byzantine agent, which sends Gaussian noise around 0 with their standard deviation instead.

Integers and plain values are not changed, nor is a model that is sent as bytes (scikit-learn). For k Byzantine agents
write k such tables. Byzantine agents are marked in the metrics (`lies`), in the log and in tables, and left out of
means; the bytes that they send are counted."""


COMPRESSION = """\
Compression of the floating-point arrays of every message, for any protocol; unset: none. See
[compression](compression.md)."""


SAFEGUARD = """\
`safeguard = true` for these defaults; unset: none. An agent's answer combines its own model, trained alone, and the
taught model, weighted on samples that it holds out. See [the safeguard](safeguard.md)."""


CLOCK = """\
Unset: no times are computed. Otherwise the metrics have the virtual time (`time`, in seconds) at which a round has
ended; over the network, the real time. It needs `kind = "simulation"` or `kind = "network"` in `[runtime]`, or separate
machines (`codistill hub`); `[[clock.offline]]` needs the simulation. With `asynchronous = true` there are no rounds:
every agent starts its next round when it has ended the one before. See
[runs without rounds](how-to/run-without-rounds.md)."""


RAY = """\
For the runtime `ray`: which cluster, and what each host or agent needs there. A host is a process with some of the
agents: see [beyond one machine](how-to/cluster.md)."""

NETWORK = """\
For federations between machines (`codistill hub`, `join` and `up`; see [deploy.md](deploy.md)). A simulation does not
use it."""

TRACK = """\
Shows the run in a tracker as well: see [trackers](how-to/observe.md#trackers). Unset: its folder alone has it."""

COMPARE = """\
For sweeps only: what the table of costs reports beside accuracy and bytes. A line is named by its label. The cost of
the target is that of the first evaluated round in which the honest agents reach it on average: its rounds, exchanges,
steps and bytes, as means over the seeds that reach it, and the number of these seeds. Gains (in points) and factors
(how many times fewer than the named line) are computed per seed; factors up to the target use the seeds in which both
lines reach it. The table shows their means and standard deviations."""


OPTIONS_NOTE = """\
The arguments of `Federation.run` and, as far as they concern a hub, of `codistill.serve`, and where a recipe has them.
Defaults are those of Python; where a recipe has another, it is in the table above."""


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
    common = "Also: `rounds` (10 by default) and `topology` (star, complete, ring, silent; unset: the protocol's own)."
    for name, protocol in PROTOCOLS.items():
        parts.append(table(f'[protocol] name = "{name}"', protocol, common))
    parts += [options("runtime"), options("evaluation")]
    parts.append(table("[safeguard]", Safeguard, SAFEGUARD))
    parts.append(table("[compression]", Compression, COMPRESSION))
    parts.append(table("[[faults]]", Fault, FAULTS))
    parts.append(table("[clock]", Clock, CLOCK))
    parts.append(table("[[clock.offline]]", Offline, "An agent that is offline starts no round."))
    parts.append(table("[network]", Network, NETWORK))
    parts.append(table("[ray]", RayCluster, RAY))
    parts.append(table("[track]", Track, TRACK))
    parts.append(table("[compare]", Compare, COMPARE))
    parts.append(run_options())
    return "\n".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "recipes.md").write_text(page())
