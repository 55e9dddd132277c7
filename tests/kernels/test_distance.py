"""Distances, equality and hashes of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memshare.kernels import (
    Kernels,
    RopeTable,
    RowDtype,
    bits_to_float32,
    float32_to_bits,
    get_kernels,
)
from memshare.kernels.reference import rotate

from .conftest import MakePool, ids

ROWS = 41
NAMES = ("numba", "numpy")


@pytest.mark.parametrize("weighted", [False, True])
def test_distances_against_float64(
    kernels: Kernels,
    dtype: RowDtype,
    shape: tuple[int, int],
    weighted: bool,
    make_pool: MakePool,
    rng: np.random.Generator,
) -> None:
    heads, dim = shape
    pool = make_pool(ROWS, heads * dim, dtype, extra=1)
    targets = rng.integers(0, ROWS, 23).astype(np.int32)
    donors = rng.integers(-1, ROWS, (23, 3)).astype(np.int32)
    deltas = rng.integers(-700, 700, (23, 3)).astype(np.int32)
    deltas[::4] = 0
    weight = rng.uniform(0.1, 3, heads).astype(np.float32) if weighted else None
    rope = RopeTable.from_theta(dim // 2)
    w = np.ones(heads) if weight is None else weight.astype(np.float64)
    x = bits_to_float32(pool[:, : heads * dim], dtype).astype(np.float64).reshape(-1, heads, dim)
    for turns in (None, deltas):
        got = kernels.pair_distances(pool, targets, donors, turns, dtype, heads, dim, weight, rope)
        for j in range(3):
            y = x[donors[:, j]]
            if turns is not None:
                y = rotate(y, turns[:, j], rope.upto(701))
            norm = (x[targets] ** 2).sum(axis=2) @ w
            expected = (((x[targets] - y) ** 2).sum(axis=2) @ w) / norm
            expected[donors[:, j] < 0] = np.inf
            np.testing.assert_allclose(got[:, j], expected, rtol=3e-6, atol=1e-12)
        assert got.dtype == np.float32


def test_a_key_is_its_own_donor_at_any_position(
    kernels: Kernels, dtype: RowDtype, rng: np.random.Generator
) -> None:
    rope = RopeTable.from_theta(64)
    free = rng.standard_normal((50, 3, 64)).astype(np.float32)
    positions = rng.integers(0, 8000, (2, 50)).astype(np.int32)
    stored = [rotate(free, p, rope.upto(8001)).reshape(50, -1) for p in positions]
    pool = float32_to_bits(np.concatenate(stored), dtype)
    targets = np.arange(50, dtype=np.int32)
    deltas = (positions[0] - positions[1])[:, None]
    distance = kernels.pair_distances(
        pool, targets, targets[:, None] + np.int32(50), deltas, dtype, 3, 64, None, rope
    )
    assert distance.max() < {RowDtype.FP32: 1e-11, RowDtype.FP16: 1e-6, RowDtype.BF16: 2e-5}[dtype]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 17, 19])
def test_rows_that_are_never_similar(
    kernels: Kernels, dtype: RowDtype, value: float, at: int, make_pool: MakePool
) -> None:
    heads, dim = 1, 20
    pool = make_pool(4, dim, dtype)
    pool[1, at] = float32_to_bits(np.array([value], np.float32), dtype)[0]
    pool[2] = 0
    pool[3] = 0
    pool[3, 5] = dtype.magnitude_mask + 1  # minus zero
    rope = RopeTable.from_theta(dim)
    every = np.arange(4, dtype=np.int32)
    for deltas in (None, np.full((4, 4), 3, np.int32)):
        distance = kernels.pair_distances(
            pool, every, np.tile(every, (4, 1)), deltas, dtype, heads, dim, None, rope
        )
        similar = np.isfinite(distance)
        assert similar[0, 0]
        similar[0, 0] = False
        assert not similar.any()
        assert (distance[~np.isfinite(distance)] == np.inf).all()
    np.testing.assert_array_equal(
        kernels.rows_equal(pool, every, every, dtype, dim), [True, False, False, False]
    )
    np.testing.assert_array_equal(
        kernels.row_hashes(pool, every, dtype, dim) != 0, [True, False, False, False]
    )


def test_overflow_is_not_similar(kernels: Kernels) -> None:
    pool = np.full((2, 16), 1e30, np.float32).view(np.uint32)
    got = kernels.pair_distances(pool, ids(0), ids(1)[None], None, RowDtype.FP32, 1, 16)
    assert got[0, 0] == np.inf


def test_distance_sizes(kernels: Kernels, dtype: RowDtype, make_pool: MakePool) -> None:
    pool = make_pool(3, 32, dtype)
    none = np.empty((0, 4), np.int32)
    assert kernels.pair_distances(pool, ids(), none, None, dtype, 2, 16).shape == (0, 4)
    assert kernels.pair_distances(
        pool, ids(1), none[:, :0].reshape(1, 0), None, dtype, 2, 16
    ).shape == (1, 0)
    # Deltas of absent donors are not looked at, however large.
    deltas = np.array([[2**31 - 1]], np.int32)
    got = kernels.pair_distances(
        pool, ids(0), ids(-1)[None], deltas, dtype, 2, 16, None, RopeTable.from_theta(16)
    )
    assert got[0, 0] == np.inf


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 64, 65, 192])
def test_equality_and_hashes_see_every_bit(
    dtype: RowDtype, width: int, make_pool: MakePool, rng: np.random.Generator
) -> None:
    pool = make_pool(60, width, dtype, extra=3)
    pool[30:] = pool[:30]
    pool[30:, width:] += 1  # past the width nothing counts
    changed = np.arange(30, 45)
    pool[changed, rng.integers(0, width, 15)] ^= 1
    a, b = np.arange(30, dtype=np.int32), np.arange(30, 60, dtype=np.int32)
    equal = [get_kernels(name).rows_equal(pool, a, b, dtype, width) for name in NAMES]
    hashes = [
        get_kernels(name).row_hashes(pool, np.arange(60, dtype=np.int32), dtype, width)
        for name in NAMES
    ]
    np.testing.assert_array_equal(equal[0], equal[1])
    np.testing.assert_array_equal(equal[0], np.arange(30) >= 15)
    np.testing.assert_array_equal(hashes[0], hashes[1])
    np.testing.assert_array_equal(hashes[0][:30] == hashes[0][30:], equal[0])
    assert get_kernels("numba").row_hashes(pool, ids(), dtype, width).shape == (0,)


def test_hashes_are_spread_evenly() -> None:
    # Rows that differ in one low bit, the hardest case of a weak mix: all hashes distinct, and each
    # output bit set about half of the time.
    pool = np.tile(np.float32(1.0).view(np.uint32), (4096, 64)).astype(np.uint32)
    pool[:, 0] ^= np.arange(4096, dtype=np.uint32)
    pool[:, 33] ^= np.arange(4096, dtype=np.uint32)
    hashes = get_kernels("numba").row_hashes(
        pool, np.arange(4096, dtype=np.int32), RowDtype.FP32, 64
    )
    assert len(np.unique(hashes)) == 4096
    bits = (hashes[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert abs(bits.mean(axis=0) - 0.5).max() < 0.05


@settings(max_examples=60, deadline=None)
@given(raw=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_any_half_bits_match_as_their_values_say(raw: list[int], seed: int) -> None:
    """Whatever the bits: matchable means finite and not all zero, in both backends."""
    pool = np.array([raw, raw], np.uint16)
    for dtype in (RowDtype.FP16, RowDtype.BF16):
        values = bits_to_float32(pool[0], dtype)
        matchable = bool(np.isfinite(values).all() and values.any())
        for name in NAMES:
            equal = get_kernels(name).rows_equal(pool, ids(0), ids(1), dtype, len(raw))
            hashed = get_kernels(name).row_hashes(pool, ids(0), dtype, len(raw))
            assert bool(equal[0]) is matchable
            assert bool(hashed[0] != 0) is matchable
