"""Sampling by Triton kernels, without sorting the vocabulary.

Sums are of whole numbers, so they have no order: programs add to them as they come. A limit in the order of ranks
(top_k, top_p) or of distances (typical_p) is found in two steps: a histogram over ranges of the order tells the range in
which it lies, and a search by halves over the tokens of that range alone tells the token. Ranks and distances are
int64 keys for that, the greatest first; the logit and the id make one rank key, so that no two are equal.

Rows are cut into chunks where there is no order to keep: all kernels but the two cuts and the draw run over them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels import sampling as contract
from executor_svc.kernels.device_math.triton_impl import round_to_even
from executor_svc.kernels.selection.triton_impl import (
    LEAST_EXPONENT,
    NO_CUT,
    RANGES,
    UNITS,
    collect,
    exponents_of,
    kept_units,
    keys_of,
    last_key,
    mass_from,
    range_and_rest,
    ranges_of,
    units_of,
)

MAX_CHUNK = 4096

GREEDY = tl.constexpr(contract.GREEDY_TEMPERATURE)
# A row of the table: three histograms, then single numbers.
COUNTS = tl.constexpr(512)
DISTANCES = tl.constexpr(1024)
CUT = tl.constexpr(1536)
WEIGHTS = tl.constexpr(1537)
TERMS = tl.constexpr(1538)
DISTANCE_CUT = tl.constexpr(1539)
TABLE = tl.constexpr(1540)


@triton.jit
def _share(total, share):
    return tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _highest_of(chunk_values, row, num_chunks, block_chunks: tl.constexpr):
    at = tl.arange(0, block_chunks)
    return tl.max(tl.load(chunk_values + row * num_chunks + at, mask=at < num_chunks, other=float("-inf")), axis=0)


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
        highest = _highest_of(chunk_values, row, tl.num_programs(1), block_chunks)
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
        highest = _highest_of(chunk_values, row, num_chunks, block_chunks)
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        places = tl.arange(0, RANGES)
        mass = tl.sum(tl.load(table + places), axis=0)
        cut = tl.full([], NO_CUT, dtype=tl.int64)
        if (k > 0) & (k < tl.sum(tl.load(table + COUNTS + places), axis=0)):
            place, rest = range_and_rest(table + COUNTS, k)
            count = collect(
                logits, weights, NO_CUT, 0.0, highest, heat, 0.0, place, candidates, vocab, by_distance=False, chunk=chunk
            )
            cut = last_key(logits, weights, candidates, count, rest, highest, heat, 0.0, True, False, chunk)
            mass = tl.sum(tl.where(places < place, tl.load(table + places), 0), axis=0)
            mass += mass_from(logits, weights, candidates, count, cut, highest, heat, 0.0, False, False, chunk)
            # The candidates may be written again.
            tl.debug_barrier()
        if p < 1.0:
            place, rest = range_and_rest(table, _share(mass, p))
            count = collect(
                logits, weights, NO_CUT, 0.0, highest, heat, 0.0, place, candidates, vocab, by_distance=False, chunk=chunk
            )
            cut = last_key(logits, weights, candidates, count, rest, highest, heat, 0.0, False, False, chunk)
        tl.store(table + CUT, cut)


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
        highest = _highest_of(chunk_values, row, tl.num_programs(1), block_chunks)
        ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
        x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
        weight = tl.load(weights + row * vocab + ids, mask=ids < vocab, other=0.0)
        units = kept_units(x, weight, ids, tl.load(table + CUT), tl.load(min_p + row))
        exponents = tl.where(units > 0, exponents_of(x, highest, heat), 0.0)
        terms = round_to_even(weight.to(tl.float64) * exponents.to(tl.float64) * UNITS)
        tl.atomic_add(table + WEIGHTS, tl.sum(units, axis=0), sem="relaxed")
        tl.atomic_add(table + TERMS, tl.sum(terms, axis=0), sem="relaxed")


@triton.jit
def _mean_exponent(table):
    return tl.load(table + TERMS).to(tl.float64) / tl.load(table + WEIGHTS).to(tl.float64)


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
        highest = _highest_of(chunk_values, row, tl.num_programs(1), block_chunks)
        ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
        x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
        weight = tl.load(weights + row * vocab + ids, mask=ids < vocab, other=0.0)
        units = kept_units(x, weight, ids, tl.load(table + CUT), tl.load(min_p + row))
        at = table + DISTANCES + ranges_of(x, highest, heat, _mean_exponent(table), by_distance=True)
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
            highest = _highest_of(chunk_values, row, num_chunks, block_chunks)
            mean = _mean_exponent(table)
            place, rest = range_and_rest(table + DISTANCES, _share(tl.load(table + WEIGHTS), share))
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
def _drawn_units(logits, weights, highest, heat, min_p, typical_p, table, ids, vocab):
    """Units of the tokens that every filter left, 0 of the others."""
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
    weight = tl.load(weights + ids, mask=ids < vocab, other=0.0)
    units = kept_units(x, weight, ids, tl.load(table + CUT), min_p)
    if typical_p < 1.0:
        keys = keys_of(x, ids, highest, heat, _mean_exponent(table), by_distance=True)
        units = tl.where(keys >= tl.load(table + DISTANCE_CUT), units, 0)
    return units


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
        highest = _highest_of(chunk_values, row, num_chunks, block_chunks)
        ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
        units = _drawn_units(
            logits + row * vocab,
            weights + row * vocab,
            highest,
            heat,
            tl.load(min_p + row),
            tl.load(typical_p + row),
            table + row * TABLE,
            ids,
            vocab,
        )
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
    highest = _highest_of(chunk_values, row, num_chunks, block_chunks)
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
        units = _drawn_units(
            logits + row * vocab,
            weights + row * vocab,
            highest,
            heat,
            tl.load(min_p + row),
            tl.load(typical_p + row),
            table + row * TABLE,
            ids,
            vocab,
        )
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
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    chunk = min(MAX_CHUNK, triton.next_power_of_2(vocab))
    num_chunks = triton.cdiv(vocab, chunk)
    sizes = {"chunk": chunk, "block_chunks": triton.next_power_of_2(num_chunks), "num_warps": 8}
    by_chunk, by_row = (num_rows, num_chunks), (num_rows,)
    chunk_values = logits.new_empty((num_rows, num_chunks))
    chunk_ids = tokens.new_empty((num_rows, num_chunks), dtype=torch.int32)
    sums = tokens.new_empty((num_rows, num_chunks))
    table = tokens.new_zeros((num_rows, TABLE.value))
    weights = logits.new_empty((num_rows, vocab))
    candidates = tokens.new_empty((num_rows, vocab), dtype=torch.int32)

    _highest[by_chunk](logits, chunk_values, chunk_ids, vocab, chunk=chunk, num_warps=8)
    _weigh[by_chunk](logits, chunk_values, temperature, top_k, top_p, weights, table, vocab, **sizes)
    row = (logits, weights, chunk_values, temperature)
    _cut_ranks[by_row](*row, top_k, top_p, table, candidates, vocab, num_chunks, **sizes)
    _typical_sums[by_chunk](*row, min_p, typical_p, table, vocab, **sizes)
    _typical_histogram[by_chunk](*row, min_p, typical_p, table, vocab, **sizes)
    _cut_distances[by_row](*row, min_p, typical_p, table, candidates, vocab, num_chunks, **sizes)
    _chunk_sums[by_chunk](*row, min_p, typical_p, table, sums, vocab, **sizes)
    drawn = (logits, weights, chunk_values, chunk_ids, temperature, min_p, typical_p, uniform, table, sums, tokens)
    _draw[by_row](*drawn, vocab, num_chunks, **sizes)
    return tokens
