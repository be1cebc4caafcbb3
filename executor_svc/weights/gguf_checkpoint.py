"""GGUF files, dequantized row block by row block while they are copied out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_svc.weights.errors import ModelLoadError, UnsupportedModelError, WeightsError
from executor_svc.weights.gguf_config import ARCHITECTURES, head_size
from executor_svc.weights.gguf_layout import fits, restore
from executor_svc.weights.gguf_metadata import GgufMetadata
from executor_svc.weights.gguf_names import ROTARY_FACTORS, Source, find_sources
from executor_svc.weights.gguf_types import ELEMENT_TYPES, unpack
from executor_svc.weights.mapped_file import MappedFile
from octavo.models.errors import ModelError
from octavo.models.gguf_file import TensorEntry, read_header

_MOST_ROTARY_FACTORS = 1 << 14


class GgufCheckpoint:
    """An open file. Tensors are mapped, not read, until they are copied."""

    unreadable: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        """Open the file and check its header and size. Raises ModelLoadError where it cannot be used."""
        try:
            metadata, entries = read_header(path)
        except ModelError as error:
            raise ModelLoadError(str(error)) from None
        name = metadata.get("general.architecture")
        architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if architecture is None:
            known = ", ".join(sorted(ARCHITECTURES))
            raise UnsupportedModelError(f"{path}: architecture {name!r} is not supported; supported: {known}")
        self.path = path
        self._file = MappedFile(path)
        self._check(entries)
        factors = {entry.name: self._factors(entry) for entry in entries if entry.name in ROTARY_FACTORS}
        weights = [entry for entry in entries if entry.name not in ROTARY_FACTORS]
        self._sources = _by_name(path, find_sources(architecture.names, weights))
        self.shapes = {name: source.shape for name, source in self._sources.items()}
        header = GgufMetadata(path, metadata, self.shapes, factors)
        self.config: Mapping[str, Any] = architecture.read(header)
        self._head_dim = head_size(header)
        for source in self._sources.values():
            if not fits(source.layout, source.entry.shape, self._head_dim):
                shape = list(source.entry.shape)
                raise WeightsError(f"{path}: tensor {source.entry.name} of shape {shape} has no whole heads")

    def copy_to(self, name: str, out: Tensor) -> None:
        """See Checkpoint."""
        source = self._sources[name]
        if not out.numel():
            return
        start, end, row_bytes = _range(source)
        # Unpacked on the host, whose operations on bytes are the fast ones.
        target = out if out.device.type == "cpu" else torch.empty(out.shape)
        rows = self._file.bytes(start, end).view(source.num_rows, row_bytes)
        restore(rows, source.entry.ggml_type, source.layout, self._head_dim, target)
        self._file.release(start, end)
        if target is not out:
            out.copy_(target)

    def _factors(self, entry: TensorEntry) -> list[float]:
        count = prod(entry.shape)
        if len(entry.shape) != 1 or not 0 < count <= _MOST_ROTARY_FACTORS:
            raise WeightsError(f"{self.path}: tensor {entry.name} of shape {list(entry.shape)} is no list of factors")
        values = torch.empty(count, 1)
        rows = self._file.bytes(entry.offset, entry.offset + _size(entry)).view(count, -1)
        unpack(rows, entry.ggml_type, values)
        factors: list[float] = values.ravel().tolist()
        return factors

    def _check(self, entries: Iterable[TensorEntry]) -> None:
        """Raise where a tensor's type is not read, where its data overlaps another's or is not in the file."""
        names: set[str] = set()
        for entry in entries:
            if entry.name in names:
                raise WeightsError(f"{self.path}: tensor {entry.name} is there twice")
            names.add(entry.name)
            self._check_entry(entry)
        end, before = 0, ""
        for entry in sorted(entries, key=lambda entry: (entry.offset, _size(entry))):
            if entry.offset < end:
                raise WeightsError(f"{self.path} is damaged: tensor {entry.name} overlaps {before}")
            end, before = entry.offset + _size(entry), entry.name

    def _check_entry(self, entry: TensorEntry) -> None:
        kind = ELEMENT_TYPES.get(entry.ggml_type)
        if kind is None:
            known = ", ".join(each.name for each in ELEMENT_TYPES.values())
            found = _name_of(entry.ggml_type)
            raise UnsupportedModelError(f"{self.path}: tensor {entry.name} is {found}; supported: {known}")
        is_cut = not entry.shape or 0 in entry.shape or entry.shape[-1] % kind.block_elements
        if is_cut or (len(entry.shape) == 1 and kind.block_elements > 1):
            raise UnsupportedModelError(f"{self.path}: tensor {entry.name} is {kind.name} of shape {list(entry.shape)}")
        if entry.offset + _size(entry) > len(self._file):
            raise WeightsError(f"{self.path}: tensor {entry.name} ends past the file, which is incomplete")


def _by_name(path: Path, sources: Iterable[tuple[str, Source]]) -> dict[str, Source]:
    found: dict[str, Source] = {}
    for name, source in sources:
        if name in found:
            raise WeightsError(f"{path}: {found[name].entry.name} and {source.entry.name} are the same tensor")
        found[name] = source
    return found


def _range(source: Source) -> tuple[int, int, int]:
    """Return first and last byte of a source's rows, and the bytes of one."""
    kind = ELEMENT_TYPES[source.entry.ggml_type]
    columns = source.entry.shape[-1] if len(source.entry.shape) > 1 else 1
    row_bytes = columns // kind.block_elements * kind.block_bytes
    start = source.entry.offset + source.first_row * row_bytes
    return start, start + source.num_rows * row_bytes, row_bytes


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
