"""Sampling, row by row over the sorted vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.sampling import GREEDY_TEMPERATURE


def sample_tokens(
    logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """See the contract."""
    columns = zip(logits, temperature, top_k.tolist(), top_p.tolist(), min_p, uniform, strict=True)
    return torch.tensor([_sample(*column) for column in columns], dtype=torch.int64, device=logits.device)


def _sample(logits: Tensor, temperature: Tensor, top_k: int, top_p: float, min_p: Tensor, uniform: Tensor) -> int:
    ranked, ids = logits.sort(descending=True, stable=True)
    if temperature < GREEDY_TEMPERATURE:
        return int(ids[0])
    weights = torch.exp((ranked - ranked[0]) / temperature)
    kept = len(weights) if top_k == 0 else min(top_k, len(weights))
    if top_p < 1:
        mass = weights[:kept].cumsum(0, dtype=torch.float64)
        kept = int((mass < top_p * mass[-1]).sum()) + 1
    weights[kept:] = 0
    weights[weights < min_p] = 0
    distribution = torch.zeros_like(weights).scatter_(0, ids, weights).cumsum(0, dtype=torch.float64)
    # uniform * sum can round up to the sum, which nothing exceeds.
    below = torch.nextafter(distribution[-1], distribution.new_zeros(()))
    threshold = torch.minimum(uniform * distribution[-1], below)
    return int((distribution <= threshold).sum())
