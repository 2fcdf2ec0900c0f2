"""Runs without rounds between real processes: what agents release is audited, and their policies hold."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.naive_bayes import GaussianNB

import codistill as cd
from codistill.core.errors import NetworkError, PolicyError
from codistill.network.options import Network
from codistill.network.policy import AUDIT, ChainReader

WAIT = 60
Digits = tuple[np.ndarray, np.ndarray]
pytestmark = pytest.mark.usefixtures("time_limit")


def test_messages_are_audited_by_own_rounds_and_a_policy_bounds_them(digits: Digits, tmp_path: Path) -> None:
    x, y = digits[0].reshape(-1, 64), digits[1]
    public, test = x[80:110], (x[120:160], y[120:160])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    network = Network(patience=30, lease=2, linger=1)
    common: dict[str, Any] = {"insecure": True, "network": network, "background": True, "log": False}
    hub = cd.serve(
        cd.FedMD(), ["north", "south"], classes=10, rounds=10, listen=address, public=public, test=test,
        clock=cd.Clock(asynchronous=True, period=0.3), progress=False, folder=tmp_path / "hub", **common,
    )  # fmt: skip
    assert not isinstance(hub, cd.Result)
    nodes: dict[str, Any] = {}
    for name, part, rules in (("north", slice(40), {"rounds": 3}), ("south", slice(40, 80), {})):
        agent = cd.Agent(name, GaussianNB(), x[part], y[part])
        nodes[name] = cd.join(
            agent, address, public=public, test=test, policy=rules, folder=tmp_path / name, safeguard=False, **common
        )
    with pytest.raises((PolicyError, NetworkError), match="rounds = 3"):
        nodes["north"].wait(WAIT)
    result = hub.wait(WAIT)
    trained = nodes["south"].wait(WAIT)
    assert trained.predict(np.zeros((1, 64))).shape == (1,)
    logs = {name: [entry for _, entry in ChainReader(tmp_path / name / AUDIT)] for name in nodes}
    messages = {
        name: [each for each in found if each.get("what") == "protocol message"] for name, found in logs.items()
    }
    # Each round of its own that an agent has sent something in counts once, however many messages it had.
    assert sorted({each["round"] for each in messages["north"]}) == [1, 2, 3]
    rows = {name: [row for row in result.rows if row["agent"] == name] for name in nodes}
    assert len(rows["south"]) == 10
    sent = {each["round"] for each in messages["south"]}
    assert sent == set(range(1, len(sent) + 1))
    assert len(sent) - rows["south"][-1]["own_rounds"] in (0, 1)  # the last one may not have been completed
    assert rows["south"][-1]["own_rounds"] > 3
    assert sum(each["bytes"] for each in messages["south"]) == sum(row["sent"] for row in rows["south"])
    reports = [each for each in logs["south"] if each.get("what") == "report"]
    assert 1 <= len(reports) <= 11 + 1
    assert {"accuracy", "own_rounds", "sent"} <= set(reports[0]["values"])
    assert any("leaves: its policy does not allow this (rounds)" in event for event in result.events)
