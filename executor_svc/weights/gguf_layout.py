"""How GGUF keeps a tensor otherwise than the checkpoint that it was converted from, and the way back."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from executor_svc.weights.checkpoint import Region
from executor_svc.weights.gguf_types import unpack, unpack_columns


class Layout(Enum):
    """What the converter did to a tensor."""

    SAME = "same"
    INTERLEAVED = "interleaved"
    """The two members of a rotary pair are neighbours: rows 2i and 2i + 1 of a head were i and i + head_dim / 2."""
    PLUS_ONE = "plus one"
    """A norm that multiplies by 1 + weight has that sum."""
    TRANSPOSED = "transposed"
    """Rows were columns."""
    QKV_BY_KIND = "qkv by kind"
    """All queries, then all keys, then all values; they were the three of each head together."""


def restore(
    rows: Tensor, ggml_type: int, layout: Layout, head_dim: int, out: Tensor, region: Region | None = None
) -> None:
    """Fill `out`, of the checkpoint's shape or a region of it, from a tensor's packed rows, uint8 [R, bytes of a row].

    Rows are those of the file; a vector is a column of them.
    """
    region = region or Region()
    match layout:
        case Layout.TRANSPOSED:
            _unpack(Region(region.columns).rows_of(rows), ggml_type, region.rows, out.T)
        case Layout.PLUS_ONE:
            exact = torch.empty(out.shape)
            _unpack(region.rows_of(rows), ggml_type, region.columns, exact.view(len(out), -1))
            out.copy_(exact.sub_(1))
        case _:
            order = _order(layout, len(rows), head_dim)
            wanted = region.rows_of(rows) if order is None else rows[region.rows_of(order)]
            _unpack(wanted, ggml_type, region.columns, out.view(len(out), -1))


def _unpack(rows: Tensor, ggml_type: int, columns: tuple[int, int] | None, out: Tensor) -> None:
    if columns is None:
        unpack(rows, ggml_type, out)
    else:
        unpack_columns(rows, ggml_type, columns, out)


def _order(layout: Layout, num_rows: int, head_dim: int) -> Tensor | None:
    """Return which of the file's rows is each of the checkpoint's; None where they are the same."""
    if layout is Layout.INTERLEAVED:
        return torch.arange(num_rows).view(-1, head_dim // 2, 2).transpose(1, 2).reshape(-1)
    if layout is Layout.QKV_BY_KIND:
        return torch.arange(num_rows).view(3, -1, head_dim).transpose(0, 1).reshape(-1)
    return None


def fits(layout: Layout, shape: tuple[int, ...], head_dim: int) -> bool:
    """Whether a tensor of this shape in the file can have been laid out so."""
    if layout is Layout.INTERLEAVED:
        return head_dim % 2 == 0 and shape[0] % head_dim == 0
    if layout is Layout.QKV_BY_KIND:
        return shape[0] % (3 * head_dim) == 0
    return True
