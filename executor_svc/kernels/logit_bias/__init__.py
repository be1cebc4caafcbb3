"""Contract of the logit bias."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

LARGEST_LOGIT = torch.finfo(torch.float32).max
"""Where biased logits end, in either direction."""


class AddLogitBias(Protocol):
    """Bias of single tokens."""

    def __call__(self, logits: Tensor, *, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
        """Change logits float32 [N, V] IN PLACE at M places; every other logit keeps its bits.

        A place is a row (rows int64 [M]) and a token (token_ids int64 [M]); places are distinct. Its value (values
        float32 [M], finite) is added. What goes past the largest finite float32 stays there: no bias makes a logit
        infinite. M may be 0.
        """
