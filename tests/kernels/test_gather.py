"""Copying, zeroing and laying out rows."""

from __future__ import annotations

import numpy as np
import pytest

from memshare.kernels import (
    Kernels,
    RopeTable,
    RowDtype,
    bits_to_float32,
    float32_to_bits,
    get_kernels,
)
from memshare.kernels.reference import rotate

from .conftest import EPSILON, MakePool, ids


@pytest.mark.parametrize("t", [0, 1, 31])
@pytest.mark.parametrize("part", [1, 2])
def test_gather(
    dtype: RowDtype,
    shape: tuple[int, int],
    t: int,
    part: int,
    make_pool: MakePool,
    rng: np.random.Generator,
) -> None:
    heads, dim = shape
    rotary = dim // part // 2 * 2
    pool = make_pool(29, heads * dim, dtype, extra=3)
    rows = rng.integers(0, 29, t).astype(np.int32)
    deltas = rng.integers(-2000, 2000, t).astype(np.int32)
    deltas[::3] = 0
    rope = RopeTable.from_theta(rotary)
    outs = []
    for name in ("numba", "numpy"):
        out = np.zeros((heads, t, dim), dtype.bits_dtype)
        get_kernels(name).gather_rows(pool, rows, deltas, dtype, heads, dim, out, rope)
        outs.append(out)
    np.testing.assert_array_equal(outs[0], outs[1])
    raw = pool[rows, : heads * dim].reshape(t, heads, dim).transpose(1, 0, 2)
    np.testing.assert_array_equal(outs[0][:, deltas == 0], raw[:, deltas == 0])
    np.testing.assert_array_equal(outs[0][..., rotary:], raw[..., rotary:])
    x = bits_to_float32(raw, dtype).astype(np.float64).transpose(1, 0, 2)
    exact = rotate(x, deltas, rope.upto(2001)).transpose(1, 0, 2)
    got = bits_to_float32(outs[0], dtype)
    np.testing.assert_allclose(got, exact, rtol=EPSILON[dtype] * 1.01, atol=2e-6)


def test_unshared_entries_are_bit_exact_whatever_they_hold(
    kernels: Kernels, dtype: RowDtype, rng: np.random.Generator
) -> None:
    """Every bit pattern, signalling NaNs included, and no table asked for."""
    pool = rng.integers(0, np.iinfo(dtype.bits_dtype).max, (64, 96), endpoint=True).astype(
        dtype.bits_dtype
    )
    rows = np.arange(64, dtype=np.int32)
    for deltas in (None, np.zeros(64, np.int32)):
        out = np.zeros((3, 64, 32), dtype.bits_dtype)
        kernels.gather_rows(pool, rows, deltas, dtype, 3, 32, out)
        np.testing.assert_array_equal(out, pool.reshape(64, 3, 32).transpose(1, 0, 2))


def test_nan_survives_rotation(kernels: Kernels, dtype: RowDtype, make_pool: MakePool) -> None:
    pool = make_pool(1, 16, dtype)
    pool[0, 2] = float32_to_bits(np.array([np.nan], np.float32), dtype)[0]
    out = np.zeros((1, 1, 16), dtype.bits_dtype)
    kernels.gather_rows(pool, ids(0), ids(5), dtype, 1, 16, out, RopeTable.from_theta(16))
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(bits_to_float32(out, dtype))), [2, 10])


def test_copy_and_zero(kernels: Kernels, dtype: RowDtype, make_pool: MakePool) -> None:
    pool = make_pool(11, 24, dtype, extra=1)
    before = pool.copy()
    kernels.copy_rows(pool, ids(0, 3, 3), ids(7, 1, 10))
    kernels.zero_rows(pool, ids(5, 2, 5))
    expected = before.copy()
    expected[[7, 1, 10]] = before[[0, 3, 3]]
    expected[[5, 2]] = 0
    np.testing.assert_array_equal(pool, expected)
    kernels.copy_rows(pool, ids(), ids())
    kernels.zero_rows(pool, ids())
    np.testing.assert_array_equal(pool, expected)


def test_copies_that_depend_on_order_are_refused(
    kernels: Kernels, dtype: RowDtype, make_pool: MakePool
) -> None:
    pool = make_pool(6, 8, dtype)
    before = pool.copy()
    with pytest.raises(ValueError, match="row 4 is written twice"):
        kernels.copy_rows(pool, ids(0, 1, 2), ids(4, 3, 4))
    with pytest.raises(ValueError, match="row 2 is both read and written"):
        kernels.copy_rows(pool, ids(0, 2), ids(2, 5))
    np.testing.assert_array_equal(pool, before)
