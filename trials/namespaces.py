"""One federation across Linux network namespaces: every node has a machine's own network, on slow and lossy links.

A hub and ten agents, then ten peers on a ring, then an agent behind NAT. All of it must give the simulation's
figures to the byte. In one more run an agent's machine is cut off: its hub must notice that within its lease, go on
without it, and take it in again when it is back. Nothing touches the network of this machine: interfaces are made in
the namespaces, and the namespaces are removed at the end.

    python -m trials.namespaces [--keep DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from codistill.core.errors import CodistillError, NetworkError, RuntimeFault

DELAY, LOSS = 0.020, 0.01  # on the way from any node to any other; a round trip meets both twice
PATIENCE = 300.0  # seconds that a federation may take
PORT = 7447
OUTSIDE, INSIDE = "198.18.0.{}", "192.168.77.{}"  # a range for tests of networks; a private one, behind NAT
SWITCH, HUB, ROUTER, BEHIND = "switch", "hub", "router", "behind"
AGENTS = [f"mlp-{i}" for i in range(1, 6)] + [f"logistic_regression-{i}" for i in range(1, 6)]
CODISTILL = str(Path(sys.executable).with_name("codistill"))
LEASE, LATER = 4, 3.0  # network.lease where a machine is cut off, and seconds by which the hub may notice it later
NOT_RUN = 77  # exit code where this machine lacks what the trial needs

RECIPE = """\
seed = 0
{topology}

[data]
name = "digits"
public = 400

[partition]
kind = "dirichlet"
alpha = 0.5
min_size = 20

[[agents]]
learner = "mlp"
count = 5

[[agents]]
learner = {{ kind = "logistic_regression", max_iter = 200 }}
count = 5

[protocol]
rounds = 8
{protocol}

[evaluation]
alone = false
"""
RECIPES = {
    "fedmd": RECIPE.format(topology="", protocol='name = "fedmd"\nlocal_epochs = 1\ntransfer_steps = 5'),
    "d_distillation": RECIPE.format(
        topology='topology = "ring"', protocol='name = "d_distillation"\nlocal_steps = 10\nevery = 2'
    ),
}


# --- the network ----------------------------------------------------------------------------------


def sh(*command: str, given: str | None = None) -> str:
    """Run a command to its end; what it printed."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise NetworkError(
            f"'{' '.join(command)}' must work.",
            (done.stderr or done.stdout).strip()[-300:] or f"exit code {done.returncode}",
            "Run this trial as root, on Linux with iproute2 and iputils-ping.",
        )
    return done.stdout


def works(*command: str, given: str | None = None) -> bool:
    """Whether a command works here."""
    try:
        sh(*command, given=given)
    except (NetworkError, OSError):
        return False
    return True


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Whoever is impatient waits until it is tidy."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Net:
    """Namespaces around a switch: every node has its own, with one address; one more is behind NAT, if asked for."""

    def __init__(self, nodes: Sequence[str] = (HUB, *AGENTS), *, with_nat: bool = True) -> None:
        self._nodes, self._with_nat = nodes, with_nat
        self._prefix = f"codistill-{os.getpid()}-"
        self._made: list[str] = []
        self.addresses: dict[str, str] = {}
        self.ports: dict[str, str] = {}  # of the switch, by node
        self.nat = ""  # by what the router hides who is behind it; empty: it cannot

    def __enter__(self) -> Net:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with undisturbed():
            for name in self._made:
                # With a namespace its interfaces, addresses and rules are gone.
                works("ip", "netns", "delete", self._prefix + name)

    def path(self, node: str) -> Path:
        """The file by which a process enters a node's namespace."""
        return Path("/var/run/netns") / f"{self._prefix}{node}"

    def inside(self, node: str, *command: str) -> list[str]:
        """A command as it runs in a node's namespace."""
        return ["ip", "netns", "exec", self._prefix + node, *command]

    def ip(self, node: str, *arguments: str) -> None:
        """Run `ip` for a node."""
        sh("ip", "-n", self._prefix + node, *arguments)

    def _add(self, node: str) -> None:
        self._made.append(node)  # before it is there: an interrupt may come between
        sh("ip", "netns", "add", self._prefix + node)
        self.ip(node, "link", "set", "lo", "up")

    def _build(self) -> None:
        self._add(SWITCH)
        self.ip(SWITCH, "link", "add", "bridge", "type", "bridge")
        self.ip(SWITCH, "link", "set", "bridge", "up")
        for number, node in enumerate((*self._nodes, *([ROUTER] if self._with_nat else [])), start=1):
            self._add(node)
            port = self.ports[node] = f"port{number}"
            self.ip(SWITCH, "link", "add", port, "type", "veth", "peer", "eth0", "netns", self._prefix + node)
            self.ip(SWITCH, "link", "set", port, "master", "bridge", "up")
            self._address(node, "eth0", OUTSIDE.format(number))
        if self._with_nat:
            self._build_nat()

    def _build_nat(self) -> None:
        self._add(BEHIND)
        self.ip(ROUTER, "link", "add", "inner", "type", "veth", "peer", "eth0", "netns", self._prefix + BEHIND)
        outer = self.addresses[ROUTER]
        self._address(ROUTER, "inner", INSIDE.format(1))
        self.addresses[ROUTER] = outer
        self._address(BEHIND, "eth0", INSIDE.format(2))
        self.ip(BEHIND, "route", "add", "default", "via", INSIDE.format(1))
        self.nat = self._hide()

    def _address(self, node: str, interface: str, address: str) -> None:
        self.ip(node, "address", "add", f"{address}/24", "dev", interface)
        self.ip(node, "link", "set", interface, "up")
        self.addresses[node] = address

    def _hide(self) -> str:
        """Let the router forward, under its own address."""
        if not works(*self.inside(ROUTER, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")):
            return ""
        rules = "table ip hide { chain out { type nat hook postrouting priority 100; oifname eth0 masquerade; }; }"
        if works(*self.inside(ROUTER, "nft", "-f", "-"), given=rules):
            return "nft masquerade"
        rule = ("iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE")
        return "iptables MASQUERADE" if works(*self.inside(ROUTER, *rule)) else ""

    def round_trip(self, one: str, other: str) -> float:
        """Milliseconds by ping, on average."""
        said = sh(*self.inside(one, "ping", "-q", "-c", "40", "-i", "0.05", self.addresses[other]))
        found = re.search(r"= [\d.]+/([\d.]+)/", said)
        assert found is not None
        return float(found[1])

    def segments(self) -> tuple[int, int]:
        """TCP segments that all nodes have sent so far, and those among them sent again."""
        sent = again = 0
        for node in (HUB, *AGENTS, BEHIND):
            heads, figures = re.findall(r"^Tcp: (.*)$", sh(*self.inside(node, "cat", "/proc/net/snmp")), re.MULTILINE)
            tcp = dict(zip(heads.split(), map(int, figures.split()), strict=True))
            sent, again = sent + tcp["OutSegs"], again + tcp["RetransSegs"]
        return sent, again


@contextlib.contextmanager
def slow(net: Net) -> Iterator[list[str]]:
    """Make all links slow and lossy, by what this kernel has for it; says what was used, and what was not there."""
    remarks: list[str] = []
    netem = ("netem", "delay", f"{1000 * DELAY:g}ms", "loss", f"{100 * LOSS:g}%")
    egress = [net.inside(node, "tc", "qdisc", "add", "dev", "eth0", "root", *netem) for node in net.ports]
    if works(*egress[0]):
        for command in egress[1:]:
            sh(*command)
        remarks.append("delay and loss: tc netem on each node's interface")
        yield remarks
        for node in net.ports:
            sh(*net.inside(node, "tc", "qdisc", "delete", "dev", "eth0", "root"))
        return
    remarks.append(f"tc netem: not in this kernel ({platform.release()})")
    loss = _lose(net)
    remarks.append(f"loss: {loss}" if loss else "loss: by trials.slow_switch; neither nft nor iptables can")
    remarks.append("delay: trials.slow_switch, packet sockets in place of the bridge (beneath TCP; ping meets it, too)")
    ports = list(net.ports.values())
    for port in ports:
        net.ip(SWITCH, "link", "set", port, "nomaster")
    arguments = [
        str(Path(__file__).with_name("slow_switch.py")),
        "--delay",
        str(DELAY),
        "--loss",
        str(0.0 if loss else LOSS),
        *ports,
    ]
    process = start(net.inside(SWITCH, sys.executable, *arguments), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeFault("The slow switch must start.", f"exit code {process.wait()}", "See what it printed.")
        yield remarks
    finally:
        end([process])


def _lose(net: Net) -> str:
    """Let each node lose a share of what comes in; by what, or nothing if that is not possible."""
    drop = f"numgen random mod 1000 < {1000 * LOSS:.0f} drop"
    rules = f"table ip lose {{ chain in {{ type filter hook input priority 0; iifname eth0 {drop}; }}; }}"
    by_iptables = ("iptables", "-A", "INPUT", "-i", "eth0", "-m", "statistic", "--mode", "random")
    ways: dict[str, Callable[[str], bool]] = {
        "nft, random drop where packets come in": lambda node: works(*net.inside(node, "nft", "-f", "-"), given=rules),
        "iptables statistic, random drop where packets come in": lambda node: works(
            *net.inside(node, *by_iptables, "--probability", str(LOSS), "-j", "DROP")
        ),
    }
    for name, lose in ways.items():
        if all(lose(node) for node in (HUB, *AGENTS, BEHIND)):
            return name
    return ""


# --- processes ------------------------------------------------------------------------------------


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A process in a session of its own: Ctrl-C reaches this script alone, which ends the others."""
    return subprocess.Popen(command, start_new_session=True, **options)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End whoever still runs."""
    with undisturbed():
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def spent() -> tuple[float, float]:
    """Seconds of all processors so far: those that were busy, and those of them for processes ended here."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # without idle, and idle for a disk
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy, ours.ru_utime + ours.ru_stime


def run_nodes(
    commands: Mapping[str, Sequence[str]], folder: Path, meanwhile: Callable[[Callable[[], bool]], None] | None = None
) -> float:
    """Run a process for each node, until all have ended well; the share of processors that others had meanwhile.

    `meanwhile`: what is done while they run; it is given whether all of them do.
    """
    began, before = time.monotonic(), spent()
    folder.mkdir(parents=True)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = start(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        if meanwhile is not None:
            meanwhile(lambda: all(process.poll() is None for process in processes.values()))
        latest = time.monotonic() + PATIENCE
        while any(process.poll() is None for process in processes.values()) and time.monotonic() < latest:
            if any(process.poll() for process in processes.values()):
                break
            time.sleep(0.1)
        # Before the others are ended: who failed, or else who is not done.
        guilty = [name for name, process in processes.items() if process.poll()]
        guilty += [name for name, process in processes.items() if process.poll() is None]
    finally:
        end(list(processes.values()))
    if guilty:
        said = (folder / f"{guilty[0]}.log").read_text(errors="replace")[-600:]
        raise RuntimeFault("Every node must come to its end.", f"'{guilty[0]}' did not", f"It said: {said}")
    busy, ours = (now - then for now, then in zip(spent(), before, strict=True))
    return (busy - ours) / ((time.monotonic() - began) * (os.cpu_count() or 1))


# --- the federations ------------------------------------------------------------------------------


@dataclass
class Outcome:
    """One line of the table."""

    name: str
    links: str
    rtt: float
    seconds: list[float]  # of each round but the first, in which nodes are still starting
    again: str  # TCP segments sent again
    others: float  # share of this machine's time that other programs took
    equal: bool
    notes: list[str] = field(default_factory=list)


class Trial:
    """Recipes, certificates and baselines in a folder, and federations that are compared with them."""

    def __init__(self, folder: Path, net: Net) -> None:
        self._folder, self._net = folder, net
        self._certs = folder / "certs"
        self._hub = net.addresses[HUB]
        for name, text in RECIPES.items():
            self._recipe(name).write_text(text, "utf-8")
        certs = ("--certs", str(self._certs))
        sh(CODISTILL, "certs", "init", *certs)
        sh(CODISTILL, "certs", "hub", self._hub, *certs)
        for name in AGENTS:
            sh(CODISTILL, "certs", "agent", name, *certs)
        for name in RECIPES:
            out = str(folder / "simulation" / name)
            sh(CODISTILL, "run", str(self._recipe(name)), "--set", "runtime.kind=simulation", "--out", out, "--quiet")

    def _recipe(self, name: str) -> Path:
        return self._folder / f"{name}.toml"

    def _simulated(self, name: str) -> bytes:
        return (self._folder / "simulation" / name / "metrics.jsonl").read_bytes()

    def _simulated_under_a_hub(self) -> bytes:
        """Without the accuracy on an agent's own mix of classes, which tells its class counts: no hub is told it."""
        rows = [json.loads(line) for line in self._simulated("fedmd").splitlines()]
        told = [{key: value for key, value in row.items() if key != "own_accuracy"} for row in rows]
        return "".join(json.dumps(row) + "\n" for row in told).encode()

    def _hub_and_agents(self, *settings: str, behind: bool = False) -> dict[str, Sequence[str]]:
        """The command of each node; the last agent's behind NAT, if asked for."""
        net, recipe, address = self._net, str(self._recipe("fedmd")), f"{self._hub}:{PORT}"
        place = {name: name for name in AGENTS} | ({AGENTS[-1]: BEHIND} if behind else {})
        secure = ("--certs", str(self._certs / self._hub), "--quiet", *settings)
        commands = {HUB: net.inside(HUB, CODISTILL, "hub", recipe, "--listen", address, "--out", "run", *secure)}
        for name in AGENTS:
            secure = ("--certs", str(self._certs / name), "--state", f"agents/{name}")
            commands[name] = net.inside(place[name], CODISTILL, "join", recipe, "--hub", address, *secure)
        return commands

    def hub(self, links: str, *, behind: bool = False) -> Outcome:
        """A hub and its agents; the last of them behind NAT, if asked for."""
        net, folder = self._net, self._folder / f"fedmd-{links}{'-nat' if behind else ''}"
        commands = self._hub_and_agents(behind=behind)
        rtt, sent = net.round_trip(BEHIND if behind else AGENTS[-1], HUB), net.segments()
        others = run_nodes(commands, folder)
        equal = (folder / "run" / "metrics.jsonl").read_bytes() == self._simulated_under_a_hub()
        title = f"fedmd, a hub and {len(AGENTS)} agents" + (", one behind NAT" if behind else "")
        return Outcome(title, links, rtt, _seconds(folder / "run"), self._again(sent), others, equal)

    def ring(self, links: str) -> Outcome:
        """Peers on a ring; of each edge one end dials."""
        net, recipe = self._net, str(self._recipe("d_distillation"))
        folder = self._folder / f"d_distillation-{links}"
        commands = {}
        for name, following in zip(AGENTS, [*AGENTS[1:], AGENTS[0]], strict=True):
            where = ("--listen", f"{net.addresses[name]}:{PORT}")
            dialled = ("--peer", f"{following}={net.addresses[following]}:{PORT}")
            own = ("--certs", str(self._certs / name), "--state", f"agents/{name}", "--quiet")
            commands[name] = net.inside(name, CODISTILL, "join", recipe, *where, *dialled, *own)
        rtt, sent = net.round_trip(AGENTS[0], AGENTS[1]), net.segments()
        others = run_nodes(commands, folder)
        lines = self._simulated("d_distillation").splitlines(keepends=True)
        different = [
            name
            for name in AGENTS
            if (folder / "agents" / name / "metrics.jsonl").read_bytes()
            != b"".join(line for line in lines if json.loads(line)["agent"] == name)
        ]
        slowest = [max(each) for each in zip(*(_seconds(folder / "agents" / name) for name in AGENTS), strict=True)]
        title = f"d_distillation, a ring of {len(AGENTS)} peers"
        notes = [f"other figures than the simulation: {', '.join(different)}"] if different else []
        return Outcome(title, links, rtt, slowest, self._again(sent), others, not different, notes)

    def cut(self) -> tuple[bool, str]:
        """An agent's machine is cut off in the middle of a run, and comes back; whether that went well, in words."""
        folder, gone = self._folder / "fedmd-cut", AGENTS[-1]
        settings = (f"network.lease={LEASE}", "network.grace=0", "protocol.rounds=120")
        noticed: list[float] = []

        def rows() -> list[dict[str, Any]]:
            path = folder / "run" / "metrics.jsonl"
            lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
            return [row for row in map(json.loads, lines) if row["agent"] == gone]

        def disturb(all_run: Callable[[], bool]) -> None:
            self._wait(lambda: len(rows()) >= 3, all_run, "the third round")
            self._net.ip(SWITCH, "link", "set", self._net.ports[gone], "down")
            began, before = time.monotonic(), len(rows())
            self._wait(lambda: any(not row["present"] for row in rows()[before:]), all_run, f"a round without {gone}")
            noticed.append(time.monotonic() - began)
            self._net.ip(SWITCH, "link", "set", self._net.ports[gone], "up")
            self._wait(lambda: rows()[-1]["present"], all_run, f"{gone}, back again")
            noticed.append(time.monotonic() - began - noticed[0])

        commands = self._hub_and_agents(*(part for setting in settings for part in ("--set", setting)))
        run_nodes(commands, folder, disturb)
        after, back = noticed
        good = after <= LEASE + LATER
        return good, (
            f"{gone} cut off, lease {LEASE} s: the first round without it was done after {after:.1f} s"
            f"{'' if good else ', TOO LATE'}; {back:.1f} s after its network was back it was in a round again"
        )

    @staticmethod
    def _wait(holds: Callable[[], bool], all_run: Callable[[], bool], what: str) -> None:
        latest = time.monotonic() + PATIENCE / 3
        while not holds():
            if time.monotonic() > latest or not all_run():
                raise RuntimeFault("The trial must go on.", f"no sign of {what}", "See the files of --keep.")
            time.sleep(0.05)

    def _again(self, before: tuple[int, int]) -> str:
        sent, again = (now - then for now, then in zip(self._net.segments(), before, strict=True))
        return f"{again} of {sent}"


def _seconds(folder: Path) -> list[float]:
    lines = (folder / "times.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["seconds"] for line in lines][1:]


# --- the whole ------------------------------------------------------------------------------------


def check_machine(needs: Sequence[str] = ("ip", "tc", "ping")) -> None:
    """What a trial in namespaces cannot do without."""
    missing = [name for name in needs if shutil.which(name) is None]
    if missing or sys.platform != "linux":
        raise NetworkError(
            f"The trial needs Linux with {', '.join(needs)}.",
            f"no {', '.join(missing) or 'Linux'}",
            "apt-get install iproute2 iputils-ping nftables",
        )
    if os.geteuid():
        raise NetworkError("The trial needs root.", f"user {os.geteuid()}", "Run it by sudo.")
    probe = f"codistill-{os.getpid()}-probe"
    try:
        sh("ip", "netns", "add", probe)
        sh("ip", "-n", probe, "link", "add", "bridge", "type", "bridge")
        sh("ip", "-n", probe, "link", "add", "one", "type", "veth", "peer", "other")
    finally:
        works("ip", "netns", "delete", probe)


def trial(console: Console, folder: Path) -> bool:
    """All federations; True if the figures of all are those of the simulation."""
    began = time.monotonic()
    console.print(
        f"Linux {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
        f"{len(AGENTS) + 1} nodes, {1000 * DELAY:g} ms and {100 * LOSS:g} % loss each way"
    )
    outcomes: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        console.print(f"{outcome.name}, {outcome.links} links: done after {time.monotonic() - began:.0f} s")
        outcomes.append(outcome)

    with Net() as net:
        ours = Trial(folder, net)
        console.print(f"certificates and the simulation's figures: done after {time.monotonic() - began:.0f} s")
        done(ours.hub("plain"))
        done(ours.ring("plain"))
        noticed, said = ours.cut()  # before the switch is replaced
        console.print(said)
        with slow(net) as remarks:
            for remark in remarks:
                console.print(remark)
            done(ours.hub("slow"))
            done(ours.ring("slow"))
            if net.nat:
                reached = works(*net.inside(HUB, "ping", "-c", "1", "-W", "1", net.addresses[BEHIND]))
                console.print(f"NAT: {net.nat}; the hub {'REACHES' if reached else 'cannot reach'} the agent behind it")
                done(ours.hub("slow", behind=True))
            else:
                console.print("NAT: left out, neither nft nor iptables can masquerade here")
    show(console, outcomes)
    return noticed and all(outcome.equal for outcome in outcomes)


def show(console: Console, outcomes: Sequence[Outcome]) -> None:
    """The table."""
    table = Table(
        title="seconds: median over rounds 2 to 8; 'sent again': TCP segments; 'others': CPU that other programs took"
    )
    for heading in ("federation", "links", "ping", "seconds per round", "sent again", "others", "equal"):
        table.add_column(heading, justify="left" if heading in ("federation", "links", "equal") else "right")
    for outcome in outcomes:
        low, middle, high = min(outcome.seconds), statistics.median(outcome.seconds), max(outcome.seconds)
        table.add_row(
            outcome.name, outcome.links, f"{outcome.rtt:.2f} ms", f"{middle:.2f} ({low:.2f} to {high:.2f})",
            outcome.again, f"{100 * outcome.others:.0f} %", "yes" if outcome.equal else "NO",
        )  # fmt: skip
    console.print(table)
    for outcome in outcomes:
        for note in outcome.notes:
            console.print(f"{outcome.name}, {outcome.links} links: {note}")


def main() -> int:
    """0 only if all figures are equal; 77 if this machine cannot run the trial."""
    return run_trial(str(__doc__), trial, check_machine)


def run_trial(about: str, trial: Callable[[Console, Path], bool], check: Callable[[], None]) -> int:
    """The exit code of a trial in namespaces, which gets a folder of its own."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="a new folder for what the nodes wrote (default: none)"
    )
    options = parser.parse_args()
    # Whoever ends this script lets it tidy up first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        check()
    except (CodistillError, OSError) as error:
        print(f"not run: {error}", file=sys.stderr)
        return NOT_RUN
    try:
        with contextlib.ExitStack() as stack:
            folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="codistill-")))
            folder.mkdir(parents=True, exist_ok=options.keep is None)
            return 0 if trial(Console(width=120, highlight=False), folder.resolve()) else 1
    except CodistillError as error:
        print(f"error: {error.must}\nfound: {error.found}\nto do: {error.do}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
