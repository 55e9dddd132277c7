"""Numba: signatures of rows and their running moments."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._folds import ASKED, fold, fold_2x128, fold_3x64, fold_4x64, prefetch_far, walsh_signs
from ._jit import exact
from ._lanes import LANES
from .dtypes import F32, I32, U64, Bits
from .host_rows import AHEAD, load_rotated, load_row, prefetch_row
from .simhash import BLOCK, SimHasher

__all__ = ["aligned", "constants", "moments", "scratch", "signatures"]

_AHEAD = 2
"""Rows between the one asked of memory and the one worked on: one suffices for rows that follow one
another, where the processor guesses the next address itself; scattered ones need a second."""


def aligned(size: int) -> F32:
    """Zeros at a multiple of 64 bytes: a vector that straddles two cache lines costs two."""
    whole = np.zeros(size + LANES, np.float32)
    start = -(whole.ctypes.data // whole.itemsize) % LANES
    return whole[start : start + size]


def constants(mean: F32, hasher: SimHasher) -> F32:
    """What `signatures` adds and multiplies: [256] folded mean, [256] second flips, flips."""
    out = aligned(2 * BLOCK + hasher.padded)
    out[:BLOCK] = hasher.fold(mean[None])[0]
    out[BLOCK : 2 * BLOCK] = hasher.second_flips
    out[2 * BLOCK :] = hasher.flips
    return out


def scratch(hasher: SimHasher) -> F32:
    """Where `signatures` works: [256] sums, then a row as the hasher lays it out."""
    return aligned(BLOCK + hasher.padded)


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
    constants: F32,
    scratch: F32,
    copies: int,
    out: U64,
) -> None:
    """out[n, 2] = signatures; `steps` is empty where nothing is rotated.

    For `constants` and `scratch` see the functions of these names, for `copies` the hasher.
    """
    width = num_heads * head_dim
    padded = constants.size - 2 * BLOCK
    sums, row = scratch[:BLOCK], scratch[BLOCK:]
    rotate = steps.size > 0
    half = cos.shape[1]
    cosines, sines = cos.reshape(-1), sin.reshape(-1)
    line = 64 // flat.itemsize
    stride = min(line, -(-width * line // ASKED))
    rotated_whole = rotate and head_dim == 2 * half
    for n in range(rows.size):
        base = rows[n] * row_elems
        following = min(n + _AHEAD, rows.size - 1)
        ahead = rows[following] * row_elems
        for i in range(ASKED, width, line):
            prefetch_far(flat, ahead + i)
        sign, turn = np.float32(1.0), 0
        if rotate:
            sign = np.float32(-1.0) if steps[n] < 0 else sign
            turn = abs(steps[n]) * half
            for i in range(0, half, LANES):
                prefetch_far(cosines, abs(steps[following]) * half + i)
                prefetch_far(sines, abs(steps[following]) * half + i)
        if rotated_whole and half == 64 and width == padded:
            fold_2x128(flat, base, width, cosines, sines, sign, turn, constants, 2 * BLOCK, sums)
        elif rotated_whole and half == 32 and width == padded:
            fold_4x64(flat, base, width, cosines, sines, sign, turn, constants, 2 * BLOCK, sums)
        elif rotated_whole and half == 32 and num_heads == 3:
            fold_3x64(flat, base, width, cosines, sines, sign, turn, constants, 2 * BLOCK, sums)
        elif width == padded and not rotate:
            fold(flat, base, width, constants, 2 * BLOCK, sums)
        else:
            if rotate:
                load_rotated(flat, base, num_heads, head_dim, cos, sin, steps[n], row)
            else:
                load_row(flat, base, width, row)
            for copy in range(1, copies):
                for i in range(width):
                    row[copy * width + i] = row[i]
            fold(row, 0, padded, constants, 2 * BLOCK, sums)
        out[n, 0], out[n, 1] = walsh_signs(sums, constants, flat, ahead, stride)


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
