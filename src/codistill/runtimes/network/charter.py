"""What a node knows of its federation: everything but the others' data and models."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.agent import Agent, Hub, Node
from codistill.data.shard import PublicData
from codistill.errors import CodistillError, NetworkError
from codistill.faults import Fault, Faults
from codistill.federation.checks import check_abilities, check_shapes
from codistill.protocol import Protocol
from codistill.protocols.alone import baseline_of
from codistill.runtimes.network.options import WIRE_VERSION
from codistill.runtimes.network.terms import Terms, check_terms, describe_protocol, describe_reference, protocol_from
from codistill.runtimes.runtime import Stage
from codistill.settings import from_table
from codistill.topology import Topology
from codistill.version import __version__
from codistill.wire.compression import Compression

if TYPE_CHECKING:
    from codistill.federation import Federation


@dataclass(frozen=True)
class Charter:
    """The protocol, who is who, and what is shared."""

    protocol: Protocol
    topology: Topology
    seed: int
    classes: int
    faults: Faults
    rounds: int
    public: PublicData | None = None
    test: tuple[np.ndarray, np.ndarray] | None = None
    shape: tuple[int, ...] | None = None  # of a sample; None: whatever the agents have
    compression: Compression | None = None

    @classmethod
    def of(cls, federation: Federation, rounds: int) -> Charter:
        """That of a federation whose agents are all at hand."""
        return cls(
            federation.protocol, federation.topology, federation.seed, federation.classes, federation.faults, rounds,
            federation.public, federation.test, federation.agents[0].shard.x.shape[1:], federation.compression,
        )  # fmt: skip

    @classmethod
    def under(
        cls,
        terms: Any,
        public: PublicData | None,
        test: tuple[np.ndarray, np.ndarray] | None,
        own: type[Protocol] | None = None,
    ) -> Charter:
        """That of an agent which a hub has told its terms; `own`: a protocol of its own that it trusts."""
        check_terms(terms)
        try:
            names = tuple(map(str, terms["roster"]))
            faults = [from_table(Fault, fault, "faults") for fault in terms["faults"]]
            squeezed = terms.get("compression")
            return cls(
                protocol_from(terms["protocol"], own), Topology.star(names), terms["seed"], terms["classes"],
                Faults(faults, names, terms["seed"], terms.get("participation", 1.0)), terms["rounds"],
                public, test, None, None if squeezed is None else from_table(Compression, squeezed, "compression"),
            )  # fmt: skip
        except (TypeError, KeyError, AttributeError) as error:
            raise NetworkError(
                "The terms of a federation must be whole.", f"{error!r}"[:200], "Ask whoever runs the hub."
            ) from None

    @property
    def has_yardstick(self) -> bool:
        """Whether there is something to compare with: what the agents reach alone."""
        return baseline_of(self.protocol) is not None

    def terms(self) -> Terms:
        """What must be equal on every node, as plain values."""
        made: Terms = {
            "protocol": describe_protocol(self.protocol),
            "rounds": self.rounds,
            "seed": self.seed,
            "classes": self.classes,
            "roster": list(self.topology.names),
            "links": None if self.topology.hub else _digest(self.topology),
            "shape": None if self.shape is None else list(self.shape),
            "reference": describe_reference(self.public) if self.protocol.needs_public else None,
            "compression": None if self.compression is None else dataclasses.asdict(self.compression),
            "faults": [dataclasses.asdict(fault) for fault in self.faults.injected],
            "participation": self.faults.participation,
            "version": __version__,
            "wire": WIRE_VERSION,
        }
        plain: Terms = json.loads(json.dumps(made))  # tuples are lists, as on arrival
        return plain

    def stage(self, node: Node) -> Stage:
        """A stage with this node alone, introduced to the federation."""
        self.introduce(node)
        roster = self.topology.names if isinstance(node, Hub) else (node.name,)
        return Stage([node], self.protocol, self.faults, self.test, self.seed, (), self.compression, roster)

    def introduce(self, node: Node) -> None:
        """Tell a node who is who; an agent is held to what the protocol needs."""
        node.seed, node.topology, node.classes = self.seed, self.topology, self.classes
        if self.public is not None:
            node.public = self.public
        if isinstance(node, Agent):
            if node.shard is None:
                node.settle(self.classes)
            node.shard.seed = self.seed
            check_shapes([node], self.test, self.public)
            try:
                check_abilities([node], self.protocol, self.public)
            except CodistillError as error:
                error.add_note(f"The federation runs {self.protocol.name}.")
                raise


def _digest(topology: Topology) -> str:
    """Of who speaks to whom, and with which weights."""
    told: Mapping[str, Any] = {name: [topology.neighbours(name), topology.weights(name)] for name in topology.names}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
