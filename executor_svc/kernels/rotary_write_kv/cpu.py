"""Rotary embedding and KV write by the compiled kernel, see rotary_write_kv.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.native.library import ADDRESS, INT32, INT64, NativeLibrary
from executor_svc.kernels.rotary_write_kv import RotaryWriteKv

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""As rotary_write_kv.cpp numbers them."""


def make_rotary_write_kv(library: NativeLibrary) -> RotaryWriteKv:
    """Make the op."""
    run = library.function("octavo_rotary_write_kv", *(ADDRESS,) * 7, *(INT64,) * 5, INT32)

    def rotary_write_kv(
        qkv: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        num_tokens, width = qkv.shape
        _, _, num_kv_heads, head_dim = key_cache.shape
        num_heads = width // head_dim - 2 * num_kv_heads
        query = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype)
        run(
            qkv.data_ptr(),
            query.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            slot_mapping.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            cos.shape[-1],
            _DTYPES[qkv.dtype],
        )
        return query

    return rotary_write_kv
