"""A step's inputs as one piece of memory: built on the host, brought to the device by one copy, read there in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.device import Device, Event, Pinned

ALIGNMENT = 64
"""Bytes. Kernels are compiled for whether an address divides by 16: here each does, whatever the sizes are."""
ROW, QUERY, SAMPLE, TOKEN = "row", "query", "sample", "token"
COLUMNS: Mapping[str, tuple[str, type[np.generic]]] = {
    "slots": (ROW, np.int64),
    "context_lens": (ROW, np.int32),
    "patch_at": (ROW, np.int64),
    "patch_block": (ROW, np.int32),
    "query_start": (QUERY, np.int32),
    "last_tokens": (SAMPLE, np.int64),
    "sample_slots": (SAMPLE, np.int64),
    "sample_at": (SAMPLE, np.int64),
    "sample_positions": (SAMPLE, np.int64),
    "num_prompt_tokens": (SAMPLE, np.int64),
    "top_k": (SAMPLE, np.int64),
    "seed": (SAMPLE, np.uint64),
    "choice": (SAMPLE, np.int64),
    "temperature": (SAMPLE, np.float32),
    "top_p": (SAMPLE, np.float32),
    "min_p": (SAMPLE, np.float32),
    "typical_p": (SAMPLE, np.float32),
    "repetition": (SAMPLE, np.float32),
    "presence": (SAMPLE, np.float32),
    "frequency": (SAMPLE, np.float32),
    "positions": (TOKEN, np.int64),
    "slot_mapping": (TOKEN, np.int64),
    "token_at": (TOKEN, np.int64),
}
"""Each column, what it has one entry for (`query`: one more than rows), and its type. See AttentionMetadata and
SamplerState for those of their names. slots and sample_slots are rows of the device's tables (see tables.py), token_at
and sample_at places in its table of tokens, patch_at places in its block tables, which get patch_block."""
PARAMETERS = (
    *("num_prompt_tokens", "top_k", "seed", "choice", "temperature", "top_p", "min_p", "typical_p"),
    *("repetition", "presence", "frequency"),
)
"""Columns that are a sequence's own, as SamplerState.parameters has them."""
_TORCH = {
    np.int64: torch.int64,
    np.int32: torch.int32,
    np.uint64: torch.uint64,
    np.float32: torch.float32,
}
HostColumns = Mapping[str, npt.NDArray[np.generic]]
DeviceColumns = Mapping[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """Where each column lies, for so many rows, sampling rows and tokens."""

    rows: int
    sampling: int
    tokens: int
    places: Mapping[str, tuple[int, int]]
    """Of each column its first byte, and the one behind its last."""
    size: int
    """Bytes of all."""

    def host_views(self, memory: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.generic]]:
        """Give the columns in a piece of host memory."""
        return {name: memory[begin:end].view(COLUMNS[name][1]) for name, (begin, end) in self.places.items()}

    def device_views(self, memory: Tensor) -> dict[str, Tensor]:
        """Give the columns in a piece of device memory, uint8 [at least size]."""
        return {name: memory[begin:end].view(_TORCH[COLUMNS[name][1]]) for name, (begin, end) in self.places.items()}


@lru_cache(maxsize=512)
def layout(rows: int, sampling: int, tokens: int) -> Layout:
    """Lay the columns one behind the other."""
    counts = {ROW: rows, QUERY: rows + 1, SAMPLE: sampling, TOKEN: tokens}
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for name, (kind, dtype) in COLUMNS.items():
        end = at + counts[kind] * np.dtype(dtype).itemsize
        places[name] = at, end
        at = -(-end // ALIGNMENT) * ALIGNMENT
    return Layout(rows, sampling, tokens, places, at)


class _Slip:
    """Page-locked memory and device memory of one step's inputs on their way."""

    def __init__(self, device: Device, size: int) -> None:
        self.pinned: Pinned = device.pinned(size)
        self.staged = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
        self.sent: Event | None = None
        self.taken: Event | None = None


class InputRing:
    """Brings inputs to the device on its copy stream: those of a step while the one before it still reads its own.

    They go to one of a few pieces of memory in turn, and from there, on the compute stream, to the one place where
    every step reads them, graphs included.
    """

    def __init__(self, device: Device, size: int, depth: int) -> None:
        """`size`: of the largest step's inputs; `depth`: steps that may be under way, besides the one being built."""
        self._device = device
        with device.on(device.copy):
            self._slips = [_Slip(device, size) for _ in range(depth + 1)]
        with device.on(device.compute):
            self.place = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
            """uint8 [size]: where steps read."""
        self._next = 0

    def host_views(self, where: Layout) -> HostColumns:
        """Give the columns of the next step, to be written. Waits until the copy of the step so long ago has ended."""
        slip = self._slips[self._next]
        if slip.sent is not None:
            slip.sent.synchronize()
        return where.host_views(slip.pinned.bytes())

    def send(self, where: Layout) -> None:
        """Start bringing over what was written, beside whatever is computed."""
        device, slip = self._device, self._slips[self._next]
        if slip.taken is not None:
            device.copy.wait(slip.taken)
        with device.on(device.copy):
            device.send(slip.pinned, slip.staged, where.size)
        slip.sent = device.copy.record()

    def take(self, where: Layout) -> None:
        """On the compute stream: wait for what was sent and put it where steps read."""
        device, slip = self._device, self._slips[self._next]
        assert slip.sent is not None  # send
        device.compute.wait(slip.sent)
        self.place[: where.size].copy_(slip.staged[: where.size])
        slip.taken = device.compute.record()
        self._next = (self._next + 1) % len(self._slips)
