"""Penalties by two Triton kernels: the tokens seen are counted, then each of their logits is changed once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels import penalties as contract
from executor_svc.kernels.gpu import Budget

MAX_BLOCK = 2048
BUDGETS = {"_count": Budget(registers=96, shared_bytes=16_384), "_change": Budget(registers=96)}
LARGEST = tl.constexpr(contract.LARGEST_LOGIT)
IN_PROMPT = tl.constexpr(1 << 30)
"""Set beside the count of a token that the prompt holds."""
COUNT = tl.constexpr((1 << 30) - 1)


@triton.jit
def _is_on(repetition, presence, frequency, row):
    is_repetition = tl.load(repetition + row) != 1.0
    return is_repetition | (tl.load(presence + row) != 0.0) | (tl.load(frequency + row) != 0.0)


@triton.jit
def _count(
    tokens,
    slots,
    num_prompt_tokens,
    num_tokens,
    repetition,
    presence,
    frequency,
    seen,
    vocab,
    tokens_stride,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * block
    length = tl.load(num_tokens + row)
    if (begin < length) & _is_on(repetition, presence, frequency, row):
        at = begin + tl.arange(0, block)
        inside = at < length
        token = tl.load(tokens + tl.load(slots + row) * tokens_stride + at, mask=inside, other=0)
        is_prompt = at < tl.load(num_prompt_tokens + row)
        place = seen + row * vocab + token
        one = tl.full([block], 1, dtype=tl.int32)
        tl.atomic_add(place, one, mask=inside & (is_prompt == 0), sem="relaxed")
        tl.atomic_or(place, one * IN_PROMPT, mask=inside & is_prompt, sem="relaxed")


@triton.jit
def _change(logits, repetition, presence, frequency, seen, vocab, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if _is_on(repetition, presence, frequency, row):
        token = tl.program_id(1) * block + tl.arange(0, block)
        inside = token < vocab
        times = tl.load(seen + row * vocab + token, mask=inside, other=0)
        count = times & COUNT
        factor = tl.load(repetition + row)
        changes = inside & (tl.where(factor != 1.0, times, count) > 0)
        x = tl.load(logits + row * vocab + token, mask=changes, other=0.0)
        x = tl.where(x > 0, tl.div_rn(x, factor + tl.zeros_like(x)), x * factor)
        x = tl.where(count > 0, x - tl.load(presence + row), x)
        x = x - tl.load(frequency + row) * count.to(tl.float32)
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
        tl.store(logits + row * vocab + token, x, mask=changes)


def apply_penalties(
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
    """See ApplyPenalties. ValueError where the logits are not contiguous."""
    if not logits.is_contiguous():
        raise ValueError("logits are changed in place, and must be contiguous")
    num_rows, vocab = logits.shape
    if not num_rows:
        return
    seen = torch.zeros((num_rows, vocab), dtype=torch.int32, device=logits.device)
    factors = repetition.contiguous(), presence.contiguous(), frequency.contiguous()
    lengths = slots.contiguous(), num_prompt_tokens.contiguous(), num_tokens.contiguous()
    if tokens.stride(1) != 1:
        tokens = tokens.contiguous()
    longest = tokens.shape[1]
    block = min(MAX_BLOCK, triton.next_power_of_2(longest))
    _count[(num_rows, triton.cdiv(longest, block))](
        tokens, *lengths, *factors, seen, vocab, tokens.stride(0), block=block
    )
    block = min(MAX_BLOCK, triton.next_power_of_2(vocab))
    # A product fused with a difference is not rounded, as the contract's is.
    _change[(num_rows, triton.cdiv(vocab, block))](logits, *factors, seen, vocab, block=block, enable_fp_fusion=False)
