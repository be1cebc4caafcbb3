"""The noise by the compiled kernel, see noise.cpp."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from executor_svc.kernels.native.library import ADDRESS, INT64, NativeLibrary
from executor_svc.kernels.noise import TOKEN_LANE, Uniform


def make_uniform(library: NativeLibrary) -> Uniform:
    """Make the op."""
    fill = library.function("octavo_uniform", ADDRESS, ADDRESS, ADDRESS, INT64, INT64, ADDRESS)

    def uniform(
        seeds: npt.NDArray[np.uint64],
        choices: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        lane: int = TOKEN_LANE,
    ) -> npt.NDArray[np.float64]:
        held = [
            np.ascontiguousarray(seeds, dtype=np.uint64),
            np.ascontiguousarray(choices, dtype=np.int64),
            np.ascontiguousarray(positions, dtype=np.int64),
        ]
        numbers = np.empty(len(seeds), dtype=np.float64)
        fill(*(each.ctypes.data for each in held), lane, len(numbers), numbers.ctypes.data)
        return numbers

    return uniform
