"""Paged attention by the compiled kernel, see paged_attention.cpp."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from ctypes import addressof

import torch
from torch import Tensor

from executor_svc.kernels.native.library import ADDRESS, FLOAT, INT32, INT64, NativeLibrary
from executor_svc.kernels.paged_attention import PagedAttention, PlanAttention, RaggedBatch

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""As paged_attention.cpp numbers them."""
_steps = itertools.count()
"""Names of batches: the kernel cuts each into tasks once, at the step's first layer."""


class _Batch(ctypes.Structure):
    """Batch of plan.h."""

    _fields_ = [
        ("block_tables", ADDRESS),
        ("context_lens", ADDRESS),
        ("query_start", ADDRESS),
        ("table_width", INT64),
        ("rows", INT64),
        ("block_size", INT64),
        ("step", INT64),
    ]


class NativeAttention:
    """One step's batch."""

    def __init__(self, attend: Callable[..., int], batch: RaggedBatch, block_size: int) -> None:
        self._attend = attend
        # Held for as long as their addresses are.
        self._tensors = batch.block_tables.contiguous(), batch.context_lens, batch.query_start
        rows, width = batch.block_tables.shape
        self._batch = _Batch(*(tensor.data_ptr() for tensor in self._tensors), width, rows, block_size, next(_steps))
        self.address = addressof(self._batch)
        """Of all that the kernel reads of the batch: a program that was recorded with one reads another's there."""

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """See PagedAttention."""
        out = torch.empty(query.shape, dtype=query.dtype)
        _, num_heads, head_dim = query.shape
        self._attend(
            self.address,
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            num_heads,
            key_cache.shape[2],
            head_dim,
            scale,
            window,
            soft_cap,
            _DTYPES[query.dtype],
        )
        return out


def make_plan_attention(library: NativeLibrary) -> PlanAttention:
    """Make the op."""
    attend = library.function(
        "octavo_paged_attention",
        *(ADDRESS, ADDRESS, INT64, ADDRESS, ADDRESS, ADDRESS, INT64, INT64, INT64, FLOAT, INT64, FLOAT, INT32),
    )

    def plan_attention(batch: RaggedBatch, block_size: int) -> PagedAttention:
        return NativeAttention(attend, batch, block_size)

    return plan_attention
