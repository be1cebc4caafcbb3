"""GGUF files, dequantized tensor by tensor while they are copied out."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.weights.errors import ModelLoadError, UnsupportedModelError, WeightsError
from executor_svc.weights.gguf_config import INTERLEAVED_ROTARY, ROPE_FREQS, checkpoint_name, config_fields
from executor_svc.weights.gguf_types import ELEMENT_TYPES, unpack
from octavo.models.errors import ModelError
from octavo.models.gguf_file import TensorEntry, read_header

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
        rows = torch.from_numpy(self._rows(entry))
        order = self._row_order(name, len(rows))
        unpack(rows if order is None else rows[order], entry.ggml_type, out.view(len(rows), -1))

    def _rows(self, entry: TensorEntry) -> Bytes:
        """Return a tensor's bytes, one row of elements a row; a vector is a column."""
        num_rows = prod(entry.shape[:-1]) if len(entry.shape) > 1 else entry.shape[0]
        return self._bytes[entry.offset : entry.offset + _size(entry)].reshape(num_rows, -1)

    def _row_order(self, name: str, num_rows: int) -> Tensor | None:
        """Return which of GGUF's rows is each of the checkpoint's; None where they are the same.

        GGUF's rows 2i and 2i + 1 of a Q or K head are the checkpoint's i and i + head_dim / 2.
        """
        if not self._interleaved or not name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            return None
        return torch.arange(num_rows).view(-1, self.config["head_dim"] // 2, 2).transpose(1, 2).reshape(-1)

    def _rope_freqs(self) -> list[float] | None:
        entry = self._entries.get(ROPE_FREQS)
        if entry is None:
            return None
        values = torch.empty(prod(entry.shape), 1)
        unpack(torch.from_numpy(self._rows(entry)), entry.ggml_type, values)
        factors: list[float] = values.ravel().tolist()
        return factors

    def _check(self, entry: TensorEntry) -> None:
        kind = ELEMENT_TYPES.get(entry.ggml_type)
        if kind is None:
            known = ", ".join(each.name for each in ELEMENT_TYPES.values())
            found = _name_of(entry.ggml_type)
            raise UnsupportedModelError(f"{self.path}: tensor {entry.name} is {found}; supported: {known}")
        if not entry.shape or (len(entry.shape) == 1 and kind.block_elements > 1):
            raise UnsupportedModelError(f"{self.path}: tensor {entry.name} is {kind.name} of shape {list(entry.shape)}")
        if entry.offset + _size(entry) > len(self._bytes):
            raise WeightsError(f"{self.path}: tensor {entry.name} ends past the file, which is incomplete")


def _size(entry: TensorEntry) -> int:
    """Bytes of a tensor's data."""
    kind = ELEMENT_TYPES[entry.ggml_type]
    size: int = prod(entry.shape) // kind.block_elements * kind.block_bytes
    return size


def _name_of(number: int) -> str:
    """Return what the `gguf` package calls an element type that is not read, for a message."""
    import gguf

    try:
        return gguf.GGMLQuantizationType(number).name
    except ValueError:
        return f"type {number}"
