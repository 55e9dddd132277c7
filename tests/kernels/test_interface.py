"""What every backend refuses, and how backends are chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memshare.kernels import Kernels, RopeTable, RowDtype, SimHasher, get_kernels

from .conftest import ids

POOL = np.ones((10, 32), np.float32).view(np.uint32)
FP32 = RowDtype.FP32
ROPE = RopeTable.from_theta(16, 10000.0)
MEAN = np.zeros(32, np.float32)
OUT = np.zeros((2, 2, 16), np.uint32)
QUERY = np.ones((2, 16), np.float32)
GOOD = ids(0, 9)
PAIR = GOOD[:, None]

Call = Callable[[Kernels, Any], Any]

WITH_IDS: dict[str, Call] = {
    "signatures": lambda k, r: k.signatures(POOL, r, None, FP32, 2, 16, MEAN, SimHasher(32)),
    "moments": lambda k, r: k.row_moments(POOL, r, None, FP32, 2, 16),
    "targets": lambda k, r: k.pair_distances(POOL, r, PAIR, None, FP32, 2, 16),
    "donors": lambda k, r: k.pair_distances(POOL, GOOD, r[:, None], None, FP32, 2, 16),
    "equal a": lambda k, r: k.rows_equal(POOL, r, GOOD, FP32, 32),
    "equal b": lambda k, r: k.rows_equal(POOL, GOOD, r, FP32, 32),
    "hashes": lambda k, r: k.row_hashes(POOL, r, FP32, 32),
    "src": lambda k, r: k.copy_rows(POOL.copy(), r, ids(1, 2)),
    "dst": lambda k, r: k.copy_rows(POOL.copy(), ids(1, 2), r),
    "zero": lambda k, r: k.zero_rows(POOL.copy(), r),
    "gather": lambda k, r: k.gather_rows(POOL, r, None, FP32, 2, 16, OUT),
    "k": lambda k, r: k.decode_attention(QUERY, POOL, r, None, GOOD, 0, FP32, 2, 16, 16),
    "v": lambda k, r: k.decode_attention(QUERY, POOL, GOOD, None, r, 0, FP32, 2, 16, 16),
}


@pytest.mark.parametrize("call", WITH_IDS.values(), ids=WITH_IDS)
@pytest.mark.parametrize("bad", [10, -2, 2**31 - 1, -(2**31)])
def test_rows_outside_the_pool(kernels: Kernels, call: Call, bad: int) -> None:
    call(kernels, GOOD)
    with pytest.raises(ValueError, match=rf"row {bad} is outside the pool of 10 rows"):
        call(kernels, ids(0, bad))


@pytest.mark.parametrize("call", WITH_IDS.values(), ids=WITH_IDS)
def test_only_int32_ids(kernels: Kernels, call: Call) -> None:
    with pytest.raises(ValueError, match="int32"):
        call(kernels, np.array([0, 9]))


def test_minus_one_is_no_row_but_for_donors(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="row -1 is outside"):
        kernels.zero_rows(POOL.copy(), ids(3, -1))
    kernels.pair_distances(POOL, GOOD, ids(-1, 3)[:, None], None, FP32, 2, 16)


def test_a_bad_batch_changes_nothing(kernels: Kernels) -> None:
    pool = POOL.copy()
    with pytest.raises(ValueError, match="row 10"):
        kernels.zero_rows(pool, ids(0, 10))
    with pytest.raises(ValueError, match="row 10"):
        kernels.copy_rows(pool, ids(0, 10), ids(1, 2))
    np.testing.assert_array_equal(pool, POOL)


BAD_CALLS: dict[str, tuple[str, Callable[[Kernels], Any]]] = {
    "pool dtype": ("uint16 bits", lambda k: k.row_hashes(POOL, GOOD, RowDtype.BF16, 4)),
    "pool order": ("C-contiguous", lambda k: k.row_hashes(POOL[:, :8], GOOD, FP32, 8)),
    "width": ("width 33", lambda k: k.row_hashes(POOL, GOOD, FP32, 33)),
    "no width": ("width 0", lambda k: k.rows_equal(POOL, GOOD, GOOD, FP32, 0)),
    "lengths": ("b must have", lambda k: k.rows_equal(POOL, GOOD, ids(1), FP32, 4)),
    "mean": (
        "mean must",
        lambda k: k.signatures(POOL, GOOD, None, FP32, 2, 16, MEAN[:3], SimHasher(32)),
    ),
    "mean dtype": (
        "float32",
        lambda k: k.signatures(
            POOL,
            GOOD,
            None,
            FP32,
            2,
            16,
            MEAN.astype("f8"),
            SimHasher(32),
        ),
    ),
    "hasher": (
        "hasher of width 16",
        lambda k: k.signatures(POOL, GOOD, None, FP32, 2, 16, MEAN, SimHasher(16)),
    ),
    "positions without table": (
        "without a rope table",
        lambda k: k.row_moments(POOL, GOOD, GOOD, FP32, 2, 16),
    ),
    "negative position": (
        "position -5 is negative",
        lambda k: k.row_moments(POOL, GOOD, ids(3, -5), FP32, 2, 16, ROPE),
    ),
    "far position": (
        "RoPE table",
        lambda k: k.row_moments(POOL, GOOD, ids(3, 2**31 - 1), FP32, 2, 16, ROPE),
    ),
    "lowest delta": (
        "RoPE table",
        lambda k: k.gather_rows(POOL, GOOD, ids(0, -(2**31)), FP32, 2, 16, OUT, ROPE),
    ),
    "table wider than the head": (
        "larger than head_dim",
        lambda k: k.row_moments(POOL, GOOD, GOOD, FP32, 4, 8, ROPE),
    ),
    "deltas without table": (
        "without a rope table",
        lambda k: k.gather_rows(POOL, GOOD, ids(0, 1), FP32, 2, 16, OUT),
    ),
    "out shape": ("out must", lambda k: k.gather_rows(POOL, ids(1), None, FP32, 2, 16, OUT)),
    "out dtype": (
        "out must",
        lambda k: k.gather_rows(POOL, GOOD, None, FP32, 2, 16, OUT.astype(np.uint16)),
    ),
    "donors shape": (
        "donors must",
        lambda k: k.pair_distances(POOL, GOOD, ids(1)[None], None, FP32, 2, 16),
    ),
    "deltas shape": (
        "deltas must",
        lambda k: k.pair_distances(POOL, GOOD, PAIR, ids(1)[None], FP32, 2, 16, None, ROPE),
    ),
    "weight": (
        "negative or NaN",
        lambda k: k.pair_distances(
            POOL, GOOD, PAIR, None, FP32, 2, 16, np.array([1, np.nan], np.float32)
        ),
    ),
    "query heads": (
        "query of shape",
        lambda k: k.decode_attention(QUERY[:1], POOL, GOOD, None, GOOD, 0, FP32, 2, 16, 16),
    ),
    "first": (
        "first",
        lambda k: k.decode_attention(QUERY, POOL, GOOD, None, GOOD, -1, FP32, 2, 16, 16),
    ),
}


@pytest.mark.parametrize(("message", "call"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_arguments(kernels: Kernels, message: str, call: Callable[[Kernels], Any]) -> None:
    with pytest.raises(ValueError, match=message):
        call(kernels)


def test_read_only_and_strided_arguments(kernels: Kernels) -> None:
    """Pools mapped read-only and ids out of a message are read-only; slices are strided."""
    pool = np.frombuffer(POOL.tobytes(), np.uint32).reshape(10, 32)
    rows = np.frombuffer(ids(4, 5).tobytes(), np.int32)
    strided = np.arange(10, dtype=np.int32)[4:8:3]
    expected = kernels.row_hashes(POOL, ids(4, 7), FP32, 32)
    np.testing.assert_array_equal(kernels.row_hashes(pool, rows, FP32, 32), expected)
    np.testing.assert_array_equal(kernels.row_hashes(pool, strided, FP32, 32), expected)


def test_backends() -> None:
    for name in ("numba", "numpy"):
        assert get_kernels(name).name == name
    assert get_kernels().name == "numba"
    with pytest.raises(ValueError, match="'cudax'; valid are numba, numpy"):
        get_kernels("cudax")
