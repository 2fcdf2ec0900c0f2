"""Packed messages with bytes changed at random: each must be refused by name, or hold valid arrays of bounded size.

`python tests/wire/mutations.py 100000` tries so many and says what became of them.
"""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections import Counter
from itertools import product

import numpy as np

from codistill.core.errors import MessageError
from codistill.wire.codec import decode
from codistill.wire.compression import Compression
from codistill.wire.packing import EXPANSION

# While they are made, arrays take a few times what they take in the end; and Python itself needs a little.
AT_WORK, LITTLE = 4, 200_000
SETTINGS = [
    Compression(bits=bits, top_k=k, lossless=lossless)
    for bits, k, lossless in product((None, 16, 8), (None, 1, 3), (False, True))
    if bits or k or lossless
]
_SIGNS = b'0123456789-{}[]",:eE.\\fdp~'


def messages() -> list[bytes]:
    """A packed message for every combination of settings."""
    rng = np.random.default_rng(0)
    arrays = {
        "z": rng.dirichlet(np.full(10, 0.3), 20).astype(np.float32),
        "w": rng.standard_normal((2, 300)).round(1),
        "b": rng.standard_normal((6, 20)).astype(np.float16).round(1),
        "ids": np.arange(4),
    }
    return [compression.encode(arrays, {"samples": 3, "names": ["a"]}, {}) for compression in SETTINGS]


def mutated(valid: bytes, rng: random.Random) -> bytes:
    """The message with one to eight changes: anywhere, or in the description of its arrays, or in its body."""
    data = bytearray(valid)
    header = 8 + int.from_bytes(valid[:8], "little")
    told = (valid.index(b'"p":"') + 5, valid.index(b'"},')) if b'"p":"' in valid else (8, header)
    first, last = rng.choice([(0, header), told, told, told, (header, len(valid))])
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        where = rng.randrange(first, min(last, len(data)))
        match rng.randrange(5 if first == 0 else 4):
            case 0:
                data[where] = rng.randrange(256)
            case 1:
                data[where] ^= 1 << rng.randrange(8)
            case 2:
                data[where] = rng.choice(_SIGNS)
            case 3:  # one digit for another: shapes, bits, lengths
                digits = [place for place in range(first, min(last, len(data))) if chr(data[place]).isdigit()]
                data[rng.choice(digits or [where])] = rng.choice(b"0123456789")
            case 4:
                del data[where]
    return bytes(data)


def try_one(data: bytes) -> str:
    """What became of it; an assertion fails if that is anything but an error by name or valid, bounded arrays."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        arrays, values = decode(data)
    except MessageError as error:
        arrays, outcome = {}, error.found.split(":")[0][:40]
    else:
        outcome = "valid"
        assert isinstance(values, dict)
    peak = tracemalloc.get_traced_memory()[1] - before
    assert peak <= AT_WORK * EXPANSION * len(data) + LITTLE, peak
    assert sum(array.nbytes for array in arrays.values()) <= EXPANSION * len(data)
    for array in arrays.values():
        assert np.isfinite(array).all()
        assert not array.flags.writeable
    return outcome


def try_many(count: int) -> tuple[Counter[str], int]:
    """Outcomes of so many mutations, and the most that was allocated for one."""
    rng, valid = random.Random(0), messages()
    outcomes: Counter[str] = Counter()
    largest = 0
    tracemalloc.start()
    try:
        for _ in range(count):
            outcomes[try_one(mutated(rng.choice(valid), rng))] += 1
            largest = max(largest, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    return outcomes, largest


def main(count: int) -> None:
    """Try this many, and print what became of them."""
    found, most = try_many(count)
    for outcome, times in found.most_common(25):
        print(f"{times:7} {outcome}")
    print(f"{found.total()} mutations, {found['valid']} still valid, at most {most} bytes allocated for one")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
