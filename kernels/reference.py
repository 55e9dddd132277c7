"""NumPy: the plain statement of every operation, for reading, testing and small jobs.

Argument shapes are those of `interface.Kernels`; `x` is [n, num_heads, head_dim] throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import F32, I32, U64, Bits, RowDtype, bits_to_float32, float32_to_bits
from .interface import Kernels, Tables
from .rowhash import hash_words, word_masks
from .simhash import PLANES, SimHasher

__all__ = [
    "NumpyKernels",
    "matchable",
    "mixed_signs",
    "rotate",
    "walsh_hadamard",
    "words_of",
]

Floats = npt.NDArray[Any]
_CHUNK = 4096
"""Rows handled at a time, to bound the memory of intermediate results."""


def rotate(x: Floats, steps: I32, table: Tables) -> Floats:
    """R(steps) x for x [n, num_heads, head_dim] and steps [n], in the float type of x.

    In float32 the operations and their order are those of the compiled kernels, so that the
    results agree bit for bit. Where a step is zero, x comes back unchanged.
    """
    cos, sin = (part.astype(x.dtype, copy=False) for part in table)
    half = cos.shape[1]
    c = cos[np.abs(steps)][:, None]
    s = (sin[np.abs(steps)] * np.where(steps < 0, -1, 1).astype(x.dtype)[:, None])[:, None]
    low, high = x[..., :half], x[..., half : 2 * half]
    out = x.copy()
    out[..., :half] = low * c - high * s
    out[..., half : 2 * half] = high * c + low * s
    out[steps == 0] = x[steps == 0]
    return out


def walsh_hadamard(x: Floats) -> Floats:
    """Walsh-Hadamard transform (natural order, not normalised) of the last axis, a power of two."""
    shape = x.shape
    size = shape[-1]
    step = size // 2
    while step:
        pairs = x.reshape(-1, size // (2 * step), 2, step)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack((low + high, low - high), axis=2)
        step //= 2
    return x.reshape(shape)


def mixed_signs(folded: F32, second_flips: F32) -> U64:
    """uint64 [n, 2]: signs of the mixed sums [n, 256] (see `simhash.SimHasher`)."""
    mixed = walsh_hadamard(folded) * second_flips
    columns = mixed.reshape(len(folded), 16, 16).transpose(0, 2, 1)
    planes = walsh_hadamard(columns)[..., PLANES].transpose(0, 2, 1)
    signs = np.ascontiguousarray(planes >= 0).reshape(len(folded), 128)
    return np.packbits(signs, axis=1, bitorder="little").view("<u8")


def _heads(pool: Bits, rows: I32, dtype: RowDtype, num_heads: int, head_dim: int) -> F32:
    """The rows as float32 [n, num_heads, head_dim]."""
    return bits_to_float32(pool[rows, : num_heads * head_dim], dtype).reshape(
        len(rows), num_heads, head_dim
    )


def words_of(rows: Bits) -> U64:
    """Raw bits [n, width] as little-endian words uint64 [n, w], zeros after the last."""
    n, width = rows.shape
    size = -(-width * rows.itemsize // 8) * 8
    padded = np.zeros((n, size // rows.itemsize), rows.dtype)
    padded[:, :width] = rows
    return padded.view("<u8")


def matchable(words: U64, dtype: RowDtype) -> npt.NDArray[np.bool_]:
    """bool [n]: finite and not all zero."""
    magnitude, exponent, low, sign = word_masks(dtype)
    some = ((words & magnitude) != 0).any(axis=1)
    bad = ((((words & exponent) + low) & sign) != 0).any(axis=1)
    result: npt.NDArray[np.bool_] = some & ~bad
    return result


class NumpyKernels(Kernels):
    """Every operation in NumPy, one statement for each step; sums in float64."""

    name = "numpy"

    def _signatures(
        self,
        pool: Bits,
        rows: I32,
        steps: I32 | None,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        mean: F32,
        hasher: SimHasher,
        table: Tables,
    ) -> U64:
        out = np.empty((len(rows), 2), np.uint64)
        with np.errstate(invalid="ignore", over="ignore"):
            centre = hasher.fold(mean[None])
            for start in range(0, len(rows), _CHUNK):
                part = slice(start, start + _CHUNK)
                x = _heads(pool, rows[part], dtype, num_heads, head_dim)
                if steps is not None:
                    x = rotate(x, steps[part], table)
                folded = hasher.fold(x.reshape(len(x), -1)) - centre
                out[part] = mixed_signs(folded, hasher.second_flips)
        return out

    def _row_moments(
        self,
        pool: Bits,
        rows: I32,
        steps: I32 | None,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        table: Tables,
    ) -> tuple[F32, F32]:
        x = _heads(pool, rows, dtype, num_heads, head_dim)
        if steps is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                x = rotate(x, steps, table)
        x = x[np.isfinite(x).all(axis=(1, 2))].astype(np.float64)
        count = max(len(x), 1)
        mean = (x.sum(axis=0) / count).reshape(-1)
        square = (x * x).sum(axis=(0, 2)) / (count * head_dim)
        return mean.astype(np.float32), square.astype(np.float32)

    def _hamming_topk(
        self, queries: U64, slab: U64, valid: npt.NDArray[np.uint8], limit: I32, k: int
    ) -> tuple[I32, I32]:
        index = np.full((len(queries), k), -1, np.int32)
        distance = np.full((len(queries), k), -1, np.int32)
        for q, query in enumerate(queries):
            slots = np.flatnonzero(valid[: max(limit[q], 0)])
            bits = np.bitwise_count(slab[slots] ^ query).sum(axis=1, dtype=np.int32)
            nearest = np.argsort(bits, kind="stable")[:k]
            index[q, : len(nearest)] = slots[nearest]
            distance[q, : len(nearest)] = bits[nearest]
        return index, distance

    def _pair_distances(
        self,
        pool: Bits,
        targets: I32,
        donors: I32,
        deltas: I32 | None,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        head_weight: F32,
        table: Tables,
    ) -> F32:
        out = np.full(donors.shape, np.inf, np.float32)
        highest = np.finfo(np.float32).max
        weight = head_weight.astype(np.float64)
        with np.errstate(all="ignore"):
            x = _heads(pool, targets, dtype, num_heads, head_dim).astype(np.float64)
            xx = (x * x).sum(axis=2) @ weight
            for j in range(donors.shape[1]):
                y = _heads(pool, np.maximum(donors[:, j], 0), dtype, num_heads, head_dim)
                y = y.astype(np.float64)
                if deltas is not None:
                    y = rotate(y, deltas[:, j], table)
                yy = (y * y).sum(axis=2) @ weight
                dd = ((x - y) ** 2).sum(axis=2) @ weight
                usable = (donors[:, j] >= 0) & (xx > 0) & (yy > 0)
                usable &= (xx <= highest) & (yy <= highest) & (dd <= highest)
                out[usable, j] = (dd / xx)[usable]
        return out

    def _rows_equal(
        self, pool: Bits, a: I32, b: I32, dtype: RowDtype, width: int
    ) -> npt.NDArray[np.bool_]:
        left, right = words_of(pool[a, :width]), words_of(pool[b, :width])
        same: npt.NDArray[np.bool_] = (left == right).all(axis=1)
        return same & matchable(left, dtype)

    def _row_hashes(self, pool: Bits, rows: I32, dtype: RowDtype, width: int) -> U64:
        words = words_of(pool[rows, :width])
        hashes = np.maximum(hash_words(words), np.uint64(1))
        return np.where(matchable(words, dtype), hashes, np.uint64(0))

    def _copy_rows(self, pool: Bits, src: I32, dst: I32) -> None:
        pool[dst] = pool[src]

    def _zero_rows(self, pool: Bits, rows: I32) -> None:
        pool[rows] = 0

    def _gather_rows(
        self,
        pool: Bits,
        rows: I32,
        deltas: I32 | None,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        out: Bits,
        table: Tables,
    ) -> None:
        raw = pool[rows, : num_heads * head_dim].reshape(len(rows), num_heads, head_dim)
        out[:] = raw.transpose(1, 0, 2)
        if deltas is None:
            return
        turned = np.flatnonzero(deltas)
        rotary = 2 * table[0].shape[1]
        with np.errstate(invalid="ignore", over="ignore"):
            x = rotate(bits_to_float32(raw[turned], dtype), deltas[turned], table)
        out[:, turned, :rotary] = float32_to_bits(x, dtype)[..., :rotary].transpose(1, 0, 2)

    def _decode_attention(
        self,
        query: F32,
        pool: Bits,
        k_rows: I32,
        k_deltas: I32 | None,
        v_rows: I32,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        v_head_dim: int,
        table: Tables,
        scale: float,
    ) -> F32:
        if len(k_rows) == 0:
            return np.zeros((len(query), v_head_dim), np.float32)
        keys = _heads(pool, k_rows, dtype, num_heads, head_dim).astype(np.float64)
        if k_deltas is not None:
            keys = rotate(keys, k_deltas, table)
        values = _heads(pool, v_rows, dtype, num_heads, v_head_dim).astype(np.float64)
        grouped = query.astype(np.float64).reshape(num_heads, -1, head_dim)
        scores = np.einsum("hgd,thd->hgt", grouped, keys) * scale
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        mixed = np.einsum("hgt,thd->hgd", weights, values)
        result: F32 = mixed.reshape(len(query), v_head_dim).astype(np.float32)
        return result
