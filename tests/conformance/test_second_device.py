"""The conformance suite on a second device, which is not this machine's CPU.

torch differentiates in threads as soon as it has a second device, and then no longer in forked processes: so these
tests are run in a process of their own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def run(file: str, *options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / file), *options]
    done = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_every_protocol_in_short() -> None:
    run("on_second_device.py")


@pytest.mark.long
def test_what_takes_longer() -> None:
    run("on_second_device.py", "-m", "long")
