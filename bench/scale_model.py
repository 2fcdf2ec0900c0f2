"""How far one hub goes, from what was measured (docs/scale.json): a model of its load; the mean of a tree of relays.

`python -m bench.scale_model` computes the tables of docs/scale.md anew, and puts them there. Seconds of the hub's
processor in a round with n agents: a + b n + q n². Bytes: u n from the agents, d n + k n² to them. Memory: m_0 + m n.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from bench.measure import Figure
from codistill.network import connections, transport

DOCS = Path(__file__).parents[1] / "docs"
PAGE, KEPT = DOCS / "scale.md", DOCS / "scale.json"
PROTOCOLS, BARE = ("fd", "crs", "fedmd", "fedavg"), ("4 KB", "5 x 4 KB", "256 KB")
WHOLE, SAMPLED = "fedmd, 32 batches", "fd, participation 0.1"
FITTED, CHECKED, FEW = (10, 30, 100, 300, 1000), 2000, 100  # agents of the fit, and of what it is compared with
BATCH, PUBLIC = 32, 1000
LINE = 1e9 / 8  # bytes per second of a line of 1 Gbit/s, in each direction
ROUND, MEMORY, MIB = 60.0, 64e9, 1 << 20  # a round of a minute, at a hub with 64 GB
# Agents that a hub can have by its code: descriptors for its links, and names of seven letters, ten characters each, in
# the text of a command.
_OTHERS = transport._FILES + transport._FEWEST
BOUNDS = {
    "connections": (transport._ENOUGH - _OTHERS) // transport.LINKS,
    "commands": connections._TEXT_LIMIT // 10,
}


# --- the model --------------------------------------------------------------------------------------


def fit(counts: Sequence[int], values: Sequence[float], powers: Sequence[int]) -> list[float]:
    """Coefficients ≥ 0 of powers of n, by least squares of relative errors."""
    y = np.array(values, dtype=float)
    rows = np.power.outer(np.array(counts, dtype=float), powers) / y[:, None]
    # Columns of equal size: the powers of n differ by many orders of magnitude.
    size = rows.max(axis=0)
    return [float(value) for value in nnls(rows / size, np.ones(len(y)))[0] / size]


def at(coefficients: Sequence[float], n: float) -> float:
    """Σ c_k n^k."""
    return float(sum(c * n**k for k, c in enumerate(coefficients)))


def constants(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the tables are computed from: medians over repeats, fits, and the measurements that were not fitted."""
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs:
        found[run["workload"], run["agents"]].append(run)

    def middle(name: str, n: int, what: str) -> float:
        return float(statistics.median(run[what] for run in found[name, n]))

    def fitted(name: str, what: str, powers: Sequence[int], which: int | None = None) -> list[float]:
        values = [middle(name, n, what) if which is None else found[name, n][which][what] for n in FITTED]
        return [0.0] * powers[0] + fit(FITTED, values, powers)

    every, repeats = (*PROTOCOLS, *BARE), min(map(len, found.values()))
    made: dict[str, Any] = {"repeats": repeats, "fitted": FITTED, "checked": CHECKED, "workloads": {}}
    for name in every:
        cpu = [fitted(name, "cpu", (0, 1, 2), which) for which in range(repeats)]
        grown = {n: middle(name, n, "peak") - middle(name, n, "empty") for n in FITTED}
        made["workloads"][name] = {
            "cpu": fitted(name, "cpu", (0, 1, 2)),
            "spread": [[min(each), max(each)] for each in zip(*cpu, strict=True)],
            "messages": sum(middle(name, FITTED[0], way) for way in ("sent", "received")) / FITTED[0],
            "up": fitted(name, "up", (1,)), "down": fitted(name, "down", (1, 2)),
            "peak": fit(list(grown), list(grown.values()), (0, 1)),
            "exchanges": found[name, FITTED[0]][0]["exchanges"],
        }  # fmt: skip
    made["empty"] = statistics.median(run["empty"] for run in runs)
    for what, powers in (("linked", (0, 1)), ("idle", (0, 1)), ("join", (1, 2, 3))):
        start = "empty" if what == "linked" else None
        by_n = {n: [run[what] - (run[start] if start else 0) for run in runs if run["agents"] == n] for n in FITTED}
        found_by = fit(list(by_n), [statistics.median(values) for values in by_n.values()], powers)
        made[what] = [0.0] * powers[0] + found_by
    made["checks"] = [
        {"workload": name, "agents": n, "spread": [min(cpu), max(cpu)], "cpu": statistics.median(cpu)}
        | {what: middle(name, n, what) for what in ("up", "down", "peak", "join", "idle")}
        for (name, n), each in found.items()
        if name not in every or n not in FITTED
        for cpu in [[run["cpu"] for run in each]]
    ]
    return made


def per_message(made: Mapping[str, Any]) -> tuple[float, float, float]:
    """Processor seconds per agent: of a round without exchanges, of an exchange, and of a byte in either direction."""
    (once, five, large), steps = [made["workloads"][name] for name in BARE], 5
    byte = (large["cpu"][1] - once["cpu"][1]) / (large["messages"] - once["messages"])
    exchange = (five["cpu"][1] - once["cpu"][1]) / (steps - 1) - byte * once["messages"]
    return once["cpu"][1] - exchange - byte * once["messages"], exchange, byte


def expected(made: Mapping[str, Any], name: str, n: int) -> float:
    """Processor seconds of a round that was not fitted."""
    workload = made["workloads"]
    if name == WHOLE:
        four, (_, exchange, byte) = workload["fedmd"], per_message(made)
        more = ceil(PUBLIC / BATCH) - four["exchanges"]
        return at(four["cpu"], n) + n * more * (exchange + byte * four["messages"] / four["exchanges"])
    return at(workload[name]["cpu"], n)


@dataclass(frozen=True)
class Load:
    """What a round of a minute with n agents takes of a hub."""

    bytes: float
    processor: float  # seconds of one core, links included
    line: float  # seconds, of the busier direction
    memory: float  # bytes

    @property
    def shares(self) -> dict[str, float]:
        """Of what there is: one core, a line of 1 Gbit/s, 64 GB."""
        return {"processor": self.processor / ROUND, "line": self.line / ROUND, "memory": self.memory / MEMORY}


def load(made: Mapping[str, Any], name: str, n: float) -> Load:
    """By the model."""
    one = made["workloads"][name]
    up, down = at(one["up"], n), at(one["down"], n)
    memory = MIB * (made["empty"] + at(one["peak"], n))
    return Load(up + down, at(one["cpu"], n) + ROUND * at(made["idle"], n), max(up, down) / LINE, memory)


def saturation(made: Mapping[str, Any], name: str) -> dict[str, int]:
    """The largest n for which a round of a minute stays within each resource."""
    found = {}
    for what in load(made, name, 1).shares:
        low, high = 1, 1 << 40
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if load(made, name, middle).shares[what] <= 1 else (low, middle)
        found[what] = low
    return found


# --- a tree of relays -------------------------------------------------------------------------------


def tree_mean(values: np.ndarray, counts: np.ndarray, fan_out: int) -> tuple[np.ndarray, int]:
    """The mean of the rows of (n, d), weighted by counts, as a tree of relays has it; and the depth of the tree.

    A relay passes on Σ n_k x_k and Σ n_k of at most `fan_out` children; the root divides. Sums have the dtype of the
    values, as messages have; counts are exact.
    """
    sums, totals, depth = values * counts.astype(values.dtype)[:, None], counts.astype(np.int64), 0
    while len(sums) > 1:
        first = np.arange(0, len(sums), fan_out)
        sums, totals, depth = np.add.reduceat(sums, first, axis=0), np.add.reduceat(totals, first), depth + 1
    return sums[0] / totals[0].astype(values.dtype), depth


def tree_bound(fan_out: int, depth: int, dtype: Any) -> float:
    """|tree mean - mean| ≤ γ Σ n_k |x_k| / Σ n_k, for each column.

    n_k becomes a float, n_k x_k is rounded, so are at most f - 1 sums on each of D levels, the float of Σ n_k, and the
    quotient: m = D (f - 1) + 4 factors between 1 - u and 1 + u or their inverses, and γ_m = m u / (1 - m u) (Higham,
    Accuracy and Stability of Numerical Algorithms, 2002, lemma 3.1). The flat mean has f = n and D = 1.
    """
    u = float(np.finfo(dtype).eps) / 2
    m = depth * (fan_out - 1) + 4
    return m * u / (1 - m * u)


def levels(n: int, fan_out: int) -> int:
    """⌈log_f n⌉, without rounding."""
    depth, reached = 0, 1
    while reached < n:
        depth, reached = depth + 1, reached * fan_out
    return depth


def tree_errors(n: int = 100_000, columns: int = 8, fan_outs: Sequence[int] = (10, 1000)) -> list[list[float]]:
    """For each tree: fan-out, depth, and the largest error, as a part of the weighted mean of |x|, and its bound."""
    rng = np.random.default_rng(0)
    x, counts = rng.standard_normal((n, columns), dtype=np.float32), rng.integers(1, 1000, n)
    exact = counts.astype(np.longdouble)[:, None] * x
    mean, size = exact.sum(axis=0) / counts.sum(), np.abs(exact).sum(axis=0) / counts.sum()
    rows = []
    for fan_out in (*fan_outs, n):
        found, depth = tree_mean(x, counts, fan_out)
        rows.append([fan_out, depth, float((np.abs(found - mean) / size).max()), tree_bound(fan_out, depth, x.dtype)])
    return rows


# --- what is printed --------------------------------------------------------------------------------


def figures(made: Mapping[str, Any]) -> list[Figure]:
    """The constants, as lines of the table of all measurements."""
    lines: list[tuple[str, list[float], str]] = []
    for name, one in made["workloads"].items():
        (_, each, pair), (_, around, pairs) = one["cpu"], one["spread"]
        processor = f"scale: hub's processor per agent and round, {name}"
        lines.append((processor, [1e3 * value for value in (around[0], each, around[1])], "ms"))
        lines.append(("  and per pair of agents", [1e6 * value for value in (pairs[0], pair, pairs[1])], "us"))
        lines.append(("  memory per agent", [MIB * one["peak"][1] / 1e3], "kB"))
    for check in (each for each in made["checks"] if each["workload"] != SAMPLED):
        name, n = check["workload"], check["agents"]
        against = f"scale: processor, {name}, {n} agents, measured against the model"
        lines.append((against, [check["cpu"] / expected(made, name, n)], "x"))
    return [Figure(name, values, unit, "", True) for name, values, unit in lines]


def tables(made: Mapping[str, Any]) -> str:
    """The tables of docs/scale.md."""
    of_the_hub = (constants_table, rates_table, check_table, load_table, saturation_table)
    return "\n\n".join(each(made) for each in (*of_the_hub, sampling_table, tree_table, error_table))


def constants_table(made: Mapping[str, Any]) -> str:
    rows = []
    for name in PROTOCOLS:
        one = made["workloads"][name]
        (a, b, q), (_, around, pairs) = one["cpu"], one["spread"]
        rows.append([
            f"`{name}`", one["exchanges"], size(one["messages"]), size(one["up"][1] + one["down"][1]),
            f"{1e3 * a:.1f} ms", f"{1e3 * b:.2f} ms{span(around, 1e3)}", f"{1e6 * q:.2f} µs{span(pairs, 1e6)}",
            size(MIB * one["peak"][1]),
        ])  # fmt: skip
    return table(
        "protocol, exchanges per round, messages per agent, all frames per agent, a, b per agent, q per pair, "
        "memory per agent", rows,
    )  # fmt: skip


def rates_table(made: Mapping[str, Any]) -> str:
    (a_round, exchange, byte), (still, idle), join = per_message(made), made["idle"], made["join"]
    down, empty, link = made["workloads"]["fd"]["down"][2], size(MIB * made["empty"]), size(MIB * made["linked"][1])
    joining = f"{1e3 * join[1]:.2f} ms n + {1e6 * join[2]:.1f} µs n² + {1e9 * join[3]:.1f} ns n³"
    return table("what, of the hub, measured", [
        ["an agent and round: commands, evaluation, metrics", "processor", f"{1e3 * a_round:.2f} ms"],
        ["an agent and exchange: a message each way", "processor", f"{1e3 * exchange:.3f} ms"],
        ["a megabyte of messages, either way", "processor", f"{1e9 * byte:.2f} ms"],
        ["a link, per second, whatever happens", "processor", f"{1e6 * idle:.0f} µs (and {1e3 * still:.1f} ms in all)"],
        ["n agents that join", "processor", joining],
        ["a pair of agents and a round: the names of all who are present, to each", "line", f"{down:.0f} bytes"],
        ["the process without agents / an idle link", "memory", f"{empty} / {link}"],
    ])  # fmt: skip


def check_table(made: Mapping[str, Any]) -> str:
    rows = []
    for check in made["checks"]:
        name, n = check["workload"], check["agents"]
        if name == SAMPLED:
            continue
        model = expected(made, name, n)
        name, _, how = name.partition(", ")
        rows.append([
            f"`{name}`{how and ', ' + how}", f"{n:,}", f"{check['cpu']:.2f} s{span(check['spread'], 1)}",
            f"{model:.2f} s", f"{100 * (check['cpu'] / model - 1):+.0f} %",
        ])  # fmt: skip
    return table("workload, agents, measured, model, off by", rows)


def load_table(made: Mapping[str, Any]) -> str:
    rows = []
    for name in PROTOCOLS:
        for n in (10**k for k in range(2, 7)):
            one = load(made, name, n)
            over = [what for what, share in sorted(one.shares.items(), key=lambda each: -each[1]) if share > 1]
            over += [what for what, most in BOUNDS.items() if n > most]
            most = max(one.shares, key=lambda what: one.shares[what])
            fits = f"fits: {most} {100 * one.shares[most]:.2g} %"
            rows.append([
                f"`{name}`", f"{n:,}", size(one.bytes), seconds_text(one.processor), seconds_text(one.line),
                size(one.memory), ", ".join(over) or fits,
            ])  # fmt: skip
    return table("protocol, agents, bytes, processor, line, memory, beyond the limit", rows)


def saturation_table(made: Mapping[str, Any]) -> str:
    rows = []
    for name in PROTOCOLS:
        found = saturation(made, name) | BOUNDS
        first = min(found, key=lambda what: found[what])
        rows.append([f"`{name}`", *(f"{rounded(found[what]):,}" for what in found), f"**{first}**"])
    return table(f"protocol, {', '.join(load(made, 'fd', 1).shares)}, {', '.join(BOUNDS)}, first", rows)


def sampling_table(made: Mapping[str, Any]) -> str:
    checks = {(check["workload"], check["agents"]): check for check in made["checks"]}
    few, cpu = checks[SAMPLED, FITTED[-1]], made["workloads"]["fd"]["cpu"]
    rows = [["model", n, "all", f"{at(cpu, n):.2f} s", size(load(made, "fd", n).bytes)] for n in (FITTED[-1], FEW)]
    rows.insert(1, ["measured", few["agents"], FEW, f"{few['cpu']:.2f} s", size(few["up"] + few["down"])])
    return table("`fd`, agents, in a round, processor of a round, bytes of a round", rows)


def tree_table(made: Mapping[str, Any]) -> str:
    rows = []
    trees = ((10**4, 100), (10**6, 100), (10**6, 1000))
    for name, n, fan_out in [(name, *each) for name in ("fd", "fedavg") for each in trees]:
        depth, one = levels(n, fan_out), load(made, name, fan_out)
        relays = sum(ceil(n / fan_out**level) for level in range(1, depth))
        hop = at(made["workloads"][name]["cpu"], fan_out) + one.line
        rows.append([
            f"`{name}`", f"{n:,}", f"{fan_out:,}", depth, f"{relays:,}", size(one.bytes), seconds_text(one.processor),
            seconds_text(depth * hop),
        ])  # fmt: skip
    return table("protocol, n, f, D, relays, bytes at the root, processor of the root, path", rows)


def error_table(made: Mapping[str, Any]) -> str:
    rows = [
        ["flat" if depth == 1 else f"f = {fan_out:,.0f}, D = {depth:.0f}", f"{error:.1e}", f"{bound:.1e}"]
        for fan_out, depth, error, bound in tree_errors()
    ]
    return table("mean of 100 000 agents in float32, largest error, bound", rows).replace("100 000", "100,000")


def table(heads: str, rows: Sequence[Sequence[Any]]) -> str:
    names = heads.split(", ")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def size(count: float) -> str:
    """Bytes, with three digits."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"


def seconds_text(value: float) -> str:
    return f"{rounded(value):,} s" if value >= 100 else f"{value:.2g} s"


def rounded(value: float) -> int:
    """To two digits."""
    return int(float(f"{value:.1e}")) if value >= 100 else int(value)


def span(values: Sequence[float], factor: float) -> str:
    """The smallest and the largest of several, in brackets; nothing if there is one."""
    return f" ({factor * values[0]:.2f} to {factor * values[1]:.2f})" if values[0] != values[1] else ""


def page(text: str, made: Mapping[str, Any]) -> str:
    """The page with these tables in place of those with the same heads."""
    for each in tables(made).split("\n\n"):
        first = each.splitlines()[0]
        text, found = re.subn(rf"^{re.escape(first)}\n(\|.*\n)+", lambda _, new=each: new + "\n", text, flags=re.M)
        assert found == 1, first
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), json.loads(KEPT.read_text("utf-8"))), "utf-8")
