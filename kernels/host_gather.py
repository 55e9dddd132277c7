"""Numba: rows copied, zeroed and laid out head by head."""

from __future__ import annotations

import numpy as np

from ._jit import copy, exact, store
from ._lanes import LANES, copy_lanes, store_lanes
from .dtypes import F32, I32, Bits
from .host_rows import AHEAD, load_rotated, prefetch_row

__all__ = ["copy_rows", "gather_rows", "zero_rows"]


@exact
def copy_rows(flat: Bits, row_elems: int, src: I32, dst: I32) -> None:
    """Whole rows; `dst` shares no row with `src`."""
    for n in range(src.size):
        if n + AHEAD < src.size:
            prefetch_row(flat, src[n + AHEAD] * row_elems, row_elems)
        copy(flat, dst[n] * row_elems, flat, src[n] * row_elems, row_elems)


@exact
def zero_rows(flat: Bits, row_elems: int, rows: I32) -> None:
    """Whole rows."""
    for n in range(rows.size):
        base = rows[n] * row_elems
        flat[base : base + row_elems] = 0


@exact
def gather_rows(
    flat: Bits,
    row_elems: int,
    rows: I32,
    deltas: I32,
    num_heads: int,
    head_dim: int,
    cos: F32,
    sin: F32,
    out: Bits,
) -> None:
    """`out` is flat [num_heads * t * head_dim]; `deltas` is empty where nothing is rotated."""
    width = num_heads * head_dim
    t = rows.size
    row = np.empty(width, np.float32)
    rotate = deltas.size > 0
    whole = head_dim - head_dim % LANES
    for n in range(t):
        # A run of neighbours is what the processor foresees by itself, and faster.
        if n + AHEAD < t and rows[n + AHEAD] != rows[n] + AHEAD:
            prefetch_row(flat, rows[n + AHEAD] * row_elems, width)
        base = rows[n] * row_elems
        if not rotate or deltas[n] == 0:
            for head in range(num_heads):
                at = base + head * head_dim
                to = (head * t + n) * head_dim
                # A call of memcpy costs as much as the few lines of a head that it moves.
                for i in range(0, whole, LANES):
                    copy_lanes(out, to + i, flat, at + i)
                if whole < head_dim:
                    copy(out, to + whole, flat, at + whole, head_dim - whole)
            continue
        load_rotated(flat, base, num_heads, head_dim, cos, sin, deltas[n], row)
        for head in range(num_heads):
            o = head * head_dim
            to = (head * t + n) * head_dim
            for i in range(0, whole, LANES):
                store_lanes(row, o + i, out, to + i)
            for i in range(whole, head_dim):
                store(out, to + i, row[o + i])
