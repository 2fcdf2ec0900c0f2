"""Is each agent better off than alone, on its own data, with and without the safeguard?

    python -m trials.better_off --data-dir DATA [SETTING ...] [--byzantine] [--seeds N] [--out FILE]

For every protocol of a setting, over its seeds: the mean score of the agents alone, taught (the protocol as it is, on
all of an agent's samples) and safeguarded; the mean gains of the agents, of which the smallest matters most; the worst
agent of the worst seed; and the t statistic of the paired gain in the mean over agents. `--byzantine`: all agents but
the first send their answers with the opposite sign, and only the first is looked at.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

import codistill as cd
from codistill.nodes.record import record_of
from codistill.protocols import PROTOCOLS
from trials.better_off_settings import SETTINGS


def one(
    setting: str, protocol: str, seed: int, folder: str, safeguard: bool, byzantine: bool
) -> dict[str, list[float]]:
    """Scores of every agent after one run, alone and together, on its own test data: larger is better."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = SETTINGS[setting]
    agents, public = chosen.make(seed, folder)
    faults = [cd.Fault(kind="invert", agent=agent.name) for agent in agents[1:]] if byzantine else []
    kind = PROTOCOLS[protocol]
    made = cd.Federation(
        agents, kind(**chosen.options), public=public if kind.needs_public else None, seed=seed, safeguard=safeguard,
        faults=faults, scores=() if record_of(agents[0]).data[1].ndim == 2 else ("accuracy", "log_loss"),
    )  # fmt: skip
    result = made.run(chosen.rounds, runtime="simulation", evaluate_every=chosen.rounds, progress=False)
    key, sign = ("own_accuracy", 100) if made.description.task == "classification" else ("own_rmse", -1)
    last = [row for row in result.rows if row["round"] == chosen.rounds]
    alone = [row for row in result.alone_rows or result.rows if row["round"] == chosen.rounds]
    shown = slice(0, 1) if byzantine else slice(None)
    found = {"alone": [sign * row[key] for row in alone][shown], "together": [sign * row[key] for row in last][shown]}
    if all("own_log_loss" in row for row in (*alone, *last)):  # not where answers are no probabilities, as in ekd
        found["alone_loss"], found["loss"] = ([row["own_log_loss"] for row in rows][shown] for rows in (alone, last))
    found["weight"] = [row.get("safeguard_weight", 1.0) for row in last][shown]
    return found


def lines(setting: str, protocol: str, runs: list[dict[str, list[float]]], name: str) -> str:
    """One line of the table."""
    alone = np.array([np.mean(run["alone"]) for run in runs])
    together = np.array([np.mean(run["together"]) for run in runs])
    agents = min(len(run["alone"]) for run in runs)  # a partition may leave an agent out
    gains = np.array([(np.array(run["together"]) - np.array(run["alone"]))[:agents] for run in runs])
    difference = together - alone
    error = difference.std(ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else 0.0
    t = difference.mean() / error if error else 0.0
    each = " ".join(f"{gain:+.2f}" for gain in gains.mean(axis=0))
    weight = np.mean([np.mean(run["weight"]) for run in runs])
    loss = ""
    if all("loss" in run for run in runs):
        lost = np.array([np.mean(run["loss"]) - np.mean(run["alone_loss"]) for run in runs])
        spread = lost.std(ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else 0.0
        before = np.mean([np.mean(run["alone_loss"]) for run in runs])
        loss = f"  log loss {before:.3f} {lost.mean():+.3f} (t {lost.mean() / spread if spread else 0.0:+.1f})"
    return (
        f"{setting:25s} {protocol:15s} {name:12s} alone {alone.mean():8.2f}  gets {together.mean():8.2f}  gain "
        f"{difference.mean():+6.2f} (t {t:+5.1f})  by agent {each}  worst agent {gains.mean(axis=0).min():+6.2f}  "
        f"worst run {gains.min():+7.2f}  weight {weight:.2f}{loss}"
    )


def main() -> None:
    """Run the settings, two runs at a time, and print a line for each protocol with and without the safeguard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=[], metavar="SETTING", help=", ".join(SETTINGS))
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--protocols", nargs="*", default=None)
    parser.add_argument("--only", choices=("taught", "safeguarded"), help="one line per protocol, not both")
    parser.add_argument("--byzantine", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # its imports, before the fork
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=20) as pool:
        for setting in options.settings or SETTINGS:
            seeds = range(min(options.seeds or SETTINGS[setting].seeds, SETTINGS[setting].seeds))
            for protocol in options.protocols or SETTINGS[setting].protocols:
                for safeguard in {None: (False, True), "taught": (False,), "safeguarded": (True,)}[options.only]:
                    jobs = [(setting, protocol, seed, options.data_dir, safeguard, options.byzantine) for seed in seeds]
                    runs = pool.starmap(one, jobs, chunksize=1)
                    text = lines(setting, protocol, runs, "safeguarded" if safeguard else "taught")
                    print(text, flush=True)
                    if options.out is not None:
                        with options.out.open("a") as file:
                            print(text, file=file)


if __name__ == "__main__":
    sys.exit(main())
