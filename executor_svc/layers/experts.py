"""A feed-forward layer of routed experts (Shazeer et al. 2017, "Outrageously Large Neural Networks"; Jiang et al. 2024,
"Mixtral of Experts").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear import Linear


class RoutedExperts:
    """Every token goes through the `num_used` experts that its router scores highest; their outputs are added, weighted
    by softmax of the scores.

    Tokens are sorted by expert, so each expert that is wanted at all runs once a step. A token's outputs are added in
    the order of its own scores, whatever else is in the batch.
    """

    def __init__(
        self,
        router: Linear,
        ups: Sequence[Linear],
        activation: Callable[[Tensor], Tensor],
        downs: Sequence[Linear],
        *,
        num_used: int,
        normalize: bool,
        kernels: KernelSet,
    ) -> None:
        """`normalize`: whether the weights of the experts used are made to sum to 1."""
        self._route = kernels.route_experts
        self._join = kernels.join_experts
        self._router = router
        self._ups = ups
        self._activation = activation
        self._downs = downs
        self._num_used = num_used
        self._normalize = normalize

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to a new [T, hidden]."""
        routing = self._route(self._router(x), self._num_used, normalize=self._normalize)
        tokens = x[routing.order // self._num_used]
        up = _by_expert(self._ups, tokens, routing.counts)
        return self._join(_by_expert(self._downs, self._activation(up), routing.counts), routing)


def _by_expert(experts: Sequence[Linear], x: Tensor, counts: Sequence[int]) -> Tensor:
    """Give each run of rows to its expert: the first counts[0] rows to experts[0], and so on."""
    used = [(expert, count) for expert, count in zip(experts, counts, strict=True) if count]
    runs = torch.split(x, [count for _, count in used])
    return torch.cat([expert(rows) for (expert, _), rows in zip(used, runs, strict=True)])
