"""Logit bias, all places at once."""

from __future__ import annotations

from torch import Tensor

from executor_svc.kernels.logit_bias import LARGEST_LOGIT


def add_logit_bias(logits: Tensor, *, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """See the contract."""
    logits[rows, token_ids] = (logits[rows, token_ids] + values).clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)
