"""GGUF files, dequantized row block by row block while they are copied out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_svc.weights.checkpoint import Region
from executor_svc.weights.errors import ModelLoadError, UnsupportedModelError, WeightsError
from executor_svc.weights.gguf_config import ARCHITECTURES, head_size
from executor_svc.weights.gguf_layout import fits, restore
from executor_svc.weights.gguf_metadata import GgufMetadata
from executor_svc.weights.gguf_names import ROTARY_FACTORS, Source, find_sources
from executor_svc.weights.gguf_types import ELEMENT_TYPES, unpack
from executor_svc.weights.mapped_file import MappedFile
from octavo.models.errors import ModelError
from octavo.models.gguf_file import TensorEntry, read_header
from octavo.models.gguf_parts import check_part, find_parts
from octavo.models.gguf_readable import why_not_read

_MOST_ROTARY_FACTORS = 1 << 14


class GgufCheckpoint:
    """An open file, or the parts of one. Tensors are mapped, not read, until they are copied."""

    unreadable: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        """Open the file and check its header and size. Raises ModelLoadError where it cannot be used."""
        try:
            metadata, parts = _read_parts(path)
        except ModelError as error:
            raise ModelLoadError(str(error)) from None
        for part, own in parts.items():
            if (reason := why_not_read(metadata, own)) is not None:
                raise UnsupportedModelError(f"{part}: {reason}")
        architecture = ARCHITECTURES[metadata["general.architecture"]]
        self.path = path
        self._files: dict[str, MappedFile] = {}
        for part, own in parts.items():
            self._add(part, own)
        entries = [entry for own in parts.values() for entry in own]
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

    def file_of(self, name: str) -> Path:
        """See Checkpoint."""
        return self._files[self._sources[name].entry.name].path

    def copy_to(self, name: str, out: Tensor, region: Region | None = None) -> None:
        """See Checkpoint."""
        source = self._sources[name]
        if not out.numel():
            return
        start, end, row_bytes = _range(source)
        # Unpacked on the host, whose operations on bytes are the fast ones.
        target = out if out.device.type == "cpu" else torch.empty(out.shape)
        file = self._files[source.entry.name]
        rows = file.bytes(start, end).view(source.num_rows, row_bytes)
        restore(rows, source.entry.ggml_type, source.layout, self._head_dim, target, region)
        file.release(start, end)
        if target is not out:
            out.copy_(target)

    def _factors(self, entry: TensorEntry) -> list[float]:
        count = prod(entry.shape)
        if len(entry.shape) != 1 or not 0 < count <= _MOST_ROTARY_FACTORS:
            raise WeightsError(f"{self.path}: tensor {entry.name} of shape {list(entry.shape)} is no list of factors")
        values = torch.empty(count, 1)
        rows = self._files[entry.name].bytes(entry.offset, entry.offset + _size(entry)).view(count, -1)
        unpack(rows, entry.ggml_type, values)
        factors: list[float] = values.ravel().tolist()
        return factors

    def _add(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        """Map a part. Raise where a tensor's type is not read, its data overlaps another's or is not in the file."""
        file = MappedFile(path)
        for entry in entries:
            if entry.name in self._files:
                raise WeightsError(f"{path}: tensor {entry.name} is there twice")
            self._files[entry.name] = file
            _check_entry(path, entry, len(file))
        end, before = 0, ""
        for entry in sorted(entries, key=lambda entry: (entry.offset, _size(entry))):
            if entry.offset < end:
                raise WeightsError(f"{path} is damaged: tensor {entry.name} overlaps {before}")
            end, before = entry.offset + _size(entry), entry.name


def _read_parts(path: Path) -> tuple[dict[str, Any], dict[Path, tuple[TensorEntry, ...]]]:
    """Return the metadata, and the entries of each file that the model lies in. Raises ModelError."""
    metadata, entries = read_header(path)
    paths = find_parts(path, metadata)
    parts = {path: entries}
    for index, part in enumerate(paths[1:], start=1):
        own, parts[part] = read_header(part)
        check_part(part, own, index, len(paths))
    total, found = metadata.get("split.tensors.count"), sum(map(len, parts.values()))
    if len(paths) > 1 and total is not None and total != found:
        raise ModelError(f"{path} and its other parts have {found} tensors, not {total}: one of them is incomplete")
    return metadata, parts


def _check_entry(path: Path, entry: TensorEntry, num_bytes: int) -> None:
    kind = ELEMENT_TYPES[entry.ggml_type]
    is_cut = not entry.shape or 0 in entry.shape or entry.shape[-1] % kind.block_elements
    if is_cut or (len(entry.shape) == 1 and kind.block_elements > 1):
        raise UnsupportedModelError(f"{path}: tensor {entry.name} is {kind.name} of shape {list(entry.shape)}")
    if entry.offset + _size(entry) > num_bytes:
        raise WeightsError(f"{path}: tensor {entry.name} ends past the file, which is incomplete")


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
