"""Linear by compiled kernels: weights packed once into panels of columns, see linear.cpp and linear_bf16.cpp."""

from __future__ import annotations

import ctypes
import threading
from ctypes import addressof

import torch
from torch import Tensor

from executor_svc.huge_pages import HUGE_PAGE_BYTES, advise_huge_pages
from executor_svc.kernels.linear import Linear, PackLinear
from executor_svc.kernels.native.library import ADDRESS, INT32, INT64, NativeLibrary

_FLOAT32, _BFLOAT16 = 0, 1
"""Storage of a float32 weight, as linear.cpp numbers it."""


class _Weight(ctypes.Structure):
    """Weight of linear.cpp, and of linear_bf16.cpp, which has no `storage`."""

    _fields_ = [
        ("panels", ADDRESS),
        ("bias", ADDRESS),
        ("out_features", INT64),
        ("in_features", INT64),
        ("storage", INT32),
    ]


_CHUNK_BYTES = 32 << 20


class PanelMemory:
    """Memory of panels, in chunks of huge pages that weights share: a stream over small pages halts at each one's end,
    where the processor's own prefetcher stops too. A chunk goes with its last weight. Threads that load layers side by
    side take from it.
    """

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return memory that nobody has, contiguous and aligned to a line of the cache."""
        num_bytes = num_elements * dtype.itemsize
        whole = -(-num_bytes // 64) * 64
        with self._lock:
            if whole > len(self._rest):
                chunk = torch.empty(max(self._chunk_bytes, whole) + HUGE_PAGE_BYTES, dtype=torch.uint8)
                advise_huge_pages(chunk)
                self._rest = chunk[-chunk.data_ptr() % HUGE_PAGE_BYTES :]
            taken, self._rest = self._rest[:num_bytes], self._rest[whole:]
        return taken.view(dtype)


class NativeLinear:
    """A packed weight, and the kernel that reads it."""

    def __init__(
        self, functions: _Float32 | _Bfloat16, weight: Tensor, panels: Tensor, bias: Tensor | None, storage: int
    ) -> None:
        self._multiply = functions.multiply
        self._weight_rows = functions.weight_rows
        self._dtype = weight.dtype
        self._out_features, self._in_features = weight.shape
        self.panels = panels
        self._bias = None if bias is None else bias.float().contiguous()
        self._weight = _Weight(
            panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self._out_features,
            self._in_features,
            storage,
        )
        self._address = addressof(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._product(x, self._dtype)

    def logits(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._product(x, torch.float32)

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        out = torch.empty((len(x), self._out_features), dtype=dtype)
        self._multiply(self._address, x.data_ptr(), out.data_ptr(), len(x), dtype == torch.float32)
        return out

    def weight_rows(self, indices: Tensor) -> Tensor:
        """See Linear."""
        out = torch.empty((len(indices), self._in_features), dtype=self._dtype)
        self._weight_rows(self._address, indices.data_ptr(), out.data_ptr(), len(indices))
        return out


def make_pack_linear(library: NativeLibrary) -> PackLinear:
    """Make the op. A float32 weight whose values are all bfloat16 is held in 16 bits: nothing is lost."""
    memory = PanelMemory()
    float32, bfloat16 = _Float32(library, memory), _Bfloat16(library, memory)

    def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
        return (bfloat16 if weight.dtype == torch.bfloat16 else float32).pack(weight.contiguous(), bias)

    return pack_linear


class _Float32:
    """The functions of linear.cpp."""

    def __init__(self, library: NativeLibrary, memory: PanelMemory) -> None:
        self._memory = memory
        self.multiply = library.function("octavo_linear", ADDRESS, ADDRESS, ADDRESS, INT64, INT32)
        self.weight_rows = library.function("octavo_linear_weight_rows", ADDRESS, ADDRESS, ADDRESS, INT64)
        self._pack = library.function("octavo_pack_linear", ADDRESS, INT64, INT64, INT32, ADDRESS)
        self._fits_bfloat16 = library.function("octavo_fits_bfloat16", ADDRESS, INT64, result=INT32)
        self._panel = library.function("octavo_linear_panel", result=INT64)()

    def pack(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        out_features, in_features = weight.shape
        storage = _BFLOAT16 if self._fits_bfloat16(weight.data_ptr(), weight.numel()) else _FLOAT32
        padded = -(-out_features // self._panel) * self._panel
        panels = self._memory.take(padded * in_features, torch.bfloat16 if storage == _BFLOAT16 else torch.float32)
        self._pack(weight.data_ptr(), out_features, in_features, storage, panels.data_ptr())
        return NativeLinear(self, weight, panels, bias, storage)


class _Bfloat16:
    """The functions of linear_bf16.cpp."""

    def __init__(self, library: NativeLibrary, memory: PanelMemory) -> None:
        self._memory = memory
        self.multiply = library.function("octavo_linear_bf16", ADDRESS, ADDRESS, ADDRESS, INT64, INT32)
        self.weight_rows = library.function("octavo_linear_bf16_weight_rows", ADDRESS, ADDRESS, ADDRESS, INT64)
        self._pack = library.function("octavo_pack_linear_bf16", ADDRESS, INT64, INT64, ADDRESS)
        self._num_words = library.function("octavo_linear_bf16_words", INT64, INT64, result=INT64)

    def pack(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        panels = self._memory.take(self._num_words(*weight.shape), torch.int32)
        self._pack(weight.data_ptr(), *weight.shape, panels.data_ptr())
        return NativeLinear(self, weight, panels, bias, _BFLOAT16)
