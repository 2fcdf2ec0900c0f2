"""A live line while a run goes on; plain lines where there is no terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar

from codistill.results.records import RoundEnded, RunFinished, RunStarted
from codistill.text import bytes_text, duration_text

_PLAIN_EVERY = 5.0  # seconds between plain lines, so that a log stays short


class Progress:
    """Round, agents, accuracy so far, bytes and time left, on standard error."""

    def __init__(self, title: str | None = None) -> None:
        self._title = title  # None: the protocol's name
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        self._score = ""
        self._scores: tuple[str, ...] = ("accuracy", "rmse")
        self._bytes = self._rounds = self._agents = self._present = self._start = 0
        self._spent = self._said = 0.0

    def started(self, record: RunStarted) -> None:
        """Show that the run begins."""
        self._title = self._title or record.protocol
        self._rounds, self._start = record.rounds, record.done
        self._agents = self._present = len(record.agents)
        self._scores = record.scores
        self._said, self._spent = time.monotonic(), 0.0
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(24),
                TextColumn("{task.fields[rest]}"),
            )
            self._bar = Bar(*columns, console=self._console, transient=True)
            head = self._head(record.done)
            self._task = self._bar.add_task(head, total=record.rounds, completed=record.done, rest="starting")
            self._bar.start()

    def round_ended(self, record: RoundEnded) -> None:
        """Show where the run is."""
        self._bytes += sum(row["sent"] + row["received"] for row in record.rows)
        self._present = sum(bool(row["present"]) for row in record.rows)
        honest = [row for row in record.rows if not row.get("lies")]
        word = next((key for key in self._scores for row in honest if key in row), None)
        if word is not None:
            scores = [row[word] for row in honest if word in row]
            self._score = f"{word.replace('_', ' ')} {sum(scores) / len(scores):.3f} · "
        self._spent += record.seconds
        left = self._spent / (record.round - self._start) * (self._rounds - record.round)
        rest = f"{self._score}{bytes_text(self._bytes)} · {duration_text(left)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=record.round, description=self._head(record.round), rest=rest)
        elif time.monotonic() - self._said >= _PLAIN_EVERY or record.round in (self._start + 1, self._rounds):
            self._said = time.monotonic()
            self._print(f"{self._head(record.round)} · {rest}")
        for event in record.events[:3]:
            self._print(event, style="yellow")
        if len(record.events) > 3:
            self._print(f"round {record.round}: {len(record.events) - 3} more such events", style="yellow")

    def finished(self, record: RunFinished) -> None:
        """Leave a clean screen."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str, style: str | None = None) -> None:
        """One line, however long: a log is searched by lines."""
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def _head(self, done: int) -> str:
        agents = "1 agent" if self._agents == 1 else f"{self._agents} agents"
        if self._present < self._agents:
            agents = f"{self._present} of {agents}"
        return f"{self._title}: round {done}/{self._rounds} · {agents}"
