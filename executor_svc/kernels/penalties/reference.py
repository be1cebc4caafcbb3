"""Penalties, one place at a time."""

from __future__ import annotations

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
    for row, token, count in zip(rows.tolist(), token_ids.tolist(), output_counts.tolist(), strict=True):
        logit = logits[row, token]
        logit = logit / repetition[row] if logit > 0 else logit * repetition[row]
        if count > 0:
            logit = logit - presence[row]
        logits[row, token] = (logit - frequency[row] * count).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
