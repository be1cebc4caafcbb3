"""Every kernel as it is launched: ops called with the shapes of models, on tensors whose content means nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.kernels import KernelSet
from executor_svc.kernels.copy_blocks.triton_impl import copy_blocks
from executor_svc.kernels.rotary_write_kv import QkNorm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VOCAB = 128_256
Launch = tuple[str, Callable[[], object]]


def metadata(query_lens: tuple[int, ...], context_lens: tuple[int, ...], block_size: int) -> AttentionMetadata:
    """A step's batch whose blocks are all the null block."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return AttentionMetadata(
        positions=torch.zeros(sum(query_lens), dtype=torch.int64),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
        query_start=starts,
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=torch.zeros(len(query_lens), max(context_lens) // block_size + 1, dtype=torch.int32),
        query_lens=query_lens,
        context_lens_host=context_lens,
    )


def _attention(kernels: KernelSet, dtype: torch.dtype, group: int, head_dim: int, window: int, cap: float) -> object:
    # Decode, long enough to be cut into parts, and prefill: both heights of tiles.
    batch = metadata((1, 64), (65_536, 64), 16)
    query = torch.empty(65, 2 * group, head_dim, dtype=dtype)
    cache = torch.empty(1, 16, 2, head_dim, dtype=dtype)
    return kernels.plan_attention(batch, 16)(query, cache, cache, 0.1, window=window, soft_cap=cap)


def _decode(kernels: KernelSet, rows: int) -> object:
    # Of contexts that the device alone knows, as a graph has them.
    batch = replace(metadata((1,) * rows, (64,) * rows, 16), context_lens_host=None)
    cache = torch.empty(1, 16, 8, 128, dtype=torch.bfloat16)
    return kernels.plan_attention(batch, 16)(torch.empty(rows, 32, 128, dtype=torch.bfloat16), cache, cache, 0.1)


def _rotary(kernels: KernelSet, dtype: torch.dtype, head_dim: int, half: int, *, has_norm: bool) -> object:
    cache = torch.empty(1, 16, 2, head_dim, dtype=dtype)
    weight = torch.empty(head_dim, dtype=dtype)
    angles = torch.empty(3, half)
    norm = QkNorm(weight, weight, 1e-6) if has_norm else None
    slots = torch.zeros(3, dtype=torch.int64)
    return kernels.rotary_write_kv(
        torch.empty(3, 12 * head_dim, dtype=dtype), angles, angles, slots, cache, cache, qk_norm=norm
    )


def _norms(kernels: KernelSet, dtype: torch.dtype, width: int) -> object:
    x, weight = torch.empty(3, width, dtype=dtype), torch.empty(width, dtype=dtype)
    kernels.rms_norm(x, weight, 1e-5)
    kernels.add_rms_norm(x, x, weight, 1e-5)
    kernels.norm_gelu(x, weight, weight, 1e-5, tanh=True)
    return kernels.add_layer_norm(x, x, weight, weight, 1e-5)


def _activations(kernels: KernelSet, dtype: torch.dtype) -> object:
    x = torch.empty(3, 16_384, dtype=dtype)
    kernels.silu_and_mul(x)
    kernels.gelu_and_mul(x, tanh=True)
    return kernels.gelu(x, tanh=False)


def _finite(kernels: KernelSet, dtype: torch.dtype) -> object:
    return kernels.finite_rows(torch.empty(3, 8192, dtype=dtype))


def _copy(dtype: torch.dtype) -> object:
    cache = torch.empty(3, 16, 8, 128, dtype=dtype)
    copy_blocks(cache, cache, torch.tensor([1]), torch.tensor([2]))
    return cache


def _whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _logits(kernels: KernelSet) -> object:
    logits, row = torch.empty(2, VOCAB), torch.empty(2)
    kernels.sample_tokens(
        logits, temperature=row, top_k=_whole(2), top_p=row, min_p=row, typical_p=row, uniform=row.double()
    )
    kernels.apply_penalties(
        logits,
        tokens=torch.empty(2, 4096, dtype=torch.int32),
        slots=_whole(2),
        num_prompt_tokens=_whole(2),
        num_tokens=_whole(2),
        repetition=row,
        presence=row,
        frequency=row,
    )
    kernels.add_logit_bias(logits, token_ids=_whole(9), values=torch.empty(9), begins=_whole(2), ends=_whole(2))
    kernels.forbid_tokens(logits, token_ids=_whole(9), begins=_whole(2), ends=_whole(2))
    kernels.gather_logprobs(logits, _whole(2), 20)
    return kernels.uniform(_whole(2).to(torch.uint64), _whole(2), _whole(2))


def launches(kernels: KernelSet, *, every: bool) -> Iterator[Launch]:
    """Yield calls that between them launch every kernel, with `every` in all dtypes and in further shapes."""
    yield "logits", lambda: _logits(kernels)
    for rows in (1, 256):
        yield f"decode of {rows} rows", partial(_decode, kernels, rows)
    for dtype in DTYPES if every else DTYPES[:1]:
        of = str(dtype).removeprefix("torch.")
        yield f"attention {of} 4 64", partial(_attention, kernels, dtype, 4, 64, 0, 0.0)
        yield f"attention {of} window, cap", partial(_attention, kernels, dtype, 2, 256, 4096, 50.0)
        yield f"rotary {of}", partial(_rotary, kernels, dtype, 128, 64, has_norm=True)
        for width in (128, 4096):
            yield f"norms {of} {width}", partial(_norms, kernels, dtype, width)
        yield f"activations {of}", partial(_activations, kernels, dtype)
        yield f"finite {of}", partial(_finite, kernels, dtype)
        yield f"copy {of}", partial(_copy, dtype)
    for dtype in DTYPES:
        of = str(dtype).removeprefix("torch.")
        yield f"attention {of} 4 128", partial(_attention, kernels, dtype, 4, 128, 0, 0.0)
        if every:
            for group, head_dim, window, cap in product((1, 7, 16), (80, 256), (0, 4096), (0.0, 50.0)):
                form = f"{of} {group} {head_dim} {window} {cap}"
                yield f"attention {form}", partial(_attention, kernels, dtype, group, head_dim, window, cap)
            for width in (576, 8192, 16_384, 32_768):
                yield f"norms {of} {width}", partial(_norms, kernels, dtype, width)
            yield f"rotary {of} half", partial(_rotary, kernels, dtype, 80, 16, has_norm=True)
            yield f"rotary {of} none", partial(_rotary, kernels, dtype, 128, 0, has_norm=False)
