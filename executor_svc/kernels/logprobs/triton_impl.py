"""Logprobs by Triton kernels: the sum over a row in chunks, and int64 keys whose greatest are the likeliest tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.device_math.triton_impl import ordered
from executor_svc.kernels.gpu import Budget

MAX_CHUNK = 4096
MIN_BLOCK, MAX_BLOCK = 32, 1024
"""Of token ids that a program tells: one form of the kernel serves all that a request may ask for."""
BUDGETS = {"_scan": Budget(registers=64, shared_bytes=16_384), "_gather": Budget(registers=32, shared_bytes=1024)}


@triton.jit
def _scan(logits, chunk_highest, chunk_sums, keys, vocab, has_keys: tl.constexpr, chunk: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
    inside = ids < vocab
    x = tl.load(logits + row * vocab + ids, mask=inside, other=float("-inf"))
    highest = tl.max(x, axis=0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(chunk_highest + place, highest)
    tl.store(chunk_sums + place, tl.sum(tl.exp(x - highest), axis=0))
    if has_keys:
        # No two are equal: among equal logits the lowest id has the greatest.
        tl.store(keys + row * vocab + ids, (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids), mask=inside)


@triton.jit(do_not_specialize=["num_ids"])
def _gather(
    logits,
    chunk_highest,
    chunk_sums,
    ids,
    out,
    vocab,
    num_ids,
    num_chunks,
    block: tl.constexpr,
    block_chunks: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, block_chunks)
    is_chunk = chunks < num_chunks
    place = row * num_chunks + chunks
    each = tl.load(chunk_highest + place, mask=is_chunk, other=float("-inf"))
    highest = tl.max(each, axis=0)
    sums = tl.load(chunk_sums + place, mask=is_chunk, other=0.0)
    log_total = tl.log(tl.sum(sums * tl.exp(each - highest), axis=0))
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < num_ids
    token = tl.load(ids + row * num_ids + at, mask=inside, other=0)
    x = tl.load(logits + row * vocab + token, mask=inside, other=0.0)
    tl.store(out + row * num_ids + at, (x - highest) - log_total, mask=inside)


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See GatherLogprobs."""
    logits = logits.contiguous()
    num_rows, vocab = logits.shape
    chunk = min(MAX_CHUNK, triton.next_power_of_2(vocab))
    num_chunks = triton.cdiv(vocab, chunk)
    chunk_highest = logits.new_empty((num_rows, num_chunks))
    chunk_sums = logits.new_empty((num_rows, num_chunks))
    keys = token_ids.new_empty((num_rows, vocab if num_top else 0))
    if num_rows:
        _scan[(num_rows, num_chunks)](
            logits, chunk_highest, chunk_sums, keys, vocab, has_keys=num_top > 0, chunk=chunk, num_warps=8
        )
    top_ids = keys.topk(num_top, dim=1).indices

    def gather(ids: Tensor) -> Tensor:
        out = logits.new_empty(ids.shape)
        num_ids = ids.shape[1]
        if out.numel():
            block = max(MIN_BLOCK, min(MAX_BLOCK, triton.next_power_of_2(num_ids)))
            _gather[(num_rows, triton.cdiv(num_ids, block))](
                logits,
                chunk_highest,
                chunk_sums,
                ids,
                out,
                vocab,
                num_ids,
                num_chunks,
                block=block,
                block_chunks=triton.next_power_of_2(num_chunks),
            )
        return out

    return gather(token_ids.contiguous()[:, None])[:, 0], top_ids, gather(top_ids.contiguous())
