"""Sampling that ranks only what it must: nothing for greedy and unfiltered rows, a short list for most others."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from executor_svc.kernels.sampling import GREEDY_TEMPERATURE
from executor_svc.kernels.sampling.typical import distances_from, mean_and_total, typical_distance
from executor_svc.kernels.selection import argmax_rows, top_candidates

_LIST_LENGTH = 64
"""Ranks looked at before the whole vocabulary: most filters keep fewer."""
_CHUNK_ELEMENTS = 1 << 18
"""Logits weighed at once, so that the work space stays in cache."""


class _Rows(NamedTuple):
    """R rows and their parameters."""

    logits: Tensor
    temperature: Tensor
    """[R, 1]."""
    ranks: Tensor
    """[R]: how many top_k keeps; V where it is off."""
    top_p: Tensor
    """[R]."""
    min_p: Tensor
    """[R, 1]."""
    typical_p: Tensor
    """[R]."""
    uniform: Tensor
    """[R]."""

    def at(self, rows: Tensor | slice) -> _Rows:
        return _Rows(*(column[rows] for column in self))


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
    """See the contract."""
    greedy = temperature < GREEDY_TEMPERATURE
    if bool(greedy.all()):
        return argmax_rows(logits)
    vocab = logits.shape[1]
    ranks = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    ranked = ~greedy & ((ranks < vocab) | (top_p < 1))
    unranked = ~(greedy | ranked)
    typical = unranked & (typical_p < 1)
    everything = _Rows(logits, temperature[:, None], ranks, top_p, min_p[:, None], typical_p, uniform)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    kinds = (
        (greedy, _argmax),
        (unranked & ~typical, _sample_unranked),
        (typical, _sample_typical),
        (ranked, _sample_ranked),
    )
    for chosen, sample in kinds:
        rows = chosen.nonzero()[:, 0]
        if len(rows):
            # A batch of one kind, the usual one, is not copied.
            tokens[rows] = sample(everything if len(rows) == len(logits) else everything.at(rows))
    return tokens


def _argmax(rows: _Rows) -> Tensor:
    return argmax_rows(rows.logits)


def _sample_unranked(rows: _Rows) -> Tensor:
    tokens = torch.empty(len(rows.logits), dtype=torch.int64)
    use_min_p = bool((rows.min_p > 0).any())
    for chunk in _chunks(rows.logits):
        part = rows.at(chunk)
        weights = _exponents(part.logits, part.logits.amax(dim=-1, keepdim=True), part.temperature).exp_()
        if use_min_p:
            weights.masked_fill_(weights < part.min_p, 0)
        tokens[chunk] = _draw(weights, part.uniform)
    return tokens


def _sample_typical(rows: _Rows) -> Tensor:
    """Sample rows that only min_p and typical_p filter."""
    tokens = torch.empty(len(rows.logits), dtype=torch.int64)
    length = min(_LIST_LENGTH, rows.logits.shape[1])
    use_min_p = bool((rows.min_p > 0).any())
    for chunk in _chunks(rows.logits):
        part = rows.at(chunk)
        values, ids = top_candidates(part.logits, length)
        exponents = _exponents(part.logits, values[:, :1], part.temperature)
        weights = exponents.exp()
        if use_min_p:
            weights.masked_fill_(weights < part.min_p, 0)
        mean, total = mean_and_total(exponents, weights)
        enough = part.typical_p.to(torch.float64) * total
        listed, listed_weights = exponents.gather(1, ids), weights.gather(1, ids)
        distances = distances_from(mean, listed, listed_weights)
        # A token outside the list is below the mean by at least as much as the list's last, or has no weight as that.
        unlisted = (mean - listed[:, -1].to(torch.float64)).clamp_(min=0)
        whole = (listed_weights[:, -1] == 0) | (length == rows.logits.shape[1])
        nearer = (distances < unlisted[:, None]) | whole[:, None]
        limit, settled = typical_distance(distances.masked_fill(~nearer, torch.inf), listed_weights, enough)
        tokens[chunk] = _draw_listed(listed_weights.masked_fill_(distances > limit[:, None], 0), ids, part.uniform)
        for row in (~settled).nonzero()[:, 0].tolist():
            tokens[chunk.start + row] = _sample_whole(part.at(slice(row, row + 1)))
    return tokens


def _sample_ranked(rows: _Rows) -> Tensor:
    logits, temperature, ranks, top_p, min_p, typical_p, uniform = rows
    vocab = logits.shape[1]
    length = min(_LIST_LENGTH, vocab)
    values, ids = top_candidates(logits, length)
    exponents = _exponents(values, values[:, :1], temperature)
    weights = exponents.exp()
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    # What top_k leaves in all: known from the list, or where top_k is off, from the whole row.
    total = mass.gather(1, ranks.clamp(max=length)[:, None] - 1)[:, 0]
    total = torch.where(ranks <= length, total, _sums(logits, temperature, (ranks == vocab) & (top_p < 1)))
    enough = top_p.to(torch.float64) * total
    kept = (mass < enough[:, None]).sum(dim=-1) + 1
    kept = torch.where(top_p < 1, torch.minimum(kept, ranks), ranks)
    # The list settles a row if it holds all that top_k keeps, or if top_p alone ends within it.
    settled = (kept <= length) & ((ranks <= length) | (ranks == vocab))
    weights.masked_fill_((torch.arange(length) >= kept[:, None]) | (weights < min_p), 0)
    if bool((typical_p < 1).any()):
        by_id = ids.argsort(dim=-1)
        mean, total = mean_and_total(exponents.gather(1, by_id), weights.gather(1, by_id))
        distances = distances_from(mean, exponents, weights)
        limit, _ = typical_distance(distances, weights, typical_p.to(torch.float64) * total)
        weights.masked_fill_((distances > limit[:, None]) & (typical_p < 1)[:, None], 0)
    tokens = _draw_listed(weights, ids, uniform)
    for row in (~settled).nonzero()[:, 0].tolist():
        tokens[row] = _sample_whole(rows.at(slice(row, row + 1)))
    return tokens


def _sample_whole(rows: _Rows) -> int:
    """Sample one row whose kept tokens are more than the list holds."""
    logits, temperature, kept = rows.logits[0], rows.temperature[0], int(rows.ranks)
    top_p, typical_p = float(rows.top_p), float(rows.typical_p)
    # Sorting values without their ids is several times faster, and the lowest kept value tells the ids.
    values = torch.from_numpy(np.sort(logits.numpy())[::-1].copy())
    ranked = _exponents(values, values[0], temperature)
    ranked_weights = ranked.exp()
    if top_p < 1:
        mass = ranked_weights[:kept].cumsum(0, dtype=torch.float64)
        kept = min(kept, int((mass < top_p * mass[-1]).sum()) + 1)
    lowest = values[kept - 1]
    exponents = _exponents(logits, values[0], temperature)
    weights = exponents.exp()
    weights.masked_fill_((logits < lowest) | (weights < rows.min_p[0]), 0)
    tied = (logits == lowest).nonzero()[:, 0]
    weights[tied[kept - int((values > lowest).sum()) :]] = 0
    if typical_p < 1:
        ranked_weights[kept:] = 0
        ranked_weights.masked_fill_(ranked_weights < rows.min_p[0], 0)
        mean, total = mean_and_total(exponents[None], weights[None])
        distances = distances_from(mean, ranked[None], ranked_weights[None])
        limit, _ = typical_distance(distances, ranked_weights[None], typical_p * total)
        weights.masked_fill_(distances_from(mean, exponents[None], weights[None])[0] > limit, 0)
    return int(_draw(weights[None], rows.uniform))


def _sums(logits: Tensor, temperature: Tensor, wanted: Tensor) -> Tensor:
    """Sum of all weights of the rows in `wanted`, float64 [N]; 0 elsewhere."""
    sums = torch.zeros(len(logits), dtype=torch.float64)
    for row in wanted.nonzero()[:, 0].tolist():
        one = logits[row : row + 1]
        # cumsum adds in order whatever the shape; sum does not, and a row's result must not depend on its batch.
        exponents = _exponents(one, one.amax(dim=-1, keepdim=True), temperature[row : row + 1])
        sums[row] = exponents.exp_().cumsum(dim=-1, dtype=torch.float64)[0, -1]
    return sums


def _exponents(values: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    return (values - highest).div_(temperature)


def _draw_listed(weights: Tensor, ids: Tensor, uniform: Tensor) -> Tensor:
    """Draw from the tokens `ids` [N, L], in any order, all others having no weight; int64 [N]."""
    ids, by_id = ids.sort(dim=-1)
    return ids.gather(1, _draw(weights.gather(1, by_id), uniform)[:, None])[:, 0]


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index of the first running sum above uniform times the whole sum, int64 [N]; weights is [N, L]."""
    distribution = weights.cumsum(dim=-1, dtype=torch.float64)
    total = distribution[:, -1]
    # uniform * total can round up to total, which nothing exceeds.
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(distribution, threshold[:, None], right=True)[:, 0]


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]
