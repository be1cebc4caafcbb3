"""Logprobs by partial selection."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.selection import top_candidates


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See the contract."""
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    sampled = (logits.gather(1, token_ids[:, None]) - normalizer)[:, 0]
    if num_top == 0:
        nothing = logits.new_empty((len(logits), 0))
        return sampled, nothing.to(torch.int64), nothing
    values, ids = top_candidates(logits, num_top)
    return sampled, ids, values - normalizer
