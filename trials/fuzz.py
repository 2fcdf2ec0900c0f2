"""Every message of every protocol with one thing changed: it is refused by name, or used; nothing else happens.

    python -m trials.fuzz [--cases 100000] [--seed 0] [--only NAME]

A round of each protocol is recorded, between tiny agents. Then the receiver of a message runs through it again with
that message changed, as it would arrive from the network. A case fails if anything but a refusal comes out of it: an
exception, a warning, a message that honest nodes could not use, scores that are not finite, or a few seconds' work.
Commands, answers, join requests and terms are changed in the same way. Exit code 1 if any case fails.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from codistill.engine.runtime import one_thread
from codistill.learners.ability import Ability
from trials.fuzz_cases import CASES, Case, Recorded
from trials.fuzz_controls import CONTROLS
from trials.fuzz_mutations import mutate

SECONDS = 5.0  # of processor time that one case may take
MEGABYTES = 1024  # by which the memory of this process may grow
_SHOWN = 5  # failures of a protocol that are printed

Try = Callable[[random.Random], bool]  # runs one case; True if it was refused


@dataclass
class Outcome:
    """What became of the cases of one protocol, or of one kind of command."""

    name: str
    cases: int = 0
    refused: int = 0
    errors: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def row(self) -> str:
        """One line of the table."""
        accepted = self.cases - self.refused - len(self.errors)
        counts = f"{self.cases:8}{self.refused:9}{accepted:10}{len(self.errors):8}"
        return f"{self.name:32}{counts}{1000 * self.slowest:9.0f} ms"


def protocol_cases(case: Case) -> Try:
    """Changed messages of one protocol."""
    recorded = Recorded(case)

    def attempt(rng: random.Random) -> bool:
        place = rng.randrange(len(recorded.messages))
        data = mutate(recorded.messages[place][2], rng, case.compression)
        return bool(recorded.replay(place, data).refused)

    return attempt


def run(name: str, attempt: Try, count: int, seed: int) -> Outcome:
    """Run cases `seed`, `seed` + 1, ...: each can be repeated by itself."""
    outcome = Outcome(name)
    for number in range(seed, seed + count):
        began = time.process_time()
        outcome.cases += 1
        try:
            outcome.refused += attempt(random.Random(f"{name} {number}"))
        except Exception:
            outcome.errors.append(f"{name}, case {number}:\n{traceback.format_exc()}")
        took = time.process_time() - began
        outcome.slowest = max(outcome.slowest, took)
        if took > SECONDS:
            outcome.errors.append(f"{name}, case {number}: {took:.1f} s")
    return outcome


def run_all(cases: int, seed: int = 0, only: str = "") -> Iterator[Outcome]:
    """Cases of each protocol and each kind of command; a quarter as many where models are sent, which take longer."""
    weights = {True: 1, False: 4}
    attempts: list[tuple[str, Callable[[], Try], int]] = [
        (case.name, partial(protocol_cases, case), weights[Ability.PORTABLE in case.protocol.needs]) for case in CASES
    ]
    attempts += [(name, make, 4) for name, make in CONTROLS]
    chosen = [each for each in attempts if only in each[0]]
    total = sum(weight for _, _, weight in chosen)
    for name, make, weight in chosen:
        with one_thread(), warnings.catch_warnings():
            warnings.simplefilter("error")
            yield run(name, make(), -(-cases * weight // total), seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; 1 if any case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case of each protocol")
    parser.add_argument("--only", default="", help="protocols whose name contains this")
    options = parser.parse_args(arguments)
    began, memory = time.monotonic(), _megabytes()
    print(f"{'':32}{'cases':>8}{'refused':>9}{'accepted':>10}{'errors':>8}{'slowest':>12}", flush=True)
    total = Outcome("all")
    for outcome in run_all(options.cases, options.seed, options.only):
        print(outcome.row(), flush=True)
        for error in outcome.errors[:_SHOWN]:
            print(error)
        total.cases, total.refused = total.cases + outcome.cases, total.refused + outcome.refused
        total.errors += outcome.errors
        total.slowest = max(total.slowest, outcome.slowest)
    grown = _megabytes() - memory
    print(f"{total.row()}\n{time.monotonic() - began:.0f} s, memory grew by {grown} MB")
    return int(bool(total.errors) or grown > MEGABYTES)


def _megabytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    raise SystemExit(main())
