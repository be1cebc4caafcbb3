"""Forbidden tokens by a Triton kernel: a program for each row's list."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.gpu import Budget

BLOCK = 256
BUDGETS = {"_forbid_tokens": Budget(registers=32)}


@triton.jit
def _forbid_tokens(logits, token_ids, begins, ends, vocab, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + row)
    for begin in range(tl.load(begins + row), end, block):
        at = begin + tl.arange(0, block)
        token = tl.load(token_ids + at, mask=at < end, other=0)
        tl.store(logits + row * vocab + token, float("-inf"), mask=at < end)


def forbid_tokens(logits: Tensor, *, token_ids: Tensor, begins: Tensor, ends: Tensor) -> None:
    """See ForbidTokens. ValueError where the logits are not contiguous."""
    if not logits.is_contiguous():
        raise ValueError("logits are changed in place, and must be contiguous")
    if len(logits) and len(token_ids):
        _forbid_tokens[(len(logits),)](logits, token_ids, begins, ends, logits.shape[1], block=BLOCK)
