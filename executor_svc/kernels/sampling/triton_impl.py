"""Sampling by Triton kernels, without sorting the vocabulary.

Sums are of whole numbers, so they have no order: programs add to them as they come. A limit in the order of ranks
(top_k, top_p) or of distances (typical_p) is found in two steps, see selection.

Rows are cut into chunks where there is no order to keep: all kernels but the two cuts and the draw run over them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels import sampling as contract
from executor_svc.kernels.device_math.triton_impl import round_to_even
from executor_svc.kernels.gpu import Budget
from executor_svc.kernels.selection.triton_impl import (
    COUNTS,
    CUT,
    DISTANCE_CUT,
    DISTANCES,
    LEAST_EXPONENT,
    NO_CUT,
    RANGES,
    TABLE,
    TERMS,
    UNITS,
    WEIGHTS,
    collect,
    drawn_units,
    exponents_of,
    highest_of,
    kept_units,
    last_key,
    mass_from,
    mean_exponent,
    range_and_rest,
    ranges_of,
    share_of,
    units_of,
)

MAX_CHUNK = 4096
MAX_STEP = 2048
"""Tokens that a program takes at a time where it goes over a whole row."""
# Two programs of 256 threads fit a multiprocessor.
BUDGETS = {
    "_highest": Budget(registers=64, shared_bytes=1024),
    "_weigh": Budget(registers=128, shared_bytes=20_480),
    "_cut_ranks": Budget(registers=128, shared_bytes=20_480),
    "_typical_sums": Budget(registers=128, shared_bytes=1024),
    "_typical_histogram": Budget(registers=128, shared_bytes=32_768),
    "_cut_distances": Budget(registers=128, shared_bytes=20_480),
    "_chunk_sums": Budget(registers=128, shared_bytes=1024),
    "_draw": Budget(registers=128, shared_bytes=1024),
}

GREEDY = tl.constexpr(contract.GREEDY_TEMPERATURE)


@triton.jit
def _highest(logits, chunk_values, chunk_ids, vocab, chunk: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
    x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
    highest = tl.max(x, axis=0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(chunk_values + place, highest)
    tl.store(chunk_ids + place, tl.min(tl.where(x == highest, ids, vocab), axis=0))


@triton.jit
def _weigh(
    logits,
    chunk_values,
    temperature,
    top_k,
    top_p,
    weights,
    table,
    vocab,
    chunk: tl.constexpr,
    block_chunks: tl.constexpr,
):
    """Set all weights, and the histograms of ranks where something cuts by rank."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if heat >= GREEDY:
        highest = highest_of(chunk_values, row, tl.num_programs(1), block_chunks)
        ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
        x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
        exponents = exponents_of(x, highest, heat)
        # Rounded once, from an exponential whose own error is far smaller.
        weight = tl.where(exponents > LEAST_EXPONENT, tl.exp(exponents.to(tl.float64)).to(tl.float32), 0.0)
        tl.store(weights + row * vocab + ids, weight, mask=ids < vocab)
        k = tl.load(top_k + row)
        if ((k > 0) & (k < vocab)) | (tl.load(top_p + row) < 1.0):
            units = units_of(weight)
            at = table + row * TABLE + ranges_of(x, highest, heat, 0.0, by_distance=False)
            tl.atomic_add(at, units, mask=units > 0, sem="relaxed")
            tl.atomic_add(at + COUNTS, tl.full([chunk], 1, dtype=tl.int64), mask=units > 0, sem="relaxed")


@triton.jit
def _cut_ranks(
    logits,
    weights,
    chunk_values,
    temperature,
    top_k,
    top_p,
    table,
    candidates,
    vocab,
    num_chunks,
    chunk: tl.constexpr,
    block_chunks: tl.constexpr,
):
    """Find the last rank key that top_k and top_p keep."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if heat >= GREEDY:
        logits += row * vocab
        weights += row * vocab
        candidates += row * vocab
        table += row * TABLE
        highest = highest_of(chunk_values, row, num_chunks, block_chunks)
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        places = tl.arange(0, RANGES)
        mass = tl.sum(tl.load(table + places), axis=0)
        cut = tl.full([], NO_CUT, dtype=tl.int64)
        if (k > 0) & (k < tl.sum(tl.load(table + COUNTS + places), axis=0)):
            place, rest = range_and_rest(table + COUNTS, k)
            count = collect(
                logits,
                weights,
                NO_CUT,
                0.0,
                highest,
                heat,
                0.0,
                place,
                candidates,
                vocab,
                by_distance=False,
                chunk=chunk,
            )
            cut = last_key(logits, weights, candidates, count, rest, highest, heat, 0.0, True, False, chunk)
            mass = tl.sum(tl.where(places < place, tl.load(table + places), 0), axis=0)
            mass += mass_from(logits, weights, candidates, count, cut, highest, heat, 0.0, False, False, chunk)
            # The candidates may be written again.
            tl.debug_barrier()
        if p < 1.0:
            place, rest = range_and_rest(table, share_of(mass, p))
            count = collect(
                logits,
                weights,
                NO_CUT,
                0.0,
                highest,
                heat,
                0.0,
                place,
                candidates,
                vocab,
                by_distance=False,
                chunk=chunk,
            )
            cut = last_key(logits, weights, candidates, count, rest, highest, heat, 0.0, False, False, chunk)
        tl.store(table + CUT, cut)


@triton.jit
def _kept_of_chunk(logits, weights, min_p, table, row, vocab, chunk: tl.constexpr):
    """Logits and weights of this program's chunk, and the units of its tokens that were kept so far."""
    ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
    x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
    weight = tl.load(weights + row * vocab + ids, mask=ids < vocab, other=0.0)
    return x, weight, kept_units(x, weight, ids, tl.load(table + CUT), tl.load(min_p + row))


@triton.jit
def _typical_sums(
    logits,
    weights,
    chunk_values,
    temperature,
    min_p,
    typical_p,
    table,
    vocab,
    chunk: tl.constexpr,
    block_chunks: tl.constexpr,
):
    """Add up weights, and weights times exponents, where typical_p needs their mean."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if (heat >= GREEDY) & (tl.load(typical_p + row) < 1.0):
        table += row * TABLE
        highest = highest_of(chunk_values, row, tl.num_programs(1), block_chunks)
        x, weight, units = _kept_of_chunk(logits, weights, min_p, table, row, vocab, chunk)
        exponents = tl.where(units > 0, exponents_of(x, highest, heat), 0.0)
        terms = round_to_even(weight.to(tl.float64) * exponents.to(tl.float64) * UNITS)
        tl.atomic_add(table + WEIGHTS, tl.sum(units, axis=0), sem="relaxed")
        tl.atomic_add(table + TERMS, tl.sum(terms, axis=0), sem="relaxed")


@triton.jit
def _typical_histogram(
    logits,
    weights,
    chunk_values,
    temperature,
    min_p,
    typical_p,
    table,
    vocab,
    chunk: tl.constexpr,
    block_chunks: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if (heat >= GREEDY) & (tl.load(typical_p + row) < 1.0):
        table += row * TABLE
        highest = highest_of(chunk_values, row, tl.num_programs(1), block_chunks)
        x, _, units = _kept_of_chunk(logits, weights, min_p, table, row, vocab, chunk)
        at = table + DISTANCES + ranges_of(x, highest, heat, mean_exponent(table), by_distance=True)
        tl.atomic_add(at, units, mask=units > 0, sem="relaxed")


@triton.jit
def _cut_distances(
    logits,
    weights,
    chunk_values,
    temperature,
    min_p,
    typical_p,
    table,
    candidates,
    vocab,
    num_chunks,
    chunk: tl.constexpr,
    block_chunks: tl.constexpr,
):
    """Find the key of the farthest distance that typical_p keeps."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if heat >= GREEDY:
        table += row * TABLE
        share = tl.load(typical_p + row)
        cut = tl.full([], NO_CUT, dtype=tl.int64)
        if share < 1.0:
            logits += row * vocab
            weights += row * vocab
            candidates += row * vocab
            highest = highest_of(chunk_values, row, num_chunks, block_chunks)
            mean = mean_exponent(table)
            place, rest = range_and_rest(table + DISTANCES, share_of(tl.load(table + WEIGHTS), share))
            count = collect(
                logits,
                weights,
                tl.load(table + CUT),
                tl.load(min_p + row),
                highest,
                heat,
                mean,
                place,
                candidates,
                vocab,
                by_distance=True,
                chunk=chunk,
            )
            cut = last_key(logits, weights, candidates, count, rest, highest, heat, mean, False, True, chunk)
        tl.store(table + DISTANCE_CUT, cut)


@triton.jit
def _chunk_sums(
    logits,
    weights,
    chunk_values,
    temperature,
    min_p,
    typical_p,
    table,
    sums,
    vocab,
    chunk: tl.constexpr,
    block_chunks: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if heat >= GREEDY:
        num_chunks = tl.num_programs(1)
        highest = highest_of(chunk_values, row, num_chunks, block_chunks)
        ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
        units = drawn_units(logits, weights, highest, heat, min_p, typical_p, table, row, ids, vocab)
        tl.store(sums + row * num_chunks + tl.program_id(1), tl.sum(units, axis=0))


@triton.jit
def _draw(
    logits,
    weights,
    chunk_values,
    chunk_ids,
    temperature,
    min_p,
    typical_p,
    uniform,
    table,
    sums,
    tokens,
    vocab,
    num_chunks,
    chunk: tl.constexpr,
    block_chunks: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    highest = highest_of(chunk_values, row, num_chunks, block_chunks)
    at = tl.arange(0, block_chunks)
    is_chunk = at < num_chunks
    if heat >= GREEDY:
        each = tl.load(sums + row * num_chunks + at, mask=is_chunk, other=0)
        total = tl.sum(each, axis=0)
        # uniform * total can round up to the total, which nothing exceeds.
        threshold = (tl.load(uniform + row) * total.to(tl.float64)).to(tl.int64)
        threshold = tl.minimum(threshold, total - 1)
        is_before = is_chunk & (tl.cumsum(each, axis=0) <= threshold)
        before = tl.sum(tl.where(is_before, each, 0), axis=0)
        first = tl.sum(is_before.to(tl.int32), axis=0) * chunk
        ids = first + tl.arange(0, chunk)
        units = drawn_units(logits, weights, highest, heat, min_p, typical_p, table, row, ids, vocab)
        token = first + tl.sum((before + tl.cumsum(units, axis=0) <= threshold).to(tl.int32), axis=0)
    else:
        values = tl.load(chunk_values + row * num_chunks + at, mask=is_chunk, other=float("-inf"))
        firsts = tl.load(chunk_ids + row * num_chunks + at, mask=is_chunk, other=0)
        token = tl.min(tl.where(is_chunk & (values == highest), firsts, vocab), axis=0)
    # Past the vocabulary only where a row has no finite logit.
    tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))


def sample_tokens(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    typical_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """See SampleTokens. ValueError from MAX_VOCAB on."""
    num_rows, vocab = logits.shape
    if vocab >= contract.MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab} tokens; sampling takes fewer than {contract.MAX_VOCAB}")
    logits = logits.contiguous()
    temperature, top_k, top_p = temperature.contiguous(), top_k.contiguous(), top_p.contiguous()
    min_p, typical_p, uniform = min_p.contiguous(), typical_p.contiguous(), uniform.contiguous()
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    chunk = min(MAX_CHUNK, triton.next_power_of_2(vocab))
    num_chunks = triton.cdiv(vocab, chunk)
    sizes = {"chunk": chunk, "block_chunks": triton.next_power_of_2(num_chunks), "num_warps": 8}
    steps = sizes | {"chunk": min(MAX_STEP, chunk)}
    by_chunk, by_row = (num_rows, num_chunks), (num_rows,)
    chunk_values = logits.new_empty((num_rows, num_chunks))
    chunk_ids = tokens.new_empty((num_rows, num_chunks), dtype=torch.int32)
    sums = tokens.new_empty((num_rows, num_chunks))
    table = tokens.new_zeros((num_rows, TABLE.value))
    weights = logits.new_empty((num_rows, vocab))
    candidates = tokens.new_empty((num_rows, vocab), dtype=torch.int32)

    _highest[by_chunk](logits, chunk_values, chunk_ids, vocab, chunk=chunk, num_warps=8)
    _weigh[by_chunk](logits, chunk_values, temperature, top_k, top_p, weights, table, vocab, **sizes)
    row = logits, weights, chunk_values, temperature
    _cut_ranks[by_row](*row, top_k, top_p, table, candidates, vocab, num_chunks, **steps)
    _typical_sums[by_chunk](*row, min_p, typical_p, table, vocab, **sizes)
    _typical_histogram[by_chunk](*row, min_p, typical_p, table, vocab, **sizes)
    _cut_distances[by_row](*row, min_p, typical_p, table, candidates, vocab, num_chunks, **steps)
    _chunk_sums[by_chunk](*row, min_p, typical_p, table, sums, vocab, **sizes)
    drawn = (logits, weights, chunk_values, chunk_ids, temperature, min_p, typical_p, uniform, table, sums, tokens)
    _draw[by_row](*drawn, vocab, num_chunks, **sizes)
    return tokens
