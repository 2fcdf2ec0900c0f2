"""How far is the protocol that `codistill advise` recommends behind the best one?

    python -m trials.regret measure --results FILE     # true gains and probing runs of all settings; resumable
    python -m trials.regret table --results FILE       # the regret

The true gain of a protocol is that of a whole run on all training samples, on test samples that advice never sees.
Data sets that are not bundled are taken from the data folder (CODISTILL_DATA).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from codistill.errors import CodistillError
from codistill.experiments.advice_candidates import Setting, copy_of, find_candidates
from codistill.experiments.advice_probe import Part, ProbeRun, folds, run_probe
from codistill.protocols import FedMD
from trials.regret_settings import Case, build, cases

LIKE = FedMD(local_epochs=5)  # five rounds of five epochs
FOLDS = 4


def measure(results: Path, what: str, share: tuple[int, int], limit: float) -> None:
    """Run what is not in the file of results yet."""
    began, number, of = time.monotonic(), *share
    done = {(row["case"], row["run"], row["candidate"]) for row in read(results)}
    for index, case in enumerate(cases()):
        if index % of != number:
            continue
        setting, parts = build(case)
        found = find_candidates(trained_part(setting, parts), LIKE)
        candidates = {**found.baselines, **found.protocols}
        for run, split in _runs(setting, parts, what):
            for name, protocol in candidates.items():
                if (case.name, run, name) in done or time.monotonic() - began > limit:
                    continue
                try:
                    probe = run_probe(setting, protocol, split, 0 if run == "truth" else 1 + int(run[-1]))
                    if not probe.complete:  # Ctrl-C, or asked to end
                        return
                    row = _row(case, run, name, probe)
                except (CodistillError, ValueError) as error:
                    row = {"case": case.name, "run": run, "candidate": name, "failed": f"{error}"[:300]}
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        print(f"{time.monotonic() - began:6.0f} s  {case.name}", flush=True)


def trained_part(setting: Setting, parts: dict[str, Part]) -> Setting:
    """The setting as advice sees it: with the training samples only."""
    agents = [copy_of(agent, parts[agent.name][0]) for agent in setting.agents]
    for agent in agents:
        agent.settle(setting.classes)
    return Setting(
        agents=tuple(agents), classes=setting.classes, rounds=setting.rounds, seed=setting.seed, public=setting.public
    )


def _runs(setting: Setting, parts: dict[str, Part], what: str) -> list[tuple[str, dict[str, Part]]]:
    if what == "truth":
        return [("truth", parts)]
    split = folds(trained_part(setting, parts).agents, FOLDS, setting.seed)
    return [
        (f"fold {k}", {name: (parts[name][0][train], parts[name][0][held]) for name, (train, held) in fold.items()})
        for k, fold in enumerate(split)
    ]


def _row(case: Case, run: str, name: str, probe: ProbeRun) -> dict[str, Any]:
    return {
        "case": case.name,
        "run": run,
        "candidate": name,
        "losses": {
            agent: [[float(f"{v:.4g}") for v in column] for column in each.T] for agent, each in probe.losses.items()
        },
        "sent": probe.sent,
        "seconds": round(probe.seconds, 3),
    }


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def read(results: Path) -> list[dict[str, Any]]:
    """All rows of a file of results."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("truth", "folds"))
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--part", default="0/1", help="of the settings: i/n")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing more is started")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    number, of = map(int, options.part.split("/"))
    measure(options.results, options.what, (number, of), options.limit)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
