"""A siege: strangers, a revoked member and four valid ones attack a hub at the same time, for ten minutes.

    python -m trials.siege --seconds 600 [--picture siege.png]

Real commands in processes of their own, over loopback with mutual TLS, the hub with `ulimit -n 1024`. First it is
quiet for a while, then all attack (trials/siege_attackers.py), and after some time the hub is killed and started again
in the middle of it; the time after the kill counts from the first round of the new hub. Last, 20 processes take the
processors, 2,000 connections of a stranger stop in the middle of their handshakes, and an agent comes five times. The
trial passes if the three honest agents are in every round, there are rounds in each part (quiet, attacked, after the
kill), members that send too much are excluded by name and no honest agent is, the hub holds no more memory than its
bounds allow, its log stays small, nothing but the kill has ended it, and the agent that came is welcomed each time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from trials.siege_attackers import HELLOS
from trials.storm import rows_of

RECIPE = """
seed = 0
[data]
name = "digits"
public = 100
test_samples = 50
[[agents]]
name = "north"
learner = "logistic"
[[agents]]
name = "south"
learner = "naive_bayes"
[[agents]]
name = "west"
learner = "logistic"
[[agents]]
name = "member"
learner = "naive_bayes"
[[agents]]
name = "deaf"
learner = "naive_bayes"
[[agents]]
name = "joiner"
learner = "naive_bayes"
[[agents]]
name = "drip"
learner = "naive_bayes"
[[agents]]
name = "revoked"
learner = "naive_bayes"
[[agents]]
name = "newcomer"
learner = "naive_bayes"
[protocol]
name = "fedmd"
rounds = 1000000
[evaluation]
alone = false
every = 100
[network]
lease = 5
deadline = 5
quorum = 0.3
patience = 5
linger = 0
"""
HONEST = ("north", "south", "west")
ATTACKERS = ("strangers", "revoked", "member", "deaf", "joiner", "drip")
MEMBERS = ("member", "deaf", "joiner", "drip", "revoked", "newcomer")  # of the recipe, besides the honest ones
EXCLUDED = ("member", "joiner")  # for what they send, before the kill and after it
CODISTILL = [sys.executable, "-m", "codistill"]
QUIET = 0.1  # share of the time before the attack
KILLED = 0.7  # share of the time after which the hub is killed
MEMORY = 250.0  # megabytes that the hub may grow by: four messages for each of eight agents, and what Python keeps
LOG = 1 << 16  # bytes of its log per ten minutes, besides a line for each round
START = 120.0  # seconds until the first round
BUSY, VISITS, WELCOME = 20, 5, 20.0  # processes that compute; how often an agent comes, and seconds until it is welcome


@dataclass
class Siege:
    """The federation, its attackers, and what was measured of the hub."""

    folder: Path
    seconds: float
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    curve: list[tuple[float, int, float, int]] = field(default_factory=list)  # seconds, rounds, megabytes, descriptors
    marks: dict[str, float] = field(default_factory=dict)
    visits: list[float | None] = field(default_factory=list)  # seconds until the agent that came was welcome
    load: float = 0.0
    besieged: int = 0  # rounds before that: with 20 such processes beside them, agents may miss their deadline

    def __post_init__(self) -> None:
        (self.folder / "recipe.toml").write_text(RECIPE, "utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def run(self) -> None:
        """From the certificates to the end of the siege."""
        self._make_certificates()
        self._start_hub()
        for name in HONEST:
            self._spawn(name, *CODISTILL, "join", "recipe.toml", "--hub", f"127.0.0.1:{self.port}",
                        "--certs", f"certs/{name}")  # fmt: skip
        self._wait_for_rounds(1)
        began = time.monotonic()
        while (now := time.monotonic() - began) < self.seconds:
            if now > QUIET * self.seconds and "attack" not in self.marks:
                self.marks["attack"] = now
                for kind in ATTACKERS:
                    self._spawn(kind, sys.executable, "-m", "trials.siege_attackers", kind, str(self.folder),
                                str(self.port))  # fmt: skip
            if now > KILLED * self.seconds and "killed" not in self.marks:
                self.marks["killed"] = now
                self.processes["hub"].kill()
                self.processes["hub"].wait()
                done = self._rounds()
                self._start_hub()
                self._wait_for_rounds(done + 1)
                self.marks["back"] = time.monotonic() - began
                self.seconds += self.marks["back"] - now  # what it takes to start is not part of the time after it
            self._measure(now)
            for name in ("hub", *HONEST):
                if self.processes[name].poll() is not None:
                    raise SystemExit(f"'{name}' ended with {self.processes[name].returncode}: see {self.folder}")
            time.sleep(1.0)

    def crowd(self) -> None:
        """The processors are busy, 2,000 handshakes are not finished, and an agent comes again and again."""
        self.besieged = self._rounds()
        for kind in ATTACKERS:
            self._stop(kind)
        attacker = "trials.siege_attackers"
        crowd = [f"busy-{number}" for number in range(BUSY)]
        for name in crowd:
            self._spawn(name, sys.executable, "-m", attacker, "busy", str(self.folder), str(self.port))
        self._spawn("hellos", sys.executable, "-m", attacker, "hellos", str(self.folder), str(self.port))
        end = time.monotonic() + START
        # Until they compute, and do not only start.
        while self.count("hellos").get("connections", 0) < HELLOS or min(map(self._processor_time, crowd)) < 1:
            if time.monotonic() > end:
                raise SystemExit(f"fewer than {HELLOS} connections after {START:g} s: see {self.folder / 'hellos.log'}")
            time.sleep(0.5)
        self.load = os.getloadavg()[0]
        self.visits = [self._visit() for _ in range(VISITS)]
        self._measure(self.seconds)
        for name in (*crowd, "hellos"):
            self._stop(name)

    def _visit(self) -> float | None:
        """Seconds until the hub welcomes an agent that connects now; None: not in time."""
        from codistill.certs.credentials import Credentials
        from codistill.network.frames import FrameKind, Presence, ReceivedFrame, Turn
        from codistill.network.options import Network
        from codistill.network.transport import Transport
        from codistill.wire.codec import encode

        request = encode(
            {}, {"json": json.dumps({"do": "hello", **json.loads((self.folder / "hello.json").read_text())})}
        )
        own = Credentials(self.folder / "certs" / "newcomer", "agent")
        began = time.monotonic()
        agent = Transport("newcomer", ("hub",), Network(), own, dial={"hub": f"127.0.0.1:{self.port}"})
        try:
            while time.monotonic() - began < WELCOME:
                event = agent.take(0.1)
                if isinstance(event, Presence) and event.here:
                    agent.send(("hub",), FrameKind.HELLO, Turn(0), request)
                if isinstance(event, ReceivedFrame):
                    return time.monotonic() - began
            return None
        finally:
            agent.close(0.1)

    def count(self, kind: str) -> dict[str, int]:
        """What an attacker has done so far."""
        path = self.folder / f"{kind}.count"
        return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}

    def _processor_time(self, name: str) -> float:
        """Seconds of the processors that a process has used."""
        fields = Path(f"/proc/{self.processes[name].pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _stop(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def _make_certificates(self) -> None:
        self._call("certs", "init")
        self._call("certs", "hub", "127.0.0.1")
        for name in (*HONEST, *MEMBERS):
            self._call("certs", "agent", name)
        shutil.copytree(self.folder / "certs" / "revoked", self.folder / "revoked")
        self._call("certs", "revoke", "revoked")
        from codistill.experiments.networked import read_agent_file
        from codistill.network.terms import hello_of

        own = read_agent_file(self.folder / "recipe.toml", "member")
        (self.folder / "hello.json").write_text(json.dumps(hello_of(own.agent, own.public)), "utf-8")

    def _start_hub(self) -> None:
        self._spawn("hub", *CODISTILL, "hub", "recipe.toml", "--listen", f"127.0.0.1:{self.port}",
                    "--certs", "certs/127.0.0.1", "--out", "run", "--log-format", "json")  # fmt: skip

    def _spawn(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            root = Path(__file__).parents[1]
            places = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
            self.processes[name] = subprocess.Popen(
                command, cwd=self.folder, stdout=log, stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": places},
                preexec_fn=None if name == "hellos" else _as_a_service,  # it holds 2,000 connections
            )  # fmt: skip

    def _call(self, *command: str) -> None:
        done = subprocess.run([*CODISTILL, *command], cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stderr}")

    def _wait_for_rounds(self, count: int) -> None:
        end = time.monotonic() + START
        while self._rounds() < count:
            if time.monotonic() > end or self.processes["hub"].poll() is not None:
                raise SystemExit(f"no round after {START:g} s: see {self.folder / 'hub.log'}")
            time.sleep(0.2)

    def _rounds(self) -> int:
        """The last round of the metrics, without reading all of them."""
        try:
            with (self.folder / "run" / "metrics.jsonl").open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 4096))
                lines = file.read().rpartition(b"\n")[0].splitlines()
            return int(json.loads(lines[-1])["round"]) if lines else 0
        except (OSError, ValueError):
            return 0

    def _measure(self, now: float) -> None:
        status = Path(f"/proc/{self.processes['hub'].pid}/status")
        try:
            fields = dict(line.split(":", 1) for line in status.read_text("utf-8").splitlines())
            memory = int(fields["VmRSS"].split()[0]) / 1024
            descriptors = len(os.listdir(status.parent / "fd"))
        except (OSError, KeyError):
            return
        self.curve.append((now, self._rounds(), memory, descriptors))
        if sys.stderr.isatty():
            print(f"\r{now:.0f} s: round {self.curve[-1][1]}, {memory:.0f} MB".ljust(60), end="", file=sys.stderr)

    def end(self) -> None:
        """Leave nothing behind."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def rate(self, first: float, last: float) -> float:
        """Rounds per second between two times."""
        part = [(at, rounds) for at, rounds, *_ in self.curve if first <= at <= last]
        return (part[-1][1] - part[0][1]) / max(1e-9, part[-1][0] - part[0][0]) if len(part) > 1 else 0.0


def _as_a_service() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))


def draw(siege: Siege, path: Path) -> None:
    """Rounds per second and memory of the hub over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = [at for at, *_ in siege.curve]
    rates = [siege.rate(at - 5, at + 5) for at in times]
    figure, axes = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5), layout="constrained")
    axes[0].plot(times, rates, color="#1f6f8b")
    axes[0].set(ylabel="rounds per second", ylim=(0, None), title="A hub under siege")
    axes[1].plot(times, [memory for _, _, memory, _ in siege.curve], color="#b3541e")
    axes[1].set(xlabel="seconds", ylabel="memory of the hub, MB", ylim=(0, None))
    for name, at in siege.marks.items():
        for axis in axes:
            axis.axvline(at, color="grey", linestyle=":")
        axes[0].annotate(f" {name}", (at, 0.02), xycoords=("data", "axes fraction"), color="grey")
    figure.savefig(path, dpi=120)


def main() -> int:
    """Besiege, and say how the hub has stood it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--folder", type=Path, help="kept afterwards (default: a temporary one)")
    parser.add_argument("--picture", type=Path, help="where to draw rounds per second and memory over time")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="siege-"))
    folder.mkdir(parents=True, exist_ok=True)
    siege = Siege(folder.resolve(), options.seconds)
    try:
        siege.run()
        siege.crowd()
    finally:
        siege.end()
    if options.picture:
        draw(siege, options.picture)
    code = report(siege)
    if options.folder is None and not code:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"folder: {siege.folder}")
    return code


def report(siege: Siege) -> int:
    """What happened, in figures; 0 if all that must hold has held."""
    rows = rows_of(siege.folder / "run")
    missed = [row for row in rows if row["agent"] in HONEST and not row["present"] and row["round"] <= siege.besieged]
    rounds = {row["round"] for row in rows}
    gapless = rounds == set(range(1, len(rounds) + 1)) and len(rows) == len((*HONEST, *MEMBERS)) * len(rounds)
    attack, killed, back = siege.marks["attack"], siege.marks["killed"], siege.marks["back"]
    rates = {
        "quiet": siege.rate(0, attack), "attacked": siege.rate(attack, killed),
        "after the kill": siege.rate(back, siege.seconds),
    }  # fmt: skip
    before = max(memory for at, _, memory, _ in siege.curve if at < attack)
    most = max(memory for at, _, memory, _ in siege.curve)
    lines = (siege.folder / "hub.log").read_text("utf-8").splitlines()
    log = sum(len(line) for line in lines if '"event": "round ended"' not in line)  # those are honest ones
    allowed = LOG * max(1.0, siege.seconds / 600)
    print(f"\n{len(rounds)} rounds in {siege.seconds:.0f} s; every one counted once: {'yes' if gapless else 'NO'}")
    print(f"rounds that honest agents missed: {len(missed)}")
    print(f"rounds per second: {', '.join(f'{part} {rate:.1f}' for part, rate in rates.items())}")
    print(f"first round after the kill: {back - killed:.0f} s later")
    excluded = [name for line in lines for name in (*HONEST, *MEMBERS) if f"'{name}' is excluded from the rest" in line]
    counts = ", ".join(f"{name} ({excluded.count(name)} times)" for name in dict.fromkeys(excluded))
    print(f"excluded: {counts or 'nobody'}")
    print(f"memory of the hub: quiet {before:.0f} MB, at most {most:.0f} MB (allowed: {before + MEMORY:.0f})")
    print(f"descriptors of the hub: at most {max(count for *_, count in siege.curve)} of 1024")
    print(f"log of the hub, without a line for each round: {log:,} bytes (allowed: {allowed:,.0f})")
    welcome = [each for each in siege.visits if each is not None]
    times = ", ".join("-" if each is None else f"{each:.1f}" for each in siege.visits)
    print(f"2,000 half handshakes, load {siege.load:.0f}: welcome {len(welcome)} of {VISITS} times, after {times} s")
    for kind in (*ATTACKERS, "hellos"):
        done = siege.count(kind)
        print(f"{kind}: {', '.join(f'{count:,} {what}' for what, count in done.items()) or 'nothing'}")
    fair = not {*HONEST} & {*excluded} and all(excluded.count(name) == 2 for name in EXCLUDED)
    going = all(rate > 0 for rate in rates.values())
    going = going and len(welcome) == VISITS
    return 0 if gapless and not missed and going and fair and most <= before + MEMORY and log <= allowed else 1


if __name__ == "__main__":
    raise SystemExit(main())
