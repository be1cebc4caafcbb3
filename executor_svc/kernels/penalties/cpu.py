"""Penalties, all places at once."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.penalties import LARGEST_LOGIT


def apply_penalties(
    logits: Tensor,
    *,
    rows: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """See the contract."""
    seen = logits[rows, token_ids]
    factor = repetition[rows]
    seen = torch.where(seen > 0, seen / factor, seen * factor)
    counts = output_counts.to(torch.float32)
    seen -= presence[rows] * (counts > 0)
    seen -= frequency[rows] * counts
    logits[rows, token_ids] = seen.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)
