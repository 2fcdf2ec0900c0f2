"""All exceptions, as one tree; and the line of user code that an error is about.

Each has three short parts: what must hold, what was found, and what to do about it.
The command line prints them without a traceback and exits with the class's `exit_code`.

    CodistillError
    ├── RecipeError       2   a recipe, a setting or a command-line argument
    │   └── ArgumentError 2   an unexpected or missing argument of a class; also a TypeError
    ├── DataError         3   data, labels, shards, partitions
    ├── LearnerError      4   a model, or an ability that a protocol needs and a model lacks
    ├── MessageError      5   an invalid message (a runtime rejects it and continues)
    ├── CheckpointError   6   a run folder or checkpoint that cannot be read
    ├── StorageError      7   a folder that cannot be written
    ├── RuntimeFault      8   a round that cannot continue: a worker exited, a deadlock
    │   └── ProtocolError 8   a mistake in the code of a protocol; it names the line
    └── NetworkError      9   an address, a certificate, or a federation that cannot be joined
        └── PolicyError   9   terms or a release that an agent's own policy does not allow
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from types import CodeType


class CodistillError(Exception):
    """Base of all errors: what must hold, what was found (empty where the first part says it), what to do."""

    exit_code = 1

    def __init__(self, must: str, found: str, do: str) -> None:
        super().__init__(must, found, do)
        self.must, self.found, self.do = must, found, do

    def __str__(self) -> str:
        return f"{self.must} Found: {self.found}. {self.do}" if self.found else f"{self.must} {self.do}"


class RecipeError(CodistillError):
    """A recipe, a hyper-parameter or a command-line argument is invalid."""

    exit_code = 2


class ArgumentError(RecipeError, TypeError):
    """A class got an unexpected argument, or lacks a required one."""


class DataError(CodistillError):
    """Data, labels, a shard or a partition is unusable."""

    exit_code = 3


class LearnerError(CodistillError):
    """A model is invalid, or lacks a required ability."""

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
    """Advice for an unknown name: the most similar known name, or all of them."""
    names = sorted(set(map(str, known)))
    found = closest(str(name), names)
    return f"Did you mean '{found}'?" if found is not None else f"Known: {', '.join(names)}."


_ALIKE = 0.6  # of names: the share of letters, or of words, that they have in common
_COMPARED = 80  # letters of a name


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: by edit distance, in any order of its words, and by shared words."""
    wanted = name[:_COMPARED].lower().strip()
    own = _words(wanted)
    best, likeness = None, (_ALIKE, -1.0)
    for each in sorted(set(known)):
        other = each[:_COMPARED].lower().strip()
        words = _words(other)
        shared = (Counter(own) & Counter(words)).total()
        by_letters = _similarity(wanted, other)
        by_words = 2 * shared / max(1, len(own) + len(words))
        found = max(by_letters, by_words, _similarity(" ".join(own), " ".join(words))), by_letters
        if found > likeness:
            best, likeness = each, found
    return best


def _words(text: str) -> list[str]:
    return sorted(re.findall(r"[^\W_]+", text))


def _similarity(one: str, other: str) -> float:
    """1 - the edit distance as a share of the longer text; 0 where that is less than what counts as alike."""
    shorter, longer = sorted((len(one), len(other)))
    common = (Counter(one) & Counter(other)).total()  # letters that no edit can add to
    if (shorter, longer) == (1, 2):
        return common * 2 / 3  # one letter more or less
    return 0.0 if common < _ALIKE * longer else 1 - edit_distance(one, other) / max(1, longer)


def edit_distance(one: str, other: str) -> int:
    """How many letters to insert, drop, replace or swap with their neighbour until one text is the other."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        earlier, before, row = before, row, [i]
        for j, its in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != its))
            if i > 1 < j and letter == other[j - 2] and one[i - 2] == its:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]


# --- the line of user code (a protocol, a model, a script) that an error is about

_PACKAGE = Path(__file__).parents[1]
_VERBS = {str(path) for path in (*_PACKAGE.glob("nodes/*.py"), _PACKAGE / "wire/message.py", _PACKAGE / "protocol.py")}
_PATHS = (str(_PACKAGE), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
_LIBRARIES = ("<frozen", *(path + os.sep for path in _PATHS))


def calling_line() -> str:
    """The line that called a verb or made a message, as file:line."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _VERBS and frame.f_back is not None:
        frame = frame.f_back
    return show_line(frame.f_code, frame.f_lineno)


def show_line(code: CodeType, line: int | None = None) -> str:
    """A line of a function, as file:line; by default its first."""
    return f"{_shown(code.co_filename)}:{line or code.co_firstlineno}"


def own_line(error: BaseException, own: Collection[str] = ()) -> str | None:
    """The innermost line of user code in a traceback, as "file:line, in function: text".

    `own`: files that count as user code wherever they are installed.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in own or not frame.filename.startswith(_LIBRARIES):
            text = f": {frame.line}"[:200] if frame.line else ""
            return f"{_shown(frame.filename)}:{frame.lineno}, in {frame.name}{text}"
    return None


def add_line(error: BaseException, own: Collection[str] = ()) -> None:
    """Add a note with the line of user code, unless the error names it already."""
    line = own_line(error, own)
    if line and not any(line.partition(",")[0] in text for text in (str(error), *getattr(error, "__notes__", ()))):
        error.add_note(line)


def _shown(file: str) -> str:
    """A path relative to the current folder if it is below it."""
    return file.removeprefix(os.getcwd() + os.sep)
