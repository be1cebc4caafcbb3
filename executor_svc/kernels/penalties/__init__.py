"""Contract of the penalties."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

LARGEST_LOGIT = torch.finfo(torch.float32).max
"""Where penalised logits end, in either direction."""


class ApplyPenalties(Protocol):
    """Repetition penalty (Keskar et al. 2019, "CTRL"), then presence and frequency penalties."""

    def __call__(
        self,
        logits: Tensor,
        *,
        rows: Tensor,
        token_ids: Tensor,
        output_counts: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        """Change logits float32 [N, V] IN PLACE at the M places that were seen; every other logit keeps its bits.

        A place is a row (rows int64 [M]) and a token of its prompt or output (token_ids int64 [M]), with how often
        the output holds the token (output_counts int32 [M]; 0 where only the prompt does). Places are distinct.
        repetition, presence and frequency are float32 [N]. At each place, in this order: a positive logit is divided
        by the row's repetition, any other multiplied by it; presence is subtracted where the count is above 0;
        frequency times the count is subtracted. 1, 0 and 0 change nothing. What goes past the largest finite float32
        stays there: a tiny repetition must not make a logit infinite. M may be 0.
        """
