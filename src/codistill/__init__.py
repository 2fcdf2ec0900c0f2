"""codistill: federated learning by knowledge distillation, for agents that share neither data nor a model.

import codistill as cd
agents = [cd.Agent("clinic", RandomForestClassifier(), x1, y1), cd.Agent("lab", my_module, x2, y2)]
result = cd.Federation(agents, cd.FedMD(), public=u, test=(xt, yt), seed=0).run(rounds=10)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from codistill.core import __version__ as __version__

if TYPE_CHECKING:
    from codistill.core.errors import CodistillError as CodistillError
    from codistill.core.settings import setting as setting
    from codistill.data.columns import Columns as Columns
    from codistill.engine.observers import EarlyStopping as EarlyStopping
    from codistill.engine.safeguard import Safeguard as Safeguard
    from codistill.engine.store import read_state as read_state
    from codistill.experiments.advice import advise as advise
    from codistill.experiments.tracking import track as track
    from codistill.federation import Federation as Federation
    from codistill.federation.joining import join as join
    from codistill.federation.result import Result as Result
    from codistill.federation.serving import serve as serve
    from codistill.federation.trained_model import TrainedModel as TrainedModel
    from codistill.federation.trained_model import load as load
    from codistill.learners.ability import Ability as Ability
    from codistill.learners.ability import Learner as Learner
    from codistill.learners.kernel_ridge import KernelRidge as KernelRidge
    from codistill.learners.torch import TorchLearner as TorchLearner
    from codistill.learners.zoo import register_architecture as register_architecture
    from codistill.nodes.agent import Agent as Agent
    from codistill.nodes.agent import Hub as Hub
    from codistill.nodes.clock import Clock as Clock
    from codistill.nodes.clock import Offline as Offline
    from codistill.nodes.faults import Fault as Fault
    from codistill.protocol import Protocol as Protocol
    from codistill.protocols import AKD as AKD
    from codistill.protocols import CRS as CRS
    from codistill.protocols import DSGD as DSGD
    from codistill.protocols import EKD as EKD
    from codistill.protocols import FD as FD
    from codistill.protocols import PKD as PKD
    from codistill.protocols import Alone as Alone
    from codistill.protocols import AvgKD as AvgKD
    from codistill.protocols import Backfitting as Backfitting
    from codistill.protocols import Centralised as Centralised
    from codistill.protocols import DDistillation as DDistillation
    from codistill.protocols import FedAL as FedAL
    from codistill.protocols import FedAvg as FedAvg
    from codistill.protocols import FedBN as FedBN
    from codistill.protocols import FedDF as FedDF
    from codistill.protocols import FedDistill as FedDistill
    from codistill.protocols import FedDKD as FedDKD
    from codistill.protocols import FedGen as FedGen
    from codistill.protocols import FedMAX as FedMAX
    from codistill.protocols import FedMD as FedMD
    from codistill.protocols import FedProto as FedProto
    from codistill.protocols import FedProx as FedProx
    from codistill.protocols import SiloSGD as SiloSGD
    from codistill.protocols import parts as parts
    from codistill.results.scores import Score as Score
    from codistill.runtimes.ray_cluster import RayCluster as RayCluster
    from codistill.topology import Topology as Topology
    from codistill.wire.compression import Compression as Compression
    from codistill.wire.message import Message as Message

# Where each public name lives. They are imported when first used, so `codistill --help` needs no torch.
_HOMES = {
    "AKD": "protocols",
    "Ability": "learners.ability",
    "Agent": "nodes.agent",
    "Alone": "protocols",
    "AvgKD": "protocols",
    "Backfitting": "protocols",
    "CRS": "protocols",
    "Centralised": "protocols",
    "Clock": "nodes.clock",
    "CodistillError": "core.errors",
    "Columns": "data.columns",
    "Compression": "wire.compression",
    "Safeguard": "engine.safeguard",
    "EKD": "protocols",
    "EarlyStopping": "engine.observers",
    "FD": "protocols",
    "Fault": "nodes.faults",
    "FedAvg": "protocols",
    "FedAL": "protocols",
    "FedBN": "protocols",
    "FedDF": "protocols",
    "FedDKD": "protocols",
    "FedDistill": "protocols",
    "FedGen": "protocols",
    "FedMAX": "protocols",
    "FedProx": "protocols",
    "DDistillation": "protocols",
    "DSGD": "protocols",
    "SiloSGD": "protocols",
    "FedMD": "protocols",
    "FedProto": "protocols",
    "Federation": "federation",
    "Hub": "nodes.agent",
    "KernelRidge": "learners.kernel_ridge",
    "Learner": "learners.ability",
    "Message": "wire.message",
    "Offline": "nodes.clock",
    "PKD": "protocols",
    "Protocol": "protocol",
    "RayCluster": "runtimes.ray_cluster",
    "Result": "federation.result",
    "Score": "results.scores",
    "Topology": "topology",
    "TorchLearner": "learners.torch",
    "TrainedModel": "federation.trained_model",
    "advise": "experiments.advice",
    "join": "federation.joining",
    "load": "federation.trained_model",
    "parts": "protocols",
    "read_state": "engine.store",
    "register_architecture": "learners.zoo",
    "serve": "federation.serving",
    "setting": "core.settings",
    "track": "experiments.tracking",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'codistill' has no attribute '{name}'")
    return getattr(importlib.import_module(f"codistill.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
