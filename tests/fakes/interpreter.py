"""Triton's interpreter under NumPy 2.4 and later, which no longer turns arrays of one element
into numbers: Triton 3.6 relies on that for every loop bound. Imported, it is mended."""

import functools
from typing import Any

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


@functools.wraps(_patch_tensor)
def _mended(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _mended
