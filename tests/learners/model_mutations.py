"""Messages that hold models, with a few bytes changed: each is refused, or is a model that predicts.

`python tests/learners/model_mutations.py [cases]` tries many; the tests try a few.
"""

from __future__ import annotations

import json
import random
import sys
import warnings

import numpy as np
from model_messages import closed, linear, opened, stumps
from travelling_models import CLASSES, D, exported, message, toy

from codistill.core.errors import MessageError
from codistill.learners.portable import open_model
from codistill.learners.portable.onnx_graph import to_message
from codistill.wire.message import Message

TABLE = {
    **{
        name: lambda n=name: exported(n)
        for name in ("forest", "hist boosting", "scaled", "mlp", "registered mlp", "lightgbm")
    },
    "onnx linear": lambda: to_message(linear()).encoded,
    "onnx trees": lambda: to_message(stumps()).encoded,
    "onnx module": lambda: exported("module with norm and dropout"),
}
PACKED = ("tree", "forest", "hist boosting", "boosting", "logistic", "mlp")


def survives(data: bytes) -> bool:
    """Whether bytes are a model; if so, it must predict as one."""
    x, _ = toy()
    try:
        model = open_model(Message.decode(data), (D,), CLASSES)
    except MessageError:
        return False
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        assert model.predict(x).shape == (len(x), CLASSES)
    return True


def noise(rng: random.Random, data: bytes, start: int = 0) -> bytes:
    """A few bytes changed."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        where = rng.randrange(start, len(changed))
        match rng.randrange(3):
            case 0:
                changed[where] = rng.randrange(256)
            case 1:
                changed[where] ^= 1 << rng.randrange(8)
            case 2:
                changed[where] = ord(rng.choice('0123456789-{}[]",:'))
    return bytes(changed)


def mutate_messages(name: str, cases: int, seed: int) -> int:
    """How many of so many mutations of a message are still models; every other time past the header."""
    rng, valid = random.Random(seed), TABLE[name]()
    assert survives(valid)
    past = min(len(valid) - 1, 8 + int.from_bytes(valid[:8], "little"))
    return sum(survives(noise(rng, valid, past if case % 2 else 0)) for case in range(cases))


def mutate_archives(name: str, cases: int, seed: int) -> int:
    """How many of so many mutations inside of an archive are still models."""
    rng = random.Random(seed)
    outline, files = opened(message(name))
    text, arrays = json.dumps(outline).encode(), [file for file in files if len(files[file]) > 130]
    survived = 0
    for case in range(cases):
        other, changed = dict(files), text
        if case % 3:
            file = rng.choice(arrays)
            other[file] = noise(rng, files[file], start=rng.choice([0, 128]))
        else:
            changed = noise(rng, text)
        survived += survives(closed(changed, other).encoded)
    return survived


def main(cases: int) -> None:
    """So many mutations of each kind of message."""
    for name in TABLE:
        print(f"{name}: {mutate_messages(name, cases, seed=2)} of {cases} mutated messages are models")
    for name in PACKED:
        print(f"{name}: {mutate_archives(name, cases, seed=3)} of {cases} mutated archives are models")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
