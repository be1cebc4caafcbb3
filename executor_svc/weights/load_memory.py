"""Memory of weights on their way from a file to the form in which kernels hold them.

Each plain weight lives only until it is packed. Two things would still make them add up: as many at once as there are
threads, and an allocator that keeps what was freed. So their number is bounded, and each has pages of its own.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

SLACK = 0.1
"""Plain weights and the packed ones being made of them may take this share of all weights beyond these themselves."""
_OWN_PAGES = 1 << 17
"""Bytes from which on a tensor gets pages of its own."""


class LoadMemory:
    """Lets threads make packed weights out of plain ones, as many at a time as the bound has room for."""

    def __init__(self, total_bytes: int) -> None:
        """`total_bytes`: of all weights as they will be held."""
        self._most = total_bytes * (1 + SLACK)
        self._held = 0
        self._in_hand = 0
        self._changed = threading.Condition()

    @contextmanager
    def packing(self, num_bytes: int) -> Iterator[None]:
        """Wait for room for a plain weight of so many bytes and its packed form. One alone always has room."""
        needed = 2 * num_bytes
        with self._changed:
            self._changed.wait_for(lambda: not self._in_hand or self._held + self._in_hand + needed <= self._most)
            self._in_hand += needed
        try:
            yield
        finally:
            with self._changed:
                self._in_hand -= needed
                self._held += num_bytes
                self._changed.notify_all()


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new tensor, not initialized; a large one on the CPU gives its memory back as soon as it is dropped."""
    num_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _OWN_PAGES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
