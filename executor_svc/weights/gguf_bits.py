"""Fields of GGUF's packed blocks, taken out of many blocks at once."""

from __future__ import annotations

import torch
from torch import Tensor


def half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block as float32 [B, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def nibbles(packed: Tensor, lanes: torch.dtype) -> Tensor:
    """Return the nibbles of [B, 16] bytes, low halves first, as a new uint8 [B, 32].

    `lanes`: the widest integer to which blocks are aligned.
    """
    words = packed.view(lanes).contiguous()
    mask = 0x0F0F0F0F if lanes == torch.int32 else 0x0F0F
    # The mask takes off what a negative number's shift brings in.
    return torch.stack((words & mask, (words >> 4) & mask), dim=1).view(torch.uint8).view(-1, 32)


def high_bits(packed: Tensor) -> Tensor:
    """Return bit i of [B, 4] bytes as 16 where it is set, uint8 [B, 32]: the fifth bits of elements."""
    bits = packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)
    return bits.bitwise_and_(1).mul_(16).view(-1, 32)


def fields(packed: Tensor, run: int, width: int) -> Tensor:
    """Return the fields of `width` bits (1, 2 or 4) of bytes [B, N] as a new uint8 [B, N / run, 8 / width, run].

    The bytes come in runs; the lowest fields of a run's bytes are elements that lie side by side, then the next ones.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1)
    return (packed.reshape(len(packed), -1, 1, run) >> shifts).bitwise_and_((1 << width) - 1)
