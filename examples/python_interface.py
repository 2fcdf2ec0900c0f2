"""The Python interface: two agents with different models learn from one another and leave a report."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from torch import nn

import codistill as cd


def main() -> None:
    x, y = load_digits(return_X_y=True)
    x = x / 16
    low, high = (y[:1000] < 7).nonzero()[0], (y[:1000] > 2).nonzero()[0]  # digits 0-6 and 3-9
    torch.manual_seed(0)  # the module's initial weights are its owner's; all else derives from the federation's seed
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    agents = [
        cd.Agent("clinic", RandomForestClassifier(), x[low], y[low]),
        cd.Agent("lab", module, x[high], y[high]),
    ]
    federation = cd.Federation(agents, cd.FedMD(local_epochs=5), public=x[1000:1300], test=(x[1300:], y[1300:]), seed=0)
    result = federation.run(rounds=10, progress=False)

    print(result)
    print(result.frame().tail(2).to_string(index=False))
    print("the lab says:", result.agents["lab"].predict(x[1300:1303]), "truth:", y[1300:1303])
    with tempfile.TemporaryDirectory() as folder:
        page = result.report(Path(folder) / "report.html")
        print(f"report: {page.stat().st_size / 1000:.0f} kB")
    gains = [line.gain or 0.0 for line in result.summary().lines()]
    assert sum(gains) / len(gains) > 0.02, f"the agents should learn from one another, but gained {gains}"


if __name__ == "__main__":
    main()
