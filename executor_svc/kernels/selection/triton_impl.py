"""Where a limit lies in an order of tokens: by rank (the greatest logit first) or by distance from a mean.

A histogram over ranges of the order, which others have filled, tells the range in which a running sum reaches its goal,
and a search by halves over the tokens of that range alone tells the token. For that, ranks and distances are int64
keys, the greatest first; the logit and the id make one rank key, so that no two are equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.kernels import sampling as contract
from executor_svc.kernels.device_math.triton_impl import ordered, round_to_even

UNITS = tl.constexpr(contract.UNITS)
LEAST_EXPONENT = tl.constexpr(-31.2)
"""Below log(2^-45), where a weight is half a unit and counts nothing."""
RANGES = tl.constexpr(512)
RANGES_PER_UNIT = tl.constexpr(16.0)
ID_BITS = tl.constexpr(20)
LAST_ID = tl.constexpr((1 << 20) - 1)
NO_CUT = tl.constexpr(-(1 << 63))

# A row of the table: three histograms, then single numbers.
COUNTS = tl.constexpr(512)
DISTANCES = tl.constexpr(1024)
CUT = tl.constexpr(1536)
WEIGHTS = tl.constexpr(1537)
TERMS = tl.constexpr(1538)
DISTANCE_CUT = tl.constexpr(1539)
TABLE = tl.constexpr(1540)


@triton.jit
def exponents_of(x, highest, temperature):
    """(x - highest) / temperature, to the bit."""
    # The division is the exactly rounded one: "/" of float32 is not.
    return tl.div_rn(x - highest, temperature)


@triton.jit
def rank_keys_of(x, ids):
    """Greater for greater logits, among equals for lower ids."""
    return (ordered(x).to(tl.int64) << ID_BITS) | (LAST_ID - ids)


@triton.jit
def distances_of(x, highest, temperature, mean):
    """How far exponents lie from a mean, float64."""
    return tl.abs(exponents_of(x, highest, temperature).to(tl.float64) - mean)


@triton.jit
def keys_of(x, ids, highest, temperature, mean, by_distance: tl.constexpr):
    """int64, the greatest of those that come first."""
    if by_distance:
        # The bits of numbers from 0 order as they do.
        return -distances_of(x, highest, temperature, mean).to(tl.int64, bitcast=True)
    else:
        return rank_keys_of(x, ids)


@triton.jit
def ranges_of(x, highest, temperature, mean, by_distance: tl.constexpr):
    """The range of the histogram that each token falls into, from 0: the nearest to the first."""
    if by_distance:
        far = (distances_of(x, highest, temperature, mean) * RANGES_PER_UNIT).to(tl.float32)
    else:
        far = tl.div_rn(highest - x, temperature) * RANGES_PER_UNIT
    # Tokens that have a weight are nearer than the last range; others, NaN too, are masked.
    return tl.where(far < RANGES - 1, far, RANGES - 1.0).to(tl.int32)


@triton.jit
def units_of(weights):
    """Weights as whole numbers, int64."""
    return round_to_even(weights.to(tl.float64) * UNITS)


@triton.jit
def kept_units(x, weights, ids, cut, min_p):
    """Units of the tokens that top_k, top_p and min_p left, 0 of the others."""
    return tl.where((rank_keys_of(x, ids) >= cut) & (weights >= min_p), units_of(weights), 0)


@triton.jit
def collect(
    logits, weights, cut, min_p, highest, heat, mean, wanted, candidates, vocab, by_distance: tl.constexpr, chunk
):
    """Write the ids of the tokens of a range that were kept so far, and give their number."""
    count = 0
    for begin in range(0, vocab, chunk):
        ids = begin + tl.arange(0, chunk)
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        weight = tl.load(weights + ids, mask=ids < vocab, other=0.0)
        found = (kept_units(x, weight, ids, cut, min_p) > 0) & (
            ranges_of(x, highest, heat, mean, by_distance) == wanted
        )
        place = count + tl.cumsum(found.to(tl.int32), axis=0) - 1
        tl.store(candidates + place, ids, mask=found)
        count += tl.sum(found.to(tl.int32), axis=0)
    # Other threads of this program read what these wrote.
    tl.debug_barrier()
    return count


@triton.jit
def mass_from(
    logits, weights, candidates, count, key, highest, heat, mean, counts: tl.constexpr, by_distance: tl.constexpr, chunk
):
    """Sum the candidates whose keys are at least `key`: their units, or their number."""
    mass = tl.zeros([chunk], dtype=tl.int64)
    for begin in range(0, count, chunk):
        at = begin + tl.arange(0, chunk)
        ids = tl.load(candidates + at, mask=at < count, other=0)
        x = tl.load(logits + ids)
        each = units_of(tl.load(weights + ids))
        if counts:
            each = tl.full([chunk], 1, dtype=tl.int64)
        is_in = (at < count) & (keys_of(x, ids, highest, heat, mean, by_distance) >= key)
        mass += tl.where(is_in, each, 0)
    return tl.sum(mass, axis=0)


@triton.jit
def last_key(
    logits,
    weights,
    candidates,
    count,
    need,
    highest,
    heat,
    mean,
    counts: tl.constexpr,
    by_distance: tl.constexpr,
    chunk,
):
    """The greatest key from which on the candidates sum to `need`."""
    low = tl.full([], 1 << 62, dtype=tl.int64)
    high = tl.full([], NO_CUT, dtype=tl.int64)
    for begin in range(0, count, chunk):
        at = begin + tl.arange(0, chunk)
        ids = tl.load(candidates + at, mask=at < count, other=0)
        keys = keys_of(tl.load(logits + ids), ids, highest, heat, mean, by_distance)
        low = tl.minimum(low, tl.min(tl.where(at < count, keys, 1 << 62), axis=0))
        high = tl.maximum(high, tl.max(tl.where(at < count, keys, NO_CUT), axis=0))
    # The sum from `low` on is enough, from past the greatest it is not.
    high += 1
    while low + 1 < high:
        middle = low + (high - low) // 2
        mass = mass_from(logits, weights, candidates, count, middle, highest, heat, mean, counts, by_distance, chunk)
        enough = mass >= need
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def range_and_rest(table, need):
    """The range in which the running sum over a histogram reaches `need`, and what of it the ranges before leave."""
    sums = tl.load(table + tl.arange(0, RANGES))
    running = tl.cumsum(sums, axis=0)
    is_before = running < need
    return tl.sum(is_before.to(tl.int32), axis=0), need - tl.sum(tl.where(is_before, sums, 0), axis=0)


@triton.jit
def share_of(total, share):
    """The least whole number that is no less than the share of a sum, at least 1."""
    return tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def highest_of(chunk_values, row, num_chunks, block_chunks: tl.constexpr):
    """The highest logit of a row, from those of its chunks."""
    at = tl.arange(0, block_chunks)
    return tl.max(tl.load(chunk_values + row * num_chunks + at, mask=at < num_chunks, other=float("-inf")), axis=0)


@triton.jit
def mean_exponent(table):
    """The weighted mean of the exponents, float64, from the sums in a row of the table."""
    return tl.load(table + TERMS).to(tl.float64) / tl.load(table + WEIGHTS).to(tl.float64)


@triton.jit
def drawn_units(logits, weights, highest, heat, min_p, typical_p, table, row, ids, vocab):
    """Units of those tokens of a row that every filter left, 0 of the others."""
    table += row * TABLE
    x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
    weight = tl.load(weights + row * vocab + ids, mask=ids < vocab, other=0.0)
    units = kept_units(x, weight, ids, tl.load(table + CUT), tl.load(min_p + row))
    if tl.load(typical_p + row) < 1.0:
        keys = keys_of(x, ids, highest, heat, mean_exponent(table), by_distance=True)
        units = tl.where(keys >= tl.load(table + DISTANCE_CUT), units, 0)
    return units
