"""A torch Dataset or DataLoader as an agent's data."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

import codistill as cd
from codistill.core.errors import DataError
from codistill.nodes.record import record_of

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Noisy(Dataset):
    """Every item with new noise whenever it is read."""

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i] + 0.1 * torch.randn(3), int(Y[i])


def batches(data):
    agent = cd.Agent("a", nn.Linear(3, 2), data)
    record_of(agent).encode_labels(2)
    return agent, lambda t: [batch.x for batch in agent.shard.batches(t, 8, epochs=2)]


@pytest.mark.parametrize("data", [TensorDataset(X, Y), DataLoader(TensorDataset(X, Y), 5, shuffle=True)])
def test_a_dataset_is_its_samples_and_labels(data):
    agent, _ = batches(data)
    assert np.array_equal(agent.shard.x, X.numpy())
    assert np.array_equal(agent.shard.labels, Y.numpy())


def test_random_items_are_read_anew_for_every_batch_and_are_the_same_for_the_same_round():
    _, read = batches(Noisy())
    torch.manual_seed(7)
    first, again, other = read(0), read(0), read(1)
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1))  # dropout goes on as if nothing had been read
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    values = torch.cat(first).flatten()
    assert len(values.unique()) == len(values)  # two epochs, no value twice


def run(runtime):
    agents = [cd.Agent(name, nn.Linear(3, 2, device="cpu"), Noisy()) for name in "ab"]
    for agent in agents:
        nn.init.zeros_(agent.learner.module.weight)
    result = cd.Federation(agents, cd.FedAvg(), test=(X.numpy(), Y.numpy()), classes=2).run(
        2, runtime=runtime, alone=False, progress=False
    )
    return result.agents["a"].learner.weights()["weight"]


def test_the_same_bits_again():
    torch.manual_seed(0)
    first = run("simulation")
    torch.manual_seed(0)
    assert np.array_equal(first, run("simulation"))


class Odd(Noisy):
    """Items that are what they are told to be."""

    def __init__(self, make):
        self.make = make

    def __getitem__(self, i):
        return self.make(i)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Odd(lambda i: X[i]), "a pair of a sample and a label.*Tensor.*Return"),
        (Odd(lambda i: (X[i], 0, 1)), "a pair.*tuple of 3"),
        (Odd(lambda i: (torch.zeros(1 + i % 2), 0)), "the same shape.*Resize or crop"),
        (DataLoader(TensorDataset(X, Y), sampler=SubsetRandomSampler([1, 2])), "SubsetRandomSampler.*Subset"),
        (TensorDataset(X[:0], Y[:0]), "must not be empty"),
    ],
)
def test_a_mistake_is_a_sentence(data, words):
    with pytest.raises(DataError, match=words):
        cd.Agent("a", nn.Linear(3, 2), data)


def test_a_dataset_beside_labels_and_samples_without_labels():
    with pytest.raises(DataError, match=r"a torch TensorDataset.*a dataset of pairs.*alone"):
        record_of(cd.Agent("a", nn.Linear(3, 2), TensorDataset(X, Y), Y)).encode_labels(2)
    with pytest.raises(DataError, match=r"agent 'a' must have one label y each.*None"):
        record_of(cd.Agent("a", nn.Linear(3, 2), X.numpy())).encode_labels(2)
