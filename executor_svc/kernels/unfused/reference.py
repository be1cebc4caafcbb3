"""The ops apart, by torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from executor_svc.kernels.rotary_write_kv.reference import rotary_embedding
from executor_svc.kernels.rotary_write_kv.reference import write_kv as write


def add(x: Tensor, y: Tensor) -> Tensor:
    """See Add."""
    return x + y


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """See Multiply."""
    return x * y


def silu(x: Tensor) -> Tensor:
    """See Silu."""
    return functional.silu(x.float()).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See Rotary."""
    return rotary_embedding(x, cos, sin)


def write_kv(key: Tensor, value: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """See WriteKv."""
    write(key, value, key_cache, value_cache, slot_mapping)
