"""Guards of what must stay at home: one fails a run in which a message holds it, one looks for class counts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.spatial import cKDTree

from codistill.core.errors import MessageError, RuntimeFault
from codistill.data.validation import as_floats
from codistill.engine.description import RunDescription
from codistill.engine.evaluation import score
from codistill.learners.ability import Ability
from codistill.nodes.agent import Agent, Hub
from codistill.nodes.record import record_of
from codistill.results.records import Evaluated, RoundEnded
from codistill.results.scores import PREFIXES
from codistill.topology import HUB
from codistill.wire.message import Message

_RUN, _RUN_OF_TWO = 16, 32  # labels in a row that are no coincidence, of several classes and of two
_FEWEST = 8  # numbers in a row that are a part of a model, and no coincidence

# How a changed copy of a row is told from a coincidence.
_LONGEST = 1 << 20  # numbers of an array that are looked through for changed copies
_PLACES = 64  # values of a row by which candidates are found; all of them are compared then
_DIRECTIONS = 8  # that these are projected to
_NEAREST = 3  # rows that a window is compared with
_CHUNK = 1 << 15  # windows at a time
_SURE = 14.0  # a coincidence must be less likely than e^-14, one in a million
_FINE, _COARSE = 2e-6, 1e-2  # errors of single precision, and of 8 bits, as shares of a row's range
_LARGEST = 1e30  # numbers above are not part of a sample: bytes that are no numbers often look like these
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class PrivacyGuard:
    """Watches every message of every agent for the agent's own samples and labels.

    A row counts as found when its numbers stand in sequence in an array of the message, row by row or column by
    column, at any offset, or in a list or text of numbers:

    - as they are, in single precision;
    - in half precision, as bfloat16, or cut or rounded to integers;
    - scaled and shifted as a whole, a row = c row + b with any c and b, up to rounding to 8 bits;
    - as the bytes of any of these (arrays of integers and texts are read as floats at every offset).

    A changed copy counts only if a coincidence is less likely than one in a million: the fewer different values a row
    has, the more exactly they must agree. Rows of up to three different values are found as they are only.
    Of an array, the first million numbers are looked through for changed copies. Labels count in the order of the
    shard, as numbers or one-hot, from 31 in a row on (63, if of two classes).
    In an array with the name and shape of one of the sender's weights, scaled and shifted rows do not count: a gradient
    of a first layer is made of them, and where a single sample activates a unit, the unit's row is that sample, scaled.
    It cannot see any other transformation (columns scaled differently, permuted, encrypted, compressed, base64), parts
    of a row, a row spread over several arrays or messages, and what is computed from samples: a mean of one sample
    in another space, gradients, or what a model has memorised. It is a test of a protocol, not a defence.

    With `models`, the weights that an agent has at that moment must stay at home as well, and so must what the hub
    keeps for itself: for protocols in which neither models nor weights travel. Weights are seen where the agents live:
    in a simulation.
    It looks at what is meant, before compression: a sample that arrives a little changed has not stayed at home.
    """

    before_compression = True

    def __init__(self, agents: Sequence[Agent], hub: Hub | None = None, *, models: bool = False) -> None:
        self._agents = {agent.name: agent for agent in agents}
        self._hub, self._models = hub, models
        self._private = {agent.name: _private(agent) for agent in agents}
        self._changed = {agent.name: [_ChangedCopies(rows) for rows in _samples(agent)] for agent in agents}

    def __call__(self, sender: str, receiver: str, data: bytes) -> None:
        try:
            message = Message.decode(data)
        except MessageError:
            return  # the receiver will refuse it
        secrets = [*self._private.get(sender, ()), *(self._secrets(sender) if self._models else ())]
        for name, array in _numbers(message):
            for what, rows in secrets:
                found = _first_row_inside(rows, array)
                if found is not None:
                    raise _leak(f"{what} {found} of {_owner(sender)} is in the array '{name}' sent to '{receiver}'")
        shapes = self._weight_shapes(sender)
        for copies in self._changed.get(sender, ()):
            for name, sequence in _sequences(message):
                gradient = name in message.arrays and shapes.get(name) == message.arrays[name].shape
                found = copies.first_in(sequence, scaled=not gradient)
                if found is not None:
                    raise _leak(f"sample {found} of {_owner(sender)}, changed, is in '{name}' sent to '{receiver}'")

    def _weight_shapes(self, sender: str) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the weights of the sender, which its gradients have as well."""
        learner = self._agents[sender].learner if sender in self._agents else None
        if learner is None or Ability.GRADIENTS not in learner.abilities:
            return {}
        return {name: array.shape for name, array in learner.weights().items()}

    def _secrets(self, sender: str) -> Iterator[tuple[str, np.ndarray]]:
        """What the sender has learnt, as it is now."""
        if sender == HUB:
            arrays: Iterable[np.ndarray] = _leaves(self._hub.state) if self._hub else ()
        else:
            learner = self._agents[sender].learner
            arrays = learner.weights().values() if Ability.GRADIENTS in learner.abilities else ()
        for array in arrays:
            if array.size >= _FEWEST and len(np.unique(array)) > 2:
                yield "learnt array", array.reshape(1, -1).astype(np.float32)


def _leak(found: str) -> RuntimeFault:
    return RuntimeFault(
        "Data stays home: no message may hold a private sample, label or weight.",
        found,
        "Change the protocol, or the model that carries its training data inside.",
    )


def _owner(sender: str) -> str:
    return "the hub" if sender == HUB else f"agent '{sender}'"


# --- what must stay at home -------------------------------------------------------------------------------------------


def _samples(agent: Agent) -> list[np.ndarray]:
    """The samples of an agent as its model takes them and, where that differs, before they were prepared."""
    prepared = agent.shard.x.reshape(len(agent.shard), -1).astype(np.float64)
    given = as_floats(np.asarray(record_of(agent).data[0]))  # with what is held out
    raw = given.reshape(len(given), -1).astype(np.float64)
    same = prepared.shape == raw.shape and np.array_equal(prepared, raw.astype(np.float32), equal_nan=True)
    return [prepared] if same else [prepared, raw]


def _private(agent: Agent) -> list[tuple[str, np.ndarray]]:
    """Samples, and labels as runs of sixteen, in numbers and one-hot."""
    shard = agent.shard
    private = [("sample", rows.astype(np.float32)) for rows in _samples(agent)]
    if shard.labels is not None:
        several = len(np.unique(shard.labels)) > 2
        length = _RUN if several else _RUN_OF_TWO
        # Of any 2 length - 1 labels in a row, one of these runs is whole.
        runs = [slice(start, start + length) for start in range(0, len(shard) - length + 1, length)]
        runs = [run for run in runs if len(np.unique(shard.labels[run])) > (2 if several else 1)]
        if runs:
            private.append(("run of labels", np.stack([shard.labels[run] for run in runs]).astype(np.float32)))
            private.append(("run of labels", np.stack([shard.targets[run].ravel() for run in runs])))
    return private


def _leaves(tree: Any) -> Iterator[np.ndarray]:
    """All arrays in nested tables and lists."""
    if isinstance(tree, torch.Tensor):
        yield tree.detach().cpu().numpy()
    elif isinstance(tree, np.ndarray):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(item)


# --- what a message holds ---------------------------------------------------------------------------------------------


def _numbers(message: Message) -> Iterator[tuple[str, np.ndarray]]:
    """All arrays of a message, and its lists of numbers."""
    yield from message.arrays.items()
    for name, value in message.plain.items():
        if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
            yield name, np.asarray(value)


def _sequences(message: Message) -> Iterator[tuple[str, np.ndarray]]:
    """All sequences of numbers in a message: arrays in both orders, plain values, texts, and what bytes may mean."""
    for name, array in message.arrays.items():
        yield name, _flat(array)
        if array.ndim > 1:
            yield name, _flat(array.T)
        if array.dtype.kind in "iub":
            raw = np.ascontiguousarray(array).tobytes()
            yield from ((name, numbers) for numbers in _in_bytes(raw))
            if array.dtype.itemsize == 1 and raw.isascii():
                yield name, _in_text(raw.decode("ascii"))
    lists = [value if isinstance(value, list) else [value] for value in message.plain.values()]
    plain = [each for values in lists for each in values]
    numbers = [float(each) for each in plain if isinstance(each, int | float) and abs(each) < _LARGEST]
    yield "plain values", np.array(numbers, dtype=np.float64)
    for text in (each for each in plain if isinstance(each, str)):
        yield "text", _in_text(text)
        yield from (("text", numbers) for numbers in _in_bytes(text.encode("latin-1", "replace")))


def _flat(array: np.ndarray) -> np.ndarray:
    return array.ravel()[:_LONGEST].astype(np.float64)


def _in_text(text: str) -> np.ndarray:
    """The numbers that are written in a text, in their order."""
    return np.array([float(each) for each in _NUMBER.findall(text[: 16 * _LONGEST])], dtype=np.float64)


def _in_bytes(raw: bytes) -> Iterator[np.ndarray]:
    """Bytes as floats of 16, 32 and 64 bits, from every offset."""
    raw = raw[: 8 * _LONGEST]
    for kind, size in (("<f2", 2), ("bf16", 2), ("<f4", 4), (">f4", 4), ("<f8", 8), (">f8", 8)):
        for offset in range(size):
            part = raw[offset : offset + (len(raw) - offset) // size * size]
            if kind == "bf16":  # the upper half of 32 bits
                numbers = (np.frombuffer(part, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                numbers = np.frombuffer(part, dtype=kind)
            with np.errstate(all="ignore"):
                yield numbers[:_LONGEST].astype(np.float64)


# --- rows as they are -------------------------------------------------------------------------------------------------


def _first_row_inside(rows: np.ndarray, array: np.ndarray) -> int | None:
    flat = array.ravel().astype(np.float32, copy=False)
    width = rows.shape[1]
    if len(flat) < width:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(flat, width)
    # Compare the least common entry of each row first: images are mostly background.
    for index, row in enumerate(rows):
        if not row.any():
            continue  # an empty image is in every array of zeros
        anchor = int(np.argmax(np.abs(row)))
        starts = np.flatnonzero(flat[anchor : anchor + len(windows)] == row[anchor])
        if any(np.array_equal(windows[start], row) for start in starts):
            return index
    return None


# --- changed copies of rows -------------------------------------------------------------------------------------------


class _ChangedCopies:
    """Rows (n, d), to be found as c row + b in rounded numbers, or in formats of fewer digits."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = np.where(_is_usual(rows), rows, 0.0)
        low, high = self._rows.min(axis=1), self._rows.max(axis=1)
        self._range = np.where(high > low, high - low, 1.0)

    def first_in(self, sequence: np.ndarray, *, scaled: bool) -> int | None:
        """The first row whose changed copy is part of a sequence of numbers; `scaled`: also c row + b."""
        count, width = self._rows.shape
        if width < 3 or len(sequence) < width or not count:
            return None
        # Windows without a number that is none: bytes that are no floats often look like those.
        strange = np.concatenate([[0], np.cumsum(~_is_usual(sequence))])
        starts = np.flatnonzero(strange[width:] == strange[:-width])
        sequence = np.where(_is_usual(sequence), sequence, 0.0)
        doubt = math.log(count) + math.log(len(sequence)) + _SURE  # in nats
        for search in (self._affine, self._formats) if scaled else (self._formats,):
            for index, window in search.near(sequence, starts):
                if search.agrees(index, window, doubt):
                    return int(index % count)
        return None

    @cached_property
    def _affine(self) -> _Search:
        """Rows and their negatives, whose scale and shift do not matter."""
        count = len(self._rows)
        levels = np.array([len(np.unique(np.round(row / _COARSE))) for row in self._rows / self._range[:, None]])
        steps = np.diff(self._rows, axis=1)
        # A ramp is like any other ramp; what turns often is like nothing else.
        turns = (np.sign(steps[:, 1:]) != np.sign(steps[:, :-1])).sum(axis=1)
        levels = np.where(np.ptp(steps, axis=1) <= _FINE * self._range, 0, levels)
        most = np.minimum(self._apart, _COARSE)  # of the error

        def agrees(index: int, window: np.ndarray, doubt: float) -> bool:
            index %= count
            error, angle = _errors(self._rows[index], window)
            if error > most[index] or self._evidence(angle) < doubt:
                return False
            fine = error <= _FINE and (levels[index] - 2) * math.log(1 / (4 * _FINE)) >= doubt
            free = min(int(levels[index]), int(turns[index]) + 2) - 2
            return fine or (free > 0 and error <= math.exp(-doubt / free) / 4)

        return _Search(np.concatenate([self._rows, -self._rows]), agrees, _COARSE)

    @cached_property
    def _apart(self) -> np.ndarray:
        """A share of the distance of each row to another row, or to their mean: a copy must be nearer than these."""
        others = np.concatenate([self._rows, self._rows.mean(axis=0, keepdims=True)])
        nearest = _Search(others, lambda *_: False, math.inf)
        apart = np.full(len(self._rows), math.inf)
        for index, row in enumerate(self._rows):
            errors = [_errors(row, others[each])[0] for each in nearest.nearest(row)]
            apart[index] = min((each for each in errors if each > _FINE / 10), default=_COARSE)
        return apart / 4

    @cached_property
    def _spread(self) -> np.ndarray:
        """Standard deviations of rows without scale and shift, by principal component.

        Of few rows, some are not known: they are taken for half the smallest one.
        """
        centred = self._rows - self._rows.mean(axis=1, keepdims=True)
        norms = np.linalg.norm(centred, axis=1, keepdims=True)
        unit = centred / np.where(norms > 0, norms, 1.0)
        count, width = unit.shape
        known = min(count - 1, width - 2)
        spread = np.linalg.svd(unit - unit.mean(axis=0), compute_uv=False)[:known] / math.sqrt(max(1, count - 1))
        smallest = float(spread[-1]) if known else 1 / math.sqrt(width)
        return np.concatenate([spread, np.full(width - 2 - known, smallest / 2)])

    def _evidence(self, angle: float) -> float:
        """Nats against another sample of the same distribution that is at this angle, or nearer, by chance.

        Of a normal component with deviation s, a share of at most r / (1.25 s) is within r of any point.
        """
        with np.errstate(divide="ignore"):
            nats = np.log(1.25 * self._spread / max(angle, 1e-12))
        return float(np.maximum(nats, 0.0).sum())

    @cached_property
    def _formats(self) -> _Search:
        """Rows in formats of fewer digits, with the information that a value has at least."""
        count, single = len(self._rows), self._rows.astype(np.float32)
        bits = single.view(np.uint32)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)  # rounded to even, as torch does
        with np.errstate(over="ignore"):
            floats = {
                "half": (single.astype(np.float16).astype(np.float64), 11),
                "bfloat16": ((nearest >> 16 << 16).view(np.float32).astype(np.float64), 8),
                "bfloat16, cut": ((bits >> 16 << 16).view(np.float32).astype(np.float64), 8),
            }
        integers = np.concatenate([np.rint(self._rows), np.trunc(self._rows)])
        rows = np.concatenate([*(each for each, _ in floats.values()), integers])
        rows = np.nan_to_num(rows, posinf=0.0, neginf=0.0)
        values = [np.unique(row) for row in rows]
        levels = np.array([len(each) for each in values])
        digits = np.repeat([each for _, each in floats.values()], count) * math.log(2)
        known = np.concatenate(
            [levels[: 3 * count] * digits, [np.log1p(np.abs(each)).sum() for each in values[3 * count :]]]
        )

        def agrees(index: int, window: np.ndarray, doubt: float) -> bool:
            return bool(levels[index] > 3 and known[index] >= doubt and np.array_equal(window, rows[index]))

        return _Search(rows, agrees, None)


def _is_usual(numbers: np.ndarray) -> np.ndarray:
    """Where numbers are finite, and neither huge nor tiny: what bytes mean that are no floats is often so."""
    size = np.abs(numbers)
    usual: np.ndarray = np.isfinite(numbers) & (size < _LARGEST) & ((size > 1 / _LARGEST) | (size == 0))
    return usual


def _errors(row: np.ndarray, window: np.ndarray) -> tuple[float, float]:
    """Of c row + b as the window, with the best c and b: the largest error as a share of its range, and the angle."""
    row, copy = row - row.mean(), window - window.mean()
    reach, norm = float(np.ptp(copy)), float(row @ row)
    if not reach or not norm:
        return math.inf, math.inf
    rest = copy - (copy @ row) / norm * row
    return float(np.abs(rest).max()) / reach, math.sqrt(float(rest @ rest) / float(copy @ copy))


class _Search:
    """Rows by some of their places, to find windows of a sequence that may be copies; those are compared in all places.

    `error`: the largest error of a copy, as a share of its range, where scale and shift do not matter; None: they do,
    and a copy is exact.
    """

    def __init__(self, rows: np.ndarray, agrees: Callable[[int, np.ndarray, float], bool], error: float | None) -> None:
        self.agrees, self._width, self._affine = agrees, rows.shape[1], error is not None
        self._places = np.sort(np.argsort(-rows.std(axis=0), kind="stable")[:_PLACES])
        directions = np.random.default_rng(0).normal(size=(len(self._places), _DIRECTIONS))
        self._directions, _ = np.linalg.qr(directions)
        short = self._shortened(rows[:, self._places])
        self._tree, self._count = cKDTree(short), len(rows)
        self._near = 1e-6 * max(1.0, float(np.abs(rows).max()))
        if error is not None:
            spread = np.linalg.norm(rows[:, self._places] - rows[:, self._places].mean(axis=1, keepdims=True), axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):
                reach = 2 * error * np.ptp(rows, axis=1) * math.sqrt(len(self._places)) / spread
            self._near = min(0.5, float(np.nan_to_num(reach, nan=0.0, posinf=0.0).max()))

    def _shortened(self, values: np.ndarray) -> np.ndarray:
        """Values in a few directions; without their scale and shift, if these do not matter."""
        if self._affine:
            values = values - values.mean(axis=1, keepdims=True)
            norms = np.linalg.norm(values, axis=1, keepdims=True)
            values = values / np.where(norms > 0, norms, 1.0)
        projected: np.ndarray = values @ self._directions
        return projected

    def nearest(self, row: np.ndarray) -> list[int]:
        """The rows that are most like one of them, itself among them."""
        _, near = self._tree.query(self._shortened(row[None, self._places]), k=[*range(1, min(6, self._count) + 1)])
        return [int(each) for each in near[0]]

    def near(self, sequence: np.ndarray, starts: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Pairs of a row, by its number, and a window that may be a copy of it."""
        windows = np.lib.stride_tricks.sliding_window_view(sequence, self._width)
        ranks = [*range(1, min(_NEAREST, self._count) + 1)]
        for begin in range(0, len(starts), _CHUNK):
            part = starts[begin : begin + _CHUNK]
            short = self._shortened(sequence[part[:, None] + self._places])
            kept = np.flatnonzero(short.any(axis=1))  # a constant is no copy
            _, near = self._tree.query(short[kept], k=ranks, distance_upper_bound=self._near)
            for place, rank in zip(*np.nonzero(near < self._count), strict=True):
                yield int(near[place, rank]), windows[part[kept[place]]]


# --- class counts, which others need not be told ----------------------------------------------------------------------

_MOST_NUMBERS = 1 << 18  # of an array that is looked through for class counts
_DISTINCT = 3  # different shares from which on equal ones are no coincidence
_CLOSE = 1e-5  # relative: shares may be sent in single precision


class LabelGuard:
    """Watches the messages, measures, remarks and scores of agents for how many samples of each class they hold.

    Counts or shares are found as they are, in sequence, in any array, list or text. A score s_r that is weighted by
    the shares w of an agent's classes obeys s_r = Σ_c w_c a_rc, where a_rc is the accuracy on the test samples of class
    c, which anyone can compute who knows the predictions: after enough evaluations w comes out by least squares.
    `description` says what is reported: for an agent that joins another operator's hub, without `tells_class_mix`.
    It is a watcher of messages and an observer of a run, in a simulation, where the agents are at hand.
    """

    before_compression = True

    def __init__(self, description: RunDescription) -> None:
        self._description = description
        self._shares = {
            agent.name: mix / mix.sum()
            for agent in description.agents
            if (mix := record_of(agent).class_mix) is not None and len(np.unique(mix)) >= _DISTINCT
        }
        self._found: list[str] = []
        self._scores: dict[tuple[str, str], list[tuple[np.ndarray, float]]] = {}

    @property
    def leaks(self) -> list[str]:
        inverted = (self._inverted(agent, name) for agent, name in self._scores)
        return [*dict.fromkeys(self._found), *(found for found in inverted if found)]

    # --- what is sent -------------------------------------------------------------------------------------------

    def __call__(self, sender: str, receiver: str, data: bytes) -> None:
        try:
            message = Message.decode(data)
        except MessageError:
            return  # the receiver will refuse it
        single = [value for value in message.plain.values() if type(value) in (int, float)]
        for name, numbers in (*_numbers(message), ("plain values", np.array(single, dtype=np.float64))):
            self._look(sender, numbers, f"'{name}' sent to '{receiver}'")

    def round_ended(self, record: RoundEnded) -> None:
        for text in record.events:
            numbers = np.array([float(number) for number in re.findall(r"\d+\.?\d*", text)[:1000]])
            for agent in self._shares:
                self._look(agent, numbers, "a remark")
        scores = {f"{prefix}{score.name}" for score in self._description.scores for prefix in PREFIXES}
        known = {"round", "sent", "received", "test_samples", *scores}
        for row in record.rows:
            measures = {name: value for name, value in row.items() if isinstance(value, float) and name not in known}
            self._take(row["agent"], measures)

    def _look(self, agent: str, numbers: np.ndarray, where: str) -> None:
        shares = self._shares.get(agent)
        if shares is None or not len(shares) <= numbers.size <= _MOST_NUMBERS or numbers.dtype.kind == "b":
            return
        for flat in (numbers.ravel(), numbers.T.ravel()):
            windows = np.lib.stride_tricks.sliding_window_view(flat.astype(np.float64), len(shares))
            sums = windows.sum(axis=1)
            with np.errstate(all="ignore"):
                alike = np.isclose(windows / sums[:, None], shares, rtol=_CLOSE, atol=1e-7).all(axis=1)
            if alike.any():
                self._found.append(f"the class shares of '{agent}' are in {where}")
                return

    # --- what is reported -----------------------------------------------------------------------------------------

    def evaluated(self, record: Evaluated) -> None:
        for agent in self._description.agents:
            self._take(agent.name, score(self._description, agent, None))

    def _take(self, agent: str, values: Mapping[str, float]) -> None:
        test, at_hand = self._description.test, {each.name: each for each in self._description.agents}
        if test is None or agent not in self._shares or not at_hand[agent].learner.ready:
            return
        x = record_of(at_hand[agent]).view_of("the test set")(test[0])
        chosen = self._description.answer(at_hand[agent], x).argmax(axis=1)
        for name, value in values.items():
            self.reported(agent, name, chosen, value)

    def reported(self, agent: str, name: str, chosen: np.ndarray, value: float) -> None:
        """A figure that was reported when these were the predicted classes of the test samples."""
        y = self._labels
        right = np.bincount(y, weights=chosen == y, minlength=self._description.classes)
        self._scores.setdefault((agent, name), []).append((right, value))

    @property
    def _labels(self) -> np.ndarray:
        assert self._description.test is not None
        return self._description.test[1]

    def _inverted(self, agent: str, name: str) -> str | None:
        """How the shares come out of all values of a figure; None if they do not."""
        tested = np.bincount(self._labels, minlength=self._description.classes)
        there = tested > 0
        rows, values = zip(*self._scores[agent, name], strict=True)
        accuracy = np.stack(rows)[:, there] / tested[there]  # a_rc
        shares = self._shares[agent][there] / self._shares[agent][there].sum()
        plain = tested[there] / tested.sum()
        # s = A w, and the shares sum to 1
        system, right = np.vstack([accuracy, np.ones(len(shares))]), np.array([*values, 1.0])
        solved, _, rank, _ = np.linalg.lstsq(system, right, rcond=None)
        if rank == len(shares) and np.allclose(solved, shares, atol=1e-6) and not np.allclose(shares, plain, atol=1e-6):
            shown = ", ".join(f"{share:.6f}" for share in solved)
            return f"by least squares the class shares of '{agent}' come out of its '{name}': {shown}"
        weighted = np.allclose(accuracy @ shares, values, atol=1e-9)
        if weighted and not np.allclose(accuracy @ plain, values, atol=1e-9):
            return f"each '{name}' of '{agent}' is an equation in its class shares: {len(values)} of {len(shares) - 1}"
        return None
