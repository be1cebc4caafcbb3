"""GGUF's element types: how they lie in memory, and how they become numbers.

Elements of a quantized type come in blocks, each with scales of its own. What is common is unpacked here with a few
operations over whole tensors, many times faster than the `gguf` package, whose own code does the rest. Both give the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18
"""Elements unpacked at once: the temporaries of a chunk stay in cache."""
_BLOCK = 32
"""Elements in a block of the types that are unpacked here."""


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
    30: ElementType("BF16", 1, 2),
}
"""Element types that are read, by their number in a file."""


def unpack(packed: Tensor, number: int, out: Tensor) -> None:
    """Fill `out` [R, N], of any float dtype, from `packed`, uint8 [R, bytes of N elements], of type `number`."""
    name = ELEMENT_TYPES[number].name
    if name in _PLAIN:
        out.copy_(packed.view(_PLAIN[name]))
        return
    rows, columns = out.shape
    step = max(1, CHUNK_ELEMENTS // columns)
    parts = [slice(start, start + step) for start in range(0, rows, step)]
    fill = _UNPACKERS.get(name)
    if fill is None:
        _unpack_by_gguf(packed, number, out, parts)
        return
    direct = out.dtype == torch.float32 and out.is_contiguous()
    scratch = None if direct else torch.empty(min(step, rows), columns)
    for part in parts:
        blocks = packed[part].reshape(-1, ELEMENT_TYPES[number].block_bytes)
        target = out[part] if scratch is None else scratch[: len(packed[part])]
        fill(blocks, target.view(-1, _BLOCK))
        if scratch is not None:
            out[part].copy_(target)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """Scale, then 32 signed bytes."""
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_scales(blocks, 0))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """Scale, then nibbles that stand for -8 to 7: the low halves of 16 bytes are 0 to 15, the high halves 16 to 31."""
    out.copy_(_nibbles(blocks[:, 2:], torch.int16)).sub_(8).mul_(_scales(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """Scale and minimum, then nibbles as in Q4_0."""
    out.copy_(_nibbles(blocks[:, 4:], torch.int32)).mul_(_scales(blocks, 0)).add_(_scales(blocks, 2))


def _scales(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block as float32 [B, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _nibbles(packed: Tensor, lanes: torch.dtype) -> Tensor:
    """Return the nibbles of [B, 16] bytes as uint8 [B, 32]. `lanes`: the widest integer to which blocks are aligned."""
    words = packed.view(lanes).contiguous()
    mask = 0x0F0F0F0F if lanes == torch.int32 else 0x0F0F
    # The mask takes off what a negative number's shift brings in.
    return torch.stack((words & mask, (words >> 4) & mask), dim=1).view(torch.uint8).view(-1, _BLOCK)


def _unpack_by_gguf(packed: Tensor, number: int, out: Tensor, parts: list[slice]) -> None:
    # Imported here since few files need it, and it takes a tenth of a second.
    import gguf
    from gguf.quants import dequantize

    def fill(part: slice) -> None:
        out[part].copy_(torch.from_numpy(dequantize(packed[part].numpy(), gguf.GGMLQuantizationType(number))))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, parts))


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNPACKERS: dict[str, Callable[[Tensor, Tensor], None]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
