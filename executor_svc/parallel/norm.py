"""RMSNorm of something whose columns the ranks divide."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.parallel.ranks import Ranks


def rank_norm(ranks: Ranks, weight: Tensor, eps: float, x: Tensor) -> None:
    """Do as RmsNorm, IN PLACE, to this rank's columns x [T, width], by the mean square of all ranks' columns together.

    All ranks have the same width. Columns that several ranks have count as often as they are there, on either side.
    """
    wide = x.float()
    squares = wide.pow(2).sum(-1, keepdim=True)
    ranks.sum(squares)
    factor = torch.rsqrt(squares / (x.shape[1] * ranks.share.size) + eps)
    x.copy_(wide * factor * weight.float())
