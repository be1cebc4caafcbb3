"""Sampling, row by row over the sorted vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.sampling import GREEDY_TEMPERATURE, UNITS


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
    weights = exponents.double().exp().float()
    units = _units(weights.double())
    kept = len(units) if top_k == 0 else min(top_k, len(units))
    if top_p < 1:
        mass = units[:kept].cumsum(0)
        kept = int((mass < _share(mass[-1], top_p)).sum()) + 1
    units[kept:] = 0
    units[weights < min_p] = 0
    if typical_p < 1:
        units[_atypical(exponents.double(), weights.double(), units, typical_p)] = 0
    distribution = torch.zeros_like(units).scatter_(0, ids, units).cumsum(0)
    # uniform * sum can round up to the sum, which nothing exceeds.
    threshold = torch.minimum((uniform * distribution[-1].double()).long(), distribution[-1] - 1)
    return int((distribution <= threshold).sum())


def _atypical(exponents: Tensor, weights: Tensor, units: Tensor, typical_p: float) -> Tensor:
    """Which ranks typical_p drops, bool [V]; those of weight 0 it may keep."""
    alive = units > 0
    mean = _units(torch.where(alive, weights * exponents, 0.0)).sum().double() / units.sum().double()
    distances = torch.where(alive, (exponents - mean).abs(), torch.inf)
    nearest = distances.argsort()
    last = int((units[nearest].cumsum(0) < _share(units.sum(), typical_p)).sum())
    return distances > distances[nearest[last]]


def _units(values: Tensor) -> Tensor:
    return (values * UNITS).round().long()


def _share(total: Tensor, share: float) -> Tensor:
    return (share * total.double()).ceil().long()
