"""The likeliest tokens of each row in a defined order, without sorting the vocabulary, for sampling and logprobs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BLOCK = 256
"""Logits a block in argmax_rows: a plain maximum is vectorized, a maximum with its index is not."""


def argmax_rows(logits: Tensor) -> Tensor:
    """Return the first index of each row's maximum, int64 [N]; logits is float32 [N, V] without NaN."""
    num_rows, vocab = logits.shape
    whole = vocab - vocab % _BLOCK
    if whole == 0:
        return logits.argmax(dim=-1)
    blocks = logits[:, :whole].view(num_rows, -1, _BLOCK)
    maxima = blocks.amax(dim=-1)
    # argmax takes the first of equals, in the blocks and inside one: together the first of all.
    best_block = maxima.argmax(dim=-1)
    row = torch.arange(num_rows, device=logits.device)
    best = best_block * _BLOCK + blocks[row, best_block].argmax(dim=-1)
    if whole == vocab:
        return best
    rest = logits[:, whole:]
    best_rest = rest.argmax(dim=-1)
    return torch.where(rest[row, best_rest] > maxima[row, best_block], whole + best_rest, best)


def top_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` highest logits of each row and their token ids, float32 and int64 [N, count].

    logits is float32 [N, V] without NaN, count from 1 to V. Highest first, equals by ascending id, also where more
    tokens share the list's last logit than it has room for: there the lowest ids are in it. (Logits that were
    computed in bfloat16 are full of equals.)
    """
    vocab = logits.shape[1]
    if count == vocab:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    # torch.topk does not say which of equal logits it takes; one more than asked for shows where that matters.
    values, ids = logits.topk(count + 1, dim=-1)
    tied = (values[:, count - 1] == values[:, count]).nonzero()[:, 0].tolist()
    values, ids = values[:, :count].contiguous(), ids[:, :count].contiguous()
    for row in tied:
        last = values[row, -1]
        higher = int((values[row] > last).sum())
        # numpy finds the few among many several times faster than torch.nonzero.
        places = np.flatnonzero(logits[row].numpy() == last.numpy())
        ids[row, higher:] = torch.from_numpy(places[: count - higher])
    ids, by_id = ids.sort(dim=-1)
    values = logits.gather(1, ids) if tied else values.gather(1, by_id)
    values, by_value = values.sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, by_value)
