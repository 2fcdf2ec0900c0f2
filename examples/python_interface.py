"""The Python interface: two agents with different models learn from one another and leave a report."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from torch import nn

import codistill as cd


def main() -> None:
    x, y = load_digits(return_X_y=True)
    x = x / 16
    low, high = (y[:1000] < 7).nonzero()[0], (y[:1000] > 2).nonzero()[0]  # digits 0-6 and 3-9
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    agents = [
        cd.Agent("clinic", RandomForestClassifier(), x[low], y[low]),
        cd.Agent("lab", module, x[high], y[high]),
    ]
    federation = cd.Federation(agents, cd.FedMD(local_epochs=5), public=x[1000:1300], test=(x[1300:], y[1300:]), seed=0)
    result = federation.run(rounds=10, progress=False)

    print(result)
    print(result.frame().tail(2).to_string(index=False))
    print("the lab says:", result.agents["lab"].predict(x[1300:1303]).argmax(axis=1), "truth:", y[1300:1303])
    with tempfile.TemporaryDirectory() as folder:
        page = result.report(Path(folder) / "report.html")
        print(f"report: {page.stat().st_size / 1000:.0f} kB")
    assert all(line.gain is not None and line.gain > 0 for line in result.summary().lines())


if __name__ == "__main__":
    main()
