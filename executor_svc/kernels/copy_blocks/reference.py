"""Block copy, plain."""

from __future__ import annotations

from torch import Tensor


def copy_blocks(key_cache: Tensor, value_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See CopyBlocks."""
    key_cache[targets] = key_cache[sources]
    value_cache[targets] = value_cache[sources]
