"""Rotary embedding and KV write by one Triton kernel, heads normed on the way where asked.

A program takes some heads of one token, query, key and value heads alike: each is read once, and written once to where
it belongs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.gpu import Budget
from executor_svc.kernels.rotary_write_kv import QkNorm

TILE = 2048
"""Elements of a program's heads, about."""
BUDGETS = {"_rotary_write_kv": Budget(registers=96, shared_bytes=1024)}


@triton.jit
def _store(part, columns, inside, query_at, key_at, value_at, is_query, is_key, is_value):
    """Put a part of each head where its kind goes."""
    tl.store(query_at[:, None] + columns[None, :], part.to(query_at.dtype.element_ty), mask=inside & is_query[:, None])
    tl.store(key_at[:, None] + columns[None, :], part.to(key_at.dtype.element_ty), mask=inside & is_key[:, None])
    tl.store(value_at[:, None] + columns[None, :], part.to(value_at.dtype.element_ty), mask=inside & is_value[:, None])


@triton.jit
def _normed(part, scale, columns, width, query_norm, key_norm, is_query, is_value, dtype: tl.constexpr):
    """Query and key heads times their scale and weight, rounded as a norm of its own would round them."""
    query_weight = tl.load(query_norm + columns, mask=columns < width, other=0.0).to(tl.float32)
    key_weight = tl.load(key_norm + columns, mask=columns < width, other=0.0).to(tl.float32)
    weight = tl.where(is_query[:, None], query_weight[None, :], key_weight[None, :])
    return tl.where(is_value[:, None], part, (part * scale[:, None] * weight).to(dtype).to(tl.float32))


@triton.jit
def _rotary_write_kv(
    qkv,
    cos,
    sin,
    slots,
    query,
    key_cache,
    value_cache,
    query_norm,
    key_norm,
    eps,
    num_heads,
    num_kv_heads,
    head_dim,
    half,
    has_norm: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    all_heads = num_heads + 2 * num_kv_heads
    is_head = head < all_heads
    is_query = head < num_heads
    is_value = is_head & (head >= num_heads + num_kv_heads)
    is_key = is_head & (head >= num_heads) & (head < num_heads + num_kv_heads)
    slot = tl.load(slots + token)
    source = qkv + (token * all_heads + head) * head_dim
    query_at = query + (token * num_heads + head) * head_dim
    key_at = key_cache + (slot * num_kv_heads + head - num_heads) * head_dim
    value_at = value_cache + (slot * num_kv_heads + head - num_heads - num_kv_heads) * head_dim
    dtype: tl.constexpr = qkv.dtype.element_ty

    squares = tl.zeros([block_heads], dtype=tl.float32)
    if block_half > 0:
        pair = tl.arange(0, block_half)
        in_pair = is_head[:, None] & (pair < half)[None, :]
        first = tl.load(source[:, None] + pair[None, :], mask=in_pair, other=0.0).to(tl.float32)
        second = tl.load(source[:, None] + half + pair[None, :], mask=in_pair, other=0.0).to(tl.float32)
        squares += tl.sum(first * first + second * second, axis=1)
    if block_rest > 0:
        place = 2 * half + tl.arange(0, block_rest)
        in_rest = is_head[:, None] & (place < head_dim)[None, :]
        rest = tl.load(source[:, None] + place[None, :], mask=in_rest, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(squares / head_dim + eps)

    if block_half > 0:
        if has_norm:
            first = _normed(first, scale, pair, half, query_norm, key_norm, is_query, is_value, dtype)
            second = _normed(second, scale, pair, half, query_norm + half, key_norm + half, is_query, is_value, dtype)
        cosine = tl.load(cos + token * half + pair, mask=pair < half, other=0.0)[None, :]
        sine = tl.load(sin + token * half + pair, mask=pair < half, other=0.0)[None, :]
        turned_first = tl.where(is_value[:, None], first, first * cosine - second * sine)
        turned_second = tl.where(is_value[:, None], second, second * cosine + first * sine)
        _store(turned_first, pair, in_pair, query_at, key_at, value_at, is_query, is_key, is_value)
        _store(turned_second, half + pair, in_pair, query_at, key_at, value_at, is_query, is_key, is_value)
    if block_rest > 0:
        if has_norm:
            rest = _normed(rest, scale, place, head_dim, query_norm, key_norm, is_query, is_value, dtype)
        _store(rest, place, in_rest, query_at, key_at, value_at, is_query, is_key, is_value)


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
    num_tokens, width = qkv.shape
    _, _, num_kv_heads, head_dim = key_cache.shape
    all_heads = width // head_dim
    num_heads = all_heads - 2 * num_kv_heads
    half = cos.shape[-1]
    rest = head_dim - 2 * half
    query = qkv.new_empty((num_tokens, num_heads, head_dim))
    block_heads = max(1, min(TILE // triton.next_power_of_2(head_dim), triton.next_power_of_2(all_heads)))
    _rotary_write_kv[(num_tokens, triton.cdiv(all_heads, block_heads))](
        qkv,
        cos,
        sin,
        slot_mapping,
        query,
        key_cache,
        value_cache,
        qkv if qk_norm is None else qk_norm.query_weight,
        qkv if qk_norm is None else qk_norm.key_weight,
        0.0 if qk_norm is None else qk_norm.eps,
        num_heads,
        num_kv_heads,
        head_dim,
        half,
        has_norm=qk_norm is not None,
        block_heads=block_heads,
        block_half=triton.next_power_of_2(half) if half else 0,
        block_rest=triton.next_power_of_2(rest) if rest else 0,
    )
    return query
