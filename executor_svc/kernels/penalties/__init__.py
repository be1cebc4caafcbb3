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
        tokens: Tensor,
        slots: Tensor,
        num_prompt_tokens: Tensor,
        num_tokens: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        """Change logits float32 [N, V] IN PLACE at the tokens that were seen; every other logit keeps its bits.

        Row i has seen the first num_tokens[i] of tokens[slots[i]]: the first num_prompt_tokens[i] are its prompt, the
        others its output. tokens is int32 [S, L], ids below V; the others are int64 [N]; repetition, presence and
        frequency are float32 [N]. At each distinct token, in this order: where the row's repetition is not 1, a
        positive logit is divided by it, any other multiplied by it; presence is subtracted where the output holds the
        token; frequency times the number of times that it does is subtracted. Where repetition is 1, tokens of the
        prompt alone are left as they are. What goes past the largest finite float32 stays there: a tiny repetition must
        not make a logit infinite. 1, 0 and 0 change nothing.
        """
