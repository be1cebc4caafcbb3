"""The noise, all rows at once in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.kernels.noise import TOKEN_LANE

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return the random blocks uint32 [N, 4] of counter uint32 [N, 4] under key uint32 [N, 2]."""
    # Words live in 64-bit lanes, so that a product of two keeps its high half.
    word0, word1, word2, word3 = (counter[:, i].astype(np.uint64) for i in range(4))
    key0, key1 = (key[:, i].astype(np.uint64) for i in range(2))
    for _ in range(_ROUNDS):
        product0 = word0 * _MULTIPLIERS[0]
        product1 = word2 * _MULTIPLIERS[1]
        word0, word2 = (product1 >> _HALF) ^ word1 ^ key0, (product0 >> _HALF) ^ word3 ^ key1
        word1, word3 = product1 & _LOW, product0 & _LOW
        key0, key1 = (key0 + _WEYL[0]) & _LOW, (key1 + _WEYL[1]) & _LOW
    return np.stack((word0, word1, word2, word3), axis=1).astype(np.uint32)


def uniform_numbers(
    seeds: npt.NDArray[np.uint64],
    choices: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    lane: int = TOKEN_LANE,
) -> npt.NDArray[np.float64]:
    """Return what Uniform gives, of columns in numpy."""
    counter = np.zeros((len(seeds), 4), dtype=np.uint32)
    counter[:, 0] = choices
    counter[:, 1] = positions
    counter[:, 2] = lane
    key = np.stack((seeds & _LOW, seeds >> _HALF), axis=1).astype(np.uint32)
    block = philox4x32(counter, key).astype(np.uint64)
    bits = (block[:, 0] << np.uint64(21)) | (block[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


def uniform(seeds: Tensor, choices: Tensor, positions: Tensor, lane: int = TOKEN_LANE) -> Tensor:
    """See Uniform."""
    numbers = uniform_numbers(seeds.cpu().numpy(), choices.cpu().numpy(), positions.cpu().numpy(), lane)
    return torch.from_numpy(numbers).to(seeds.device)
