"""Functions that protocols share, for a protocol of one's own as well: `from codistill.protocols import parts`.

Each computes; none of them communicates. What is sent and received stands in the protocol's file.
"""

from codistill.protocols.parts.aggregation import KINDS, PLAIN_KINDS, Aggregation
from codistill.protocols.parts.classes import check_classes, class_means, class_means_of_others, class_targets
from codistill.protocols.parts.contrast import contrast, log_complement, log_other_class, log_same_class
from codistill.protocols.parts.discriminator import Discriminator
from codistill.protocols.parts.latest_outputs import expected_latest, keep_latest, latest_of_others
from codistill.protocols.parts.losses import clip_rows, distillation
from codistill.protocols.parts.representations import (
    accepts_representations,
    check_features,
    drawn_representations,
    mean_representations,
    own_representations,
    recent,
)
from codistill.protocols.parts.ring import as_targets, ring_neighbours
from codistill.protocols.parts.schedules import SCHEDULES, communication_steps, lr_factor, set_lr
from codistill.protocols.parts.shared_outputs import (
    coverage,
    disagreement,
    expected_features,
    expected_outputs,
    expected_reply,
    leave_one_out,
    output_bytes,
    replies,
    stacked,
)
from codistill.protocols.parts.simplex import accepted_probabilities, on_simplex
from codistill.protocols.parts.training import train_locally
from codistill.protocols.parts.weights import (
    accepted_weights,
    check_equal_weights,
    combined_weights,
    groups_alike,
    mean_weights,
    same_initial_weights,
)

__all__ = [
    "KINDS", "PLAIN_KINDS", "SCHEDULES", "Aggregation", "Discriminator", "accepted_probabilities", "accepted_weights",
    "accepts_representations", "as_targets", "check_classes", "check_equal_weights", "check_features", "class_means",
    "class_means_of_others", "class_targets", "clip_rows", "combined_weights", "communication_steps", "contrast",
    "coverage", "disagreement", "distillation", "drawn_representations", "expected_features", "expected_latest",
    "expected_outputs", "expected_reply", "groups_alike", "keep_latest", "latest_of_others", "leave_one_out",
    "log_complement", "log_other_class", "log_same_class", "lr_factor", "mean_representations", "mean_weights",
    "on_simplex", "output_bytes", "own_representations", "recent", "replies", "ring_neighbours", "same_initial_weights",
    "set_lr", "stacked", "train_locally",
]  # fmt: skip
