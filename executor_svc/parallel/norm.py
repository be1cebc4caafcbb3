"""RMSNorm of something whose columns the ranks divide."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.parallel.ranks import Ranks


def rank_norm(ranks: Ranks, weight: Tensor, size_of_all: int, eps: float, x: Tensor) -> None:
    """Do as RmsNorm, IN PLACE, to this rank's columns x [T, width], by the mean square of all ranks' columns together.

    `size_of_all`: how many columns these are. One that several ranks have counts as often as it is there, on either
    side.
    """
    wide = x.float()
    squares = wide.pow(2).sum(-1, keepdim=True)
    ranks.sum(squares)
    factor = torch.rsqrt(squares / size_of_all + eps)
    x.copy_(wide * factor * weight.float())
