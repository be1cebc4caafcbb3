"""GGUF files, dequantized tensor by tensor while they are copied out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize
from torch import Tensor

from executor_svc.weights.errors import ModelLoadError, UnsupportedModelError, WeightsError
from executor_svc.weights.gguf_config import INTERLEAVED_ROTARY, ROPE_FREQS, checkpoint_name, config_fields
from octavo.models.errors import ModelError
from octavo.models.gguf_file import TensorEntry, read_header

ELEMENT_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Element types that are read."""
_CHUNK_ELEMENTS = 1 << 18
"""Elements dequantized at once: the temporaries of a chunk stay in cache."""

Bytes = npt.NDArray[np.uint8]


class GgufCheckpoint:
    """An open file. Tensors are mapped, not read, until they are copied."""

    def __init__(self, path: Path) -> None:
        """Open the file and check its header and size. Raises ModelLoadError where it cannot be used."""
        try:
            metadata, entries = read_header(path)
        except ModelError as error:
            raise ModelLoadError(str(error)) from None
        self.path = path
        self._bytes: Bytes = np.memmap(path, dtype=np.uint8, mode="c")
        self._entries = {checkpoint_name(entry.name): entry for entry in entries}
        for entry in entries:
            self._check(entry)
        self.shapes = {name: entry.shape for name, entry in self._entries.items() if name != ROPE_FREQS}
        self.config: Mapping[str, Any] = config_fields(path, metadata, self.shapes, self._rope_freqs())
        self._interleaved = metadata["general.architecture"] in INTERLEAVED_ROTARY

    def copy_to(self, name: str, out: Tensor) -> None:
        """See Checkpoint."""
        entry = self._entries[name]
        kind = gguf.GGMLQuantizationType(entry.ggml_type)
        rows = self._rows(entry)
        flat = out.view(len(rows), -1)
        order = self._row_order(name, len(rows))

        def fill(part: slice) -> None:
            chunk = rows[part] if order is None else rows[order[part]]
            flat[part].copy_(torch.from_numpy(dequantize(chunk, kind)))

        step = max(1, _CHUNK_ELEMENTS // flat.shape[1])
        parts = [slice(start, start + step) for start in range(0, len(rows), step)]
        if len(parts) == 1:
            fill(parts[0])
            return
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:
            list(pool.map(fill, parts))

    def _rows(self, entry: TensorEntry) -> Bytes:
        """Return a tensor's bytes, one row of elements a row; a vector is a column."""
        num_rows = prod(entry.shape[:-1]) if len(entry.shape) > 1 else entry.shape[0]
        return self._bytes[entry.offset : entry.offset + _size(entry)].reshape(num_rows, -1)

    def _row_order(self, name: str, num_rows: int) -> npt.NDArray[np.intp] | None:
        """Return which of GGUF's rows is each of the checkpoint's; None where they are the same.

        GGUF's rows 2i and 2i + 1 of a Q or K head are the checkpoint's i and i + head_dim / 2.
        """
        if not self._interleaved or not name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            return None
        heads: npt.NDArray[np.intp] = np.arange(num_rows).reshape(-1, self.config["head_dim"] // 2, 2)
        return heads.swapaxes(1, 2).reshape(-1)

    def _rope_freqs(self) -> list[float] | None:
        entry = self._entries.get(ROPE_FREQS)
        if entry is None:
            return None
        values: list[float] = dequantize(self._rows(entry), gguf.GGMLQuantizationType(entry.ggml_type)).ravel().tolist()
        return values

    def _check(self, entry: TensorEntry) -> None:
        try:
            kind = gguf.GGMLQuantizationType(entry.ggml_type).name
        except ValueError:
            kind = f"type {entry.ggml_type}"
        if kind not in ELEMENT_TYPES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {entry.name} is {kind}; supported: {', '.join(ELEMENT_TYPES)}"
            )
        if not entry.shape or (len(entry.shape) == 1 and kind not in ELEMENT_TYPES[:3]):
            raise UnsupportedModelError(f"{self.path}: tensor {entry.name} is {kind} of shape {list(entry.shape)}")
        if entry.offset + _size(entry) > len(self._bytes):
            raise WeightsError(f"{self.path}: tensor {entry.name} ends past the file, which is incomplete")


def _size(entry: TensorEntry) -> int:
    """Bytes of a tensor's data."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(entry.ggml_type)]
    size: int = prod(entry.shape) // block_elements * block_bytes
    return size
