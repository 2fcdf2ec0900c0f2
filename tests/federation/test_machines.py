"""A hub and agents as functions of Python: in the background of one process, as in a notebook."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import codistill as cd
from codistill.certs.authority import Authority
from codistill.errors import NetworkError, RecipeError
from codistill.federation.result import TrainedAgent

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 4)).astype(np.float32)
Y = (X[:, 0] + X[:, 1] > 0).astype(int)
PUBLIC, TEST = X[60:80], (X[80:], Y[80:])
PARTS = {"a": slice(0, 30), "b": slice(30, 60)}


def agent(name: str) -> cd.Agent:
    return cd.Agent(name, LogisticRegression(), X[PARTS[name]], Y[PARTS[name]])


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority") / "certs"
    authority = Authority(folder)
    authority.create(days=2)
    authority.issue("hub", "127.0.0.1", days=2)
    for name in PARTS:
        authority.issue("agent", name, days=2)
    return folder


def test_a_hub_and_two_agents_in_the_background_equal_a_simulation(certs: Path, tmp_path: Path) -> None:
    address = free_address()
    hub = cd.serve(
        cd.FedMD(), ["a", "b"], classes=2, rounds=2, listen=address, certs=certs / "127.0.0.1", public=PUBLIC,
        test=TEST, folder=tmp_path / "run", progress=False, log=False, background=True,
    )  # fmt: skip
    joined = {
        name: cd.join(
            agent(name), address, certs=certs / name, public=PUBLIC, test=TEST, log=False, background=True
        )
        for name in PARTS
    }  # fmt: skip
    trained = {name: handle.wait(60) for name, handle in joined.items()}
    result = hub.wait(60)
    wanted = cd.Federation([agent("a"), agent("b")], cd.FedMD(), public=PUBLIC, test=TEST).run(
        2, runtime="simulation", progress=False
    )
    assert result.rows == wanted.rows
    assert result.alone_rows == wanted.alone_rows
    assert not result.interrupted
    assert result.agents == {}
    assert "on its own machine" in repr(result)
    for name, mine in trained.items():
        assert isinstance(mine, TrainedAgent)
        np.testing.assert_array_equal(mine.predict_proba(TEST[0]), wanted.agents[name].predict_proba(TEST[0]))
    assert hub.wait() is result


class StopAfterOne:
    """Counts rounds, here."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def round_ended(self, record: Any) -> bool:
        self.rounds.append(record.round)
        return True


def test_a_hub_that_blocks_calls_its_observers_here_and_agents_can_be_stopped() -> None:
    address, observer = free_address(), StopAfterOne()
    joined = [cd.join(agent(name), address, insecure=True, public=PUBLIC, log=False, background=True) for name in PARTS]
    result = cd.serve(
        cd.FedMD(), ["a", "b"], classes=2, rounds=500, listen=address, insecure=True, public=PUBLIC, alone=False,
        progress=False, log=False, observers=[observer],
    )  # fmt: skip
    assert observer.rounds == [1]
    assert result.interrupted
    assert len(result.rows) == 2
    with pytest.raises(TimeoutError, match="still takes part"):
        joined[0].wait(0.1)
    for handle in joined:
        handle.stop()
    assert [handle.wait(30).predict(TEST[0]).shape for handle in joined] == [(40,), (40,)]


def test_what_goes_wrong_in_the_background_is_raised_by_wait() -> None:
    address = free_address()
    hub = cd.serve(
        cd.FedMD(), ["a"], classes=2, rounds=1, listen=address, insecure=True, public=PUBLIC, progress=False,
        log=False, background=True,
    )  # fmt: skip
    other = cd.join(agent("a"), address, insecure=True, public=PUBLIC[:5], log=False, background=True)
    with pytest.raises(NetworkError, match="its public data differ"):
        other.wait(60)
    hub.stop()
    assert hub.wait(30).interrupted


@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        (lambda: cd.join(agent("a"), "127.0.0.1:7447"), NetworkError, "insecure=True"),
        (lambda: cd.join(agent("a"), "7447", insecure=True), NetworkError, "HOST:PORT"),
        (lambda: cd.join("a", "127.0.0.1:7447", insecure=True), RecipeError, "Only an Agent can join"),  # type: ignore[arg-type]
        (
            lambda: cd.serve(cd.FedMD(), ["a"], classes=2, listen="127.0.0.1:7447", insecure=True),
            RecipeError,
            "fedmd needs public data on every node",
        ),
        (
            lambda: cd.serve(cd.AvgKD(), ["a", "b"], classes=2, listen="127.0.0.1:7447", insecure=True),
            NetworkError,
            "A hub is for protocols with a hub",
        ),
        (
            lambda: cd.serve(cd.FedAvg(), ["a", "a"], classes=2, listen="127.0.0.1:7447", insecure=True),
            RecipeError,
            "each once",
        ),
    ],
)
def test_a_mistake_is_an_error_before_anything_starts(act: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        act()


def test_the_name_is_the_certificates(certs: Path) -> None:
    with pytest.raises(NetworkError, match="An agent's name is its certificate's name"):
        cd.join(agent("a"), "127.0.0.1:7447", certs=certs / "b")
