"""Random numbers derive from (seed, agent, round), so no generator state has to be saved."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from codistill.core.devices import seed_device

Key = str | int


def derive(seed: int, *keys: Key) -> int:
    """A 64-bit number that depends on the seed and on every key, in order."""
    text = "\x1f".join(f"{type(key).__name__}:{key}" for key in (seed, *keys))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, *keys: Key) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(derive(seed, *keys)))


def seed_libraries(seed: int, *keys: Key) -> None:
    """Seed the global generators, which models use for dropout, forests and initialisation."""
    number = derive(seed, *keys)
    # Not torch.manual_seed: it also visits every accelerator, 200 times slower.
    torch.default_generator.manual_seed(number >> 1)
    np.random.seed(number & 0xFFFFFFFF)  # noqa: NPY002 - scikit-learn's random_state=None reads this one
    random.seed(number)
    seed_device(number >> 1)
