"""Prints the peak memory, in MB, of a federation of 1,000 small agents in two worker processes."""

from __future__ import annotations

import resource

import codistill as cd
from bench.workloads import small


def main() -> None:
    small(1000, cd.FedAvg()).run(1, workers=2, alone=False, progress=False)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    # Each worker is at most as large as the larger one; pages that they share are counted every time.
    print((own + 2 * worker) / 1024)


if __name__ == "__main__":
    main()
