"""One file, one paper's algorithm."""

from __future__ import annotations

from codistill.protocol import Protocol
from codistill.protocols.alone import Alone, Centralised
from codistill.protocols.avgkd import AvgKD
from codistill.protocols.fedavg import FedAvg
from codistill.protocols.fedmd import FedMD

PROTOCOLS: dict[str, type[Protocol]] = {
    protocol.name: protocol for protocol in (Alone, AvgKD, Centralised, FedAvg, FedMD)
}

__all__ = ["PROTOCOLS", "Alone", "AvgKD", "Centralised", "FedAvg", "FedMD"]
