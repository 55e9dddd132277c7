"""Validation in front of every backend: compiled code trusts its indices, so nothing bad may pass.

Each check is one vectorised pass over ids, never over rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import F32, I32, Bits, RowDtype
from .rope import RopeTable

__all__ = [
    "NO_ROTATION",
    "check_copy",
    "check_floats",
    "check_ids",
    "check_int32",
    "check_pool",
    "check_rope",
    "check_shape",
    "tables",
]

NO_ROTATION: tuple[F32, F32] = (np.zeros((1, 0), np.float32), np.zeros((1, 0), np.float32))
"""cos and sin of no rotary dimension at all."""
for _table in NO_ROTATION:
    _table.flags.writeable = False


def check_pool(pool: Bits, dtype: RowDtype | None, width: int) -> None:
    """The pool is [rows, elems] raw bits in C order and its rows hold `width` elements."""
    if pool.ndim != 2 or not pool.flags.c_contiguous:
        raise ValueError("the pool must be a C-contiguous array [rows, elements]")
    if dtype is not None and pool.dtype != dtype.bits_dtype:
        raise ValueError(
            f"a pool of {dtype.value} must be {dtype.bits_dtype} bits, not {pool.dtype}"
        )
    if not 0 < width <= pool.shape[1]:
        raise ValueError(f"width {width} does not fit rows of {pool.shape[1]} elements")


def check_shape(name: str, array: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    """The array has exactly this shape."""
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {array.shape}")


def check_int32(name: str, ids: I32, ndim: int = 1) -> I32:
    """int32 of `ndim` dimensions, made C-contiguous."""
    if ids.dtype != np.int32 or ids.ndim != ndim:
        raise ValueError(
            f"{name} must be int32 of {ndim} dimension(s), not {ids.dtype} {ids.shape}"
        )
    return np.ascontiguousarray(ids)


def check_ids(
    name: str,
    ids: I32,
    num_rows: int,
    ndim: int = 1,
    none_allowed: bool = False,
    what: str = "row",
) -> I32:
    """Ids of rows, or of `what`, within the pool; -1 only where `none_allowed`.

    Names the first bad one.
    """
    ids = check_int32(name, ids, ndim)
    if ids.size:
        # As uint32 a negative id is huge, so one maximum tests both ends. With -1 allowed, adding
        # one first turns it into 0.
        unsigned = ids.view(np.uint32)
        bad: npt.NDArray[np.bool_] | None = None
        if none_allowed:
            if ids.min() < -1 or ids.max() >= num_rows:
                bad = (ids < -1) | (ids >= num_rows)
        elif unsigned.max() >= num_rows:
            bad = unsigned >= num_rows
        if bad is not None:
            first = ids.reshape(-1)[int(np.argmax(bad))]
            raise ValueError(f"{name}: {what} {first} is outside the pool of {num_rows} {what}s")
    return ids


def check_copy(what: str, src: I32, dst: I32) -> None:
    """No row, or `what`, is written twice or both read and written."""
    ordered = np.sort(dst)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if twice.size:
        raise ValueError(f"{what} {ordered[twice[0]]} is written twice")
    if ordered.size:
        read = np.sort(src)  # in order, the search below walks instead of jumping
        at = np.minimum(np.searchsorted(ordered, read), ordered.size - 1)
        both = np.flatnonzero(ordered[at] == read)
        if both.size:
            raise ValueError(f"{what} {read[both[0]]} is both read and written")


def check_floats(name: str, values: F32, shape: tuple[int, ...]) -> F32:
    """float32 of exactly this shape, made C-contiguous."""
    if values.dtype != np.float32:
        raise ValueError(f"{name} must be float32, not {values.dtype}")
    check_shape(name, values, shape)
    return np.ascontiguousarray(values)


def check_rope(rope: RopeTable | None, head_dim: int, what: str) -> RopeTable:
    """There is a table and it fits the head."""
    if rope is None:
        raise ValueError(f"{what} given without a rope table")
    if rope.rotary_dim > head_dim:
        raise ValueError(f"rotary_dim {rope.rotary_dim} is larger than head_dim {head_dim}")
    return rope


def tables(
    rope: RopeTable | None, steps: I32 | None, head_dim: int, what: str
) -> tuple[F32, F32, bool]:
    """(cos, sin, whether anything is rotated) that reach every abs(steps).

    No table is needed, and none is grown, where all steps are zero.
    """
    if steps is None or steps.size == 0:
        return (*NO_ROTATION, False)
    # Not abs(): the lowest int32 has no positive counterpart.
    reach = max(int(steps.max()), -int(steps.min()))
    if reach == 0:
        return (*NO_ROTATION, False)
    cos, sin = check_rope(rope, head_dim, what).upto(reach + 1)
    return cos, sin, True
