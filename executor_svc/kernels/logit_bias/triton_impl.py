"""Logit bias by a Triton kernel: a program for each row's list."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels import logit_bias as contract
from executor_svc.kernels.gpu import Budget

BLOCK = 256
BUDGETS = {"_add_logit_bias": Budget(registers=32)}
LARGEST = tl.constexpr(contract.LARGEST_LOGIT)


@triton.jit
def _add_logit_bias(logits, token_ids, values, begins, ends, vocab, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + row)
    for begin in range(tl.load(begins + row), end, block):
        at = begin + tl.arange(0, block)
        inside = at < end
        place = logits + row * vocab + tl.load(token_ids + at, mask=inside, other=0)
        x = tl.load(place, mask=inside, other=0.0) + tl.load(values + at, mask=inside, other=0.0)
        tl.store(place, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), mask=inside)


def add_logit_bias(logits: Tensor, *, token_ids: Tensor, values: Tensor, begins: Tensor, ends: Tensor) -> None:
    """See AddLogitBias. ValueError where the logits are not contiguous."""
    if not logits.is_contiguous():
        raise ValueError("logits are changed in place, and must be contiguous")
    if len(logits) and len(token_ids):
        _add_logit_bias[(len(logits),)](logits, token_ids, values, begins, ends, logits.shape[1], block=BLOCK)
