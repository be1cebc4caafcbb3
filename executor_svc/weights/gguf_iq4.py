"""GGUF's IQ4 types: a nibble names one of sixteen levels that lie closer together near 0.

llama.cpp takes IQ4_NL for the rows of Q2_K and Q3_K files whose length is no multiple of 256, as in most models below a
billion parameters. Each function fills `out`, float32 [B, elements of a block] and contiguous, from blocks, uint8
[B, bytes of a block].
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.weights.gguf_bits import fields, half, nibbles

_LEVELS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)
"""Part of the format."""


def iq4_nl(blocks: Tensor, out: Tensor) -> None:
    """Scale, then 32 nibbles as in Q4_0."""
    out.copy_(_levels(nibbles(blocks[:, 2:], torch.int16))).mul_(half(blocks, 0))


def iq4_xs(blocks: Tensor, out: Tensor) -> None:
    """Scale, 2 bytes of upper and 4 of lower bits of 8 scales that stand for -32 to 31, 128 of nibbles."""
    high = fields(blocks[:, 2:4], 1, 2).view(-1, 8)
    low = fields(blocks[:, 4:8], 1, 4).view(-1, 8)
    scales = high.mul_(16).bitwise_or_(low).view(torch.int8).sub_(32)
    out.copy_(_levels(fields(blocks[:, 8:136], 16, 4).view(-1, 256)))
    out.view(-1, 8, 32).mul_((half(blocks, 0) * scales).unsqueeze(2))


def _levels(numbers: Tensor) -> Tensor:
    """Return the levels, float32, of numbers uint8 [B, N]."""
    return _LEVELS[numbers.int()]
