"""Rotary embedding and KV write, plain: one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.norm.reference import rms_norm
from executor_svc.kernels.rotary_write_kv import QkNorm


def rotary_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    qk_norm: QkNorm | None = None,
) -> Tensor:
    """See RotaryWriteKv and NormRotaryWriteKv."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    if qk_norm is not None:
        qkv = norm_heads(qkv, num_kv_heads, head_dim, qk_norm)
    heads = qkv.view(len(qkv), -1, head_dim)
    turned = rotary_embedding(heads[:, :-num_kv_heads], cos, sin)
    query, key = turned[:, :-num_kv_heads], turned[:, -num_kv_heads:]
    write_kv(key, heads[:, -num_kv_heads:], key_cache, value_cache, slot_mapping)
    return query.contiguous()


def norm_heads(qkv: Tensor, num_kv_heads: int, head_dim: int, qk_norm: QkNorm) -> Tensor:
    """Give qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] anew, its query and key heads normed."""
    heads = qkv.view(len(qkv), -1, head_dim)
    query, key, value = heads.tensor_split((-2 * num_kv_heads, -num_kv_heads), dim=1)
    query = rms_norm(query, qk_norm.query_weight, qk_norm.eps)
    key = rms_norm(key, qk_norm.key_weight, qk_norm.eps)
    return torch.cat((query, key, value), dim=1).flatten(1)


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
