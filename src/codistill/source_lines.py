"""Which line of a person's own code an error is about: of a protocol, a model or a script, not of a library."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Collection
from pathlib import Path
from types import CodeType

_PACKAGE = str(Path(__file__).parent) + os.sep
_CORE = {str(path) for path in Path(__file__).parent.glob("*.py")}  # agent, message, protocol: what a verb is made of
_LIBRARIES = (_PACKAGE, *(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")))


def calling_line() -> str:
    """The line that has called a verb or made a message, as file:line."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _CORE and frame.f_back is not None:
        frame = frame.f_back
    return show_line(frame.f_code, frame.f_lineno)


def show_line(code: CodeType, line: int | None = None) -> str:
    """A line of a function, as file:line; by default its first."""
    return f"{_shown(code.co_filename)}:{line or code.co_firstlineno}"


def own_line(error: BaseException, own: Collection[str] = ()) -> str | None:
    """The innermost line of a person's own code that led to an error, as file:line, in function: text.

    `own`: files that are such code, wherever they are installed.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in own or not _is_library(frame.filename):
            text = f": {frame.line}"[:200] if frame.line else ""
            return f"{_shown(frame.filename)}:{frame.lineno}, in {frame.name}{text}"
    return None


def add_line(error: BaseException, own: Collection[str] = ()) -> None:
    """Add a note with the line of a person's own code, unless the error names it already."""
    line = own_line(error, own)
    if line and not any(line.partition(",")[0] in text for text in (str(error), *getattr(error, "__notes__", ()))):
        error.add_note(line)


def _is_library(file: str) -> bool:
    return file.startswith(("<frozen", *_LIBRARIES))


def _shown(file: str) -> str:
    """A path below the current folder from there, any other in full."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
