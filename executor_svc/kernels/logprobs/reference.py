"""Logprobs by a full, stable sort."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See the contract."""
    logprobs = torch.log_softmax(logits, dim=-1)
    sampled = logprobs.gather(1, token_ids[:, None])[:, 0]
    # Sorted by logit: two logits that differ can have equal logprobs, and the order must not depend on that rounding.
    top_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    return sampled, top_ids, logprobs.gather(1, top_ids)
