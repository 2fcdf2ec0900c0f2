"""Archives of estimators with some things changed: each is refused, or is a model that predicts; nobody dies of one.

    python -m trials.archives [--cases 50000] [--seed 0] [--only NAME]

For each type of estimator that travels, and for saved ones that do not, arrays and outlines of a sound archive are
changed as a hostile sender would: shapes, dtypes, orders, values, indices, files, attributes, types. A process of its
own opens each archive, as the receiver of a message or the reader of a file does, and predicts with what it was
given. Its parent counts deaths by a signal, cases that take too long, and memory. Exit code 1 if there is any, or any
other exception than a refusal.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import random
import resource
import select
import subprocess
import sys
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trials.fuzz_mutations import PLAIN, mutate_json

ROOT = Path(__file__).parents[1]
SECONDS = 60  # without a word from the process that opens archives; most cases take milliseconds
MEGABYTES = 1024  # by which its memory may grow
_SHOWN = 5  # failures that are printed

Files = dict[str, bytes]
_OUTLINE = "schema.json"
_DTYPES = (*"?bBhHiIlLqQefdFD", ">i8", ">f8", ">i4", "S4", "U2", "M8[s]", "V8")


# --- mutations ----------------------------------------------------------------------------------------------


def changed(outline: Any, files: Files, rng: random.Random) -> bytes:
    """An archive with one to three things changed."""
    outline, made = copy.deepcopy(outline), dict(files)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind = rng.random()
        if kind < 0.65 and files:
            name = rng.choice(sorted(files))
            made[name] = _changed_array(files, name, rng)
        elif kind < 0.96:
            outline = _change_outline(outline, rng)
        else:
            return _change_zip(_zipped(outline, made), rng)
    return _zipped(outline, made)


def _zipped(outline: Any, files: Files) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_OUTLINE, outline if isinstance(outline, bytes) else json.dumps(outline))
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=False)
    return out.getvalue()


def _changed_array(files: Files, name: str, rng: random.Random) -> bytes:
    data, other = files[name], files[rng.choice(sorted(files))]
    if name.endswith(".npz") or rng.random() < 0.05:
        return _noise(data, rng) if rng.random() < 0.7 else other
    array = np.load(io.BytesIO(data))
    ways: list[tuple[int, Callable[[], bytes]]] = [
        (6, lambda: _npy(_values(array, rng))),
        (4, lambda: _npy(_shape(array, rng))),
        (2, lambda: _npy(_dtype(array, rng))),
        (1, lambda: _npy(np.asfortranarray(array))),
        (1, lambda: _claims(data, rng)),
        (1, lambda: data[: rng.randrange(len(data))]),
        (2, lambda: other),  # of another place
        (1, lambda: _noise(data, rng)),
    ]
    try:
        return rng.choices([way for _, way in ways], [weight for weight, _ in ways])[0]()
    except (ValueError, TypeError, IndexError, OverflowError):  # what numpy itself does not make of this array
        return _npy(np.asarray(0))


def _numbers(kind: str, length: int, rng: random.Random) -> Any:
    """A number that may be out of place: indices around an end, negative, huge; NaN, infinity."""
    if kind == "f":
        return rng.choice([0, -1, 1e308, -1e308, 5e-324, np.nan, np.inf, -np.inf, 1e15])
    if kind == "b":
        return rng.random() < 0.5
    near = [0, 1, -1, -2, length - 1, length, length + 1, -length, 2 * length]
    return rng.choice([*near, *near, 2**7, 2**15, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63)])


def _values(array: np.ndarray, rng: random.Random) -> np.ndarray:
    made = array.copy()
    column = made[rng.choice(made.dtype.names)] if made.dtype.names else made
    if not column.size or column.dtype.kind not in "biuf":
        return made
    number = _numbers(column.dtype.kind, max(array.shape, default=1), rng)
    with np.errstate(all="ignore"):
        if column.dtype.kind in "iu":
            limits = np.iinfo(column.dtype)
            number = min(max(number, int(limits.min)), int(limits.max))
        match rng.randrange(4):
            case 0:
                column[...] = number
            case 1 if column.ndim:
                column[rng.randrange(len(column))] = number
            case 2 if column.ndim == 1 and column.dtype.kind in "iu":  # other indices of the same array
                column[...] = np.random.default_rng(rng.randrange(99)).permutation(column)
            case _:
                column[np.unravel_index(rng.randrange(column.size), column.shape)] = number
    return made


def _shape(array: np.ndarray, rng: random.Random) -> np.ndarray:
    flat = array.reshape(-1)
    ways: list[Callable[[], np.ndarray]] = [
        lambda: flat[:1].reshape(()), lambda: flat, lambda: array[None], lambda: array[..., None], lambda: array.T,
        lambda: array[:0], lambda: array[..., :0], lambda: array[1:], lambda: array[:1], lambda: array[:-1],
        lambda: array[..., :-1], lambda: np.concatenate([array, array]), lambda: np.resize(array, (1000,)),
        lambda: np.concatenate([array, array], axis=-1), lambda: array[::-1], lambda: array.reshape(1, -1),
        lambda: array.reshape(-1, 1), lambda: np.zeros((0, 1 << 20), array.dtype), lambda: np.resize(array, (3, 3, 3)),
    ]  # fmt: skip
    return np.asarray(rng.choice(ways)())


def _dtype(array: np.ndarray, rng: random.Random) -> np.ndarray:
    if array.dtype.names and rng.random() < 0.7:
        fields = [(name, array.dtype[name].str) for name in array.dtype.names]
        at = rng.randrange(len(fields))
        match rng.randrange(4):
            case 0:
                fields[at] = (fields[at][0], rng.choice(["<i4", "<i2", "<f8", "<f4", "<u8", "|u1", ">i8"]))
            case 1:
                rng.shuffle(fields)
            case 2:
                fields.pop(at)
            case _:
                fields.append(("more", "<i8"))
        made = np.zeros(array.shape, dtype=np.dtype(fields, align=rng.random() < 0.5))
        for name in made.dtype.names or ():
            if name in array.dtype.names:
                made[name] = array[name].astype(made.dtype[name])
        return made
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = np.dtype(rng.choice(_DTYPES))
        return array.astype(kind) if rng.random() < 0.7 else np.frombuffer(array.tobytes(), dtype=kind)


def _claims(data: bytes, rng: random.Random) -> bytes:
    """The same numbers under a header that says otherwise."""
    stream = io.BytesIO(data)
    np.lib.format.read_magic(stream)
    shape, order, dtype = np.lib.format.read_array_header_1_0(stream)
    body = data[stream.tell() :]
    sizes = [(), (0,), (-1,), (2**62, 2), (2**40,), (len(body),), (1,) * 40, (*shape, 0), shape[::-1], (2**64,)]
    says = {
        "descr": rng.choice(["|O", "|V0", "<f8", ">f8", "|b1", "<U9", "<M8[s]", np.lib.format.dtype_to_descr(dtype)]),
        "fortran_order": rng.choice([order, not order, 1]),
        "shape": rng.choice([shape, shape, *sizes]),
    }
    text = repr(says).encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return np.lib.format.magic(1, 0) + len(text).to_bytes(2, "little") + text + body


def _noise(data: bytes, rng: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        if made:
            made[rng.randrange(len(made))] = rng.randrange(256)
    return bytes(made)


def _parts(outline: Any) -> list[tuple[Any, Any]]:
    """Where each node of an outline stands."""
    found, stack = [], [outline]
    while stack:
        item = stack.pop()
        inside: Any = item.items() if isinstance(item, dict) else enumerate(item)
        for key, value in inside:
            if isinstance(value, dict | list):
                stack.append(value)
                if isinstance(value, dict) and "__loader__" in value:
                    found.append((item, key))
    return found


def _change_outline(outline: Any, rng: random.Random) -> Any:
    places = _parts(outline)
    if not places or rng.random() < 0.1:
        return mutate_json(outline, rng)
    where, key = rng.choice(places)
    other = rng.choice(places)
    plain = [(item, name) for item, name in places if item[name]["__loader__"] == "JsonNode"]
    match rng.randrange(9):
        case 0 | 1 | 2 | 3 if plain:
            item, name = rng.choice(plain)
            value = rng.choice([*PLAIN, *(_numbers("i", rng.choice([1, 3, 5, 37]), rng) for _ in range(40))])
            try:
                item[name]["content"] = json.dumps(value)
            except (ValueError, RecursionError):
                item[name]["content"] = "1" * 6_000
        case 4:  # one part in the place of another
            where[key] = copy.deepcopy(other[0][other[1]])
        case 5:
            where[key], other[0][other[1]] = other[0][other[1]], where[key]
        case 6 if isinstance(where, dict):  # another attribute, or none
            value = where.pop(key)
            if rng.random() < 0.6:
                names = [each for _, each in places if isinstance(each, str)]
                where[rng.choice([*names, "predict", "tree_", "_impl", "__class__", "n_jobs"])] = value
        case 7:
            value, model = where[key], other[0][other[1]]
            for name in rng.sample(["__loader__", "__module__", "__class__"], rng.choice([1, 2, 3])):
                value[name] = model[name]
        case _ if isinstance(where, list):
            where[:] = where * 2 if rng.random() < 0.5 else where[: rng.randrange(len(where))]
        case _:
            where[key] = {"__loader__": "JsonNode", "__module__": "builtins", "__class__": "str", "content": "null"}
    return outline


def _change_zip(data: bytes, rng: random.Random) -> bytes:
    match rng.randrange(3):
        case 0:
            return _noise(data, rng)
        case 1:
            return data[: rng.randrange(len(data))]
        case _:
            out = io.BytesIO(data)
            with warnings.catch_warnings(), zipfile.ZipFile(out, "a") as archive:
                warnings.simplefilter("ignore")  # two files of one name
                archive.writestr(rng.choice(archive.namelist()), rng.choice([b"", b"{}", b"\x93NUMPY\x01\x00"]))
            return out.getvalue()


# --- the process that opens archives ------------------------------------------------------------------------


def opening(cases: Sequence[tuple[str, int, int]]) -> None:
    """Run cases (name of a type, number of the first, how many), and say of each on stdout what became of it."""
    sys.path.insert(0, str(ROOT / "tests" / "learners"))
    import archived_models

    from codistill.engine.runtime import one_thread

    limit = 8 << 30  # of addresses: whatever asks for more than that is refused by the system
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with one_thread(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for name, first, count in cases:
            data, opens = archived_models.archive(name)
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                files = {each: archive.read(each) for each in archive.namelist()}
            outline = json.loads(files.pop(_OUTLINE))
            for number in range(first, first + count):
                print("begin", name, number, sep="\t", flush=True)
                began = time.process_time()
                made = changed(outline, files, random.Random(f"{name} {number}"))
                try:
                    outcome = "accepted" if opens(made) else "refused"
                except Exception:
                    outcome = f"error {traceback.format_exc()}"
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                print(json.dumps([outcome, time.process_time() - began, memory]), flush=True)


# --- its parent ---------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of the cases of one type."""

    name: str
    cases: int = 0
    refused: int = 0
    accepted: int = 0
    deaths: int = 0
    errors: int = 0
    slowest: float = 0.0
    said: list[str] = field(default_factory=list)

    def row(self) -> str:
        """One line of the table."""
        counts = f"{self.cases:7}{self.refused:9}{self.accepted:10}{self.deaths:8}{self.errors:8}"
        return f"{self.name:32}{counts}{1000 * self.slowest:9.0f} ms"


def run(plan: list[tuple[str, int, int]]) -> tuple[list[Outcome], int]:
    """Run all cases, in a new process after each death; returns the outcomes, and by how many MB memory grew."""
    outcomes = {name: Outcome(name) for name, _, _ in plan}
    grown = 0
    command = [sys.executable, "-m", "trials.archives", "--open"]
    while plan:
        begun, start, last = "", 0, 0
        with subprocess.Popen([*command, json.dumps(plan)], cwd=ROOT, stdout=subprocess.PIPE) as process:
            for line in _lines(process):
                if line.startswith("begin\t"):
                    begun = line
                    continue
                outcome, seconds, memory = json.loads(line)
                start, last = start or memory, memory
                begun = _count(outcomes, begun, outcome, seconds, plan)
            code = process.wait()
        grown = max(grown, last - start)
        if code == 0:
            break
        if not begun:
            raise RuntimeError(f"the process that opens archives ended with {code}")
        _count(outcomes, begun, f"death by {-code}" if code < 0 else f"death with {code}", 0.0, plan)
    return list(outcomes.values()), grown


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """What a process says, line by line; it is ended when it says nothing for long."""
    assert process.stdout is not None
    buffer = b""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], SECONDS)
        if not ready:
            process.kill()
            return
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if not chunk:
            return
        *whole, buffer = (buffer + chunk).split(b"\n")
        yield from (line.decode() for line in whole)


def _count(outcomes: dict[str, Outcome], begun: str, what: str, seconds: float, plan: list[Any]) -> str:
    """Note one case, and take it from the plan."""
    _, name, number = begun.split("\t")
    found = outcomes[name]
    found.cases += 1
    found.slowest = max(found.slowest, seconds)
    kind = what.split()[0]
    if kind in ("refused", "accepted"):
        setattr(found, kind, getattr(found, kind) + 1)
    else:
        found.deaths, found.errors = found.deaths + (kind == "death"), found.errors + (kind == "error")
        found.said.append(f"{name}, case {number}: {what}")
    while plan and plan[0][0] != name:
        plan.pop(0)
    _, first, count = plan[0]
    done = int(number) + 1 - first
    plan[0] = (name, first + done, count - done)
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; 1 if any case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case of each type")
    parser.add_argument("--only", default="", help="types whose name contains this")
    parser.add_argument("--open", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.open:
        opening(json.loads(options.open))
        return 0
    sys.path.insert(0, str(ROOT / "tests" / "learners"))
    import archived_models

    names = [name for name in archived_models.names() if options.only in name]
    each, began = -(-options.cases // len(names)), time.monotonic()
    print(f"{'':32}{'cases':>7}{'refused':>9}{'accepted':>10}{'deaths':>8}{'errors':>8}{'slowest':>12}", flush=True)
    total, grown = Outcome("all"), 0
    outcomes, grown = run([(name, options.seed, each) for name in names])
    for outcome in outcomes:
        print(outcome.row())
        for said in outcome.said[:_SHOWN]:
            print(said)
        for name in ("cases", "refused", "accepted", "deaths", "errors"):
            setattr(total, name, getattr(total, name) + getattr(outcome, name))
        total.slowest = max(total.slowest, outcome.slowest)
    print(f"{total.row()}\n{time.monotonic() - began:.0f} s, memory grew by {grown} MB")
    return int(total.deaths + total.errors > 0 or grown > MEGABYTES)


if __name__ == "__main__":
    raise SystemExit(main())
