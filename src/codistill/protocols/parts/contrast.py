"""Whether two features are of the same class, as the classifier itself estimates it: a contrast of classes."""

from __future__ import annotations

import torch


def log_same_class(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log h, h = ⟨p, q⟩ = Σ_k p_k q_k: the probability that samples with class probabilities p, q are of one class."""
    return torch.logsumexp(log_p + log_q, dim=-1)


def log_other_class(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log (1 - h) = log Σ_k p_k (1 - q_k), finite where h rounds to 1."""
    return torch.logsumexp(log_p + log_complement(log_q), dim=-1)


def log_complement(log_q: torch.Tensor) -> torch.Tensor:
    """log (1 - q_k) for each class k of normalised log-probabilities.

    Only the likeliest class can have q_k near 1, where 1 - q_k loses its digits; there it is the sum of all others.
    """
    likeliest = torch.nn.functional.one_hot(log_q.argmax(dim=-1), log_q.shape[-1]).bool()
    others = torch.logsumexp(log_q.masked_fill(likeliest, -torch.inf), dim=-1, keepdim=True)
    # masked_fill before the logarithm too: what is not taken must have a finite gradient.
    direct = torch.log1p(-log_q.masked_fill(likeliest, -1.0).exp())
    return torch.where(likeliest, others, direct)


def contrast(
    log_p: torch.Tensor, labels: torch.Tensor, log_q: torch.Tensor, known: torch.Tensor, *, mean: bool = True
) -> torch.Tensor:
    """The mean over samples of ℓ_disc(1, s_i, t^y_i) + Σ_{c ≠ y_i} ℓ_disc(0, s_i, t^c), ℓ_disc: -log h or -log (1 - h).

    `log_p` (B, K): of the samples s_i; `log_q` (B, C, K): of one t^c for each class and sample; `known` (B, C): which
    of them there are, the others are left out. `mean`: over the pairs of a sample, instead of their sum.
    """
    same = torch.nn.functional.one_hot(labels, log_q.shape[1]).bool()
    p = log_p[:, None, :]
    losses = -torch.where(same, log_same_class(p, log_q), log_other_class(p, log_q))
    kept = losses.masked_fill(~known, 0.0).sum(dim=1)
    return (kept / known.sum(dim=1).clamp(min=1) if mean else kept).mean()
