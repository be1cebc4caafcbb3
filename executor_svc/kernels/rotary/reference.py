"""Rotary embedding, plain."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See RotaryEmbedding."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
