"""An error of another process: described there as plain values, and raised again here."""

from __future__ import annotations

from typing import Any

import codistill.errors as errors
from codistill.source_lines import add_line


def describe_error(error: BaseException, trace: str) -> dict[str, Any]:
    """An error as plain values, to be raised again by the owner of the run."""
    add_line(error)
    parts = list(error.args) if len(error.args) == 3 and hasattr(error, "exit_code") else None
    notes = list(getattr(error, "__notes__", []))
    return {
        "kind": type(error).__name__,
        "parts": parts,
        "text": f"{type(error).__name__}: {error}",
        "notes": notes,
        "trace": trace,
    }


def rebuild_error(content: dict[str, Any]) -> Exception:
    """The error that was described."""
    kind = getattr(errors, content["kind"], None)
    if content["parts"] and isinstance(kind, type) and issubclass(kind, errors.CodistillError):
        error: Exception = kind(*content["parts"])
    else:
        error = RemoteError(content["text"])
        error.add_note(content["trace"])
    for note in content["notes"]:
        error.add_note(note)
    return error


class RemoteError(Exception):
    """An unexpected error in a worker process; its notes hold the worker's traceback."""
