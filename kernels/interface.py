"""The operations on pool rows, as every backend offers them.

`Kernels` checks its arguments and hands them on to the `_`-methods that a backend implements. A
backend for another device overrides the public methods where its arrays need other checks.

Terms: `pool` is [num_rows, row_elems] raw bits (`RowDtype.bits_dtype`), C-contiguous. A row is the
K or the V of one token in one layer: `num_heads * head_dim` elements from its start, head-major;
`row_elems` may be larger. Row ids, positions and deltas are int32. Keys lie after RoPE.
ValueError for a row id outside the pool (naming the first), a wrong dtype or shape, a rotation
without a table or beyond its limit: always before anything is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import numpy.typing as npt

from . import checks
from .dtypes import F32, I32, U64, Bits, RowDtype
from .rope import RopeTable
from .simhash import SimHasher

__all__ = ["Kernels", "RowReader", "Tables"]

Tables = tuple[F32, F32]
"""cos and sin, float32 [positions, rotary_dim / 2]."""


class RowReader(Protocol):
    """Reads rows head by head; made by `Kernels.row_reader`."""

    def __call__(self, rows: I32, deltas: I32 | None, out: Bits) -> None:
        """out[h, t, :] = R(deltas[t]) pool[rows[t], h, :].

        rows, deltas: int32 [t], C-contiguous. out: bits, C-contiguous, num_heads * t * head_dim of
        them in any shape.
        """


class Kernels(ABC):
    """All row operations of one backend. Stateless; the calls release the GIL where they can."""

    name: str

    def signatures(
        self,
        pool: Bits,
        rows: I32,
        positions: I32 | None,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        mean: F32,
        hasher: SimHasher,
        rope: RopeTable | None = None,
    ) -> U64:
        """uint64 [n, 2]: 128-bit SimHash of each row, freed of its position and of the mean.

        rows, positions: [n]. With `positions` (keys) each row is first rotated back by its
        position; without (values) it is taken as it is. mean: float32 [width]. Signatures compare
        only under the same mean and hasher. Rows with NaN or infinity get a meaningless signature.
        Method: `memshare.kernels.simhash`.
        """
        width = num_heads * head_dim
        checks.check_pool(pool, dtype, width)
        rows = checks.check_ids("rows", rows, len(pool))
        mean = checks.check_floats("mean", mean, (width,))
        if hasher.width != width:
            raise ValueError(f"a hasher of width {hasher.width} for rows of {width} elements")
        steps, table = self._unrotation(positions, rows, head_dim, rope)
        return self._signatures(pool, rows, steps, dtype, num_heads, head_dim, mean, hasher, table)

    def row_moments(
        self,
        pool: Bits,
        rows: I32,
        positions: I32 | None,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        rope: RopeTable | None = None,
    ) -> tuple[F32, F32]:
        """(mean float32 [width], mean square per head float32 [num_heads]) of position-free rows.

        rows, positions: [n], as in `signatures`. The mean square is over the rows and the elements
        of a head. Rows with NaN or infinity are left out; without any row left, all is zero.
        """
        checks.check_pool(pool, dtype, num_heads * head_dim)
        rows = checks.check_ids("rows", rows, len(pool))
        steps, table = self._unrotation(positions, rows, head_dim, rope)
        return self._row_moments(pool, rows, steps, dtype, num_heads, head_dim, table)

    def hamming_topk(
        self, queries: U64, slab: U64, valid: npt.NDArray[np.generic], limit: I32, k: int
    ) -> tuple[I32, I32]:
        """(index, distance), each int32 [m, k]: the nearest slots by differing bits, nearest first.

        queries: uint64 [m, 2]. slab: uint64 [n, 2]. valid: bool or uint8 [n]. limit: [m]; query i
        sees the valid slots below limit[i]. Of equals the lowest index comes first. Places without
        a slot hold -1 and -1. k is at least 1.
        """
        for name, words in (("queries", queries), ("slab", slab)):
            if words.dtype != np.uint64 or words.ndim != 2 or words.shape[1] != 2:
                raise ValueError(f"{name} must be uint64 [n, 2], not {words.dtype} {words.shape}")
        if valid.dtype not in (np.dtype(np.bool_), np.dtype(np.uint8)):
            raise ValueError(f"valid must be bool or uint8, not {valid.dtype}")
        checks.check_shape("valid", valid, (len(slab),))
        limit = checks.check_int32("limit", limit)
        checks.check_shape("limit", limit, (len(queries),))
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        flags = np.ascontiguousarray(valid).view(np.uint8)
        return self._hamming_topk(
            np.ascontiguousarray(queries), np.ascontiguousarray(slab), flags, limit, k
        )

    def pair_distances(
        self,
        pool: Bits,
        targets: I32,
        donors: I32,
        deltas: I32 | None,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        head_weight: F32 | None = None,
        rope: RopeTable | None = None,
    ) -> F32:
        """float32 [m, k]: relative squared distance |x - R(delta) y|^2 / |x|^2 to each donor.

        targets: [m]. donors: [m, k], -1 for none. deltas: [m, k], target position less donor
        position, or None for no rotation. head_weight: float32 [num_heads], not negative, weighs
        the squares of each head in both sums; None is 1. Infinity for donor -1, for a row with NaN
        or infinity, and where |x|^2 or |y|^2 is zero or overflows float32: nothing is similar to
        an empty row.
        """
        checks.check_pool(pool, dtype, num_heads * head_dim)
        targets = checks.check_ids("targets", targets, len(pool))
        donors = checks.check_ids("donors", donors, len(pool), ndim=2, none_allowed=True)
        checks.check_shape("donors", donors, (len(targets), donors.shape[1]))
        if head_weight is None:
            head_weight = np.ones(num_heads, np.float32)
        else:
            head_weight = checks.check_floats("head_weight", head_weight, (num_heads,))
            if not (head_weight >= 0).all():
                raise ValueError("head_weight must not be negative or NaN")
        if deltas is not None:
            deltas = checks.check_int32("deltas", deltas, ndim=2)
            checks.check_shape("deltas", deltas, donors.shape)
            # What stands where no donor is must not make the table grow.
            deltas = np.where(donors >= 0, deltas, np.int32(0))
        cos, sin, rotated = checks.tables(rope, deltas, head_dim, "deltas")
        return self._pair_distances(
            pool,
            targets,
            donors,
            deltas if rotated else None,
            dtype,
            num_heads,
            head_dim,
            head_weight,
            (cos, sin),
        )

    def rows_equal(
        self, pool: Bits, a: I32, b: I32, dtype: RowDtype, width: int
    ) -> npt.NDArray[np.bool_]:
        """bool [m]: the first `width` elements of rows a[i] and b[i] are the same bits.

        Rows that are all zero, or hold NaN or infinity, equal nothing, not even themselves.
        """
        checks.check_pool(pool, dtype, width)
        a = checks.check_ids("a", a, len(pool))
        b = checks.check_ids("b", b, len(pool))
        checks.check_shape("b", b, a.shape)
        return self._rows_equal(pool, a, b, dtype, width)

    def row_hashes(self, pool: Bits, rows: I32, dtype: RowDtype, width: int) -> U64:
        """uint64 [n]: hash of the raw bits of the first `width` elements, the same in all backends.

        0 is kept for rows that must never match: all zero, or with NaN or infinity. Equal hashes
        are to be confirmed by `rows_equal`. Method: `memshare.kernels.rowhash`.
        """
        checks.check_pool(pool, dtype, width)
        return self._row_hashes(pool, checks.check_ids("rows", rows, len(pool)), dtype, width)

    def copy_rows(self, pool: Bits, src: I32, dst: I32) -> None:
        """Copy whole rows src[i] to dst[i], in place.

        ValueError when a row is written twice or is both read and written: the result would
        depend on the order.
        """
        checks.check_pool(pool, None, 1)
        src = checks.check_ids("src", src, len(pool))
        dst = checks.check_ids("dst", dst, len(pool))
        checks.check_shape("dst", dst, src.shape)
        checks.check_copy("row", src, dst)
        self._copy_rows(pool, src, dst)

    def zero_rows(self, pool: Bits, rows: I32) -> None:
        """Fill whole rows with zeros, in place. rows: [n]."""
        checks.check_pool(pool, None, 1)
        self._zero_rows(pool, checks.check_ids("rows", rows, len(pool)))

    def gather_rows(
        self,
        pool: Bits,
        rows: I32,
        deltas: I32 | None,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        out: Bits,
        rope: RopeTable | None = None,
    ) -> None:
        """out[h, t, :] = R(deltas[t]) pool[rows[t], h, :], head by head for an engine's attention.

        rows, deltas: [t]. out: bits [num_heads, t, head_dim], C-contiguous, not part of the pool.
        Rotated in float32 and rounded back; where delta is zero, and past rotary_dim, the bits are
        copied.
        """
        checks.check_pool(pool, dtype, num_heads * head_dim)
        rows = checks.check_ids("rows", rows, len(pool))
        checks.check_shape("out", out, (num_heads, len(rows), head_dim))
        if out.dtype != pool.dtype or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(f"out must be writeable, C-contiguous {pool.dtype} bits")
        if deltas is not None:
            deltas = checks.check_int32("deltas", deltas)
            checks.check_shape("deltas", deltas, rows.shape)
        cos, sin, rotated = checks.tables(rope, deltas, head_dim, "deltas")
        self._gather_rows(
            pool,
            rows,
            deltas if rotated else None,
            dtype,
            num_heads,
            head_dim,
            out,
            (cos, sin),
        )

    def row_reader(
        self,
        pool: Bits,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        rope: RopeTable | None = None,
    ) -> RowReader:
        """`gather_rows` for an engine's every step: all but the ids is checked here, once.

        Safety: the reader trusts its ids. A row outside the pool reads foreign memory.
        """
        checks.check_pool(pool, dtype, num_heads * head_dim)
        if rope is not None and rope.rotary_dim > head_dim:
            raise ValueError(f"rotary_dim {rope.rotary_dim} is more than head_dim {head_dim}")
        return self._row_reader(pool, dtype, num_heads, head_dim, rope)

    def decode_attention(
        self,
        query: F32,
        pool: Bits,
        k_rows: I32,
        k_deltas: I32 | None,
        v_rows: I32,
        first: int,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        v_head_dim: int,
        rope: RopeTable | None = None,
        scale: float | None = None,
    ) -> F32:
        """float32 [num_q_heads, v_head_dim]: softmax attention of one token over a row table.

        query: float32 [num_q_heads, head_dim], after RoPE; num_q_heads is a multiple of num_heads
        (grouped queries: head q reads key head q // (num_q_heads / num_heads)). k_rows, k_deltas,
        v_rows: [t]. Entries below `first` are masked (left padding) and may hold anything. scale:
        of the scores, head_dim ** -0.5 where None. Without any entry the result is zero.
        """
        checks.check_pool(pool, dtype, num_heads * max(head_dim, v_head_dim))
        if query.ndim != 2 or len(query) == 0 or len(query) % num_heads:
            raise ValueError(f"query of shape {query.shape} for {num_heads} key heads")
        query = checks.check_floats("query", query, (len(query), head_dim))
        if first < 0:
            raise ValueError(f"first must not be negative, not {first}")
        k_rows = checks.check_ids("k_rows", k_rows[first:], len(pool))
        v_rows = checks.check_ids("v_rows", v_rows[first:], len(pool))
        checks.check_shape("v_rows", v_rows, k_rows.shape)
        if k_deltas is not None:
            k_deltas = checks.check_int32("k_deltas", k_deltas[first:])
            checks.check_shape("k_deltas", k_deltas, k_rows.shape)
        cos, sin, rotated = checks.tables(rope, k_deltas, head_dim, "k_deltas")
        return self._decode_attention(
            query,
            pool,
            k_rows,
            k_deltas if rotated else None,
            v_rows,
            dtype,
            num_heads,
            head_dim,
            v_head_dim,
            (cos, sin),
            head_dim**-0.5 if scale is None else scale,
        )

    @staticmethod
    def _unrotation(
        positions: I32 | None, rows: I32, head_dim: int, rope: RopeTable | None
    ) -> tuple[I32 | None, Tables]:
        """The rotations that free rows of their positions, or None, and their table."""
        if positions is None:
            return None, checks.NO_ROTATION
        positions = checks.check_int32("positions", positions)
        checks.check_shape("positions", positions, rows.shape)
        checks.check_rope(rope, head_dim, "positions")
        if positions.size and positions.min() < 0:
            raise ValueError(f"position {positions.min()} is negative")
        cos, sin, rotated = checks.tables(rope, positions, head_dim, "positions")
        return (-positions if rotated else None), (cos, sin)

    # What a backend implements, on checked arguments. `steps` and `deltas` are None where nothing
    # is rotated; masked entries of attention are cut off.

    @abstractmethod
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
    ) -> U64: ...

    @abstractmethod
    def _row_moments(
        self,
        pool: Bits,
        rows: I32,
        steps: I32 | None,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        table: Tables,
    ) -> tuple[F32, F32]: ...

    @abstractmethod
    def _hamming_topk(
        self, queries: U64, slab: U64, valid: npt.NDArray[np.uint8], limit: I32, k: int
    ) -> tuple[I32, I32]: ...

    @abstractmethod
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
    ) -> F32: ...

    @abstractmethod
    def _rows_equal(
        self, pool: Bits, a: I32, b: I32, dtype: RowDtype, width: int
    ) -> npt.NDArray[np.bool_]: ...

    @abstractmethod
    def _row_hashes(self, pool: Bits, rows: I32, dtype: RowDtype, width: int) -> U64: ...

    @abstractmethod
    def _copy_rows(self, pool: Bits, src: I32, dst: I32) -> None: ...

    @abstractmethod
    def _zero_rows(self, pool: Bits, rows: I32) -> None: ...

    @abstractmethod
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
    ) -> None: ...

    def _row_reader(
        self,
        pool: Bits,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        rope: RopeTable | None,
    ) -> RowReader:
        def read(rows: I32, deltas: I32 | None, out: Bits) -> None:
            heads = out.reshape(num_heads, len(rows), head_dim)
            self.gather_rows(pool, rows, deltas, dtype, num_heads, head_dim, heads, rope)

        return read

    @abstractmethod
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
    ) -> F32: ...
