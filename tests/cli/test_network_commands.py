"""hub, join and up from the command line: what a person types, sees, and gets wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import codistill as cd
from codistill.certs.authority import Authority
from codistill.cli import main
from codistill.experiments.building import agent_names
from codistill.experiments.networked import spread
from codistill.experiments.recipe import make_recipe

RECIPE = """
seed = 3
[data]
name = "digits"
samples = 200
public = 50
[[agents]]
learner = "logistic_regression"
count = 3
[protocol]
name = "{protocol}"
rounds = {rounds}
[evaluation]
alone = false
[network]
lease = 2
"""
HELD = """
[data]
held_by_agents = true
classes = 2
public_file = "public.npy"
[[agents]]
name = "north"
[[agents]]
name = "south"
[protocol]
name = "fedmd"
rounds = {rounds}
[evaluation]
alone = false
"""
AGENT_FILE = """
import numpy as np
from sklearn.linear_model import LogisticRegression
import codistill as cd

def agent(name):
    rng = np.random.default_rng(len(name) + ord(name[0]))
    x = rng.normal(size=(60, 3)).astype("float32")
    y = (x.sum(axis=1) > 0).astype(int)
    return cd.Agent(name, LogisticRegression(), x[:40], y[:40], test=(x[40:], y[40:]))

def public():
    return np.load("public.npy")

def finished(agent):
    open(f"{agent.name}.done", "w").write(str(agent.learner.predict(np.ones((1, 3))).round(3).tolist()))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(protocol="fedmd", rounds=2))
    (tmp_path / "ring.toml").write_text(RECIPE.format(protocol="d_distillation", rounds=2))
    (tmp_path / "held.toml").write_text(HELD.format(rounds=3))
    (tmp_path / "my_agent.py").write_text(AGENT_FILE)
    np.save(tmp_path / "public.npy", np.random.default_rng(0).normal(size=(30, 3)).astype("float32"))
    return tmp_path


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority") / "certs"
    authority = Authority(folder)
    authority.create(days=2)
    authority.issue("hub", "localhost", days=2)
    for name in ("north", "south"):
        authority.issue("agent", name, days=2)
    return folder


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("recipe", ["recipe.toml", "ring.toml"])
def test_up_runs_a_recipe_and_a_second_time_goes_on_with_it(recipe: str, here: Path, capsys: Any) -> None:
    assert main(["run", recipe, "--out", "alone", "--set", "runtime.kind=simulation", "--quiet"]) == 0
    assert main(["up", recipe, "--out", "up", "--quiet"]) == 0
    metrics = (here / "up" / "metrics.jsonl").read_bytes()
    assert metrics == (here / "alone" / "metrics.jsonl").read_bytes()
    assert "report: up/report.html" in capsys.readouterr().out
    assert (here / "up" / "report.html").stat().st_size > 1000
    assert main(["up", recipe, "--out", "up", "--quiet"]) == 0  # nothing is left to do
    assert (here / "up" / "metrics.jsonl").read_bytes() == metrics
    assert main(["up", recipe, "--out", "up", "--quiet", "--set", "seed=4"]) == 6
    assert "a run of another recipe" in capsys.readouterr().err
    if recipe == "ring.toml":  # the checkpoint holds every peer, so any runtime can go on from it
        assert main(["resume", "up", "--quiet"]) == 0
        assert (here / "up" / "metrics.jsonl").read_bytes() == metrics
    else:
        assert main(["resume", "up"]) == 6
        assert "Give the same command again" in capsys.readouterr().err


def test_agents_takes_the_kinds_in_turn() -> None:
    agents = [{"learner": "mlp"}, {"learner": "logistic_regression", "count": 2}]
    tables: dict[str, Any] = {"data": {"name": "digits"}, "agents": agents, "protocol": {"name": "alone"}}
    recipe = make_recipe(tables, Path())
    names = ["mlp-1", "mlp-2", "mlp-3", "logistic_regression-1", "logistic_regression-2"]
    assert agent_names(spread(recipe, 5)) == names
    assert agent_names(spread(recipe, 1)) == ["mlp"]
    assert spread(recipe, 3) is recipe


MISTAKES: dict[str, tuple[list[str], int, str]] = {
    "no address": (["hub", "recipe.toml", "--listen", "7447"], 9, "An address must have the form HOST:PORT."),
    "no port": (["join", "my_agent.py", "--hub", "hub.org:0"], 9, "An address must have the form HOST:PORT."),
    "open and without certificates": (
        ["hub", "recipe.toml", "--listen", "0.0.0.0:7447"],
        9,
        "must use certificates. | none for 0.0.0.0:7447",
    ),
    "certificates and none": (
        ["hub", "recipe.toml", "--listen", "localhost:7447", "--certs", "x", "--insecure"],
        2,
        "--certs beside --insecure",
    ),
    "no folder": (["hub", "recipe.toml", "--listen", "localhost:7447", "--certs", "nowhere"], 9, "nowhere"),
    "neither hub nor peers": (["join", "my_agent.py"], 2, "neither --hub nor --listen"),
    "both": (["join", "my_agent.py", "--hub", "localhost:1", "--listen", "localhost:2"], 2, "both --hub and --listen"),
    "a peer without a name": (["join", "my_agent.py", "--listen", "localhost:2", "--peer", "a:1"], 2, "NAME=HOST:PORT"),
    "no name": (["join", "my_agent.py", "--hub", "localhost:7447"], 2, "Add --name NAME"),
    "no such file": (["join", "their.py", "--hub", "localhost:7447", "--name", "a"], 2, "their.py must run."),
    "not an agent's file": (
        ["join", "public.npy", "--hub", "localhost:7447", "--name", "a"],
        2,
        "An agent's file is a Python file or a recipe.",
    ),
    "not in the recipe": (
        ["join", "recipe.toml", "--hub", "localhost:7447", "--name", "a"],
        9,
        "must have an agent of the certificate's name",
    ),
    "peers without a recipe": (["join", "my_agent.py", "--listen", "localhost:2", "--name", "a"], 2, "no --recipe"),
    "a hub for peers": (["hub", "ring.toml", "--listen", "localhost:7447"], 9, "A hub is for protocols with a hub."),
    "peers of a hub": (
        ["join", "my_agent.py", "--recipe", "held.toml", "--listen", "localhost:2", "--name", "north"],
        9,
        "fedmd has a hub.",
    ),
    "data elsewhere": (["run", "held.toml"], 2, "A recipe whose agents hold their data runs between machines."),
    "a stranger as a peer": (
        ["join", "ring.toml", "--listen", "localhost:2", "--name", "logistic_regression-1", "--peer", "x=localhost:3"],
        9,
        "must be its neighbour",
    ),
    "pooled": (
        ["up", "recipe.toml", "--set", "protocol.name=centralised", "--out", "x"],
        2,
        "pools the data of all agents",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_before_anything_starts(mistake: str, here: Path, capsys: Any) -> None:
    arguments, code, words = MISTAKES[mistake]
    assert main(arguments) == code
    told = capsys.readouterr().err
    assert [line[:7] for line in told.splitlines()[:3]] == ["error: ", "found: ", "to do: "]
    for part in words.split(" | "):
        assert part in told


@pytest.mark.parametrize(
    "arguments",
    [
        ["hub", "held.toml", "--listen", "localhost:7447", "--out", "open"],
        ["hub", "recipe.toml", "--listen", "localhost:7447", "--out", "open"],
        ["join", "my_agent.py", "--hub", "localhost:7447", "--name", "north", "--state", "open"],
        ["join", "ring.toml", "--listen", "localhost:2", "--name", "logistic_regression-1", "--state", "open"],
    ],
)
def test_a_node_does_not_start_in_a_folder_that_others_may_write(arguments: list[str], here: Path, capsys: Any) -> None:
    (here / "open").mkdir()
    (here / "open").chmod(0o777)
    assert main(arguments) == 7
    assert "Only its owner may be able to write to open." in capsys.readouterr().err
    assert not list((here / "open").iterdir()), "nothing was written there"


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("def agent(name): return 5", 2, "must return an Agent"),
        ("x = 1", 2, "must define agent(name)"),
        ("def agent(name): return 1 / 0", 3, "agent() of my_agent.py must work. | ZeroDivisionError"),
        (AGENT_FILE.replace("cd.Agent(name,", "cd.Agent('west',"), 9, "An agent's name is its certificate's name."),
        (AGENT_FILE + "\nprotocol = 'fedmd'", 2, "must be a class derived from Protocol"),
    ],
)
def test_an_agent_file_that_is_none(text: str, code: int, words: str, here: Path, capsys: Any) -> None:
    (here / "my_agent.py").write_text(text)
    assert main(["join", "my_agent.py", "--hub", "localhost:7447", "--name", "north"]) == code
    told = capsys.readouterr().err
    for part in words.split(" | "):
        assert part in told


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("held_by_agents = true", "needs the number of classes"),
        (
            'held_by_agents = true\nclasses = 2\nname = "digits"',
            "exactly one of name, sources, file, files, folder, held_by_agents",
        ),
        ("held_by_agents = true\nclasses = 2\npublic = 5", "'public' beside 'held_by_agents'"),
        ('name = "digits"\nclasses = 2', "class_names and public_file go with held_by_agents"),
    ],
)
def test_recipes_without_data_that_contradict_themselves(data: str, words: str, here: Path, capsys: Any) -> None:
    (here / "wrong.toml").write_text(f'[data]\n{data}\n[[agents]]\nname = "a"\n[protocol]\nname = "fedmd"\n')
    assert main(["hub", "wrong.toml", "--listen", "localhost:7447"]) == 2
    assert words in capsys.readouterr().err


class Node:
    """A command in a process of its own. It is forked, which spares it the imports."""

    def __init__(self, folder: Path, log: Path, command: tuple[str, ...]) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=self._work, args=(folder, log, command))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forking with several threads
            self._process.start()

    @staticmethod
    def _work(folder: Path, log: Path, command: tuple[str, ...]) -> None:
        os.chdir(folder)
        with log.open("a", buffering=1) as told, redirect_stdout(told), redirect_stderr(told):
            code = main(list(command))
        os._exit(code)

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout: float = 120) -> int | None:
        """The exit code; None if it is still running then."""
        self._process.join(timeout)
        return self._process.exitcode


class Nodes:
    """Commands in processes of their own, with a log each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[Node] = []

    def start(self, name: str, *command: str) -> Node:
        log = self.folder / f"{name}.log"
        log.touch()
        self.running.append(Node(self.folder, log, command))
        return self.running[-1]

    def told(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def until(self, name: str, words: str, *, times: int = 1, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while self.told(name).count(words) < times:
            assert time.monotonic() < end, self.told(name)
            time.sleep(0.05)

    def end(self) -> None:
        for node in self.running:
            if node.wait(0) is None:
                node.send(signal.SIGKILL)
            node.wait()


@pytest.fixture
def nodes(here: Path) -> Any:
    made = Nodes(here)
    yield made
    made.end()


def test_two_agents_with_their_own_data_a_hub_that_is_killed_and_a_gentle_end(
    here: Path, certs: Path, nodes: Nodes
) -> None:
    (here / "held.toml").write_text(HELD.format(rounds=100_000))
    port = free_port()
    hub = ("hub", "held.toml", "--listen", f"127.0.0.1:{port}", "--certs", str(certs / "localhost"), "--out", "run",
           "--log-format", "json")  # fmt: skip
    first = nodes.start("hub", *hub)
    for name in ("north", "south"):
        nodes.start(name, "join", "my_agent.py", "--hub", f"127.0.0.1:{port}", "--certs", str(certs / name))
    nodes.until("hub", '"round": 3,')
    first.send(signal.SIGKILL)
    first.wait()
    nodes.until("north", "the hub disconnected; waiting for it to come back")
    second = nodes.start("again", *hub)
    # A round is logged before its checkpoint is written: killed between the two, the hub repeats the round.
    nodes.until("again", '"event": "round ended"', times=2)
    second.send(signal.SIGTERM)
    assert second.wait(timeout=60) == 130
    rows = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = [(row["round"], row["agent"]) for row in rows]
    assert counted == [(t + 1, name) for t in range(len(rows) // 2) for name in ("north", "south")]
    assert len(rows) >= 8
    assert all(0.5 < row["own_accuracy"] <= 1 for row in rows)
    assert json.loads((here / "run" / "health.json").read_text())["status"] == "stopped"
    assert (here / "run" / "report.html").exists()
    events = [json.loads(line) for line in nodes.told("again").splitlines() if line.startswith("{")]
    assert {"time", "level", "node", "event"} <= events[0].keys()
    nodes.until("south", "waiting for it to come back")
    agent = nodes.running[1]
    agent.send(signal.SIGTERM)
    assert agent.wait(timeout=60) == 130
    assert list((here / "agents" / "north").glob("*/state-*"))


def test_agents_finish_and_other_public_data_are_refused(
    here: Path, certs: Path, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    hub = nodes.start("hub", "hub", "held.toml", "--listen", f"127.0.0.1:{port}", "--certs", str(certs / "localhost"))
    other = here / "other"
    other.mkdir()
    np.save(other / "public.npy", np.zeros((30, 3), np.float32))
    (other / "my_agent.py").write_text(AGENT_FILE.replace('"public.npy"', '"other/public.npy"'))
    joining = ("--hub", f"127.0.0.1:{port}", "--certs")
    stranger = nodes.start("stranger", "join", "other/my_agent.py", *joining, str(certs / "north"), "--state", "x")
    assert stranger.wait(timeout=120) == 9
    assert "its public data differ: 30 samples with digest" in nodes.told("stranger")
    assert "'north' may not join: its public data differ" in nodes.told("hub")
    agents = [
        nodes.start(name, "join", "my_agent.py", *joining, str(certs / name), "--save", f"{name}.codistill")
        for name in ("north", "south")
    ]
    assert hub.wait(timeout=120) == 0, nodes.told("hub")
    assert [agent.wait(timeout=60) for agent in agents] == [0, 0]
    assert (here / "north.done").exists()
    assert (here / "south.done").exists()
    assert "after 3 rounds" in nodes.told("hub")
    for name in ("north", "south"):
        _check_export(here, name, "my_agent.py", ["agents/" + name, name], capsys)
    assert main(["export", "agents/north", "north"]) == 6
    assert "Add --file my_agent.py" in capsys.readouterr().err
    assert main(["export", "certs", "north", "--file", "my_agent.py"]) == 6
    assert "must be the folder of an agent that has taken part in a run" in capsys.readouterr().err
    (here / "my_agent.py").write_text(
        AGENT_FILE.replace("LogisticRegression()", "GaussianNB()").replace(
            "linear_model import LogisticRegression", "naive_bayes import GaussianNB"
        )
    )
    assert main(["export", "agents/north", "north", "--file", "my_agent.py"]) == 6
    log = here / "agents" / "north" / "audit.jsonl"
    log.write_text("")
    assert main(["export", "agents/north", "north", "--file", "my_agent.py"]) == 6
    assert "must have the terms of the run whose state is there" in capsys.readouterr().err


def _check_export(here: Path, name: str, file: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What 'codistill export' makes of an agent's folder is the model that 'codistill join --save' has written."""
    capsys.readouterr()
    assert main(["export", *arguments, "--file", file, "--out", "exported"]) == 0
    assert f"LogisticRegression of '{name}' after 3 rounds of " in capsys.readouterr().out
    x = np.random.default_rng(1).normal(size=(20, 3))
    exported, saved = cd.load(here / "exported"), cd.load(here / f"{name}.codistill")
    assert np.array_equal(exported.answers(x), saved.answers(x))
    assert exported.classes_.tolist() == saved.classes_.tolist() == [0, 1]
    assert not np.array_equal(exported.answers(x), exported.learner.predict(x))  # a safeguard mixes it with its own


@pytest.mark.long
def test_the_folder_of_a_peer_is_exported_too(
    here: Path, certs: Path, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "peers.toml").write_text(HELD.format(rounds=3).replace("fedmd", "avgkd").replace("public_file", "#"))
    (here / "my_agent.py").write_text(AGENT_FILE.replace("def public", "def unused"))
    ports = {"north": free_port(), "south": free_port()}
    started = []
    for name, other in (("north", "south"), ("south", "north")):
        peer = ("--listen", f"127.0.0.1:{ports[name]}", "--peer", f"{other}=127.0.0.1:{ports[other]}")
        own = ("--certs", str(certs / name), "--save", f"{name}.codistill")
        started.append(nodes.start(name, "join", "my_agent.py", "--recipe", "peers.toml", *peer, *own))
    assert [node.wait(timeout=120) for node in started] == [0, 0], nodes.told("north")
    _check_export(here, "north", "my_agent.py", ["agents/north", "north"], capsys)
    assert main(["export", "agents/north", "north"]) == 6
    assert "At the agent: codistill export FOLDER NAME --file my_agent.py" in capsys.readouterr().err


def test_an_agent_takes_part_only_in_what_it_accepts(here: Path, capsys: Any) -> None:
    (here / "my_agent.py").write_text(AGENT_FILE + '\naccepts = ("fedmd",)\n')
    (here / "avgkd.toml").write_text(HELD.format(rounds=3).replace("fedmd", "avgkd"))
    arguments = ["join", "my_agent.py", "--recipe", "avgkd.toml", "--listen", "localhost:7447", "--name", "north"]
    assert main(arguments) == 9
    assert "avgkd; accepted: fedmd" in capsys.readouterr().err


def test_a_second_start_in_the_same_folder_ends_at_once_and_touches_nothing(
    here: Path, certs: Path, nodes: Nodes
) -> None:
    """A hub, an agent with a hub and a peer, each started twice."""
    (here / "peers.toml").write_text(HELD.format(rounds=3).replace("fedmd", "avgkd").replace("public_file", "#"))
    ports = {name: (free_port(), free_port()) for name in ("hub", "agent", "peer")}
    own = ("--certs", str(certs / "north"))
    commands = {
        "hub": ("hub", "held.toml", "--certs", str(certs / "localhost"), "--out", "run", "--listen"),
        "agent": ("join", "my_agent.py", *own, "--state", "agent", "--hub"),
        "peer": ("join", "my_agent.py", "--recipe", "peers.toml", *own, "--state", "peer", "--listen"),
    }
    folders = {"hub": here / "run", "agent": here / "agent", "peer": here / "peer"}
    for name, command in commands.items():
        nodes.start(name, *command, f"127.0.0.1:{ports[name][0]}")
        _until(lambda name=name: (folders[name] / "health.json").exists())
    first = {name: json.loads((folder / "health.json").read_text()) for name, folder in folders.items()}
    for name, command in commands.items():
        began = time.monotonic()
        second = nodes.start(f"{name}-again", *command, f"127.0.0.1:{ports[name][1]}")
        assert second.wait(timeout=30) == 7, nodes.told(f"{name}-again")
        assert time.monotonic() - began < 10
        told = nodes.told(f"{name}-again")
        assert "another run is using it" in told
        assert "hub: listens at" not in told
        health = json.loads((folders[name] / "health.json").read_text())
        assert {**health, "time": ""} == {**first[name], "time": ""}


def test_a_hub_that_cannot_go_on_from_its_folder_does_not_stay(here: Path, nodes: Nodes) -> None:
    hub = ("hub", "held.toml", "--out", "run", "--listen")
    port = free_port()
    first = nodes.start("hub", *hub, f"127.0.0.1:{port}")
    nodes.until("hub", "waiting for 2 agents")
    first.send(signal.SIGTERM)
    assert first.wait(timeout=30) == 130
    for name in ("round-000001.state", "round-000002.state"):
        (here / "run" / "checkpoints" / name).write_bytes(b"damaged")
    assert nodes.start("again", *hub, f"127.0.0.1:{port}").wait(timeout=30) == 6
    assert "2 damaged" in nodes.told("again")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def _until(true: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
