"""The attacks of the tests at full size: 10,000 random inputs of each kind against a running hub.

    python -m trials.attacks

What is attacked, and what has to follow, is in tests/network/test_attacks.py, which runs with a few hundred.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NOISE = 10_000  # random headers, commands, messages and connections
TESTS = "test_outsiders or test_agents_that_misbehave or two_sites"


def main() -> int:
    """The exit code of the tests."""
    tests = ("tests/network/test_attacks.py", "-k", TESTS, "--durations=0")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "", *tests]  # also those marked "long"
    environment = os.environ | {"CODISTILL_NOISE": str(NOISE)}
    return subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
