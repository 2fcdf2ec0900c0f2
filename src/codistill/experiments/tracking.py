"""Runs in a tracker: MLflow, TensorBoard, Weights & Biases.

`track` makes an observer. What it sees of a run goes, line by line, to a process of its own, which alone imports the
tracker's library and talks to its server. So a tracker that is slow, away or broken neither changes nor stops a run;
and when the process of a run is killed, this one still marks the run as killed. Further trackers are further classes
derived from `Tracker`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from codistill.core.errors import RecipeError
from codistill.core.files import write_atomically
from codistill.core.settings import Settings, check_settings, from_table, setting, takes_fields
from codistill.core.text import flat

if TYPE_CHECKING:
    from codistill.results.records import RoundEnded, Row, RunFinished, RunStarted
    from codistill.results.summary import Summary

# Each imports what takes time, such as numpy, only when it is called: the process that follows a run needs none of it.

# --- The table [track] of a recipe, and `codistill.track`.

MLFLOW, TENSORBOARD, WANDB = "mlflow", "tensorboard", "wandb"
MOST_CURVES = 40  # agents with curves of their own; of more, quantiles take their place
# Of each tracker: the module that it writes with, and which settings it takes besides those that all take.
_LIBRARIES = {MLFLOW: "mlflow", TENSORBOARD: "tensorboardX", WANDB: "wandb"}
_TAKES = {MLFLOW: ("uri",), TENSORBOARD: ("folder",), WANDB: ("uri", "folder", "offline")}


@dataclass(frozen=True)
class Track(Settings):
    """[track]: the tracker that a run is shown in, besides its own folder."""

    to: str = setting(help="the tracker: each is an extra of its name", choices=tuple(_LIBRARIES))
    experiment: str | None = setting(
        None, "MLflow's experiment, the project in W&B, a folder of TensorBoard; unset: codistill, or a sweep's name"
    )
    name: str | None = setting(None, "the run's name; unset: that of its folder, or else the protocol's")
    uri: str | None = setting(
        None, "MLflow's server or database, such as sqlite:///runs.db, or the server of W&B; unset: the library's own"
    )
    folder: str | None = setting(
        None, "where TensorBoard's or W&B's files are; unset: tensorboard, or wandb, in the current folder"
    )
    offline: bool = setting(False, "W&B: keep the run in files, which 'wandb sync' sends later")
    params: dict[str, str] = setting(
        factory=dict, help="further settings to show; a sweep adds the values that its runs differ in"
    )

    def __post_init__(self) -> None:
        check_settings(self, "track")
        default = {each.name: each.default for each in fields(self)}
        idle = [
            name
            for name in dict.fromkeys(name for names in _TAKES.values() for name in names)
            if name not in _TAKES[self.to] and getattr(self, name) != default[name]
        ]
        if idle:
            takers = " and ".join(to for to in _TAKES if idle[0] in _TAKES[to])
            raise RecipeError(f"[track] {idle[0]} is for {takers}.", f"to = '{self.to}'", f"Remove {idle[0]}.")


def absolute(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The table [track] with paths that do not depend on the current folder: `folder` is that of the recipe."""
    paths = {key: table[key] for key in ("folder", "uri") if isinstance(table.get(key), str)}
    for key, path in paths.items():
        head, name = ("sqlite:///", path[10:]) if path.startswith("sqlite:///") else ("", path)
        if "://" not in name and name != ":memory:":
            paths[key] = head + str(folder / name)
    return {**table, **paths}


@takes_fields(Track, leave_out=("to",))
def track(to: str, **options: Any) -> Tracking:
    """An observer that shows a run in a tracker: "mlflow", "tensorboard" or "wandb"; see docs/how-to/observe.md.

    Pass it to `run(observers=[...])`. A run that is resumed in its `folder` goes on in the same tracked run.
    """
    return Tracking(from_table(Track, absolute({"to": to, **options}, Path.cwd()), "track"))


# --- The observer.

_PATIENCE = 60.0  # seconds that the end of a run waits for its tracker


class Tracking:
    """Sends what it sees of a run to the process that follows it; `settings`: of the recipe, beside the run's own."""

    def __init__(self, track: Track, settings: Mapping[str, Any] | None = None) -> None:
        library = _LIBRARIES[track.to]
        found = importlib.util.find_spec(library)
        if found is None or found.origin is None:  # a folder of this name is no library
            raise RecipeError(
                f"The tracker {track.to} needs the library {library}.",
                "it is not installed",
                f"Install it: pip install 'codistill[{track.to}]'.",
            )
        self._track, self._settings = track, dict(settings or {})
        self._process: subprocess.Popen[str] | None = None
        self._warned = False
        self.page: Path | None = None  # the report that it has written in the run's folder

    def started(self, record: RunStarted) -> None:
        """Open the tracked run; of a run that is resumed, the one that was begun."""
        self._warned, self.page, self._folder = False, None, record.folder
        name = self._track.name or (record.folder.resolve().name if record.folder else record.protocol)
        folder = None if record.folder is None else str(record.folder.resolve())
        with self._guarded():
            self._process = _start()
            self._send("open", asdict(self._track), name, folder, record.done)
            self._send("settings", as_texts({**record.settings, **self._settings, **self._track.params}))
            for t, rows in groupby(record.rows, key=itemgetter("round")):
                self._send("row", t, figures(list(rows)), time.time())

    def round_ended(self, record: RoundEnded) -> None:
        """Send the figures of the round."""
        with self._guarded():
            more = {"round/seconds": record.seconds, "round/events": float(len(record.events))}
            self._send("row", record.round, figures(record.rows) | more, time.time())
            self._listen()

    def finished(self, record: RunFinished) -> None:
        """Send the figures of all rounds together, the report and how the run has ended, and wait until all is sent."""
        outcome = "interrupted" if record.by_operator else record.outcome
        said = {"outcome": f"{outcome} after {record.done} of {record.rounds} rounds"}
        with ExitStack() as temporary:
            with self._guarded():
                if record.summary is not None and record.done:
                    said |= self._send_results(record.summary(), record, temporary)
            with self._guarded():
                self._send("end", outcome, said)
            with self._guarded():
                self._close()

    def _send_results(self, summary: Summary, record: RunFinished, temporary: ExitStack) -> dict[str, str]:
        self._send("row_at_end", record.done, final_figures(summary), time.time())
        against = summary.against_alone()
        if record.outcome != "failed":
            from codistill.experiments.run import REPORT, report_on
            from codistill.report.pages import write_report

            if self._folder is None:
                folder = temporary.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
                files = [write_report(summary, Path(folder) / REPORT)]
            else:
                report_on(self._folder)
                self.page = self._folder / REPORT
                files = [path for name in (REPORT, "recipe.toml") if (path := self._folder / name).exists()]
            for path in files:
                self._send("artefact", str(path.resolve()))
        return {} if against is None else {"result": against.sentence(), "worst": against.losses(1)}

    def _send(self, method: str, *values: Any) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([method, *values], default=str) + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        """Warn of what the process says, once: of a server that is away there would be something in every round."""
        said = b""
        if self._process is not None and self._process.stdout is not None:
            with suppress(BlockingIOError):
                while more := os.read(self._process.stdout.fileno(), 4096):
                    said += more
        for line in said.decode(errors="replace").splitlines():
            self._warn(line)

    def _close(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            with suppress(OSError):  # it has ended before
                process.stdin.close()  # type: ignore[union-attr]
            process.wait(_PATIENCE)
            if process.returncode:
                self._warn(f"its process ended with exit code {process.returncode}")
        except subprocess.TimeoutExpired:
            self._warn(f"its last figures were not sent within {_PATIENCE:g} s")
        finally:
            process.kill()
            process.wait()
            self._listen()
            self._process = None
            if process.stdout is not None:
                process.stdout.close()

    def _guarded(self) -> _Guard:
        return _Guard(self._warn)

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            do = "The run goes on without it; its folder and its report have everything."
            print(f"warning: the tracker {self._track.to} fails: {problem}. {do}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Guard:
    """Turns any error into a warning: a tracker never stops a run."""

    warn: Callable[[str], None]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self.warn(_shown(error))
        return isinstance(error, Exception)


def _shown(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")


def _start() -> subprocess.Popen[str]:
    """The process that follows a run. Signals that end the run do not reach it."""
    # The makers of the libraries are sent nothing, and servers that do not answer are given up earlier than by default.
    defaults = {
        "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    }  # fmt: skip
    package = str(Path(__file__).parents[2])  # also where a script has put it on its path
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "codistill.experiments.tracking"],  # -P: nothing from the current folder
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env={**defaults, **os.environ, "PYTHONPATH": paths},
        start_new_session=True,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process


# --- The figures of a round, and of all together: bounded, however many agents there are.


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Scores and measures of the agents in a round, with their mean and the worst; bytes, steps and who was there."""
    from codistill.results.records import ROW_KEYS
    from codistill.results.scores import PREFIXES, find_score

    by_key: dict[str, dict[str, float]] = {}
    for row in rows:
        for key in row.keys() - ROW_KEYS:
            by_key.setdefault(key, {})[row["agent"]] = float(row[key])
    honest = {row["agent"] for row in rows if not row.get("lies")}
    found: dict[str, float] = {"agents/present": float(sum(bool(row["present"]) for row in rows))}
    for key in sorted(by_key):
        prefix = max((each for each in PREFIXES if key.startswith(each)), key=len)
        score = find_score(key.removeprefix(prefix))
        greater = None if score is None else score.greater_is_better
        found |= _spread(key, by_key[key], honest, greater, many=len(rows) > MOST_CURVES)
    found |= {f"bytes/{way}": float(sum(row[way] for row in rows)) for way in ("sent", "received")}
    for key in ("steps", "exchanges"):
        if counts := [row[key] for row in rows if key in row and row["present"]]:
            found[f"mean/{key}"] = fmean(counts)
    times = [row["time"] for row in rows if "time" in row]
    return found | ({"round/clock": float(max(times))} if times else {})


def final_figures(summary: Summary) -> dict[str, float]:
    """What each agent reaches alone, and its gain, on the common test set and on its own data."""
    from codistill.results.agents import counted_lines

    found: dict[str, float] = {}
    for score in summary.shown_scores:
        lines = summary.lines(score)
        counted = {line.name for line in counted_lines(lines)}
        measured = {} if summary.by_own else {score.name: lines}
        for key, some in {**measured, f"own_{score.name}": [line.on_own_data for line in lines]}.items():
            for what, greater in (("alone", score.greater_is_better), ("gain", True)):
                values = {line.name: value for line in some if (value := getattr(line, what)) is not None}
                found |= _spread(f"{what}_{key}", values, counted, greater, many=len(lines) > MOST_CURVES)
    against = summary.against_alone()
    if against is not None:
        found |= {"agents/better_than_alone": len(against.better), "agents/worse_than_alone": len(against.worse)}
    return found


def _spread(
    key: str, values: Mapping[str, float], counted: set[str], greater: bool | None, *, many: bool
) -> dict[str, float]:
    """The values of the agents, or quantiles of many; the mean and, if it is known which way is better, the worst."""
    known = [value for name, value in values.items() if name in counted]
    found = {} if many else {f"{key}/{name}": value for name, value in values.items()}
    if known:
        found[f"mean/{key}"] = fmean(known)
        if greater is not None:
            found[f"worst/{key}"] = math.nan if any(map(math.isnan, known)) else (min if greater else max)(known)
    if many and len(known) > 1 and all(map(math.isfinite, known)):
        tenths = quantiles(known, n=10, method="inclusive")
        found |= {f"quantile_10/{key}": tenths[0], f"median/{key}": tenths[4], f"quantile_90/{key}": tenths[8]}
    return found


def as_texts(tables: Mapping[str, Any]) -> dict[str, str]:
    """Nested tables as texts by dotted keys; lists of tables by number."""
    values = {name: value for name, value in flat(dict(tables)) if name and value != {}}
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}


# --- What every tracker does with a run, in the process that follows it; and the three.

_LONGEST = 500  # letters of a setting
_MOST_SETTINGS = 500


class Tracker(ABC):
    """One run in a tracker. All figures have the number of the round as their step."""

    id: str  # by which the run is found again
    last = 0  # the newest round that it already has

    @abstractmethod
    def __init__(self, track: Track, name: str, id: str | None, done: int) -> None:
        """Open a new run or the one with this `id`, if it is there; then `done` rounds of it are not done again."""

    @abstractmethod
    def settings(self, settings: Mapping[str, str]) -> None:
        """Show what the run is run with."""

    @abstractmethod
    def row(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Add figures; `at`: the time, in seconds since 1970."""

    @abstractmethod
    def artefact(self, path: Path) -> None:
        """Keep a copy of a file."""

    @abstractmethod
    def end(self, outcome: str, said: Mapping[str, str]) -> None:
        """Mark the run as "complete", "stopped", "interrupted", "failed" or "killed", with sentences."""


def _plain(key: str) -> str:
    """A name that every tracker takes: names of agents may have a plus sign."""
    return re.sub(r"[^\w.\-: /]", "_", key.replace("+", "plus"))[:250]


class MLflow(Tracker):
    """A run of an experiment: metrics by step, parameters, tags, artefacts."""

    _STATUS: ClassVar = {"failed": "FAILED", "interrupted": "KILLED", "killed": "KILLED"}

    def __init__(self, track: Track, name: str, id: str | None, done: int) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self._client = client = MlflowClient(tracking_uri=track.uri)
        if id is not None:
            with suppress(MlflowException):  # it was removed there
                run = client.get_run(id)
                if run.info.lifecycle_stage == "active":
                    client.update_run(id, status="RUNNING")
                    self.id, self.last = id, int(run.data.metrics.get("round/number", 0))
                    return
        title = track.experiment or "codistill"
        experiment = client.get_experiment_by_name(title)
        place = client.create_experiment(title) if experiment is None else experiment.experiment_id
        self.id = client.create_run(place, run_name=name, tags={"mlflow.source.name": "codistill"}).info.run_id

    def settings(self, settings: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        there = self._client.get_run(self.id).data.params  # which MLflow does not change
        new = [Param(_plain(key), value) for key, value in settings.items() if _plain(key) not in there]
        for part in _parts(new, 100):
            self._client.log_batch(self.id, params=part)

    def row(self, step: int, values: Mapping[str, float], at: float) -> None:
        from mlflow.entities import Metric

        made = [Metric(_plain(key), value, int(1000 * at), step) for key, value in values.items()]
        # At last the number: once it is there, all is.
        for part in _parts([*made, Metric("round/number", step, int(1000 * at), step)], 1000):
            self._client.log_batch(self.id, metrics=part)

    def artefact(self, path: Path) -> None:
        self._client.log_artifact(self.id, str(path))

    def end(self, outcome: str, said: Mapping[str, str]) -> None:
        named = {f"codistill.{key}": text for key, text in said.items()}
        description = "\n\n".join(said[key] for key in ("outcome", "result") if key in said)
        for key, text in {**named, "mlflow.note.content": description}.items():
            self._client.set_tag(self.id, key, text)
        self._client.set_terminated(self.id, self._STATUS.get(outcome, "FINISHED"))


def _parts(values: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (values[start : start + most] for start in range(0, len(values), most))


class TensorBoard(Tracker):
    """A folder of event files: scalars by step, texts, and the table of hyper-parameters."""

    def __init__(self, track: Track, name: str, id: str | None, done: int) -> None:
        from tensorboardX import SummaryWriter

        self._params = track.params  # by these alone, if there are any, the table of hyper-parameters compares runs
        if id is not None and Path(id).is_dir():
            self.id, self.last = id, done
            # Rounds that are done again take the place of those from here on.
            self._writer = SummaryWriter(id, purge_step=done + 1, filename_suffix=_SUFFIX)
            return
        stem = Path(track.folder or "tensorboard").absolute() / (track.experiment or "codistill")
        number, place = 1, stem / name
        stem.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                place.mkdir(parents=True)  # of this run alone, also where several begin at once
                break
            except FileExistsError:
                number += 1
                place = stem / f"{name}-{number}"
        self.id, self._writer = str(place), SummaryWriter(str(place), filename_suffix=_SUFFIX)

    def settings(self, settings: Mapping[str, str]) -> None:
        self._settings, self._figures = dict(settings), dict[str, float]()
        lines = ["setting | value", "---|---", *(f"{key} | {value}" for key, value in settings.items())]
        self._writer.add_text("settings", "\n".join(lines), 0)

    def row(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._figures |= values
        for key, value in values.items():
            self._writer.add_scalar(_plain(key), value, step, walltime=at)
        self._writer.flush()

    def artefact(self, path: Path) -> None:
        shutil.copy(path, self.id)

    def end(self, outcome: str, said: Mapping[str, str]) -> None:
        for key, text in said.items():
            self._writer.add_text(key, text, 0)
        if outcome == "complete":  # the table says of every run in it that it has succeeded
            shown = {key: value for key, value in self._figures.items() if key.startswith(("mean/", "worst/"))}
            named = {f"at_end/{key}": value for key, value in shown.items()}
            self._writer.add_hparams(self._params or self._settings, named, name=".", global_step=self.last)
        self._writer.close()


_SUFFIX = f".{os.getpid()}"  # or files that are begun in one second would have one name, and one of them be lost


class WeightsAndBiases(Tracker):
    """A run of a project: its history, configuration, summary and files."""

    def __init__(self, track: Track, name: str, id: str | None, done: int) -> None:
        import wandb

        settings = {"base_url": track.uri} if track.uri else {}
        self._run = wandb.init(
            project=track.experiment or "codistill",
            name=name,
            id=id,
            dir=track.folder,
            mode="offline" if track.offline else None,
            resume=None if track.offline or id is None else "allow",
            settings=wandb.Settings(console="off", **settings),
        )
        self.id = self._run.id
        self.last = max(0, self._run.step - 1)

    def settings(self, settings: Mapping[str, str]) -> None:
        self._run.config.update(dict(settings), allow_val_change=True)

    def row(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log(dict(values), step=step)

    def artefact(self, path: Path) -> None:
        copied = shutil.copy(path, self._run.dir)
        self._run.save(copied, base_path=self._run.dir, policy="end")

    def end(self, outcome: str, said: Mapping[str, str]) -> None:
        self._run.summary.update(dict(said))
        self._run.finish(exit_code=1 if outcome in ("failed", "killed", "interrupted") else 0)


TRACKERS: dict[str, type[Tracker]] = {MLFLOW: MLflow, TENSORBOARD: TensorBoard, WANDB: WeightsAndBiases}

# --- The process that follows a run.

_AGAIN = 3.0  # seconds after which something that has failed is tried again, if there is something new
_ATTEMPTS = 3  # before it is said


class Follower:
    """Hands what it is sent to a tracker, in order; what fails is tried again when more is sent, and at the end."""

    def __init__(self, say: Callable[[str], None], again: float = _AGAIN) -> None:
        self._say, self._again = say, again
        self._waiting: list[list[Any]] = []
        self._failures, self._failed = 0, -math.inf  # how often in a row, and when
        self._tracker: Tracker | None = None
        self._kept: Path | None = None  # the file that keeps the id of the tracked run
        self._ended = 0  # the round of the figures of all rounds together

    def follow(self, lines: Iterable[str]) -> None:
        """Take lines until the last; a run that has ended without saying so was killed."""
        method = ""
        for line in lines:
            self._waiting.append(json.loads(line))
            method = self._waiting[-1][0]
            self._deliver(at_end=method == "end")
            if method == "end":
                return
        if method:
            after = f" after round {self._tracker.last}" if self._tracker is not None and self._tracker.last else ""
            self._waiting.append(["end", "killed", {"outcome": f"killed{after}"}])
            self._deliver(at_end=True)

    def _deliver(self, *, at_end: bool) -> None:
        while self._waiting and (at_end or time.monotonic() - self._failed >= self._again):
            try:
                self._do(*self._waiting[0])
            except Exception as error:  # of the tracker's library, whatever it is
                self._failures, self._failed = self._failures + 1, time.monotonic()
                if self._failures < _ATTEMPTS:  # such as of several runs that open a new database at once
                    time.sleep(self._again / 3)
                    self._failed = -math.inf
                    continue
                self._say(_shown(error))
                return
            self._failures = 0
            self._waiting.pop(0)

    def _do(self, method: str, *values: Any) -> None:
        if method == "open":
            self._tracker = self._opened(*values)
        elif self._tracker is None:
            raise RuntimeError("it is not open")
        elif method == "row":
            step, figures, at = values
            if step > self._tracker.last:
                self._tracker.row(step, figures, at)
                self._tracker.last = step
                self._keep()
        elif method == "row_at_end":
            if values[0] != self._ended:
                self._tracker.row(*values)
                self._ended = values[0]
                self._keep()
        elif method == "settings":
            short = {key: text[:_LONGEST] for key, text in values[0].items()}
            self._tracker.settings(dict(list(short.items())[:_MOST_SETTINGS]))
        elif method == "artefact":
            self._tracker.artefact(Path(values[0]))
        else:
            self._tracker.end(*values)

    def _opened(self, table: dict[str, Any], name: str, folder: str | None, done: int) -> Tracker:
        made: Track = from_table(Track, table, "track")
        self._place = {key: table[key] for key in ("to", "uri", "folder", "experiment")}
        kept: dict[str, Any] = {}
        if folder is not None:
            self._kept = Path(folder) / f"track-{made.to}.json"
            with suppress(OSError, ValueError):
                kept = json.loads(self._kept.read_text("utf-8"))
        same = all(kept.get(key) == value for key, value in self._place.items()) and isinstance(kept.get("id"), str)
        tracker = TRACKERS[made.to](made, name, kept["id"] if same else None, done)
        if same and tracker.id == kept["id"]:
            self._ended = int(kept.get("ended", 0))
            tracker.last = max(tracker.last, int(kept.get("last", 0)) if made.to == WANDB else 0)
        self._tracker = tracker
        self._keep()
        return tracker

    def _keep(self) -> None:
        if self._kept is not None and self._tracker is not None:
            kept = {**self._place, "id": self._tracker.id, "last": self._tracker.last, "ended": self._ended}
            write_atomically(self._kept, json.dumps(kept).encode())


def main() -> None:
    """Follow the run that sends lines to standard input; what goes wrong is said on standard output."""
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends with the run, and after it
        signal.signal(number, signal.SIG_IGN)
    out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes nowhere
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        # Always at once: a run never waits for its tracker to read.
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    def say(text: str) -> None:
        with suppress(OSError):  # the run was killed
            print(text, file=out, flush=True)

    threading.Thread(target=read, daemon=True).start()
    Follower(say).follow(iter(lines.get, ""))


if __name__ == "__main__":
    main()
