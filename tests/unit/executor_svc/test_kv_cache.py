"""The size of KV memory, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from executor_svc.kv_cache import KVCache, block_bytes


@dataclass(frozen=True)
class Shape:
    num_layers: int = 3
    num_kv_heads: int = 2
    head_dim: int = 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_bytes_is_what_allocation_takes(dtype: torch.dtype) -> None:
    """A cache's tensors together are exactly num_blocks times block_bytes."""
    cache = KVCache.allocate(Shape(), 7, 16, dtype, torch.device("cpu"))
    taken = sum(tensor.numel() * tensor.element_size() for tensor in (*cache.keys, *cache.values))
    assert taken == 7 * block_bytes(Shape(), 16, dtype)
    assert {tensor.shape for tensor in (*cache.keys, *cache.values)} == {(7, 16, 2, 10)}
    assert len(cache.keys) == len(cache.values) == 3


def test_the_null_block_alone_is_no_cache() -> None:
    """Memory for less than the null block and one more is refused."""
    with pytest.raises(ValueError, match="num_blocks is 1"):
        KVCache.allocate(Shape(), 1, 16, torch.float32, torch.device("cpu"))
