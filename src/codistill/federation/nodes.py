"""What a hub and an agent between machines have in common: a process of their own, certificates, checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from codistill.agent import Agent
from codistill.certs.credentials import Credentials, read_credentials
from codistill.errors import CodistillError, NetworkError, RecipeError
from codistill.federation.checks import (
    check_abilities,
    check_shapes,
)
from codistill.protocol import Protocol
from codistill.runtimes.description import RunDescription
from codistill.runtimes.forked import ForkedProcess
from codistill.runtimes.interrupt import GentleInterrupt
from codistill.runtimes.network.addresses import split
from codistill.runtimes.store import RunFolder
from codistill.topology import Topology


class BackgroundNode:
    """A hub or an agent in a process of its own."""

    def __init__(self, process: ForkedProcess, read: Callable[[Mapping[str, Any]], Any]) -> None:
        self._process, self._read = process, read
        self._result: Any = None

    @property
    def is_running(self) -> bool:
        """Whether it still takes part."""
        return self._result is None and self._process.is_alive

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the end: the `Result` of a hub, the trained agent of an agent; raises the error if it failed."""
        if self._result is None:
            if not self._process.channel.poll(timeout):
                raise TimeoutError(f"'{self._process.name}' still takes part after {timeout:g} s.")
            try:
                content = self._process.receive()
            finally:
                self._process.end()
            if content is None:
                raise self._process.killed()
            self._result = self._read(content)
        return self._result

    def wait_for_it(self) -> Any:
        """Wait for the end; Ctrl-C stops it gently."""
        with GentleInterrupt() as interrupt:
            asked = False
            while True:
                try:
                    return self.wait(0.2)
                except TimeoutError:
                    if interrupt.asked and not asked:
                        asked = True
                        self.stop()

    def stop(self) -> None:
        """Ask it to stop gently: a hub at the end of its round, an agent when its round counts."""
        self._process.stop()


def credentials_for(
    role: str, addresses: Sequence[str], certs: str | Path | None, *, insecure: bool
) -> Credentials | None:
    """The certificate of a node in a folder; None only with `insecure`."""
    for address in addresses:
        split(address)
    if (certs is None) != bool(insecure):
        raise NetworkError(
            "A federation between machines must use certificates, or say that it does not.",
            "both certs and insecure" if insecure else "no certs",
            "Make them by codistill.certs.authority.Authority or 'codistill certs', and pass certs=FOLDER; "
            "if anyone may read, join and forge: insecure=True.",
        )
    return None if certs is None else read_credentials(Path(os.fspath(certs)), role)


def check_has_hub(protocol: Protocol, topology: Topology) -> None:
    """Only a topology with a hub is served."""
    if not topology.hub:
        raise NetworkError(
            "A hub is for protocols with a hub.",
            f"{protocol.name} on a topology of the kind {topology.kind}",
            "Start every agent by 'codistill join RECIPE --listen HOST:PORT --peer NAME=HOST:PORT'.",
        )


def check_agent(description: RunDescription) -> RunDescription:
    """The agent at hand has the data and the abilities that the run needs."""
    agents = description.agents
    check_shapes(agents, description.test, description.public)
    try:
        check_abilities(agents, description.protocol, description.public)
    except CodistillError as error:
        error.add_note(f"The federation runs {description.protocol.name}.")
        raise
    return description


def with_agent(description: RunDescription, agent: Agent) -> RunDescription:
    """The same run with one agent at hand, checked and introduced."""
    return check_agent(replace(description, agents=(agent,), hub=None, reported=(agent.name,)).introduce())


def check_no_pooling(protocol: Protocol) -> None:
    """Data never leave their machines."""
    if protocol.pools_data:
        raise RecipeError(
            f"{protocol.name} pools the data of all agents, which never leave their machines here.",
            protocol.name,
            "Run it by 'codistill run', as a baseline.",
        )


def open_store(folder: Path, stack: ExitStack) -> RunFolder:
    """The folder of a run, locked until the stack is closed; a run that is there is continued."""
    store = RunFolder(folder)
    stack.callback(store.close)
    store.open(resume=True)
    return store
