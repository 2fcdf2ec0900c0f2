"""The largest message of a run, from its classes, public samples and test set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.naive_bayes import GaussianNB
from torch import nn

import codistill as cd
from codistill.network.options import UNKNOWN, derived_limit, largest_message

MEGABYTE = 1 << 20


@pytest.mark.parametrize(
    ("protocol", "arrays"),
    [
        (cd.FedMD(batch_size=32), 4 * (32 + 1) * 5),
        (cd.FedMD(batch_size=1000), 4 * (40 + 1) * 5),  # there are 40 public samples
        (cd.FedAL(batch_size=32), 4 * (2 * 32 + 1) * 5),
        (cd.FD(), 4 * 5 * 5 + 5),
        (cd.DDistillation(network_batch=8), 4 * 8 * 5),
        (cd.Alone(), 0),
        (cd.FedAvg(), None),
        (cd.AvgKD(), None),
        (cd.FedProto(), None),
    ],
)
def test_bytes_of_the_arrays(protocol: cd.Protocol, arrays: int | None) -> None:
    assert protocol.message_bytes(5, 40) == arrays


def test_a_limit_has_room_for_headers_and_for_outputs_on_the_test_set() -> None:
    x, y = np.zeros((10, 2), np.float32), np.arange(10) % 5
    agents = [cd.Agent(name, GaussianNB(), x, y) for name in "ab"]
    run = cd.Federation(agents, cd.FedMD(), public=x, test=(x, y)).description
    assert largest_message(run) == max(4 * 11 * 5, 8 * 25 + 10)
    assert derived_limit(run) == MEGABYTE
    many = np.zeros(4 * MEGABYTE, np.int64)
    assert derived_limit(replace(run, test=(many, many))) > 4 * MEGABYTE
    # Outputs of 10,000 public samples in a batch, of 1,000 classes: 40 MB, and a quarter more.
    large = replace(run, protocol=cd.FedMD(batch_size=10_000), classes=1000, public=_Many())
    assert 1.25 * 40e6 < derived_limit(large) < 1.26 * 40.1e6


class _Many:
    def __len__(self) -> int:
        return 20_000


def test_where_messages_are_as_large_as_models_the_limit_is_a_constant() -> None:
    x = np.eye(2)
    agents = [cd.Agent(name, nn.Linear(2, 2), x, [0, 1]) for name in "ab"]
    assert derived_limit(cd.Federation(agents, cd.FedAvg()).description) == UNKNOWN == 64 * MEGABYTE
