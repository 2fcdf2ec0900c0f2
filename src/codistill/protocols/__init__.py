"""One file, one paper's algorithm; `parts` are the functions that they share."""

from __future__ import annotations

from codistill.protocol import Protocol
from codistill.protocols.akd import AKD
from codistill.protocols.alone import Alone
from codistill.protocols.avgkd import AvgKD
from codistill.protocols.backfitting import Backfitting
from codistill.protocols.centralised import Centralised
from codistill.protocols.crs import CRS
from codistill.protocols.d_distillation import DDistillation
from codistill.protocols.d_sgd import DSGD
from codistill.protocols.ekd import EKD
from codistill.protocols.fd import FD
from codistill.protocols.fedal import FedAL
from codistill.protocols.fedavg import FedAvg
from codistill.protocols.fedbn import FedBN
from codistill.protocols.feddf import FedDF
from codistill.protocols.feddistill import FedDistill
from codistill.protocols.feddkd import FedDKD
from codistill.protocols.fedgen import FedGen
from codistill.protocols.fedmax import FedMAX
from codistill.protocols.fedmd import FedMD
from codistill.protocols.fedproto import FedProto
from codistill.protocols.fedprox import FedProx
from codistill.protocols.pkd import PKD
from codistill.protocols.silo_sgd import SiloSGD

PROTOCOLS: dict[str, type[Protocol]] = {
    protocol.name: protocol
    for protocol in (
        AKD, Alone, AvgKD, Backfitting, Centralised, CRS, DDistillation, DSGD, EKD, FD, FedAL, FedAvg, FedBN, FedDF,
        FedDistill, FedDKD, FedGen, FedMAX, FedMD, FedProto, FedProx, PKD, SiloSGD,
    )
}  # fmt: skip

__all__ = [
    "AKD", "CRS", "DSGD", "EKD", "FD", "PKD", "PROTOCOLS", "Alone", "AvgKD", "Backfitting", "Centralised",
    "DDistillation", "FedAL", "FedAvg", "FedBN", "FedDF", "FedDKD", "FedDistill", "FedGen", "FedMAX", "FedMD",
    "FedProto", "FedProx", "SiloSGD",
]  # fmt: skip
