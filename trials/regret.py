"""How far is the protocol that `codistill advise` recommends behind the best one?

    python -m trials.regret truth --results FILE      # true gains in all settings; resumable
    python -m trials.regret probes --results FILE     # the probing runs of `codistill advise`; resumable
    python -m trials.regret table --results FILE      # the regret
    python -m trials.regret prior --results FILE      # experiments/advice_prior.toml, fitted to all settings

The true gain of a protocol is that of a whole run on all training samples, on test samples that advice never sees.
Data sets that are not bundled are taken from the data folder (CODISTILL_DATA).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from codistill.core.errors import CodistillError
from codistill.experiments.advice_prior import ALONE, Setting, copy_of, expected_gains, facts_of, find_candidates
from codistill.experiments.advice_probe import Part, ProbeRun, Search, run_probe
from codistill.nodes.record import record_of
from codistill.protocols import FedMD
from trials.regret_settings import Case, build, cases
from trials.regret_table import fit_prior, measured_settings, prior_text, table

LIKE = FedMD(local_epochs=5)  # five rounds of five epochs
TRUTH, FACTS = "truth", "facts"


def measure_truth(results: Path, cases: Sequence[Case]) -> None:
    """Whole runs of all candidates, tested on the test samples; what is in the file already is not run again."""
    rows = read(results)
    done = {(row["case"], row["candidate"]) for row in rows if row["run"] == TRUTH}
    known = {(row["case"], row["run"]) for row in rows}
    for case in cases:
        setting, parts = build(case)
        trained = trained_part(setting, parts)
        found = find_candidates(trained, LIKE)
        if (case.name, FACTS) not in known:
            facts = {name: dataclasses.asdict(each) for name, each in facts_of(trained).items()}
            write(results, [{"case": case.name, "run": FACTS, "candidate": "", "facts": facts}])
        for name, protocol in {**found.baselines, **found.protocols}.items():
            if (case.name, name) in done:
                continue
            try:
                probe = run_probe(setting, protocol, parts, 0)
            except (CodistillError, ValueError) as error:
                write(results, [{"case": case.name, "run": TRUTH, "candidate": name, "failed": f"{error}"[:300]}])
                continue
            if not probe.complete:  # Ctrl-C, or asked to end
                return
            write(results, [_row(case, TRUTH, name, probe)])
        print(f"{time.strftime('%H:%M:%S')} {case.name}", flush=True)


def measure_probes(results: Path, cases: Sequence[Case]) -> None:
    """The probing runs of `codistill advise` without a time limit, on the training samples alone.

    The prior, by which hopeless candidates are dropped, is fitted to the true gains on other data sets.
    """
    done = {row["case"] for row in read(results) if row["run"].startswith("fold")}
    for case in cases:
        if case.name in done:
            continue
        setting = trained_part(*build(case))
        found, facts = find_candidates(setting, LIKE), facts_of(setting)
        others = [each for each in measured_settings(read(results)) if each.data != case.data]
        prior = fit_prior(others) if others else {}
        priors = {name: expected_gains(name, facts, prior) for name in found.protocols}
        try:
            findings = Search(setting, found, priors, seconds=1e9).run()
        except (CodistillError, ValueError) as error:
            write(results, [{"case": case.name, "run": "fold 0", "candidate": ALONE, "failed": f"{error}"[:300]}])
            continue
        if findings.interrupted:
            return
        rows = [
            _row(case, f"fold {k}", name, run) for name, runs in findings.runs.items() for k, run in enumerate(runs)
        ]
        write(results, rows)
        print(f"{time.strftime('%H:%M:%S')} {case.name}: {findings.seconds:.0f} s", flush=True)


def trained_part(setting: Setting, parts: dict[str, Part]) -> Setting:
    """The setting as advice sees it: with the training samples only."""
    agents = [copy_of(agent, parts[agent.name][0]) for agent in setting.agents]
    for agent in agents:
        record_of(agent).encode_labels(setting.classes)
    return Setting(
        agents=tuple(agents), classes=setting.classes, rounds=setting.rounds, seed=setting.seed, public=setting.public
    )


def _row(case: Case, run: str, name: str, probe: ProbeRun) -> dict[str, Any]:
    return {
        "case": case.name,
        "run": run,
        "candidate": name,
        "losses": {
            agent: [[float(f"{v:.4g}") for v in column] for column in each.T] for agent, each in probe.losses.items()
        },
        "seconds": round(probe.seconds, 3),
    }


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def read(results: Path) -> list[dict[str, Any]]:
    """All rows of a file of results."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def write(results: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to a file of results."""
    with results.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("truth", "probes", "table", "prior"))
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; what is there is not run again")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="only every N-th setting, from number I on")
    options = parser.parse_args(arguments)
    if options.what in ("table", "prior"):
        settings = measured_settings(read(options.results))
        print(
            prior_text(fit_prior(settings))
            if options.what == "prior"
            else table([each for each in settings if each.is_probed])
        )
        return 0
    torch.set_num_threads(1)
    first, step = map(int, options.part.split("/"))
    measure = {"truth": measure_truth, "probes": measure_probes}[options.what]
    measure(options.results, cases()[first::step])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
