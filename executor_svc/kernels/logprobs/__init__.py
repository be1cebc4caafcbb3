"""Contract of the logprobs."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GatherLogprobs(Protocol):
    """How likely the model itself held a token, and its likeliest ones."""

    def __call__(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Take raw logits float32 [N, V], finite, as the model gave them, token_ids int64 [N], and num_top from 0 to V.

        Give, under log_softmax(logits) in float32, the logprob of each row's token, float32 [N]; the ids of its num_top
        likeliest, likeliest first and among equals the lowest id first, int64 [N, num_top]; their logprobs, float32
        [N, num_top]. Nothing is changed.
        """
