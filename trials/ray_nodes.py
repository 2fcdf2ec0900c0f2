"""One run on a Ray cluster of three nodes, each in a network namespace, by the commands of docs/how-to/cluster.md.

A recipe and a Python script run on all three. Then a node is killed in the middle of a run; another one is cut off
until the run goes on without it, and comes back; and at last two nodes no longer reach one another, while the head
reaches both. Metrics must equal the simulation's to the byte each time.

    python -m trials.ray_nodes [--keep DIR]
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from codistill.core.errors import NetworkError, RuntimeFault
from trials.namespaces import Net, check_machine, end, run_trial, sh, start, undisturbed

NODES = ("one", "two", "three")
HEAD = NODES[0]
PATIENCE = 120.0  # seconds that a step may take
ROUNDS = 14
BIN = Path(sys.executable).parent
HOOKS = (("output", "daddr"), ("input", "saddr"))  # of nft: what a node sends, and what it gets
# So that a node that is cut off counts as dead after 5 s, and a connection after 8 s; by Ray's own settings they do
# after half a minute, and two minutes or more.
HEALTH = {
    "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "1000",
    "RAY_grpc_client_keepalive_time_ms": "5000", "RAY_grpc_client_keepalive_timeout_ms": "3000",
}  # fmt: skip
SLOW = """\
import time

import codistill as cd


class Slow(cd.{base}):
    async def round(self, me, t):
        time.sleep(0.1)
        await super().round(me, t)
"""
RECIPE = f"""\
[data]
name = "digits"
samples = 500
test_samples = 200
public = 60

[[agents]]
learner = {{ kind = "mlp", hidden = [16] }}
count = 4

[[agents]]
learner = {{ kind = "random_forest", n_estimators = 5 }}
count = 2

[protocol]
name = "slow.py:Slow"
rounds = {ROUNDS}
"""
SCRIPT = f"""\
import sys

import numpy as np
import torch

{SLOW.format(base="DDistillation")}

rng = np.random.default_rng(0)
x = rng.normal(size=(500, 6)).astype(np.float32)
y = (x[:, 0] * x[:, 1] > 0).astype(int)
torch.manual_seed(0)
agents = [
    cd.Agent(f"clinic-{{i}}", torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)),
             x[50 * i:50 * i + 50], y[50 * i:50 * i + 50])
    for i in range(6)
]
ring = cd.Topology.ring([agent.name for agent in agents])
federation = cd.Federation(agents, Slow(), public=x[300:350], test=(x[350:], y[350:]), topology=ring)
federation.run({ROUNDS}, runtime=sys.argv[1], folder=sys.argv[2])
"""


class RayNodes:
    """Ray nodes in namespaces, joined as a user would join machines; with a token and a folder of their own."""

    def __init__(self, net: Net, folder: Path, logs: Path) -> None:
        self._net, self._folder, self._logs = net, folder, logs
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"{net.addresses[HEAD]}:6379"
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        path = f"{BIN}:{os.environ['PATH']}"
        self.environment = {**os.environ, **token, **HEALTH, "PATH": path, "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self, node: str) -> None:
        """`ray start` on a node."""
        role = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        role = role if node == HEAD else [f"--address={self.address}"]
        command = ["ray", "start", *role, f"--node-ip-address={self._net.addresses[node]}", "--num-cpus=2", "--block"]
        with (self._logs / f"node-{node}.log").open("ab") as log:
            self._started[node] = start(self._net.inside(node, *command), env=self.environment, stdout=log, stderr=log)

    def kill(self, node: str) -> None:
        """As if its power failed."""
        for process in sh("ip", "netns", "pids", self._net.path(node).name).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        self._started[node].wait()

    def wait_for(self, count: int) -> None:
        """Until so many nodes have joined."""
        code = (
            "import ray, sys; ray.init(logging_level='ERROR', log_to_driver=False); "
            f"sys.exit(sum(node['Alive'] for node in ray.nodes()) != {count})"
        )
        command = self._net.inside(HEAD, sys.executable, "-c", code)
        environment = {**self.environment, "RAY_ADDRESS": self.address}
        until(lambda: subprocess.run(command, env=environment, capture_output=True).returncode == 0, f"{count} nodes")

    def end(self) -> None:
        """End all processes in the namespaces."""
        with undisturbed():
            for node in self._started:
                with suppress(NetworkError):
                    self.kill(node)
            end(list(self._started.values()))


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something; an error names it if it does not come."""
    limit = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > limit:
            raise RuntimeFault("The trial must go on.", f"no {what} after {PATIENCE:g} s", "See the files of --keep.")
        time.sleep(0.1)


class Trial:
    """The runs, one after the other."""

    def __init__(self, console: Console, folder: Path, net: Net, nodes: RayNodes) -> None:
        self._console, self._folder, self._net, self._nodes = console, folder, net, nodes
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line with the time."""
        self._console.print(f"{time.monotonic() - self._began:4.0f} s  {text}")

    def run(self, name: str, *command: str, disturb: Callable[[Path, Path], None] | None = None) -> str:
        """A command on the head's node, perhaps disturbed in its middle; what it said."""
        log = self._folder / f"{name}.log"
        environment = {**self._nodes.environment, "RAY_ADDRESS": self._nodes.address}
        with log.open("wb") as file:
            process = start(
                self._net.inside(HEAD, *command), env=environment, cwd=self._folder, stdout=file, stderr=file
            )
        try:
            if disturb is not None:
                metrics = self._folder / name / "metrics.jsonl"
                until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 6 * 3, f"third round of {name}")
                disturb(metrics, log)
            until(lambda: process.poll() is not None, f"end of {name}")
        finally:
            end([process])
        if process.returncode:
            found = f"{name}: exit code {process.returncode}"
            raise RuntimeFault("A run must end well.", found, log.read_text()[-2000:])
        left = subprocess.run(["pgrep", "-fc", "^ray::HostProcess"], capture_output=True, text=True).stdout.strip()
        self.say(f"{name}: ended; processes of its hosts that are left: {left}")
        return log.read_text()

    def is_equal(self, name: str, to: str) -> bool:
        """Whether two runs have written the same."""
        files = ("metrics.jsonl", "alone/metrics.jsonl", "outputs.safetensors")
        same = all((self._folder / name / f).read_bytes() == (self._folder / to / f).read_bytes() for f in files)
        self.say(f"{name}: {'equal to the byte' if same else 'DIFFERS'}: {', '.join(files)}")
        return same


def trial(console: Console, folder: Path) -> bool:
    """Whether all runs equal the simulation."""
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "slow.py").write_text(SLOW.format(base="FedMD"))
    (folder / "script.py").write_text(SCRIPT)
    ray_folder = Path(tempfile.mkdtemp(prefix="cr", dir="/tmp"))  # short, for the paths of sockets
    with Net(NODES, with_nat=False) as net:
        nodes = RayNodes(net, ray_folder, folder)
        try:
            return _runs(Trial(console, folder, net, nodes), net, nodes)
        finally:
            nodes.end()
            shutil.rmtree(ray_folder, ignore_errors=True)


def _runs(trial: Trial, net: Net, nodes: RayNodes) -> bool:
    recipe = ("codistill", "run", "recipe.toml", "--quiet")
    script = (sys.executable, "script.py")
    trial.run("here", *recipe, "--set", "runtime.kind=simulation", "--out", "here")
    trial.run("here-script", *script, "simulation", "here-script")
    nodes.start(HEAD)
    nodes.wait_for(1)
    for number, node in enumerate(NODES[1:], 2):  # on one machine not at once: they share the folder of Ray
        nodes.start(node)
        nodes.wait_for(number)
    trial.say("a cluster of three nodes with two cores each")
    on_ray = (*recipe, "--set", "runtime.kind=ray", "--out")
    said = trial.run("recipe", *on_ray, "recipe")
    trial.say(next(line for line in said.splitlines() if "Ray cluster at" in line))
    good = trial.is_equal("recipe", "here")
    trial.run("script", *script, "ray", "script")
    good &= trial.is_equal("script", "here-script")

    def lose(metrics: Path, log: Path) -> None:
        at = time.monotonic()
        nodes.kill("three")
        until(lambda: "goes back to its last checkpoint" in log.read_text(), "note of the killed node")
        trial.say(f"node three killed; the note came after {time.monotonic() - at:.1f} s")

    said = trial.run("killed", *script, "ray", "killed", disturb=lose)
    trial.say(next(line for line in said.splitlines() if "goes back" in line))
    good &= trial.is_equal("killed", "here-script")
    nodes.start("three")
    nodes.wait_for(3)

    def cut(metrics: Path, log: Path) -> None:
        net.ip("switch", "link", "set", net.ports["two"], "down")
        at = time.monotonic()
        until(lambda: "goes back to its last checkpoint" in log.read_text(), "note of the node that was cut off")
        trial.say(f"node two cut off; the note came after {time.monotonic() - at:.1f} s; now it is back")
        net.ip("switch", "link", "set", net.ports["two"], "up")

    trial.run("cut", *on_ray, "cut", disturb=cut)
    good &= trial.is_equal("cut", "here")
    # A node that Ray has given up ends itself when it hears of that, sooner or later.
    nodes.kill("two")
    nodes.wait_for(2)
    nodes.start("two")
    nodes.wait_for(3)

    def separate(metrics: Path, log: Path) -> None:
        other = net.addresses["three"]
        to, back = (f"type filter hook {hook} priority 0; ip {end} {other} drop;" for hook, end in HOOKS)
        sh(*net.inside("two", "nft", f"table ip separate {{ chain to {{ {to} }}; chain back {{ {back} }}; }}"))
        at = time.monotonic()
        until(lambda: "; without node" in log.read_text(), "note of the nodes that do not reach one another")
        trial.say(
            f"nodes two and three do not reach one another; the run left one out after {time.monotonic() - at:.1f} s"
        )

    said = trial.run("separate", *script, "ray", "separate", disturb=separate)
    trial.say(next(line for line in said.splitlines() if "; without node" in line))
    good &= trial.is_equal("separate", "here-script")
    return good


def check() -> None:
    """What the trial cannot do without."""
    check_machine(("ip", "nft", "pgrep"))
    if importlib.util.find_spec("ray") is None:
        raise RuntimeFault("The trial needs Ray.", "no module 'ray'", "pip install 'codistill[ray]'")


if __name__ == "__main__":
    sys.exit(run_trial(str(__doc__), trial, check))
