"""The label guard: looks for class counts in all that leaves an agent, and tries to compute them from its scores."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from codistill.errors import MessageError
from codistill.message import Message
from codistill.results.records import Evaluated, RoundEnded
from codistill.results.scores import PREFIXES
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score

_LARGEST = 1 << 18  # numbers of an array that are looked through
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
            agent.name: agent.class_mix / agent.class_mix.sum()
            for agent in description.agents
            if agent.class_mix is not None and len(np.unique(agent.class_mix)) >= _DISTINCT
        }
        self._found: list[str] = []
        self._scores: dict[tuple[str, str], list[tuple[np.ndarray, float]]] = {}

    @property
    def leaks(self) -> list[str]:
        """What was found, one sentence each."""
        inverted = (self._inverted(agent, name) for agent, name in self._scores)
        return [*dict.fromkeys(self._found), *(found for found in inverted if found)]

    # --- what is sent -------------------------------------------------------------------------------------------

    def __call__(self, sender: str, receiver: str, data: bytes) -> None:
        """Look through one message."""
        try:
            message = Message.decode(data)
        except MessageError:
            return  # the receiver will refuse it
        for name, numbers in _numbers(message):
            self._look(sender, numbers, f"'{name}' sent to '{receiver}'")

    def round_ended(self, record: RoundEnded) -> None:
        """Look through what the agents have told of a round."""
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
        if shares is None or not len(shares) <= numbers.size <= _LARGEST or numbers.dtype.kind == "b":
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
        """Take the scores that every agent reports, with its predictions."""
        for agent in self._description.agents:
            self._take(agent.name, score(self._description, agent, None))

    def _take(self, agent: str, values: Mapping[str, float]) -> None:
        test, at_hand = self._description.test, {each.name: each for each in self._description.agents}
        if test is None or agent not in self._shares or not at_hand[agent].learner.ready:
            return
        chosen = self._description.answer(at_hand[agent], test[0]).argmax(axis=1)
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


def _numbers(message: Message) -> Iterator[tuple[str, np.ndarray]]:
    """All arrays of a message, its lists of numbers, and its single numbers together."""
    yield from message.arrays.items()
    single = [value for value in message.plain.values() if type(value) in (int, float)]
    yield "plain values", np.array(single, dtype=np.float64)
    for name, value in message.plain.items():
        if isinstance(value, list) and value and all(type(item) in (int, float) for item in value):
            yield name, np.asarray(value, dtype=np.float64)
