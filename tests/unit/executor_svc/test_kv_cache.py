"""The size of KV memory, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from executor_svc.kv_cache import KVCache, block_bytes, num_blocks_for


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


def test_num_blocks_fills_the_memory() -> None:
    """As many blocks as fit, and not one more."""
    each = block_bytes(Shape(), 16, torch.float32)
    assert num_blocks_for(10 * each, Shape(), 16, torch.float32) == 10
    assert num_blocks_for(11 * each - 1, Shape(), 16, torch.float32) == 10


def test_too_little_memory_is_an_error_with_the_numbers() -> None:
    """Memory for less than the null block and one more is refused."""
    each = block_bytes(Shape(), 16, torch.float32)
    with pytest.raises(ValueError, match=f"{2 * each - 1} bytes of KV memory hold 1 blocks of {each} bytes"):
        num_blocks_for(2 * each - 1, Shape(), 16, torch.float32)
    with pytest.raises(ValueError, match="num_blocks is 1"):
        KVCache.allocate(Shape(), 1, 16, torch.float32, torch.device("cpu"))
