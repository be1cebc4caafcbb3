"""GGUF's element types: how they lie in memory, and how they become numbers.

Elements of a quantized type come in blocks, each with scales of its own. They are unpacked with a few operations over
many blocks at once, many times faster than the `gguf` package's own code, to the same bits.
Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.weights import gguf_iq4 as iq4
from executor_svc.weights import gguf_k_quants as k_quants
from executor_svc.weights.gguf_bits import half, high_bits, nibbles

CHUNK_ELEMENTS = 1 << 18
"""Elements unpacked at once: the temporaries of a chunk stay in cache."""


@dataclass(frozen=True)
class ElementType:
    """A type as files name it: elements of a block, and bytes of one."""

    name: str
    block_elements: int
    block_bytes: int


ELEMENT_TYPES = {
    0: ElementType("F32", 1, 4),
    1: ElementType("F16", 1, 2),
    2: ElementType("Q4_0", 32, 18),
    3: ElementType("Q4_1", 32, 20),
    6: ElementType("Q5_0", 32, 22),
    7: ElementType("Q5_1", 32, 24),
    8: ElementType("Q8_0", 32, 34),
    10: ElementType("Q2_K", 256, 84),
    11: ElementType("Q3_K", 256, 110),
    12: ElementType("Q4_K", 256, 144),
    13: ElementType("Q5_K", 256, 176),
    14: ElementType("Q6_K", 256, 210),
    20: ElementType("IQ4_NL", 32, 18),
    23: ElementType("IQ4_XS", 256, 136),
    30: ElementType("BF16", 1, 2),
}
"""Element types that are read, by their number in a file."""


def unpack(packed: Tensor, number: int, out: Tensor) -> None:
    """Fill `out` [R, N], of any float dtype and strides, from `packed`, uint8 [R, bytes of N elements], of type
    `number`.
    """
    kind = ELEMENT_TYPES[number]
    rows, columns = out.shape
    step = max(1, CHUNK_ELEMENTS // columns)
    parts = [slice(start, start + step) for start in range(0, rows, step)]
    if kind.name in _PLAIN:
        for part in parts:
            out[part].copy_(packed[part].view(_PLAIN[kind.name]))
        return
    fill = _UNPACKERS[kind.name]
    direct = out.dtype == torch.float32 and out.is_contiguous()
    scratch = None if direct else torch.empty(min(step, rows), columns)
    for part in parts:
        blocks = packed[part].reshape(-1, kind.block_bytes)
        target = out[part] if scratch is None else scratch[: len(packed[part])]
        fill(blocks, target.view(-1, kind.block_elements))
        if scratch is not None:
            out[part].copy_(target)


def unpack_columns(packed: Tensor, number: int, columns: tuple[int, int], out: Tensor) -> None:
    """Fill `out` with some columns of what `unpack` gives, first and one past the last. Blocks that they do not touch
    are not read.
    """
    kind = ELEMENT_TYPES[number]
    size = kind.block_elements
    first, last = columns[0] // size, -(-columns[1] // size)
    cut = packed[:, first * kind.block_bytes : last * kind.block_bytes]
    if first * size == columns[0] and last * size == columns[1]:
        unpack(cut, number, out)
        return
    inside = slice(columns[0] - first * size, columns[1] - first * size)
    step = max(1, CHUNK_ELEMENTS // ((last - first) * size))
    scratch = torch.empty(min(step, len(cut)), (last - first) * size)
    for start in range(0, len(cut), step):
        rows = cut[start : start + step]
        unpack(rows, number, scratch[: len(rows)])
        out[start : start + step].copy_(scratch[: len(rows), inside])


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """Scale, then 32 signed bytes."""
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(half(blocks, 0))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """Scale, then nibbles that stand for -8 to 7: the low halves of 16 bytes are 0 to 15, the high halves 16 to 31."""
    out.copy_(nibbles(blocks[:, 2:], torch.int16)).sub_(8).mul_(half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """Scale and minimum, then nibbles as in Q4_0."""
    out.copy_(nibbles(blocks[:, 4:], torch.int32)).mul_(half(blocks, 0)).add_(half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    """Scale, a fifth bit of each element, then nibbles as in Q4_0; together they stand for -16 to 15."""
    values = nibbles(blocks[:, 6:], torch.int16).bitwise_or_(high_bits(blocks[:, 2:6]))
    out.copy_(values).sub_(16).mul_(half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    """Scale and minimum, then elements as in Q5_0."""
    values = nibbles(blocks[:, 8:], torch.int32).bitwise_or_(high_bits(blocks[:, 4:8]))
    out.copy_(values).mul_(half(blocks, 0)).add_(half(blocks, 2))


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNPACKERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": k_quants.q2_k,
    "Q3_K": k_quants.q3_k,
    "Q4_K": k_quants.q4_k,
    "Q5_K": k_quants.q5_k,
    "Q6_K": k_quants.q6_k,
    "IQ4_NL": iq4.iq4_nl,
    "IQ4_XS": iq4.iq4_xs,
}
