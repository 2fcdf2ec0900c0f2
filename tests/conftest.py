"""Small federations that many tests share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

# Before numpy is loaded: threads that wait for one another cost more than small matrices do.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """All 1,797 digits as (n, 1, 8, 8) in 0..1."""
    x, y = load_digits(return_X_y=True)
    return (x.reshape(-1, 1, 8, 8) / 16).astype(np.float32), y.astype(np.int64)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report takes longer than a small run; it has tests of its own."""
    monkeypatch.setattr("codistill.report.pages.write_report", lambda summary, path: path)


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are drawn, but not written into the page, which takes most of a report's time."""
    monkeypatch.setattr("codistill.report.html.svg", lambda *args, **options: "")


@pytest.fixture
def time_limit() -> Iterator[None]:
    """A test with processes that wait for one another fails instead of waiting for ever.

    Ray starts its processes at a lower priority: beside other tests on slow cores, six hosts took more than 120 s.
    """

    def fail(*_: object) -> None:
        raise TimeoutError("the test has not ended within its time limit")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A Ray cluster with four logical cores on this machine, which runs join since this process has.

    Left at the end of a module: others fork processes, which is not safe beside Ray's threads, or start their own.
    """
    import ray

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # Its processes import what tests are made of from where this one does.
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="CRITICAL", log_to_driver=False)
    del os.environ["PYTHONPATH"]
    os.environ |= {} if path is None else {"PYTHONPATH": path}
    yield
    ray.shutdown()
    for number, handler in before.items():
        signal.signal(number, handler)
