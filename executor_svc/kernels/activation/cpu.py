"""Gated activation by the compiled kernel, see activation.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.activation import SiluAndMul
from executor_svc.kernels.native.library import ADDRESS, INT32, INT64, NativeLibrary


def make_silu_and_mul(library: NativeLibrary) -> SiluAndMul:
    """Make the op."""
    gate = library.function("octavo_silu_and_mul", ADDRESS, ADDRESS, INT64, INT64, INT32)

    def silu_and_mul(gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        gate(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, gate_up.dtype == torch.bfloat16)
        return out

    return silu_and_mul
