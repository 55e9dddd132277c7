"""Numba: every operation on the host's processor, one thread per call, without the GIL.

Run calls in parallel from a thread pool. The first call of each operation and element type
compiles for about a second and is kept on disk (`NUMBA_CACHE_DIR`).
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from . import host_attention, host_distance, host_gather, host_search, host_signatures
from .dtypes import F32, I32, U64, Bits, RowDtype
from .interface import Kernels, RowReader, Tables
from .rope import RopeTable
from .rowhash import word_keys, word_masks
from .simhash import SimHasher

__all__ = ["NumbaKernels", "typed"]

_Array = TypeVar("_Array", bound=npt.NDArray[Any])

_NO_STEPS = np.empty(0, np.int32)
_NO_STEP_PAIRS = np.empty((0, 0), np.int32)


def frozen(array: _Array) -> _Array:
    """A read-only view.

    To Numba a read-only array is another type. Ids that came out of a message are read-only, ids
    out of NumPy are not: with all inputs frozen each kernel is compiled once for each element type.
    """
    view = array.view()
    view.flags.writeable = False
    return view


def typed(array: Bits, dtype: RowDtype) -> Bits:
    """The array, flat, as the integer type that tells kernels its element type: int16 is bf16."""
    flat = array.reshape(-1)
    return flat.view(np.int16) if dtype is RowDtype.BF16 else flat


def _source(pool: Bits, dtype: RowDtype) -> Bits:
    return frozen(typed(pool, dtype))


class NumbaKernels(Kernels):
    """Every operation compiled for the host's processor."""

    name = "numba"

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
        host_signatures.signatures(
            _source(pool, dtype),
            pool.shape[1],
            frozen(rows),
            frozen(_NO_STEPS if steps is None else steps),
            num_heads,
            head_dim,
            *table,
            frozen(host_signatures.constants(mean, hasher)),
            host_signatures.scratch(hasher),
            hasher.copies,
            out,
        )
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
        total = np.zeros(num_heads * head_dim, np.float64)
        squares = np.zeros(num_heads * head_dim, np.float64)
        count = host_signatures.moments(
            _source(pool, dtype),
            pool.shape[1],
            frozen(rows),
            frozen(_NO_STEPS if steps is None else steps),
            num_heads,
            head_dim,
            *table,
            total,
            squares,
        )
        count = max(count, 1)
        per_head = squares.reshape(num_heads, head_dim).sum(axis=1) / (count * head_dim)
        return (total / count).astype(np.float32), per_head.astype(np.float32)

    def _hamming_topk(
        self, queries: U64, slab: U64, valid: npt.NDArray[np.uint8], limit: I32, k: int
    ) -> tuple[I32, I32]:
        index = np.empty((len(queries), k), np.int32)
        distance = np.empty((len(queries), k), np.int32)
        host_search.hamming_topk(
            frozen(queries.reshape(-1)),
            frozen(slab.reshape(-1)),
            frozen(valid),
            frozen(limit),
            index,
            distance,
        )
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
        out = np.empty(donors.shape, np.float32)
        host_distance.pair_distances(
            _source(pool, dtype),
            pool.shape[1],
            frozen(targets),
            frozen(donors),
            frozen(_NO_STEP_PAIRS if deltas is None else deltas),
            num_heads,
            head_dim,
            frozen(head_weight),
            *table,
            out,
        )
        return out

    def _rows_equal(
        self, pool: Bits, a: I32, b: I32, dtype: RowDtype, width: int
    ) -> npt.NDArray[np.bool_]:
        out = np.empty(len(a), np.bool_)
        # Equality and hashes look at words, not at numbers: one type for both half formats.
        host_distance.equal_rows(
            frozen(pool.reshape(-1)),
            pool.shape[1],
            frozen(a),
            frozen(b),
            width,
            word_masks(dtype),
            out,
        )
        return out

    def _row_hashes(self, pool: Bits, rows: I32, dtype: RowDtype, width: int) -> U64:
        out = np.empty(len(rows), np.uint64)
        host_distance.hash_rows(
            frozen(pool.reshape(-1)),
            pool.shape[1],
            frozen(rows),
            width,
            word_masks(dtype),
            word_keys(-(-width * dtype.itemsize // 8)),
            out,
        )
        return out

    def _copy_rows(self, pool: Bits, src: I32, dst: I32) -> None:
        host_gather.copy_rows(*_rows_of_bytes(pool), frozen(src), frozen(dst))

    def _zero_rows(self, pool: Bits, rows: I32) -> None:
        host_gather.zero_rows(*_rows_of_bytes(pool), frozen(rows))

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
        host_gather.gather_rows(
            _source(pool, dtype),
            pool.shape[1],
            frozen(rows),
            frozen(_NO_STEPS if deltas is None else deltas),
            num_heads,
            head_dim,
            *table,
            typed(out, dtype),
        )

    def _row_reader(
        self,
        pool: Bits,
        dtype: RowDtype,
        num_heads: int,
        head_dim: int,
        rope: RopeTable | None,
    ) -> RowReader:
        source, row_elems = _source(pool, dtype), pool.shape[1]
        still, no_table = frozen(_NO_STEPS), frozen(np.empty((0, 0), np.float32))
        element = np.dtype(np.int16) if dtype is RowDtype.BF16 else pool.dtype
        gather = host_gather.gather_rows

        def read(rows: I32, deltas: I32 | None, out: Bits) -> None:
            flat = out.reshape(-1).view(element)
            rows = frozen(rows)
            if deltas is None or rope is None:
                gather(
                    source, row_elems, rows, still, num_heads, head_dim, no_table, no_table, flat
                )
                return
            tables = rope.upto(int(np.abs(deltas).max(initial=0)) + 1)
            gather(source, row_elems, rows, frozen(deltas), num_heads, head_dim, *tables, flat)

        return read

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
        out = np.empty(len(query) * v_head_dim, np.float32)
        host_attention.decode_attention(
            frozen((query * np.float32(scale)).reshape(-1)),
            _source(pool, dtype),
            pool.shape[1],
            frozen(k_rows),
            frozen(_NO_STEPS if k_deltas is None else k_deltas),
            frozen(v_rows),
            num_heads,
            len(query) // num_heads,
            head_dim,
            v_head_dim,
            *table,
            out,
        )
        return out.reshape(len(query), v_head_dim)


def _rows_of_bytes(pool: Bits) -> tuple[npt.NDArray[np.uint8], int]:
    """The pool as flat bytes and the bytes of a row: copying needs no element type."""
    return pool.reshape(-1).view(np.uint8), pool.shape[1] * pool.itemsize
