"""One safetensors file: eight bytes that say how long the header is, the header in JSON, the tensors' bytes.

Read by our own code, so that every fault is an error that names file and tensor, and so that pages go back to the
system once they are copied. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from executor_svc.weights.checkpoint import Region
from executor_svc.weights.errors import WeightsError
from executor_svc.weights.mapped_file import MappedFile

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Element types that are read, by the name that files give them."""
_MOST_HEADER_BYTES = 100_000_000
_COPY_BYTES = 8 << 20
"""Bytes copied before their pages are given back."""
_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
_SIZES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An open file. Tensors are mapped, not read, until they are copied."""

    def __init__(self, path: Path) -> None:
        """Map the file and check its header. Raises WeightsError where it is missing, damaged or incomplete."""
        self._file = MappedFile(path)
        try:
            self._entries = _read_header(self._file)
        except _FormatError as error:
            raise WeightsError(f"{path} is damaged or incomplete: {error}") from None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: entry.shape for name, entry in self._entries.items()}

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Element type of every tensor that cannot be copied, by name."""
        return {name: entry.dtype for name, entry in self._entries.items() if entry.dtype not in FLOAT_TYPES}

    def copy_to(self, name: str, out: Tensor, region: Region | None = None) -> None:
        """Fill `out`, of any float dtype and device and of the shape of the tensor or of the region of it."""
        entry = self._entries[name]
        dtype = FLOAT_TYPES[entry.dtype]
        rows = out.view(1) if not out.dim() else out
        if not rows.numel():
            return
        num_rows, *width = entry.shape or (1,)
        row_bytes = (entry.end - entry.start) // num_rows
        columns = None if region is None else region.columns
        behind = 0 if region is None or region.rows is None else region.rows[0] * row_bytes
        step = max(1, _COPY_BYTES // row_bytes)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            start = entry.start + behind + first * row_bytes
            packed = self._file.bytes(start, start + len(part) * row_bytes)
            if start % dtype.itemsize:  # as files of other writers may have it
                packed = packed.clone()
            part.copy_(Region(columns=columns).of(packed.view(dtype).view(len(part), *width)))
            self._file.release(start, start + len(part) * row_bytes)


class _FormatError(Exception):
    """The bytes are no safetensors file."""


def _read_header(file: MappedFile) -> dict[str, _Entry]:
    if len(file) < 8:
        raise _FormatError(f"it has {len(file)} bytes, too few for a header")
    length = int.from_bytes(file.bytes(0, 8).numpy().tobytes(), "little")
    if length > _MOST_HEADER_BYTES or length > len(file) - 8:
        raise _FormatError(f"its header of {length} bytes is longer than the file or than any header may be")
    try:
        text = file.bytes(8, 8 + length).numpy().tobytes().decode()
        header = json.loads(text, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError):
        raise _FormatError("its header is no JSON") from None
    if not isinstance(header, dict):
        raise _FormatError("its header is no JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + length
    entries = {name: _entry(name, value, data_start, len(file)) for name, value in header.items()}
    _check_order(entries, data_start, len(file))
    return entries


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise _FormatError(f"its header names {twin!r} twice")
    return values


def _entry(name: str, value: Any, data_start: int, size: int) -> _Entry:
    fault = _FormatError(f"tensor {name} has no proper dtype, shape and data_offsets in the header")
    if not isinstance(value, dict):
        raise fault
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise fault
    start, end = (data_start + offset for offset in offsets)
    if not start <= end <= size:
        raise _FormatError(f"tensor {name} lies at bytes {start} to {end}, past the file's {size}")
    elements = prod(shape)
    if dtype in _SIZES and elements * _SIZES[dtype] != end - start:
        raise _FormatError(f"tensor {name}, {dtype} of shape {shape}, does not take the {end - start} bytes it has")
    return _Entry(dtype, tuple(shape), start, end)


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_order(entries: Mapping[str, _Entry], data_start: int, size: int) -> None:
    """Raise where tensors overlap, or where bytes belong to none: then the header is not this file's."""
    at, before = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            what = "overlaps" if entry.start < at else "leaves a gap behind"
            raise _FormatError(f"tensor {name} {what} {before}")
        at, before = entry.end, name
    if at != size:
        raise _FormatError(f"{size - at} bytes behind {before} belong to no tensor")
