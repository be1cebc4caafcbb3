"""The ops apart, by compiled kernels, see unfused.cpp."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from executor_svc.kernels.native.library import ADDRESS, INT32, INT64, NativeLibrary
from executor_svc.kernels.unfused import Add, Multiply, Rotary, Silu, WriteKv


def make_add(library: NativeLibrary) -> Add:
    """Make the op."""
    run = library.function("octavo_add", *[ADDRESS] * 3, *[INT64] * 4, INT32)
    return _make_joined(run)


def make_multiply(library: NativeLibrary) -> Multiply:
    """Make the op."""
    run = library.function("octavo_multiply", *[ADDRESS] * 3, *[INT64] * 4, INT32)
    return _make_joined(run)


def make_silu(library: NativeLibrary) -> Silu:
    """Make the op."""
    run = library.function("octavo_silu", ADDRESS, ADDRESS, *[INT64] * 3, INT32)

    def silu(x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        run(x.data_ptr(), out.data_ptr(), *x.shape, _stride(x), x.dtype == torch.bfloat16)
        return out

    return silu


def make_rotary(library: NativeLibrary) -> Rotary:
    """Make the op."""
    run = library.function("octavo_rotary", *[ADDRESS] * 4, *[INT64] * 5, INT32)

    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        _check_heads(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        addresses = (x.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr())
        run(*addresses, *x.shape, cos.shape[-1], x.stride(0), x.dtype == torch.bfloat16)
        return out

    return rotary


def make_write_kv(library: NativeLibrary) -> WriteKv:
    """Make the op."""
    run = library.function("octavo_write_kv", *[ADDRESS] * 5, *[INT64] * 4, INT32)

    def write_kv(key: Tensor, value: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        _check_heads(key)
        _check_heads(value)
        addresses = (
            key.data_ptr(),
            value.data_ptr(),
            slot_mapping.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
        )
        width = key.shape[1] * key.shape[2]
        run(*addresses, len(key), width, key.stride(0), value.stride(0), key.dtype == torch.bfloat16)

    return write_kv


def _make_joined(run: Callable[..., int]) -> Add:
    def join(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        addresses = (x.data_ptr(), y.data_ptr(), out.data_ptr())
        run(*addresses, *x.shape, _stride(x), _stride(y), x.dtype == torch.bfloat16)
        return out

    return join


def _stride(x: Tensor) -> int:
    if x.stride(1) != 1:
        raise ValueError("the elements of a row must lie side by side")
    return x.stride(0)


def _check_heads(x: Tensor) -> None:
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        raise ValueError("the heads of a token must lie side by side")
