"""What happened in a round, as the hosts of its nodes report it."""

from __future__ import annotations

from dataclasses import dataclass, field

from codistill.base_node import Node


@dataclass
class Report:
    """What happened in a round on a host: bytes, refused messages, and the protocol's remarks and measures."""

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    refused: list[tuple[str, str, str]] = field(default_factory=list)  # (receiver, sender, reason)
    remarks: list[tuple[str, str]] = field(default_factory=list)  # (node, text)
    measures: list[tuple[str, str, float]] = field(default_factory=list)  # (agent, name, value)
    present: tuple[str, ...] | None = None  # who took part to the end; None: everyone expected
    events: list[str] = field(default_factory=list)  # other events, as sentences
    waited: float = 0.0  # seconds spent waiting for agents, before any work
    steps: dict[str, int] = field(default_factory=dict)  # gradient steps
    exchanges: dict[str, int] = field(default_factory=dict)  # how often a node waited for messages of others

    def collect(self, node: Node) -> None:
        """Take over what a node has to report: its steps and exchanges, refused messages, remarks and measures."""
        if not (node.steps or node.exchanges or node.rejected or node.remarks or node.measures):
            return  # most nodes, where a few of many take part
        self.steps[node.name] = self.steps.get(node.name, 0) + node.steps
        self.exchanges[node.name] = self.exchanges.get(node.name, 0) + node.exchanges
        node.steps, node.exchanges = 0, 0
        self.refused += [(node.name, sender, reason) for sender, reason in node.rejected]
        self.remarks += [(node.name, text) for text in node.remarks]
        self.measures += node.measured()
        node.rejected, node.remarks, node.measures = [], [], []

    def count_received(self, name: str, data: bytes) -> None:
        """Count the bytes of a message that a node has received."""
        self.received[name] = self.received.get(name, 0) + len(data)

    def add(self, other: Report) -> Report:
        """This and another report together."""
        return Report(
            _sum(self.sent, other.sent),
            _sum(self.received, other.received),
            self.refused + other.refused,
            self.remarks + other.remarks,
            self.measures + other.measures,
            other.present if self.present is None else self.present,
            self.events + other.events,
            self.waited + other.waited,
            _sum(self.steps, other.steps),
            _sum(self.exchanges, other.exchanges),
        )


def _sum(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}
