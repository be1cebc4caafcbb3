"""Files that are mapped into memory, and of which no more stays there than is being copied."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from executor_svc.weights.errors import WeightsError

_AROUND = 1 << 16
"""Bytes that Linux maps at once around one that is read, and that are given back with it."""


class MappedFile:
    """The bytes of a file. Mapped pages count as this process's memory, so they are given back once copied."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises WeightsError where it is missing, empty or cannot be read."""
        self.path = path
        try:
            with path.open("rb") as file:
                # Private and writable, though nobody writes: torch takes no memory that it could not write to.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise WeightsError(f"{path} is missing") from None
        except ValueError:  # mmap's word for an empty file
            raise WeightsError(f"{path} is damaged or incomplete: it is empty") from None
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error.strerror}") from None
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._map)

    def bytes(self, start: int, end: int) -> Tensor:
        """Return a range as uint8 [end - start], a view of the file. Nobody may write to it."""
        return self._bytes[start:end]

    def release(self, start: int, end: int) -> None:
        """Give a range's pages back to the system. They are still there for whoever reads them again."""
        first = start // _AROUND * _AROUND
        last = min(-(-end // _AROUND) * _AROUND, len(self))
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
