"""Functions that protocols share, for a protocol of one's own as well: `from codistill.protocols import parts`.

Each computes; none of them communicates. What is sent and received stands in the protocol's file.
"""

from codistill.protocols.parts.aggregation import KINDS, PLAIN_KINDS, Aggregation
from codistill.protocols.parts.ring import as_targets, ring_neighbours
from codistill.protocols.parts.classes import check_classes, class_means, class_means_of_others, class_targets
from codistill.protocols.parts.discriminator import Discriminator
from codistill.protocols.parts.losses import clip_rows, distillation
from codistill.protocols.parts.schedules import SCHEDULES, communication_steps, lr_factor, set_lr
from codistill.protocols.parts.shared_outputs import (
    coverage,
    disagreement,
    expected_reply,
    leave_one_out,
    replies,
    stacked,
)
from codistill.protocols.parts.simplex import accepted_probabilities, on_simplex
from codistill.protocols.parts.training import train_locally
from codistill.protocols.parts.weights import (
    check_equal_weights,
    mean_weights,
    same_initial_weights,
    with_samples,
)

__all__ = [
    "KINDS", "PLAIN_KINDS", "SCHEDULES", "Aggregation", "Discriminator", "accepted_probabilities", "as_targets",
    "check_classes", "check_equal_weights", "class_means", "class_means_of_others", "class_targets", "clip_rows",
    "communication_steps", "coverage", "disagreement", "distillation", "expected_reply", "leave_one_out", "lr_factor",
    "mean_weights", "on_simplex", "replies", "ring_neighbours", "same_initial_weights", "set_lr", "stacked",
    "train_locally", "with_samples",
]  # fmt: skip
