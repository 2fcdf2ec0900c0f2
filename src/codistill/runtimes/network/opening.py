"""The nodes of a federation between machines, each with its connections open."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from codistill.certs.credentials import Credentials
from codistill.errors import CheckpointError, NetworkError
from codistill.files import write_atomically
from codistill.runtimes.description import RunDescription
from codistill.runtimes.network.asynchronous_hub import AsynchronousHub
from codistill.runtimes.network.asynchronous_peer import AsynchronousPeer
from codistill.runtimes.network.audit_log import AuditLog
from codistill.runtimes.network.audited_transport import audited
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.event_log import EventLog
from codistill.runtimes.network.hub_runtime import HubRuntime
from codistill.runtimes.network.limits import derived_limit
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.peer_runtime import PeerRuntime
from codistill.runtimes.network.policy import ANYTHING, Policy
from codistill.runtimes.network.transport import Transport
from codistill.text import parse_json
from codistill.topology import HUB, Topology

RUN = "network.json"  # in the folder of a run with a hub: its name


def open_hub(
    description: RunDescription, network: Network, own: Credentials | None, listen: str, log: EventLog, run: str
) -> HubRuntime:
    """The runtime of a hub, which listens."""
    limit = network.message_limit or derived_limit(description)
    transport = Transport(HUB, description.topology.names, network, own, listen=listen, limit=limit, tell=log.tell)
    connections = Connections(transport, network, log.tell, deadline=network.deadline, leads=True)
    make = AsynchronousHub if description.asynchronous else HubRuntime
    log.hub = make(description, connections, run=run)
    log.hub.agents.on_state = log.state
    return log.hub


def open_peer(
    description: RunDescription,
    network: Network,
    own: Credentials | None,
    listen: str,
    dial: Mapping[str, str],
    log: EventLog,
    audit: AuditLog | None = None,
    policy: Policy = ANYTHING,
) -> PeerRuntime:
    """The runtime of a peer, which listens, and dials some of its neighbours."""
    others = neighbours(description.topology, description.names[0])
    name, limit = description.names[0], network.message_limit or derived_limit(description)
    transport = Transport(name, others, network, own, listen=listen, dial=dial, limit=limit, tell=log.tell)
    checked = audited(transport, audit, policy)
    make = AsynchronousPeer if description.asynchronous else PeerRuntime
    return make(description, Connections(checked, network, log.tell, deadline=network.deadline))


def neighbours(topology: Topology, name: str) -> list[str]:
    """All peers that one speaks to or hears, in the order of the topology."""
    linked = {*topology.neighbours(name), *topology.sources(name)}
    return [other for other in topology.names if other in linked]


def check_neighbours(topology: Topology, name: str, dialled: Mapping[str, str]) -> None:
    """Only neighbours are dialled."""
    linked = neighbours(topology, name)
    for other in dialled:
        if other not in linked:
            raise NetworkError(
                f"A peer of '{name}' must be its neighbour in the topology.",
                f"'{other}'",
                f"Its neighbours are: {', '.join(linked) or 'none'}.",
            )


def run_name(folder: Path | None) -> str:
    """The name of the run in a folder, by which agents know their states of it; made once."""
    if folder is None:
        return secrets.token_hex(16)
    path = folder / RUN
    if not path.exists():
        write_atomically(path, json.dumps({"run": secrets.token_hex(16)}).encode())
    try:
        return str(parse_json(path.read_text("utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} must be as it was written.", f"{error}", "Start in another folder.") from None
