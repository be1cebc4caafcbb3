"""Activations, plain."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See SiluAndMul."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: Tensor, *, tanh: bool) -> Tensor:
    """See GeluAndMul."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gelu(gate, tanh=tanh) * up).to(gate_up.dtype)


def gelu(x: Tensor, *, tanh: bool) -> Tensor:
    """See Gelu."""
    return functional.gelu(x.float(), approximate="tanh" if tanh else "none").to(x.dtype)


def relu(x: Tensor) -> Tensor:
    """See Relu."""
    return torch.relu(x)
