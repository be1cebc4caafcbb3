"""Shapes of what rank 0 has the others compute, with the numbers that the host plans by: all but tensors' content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata

ALIGNMENT = 64
"""Bytes. Kernels are compiled for whether an address divides by 16: here each does, whatever the sizes are."""
_DTYPES = (torch.float32, torch.bfloat16)
_WIDE, _NARROW = (torch.int64, 8), (torch.int32, 4)


@dataclass(frozen=True)
class StepForm:
    """Of the inputs of a step, T tokens in R rows, which lie one behind the other in one piece of memory."""

    tokens: int
    width: int
    """Columns of the block tables."""
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...] | None
    """See AttentionMetadata.context_lens_host."""

    @classmethod
    def of(cls, token_ids: Tensor, metadata: AttentionMetadata) -> StepForm:
        """Return that of a step's inputs."""
        width = metadata.block_tables.shape[1]
        return cls(len(token_ids), width, tuple(metadata.query_lens), metadata.context_lens_host)

    def encode(self) -> bytes:
        """Return it as a message."""
        contexts = self.context_lens
        head = (self.tokens, self.width, len(self.query_lens), contexts is not None)
        return np.array([*head, *self.query_lens, *(contexts or ())], dtype=np.int64).tobytes()

    @classmethod
    def decode(cls, message: bytearray) -> StepForm:
        """Return what `encode` was given."""
        tokens, width, rows, has_contexts, *lens = np.frombuffer(message, dtype=np.int64).tolist()
        return cls(tokens, width, tuple(lens[:rows]), tuple(lens[rows:]) if has_contexts else None)

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return self._places()[-1][1]

    def parts(self, token_ids: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, ...]:
        """Return the tensors, in the order in which they lie."""
        wide = (token_ids, metadata.positions, metadata.slot_mapping)
        return (*wide, metadata.query_start, metadata.context_lens, metadata.block_tables)

    def views(self, packed: Tensor) -> list[Tensor]:
        """Return the parts in a piece of memory, uint8 [size]."""
        places, rows = self._places(), len(self.query_lens)
        parts = [packed[begin:end].view(dtype) for (begin, end), (dtype, _) in zip(places, self._kinds(), strict=True)]
        return [*parts[:-1], parts[-1].view(rows, self.width)]

    def step(self, parts: Sequence[Tensor]) -> tuple[Tensor, AttentionMetadata]:
        """Return a step's inputs, of their parts."""
        token_ids, positions, slots, starts, contexts, tables = parts
        return token_ids, AttentionMetadata(
            positions=positions,
            slot_mapping=slots,
            query_start=starts,
            context_lens=contexts,
            block_tables=tables,
            query_lens=self.query_lens,
            context_lens_host=self.context_lens,
        )

    def _kinds(self) -> tuple[tuple[torch.dtype, int], ...]:
        return (_WIDE,) * 3 + (_NARROW,) * 3

    def _places(self) -> list[tuple[int, int]]:
        """Give each part's first byte, and the one behind its last."""
        rows = len(self.query_lens)
        counts = (self.tokens,) * 3 + (rows + 1, rows, rows * self.width)
        places, at = [], 0
        for count, (_, size) in zip(counts, self._kinds(), strict=True):
            places.append((at, at + count * size))
            at = -(-places[-1][1] // ALIGNMENT) * ALIGNMENT
        return places


@dataclass(frozen=True)
class RowsForm:
    """Of hidden states [N, hidden]."""

    shape: tuple[int, int]
    dtype: torch.dtype

    SIZE = 24
    """Bytes of it as a message."""

    @classmethod
    def of(cls, x: Tensor) -> RowsForm:
        """Return that of hidden states."""
        rows, width = x.shape
        return cls((rows, width), x.dtype)

    def encode(self) -> bytes:
        """Return it as a message."""
        return np.array([*self.shape, _DTYPES.index(self.dtype)], dtype=np.int64).tobytes()

    @classmethod
    def decode(cls, message: bytearray) -> RowsForm:
        """Return what `encode` was given, at the beginning of a message."""
        rows, width, dtype = np.frombuffer(message, dtype=np.int64, count=3).tolist()
        return cls((rows, width), _DTYPES[dtype])
