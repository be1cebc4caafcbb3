"""Huge pages for memory that is read in scattered pieces, so that there are fewer look-ups of where a page lies, and
pages that are there before they are written to (Linux's transparent huge pages, madvise(2)).
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
"""Of x86-64, and of 64-bit Arm with small pages of 4 KiB."""

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask for huge pages behind a contiguous CPU tensor, before it is first written; return whether the system agreed.

    Advice only: False, and nothing is lost but speed, on other systems than Linux, in kernels without huge pages, and
    for a tensor of less than a page.
    """
    return _advise(tensor, _MADV_HUGEPAGE, whole=True)


def make_resident(tensor: Tensor) -> bool:
    """Have the system find all pages of a contiguous CPU tensor, as writes would do; what it holds stays as it is.

    Takes as long as those writes, without Python's lock. Returns False where the system cannot do it (Linux before
    5.14, other systems) or has no memory left.
    """
    return _advise(tensor, _MADV_POPULATE_WRITE, whole=False)


def _advise(tensor: Tensor, advice: int, *, whole: bool) -> bool:
    """Call madvise for the pages of a tensor: all that it touches, or those that are wholly its own."""
    if sys.platform != "linux":
        return False
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    if whole:
        # The first and the last page may be shared with others.
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    else:
        begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= begin:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(begin, end - begin, advice) == 0)
