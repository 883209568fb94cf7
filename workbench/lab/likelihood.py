"""Distances between next-token distributions, in nats.

Two models of a pair share their token ids, but one may have padded its vocabulary further: logits are cut to
what both have before they are normalised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kl_divergence(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p ‖ q) of each row.

    Args:
        logits_p: (n, vocab) of the reference.
        logits_q: (n, vocab) of what is held against it.

    Returns:
        (n,) float64, never below 0.
    """
    vocab = min(logits_p.shape[-1], logits_q.shape[-1])
    log_p = logits_p[..., :vocab].double().log_softmax(-1)
    log_q = logits_q[..., :vocab].double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0.0)  # rounding can leave -1e-17 where p = q


def cross_entropy(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """-log p of the token that really came, of each row.

    Args:
        logits: (n, vocab), row i predicts ids[i].
        ids: n token ids.

    Returns:
        (n,) float64.
    """
    chosen = torch.tensor(list(ids), dtype=torch.long)
    return -logits.double().log_softmax(-1).gather(-1, chosen[:, None])[:, 0]


def same_argmax(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """(n,) bool: whether both rows have the same likeliest token."""
    vocab = min(logits_p.shape[-1], logits_q.shape[-1])
    return logits_p[..., :vocab].argmax(-1) == logits_q[..., :vocab].argmax(-1)
