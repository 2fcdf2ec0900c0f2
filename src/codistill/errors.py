"""Every error that a user can meet, as one tree.

Each error is three short parts: what must hold, what was found, and what to do about it.
The command line prints them and exits with the class's `exit_code`; no traceback is shown.

    CodistillError
    ├── RecipeError       2   a recipe, a setting or a command-line argument
    │   └── ArgumentError 2   in Python: an argument that a class does not take, or lacks; also a TypeError
    ├── DataError         3   data, labels, shards, partitions
    ├── LearnerError      4   a model, or an ability that a protocol needs and a model lacks
    ├── MessageError      5   a message that may not be used (a runtime rejects it and continues)
    ├── CheckpointError   6   a run folder or checkpoint that cannot be read
    ├── StorageError      7   a folder that cannot be written
    ├── RuntimeFault      8   a round that cannot continue: a worker that ended, a deadlock
    │   └── ProtocolError 8   a mistake in the code of a protocol; it names the line
    └── NetworkError      9   an address, a certificate, or a federation that cannot be joined
        └── PolicyError   9   terms or a release that an agent's own policy does not allow
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CodistillError(Exception):
    """Base of all errors: what must hold, what was found, what to do."""

    exit_code = 1

    def __init__(self, must: str, found: str, do: str) -> None:
        super().__init__(must, found, do)
        self.must, self.found, self.do = must, found, do

    def __str__(self) -> str:
        return f"{self.must} Found: {self.found}. {self.do}"


class RecipeError(CodistillError):
    """A recipe, a hyper-parameter or a command-line argument is wrong."""

    exit_code = 2


class ArgumentError(RecipeError, TypeError):
    """A class is given an argument that it does not take, or is not given one that it must have."""


class DataError(CodistillError):
    """Data, labels, a shard or a partition is unusable."""

    exit_code = 3


class LearnerError(CodistillError):
    """A model cannot do what is asked of it."""

    exit_code = 4


class MessageError(CodistillError):
    """A message is malformed; its receiver rejects it and continues."""

    exit_code = 5


class CheckpointError(CodistillError):
    """A checkpoint or run folder cannot be read."""

    exit_code = 6


class StorageError(CodistillError):
    """A file or folder cannot be written."""

    exit_code = 7


class RuntimeFault(CodistillError):
    """A round cannot continue."""

    exit_code = 8


class ProtocolError(RuntimeFault):
    """The code of a protocol breaks a rule of protocols; `found` names the line of its file."""


class NetworkError(CodistillError):
    """An address, a certificate, or a federation that cannot be joined."""

    exit_code = 9


class PolicyError(NetworkError):
    """Terms of a federation, or a release, that an agent's own policy does not allow."""

    rule = ""  # its name in the policy


def nearest(name: str, known: Iterable[str]) -> str:
    """The sentence that follows an unknown name: the most similar known name, or all of them."""
    names = sorted(set(map(str, known)))
    spelt = {each.lower(): each for each in names}
    close = difflib.get_close_matches(str(name).lower(), spelt, n=1, cutoff=0.6)
    if close:
        return f"Did you mean '{spelt[close[0]]}'?"
    return f"Known: {', '.join(names)}."
