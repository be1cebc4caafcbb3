"""The parts of typical-p that a fast set puts together, over whole rows or over lists."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def mean_and_total(exponents: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of the exponents and the sum of the weights of each row, float64 [R] each.

    Both arguments are float32 [R, L] in ascending id, a highest weight of 1 in each row; exponents of weight 0 do not
    count, and may be infinite.
    """
    # cumsum adds in order whatever the shape: tokens of weight 0, left out or not, change no bit.
    total = weights.cumsum(dim=-1, dtype=torch.float64)[:, -1]
    terms = weights.to(torch.float64).mul_(exponents).masked_fill_(weights == 0, 0)
    return terms.cumsum(dim=-1)[:, -1] / total, total


def distances_from(mean: Tensor, exponents: Tensor, weights: Tensor) -> Tensor:
    """Return how far each exponent is from its row's mean, float64 [R, L]; infinite where the weight is 0."""
    distances = exponents.to(torch.float64).sub_(mean[:, None]).abs_()
    return distances.masked_fill_(weights == 0, torch.inf)


def typical_distance(distances: Tensor, weights: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance of the last of the nearest tokens whose weights sum to `enough`, float64 [R], and where there
    are such, bool [R]; elsewhere the distance is the largest.

    distances is float64 [R, L] and weights float32 [R, L], both in rank order; enough is float64 [R]. Tokens at
    infinite distance do not count.
    """
    # In rank order distances fall, then rise: numpy's stable sort merges such runs in one pass.
    nearest = torch.from_numpy(np.argsort(distances.numpy(), axis=-1, kind="stable"))
    ordered = distances.gather(1, nearest)
    counted = weights.gather(1, nearest).masked_fill_(ordered == torch.inf, 0)
    short = (counted.cumsum(dim=-1, dtype=torch.float64) < enough[:, None]).sum(dim=-1)
    settled = short < distances.shape[1]
    return ordered.gather(1, short.clamp(max=distances.shape[1] - 1)[:, None])[:, 0], settled
