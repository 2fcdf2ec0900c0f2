"""Writes docs/recipes.md from the settings themselves, so that nothing is documented twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from codistill.clock import Clock, Offline
from codistill.data.partition import KINDS
from codistill.experiments.recipe_tables import AgentEntry, Data, Evaluation
from codistill.experiments.sweep import Compare
from codistill.faults import Fault
from codistill.federation.runtime_options import RuntimeOptions
from codistill.protocols import PROTOCOLS
from codistill.runtimes.network.options import Network
from codistill.runtimes.ray_cluster import RayCluster
from codistill.runtimes.safeguard import Safeguard
from codistill.topology import KINDS as TOPOLOGIES
from codistill.topology.graphs import KINDS as GRAPHS
from codistill.wire.compression import Compression

HEAD = """\
# Recipes

A recipe is one TOML file that describes a run completely. It is checked before anything runs: for an unknown key the
error names the nearest known one, for a wrong value it says what must hold. `codistill run RECIPE --set
table.key=value` changes it for one run. The run's folder keeps the recipe as it was resolved.

A recipe with a table `[sweep]` describes many runs, one for every combination of the values listed there, as a paper's
figure needs them: `codistill sweep RECIPE`. Keys are fields of the recipe (`"partition.alpha" = [0.0, 0.1]`);
values are a list, or a table of named ones; a table as a value (`protocol = [{ name = "akd" }, { name = "ekd" }]`)
changes the fields that it names and keeps the others. Changes to several tables at once go into `[sweep.variants]`: `"8
bit, every 10" = { protocol = { every = 10 }, compression = { bits = 8 } }`. Finished runs are not run again; impossible
combinations are reported and skipped. The sweep's folder gets `sweep.csv`, `sweep.png`, `outputs.png`
(for classification: the average outputs of every combination), `features.png` (where `features_at` is set: the maps of
the first 12 runs) and a folder for every run. `--quick` first applies
the changes in the table `[quick]`. See `recipes/akd/`.

Where agents communicate, a sweep also reports what accuracy costs: tables per panel, `costs.csv` (the same
numbers, not rounded) and `costs.png` (accuracy against rounds, exchanges, gradient steps and bytes so far). Bytes are
those that all agents, Byzantine ones too, and the hub have sent in all rounds. Exchanges and steps are those of one
agent: of each round the mean of the agents that took part in it, summed over rounds. What the protocols measure (such
as the consensus error) is in `measures.png`. The table `[compare]` sets what the lines (the protocols, the variants, or
else the values of the last axis) are compared with.

The results of a run are in its folder: `metrics.jsonl`, a row per round and agent, with the bytes that the agent sent
and received, its gradient steps and exchanges (how often it waited for others, but for what it missed in earlier
rounds), scores, and what the protocol measures; and `report.html`. For classification with at most 100 classes also
`outputs.safetensors`, from the last evaluation: each agent's average output by true class, and the share of pairs of
agents that disagree. An agent that predicts real values counts as predicting the class of the largest one. The report
and `codistill compare --out` draw it as heat maps.

`[evaluation] features_at = [1, 25, 100]` keeps the features (the input of the last layer, the head) of 200 common test
samples after these rounds, for every agent whose model has any: `features-000025.safetensors`, which the report draws
as maps by t-SNE under "Feature space". The samples are drawn by the seed, and are the same for all agents and rounds.
Not in the runtime `network`: there an agent's features on test samples stay with the agent.

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

`seed`: an integer of at least 0 (default 0), from which all randomness of a run derives. "unset" as a default means
that the key may be left out.
"""


def table(title: str, cls: Any, note: str = "") -> str:
    """One table of settings."""
    lines = [f"### {title}", "", *([note, ""] if note else []), "| key | default | what it is |", "|---|---|---|"]
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            default = "`{}`"
        elif field.default is dataclasses.MISSING:
            default = "required"
        else:
            default = "unset" if field.default is None else f"`{_toml(field.default)}`"
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

Who may speak to whom: a name at the top of the recipe (`topology = "ring"`; star, complete, ring, silent, torus,
random, expander), or a table with its kind and options (`[topology]`, `kind = "random"`, `degree = 3`). Unset: the
protocol's own. Links go both ways and have Metropolis-Hastings weights, unless a matrix is given. Random graphs are
always connected. `codistill data RECIPE` shows links, diameter and spectral gap (1 - the second largest singular
value of the mixing matrix); the report draws the graph.
"""


FAULTS = """\
Injected faults, deterministic in the seed; rounds are counted from 1. `drop`: messages are lost. `late`: they arrive
after the deadline. `gone`: the agent is absent. `split`: nothing passes between `agents` and all others. `invert`: a
Byzantine agent, which sends floating-point arrays with the opposite sign. `random`: a Byzantine agent, which sends
Gaussian noise around 0 with their standard deviation instead. Integers and plain values are not changed, and neither
is a model that travels as bytes (scikit-learn). For k Byzantine agents write k such tables. Byzantine agents are
marked in the metrics (`lies`), in the log and in tables, and left out of means; what they send is counted."""


COMPRESSION = """\
Compression of the floating-point arrays of every message, for any protocol; unset: none. See
[compression](compression.md)."""


SAFEGUARD = """\
`safeguard = true` for these defaults; unset: none. An agent's answer is weighed between its own model, trained alone,
and what it was taught, by samples that it holds out. See [the safeguard](safeguard.md)."""


CLOCK = """\
Unset: no times are computed. With it the metrics say at which virtual time (`time`, in seconds) a round has ended; over
the network, at which real time. It needs `kind = "simulation"` or `kind = "network"` in `[runtime]`, or machines of
their own (`codistill hub`); `[[clock.offline]]` needs the simulation. With `asynchronous = true` there are no rounds:
every agent starts its next round when it has ended the one before. See
[runs without rounds](how-to/run-without-rounds.md)."""


RAY = """\
For the runtime `ray`: which cluster, and what each host or agent needs there. A host is a process with some of the
agents: see [beyond one machine](how-to/cluster.md)."""

NETWORK = """\
For federations between machines (`codistill hub`, `join` and `up`; see [deploy.md](deploy.md)). A simulation does not
use it."""

COMPARE = """\
Of a sweep only: what its table of costs reports beside accuracy and bytes. A line is named by its label. The price of
the target is that of the first evaluated round in which the honest agents reach it on average: its rounds, exchanges,
steps and bytes, means over the seeds that reach it, and how many do. Gains, in points, and factors (how many times
fewer than the line that is named) are computed per seed, those up to the target in the seeds in which both lines reach
it; shown are their means and standard deviations."""


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
    sampled = "Also: `participation`, the share of agents sampled per round (1.0 by default)."
    parts.append(table("[runtime]", RuntimeOptions, sampled))
    parts.append(table("[evaluation]", Evaluation))
    parts.append(table("[safeguard]", Safeguard, SAFEGUARD))
    parts.append(table("[compression]", Compression, COMPRESSION))
    parts.append(table("[[faults]]", Fault, FAULTS))
    parts.append(table("[clock]", Clock, CLOCK))
    parts.append(table("[[clock.offline]]", Offline, "An agent that is offline starts no round."))
    parts.append(table("[network]", Network, NETWORK))
    parts.append(table("[ray]", RayCluster, RAY))
    parts.append(table("[compare]", Compare, COMPARE))
    return "\n".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "recipes.md").write_text(page())
