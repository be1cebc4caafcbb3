"""Packing of the flat little-endian arrays in TokenLogprobColumns."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def pack_floats(values: Sequence[float]) -> bytes:
    """Return float32[len(values)]."""
    return struct.pack(f"<{len(values)}f", *values)


def unpack_floats(data: bytes) -> tuple[float, ...]:
    """Return the values of a float32 array. Raises struct.error where the length is no multiple of 4."""
    return struct.unpack(f"<{len(data) // 4}f", data)


def pack_ids(values: Sequence[int]) -> bytes:
    """Return uint32[len(values)]."""
    return struct.pack(f"<{len(values)}I", *values)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Return the values of a uint32 array. Raises struct.error where the length is no multiple of 4."""
    return struct.unpack(f"<{len(data) // 4}I", data)
