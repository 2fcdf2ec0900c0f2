"""Federations of the conformance suite on the second device, in processes that torch allows to be forked."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.second_device import KIND

import codistill as cd
from codistill.engine.runtime import Outcome, load_nodes, save_nodes
from codistill.federation.result import Result

Make = Callable[..., cd.Federation]


def on_second_device(make: Make) -> Make:
    """Federations whose torch modules compute on the second device."""

    def made(case: Any, **options: Any) -> cd.Federation:
        federation = make(case, **options)
        for agent in federation.agents:
            if isinstance(agent.learner, cd.TorchLearner):
                agent.learner.device = KIND
        return federation

    return made


class Elsewhere:
    """A process that never trains. It forks one for each run, which may therefore fork others itself."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._near, far = multiprocessing.Pipe()
        if os.fork() == 0:
            self._serve(far)

    def federation(self, case: Any, **options: Any) -> cd.Federation:
        """A federation that simulates here, and runs otherwise there."""
        here = self._make(case, **options)
        simulate = here.run

        def run(rounds: int, *, runtime: str = "processes", **settings: Any) -> Result:
            if runtime == "simulation":
                return simulate(rounds, runtime=runtime, **settings)
            rows, alone_rows, saved = self.run(case, options, rounds, runtime=runtime, **settings)
            load_nodes(here.agents, saved)
            return Result(here.description, Outcome(0, True, rows, None, None, 0.0), alone_rows)

        here.run = run  # type: ignore[method-assign, assignment]
        return here

    def run(self, case: Any, options: dict[str, Any], rounds: int, **settings: Any) -> Any:
        """Rows, the rows of agents alone, and the states of the agents."""
        self._near.send((case, options, rounds, settings))
        error, answer = self._near.recv()
        if error:
            raise RuntimeError(error)
        return answer

    def _serve(self, far: Connection) -> None:
        self._near.close()
        while True:
            try:
                wanted = far.recv()
            except EOFError:
                os._exit(0)
            child = os.fork()
            if child == 0:
                far.send(self._answer(*wanted))
                os._exit(0)
            os.waitpid(child, 0)

    def _answer(self, case: Any, options: dict[str, Any], rounds: int, settings: dict[str, Any]) -> tuple[str, Any]:
        try:
            federation = self._make(case, **options)
            result = federation.run(rounds, **settings)
            return "", (result.rows, result.alone_rows, save_nodes(federation.agents))
        except Exception:
            return traceback.format_exc(), None
