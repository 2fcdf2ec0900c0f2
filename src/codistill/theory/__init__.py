"""Federated kernel regression: what knowledge distillation does, in closed form.

After Afonin, Karimireddy. Towards Model Agnostic Federated Learning Using Knowledge Distillation. ICLR 2022,
with its printed errors corrected. See docs/theory.md.
"""

from __future__ import annotations

from codistill.theory.problem import Kernel, Model, Problem
from codistill.theory.protocols import (
    akd,
    akd_chains,
    akd_limit,
    alone,
    avgkd,
    avgkd_limit,
    backfitting,
    backfitting_limit,
    centralised,
    ekd,
    ekd_limit,
    jacobi,
    pkd,
    pkd_limit,
    self_distilled,
)
from codistill.theory.two_agents import (
    Forecast,
    Operators,
    Outlook,
    angle_cosine,
    forecast,
    forecast_of,
    operators,
    proposition_ii,
    proposition_iii,
    proposition_v,
    proposition_v_limit,
    proposition_vi,
    proposition_vii,
    rho,
    two_rounds,
)

__all__ = [
    "Forecast",
    "Kernel",
    "Model",
    "Operators",
    "Outlook",
    "Problem",
    "akd",
    "akd_chains",
    "akd_limit",
    "alone",
    "angle_cosine",
    "avgkd",
    "avgkd_limit",
    "backfitting",
    "backfitting_limit",
    "centralised",
    "ekd",
    "ekd_limit",
    "forecast",
    "forecast_of",
    "jacobi",
    "operators",
    "pkd",
    "pkd_limit",
    "proposition_ii",
    "proposition_iii",
    "proposition_v",
    "proposition_v_limit",
    "proposition_vi",
    "proposition_vii",
    "rho",
    "self_distilled",
    "two_rounds",
]
