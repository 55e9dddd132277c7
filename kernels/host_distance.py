"""Numba: exact distances, bit equality and hashes of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._jit import bits, exact, load, load64, reassociating
from ._lanes import mix_words
from .dtypes import F32, I32, U64, Bits
from .host_rows import AHEAD, load_rotated, load_row, prefetch_row
from .rowhash import FINAL_1, FINAL_2, MIX_1, MIX_2

__all__ = ["equal_rows", "hash_rows", "pair_distances"]

_ZERO = np.uint64(0)


@reassociating
def _weighted_norm(row: F32, num_heads: int, head_dim: int, weight: F32) -> Any:
    total = np.float32(0.0)
    for head in range(num_heads):
        o = head * head_dim
        norm = np.float32(0.0)
        for i in range(head_dim):
            x = load(row, o + i)
            norm += x * x
        total += weight[head] * norm
    return total


@reassociating
def _weighted_difference(x: F32, y: F32, num_heads: int, head_dim: int, weight: F32) -> Any:
    """(sum of w |x - y|^2, sum of w |y|^2) over heads."""
    total = np.float32(0.0)
    norm = np.float32(0.0)
    for head in range(num_heads):
        o = head * head_dim
        dd = np.float32(0.0)
        yy = np.float32(0.0)
        for i in range(head_dim):
            b = load(y, o + i)
            d = load(x, o + i) - b
            dd += d * d
            yy += b * b
        total += weight[head] * dd
        norm += weight[head] * yy
    return total, norm


@exact
def pair_distances(
    flat: Bits,
    row_elems: int,
    targets: I32,
    donors: I32,
    deltas: I32,
    num_heads: int,
    head_dim: int,
    weight: F32,
    cos: F32,
    sin: F32,
    out: F32,
) -> None:
    """out[m, k]; `deltas` has no rows where no donor is to be rotated."""
    width = num_heads * head_dim
    x = np.empty(width, np.float32)
    y = np.empty(width, np.float32)
    infinite = np.float32(np.inf)
    rotate = deltas.size > 0
    m, k = donors.shape
    for i in range(m):
        if i + 1 < m:
            prefetch_row(flat, targets[i + 1] * row_elems, width)
        load_row(flat, targets[i] * row_elems, width, x)
        xx = _weighted_norm(x, num_heads, head_dim, weight)
        for j in range(k):
            out[i, j] = infinite
            if i + 1 < m:
                prefetch_row(flat, max(donors[i + 1, j], 0) * row_elems, width)
            if donors[i, j] < 0:
                continue
            base = donors[i, j] * row_elems
            if rotate and deltas[i, j] != 0:
                load_rotated(flat, base, num_heads, head_dim, cos, sin, deltas[i, j], y)
            else:
                load_row(flat, base, width, y)
            dd, yy = _weighted_difference(x, y, num_heads, head_dim, weight)
            # A NaN anywhere fails every comparison, so it ends as infinity too.
            if xx > 0 and yy > 0 and xx < infinite and yy < infinite and dd < infinite:
                out[i, j] = dd / xx


@exact
def _tail_word(flat: Bits, base: int, width: int, per_word: int, element_bits: int) -> Any:
    """The elements after the last whole word, low element first, zeros above."""
    word = np.uint64(0)
    whole = width - width % per_word
    for i in range(width - whole):
        word |= bits(flat, base + whole + i) << np.uint64(i * element_bits)
    return word


@exact
def equal_rows(
    flat: Bits,
    row_elems: int,
    a: I32,
    b: I32,
    width: int,
    masks: U64,
    out: npt.NDArray[np.bool_],
) -> None:
    """out[m] = same bits, finite, not all zero. `masks`: see `rowhash.word_masks`."""
    magnitude, exponent, low, sign = masks[0], masks[1], masks[2], masks[3]
    element_bits = flat.itemsize * 8
    per_word = 64 // element_bits
    words = width // per_word
    for n in range(a.size):
        if n + AHEAD < a.size:
            prefetch_row(flat, a[n + AHEAD] * row_elems, width)
            prefetch_row(flat, b[n + AHEAD] * row_elems, width)
        left = a[n] * row_elems
        right = b[n] * row_elems
        x = _tail_word(flat, left, width, per_word, element_bits)
        differ = x ^ _tail_word(flat, right, width, per_word, element_bits)
        some = x & magnitude
        bad = (x & exponent) + low
        for i in range(words):
            x = load64(flat, left + i * per_word)
            differ |= x ^ load64(flat, right + i * per_word)
            some |= x & magnitude
            bad |= (x & exponent) + low
        out[n] = differ == _ZERO and some != _ZERO and (bad & sign) == _ZERO


@exact
def hash_rows(
    flat: Bits, row_elems: int, rows: I32, width: int, masks: U64, keys: U64, out: U64
) -> None:
    """out[n] = hash of the first `width` elements; the steps of `rowhash.hash_words`."""
    magnitude, exponent, low, sign = masks[0], masks[1], masks[2], masks[3]
    element_bits = flat.itemsize * 8
    per_word = 64 // element_bits
    words = width // per_word
    for n in range(rows.size):
        if n + AHEAD < rows.size:
            prefetch_row(flat, rows[n + AHEAD] * row_elems, width)
        base = rows[n] * row_elems
        some, bad, total = mix_words(flat, base, keys, masks, words - words % 8)
        for i in range(words - words % 8, words):
            x = load64(flat, base + i * per_word)
            some |= x & magnitude
            bad |= (x & exponent) + low
            x = (x ^ load64(keys, i)) * MIX_1
            total += (x ^ (x >> np.uint64(32))) * MIX_2
        if words * per_word < width:
            x = _tail_word(flat, base, width, per_word, element_bits)
            some |= x & magnitude
            bad |= (x & exponent) + low
            x = (x ^ keys[words]) * MIX_1
            total += (x ^ (x >> np.uint64(32))) * MIX_2
        total = (total ^ (total >> np.uint64(33))) * FINAL_1
        total = (total ^ (total >> np.uint64(33))) * FINAL_2
        total ^= total >> np.uint64(33)
        if some == _ZERO or (bad & sign) != _ZERO:
            total = np.uint64(0)
        elif total == _ZERO:
            total = np.uint64(1)
        out[n] = total
