"""Rotary embedding in four passes over half the memory each."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See RotaryEmbedding."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.empty(x.shape, dtype=torch.float32)
    turned_first, turned_second = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
    return turned.to(x.dtype)
