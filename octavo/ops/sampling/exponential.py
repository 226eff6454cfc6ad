"""e^x for x ≤ 0 in plain arithmetic, which LLVM vectorises as calls into a library are not."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

# Sums may be taken in any order; nothing else about floats is relaxed. The exponentials stay
# strict functions of their own: reassociation would undo their rounding by a large constant.
summing = njit(error_model="numpy", fastmath={"reassoc", "contract"})
_kernel = njit(error_model="numpy")

_I = np.int32

# Bound on the relative error of sum_exp_fast: |s| ≤ 50 costs up to 50 half-ulps of fp32.
FAST_SUM_ERROR = 1e-5

_LOG2_E = 1.0 / math.log(2.0)
_LN2_HIGH = 6.93147180369123816490e-01  # ln 2 split in two (Cody and Waite 1980)
_LN2_LOW = 1.90821492927058770002e-10
_ROUND_64 = 6755399441055744.0  # 1.5 · 2^52: adding it rounds to an integer
_ROUND_32 = np.float32(12582912.0)  # 1.5 · 2^23


@_kernel
def exp(x):
    """e^x for x ≤ 0 to 3e-13, vectorisable; below -700 it stays at e^-700."""
    x = max(x, -700.0)
    n = (x * _LOG2_E + _ROUND_64) - _ROUND_64
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    scale = (np.int64(n) + np.int64(1023)) << np.int64(52)
    return p * np.int64(scale).view(np.float64)


@_kernel
def _exp_fast(x):
    """e^x for x ≤ 0 in fp32; below -80 it stays at e^-80."""
    x = max(x, np.float32(-80.0))
    n = np.float32(x * np.float32(_LOG2_E) + _ROUND_32) - _ROUND_32
    r = np.float32(x - n * np.float32(0.693145751953125))
    r = np.float32(r - n * np.float32(1.42860682030941723212e-6))
    p = np.float32(1.0 / 720.0)
    p = np.float32(p * r + np.float32(1.0 / 120.0))
    p = np.float32(p * r + np.float32(1.0 / 24.0))
    p = np.float32(p * r + np.float32(1.0 / 6.0))
    p = np.float32(p * r + np.float32(0.5))
    p = np.float32(p * r + np.float32(1.0))
    p = np.float32(p * r + np.float32(1.0))
    scale = _I(_I(_I(n) + _I(127)) << _I(23))
    return np.float32(p * _I(scale).view(np.float32))


@summing
def sum_exp(row, top, inverse_temperature):
    total = 0.0
    for i in range(row.shape[0]):
        total += exp((np.float64(row[i]) - top) * inverse_temperature)
    return total


@summing
def sum_exp_fast(row, top, inverse_temperature):
    """As :func:`sum_exp`, within a factor of 1 ± FAST_SUM_ERROR, three times as fast."""
    top = np.float32(top)
    scale = np.float32(inverse_temperature)
    size = row.shape[0]
    total = 0.0
    for start in range(0, size - size % 1024, 1024):
        part = np.float32(0.0)
        for j in range(1024):
            part += _exp_fast(np.float32(np.float32(row[start + j] - top) * scale))
        total += part
    for i in range(size - size % 1024, size):
        total += _exp_fast(np.float32(np.float32(row[i] - top) * scale))
    return total
