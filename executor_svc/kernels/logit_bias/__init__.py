"""Contract of the logit bias."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

LARGEST_LOGIT = torch.finfo(torch.float32).max
"""Where biased logits end, in either direction."""


class AddLogitBias(Protocol):
    """Bias of single tokens."""

    def __call__(self, logits: Tensor, *, token_ids: Tensor, values: Tensor, begins: Tensor, ends: Tensor) -> None:
        """Change logits float32 [N, V] IN PLACE at some tokens; every other logit keeps its bits.

        Row i's tokens are token_ids[begins[i] : ends[i]], distinct, of int64 [A]; begins and ends are int64 [N], equal
        where a row has none. Their values (float32 [A], finite) are added. What goes past the largest finite float32
        stays there: no bias makes a logit infinite.
        """
