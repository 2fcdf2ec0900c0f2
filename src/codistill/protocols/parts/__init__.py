"""Functions that protocols share, for a protocol of one's own as well: `from codistill.protocols import parts`.

Each computes; none of them communicates. What is sent and received stands in the protocol's file.
"""

from codistill.protocols.parts.aggregation import KINDS, PLAIN_KINDS, TRIM, Aggregation
from codistill.protocols.parts.classes import (
    SMALLEST,
    check_classes,
    chosen,
    class_means,
    class_means_of_others,
    class_targets,
    classes_by_holders,
    large_classes,
)
from codistill.protocols.parts.contrast import contrast, log_complement, log_other_class, log_same_class
from codistill.protocols.parts.discriminator import Discriminator
from codistill.protocols.parts.dkd import (
    accepted_gradients,
    dkd_gradient,
    floats,
    note_effect,
    stepped,
    unless_diverged,
)
from codistill.protocols.parts.generator import (
    Generator,
    accepted_heads,
    check_head,
    class_weights,
    diversity_loss,
    head_name,
)
from codistill.protocols.parts.latest_outputs import expected_latest, keep_latest, latest_of_others
from codistill.protocols.parts.losses import clip_rows, distillation
from codistill.protocols.parts.newest_weights import (
    OPTIMISER_STATES,
    keep_newest,
    newest_weights,
    round_held,
    take_over,
)
from codistill.protocols.parts.representations import (
    accepts_representations,
    check_features,
    check_sharing,
    drawn_representations,
    keep_observations,
    mean_representations,
    own_representations,
    random_representations,
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
from codistill.protocols.parts.training import activation_divergence, parameters_of, proximal, train_locally
from codistill.protocols.parts.weights import (
    AVERAGES,
    accepted_weights,
    check_equal_weights,
    combined_weights,
    group_means,
    groups_alike,
    mean_weights,
    same_initial_weights,
    shared_weights,
    split_message,
    to_groups,
    watch_growth,
)

__all__ = [
    "AVERAGES", "KINDS", "OPTIMISER_STATES", "PLAIN_KINDS", "SCHEDULES", "SMALLEST", "TRIM", "Aggregation",
    "Discriminator", "Generator", "accepted_gradients", "accepted_heads", "accepted_probabilities", "accepted_weights",
    "accepts_representations", "activation_divergence", "as_targets", "check_classes", "check_equal_weights",
    "check_features", "check_head", "check_sharing", "chosen", "class_means", "class_means_of_others", "class_targets",
    "class_weights", "classes_by_holders", "clip_rows", "combined_weights", "communication_steps", "contrast",
    "coverage", "disagreement", "distillation", "diversity_loss", "dkd_gradient", "drawn_representations",
    "expected_features", "expected_latest", "expected_outputs", "expected_reply", "floats", "group_means",
    "groups_alike", "head_name", "keep_latest", "keep_newest", "keep_observations", "large_classes", "latest_of_others",
    "leave_one_out", "log_complement", "log_other_class", "log_same_class", "lr_factor", "mean_representations",
    "mean_weights", "newest_weights", "note_effect", "on_simplex", "output_bytes", "own_representations",
    "parameters_of", "proximal", "random_representations", "recent", "replies", "ring_neighbours", "round_held",
    "same_initial_weights", "set_lr", "shared_weights", "split_message", "stacked", "stepped", "take_over", "to_groups",
    "train_locally", "unless_diverged", "watch_growth",
]  # fmt: skip
