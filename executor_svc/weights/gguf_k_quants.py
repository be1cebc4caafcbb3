"""GGUF's K-quants: superblocks of 256 elements whose 8 or 16 parts have small scales of their own.

Each function fills `out`, float32 [B, 256] and contiguous, from blocks, uint8 [B, bytes of a block].
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.weights.gguf_bits import fields, half


def q2_k(blocks: Tensor, out: Tensor) -> None:
    """16 bytes of scales (low nibble) and minima (high), 64 of elements of 2 bits, scales of both."""
    scales = blocks[:, :16]
    values = out.view(-1, 16, 16)
    values.copy_(fields(blocks[:, 16:80], 32, 2).view(-1, 16, 16))
    values.mul_((half(blocks, 80) * (scales & 15)).unsqueeze(2))
    values.sub_((half(blocks, 82) * (scales >> 4)).unsqueeze(2))


def q3_k(blocks: Tensor, out: Tensor) -> None:
    """32 bytes of third bits, 64 of lower bits, 12 of scales of 6 bits that stand for -32 to 31, their scale.

    An element whose third bit is clear has 4 taken off.
    """
    values = fields(blocks[:, 32:96], 32, 2).view(-1, 256).view(torch.int8)
    values += fields(blocks[:, :32], 32, 1).view(-1, 256).view(torch.int8).sub_(1).mul_(4)
    low = fields(blocks[:, 96:104], 8, 4).view(-1, 16)
    high = fields(blocks[:, 104:108], 4, 2).view(-1, 16)
    scales = high.mul_(16).bitwise_or_(low).view(torch.int8).sub_(32)
    out.copy_(values)
    out.view(-1, 16, 16).mul_((half(blocks, 108) * scales).unsqueeze(2))


def q4_k(blocks: Tensor, out: Tensor) -> None:
    """Scales of scales and of minima, 12 bytes of both, 128 of elements of 4 bits."""
    _fill_with_minima(blocks, fields(blocks[:, 16:144], 32, 4), out)


def q5_k(blocks: Tensor, out: Tensor) -> None:
    """As Q4_K, with 32 bytes of fifth bits before the 128 of the lower ones."""
    high = fields(blocks[:, 16:48], 32, 1).view(-1, 8, 32).mul_(16)
    _fill_with_minima(blocks, fields(blocks[:, 48:176], 32, 4).view(-1, 8, 32).bitwise_or_(high), out)


def q6_k(blocks: Tensor, out: Tensor) -> None:
    """128 bytes of lower bits, 64 of upper ones, 16 signed scales, their scale. Elements stand for -32 to 31."""
    low = fields(blocks[:, :128], 64, 4).view(-1, 256)
    high = fields(blocks[:, 128:192], 32, 2).view(-1, 256)
    scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    out.copy_(high.mul_(16).bitwise_or_(low).view(torch.int8).sub_(32))
    out.view(-1, 16, 16).mul_(scales.unsqueeze(2))


def _fill_with_minima(blocks: Tensor, elements: Tensor, out: Tensor) -> None:
    """Fill from the elements of Q4_K and Q5_K, whose 8 scales and 8 minima of 6 bits share bytes 4 to 15."""
    first, second, upper = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (upper & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (upper >> 4) | ((second >> 2) & 48)), dim=1)
    values = out.view(-1, 8, 32)
    values.copy_(elements.view(-1, 8, 32))
    values.mul_((half(blocks, 0) * scales).unsqueeze(2))
    values.sub_((half(blocks, 2) * minima).unsqueeze(2))
