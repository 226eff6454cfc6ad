"""Hopper's dependent launch: a kernel that starts before its predecessor has ended."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(EARLY: tl.constexpr):
    """Call it before reading what an earlier kernel wrote, or writing what it read.

    EARLY (and launched with ``launch_pdl``): lets the next kernel start, then waits until all
    earlier ones have ended."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
