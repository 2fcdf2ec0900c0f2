"""Bare PyTorch on a graph without a server: the same steps as d_distillation and d_sgd, in two processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bench.bare import channels_last, step
from codistill.core.rng import derive
from codistill.learners import zoo

CLASSES, BATCH = 10, 32
WEIGHT, Z_STEP = 2.0, 0.25  # lambda and gamma, as d_distillation has them unless told otherwise


@dataclass(frozen=True)
class Peers:
    """What every process knows: the agents' data, first weights and mixing weights, and memory that all see.

    What is exchanged has two places for each agent, used in turn: who is an iteration ahead writes into the other,
    so that the processes need to wait for one another only once in an iteration. The order of the samples derives
    from the seed as it does in the federation; that makes both sides compute the same, and is drawn once per round.
    """

    names: Sequence[str]
    mixing: Sequence[dict[int, float]]  # by agent: neighbours in the order of the roster, with their weights
    first: Sequence[dict[str, np.ndarray]]
    x: Sequence[np.ndarray]
    y: Sequence[np.ndarray]
    public: np.ndarray
    steps: int
    exchanged: Any
    result: Any
    both: Any

    def model(self, n: int) -> nn.Module:
        model = zoo.build("lenet5", self.public.shape[1:], CLASSES)
        model.load_state_dict({name: torch.from_numpy(value) for name, value in self.first[n].items()})
        return channels_last(model)  # type: ignore[no-any-return]

    def data(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return channels_last(torch.from_numpy(self.x[n])), torch.eye(CLASSES)[torch.from_numpy(self.y[n])]

    def prepared(self, mine: range) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
        """Models, optimisers and data of some agents."""
        models = {n: self.model(n) for n in mine}
        adams = {n: torch.optim.Adam(models[n].parameters(), lr=1e-3, fused=True) for n in mine}
        return models, adams, {n: self.data(n) for n in mine}

    def rows(self, length: int, owner: str, t: int) -> Iterator[torch.Tensor]:
        """Samples of one iteration after the other; the length is a multiple of the batch."""
        for number in range(self.steps * BATCH // length + 1):
            source = torch.Generator().manual_seed(derive(0, owner, "batches", t, number) >> 1)
            yield from torch.randperm(length, generator=source).split(BATCH)

    def mix(self, n: int, values: np.ndarray, mixed: np.ndarray, part: np.ndarray) -> np.ndarray:
        """By the weights of one agent, into memory that is used again and again: fresh memory costs page faults."""
        np.multiply(values[n], 1.0 - sum(self.mixing[n].values()), out=mixed)
        for m, weight in self.mixing[n].items():
            mixed += np.multiply(values[m], weight, out=part)
        return mixed


@dataclass(frozen=True)
class Distilling:
    """d_distillation for some of the agents; the result is every agent's z."""

    peers: Peers
    mine: range

    def prepare(self) -> Callable[[int], None]:
        peers, mine = self.peers, self.mine
        models, adams, data = peers.prepared(mine)
        public = channels_last(torch.from_numpy(peers.public))
        z = seen(peers.result, (len(peers.names), len(public), CLASSES))
        places = seen(peers.exchanged, (2, len(peers.names), BATCH, CLASSES))
        z[list(mine)] = 1 / CLASSES
        met = np.zeros(len(public), dtype=bool)
        room = np.empty((2, BATCH, CLASSES), dtype=np.float32)
        done = 0

        def rounds(count: int) -> None:
            nonlocal done
            for t in range(done, done + count):
                private = {n: peers.rows(len(data[n][0]), peers.names[n], t) for n in mine}
                common = peers.rows(len(public), "public", t)
                for i in range(peers.steps):
                    iterate(places[i % 2], next(common), {n: next(private[n]) for n in mine})
            done += count

        def iterate(place: np.ndarray, chosen: torch.Tensor, private: dict[int, torch.Tensor]) -> None:
            ids, u = chosen.numpy(), public[chosen]
            new = ~met[ids]
            met[ids] = True
            held = {}
            for n, rows in private.items():
                loss = cross_entropy(models[n](data[n][0][rows]), data[n][1][rows])
                s = torch.softmax(models[n](u), dim=1)
                z[n, ids[new]] = s.detach().numpy()[new]
                place[n] = z[n, ids]
                held[n] = loss, s
            peers.both.wait()
            for n, (loss, s) in held.items():
                mixed = peers.mix(n, place, *room)
                moved = np.maximum(mixed - np.float32(Z_STEP) * (mixed - s.detach().numpy()), 0)
                z[n, ids] = moved / moved.sum(axis=1, keepdims=True)
                step(adams[n], loss + WEIGHT * (s - torch.from_numpy(mixed)).square().sum(dim=1).mean())

        return rounds


@dataclass(frozen=True)
class Mixing:
    """d_sgd for some of the agents; the result is every agent's weights, put there when told to do no round."""

    peers: Peers
    mine: range

    def prepare(self) -> Callable[[int], None]:
        peers, mine = self.peers, self.mine
        models, adams, data = peers.prepared(mine)
        parts = {n: [tensor.detach().numpy() for tensor in models[n].state_dict().values()] for n in mine}
        ends = np.cumsum([part.size for part in parts[mine[0]]])
        result = seen(peers.result, (len(peers.names), ends[-1]))
        places = seen(peers.exchanged, (2, len(peers.names), ends[-1]))
        room = np.empty((2, ends[-1]), dtype=np.float32)
        done = 0

        def put(n: int, into: np.ndarray) -> None:
            for part, piece in zip(parts[n], np.split(into, ends[:-1]), strict=True):
                piece.reshape(part.shape)[...] = part

        def take(n: int, found: np.ndarray) -> None:
            for part, piece in zip(parts[n], np.split(found, ends[:-1]), strict=True):
                part[...] = piece.reshape(part.shape)

        def rounds(count: int) -> None:
            nonlocal done
            for t in range(done, done + count):
                private = {n: peers.rows(len(data[n][0]), peers.names[n], t) for n in mine}
                for i in range(peers.steps):
                    place = places[i % 2]
                    for n in mine:
                        rows = next(private[n])
                        step(adams[n], cross_entropy(models[n](data[n][0][rows]), data[n][1][rows]))
                        put(n, place[n])
                    peers.both.wait()
                    for n in mine:
                        take(n, peers.mix(n, place, *room))
            done += count
            if not count:
                for n in mine:
                    put(n, result[n])

        return rounds


def shared(exchanged: int, result: int) -> tuple[Any, Any, Any]:
    """Two places for so many numbers to exchange, one for so many as a result, and a barrier for two processes."""
    context = multiprocessing.get_context("spawn")
    return context.RawArray("f", 2 * exchanged), context.RawArray("f", result), context.Barrier(2)


def seen(array: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(array, dtype=np.float32).reshape(shape)
