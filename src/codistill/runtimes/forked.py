"""A process that is forked from this one and tells it by packed messages how it goes; and a runtime in such a process.

Links over the network do not survive a fork. So a process that starts nodes never opens one itself: each node has a
process of its own, and whoever runs the rounds tells it what to do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from codistill.errors import CodistillError, RuntimeFault
from codistill.results.outputs import View
from codistill.results.records import Baseline, Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.interrupt import GentleInterrupt
from codistill.runtimes.parent import Parent
from codistill.runtimes.remote_errors import describe_error, rebuild_error
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, ShouldStop, Stopped, never
from codistill.wire.state import pack, unpack

_LOOK = 0.1  # seconds between two looks at whoever else may have something to say
_GRACE = 5.0  # seconds for a process to end by itself
_FAILED = 4  # exit code of a process that has told its error

Content = dict[str, Any]


class Channel:
    """One end of a pipe for packed messages: arrays and plain values, nothing that is executed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, **content: Any) -> None:
        """Send named values."""
        self._connection.send_bytes(pack(content))

    def receive(self) -> Content:
        """The next message; raises EOFError when the other end is closed."""
        content: Content = unpack(self._connection.recv_bytes())
        return content

    def poll(self, timeout: float | None) -> bool:
        """Whether there is a message within so many seconds (None: wait for one), or the other end is closed."""
        return self._connection.poll(timeout)

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


class ForkedProcess:
    """Runs one function in a process of its own; SIGTERM asks it to stop gently."""

    def __init__(self, name: str, work: Callable[[Channel, ShouldStop], None]) -> None:
        if sys.platform == "win32" or "fork" not in multiprocessing.get_all_start_methods():
            raise RuntimeFault(
                "Nodes in processes of their own need a system that can fork.",
                sys.platform,
                'Use runtime="simulation": the result is the same to the bit.',
            )
        self.name = name
        near, far = multiprocessing.Pipe()
        self.channel = Channel(near)
        process = multiprocessing.get_context("fork").Process(
            target=_work, args=(work, near, far, Parent.here()), name=f"codistill-{name}", daemon=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks that copy only one thread
            process.start()
        far.close()
        self._process = process

    def receive(self) -> Content | None:
        """The next message, or None if the process was killed; raises the error of a process that has failed."""
        try:
            content = self.channel.receive()
        except (EOFError, OSError):
            return None
        if "error" in content:
            error = rebuild_error(content["error"])
            error.add_note(f"This happened at '{self.name}'.")
            raise error
        return content

    def killed(self) -> RuntimeFault:
        """The error for a process that has ended without a word."""
        return RuntimeFault(
            "Every node must go on to the end of the run.",
            f"'{self.name}' ended unexpectedly",
            "It may have run out of memory, or was killed. Resume the run from its last checkpoint.",
        )

    def stop(self) -> None:
        """Ask the process to stop gently."""
        if self._process.is_alive():
            self._process.terminate()

    @property
    def is_alive(self) -> bool:
        """Whether the process is still running."""
        return self._process.is_alive()

    def end(self, grace: float = _GRACE) -> None:
        """Wait a little for the process to end, then end it."""
        self._process.join(timeout=grace)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.channel.close()


def _work(work: Callable[[Channel, ShouldStop], None], near: Connection, far: Connection, parent: Parent) -> None:
    """What the process does, from its start to its end."""
    parent.end_with()
    near.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever has forked this process, and asks it to stop
    torch.set_num_threads(1)
    channel, code = Channel(far), 0
    try:
        with GentleInterrupt(quiet=True, signals=(signal.SIGTERM,)) as interrupt:
            work(channel, lambda: interrupt.asked)
    except (KeyboardInterrupt, BrokenPipeError):
        code = 1
    except Exception as error:  # a mistake of a user's, or a defect: told to whoever has forked this process
        trace = "" if isinstance(error, CodistillError) else traceback.format_exc()
        with suppress(OSError):
            channel.send(error=describe_error(error, trace))
        code = _FAILED
    os._exit(code)  # at once: the threads of the network library need not be waited for


class ForkedRuntime(Runtime):
    """A runtime in a process of its own: every call is a message there and one back."""

    def __init__(self, name: str, description: RunDescription, make: Callable[[], Runtime]) -> None:
        super().__init__(description)
        self.process = ForkedProcess(name, lambda channel, should_stop: _serve(make(), channel, should_stop))
        self.should_stop: ShouldStop = never
        self.look: Callable[[], None] = lambda: None  # called while it waits: raises if there is no use in waiting

    def ask(self, do: str, **content: Any) -> None:
        """Send a command; each is answered once, by `answer`."""
        with suppress(OSError):  # it has ended: `answer` says why
            self.process.channel.send(do=do, **content)

    def answer(self) -> Content:
        """Wait for the answer to the oldest command that has none yet."""
        asked = False
        while not self.process.channel.poll(_LOOK):
            self.look()
            if not asked and self.should_stop():
                asked = True
                self.process.stop()
        content = self.process.receive()
        if content is None:
            raise self.process.killed()
        if content.get("stopped"):
            raise Stopped
        return content

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Get ready there."""
        self.should_stop = should_stop
        self.ask("start", done=done)
        self.answer()

    def measure_baseline(self) -> Baseline | None:
        """Measure the baseline there."""
        self.ask("measure_baseline")
        measured = self.answer()["measured"]
        return None if measured is None else Baseline(**measured)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Run a phase there."""
        self.ask("run", phase=phase, present=present)
        return Report(**self.answer()["report"])

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Evaluate there."""
        self.ask("evaluate", samples=samples, views=views is not None)
        answer = self.answer()
        if views is not None:
            views.update(answer["views"])
        scores: dict[str, Scores] = answer["scores"]
        return scores

    def save(self) -> dict[str, bytes]:
        """What is saved there."""
        self.ask("save")
        saved: dict[str, bytes] = self.answer()["saved"]
        return saved

    def load(self, saved: dict[str, bytes]) -> None:
        """Load there."""
        self.ask("load", saved=saved)
        self.answer()

    def finish(self, *, complete: bool) -> None:
        """Finish there."""
        self.ask("finish", complete=complete)
        self.answer()

    def close(self) -> None:
        """Close there, and end the process."""
        self.ask("close")
        self.process.end()


def _serve(runtime: Runtime, channel: Channel, should_stop: ShouldStop) -> None:
    """Do as told, until told to close."""
    try:
        while True:
            command = channel.receive()
            if command["do"] == "close":
                return
            try:
                channel.send(**_answer(runtime, command, should_stop))
            except Stopped:
                channel.send(stopped=True)
    except EOFError:
        pass  # whoever has forked this process has ended
    finally:
        runtime.close()


def _answer(runtime: Runtime, command: Content, should_stop: ShouldStop) -> Content:
    match command["do"]:
        case "start":
            runtime.start(command["done"], should_stop)
        case "measure_baseline":
            measured = runtime.measure_baseline()
            return {"measured": None if measured is None else vars(measured)}
        case "run":
            return {"report": vars(runtime.run(command["phase"], command["present"]))}
        case "evaluate":
            views: dict[str, View] | None = {} if command["views"] else None
            return {"scores": runtime.evaluate(command["samples"], views), "views": views}
        case "save":
            return {"saved": runtime.save()}
        case "load":
            runtime.load(command["saved"])
        case "finish":
            runtime.finish(complete=command["complete"])
    return {}
