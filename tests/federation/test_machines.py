"""Hub and agents as plain functions, on the loopback address: the rows and the models of the simulation."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import Ridge
from sklearn.naive_bayes import GaussianNB

import codistill as cd
from codistill.certs.authority import Authority
from codistill.core.errors import CodistillError, NetworkError
from codistill.federation.serving import BackgroundNode
from codistill.network.options import Network
from codistill.results.records import RoundEnded

ROUNDS, WAIT = 2, 60  # seconds after which a node that still runs is a failure
FAST = Network(patience=30, lease=2, linger=1)
Digits = tuple[np.ndarray, np.ndarray]
Start = Callable[..., BackgroundNode]
pytestmark = pytest.mark.usefixtures("time_limit")


@dataclass(frozen=True)
class Shared:
    """What every node has: the public data and the test set."""

    public: np.ndarray
    test: tuple[np.ndarray, np.ndarray]


def agents(digits: Digits) -> list[cd.Agent]:
    x, y = digits[0].reshape(-1, 64), digits[1]
    return [
        cd.Agent("north", GaussianNB(), x[:40], y[:40]),
        cd.Agent("south", RandomForestClassifier(3), x[40:80], y[40:80]),
    ]


@pytest.fixture(scope="module")
def shared(digits: Digits) -> Shared:
    x, y = digits[0].reshape(-1, 64), digits[1]
    return Shared(x[80:120], (x[120:160], y[120:160]))


@pytest.fixture(scope="module")
def simulated(digits: Digits, shared: Shared) -> cd.Result:
    return federation(digits, shared).run(ROUNDS, runtime="simulation", progress=False)


def federation(digits: Digits, shared: Shared) -> cd.Federation:
    return cd.Federation(agents(digits), cd.FedMD(), public=shared.public, test=shared.test, classes=10, safeguard=True)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Certificates made from Python, in a folder that is given as text."""
    folder = str(tmp_path_factory.mktemp("machines") / "certs")
    authority = Authority(folder)
    authority.create()
    authority.issue("hub", "hub.example", addresses=["127.0.0.1"])
    for name in ("north", "south"):
        authority.issue("agent", name)
    return folder


@pytest.fixture
def address() -> str:
    """A port of the loopback address that nobody uses now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def in_background() -> Iterator[Start]:
    """Starts serve or join in the background; whatever still runs after the test is ended."""
    started: list[BackgroundNode] = []

    def start(function: Callable[..., Any], *given: Any, **options: Any) -> BackgroundNode:
        started.append(function(*given, background=True, log=False, network=FAST, **options))
        return started[-1]

    yield start
    for node in started:
        node._process.stop()
        node._process.end()


def serve_options(shared: Shared, address: str, **options: Any) -> dict[str, Any]:
    return {
        "classes": 10, "rounds": ROUNDS, "listen": address, "public": shared.public, "test": shared.test,
        "progress": False, **options,
    }  # fmt: skip


def assert_equal_models(trained: dict[str, cd.TrainedAgent], simulated: cd.Result, x: np.ndarray) -> None:
    for name, agent in trained.items():
        np.testing.assert_array_equal(agent.predict_proba(x), simulated.agents[name].predict_proba(x))
        np.testing.assert_array_equal(agent.predict(x), simulated.agents[name].predict(x))


def told(rows: Any) -> list[dict[str, Any]]:
    """Rows as a hub gets them: an accuracy on an agent's own mix of classes would tell its class counts, and what
    the safeguard has refused is for its operator alone.
    """
    kept = ("own_accuracy", "taught_accuracy", "taught_own_accuracy", "safeguard_weight")
    return [{key: value for key, value in row.items() if key not in kept} for row in rows]


# --- equal to the simulation ------------------------------------------------------------------------


def test_the_network_from_python_equals_the_simulation(digits: Digits, shared: Shared, simulated: cd.Result) -> None:
    result = federation(digits, shared).run(ROUNDS, runtime="network", progress=False)
    assert result.rows == simulated.rows
    assert result.alone_rows == simulated.alone_rows is not None
    assert_equal_models(result.agents, simulated, shared.public)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("secured", [True, False], ids=["certificates", "insecure"])
def test_a_hub_and_two_agents_in_the_background_equal_the_simulation(
    secured: bool, digits: Digits, shared: Shared, simulated: cd.Result, certs: str, address: str, in_background: Start
) -> None:
    def own(name: str) -> dict[str, Any]:
        return {"certs": f"{certs}/{name}"} if secured else {"insecure": True}

    hub = in_background(
        cd.serve, cd.FedMD(), ["north", "south"], **own("hub.example"), **serve_options(shared, address)
    )
    joined = [
        in_background(cd.join, agent, address, public=shared.public, test=shared.test, **own(agent.name))
        for agent in agents(digits)
    ]
    assert hub.is_running
    trained = {agent.name: agent for agent in (node.wait(WAIT) for node in joined)}
    result = hub.wait(WAIT)
    assert result.rows == told(simulated.rows)
    assert result.alone_rows == told(simulated.alone_rows)
    assert not result.interrupted
    assert result.agents == {}  # their models stay with them
    assert set(trained) == {"north", "south"}
    assert_equal_models(trained, simulated, shared.public)
    assert hub.wait() is result
    assert not any(node.is_running for node in (hub, *joined))


def test_a_hub_in_the_foreground_tells_its_observers_and_stops_for_one(
    digits: Digits, shared: Shared, simulated: cd.Result, address: str, in_background: Start, tmp_path: Path
) -> None:
    """And goes on in its folder, with agents that go on in theirs."""

    class StopAfterOne:
        rounds: list[int] = []  # noqa: RUF012

        def round_ended(self, record: RoundEnded) -> np.bool:
            self.rounds.append(record.round)
            return np.mean(self.rounds) == 1

    def join() -> list[BackgroundNode]:
        return [
            in_background(
                cd.join, agent, address, public=shared.public, test=shared.test, insecure=True,
                folder=tmp_path / agent.name,
            )
            for agent in agents(digits)
        ]  # fmt: skip

    options = serve_options(shared, address, insecure=True, log=False, network=FAST, folder=tmp_path / "hub")
    joined = join()
    first = cd.serve(cd.FedMD(), ["north", "south"], observers=[StopAfterOne()], **options)
    assert StopAfterOne.rounds == [1]
    assert first.interrupted
    assert first.rows == told(simulated.rows[:2])
    for node in joined:  # a hub that stops may come back: its agents wait for it until they are asked to stop
        node.stop()
        node.wait(WAIT)
    joined = join()
    second = cd.serve(cd.FedMD(), ["north", "south"], **options)
    assert not second.interrupted
    assert second.rows == told(simulated.rows)
    assert_equal_models({agent.name: agent for agent in (node.wait(WAIT) for node in joined)}, simulated, shared.public)


# --- stop -------------------------------------------------------------------------------------------


def test_stop_ends_a_hub_that_waits_for_its_agents(shared: Shared, address: str, in_background: Start) -> None:
    hub = in_background(cd.serve, cd.FedMD(), ["north"], insecure=True, **serve_options(shared, address))
    with pytest.raises(TimeoutError, match="'hub' still takes part after 0.5 s"):
        hub.wait(0.5)
    hub.stop()
    result = hub.wait(WAIT)
    assert result.interrupted
    assert result.rows == []
    assert not hub.is_running


def test_stop_ends_an_agent_that_waits_for_its_hub(
    digits: Digits, shared: Shared, address: str, in_background: Start
) -> None:
    node = in_background(cd.join, agents(digits)[0], address, insecure=True, public=shared.public)
    with pytest.raises(TimeoutError, match="'north' still takes part"):
        node.wait(0.5)
    node.stop()
    with pytest.raises(NetworkError, match="'north' must have joined the run"):
        node.wait(WAIT)
    assert not node.is_running


def test_a_node_that_is_killed_is_an_error(shared: Shared, address: str, in_background: Start) -> None:
    hub = in_background(cd.serve, cd.FedMD(), ["north"], insecure=True, **serve_options(shared, address))
    hub._process._process.kill()
    with pytest.raises(CodistillError, match="'hub' ended unexpectedly"):
        hub.wait(WAIT)


def test_the_error_of_a_node_is_raised_here(shared: Shared, address: str, in_background: Start) -> None:
    """Two hubs at one address."""
    with socket.socket() as taken:
        host, port = address.split(":")
        taken.bind((host, int(port)))
        taken.listen()
        hub = in_background(cd.serve, cd.FedMD(), ["north"], insecure=True, **serve_options(shared, address))
        with pytest.raises(NetworkError) as caught:
            hub.wait(WAIT)
    assert address in str(caught.value)
    assert "This happened at 'hub'." in caught.value.__notes__


# --- mistakes, told before anything runs ------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"insecure": False}, ["must use certificates", "no certs", "certs=FOLDER", "insecure=True"]),
        ({"certs": "somewhere"}, ["both certs and insecure"]),
        ({"insecure": False, "certs": "nowhere"}, ["nowhere"]),
        ({"listen": "7447"}, ["7447", "HOST:PORT"]),
        ({"public": None}, ["fedmd needs public data on every node", "Pass the same public=... everywhere."]),
        ({"classes": 0}, ["classes"]),
        ({"agents": []}, ["agent"]),
        ({"agents": ["north", "north"]}, ["north"]),
        ({"protocol": cd.DDistillation()}, ["A hub is for protocols with a hub", "codistill join"]),
        ({"protocol": cd.Centralised()}, ["pools the data of all agents", "codistill run"]),
        ({"protocol": "fedmd"}, ["protocol"]),
        ({"observers": [object()]}, ["An observer must be an object"]),
        ({"test": np.zeros(3)}, ["The test set"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_serve_says_of_a_mistake(changes: dict[str, Any], said: list[str], shared: Shared, address: str) -> None:
    given = {
        "protocol": cd.FedMD(), "agents": ["north"], "insecure": True, "log": False,
        **serve_options(shared, address), **changes,
    }  # fmt: skip
    with pytest.raises(CodistillError) as caught:
        cd.serve(given.pop("protocol"), given.pop("agents"), **given)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"insecure": False}, ["must use certificates", "certs=FOLDER"]),
        ({"agent": "north"}, ["Only an Agent can join", "codistill.Agent(name, model, x, y)"]),
        ({"hub": "hub.example"}, ["hub.example", "HOST:PORT"]),
        ({"test": 3}, ["The test set"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_join_says_of_a_mistake(changes: dict[str, Any], said: list[str], digits: Digits, address: str) -> None:
    given = {"agent": agents(digits)[0], "hub": address, "insecure": True, "log": False, **changes}
    with pytest.raises(CodistillError) as caught:
        cd.join(given.pop("agent"), given.pop("hub"), **given)
    for words in said:
        assert words in str(caught.value)


def test_an_agent_has_the_name_of_its_certificate(digits: Digits, certs: str, address: str) -> None:
    with pytest.raises(NetworkError, match="An agent's name is its certificate's name") as caught:
        cd.join(agents(digits)[0], address, certs=f"{certs}/south")
    assert "'north', certificate of 'south'" in str(caught.value)


def test_an_agent_that_does_not_accept_the_protocol_says_so(
    digits: Digits, shared: Shared, address: str, in_background: Start
) -> None:
    in_background(cd.serve, cd.FedMD(), ["north"], insecure=True, **serve_options(shared, address))
    node = in_background(cd.join, agents(digits)[0], address, insecure=True, public=shared.public, accepts=["fd"])
    with pytest.raises(NetworkError, match="must run a protocol that this agent accepts") as caught:
        node.wait(WAIT)
    assert "fedmd; accepted: fd" in str(caught.value)
    assert "accepts" in str(caught.value)


# --- what a trained agent predicts ------------------------------------------------------------------


def test_a_trained_agent_predicts_as_a_classifier_of_scikit_learn_does(shared: Shared, simulated: cd.Result) -> None:
    agent = simulated.agents["north"]
    probabilities, labels = agent.predict_proba(shared.public), agent.predict(shared.public)
    assert probabilities.shape == (40, 10)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(labels, probabilities.argmax(axis=1))
    np.testing.assert_array_equal(probabilities, agent.decision_function(shared.public))
    assert labels.dtype.kind == "i"


def test_a_trained_agent_of_real_values_has_no_probabilities(digits: Digits) -> None:
    x = digits[0].reshape(-1, 64)
    y = x.sum(axis=1, keepdims=True)
    result = cd.Federation([cd.Agent("a", Ridge(), x[:40], y[:40])], cd.Alone()).run(
        1, runtime="simulation", progress=False
    )
    np.testing.assert_allclose(result.agents["a"].predict(x[:9]), y[:9, 0], rtol=0.2)
    with pytest.raises(CodistillError, match="Probabilities are for classes") as caught:
        result.agents["a"].predict_proba(x[:9])
    assert "Use predict(x)" in str(caught.value)


def test_answers_that_are_no_probabilities_are_not_given_as_such(digits: Digits) -> None:
    """Ridge on labels: its largest answer is the class, but the answers are no distribution."""
    x, y = digits[0].reshape(-1, 64), digits[1]
    result = cd.Federation([cd.Agent("a", Ridge(), x[:60], y[:60])], cd.Alone(refit=True)).run(
        1, runtime="simulation", progress=False
    )
    agent = result.agents["a"]
    np.testing.assert_array_equal(agent.predict(x[:20]), agent.answers(x[:20]).argmax(axis=1))
    with pytest.raises(CodistillError, match="Probabilities must be at least 0 and add up to 1") as caught:
        agent.predict_proba(x[:20])
    assert "answers(x)" in str(caught.value)
