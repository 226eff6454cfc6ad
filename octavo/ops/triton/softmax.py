"""Steps of an online softmax over KV tiles (Milakov and Gimelshein 2018), fp32, base 2."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)  # below any score, yet finite: a row that saw nothing is no NaN
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """1 - 2 / (e^2x + 1), which cancels near 0: there the series."""
    square = x * x
    series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    return tl.where(square < 0.01, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def load_rows(at, seen, SIZE: tl.constexpr, MASK: tl.constexpr):
    """Rows [n, m] at pointers ``at``; zeros past column SIZE and, with MASK, where ``seen`` [n] is
    false, which is not read."""
    column = tl.arange(0, at.shape[1])
    if MASK:
        loaded = seen[:, None]
        if at.shape[1] != SIZE:
            loaded = loaded & (column < SIZE)[None, :]
        x = tl.load(at, mask=loaded, other=0)
    elif at.shape[1] != SIZE:
        x = tl.load(at, mask=(column < SIZE)[None, :], other=0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def load_pages(table, token, seen, PAGE: tl.constexpr, STRIDE: tl.constexpr, MASK: tl.constexpr):
    """Where the pages of tokens begin, int64; with MASK those of tokens ``seen``, else page 0."""
    if MASK:
        page = tl.load(table + token // PAGE, mask=seen, other=0)
    else:
        page = tl.load(table + token // PAGE)
    return page.to(tl.int64) * STRIDE


@triton.jit
def hide(score, token, seen, position, window, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Scores, but -inf of tokens that are not ``seen`` by any query, or not by that of their row,
    at ``position``; all broadcast to the scores."""
    visible = seen
    if TOKENS > 1:
        visible = visible & (token <= position)
        if WINDOW:
            visible &= token > position - window
    return tl.where(visible, score, float("-inf"))
