"""Contract of the block copy. No part of a step yet, and so no field of KernelSet: it enters with what first copies
blocks, such as a sequence that forks.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class CopyBlocks(Protocol):
    """Copies whole KV blocks within one layer's caches."""

    def __call__(self, key_cache: Tensor, value_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Make block targets[i] of both caches IN PLACE what block sources[i] was before the call.

        The caches are [num_blocks, block_size, num_kv_heads, head_dim], contiguous; sources and targets are int64 [N],
        each in [0, num_blocks). Targets are distinct and none of them is a source. All other blocks keep their bytes.
        """
