"""Functions that protocols share, for a protocol of one's own as well: `from codistill.protocols import parts`.

Each computes; none of them communicates. What is sent and received stands in the protocol's file.
"""

from codistill.protocols.parts.aggregation import KINDS, PLAIN_KINDS, TRIM, Aggregation
from codistill.protocols.parts.classes import (
    SMALLEST,
    are_real_values,
    check_classes,
    check_features,
    check_head,
    chosen,
    class_means,
    class_targets,
    classes_by_holders,
    head_name,
    large_classes,
    named_classes,
)
from codistill.protocols.parts.discriminator import Discriminator
from codistill.protocols.parts.outputs import (
    clip_rows,
    coverage,
    disagreement,
    distillation,
    expected_outputs,
    expected_reply,
    leave_one_out,
    output_bytes,
    replies,
    stacked,
)
from codistill.protocols.parts.training import (
    SCHEDULES,
    activation_divergence,
    as_targets,
    communication_steps,
    lr_factor,
    ring_neighbours,
    set_lr,
    train_locally,
)
from codistill.protocols.parts.weights import (
    GROWTH,
    OPTIMISER_STATES,
    accepted_weights,
    architectures,
    capped_samples,
    check_equal_weights,
    combined_weights,
    group_means,
    groups_alike,
    is_far_beyond,
    robust_weights,
    same_initial_weights,
    shared_weights,
    size_of,
    split_message,
    take_over,
    to_groups,
    watch_growth,
    weighted_sum,
)

__all__ = [
    "GROWTH", "KINDS", "OPTIMISER_STATES", "PLAIN_KINDS", "SCHEDULES", "SMALLEST", "TRIM", "Aggregation",
    "Discriminator", "accepted_weights", "activation_divergence", "architectures", "are_real_values", "as_targets",
    "capped_samples",
    "check_classes", "check_equal_weights", "check_features", "check_head", "chosen", "class_means", "class_targets",
    "classes_by_holders", "clip_rows", "combined_weights", "communication_steps", "coverage", "disagreement",
    "distillation", "expected_outputs", "expected_reply", "group_means", "groups_alike", "head_name", "is_far_beyond",
    "large_classes", "leave_one_out", "lr_factor", "named_classes", "output_bytes", "replies",
    "ring_neighbours", "robust_weights", "same_initial_weights", "set_lr", "shared_weights", "size_of", "split_message",
    "stacked", "take_over", "to_groups", "train_locally", "watch_growth", "weighted_sum",
]  # fmt: skip
