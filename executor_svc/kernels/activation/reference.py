"""Gated activation, plain."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See SiluAndMul."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
