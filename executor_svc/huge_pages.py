"""Huge pages for memory that is read in scattered pieces: fewer look-ups of where a page lies (Linux's transparent huge
pages, madvise(2)).
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_MADV_HUGEPAGE = 14


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask for huge pages behind a contiguous CPU tensor, before it is first written; return whether the system agreed.

    Advice only: False, and nothing is lost but speed, on other systems than Linux, in kernels without huge pages, and
    for a tensor of less than a page.
    """
    if sys.platform != "linux":
        return False
    # The first and the last page may be shared with others.
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= begin:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(begin, end - begin, _MADV_HUGEPAGE) == 0)
