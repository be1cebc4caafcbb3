"""Linear by the compiled kernel: weights packed once into panels of columns, see linear.cpp."""

from __future__ import annotations

import ctypes
from ctypes import addressof

import torch
from torch import Tensor

from executor_svc.kernels.linear import Linear, PackLinear
from executor_svc.kernels.native.library import ADDRESS, INT32, INT64, NativeLibrary

_FLOAT32, _BFLOAT16 = 0, 1
"""Storage of a weight, as linear.cpp numbers it."""


class _Weight(ctypes.Structure):
    """Weight of linear.cpp."""

    _fields_ = [
        ("panels", ADDRESS),
        ("bias", ADDRESS),
        ("out_features", INT64),
        ("in_features", INT64),
        ("storage", INT32),
    ]


class NativeLinear:
    """A packed weight."""

    def __init__(self, ops: _Ops, weight: Tensor, bias: Tensor | None) -> None:
        self._dtype = weight.dtype
        self._multiply = ops.multiply
        self._out_features, in_features = weight.shape
        self.panels, storage = ops.pack(weight)
        self._bias = None if bias is None else bias.float().contiguous()
        self._weight = _Weight(
            self.panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self._out_features,
            in_features,
            storage,
        )
        self._address = addressof(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        rows = x.float().contiguous()
        out = torch.empty((len(rows), self._out_features), dtype=torch.float32)
        self._multiply(self._address, rows.data_ptr(), out.data_ptr(), len(rows))
        return out.to(self._dtype)


class _Ops:
    """The functions of linear.cpp."""

    def __init__(self, library: NativeLibrary) -> None:
        self.multiply = library.function("octavo_linear", ADDRESS, ADDRESS, ADDRESS, INT64)
        self._pack = library.function("octavo_pack_linear", ADDRESS, INT64, INT64, INT32, ADDRESS)
        self._fits_bfloat16 = library.function("octavo_fits_bfloat16", ADDRESS, INT64, result=INT32)
        self._panel = library.function("octavo_linear_panel", result=INT64)()

    def pack(self, weight: Tensor) -> tuple[Tensor, int]:
        """Return the panels of a weight [out_features, in_features], and how they are stored."""
        weight = weight.float().contiguous()
        out_features, in_features = weight.shape
        storage = _BFLOAT16 if self._fits_bfloat16(weight.data_ptr(), weight.numel()) else _FLOAT32
        padded = -(-out_features // self._panel) * self._panel
        dtype = torch.bfloat16 if storage == _BFLOAT16 else torch.float32
        panels = torch.empty(padded * in_features, dtype=dtype)
        self._pack(weight.data_ptr(), out_features, in_features, storage, panels.data_ptr())
        return panels, storage


def make_pack_linear(library: NativeLibrary) -> PackLinear:
    """Make the op. A float32 weight whose values are all bfloat16 is held in 16 bits: nothing is lost."""
    ops = _Ops(library)

    def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
        return NativeLinear(ops, weight, bias)

    return pack_linear
