"""The features of the agents on some common test samples after a round, for a map of the feature space."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from codistill.errors import MessageError
from codistill.wire.codec import decode, encode


@dataclass(frozen=True, eq=False)
class FeatureSpace:
    """Features of the same test samples by agent, after one round."""

    round: int  # rounds done
    samples: np.ndarray  # (n,) places of the samples in the common test set
    labels: np.ndarray | None  # (n,) their classes; None: real values
    by_agent: dict[str, np.ndarray]  # (n, d) of each agent that has features and a model; d may differ

    def encode(self) -> bytes:
        """As a file."""
        arrays = {"samples": self.samples} | ({} if self.labels is None else {"labels": self.labels})
        arrays |= {_key(place): features for place, features in enumerate(self.by_agent.values())}
        return encode(arrays, {"round": self.round, "agents": list(self.by_agent)})

    @classmethod
    def decode(cls, data: bytes) -> FeatureSpace:
        """From a file; a `MessageError` if it is none."""
        arrays, values = decode(data, finite=False, limit=len(data), header_limit=len(data), packed=False)
        done, agents = values.get("round"), values.get("agents")
        shapes = {name: array.shape for name, array in arrays.items()}
        n = shapes.get("samples", ())
        names = agents if isinstance(agents, list) and all(isinstance(name, str) for name in agents) else []
        keys = [_key(place) for place in range(len(names))]
        fits = len(n) == 1 and shapes.keys() - {"labels"} == {"samples", *keys} and shapes.get("labels", n) == n
        fits = fits and all(len(shapes[key]) == 2 and shapes[key][:1] == n for key in keys)
        if not fits or type(done) is not int or names != agents:
            raise MessageError(
                "Arrays of features must have matching shapes.", f"{shapes}"[:200], "Write the file again."
            )
        by_agent = {name: arrays[key] for name, key in zip(names, keys, strict=True)}
        return cls(done, arrays["samples"], arrays.get("labels"), by_agent)


def _key(place: int) -> str:
    return f"agent-{place}"
