"""Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.routed_experts import Routing


def route_experts(scores: Tensor, num_used: int, *, normalize: bool) -> Routing:
    """See RouteExperts. The counts are read on the host: they say which products there are."""
    weights, chosen = scores.float().softmax(-1).topk(num_used, dim=-1)
    if normalize:
        weights /= weights.sum(-1, keepdim=True)
    flat = chosen.flatten()
    counts = flat.bincount(minlength=scores.shape[-1]).tolist()
    return Routing(weights, flat.argsort(stable=True), counts)


def join_experts(outputs: Tensor, routing: Routing) -> Tensor:
    """See JoinExperts."""
    weights = routing.weights
    by_use = torch.empty_like(outputs).index_copy_(0, routing.order, outputs).view(*weights.shape, -1)
    return (by_use.float() * weights[..., None]).sum(1).to(outputs.dtype)
