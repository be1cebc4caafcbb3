"""The paged KV memory: tensors only. Who owns which block is the scheduler's to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.huge_pages import advise_huge_pages

NULL_BLOCK = 0
"""Belongs to nobody: block tables are padded with it and padding tokens write to it. Its content means nothing."""


class KVShape(Protocol):
    """The part of a model's config that shapes its KV."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of a layer."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, in blocks of `block_size` tokens.

    A slot is block_id * block_size + offset. Memory is not cleared between owners: readers mask what their sequence
    does not own, whatever it holds.
    """

    num_blocks: int
    """Blocks, the null block included."""
    block_size: int
    """Tokens a block."""
    keys: tuple[Tensor, ...]
    """Per layer [num_blocks, block_size, num_kv_heads, head_dim]."""
    values: tuple[Tensor, ...]
    """Per layer, shaped like keys."""

    @classmethod
    def allocate(
        cls, config: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Take the memory. Pages of it, huge ones where the system has them, become resident when first written."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}: at least 2 are needed, the null block and one to use")
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        keys = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers))
        values = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers))
        if device.type == "cpu":
            for tensor in (*keys, *values):
                advise_huge_pages(tensor)
        return cls(num_blocks, block_size, keys, values)


def block_bytes(config: KVShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values together."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize
