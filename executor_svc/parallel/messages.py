"""What rank 0 tells the others: packed integers, and tensors as bytes."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.parallel.forms import RowsForm


class Kind(IntEnum):
    """What a message is."""

    HELLO = 0
    """A rank says who it is, and what it runs."""
    WELCOME = 1
    STEP = 2
    """Inputs of a step."""
    LOGITS = 3
    """Hidden states, whose logits are to be gathered."""
    LIKELIEST = 4
    """Hidden states, whose likeliest tokens are to be gathered."""
    END = 5
    """The executor ends in order."""
    LOST = 6
    """All ranks end at once, for the reason that is told."""
    CAPTURE = 7
    """What is told from here on is kept as a graph of its own, not run."""
    CAPTURED = 8
    """So far."""
    REPLAY = 9
    """A graph is to be run: the number of the captured ones before it."""
    PAUSE = 10
    """So far a part of the start; what comes next every rank knows."""


def encode_step(token_ids: Tensor, metadata: AttentionMetadata) -> bytes:
    """Return the inputs of a step, int64 before int32, each part of a length that the first four numbers tell."""
    rows, width = metadata.block_tables.shape
    sizes = np.array([len(token_ids), rows, width, metadata.context_lens_host is not None], dtype=np.int64)
    wide = (token_ids, metadata.positions, metadata.slot_mapping)
    narrow = (metadata.query_start, metadata.context_lens, metadata.block_tables)
    return b"".join([sizes.tobytes(), *(each.numpy().tobytes() for each in (*wide, *narrow))])


def decode_step(message: bytearray) -> tuple[Tensor, AttentionMetadata]:
    """Return what encode_step was given. The tensors lie in the message."""
    tokens, rows, width, has_host = np.frombuffer(message, dtype=np.int64, count=4).tolist()
    token_ids, positions, slots = torch.frombuffer(message, dtype=torch.int64, offset=32, count=3 * tokens).view(3, -1)
    narrow = torch.frombuffer(message, dtype=torch.int32, offset=32 + 24 * tokens, count=2 * rows + 1 + rows * width)
    starts, contexts, tables = narrow[: rows + 1], narrow[rows + 1 : 2 * rows + 1], narrow[2 * rows + 1 :]
    return token_ids, AttentionMetadata(
        positions=positions,
        slot_mapping=slots,
        query_start=starts,
        context_lens=contexts,
        block_tables=tables.view(rows, width),
        query_lens=tuple(np.diff(starts.numpy()).tolist()),
        context_lens_host=tuple(contexts.tolist()) if has_host else None,
    )


def encode_rows(x: Tensor) -> bytes:
    """Return a tensor [N, width], N at least 1, with its shape and dtype."""
    return RowsForm.of(x).encode() + x.contiguous().view(torch.uint8).numpy().tobytes()


def decode_rows(message: bytearray) -> Tensor:
    """Return what encode_rows was given. It lies in the message."""
    form = RowsForm.decode(message)
    return torch.frombuffer(message, dtype=form.dtype, offset=RowsForm.SIZE).view(form.shape)


def encode_number(number: int) -> bytes:
    """Return a number as a message."""
    return number.to_bytes(8, "little")


def decode_number(message: bytearray) -> int:
    """Return what encode_number was given."""
    return int.from_bytes(message, "little")
