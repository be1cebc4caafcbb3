"""Contract of forbidden tokens."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ForbidTokens(Protocol):
    """Tokens that must not be sampled."""

    def __call__(self, logits: Tensor, *, token_ids: Tensor, begins: Tensor, ends: Tensor) -> None:
        """Make logits float32 [N, V] negative infinity IN PLACE at some tokens; every other logit keeps its bits.

        Row i's tokens are token_ids[begins[i] : ends[i]] of int64 [A]; begins and ends are int64 [N], equal where a row
        has none.
        """
