"""Numba: attention of one query token, read through a row table.

Softmax is computed online over blocks of tokens (Milakov and Gimelshein, 2018; Dao et al.,
"FlashAttention", 2022), so neither the keys and values nor all the scores are ever laid out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._jit import exact, f32_bits, load, reassociating
from ._lanes import LANES
from ._tiles import dot_tile, mix_tile
from .dtypes import F32, I32, Bits
from .host_rows import AHEAD, load_rotated, prefetch_row

__all__ = ["decode_attention"]

_BLOCK = 64
"""Tokens whose scores are kept before they become weights."""
_PART = 8
"""Tokens whose values are summed in registers: few enough for their rows to stay in the cache."""
_dot1, _dot2, _dot3, _dot4 = dot_tile
_mix1, _mix2, _mix3, _mix4 = mix_tile

_LOG2E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_ONE = np.float32(1.0)


@exact
def _exp(x: Any) -> Any:
    """exp of a float32 <= 0 to 2 units in the last place, without a call, so that it vectorises.

    Cephes expf (Moshier, 1992): reduce by multiples of ln 2 in two parts, then a polynomial.
    Anything below -87 is 0; NaN stays NaN.
    """
    inside = x if x > np.float32(-87.0) else np.float32(-87.0)
    whole = np.floor(inside * _LOG2E + np.float32(0.5))
    r = inside - whole * _LN2_HIGH - whole * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + _ONE
    scaled = p * f32_bits((np.int32(whole) + np.int32(127)) << np.int32(23))
    small = scaled if x > np.float32(-87.0) else np.float32(0.0)
    return x if x != x else small


@exact
def _softmax_block(scores: F32, size: int, old_max: Any) -> Any:
    """Turn scores into exp(score - maximum) in place; return the maximum so far."""
    new_max = old_max
    for n in range(size):
        new_max = max(new_max, scores[n])
    # All scores -inf so far: exp(-inf - -inf) would be NaN where a weight of 0 is meant.
    shift = new_max if new_max > -np.float32(np.inf) else np.float32(0.0)
    for n in range(size):
        scores[n] = _exp(scores[n] - shift)
    return new_max


@reassociating
def _sum(row: F32) -> Any:
    total = np.float32(0.0)
    for i in range(row.size):
        total += row[i]
    return total


@exact
def _scale(row: F32, factor: Any) -> None:
    for i in range(row.size):
        row[i] *= factor


@exact
def _score(
    query: F32, at: int, group: int, head_dim: int, keys: Bits, index: int, scores: F32, to: int
) -> None:
    """scores[to + q * _BLOCK] = query head q of the group . keys[index : index + head_dim]."""
    whole = head_dim - head_dim % LANES
    for q in range(0, group, 4):
        a, s = at + q * head_dim, to + q * _BLOCK
        tile = min(4, group - q)
        if tile == 4:
            _dot4(query, a, head_dim, keys, index, whole, scores, s, _BLOCK)
        elif tile == 3:
            _dot3(query, a, head_dim, keys, index, whole, scores, s, _BLOCK)
        elif tile == 2:
            _dot2(query, a, head_dim, keys, index, whole, scores, s, _BLOCK)
        else:
            _dot1(query, a, head_dim, keys, index, whole, scores, s, _BLOCK)
    for q in range(group):
        for i in range(whole, head_dim):
            scores[to + q * _BLOCK] += load(query, at + q * head_dim + i) * load(keys, index + i)


@exact
def _mix(
    flat: Bits,
    row_elems: int,
    rows: I32,
    size: int,
    offset: int,
    weights: F32,
    at: int,
    group: int,
    v_head_dim: int,
    out: F32,
    to: int,
) -> None:
    """Add the weighted values of one key head, `size` tokens, to the query heads of its group."""
    whole = v_head_dim - v_head_dim % LANES
    d = v_head_dim
    for q in range(0, group, 4):
        w, o = at + q * _BLOCK, to + q * d
        tile = min(4, group - q)
        for i in range(0, whole, LANES):
            v = offset + i
            if tile == 4:
                _mix4(flat, row_elems, rows, 0, size, v, weights, w, _BLOCK, out, o + i, d)
            elif tile == 3:
                _mix3(flat, row_elems, rows, 0, size, v, weights, w, _BLOCK, out, o + i, d)
            elif tile == 2:
                _mix2(flat, row_elems, rows, 0, size, v, weights, w, _BLOCK, out, o + i, d)
            else:
                _mix1(flat, row_elems, rows, 0, size, v, weights, w, _BLOCK, out, o + i, d)
    for q in range(group):
        for i in range(whole, d):
            total = np.float32(0.0)
            for n in range(size):
                value = load(flat, rows[n] * row_elems + offset + i)
                total += load(weights, at + q * _BLOCK + n) * value
            out[to + q * d + i] += total


@exact
def decode_attention(
    query: F32,
    flat: Bits,
    row_elems: int,
    k_rows: I32,
    k_deltas: I32,
    v_rows: I32,
    num_heads: int,
    group: int,
    head_dim: int,
    v_head_dim: int,
    cos: F32,
    sin: F32,
    out: F32,
) -> None:
    """`query` is flat and already scaled; `out` is flat, [num_heads * group * v_head_dim].

    A key is rotated once for all query heads that share it.
    """
    q_heads = num_heads * group
    k_width = num_heads * head_dim
    row = np.empty(k_width, np.float32)
    scores = np.empty(q_heads * _BLOCK, np.float32)
    highest = np.full(q_heads, -np.inf, np.float32)
    total = np.zeros(q_heads, np.float32)
    out[:] = 0
    rotate = k_deltas.size > 0
    t = k_rows.size
    for start in range(0, t, _BLOCK):
        size = min(_BLOCK, t - start)
        for n in range(size):
            at = start + n
            if at + AHEAD < t:
                prefetch_row(flat, k_rows[at + AHEAD] * row_elems, k_width)
            base = k_rows[at] * row_elems
            turned = rotate and k_deltas[at] != 0
            if turned:
                load_rotated(flat, base, num_heads, head_dim, cos, sin, k_deltas[at], row)
            for head in range(num_heads):
                a, s = head * group * head_dim, head * group * _BLOCK + n
                if turned:
                    _score(query, a, group, head_dim, row, head * head_dim, scores, s)
                else:
                    _score(query, a, group, head_dim, flat, base + head * head_dim, scores, s)
        for q in range(q_heads):
            old_max = highest[q]
            block = scores[q * _BLOCK : q * _BLOCK + size]
            highest[q] = _softmax_block(block, size, old_max)
            if highest[q] > old_max:
                fade = _exp(old_max - highest[q])
                total[q] *= fade
                _scale(out[q * v_head_dim : (q + 1) * v_head_dim], fade)
            total[q] += _sum(block)
        for part in range(0, size, _PART):
            some = v_rows[start + part : start + min(part + _PART, size)]
            following = v_rows[start + part + _PART : start + part + 2 * _PART]
            for head in range(num_heads):
                for n in range(following.size):
                    base = following[n] * row_elems + head * v_head_dim
                    prefetch_row(flat, base, v_head_dim)
                w, o = head * group * _BLOCK + part, head * group * v_head_dim
                _mix(
                    flat, row_elems, some, some.size, head * v_head_dim,
                    scores, w, group, v_head_dim, out, o,
                )  # fmt: skip
    for q in range(q_heads):
        if total[q] != 0:
            _scale(out[q * v_head_dim : (q + 1) * v_head_dim], _ONE / total[q])
