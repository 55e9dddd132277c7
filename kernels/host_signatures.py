"""Numba: signatures of rows and their running moments."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._jit import exact
from ._lanes import LANES, centre_lanes, walsh_signs
from .dtypes import F32, I32, U64, Bits
from .host_rows import AHEAD, load_rotated, load_row, prefetch_row
from .simhash import BLOCK

__all__ = ["moments", "signatures"]


@exact
def signatures(
    flat: Bits,
    row_elems: int,
    rows: I32,
    steps: I32,
    num_heads: int,
    head_dim: int,
    cos: F32,
    sin: F32,
    mean: F32,
    flips: F32,
    second_flips: F32,
    copies: int,
    out: U64,
) -> None:
    """out[n, 2] = signatures; `steps` is empty where nothing is rotated.

    `mean` and `flips` are laid out as the hasher lays out a row, [padded].
    """
    width = num_heads * head_dim
    padded = flips.size
    row = np.zeros(padded, np.float32)
    folded = np.empty(BLOCK, np.float32)
    rotate = steps.size > 0
    for n in range(rows.size):
        base = rows[n] * row_elems
        if n + AHEAD < rows.size:
            prefetch_row(flat, rows[n + AHEAD] * row_elems, width)
        if rotate:
            load_rotated(flat, base, num_heads, head_dim, cos, sin, steps[n], row)
        else:
            load_row(flat, base, width, row)
        for copy in range(1, copies):
            for i in range(width):
                row[copy * width + i] = row[i]
        for i in range(0, BLOCK, LANES):
            centre_lanes(row, mean, flips, i, folded, i, False)
        for piece in range(BLOCK, padded, BLOCK):
            for i in range(0, BLOCK, LANES):
                centre_lanes(row, mean, flips, piece + i, folded, i, True)
        out[n, 0], out[n, 1] = walsh_signs(folded, second_flips)


@exact
def moments(
    flat: Bits,
    row_elems: int,
    rows: I32,
    steps: I32,
    num_heads: int,
    head_dim: int,
    cos: F32,
    sin: F32,
    total: npt.NDArray[np.float64],
    squares: npt.NDArray[np.float64],
) -> int:
    """Add the finite rows to total[width] and their squares to squares[width]; count them."""
    width = num_heads * head_dim
    row = np.empty(width, np.float32)
    rotate = steps.size > 0
    count = 0
    for n in range(rows.size):
        base = rows[n] * row_elems
        if n + AHEAD < rows.size:
            prefetch_row(flat, rows[n + AHEAD] * row_elems, width)
        if rotate:
            load_rotated(flat, base, num_heads, head_dim, cos, sin, steps[n], row)
        else:
            load_row(flat, base, width, row)
        finite = np.int64(0)
        for i in range(width):
            finite += np.int64(abs(row[i]) < np.inf)
        if finite < width:
            continue
        count += 1
        for i in range(width):
            x = np.float64(row[i])
            total[i] += x
            squares[i] += x * x
    return count
