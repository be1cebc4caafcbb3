"""The noise by the compiled kernel, see noise.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.native.library import ADDRESS, INT64, NativeLibrary
from executor_svc.kernels.noise import TOKEN_LANE, Uniform


def make_uniform(library: NativeLibrary) -> Uniform:
    """Make the op."""
    fill = library.function("octavo_uniform", ADDRESS, ADDRESS, ADDRESS, INT64, INT64, ADDRESS)

    def uniform(seeds: Tensor, choices: Tensor, positions: Tensor, lane: int = TOKEN_LANE) -> Tensor:
        held = [each.contiguous() for each in (seeds, choices, positions)]
        numbers = torch.empty(len(seeds), dtype=torch.float64)
        fill(*(each.data_ptr() for each in held), lane, len(numbers), numbers.data_ptr())
        return numbers

    return uniform
