"""The noise by a Triton kernel, a lane for each number. Words live in 64 bits: a product keeps its high half."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.gpu import Budget
from executor_svc.kernels.noise import TOKEN_LANE

BLOCK = 256
BUDGETS = {"_uniform": Budget(registers=32)}
LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit(do_not_specialize=["count", "lane"])
def _uniform(seeds, choices, positions, numbers, count, lane, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count
    seed = tl.load(seeds + at, mask=inside, other=0)
    word0 = tl.load(choices + at, mask=inside, other=0).to(tl.uint64)
    word1 = tl.load(positions + at, mask=inside, other=0).to(tl.uint64)
    word2 = tl.zeros([block], dtype=tl.uint64) + lane.to(tl.uint64)
    word3 = tl.zeros([block], dtype=tl.uint64)
    key0 = seed & LOW
    key1 = seed >> 32
    for _ in tl.static_range(10):
        product0 = word0 * 0xD2511F53
        product1 = word2 * 0xCD9E8D57
        word0 = (product1 >> 32) ^ word1 ^ key0
        word2 = (product0 >> 32) ^ word3 ^ key1
        word1 = product1 & LOW
        word3 = product0 & LOW
        key0 = (key0 + 0x9E3779B9) & LOW
        key1 = (key1 + 0xBB67AE85) & LOW
    bits = (word0 << 21) | (word1 >> 11)
    tl.store(numbers + at, bits.to(tl.int64).to(tl.float64) * (1.0 / (1 << 53)), mask=inside)


def uniform(seeds: Tensor, choices: Tensor, positions: Tensor, lane: int = TOKEN_LANE) -> Tensor:
    """See Uniform."""
    count = len(seeds)
    numbers = torch.empty(count, dtype=torch.float64, device=seeds.device)
    if count:
        columns = (each.contiguous() for each in (seeds, choices, positions))
        _uniform[(triton.cdiv(count, BLOCK),)](*columns, numbers, count, lane, block=BLOCK)
    return numbers
