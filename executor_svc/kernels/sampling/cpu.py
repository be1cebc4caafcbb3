"""Sampling that ranks only what it must: nothing for greedy and unfiltered rows, a short list for most others."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.sampling import GREEDY_TEMPERATURE
from executor_svc.kernels.selection import argmax_rows, top_candidates

_LIST_LENGTHS = (64, 1024)
"""Ranks tried in turn before the whole vocabulary."""
_CHUNK_ELEMENTS = 1 << 18
"""Logits weighed at once, so that the work space stays in cache."""


def sample_tokens(
    logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """See the contract."""
    greedy = temperature < GREEDY_TEMPERATURE
    if bool(greedy.all()):
        return argmax_rows(logits)
    vocab = logits.shape[1]
    ranks = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    ranked = ~greedy & ((ranks < vocab) | (top_p < 1))
    tokens = torch.empty(len(logits), dtype=torch.int64)
    for chosen, sample in ((greedy, _argmax), (~greedy & ~ranked, _sample_unranked), (ranked, _sample_ranked)):
        rows = chosen.nonzero()[:, 0]
        if len(rows):
            # A batch of one kind, the usual one, is not copied.
            part = logits if len(rows) == len(logits) else logits[rows]
            tokens[rows] = sample(
                part, temperature[rows, None], ranks[rows], top_p[rows], min_p[rows, None], uniform[rows]
            )
    return tokens


def _argmax(
    logits: Tensor, _temperature: Tensor, _ranks: Tensor, _top_p: Tensor, _min_p: Tensor, _uniform: Tensor
) -> Tensor:
    return argmax_rows(logits)


def _sample_unranked(
    logits: Tensor, temperature: Tensor, _ranks: Tensor, _top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    tokens = torch.empty(len(logits), dtype=torch.int64)
    use_min_p = bool((min_p > 0).any())
    for chunk in _chunks(logits):
        weights = _weights(logits[chunk], logits[chunk].amax(dim=-1, keepdim=True), temperature[chunk])
        if use_min_p:
            weights.masked_fill_(weights < min_p[chunk], 0)
        tokens[chunk] = _draw(weights, uniform[chunk])
    return tokens


def _sample_ranked(
    logits: Tensor, temperature: Tensor, ranks: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    vocab = logits.shape[1]
    sums = _sums(logits, temperature, (ranks == vocab) & (top_p < 1))
    tokens = torch.empty(len(logits), dtype=torch.int64)
    pending = torch.arange(len(logits))
    for length in (*(length for length in _LIST_LENGTHS if length < vocab), vocab):
        values, ids = top_candidates(logits[pending], length)
        weights = _weights(values, values[:, :1], temperature[pending])
        mass = weights.cumsum(dim=-1, dtype=torch.float64)
        allowed = ranks[pending]
        listed = mass.gather(1, allowed.clamp(max=length)[:, None] - 1)[:, 0]
        total = torch.where(allowed <= length, listed, sums[pending])
        enough = top_p[pending].to(torch.float64) * total
        kept = (mass < enough[:, None]).sum(dim=-1) + 1
        kept = torch.where(top_p[pending] < 1, torch.minimum(kept, allowed), allowed)
        # The list settles a row if it holds all that top_k keeps, or if top_p alone ends within it.
        settled = (kept <= length) & ((allowed <= length) | (allowed == vocab))
        dropped = torch.arange(length) >= kept[:, None]
        weights.masked_fill_(dropped | (weights < min_p[pending]), 0)
        ids, by_id = ids.sort(dim=-1)
        drawn = ids.gather(1, _draw(weights.gather(1, by_id), uniform[pending])[:, None])[:, 0]
        tokens[pending[settled]] = drawn[settled]
        pending = pending[~settled]
        if len(pending) == 0:
            break
    return tokens


def _sums(logits: Tensor, temperature: Tensor, wanted: Tensor) -> Tensor:
    """Sum of all weights of the rows in `wanted`, float64 [N]; 0 elsewhere."""
    sums = torch.zeros(len(logits), dtype=torch.float64)
    for row in wanted.nonzero()[:, 0].tolist():
        one = logits[row : row + 1]
        # cumsum adds in order whatever the shape; sum does not, and a row's result must not depend on its batch.
        sums[row] = _weights(one, one.amax(dim=-1, keepdim=True), temperature[row : row + 1]).cumsum(
            dim=-1, dtype=torch.float64
        )[0, -1]
    return sums


def _weights(values: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    return (values - highest).div_(temperature).exp_()


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
