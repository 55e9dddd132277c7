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

__all__ = [
    "compare",
    "difference",
    "equal_rows",
    "finish",
    "hash_piece",
    "hash_rows",
    "kept_hash",
    "mix",
    "norm",
    "pair_distances",
]

_ZERO = np.uint64(0)


@reassociating
def norm(x: F32, at: int, count: int) -> Any:
    """|x|^2 of `count` elements from `at`, in float32."""
    total = np.float32(0.0)
    for i in range(count):
        a = load(x, at + i)
        total += a * a
    return total


@reassociating
def difference(x: F32, y: F32, at: int, count: int) -> Any:
    """(|x - y|^2, |y|^2) of `count` elements from `at`, in float32."""
    dd = np.float32(0.0)
    yy = np.float32(0.0)
    for i in range(count):
        b = load(y, at + i)
        d = load(x, at + i) - b
        dd += d * d
        yy += b * b
    return dd, yy


@reassociating
def _weighted_norm(row: F32, num_heads: int, head_dim: int, weight: F32) -> Any:
    total = np.float32(0.0)
    for head in range(num_heads):
        total += weight[head] * norm(row, head * head_dim, head_dim)
    return total


@reassociating
def _weighted_difference(x: F32, y: F32, num_heads: int, head_dim: int, weight: F32) -> Any:
    """(sum of w |x - y|^2, sum of w |y|^2) over heads."""
    total = np.float32(0.0)
    other = np.float32(0.0)
    for head in range(num_heads):
        dd, yy = difference(x, y, head * head_dim, head_dim)
        total += weight[head] * dd
        other += weight[head] * yy
    return total, other


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
def compare(flat: Bits, left: int, right: int, width: int, masks: U64) -> Any:
    """(differing, magnitude, exponent) bits of the elements from `left` and `right`, or-ed.

    The last in the form of `rowhash.word_masks`: its sign bits tell NaN and infinity.
    """
    magnitude, exponent, low = masks[0], masks[1], masks[2]
    element_bits = flat.itemsize * 8
    per_word = 64 // element_bits
    x = _tail_word(flat, left, width, per_word, element_bits)
    differ = x ^ _tail_word(flat, right, width, per_word, element_bits)
    some = x & magnitude
    bad = (x & exponent) + low
    for i in range(width // per_word):
        x = load64(flat, left + i * per_word)
        differ |= x ^ load64(flat, right + i * per_word)
        some |= x & magnitude
        bad |= (x & exponent) + low
    return differ, some, bad


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
    for n in range(a.size):
        if n + AHEAD < a.size:
            prefetch_row(flat, a[n + AHEAD] * row_elems, width)
            prefetch_row(flat, b[n + AHEAD] * row_elems, width)
        differ, some, bad = compare(flat, a[n] * row_elems, b[n] * row_elems, width, masks)
        out[n] = differ == _ZERO and some != _ZERO and (bad & masks[3]) == _ZERO


@exact
def finish(total: Any) -> Any:
    """The last steps of a hash."""
    total = (total ^ (total >> np.uint64(33))) * FINAL_1
    total = (total ^ (total >> np.uint64(33))) * FINAL_2
    return total ^ (total >> np.uint64(33))


@exact
def mix(word: Any, key: Any) -> Any:
    """What a word adds to a hash."""
    x = (word ^ key) * MIX_1
    return (x ^ (x >> np.uint64(32))) * MIX_2


@exact
def hash_piece(flat: Bits, base: int, width: int, masks: U64, keys: U64) -> Any:
    """(magnitude, exponent, hash) of `width` elements from `base`; the first two as `compare`.

    The steps of `rowhash.hash_words`.
    """
    magnitude, exponent, low = masks[0], masks[1], masks[2]
    element_bits = flat.itemsize * 8
    per_word = 64 // element_bits
    words = width // per_word
    some, bad, total = mix_words(flat, base, keys, masks, words - words % 8)
    for i in range(words - words % 8, words):
        x = load64(flat, base + i * per_word)
        some |= x & magnitude
        bad |= (x & exponent) + low
        total += mix(x, load64(keys, i))
    if words * per_word < width:
        x = _tail_word(flat, base, width, per_word, element_bits)
        some |= x & magnitude
        bad |= (x & exponent) + low
        total += mix(x, keys[words])
    return some, bad, finish(total)


@exact
def kept_hash(some: Any, bad: Any, total: Any, masks: U64) -> Any:
    """The hash, 0 kept for what must never match."""
    if some == _ZERO or (bad & masks[3]) != _ZERO:
        return _ZERO
    return max(total, np.uint64(1))


@exact
def hash_rows(
    flat: Bits, row_elems: int, rows: I32, width: int, masks: U64, keys: U64, out: U64
) -> None:
    """out[n] = hash of the first `width` elements."""
    for n in range(rows.size):
        if n + AHEAD < rows.size:
            prefetch_row(flat, rows[n + AHEAD] * row_elems, width)
        some, bad, total = hash_piece(flat, rows[n] * row_elems, width, masks, keys)
        out[n] = kept_hash(some, bad, total, masks)
