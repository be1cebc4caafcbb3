"""Rotary embedding and KV write, plain: one after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor
) -> Tensor:
    """See RotaryWriteKv."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    turned = rotary_embedding(heads[:, :-num_kv_heads], cos, sin)
    query, key = turned[:, :-num_kv_heads], turned[:, -num_kv_heads:]
    write_kv(key, heads[:, -num_kv_heads:], key_cache, value_cache, slot_mapping)
    return query.contiguous()


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of the heads x [T, num_heads, head_dim] by its token's angle."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put key and value [T, num_kv_heads, head_dim] into their slots."""
    key_cache.view(-1, *key.shape[1:])[slot_mapping] = key
    value_cache.view(-1, *value.shape[1:])[slot_mapping] = value
