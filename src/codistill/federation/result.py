"""What a run has brought: the agents, every round's figures, a table and a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from codistill.data.validation import as_floats
from codistill.errors import DataError
from codistill.results.records import Row
from codistill.results.summary import Summary
from codistill.runtimes.observers.history import History

if TYPE_CHECKING:
    from codistill.agent import Agent
    from codistill.federation import Federation


class TrainedAgent:
    """An agent after the run: it answers as its protocol says."""

    def __init__(self, agent: Agent, federation: Federation) -> None:
        self.name, self.learner = agent.name, agent.learner
        self._agent, self._federation = agent, federation

    def predict(self, x: Any) -> np.ndarray:
        """(n, C) class probabilities or real values."""
        wanted = self._agent.shard.x.shape[1:]
        try:
            samples = as_floats(np.asarray(x))
        except (TypeError, ValueError) as error:
            raise DataError("Samples must be numbers.", f"{error}", "Convert them to an array of numbers.") from None
        if samples.ndim != len(wanted) + 1 or samples.shape[1:] != wanted:
            raise DataError(
                f"Samples for agent '{self.name}' must have the shape {wanted} each, one per row.",
                f"an array of shape {np.shape(x)}",
                "Bring them to that shape; a single sample x is x[None].",
            )
        if not np.isfinite(samples).all():
            raise DataError("Samples must be finite numbers.", "NaN or infinity", "Fill in or remove such samples.")
        return self._federation.protocol.predict(self._agent, samples)


class Result:
    """The outcome of `Federation.run`."""

    def __init__(
        self, federation: Federation, history: History, alone: History | None, seconds: float, *, interrupted: bool
    ) -> None:
        self.agents = {agent.name: TrainedAgent(agent, federation) for agent in federation.agents}
        self.rows: list[Row] = history.rows
        self.alone_rows: list[Row] | None = None if alone is None else alone.rows
        self.outputs = history.outputs  # what the agents answer on average, after the last round
        self.seconds, self.interrupted = seconds, interrupted
        self._federation = federation

    def frame(self) -> pd.DataFrame:
        """One row per round and agent."""
        return pd.DataFrame(self.rows)

    def summary(self) -> Summary:
        """Everything that is shown of a run."""
        federation = self._federation
        mixes = [agent.class_mix for agent in federation.agents]
        counts = np.stack([mix for mix in mixes if mix is not None]) if all(m is not None for m in mixes) else None
        return Summary(
            title=federation.protocol.name,
            protocol=federation.protocol.name,
            agents={agent.name: agent.learner.describe() for agent in federation.agents},
            rows=self.rows,
            alone_rows=self.alone_rows,
            counts=counts,
            class_names=tuple(str(i) for i in range(federation.classes)),
            seconds=self.seconds,
            test_samples=0 if federation.test is None else len(federation.test[0]),
            outputs=self.outputs,
            topology=federation.topology,
            faults=federation.faults.injected,
        )

    def report(self, path: str | Path) -> Path:
        """Write a self-contained HTML page."""
        from codistill.reports.pages import write_report

        return write_report(self.summary(), Path(path))

    def __repr__(self) -> str:
        return self.summary().table_text()
