"""Contract of the KV write."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WriteKv(Protocol):
    """Puts the step's keys and values into their slots."""

    def __call__(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write key and value [T, num_kv_heads, head_dim] into the caches IN PLACE.

        The caches are [num_blocks, block_size, num_kv_heads, head_dim], contiguous; slot_mapping is int64 [T], each in
        [0, num_blocks * block_size). Slots of block 0 may repeat (padding: what lies there afterwards is undefined);
        others are distinct. All other slots keep their bytes. key and value may be views with the last two dimensions
        contiguous.
        """
