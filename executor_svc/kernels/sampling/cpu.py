"""Sampling that ranks only what it must: nothing for greedy and unfiltered rows, a short list for most others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from executor_svc.kernels.sampling import GREEDY_TEMPERATURE
from executor_svc.kernels.selection import argmax_rows, top_candidates

_LIST_LENGTH = 64
"""Ranks looked at before the whole vocabulary: most filters keep fewer."""
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
    length = min(_LIST_LENGTH, vocab)
    values, ids = top_candidates(logits, length)
    weights = _weights(values, values[:, :1], temperature)
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
    ids, by_id = ids.sort(dim=-1)
    tokens = ids.gather(1, _draw(weights.gather(1, by_id), uniform)[:, None])[:, 0]
    for row in (~settled).nonzero()[:, 0].tolist():
        tokens[row] = _sample_whole(
            logits[row], temperature[row], int(ranks[row]), float(top_p[row]), min_p[row], uniform[row : row + 1]
        )
    return tokens


def _sample_whole(logits: Tensor, temperature: Tensor, ranks: int, top_p: float, min_p: Tensor, uniform: Tensor) -> int:
    """Sample a row whose kept tokens are more than the list holds."""
    # Sorting values without their ids is several times faster, and the lowest kept value tells the ids.
    values = torch.from_numpy(np.sort(logits.numpy())[::-1].copy())
    kept = ranks
    if top_p < 1:
        mass = _weights(values, values[0], temperature).cumsum(0, dtype=torch.float64)[:ranks]
        kept = min(ranks, int((mass < top_p * mass[-1]).sum()) + 1)
    lowest = values[kept - 1]
    weights = _weights(logits, values[0], temperature)
    weights.masked_fill_((logits < lowest) | (weights < min_p), 0)
    tied = (logits == lowest).nonzero()[:, 0]
    weights[tied[kept - int((values > lowest).sum()) :]] = 0
    return int(_draw(weights[None], uniform))


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
