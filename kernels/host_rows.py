"""The step most CPU kernels start with: one row of the pool as float32, rotated if need be."""

from __future__ import annotations

import numpy as np

from ._jit import exact, load, prefetch
from ._lanes import LANES, load_lanes, rotate_lanes
from .dtypes import F32, Bits

__all__ = ["AHEAD", "load_rotated", "load_row", "prefetch_row"]


AHEAD = 4
"""Rows between the one asked of memory and the one worked on: rows lie anywhere, so the processor
cannot guess the next address itself."""


@exact
def prefetch_row(flat: Bits, base: int, width: int) -> None:
    """Ask for the cache lines of the `width` elements from `base`."""
    for i in range(0, width, 64 // flat.itemsize):
        prefetch(flat, base + i)


@exact
def load_row(flat: Bits, base: int, width: int, out: F32) -> None:
    """out[:width] = the elements from `base` of the flat pool."""
    whole = width - width % LANES
    for i in range(0, whole, LANES):
        load_lanes(flat, base + i, out, i)
    for i in range(whole, width):
        out[i] = load(flat, base + i)


@exact
def load_rotated(
    flat: Bits,
    base: int,
    num_heads: int,
    head_dim: int,
    cos: F32,
    sin: F32,
    steps: int,
    out: F32,
) -> None:
    """out[:num_heads * head_dim] = R(steps) row, with `steps` of either sign.

    cos and sin are [positions, half] with abs(steps) < positions. Not contracted to fused
    multiply-adds, so that signatures agree with NumPy bit for bit.
    """
    half = cos.shape[1]
    c = cos[abs(steps)]
    s = sin[abs(steps)]
    sign = np.float32(-1.0) if steps < 0 else np.float32(1.0)
    whole = half - half % LANES
    for head in range(num_heads):
        to = head * head_dim
        low = base + to
        for i in range(0, whole, LANES):
            rotate_lanes(flat, low + i, half, c, s, sign, i, out, to + i)
        for i in range(whole, half):
            x = load(flat, low + i)
            y = load(flat, low + half + i)
            turn = s[i] * sign
            out[to + i] = x * c[i] - y * turn
            out[to + half + i] = y * c[i] + x * turn
        for i in range(2 * half, head_dim):
            out[to + i] = load(flat, low + i)
