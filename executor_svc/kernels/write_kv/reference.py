"""KV write, plain."""

from __future__ import annotations

from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See WriteKv."""
    key_cache.view(-1, *key.shape[1:])[slot_mapping] = key
    value_cache.view(-1, *value.shape[1:])[slot_mapping] = value
