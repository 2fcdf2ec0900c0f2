"""Writes what the documentation says of settings from the settings themselves, so that nothing is documented twice.

That is docs/recipes.md, and on the pages of the protocols the parts between `<!-- generated: ... -->` and
`<!-- end -->`: the table of settings, and the picture of a round with its text, from `draw_rounds.py`.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from textwrap import fill
from typing import Any

import draw_rounds

from codistill.core.spec import OPTIONS
from codistill.data.columns import Column
from codistill.data.partition import KINDS
from codistill.engine.safeguard import Safeguard
from codistill.experiments.recipe import PLACES, AgentEntry, Data
from codistill.experiments.search import Range, SearchOptions
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
  table as a value (`protocol = [{ name = "akd" }, { name = "avgkd", own_weight = 0.2 }]`) changes the fields that it
  names and keeps the others; a protocol's name alone is a table with it. Two lists must not set the same field.
- Changes to several tables at once go into `[sweep.variants]`: `"8 bit, every 10" = { protocol = { every = 10 },
  compression = { bits = 8 } }`.
- `--quick` first applies the changes in the table `[quick]`.
- Finished runs are not run again. Impossible combinations are reported and skipped.
- The sweep's folder gets `sweep.csv`, `sweep.png`, `outputs.png` (for classification: the average outputs of every
  combination), `features.png` (if `features_at` is set: the maps of the first 12 runs) and a folder for every run.

With several seeds or several scores, a sweep prints every score after the run with its mean, sample standard deviation
and 95 % interval over the seeds, and with `[compare] gain_over` a paired t-test; `scores.csv` has the same numbers, not
rounded. See [intervals and tests](how-to/compare.md#several-seeds-intervals-and-tests).

If agents communicate, a sweep also reports what accuracy costs: tables per panel, `costs.csv` (the same numbers, not
rounded) and `costs.png` (accuracy against rounds, exchanges, gradient steps and bytes so far). Bytes are those that all
agents, Byzantine ones too, and the hub have sent in all rounds. Exchanges and steps are those of one agent: of each
round the mean of the agents that took part in it, summed over rounds. Measures of the protocols (such as the consensus
error) are in `measures.png`. The table `[compare]` sets what the lines (the protocols, the variants, or else the values
of the last axis) are compared with.

## Searches

A recipe with a table `[search]` names ranges in place of values: `codistill search RECIPE`. Trials are judged on
samples that each agent holds out of its own, never on test samples. See
[choose settings by validation](how-to/search.md).

## Results of a run

The folder of a run holds:

- `metrics.jsonl`: a row per round and agent, with the bytes that the agent sent and received, its gradient steps and
  exchanges (how often it waited for others, except to catch up on missed rounds), scores, and measures of the protocol.
- `report.html`.
- `outputs.safetensors`, for classification with at most 100 classes, from the last evaluation: each agent's average
  output by true class, its confusion matrix, and the share of pairs of agents that disagree. An agent that predicts
  real values counts as predicting the class of the largest one. The report and `codistill compare --out` draw them as
  heat maps.
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


def protocols() -> str:
    """Where the settings of each protocol are: on its page."""
    index = (Path(__file__).parent / "protocols" / "README.md").read_text("utf-8")
    places = dict(re.findall(r"^\| \[(\w+)\]\(([^)]+)\)", index, re.MULTILINE))
    links = [f"[`{name}`](protocols/{places[name]})" for name in PROTOCOLS]
    return PROTOCOL + _wrapped(", ".join(links) + ".")


def _wrapped(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


PROTOCOL = """\
### [protocol]

`name`, the settings of the protocol, `rounds` (10 by default) and `topology` (star, complete, ring, silent; unset: the
protocol's own). The settings are on the page of each protocol, and `codistill protocols NAME` prints them:
"""


TOPOLOGY = """\
### [topology]

Which agents exchange messages: a name at the top of the recipe (`topology = "ring"`; star, complete, ring, silent,
torus, random, expander), or a table with its kind and options (`[topology]`, `kind = "random"`, `degree = 3`). Unset:
the protocol's own. Links go both ways and have Metropolis-Hastings weights, unless a matrix is given. Random graphs are
always connected. `codistill data RECIPE` shows links, diameter and spectral gap (1 - the second largest singular value
of the mixing matrix); the report draws the graph.
"""


COLUMNS = """\
A column's name and its kind (`ward = "category"`), or its kind with settings:
`admitted = { kind = "date", format = "%d.%m.%Y", parts = ["days", "month"] }`. A file `schema` holds the same lines.
`codistill data FILE` suggests them."""


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


SEARCH = """\
For `codistill search` only: how trials are judged. All other keys are fields of the recipe, each with a range or a list
of values. See [choose settings by validation](how-to/search.md)."""

RANGE = """\
`"protocol.temperature" = { low = 1, high = 20, log = true }`. Both ends are within the bounds of the field; a field of
integers has integers. A list (`"protocol.local_epochs" = [1, 5, 20]`) is for values without an order, or for a few."""


OPTIONS_NOTE = """\
The arguments of `Federation.run` and, as far as they concern a hub, of `codistill.serve`, and where a recipe has them.
Defaults are those of Python; where a recipe has another, it is in the table above."""


def page() -> str:
    """The whole page."""
    parts = [HEAD, table("[data]", Data), table("[data.columns]", Column, COLUMNS), table("[[agents]]", AgentEntry)]
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
    parts.append(protocols())
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
    parts.append(table("[search]", SearchOptions, SEARCH))
    parts.append(table("[search] a range", Range, RANGE))
    parts.append(run_options())
    return "\n".join(parts)


PART = re.compile(r"<!-- generated: (picture|settings) of (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str) -> str:
    """The page of a protocol, with its generated parts as they must be."""

    def part(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "picture":
            made = _wrapped(f"![{draw_rounds.described(name)}](rounds/{name}.svg)")
        else:
            fields = [(f"`{field.name}`", _default(field), field) for field in dataclasses.fields(PROTOCOLS[name])]
            made = _table("", "", ("setting",), fields).lstrip() if fields else "It has none of its own.\n"
        return f"<!-- generated: {kind} of {name} -->\n\n{made}\n<!-- end -->"

    return PART.sub(part, text)


def main() -> None:
    """Write all that is generated."""
    here = Path(__file__).parent
    (here / "recipes.md").write_text(page(), "utf-8")
    for path in sorted((here / "protocols").glob("*.md")):
        path.write_text(filled(path.read_text("utf-8")), "utf-8")
    draw_rounds.main()


if __name__ == "__main__":
    main()
