"""Sampling, row by row over the sorted vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.sampling import GREEDY_TEMPERATURE


def sample_tokens(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    typical_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """See the contract."""
    columns = zip(logits, temperature, top_k.tolist(), top_p.tolist(), min_p, typical_p.tolist(), uniform, strict=True)
    return torch.tensor([_sample(*column) for column in columns], dtype=torch.int64, device=logits.device)


def _sample(
    logits: Tensor, temperature: Tensor, top_k: int, top_p: float, min_p: Tensor, typical_p: float, uniform: Tensor
) -> int:
    ranked, ids = logits.sort(descending=True, stable=True)
    if temperature < GREEDY_TEMPERATURE:
        return int(ids[0])
    exponents = (ranked - ranked[0]) / temperature
    weights = torch.exp(exponents)
    kept = len(weights) if top_k == 0 else min(top_k, len(weights))
    if top_p < 1:
        mass = weights[:kept].cumsum(0, dtype=torch.float64)
        kept = int((mass < top_p * mass[-1]).sum()) + 1
    weights[kept:] = 0
    weights[weights < min_p] = 0
    if typical_p < 1:
        weights[_atypical(exponents, weights, ids, typical_p)] = 0
    distribution = _running_sum(weights, ids)
    # uniform * sum can round up to the sum, which nothing exceeds.
    below = torch.nextafter(distribution[-1], distribution.new_zeros(()))
    threshold = torch.minimum(uniform * distribution[-1], below)
    return int((distribution <= threshold).sum())


def _atypical(exponents: Tensor, weights: Tensor, ids: Tensor, typical_p: float) -> Tensor:
    """Which ranks typical_p drops, bool [V]; those of weight 0 it may keep."""
    exponents, weights = exponents.to(torch.float64), weights.to(torch.float64)
    alive = weights > 0
    total = _running_sum(weights, ids)[-1]
    mean = _running_sum(torch.where(alive, weights * exponents, 0.0), ids)[-1] / total
    distances = torch.where(alive, (exponents - mean).abs(), torch.inf)
    nearest = distances.sort(stable=True).indices
    last = int((weights[nearest].cumsum(0) < typical_p * total).sum())
    return distances > distances[nearest[last]]


def _running_sum(values: Tensor, ids: Tensor) -> Tensor:
    """Running sum in ascending id of values in the order of ids, float64 [V]."""
    return torch.zeros_like(values).scatter_(0, ids, values).cumsum(0, dtype=torch.float64)
