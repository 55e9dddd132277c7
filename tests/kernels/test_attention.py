"""Attention through a row table, against float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from memshare.kernels import Kernels, RopeTable, RowDtype, bits_to_float32
from memshare.kernels.reference import rotate

from .conftest import MakePool, ids

Floats = npt.NDArray[np.float64]


def _attend(query: Floats, keys: Floats, values: Floats, scale: float) -> Floats:
    """One loop for each query head; keys and values [t, heads, dim]."""
    group = len(query) // keys.shape[1]
    out = []
    for head, q in enumerate(query):
        scores = keys[:, head // group] @ q * scale
        weights = np.exp(scores - scores.max())
        out.append(weights @ values[:, head // group] / weights.sum())
    return np.stack(out)


@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize(
    ("t", "first"), [(1, 0), (63, 0), (64, 0), (131, 0), (131, 67), (131, 130)]
)
def test_against_float64(
    kernels: Kernels,
    dtype: RowDtype,
    shape: tuple[int, int],
    group: int,
    t: int,
    first: int,
    make_pool: MakePool,
    rng: np.random.Generator,
) -> None:
    heads, dim = shape
    v_dim = dim - 3 if group == 1 else dim
    pool = make_pool(97, heads * dim, dtype)
    k_rows, v_rows = (rng.integers(0, 97, t).astype(np.int32) for _ in range(2))
    deltas = rng.integers(-300, 300, t).astype(np.int32)
    deltas[rng.random(t) < 0.5] = 0
    # Masked entries may hold anything.
    k_rows[:first], v_rows[:first], deltas[:first] = -1, 1 << 30, 1 << 30
    rope = RopeTable.from_theta(dim)
    query = (3 * rng.standard_normal((heads * group, dim))).astype(np.float32)
    x = bits_to_float32(pool, dtype).astype(np.float64)
    keys = x[k_rows[first:]].reshape(-1, heads, dim)
    values = x[v_rows[first:], : heads * v_dim].reshape(-1, heads, v_dim)
    for turns in (None, deltas):
        if turns is not None:
            keys = rotate(keys, deltas[first:], rope.upto(301))
        got = kernels.decode_attention(
            query, pool, k_rows, turns, v_rows, first, dtype, heads, dim, v_dim, rope
        )
        expected = _attend(query.astype(np.float64), keys, values, dim**-0.5)
        np.testing.assert_allclose(got, expected, atol=3e-6)
        assert got.dtype == np.float32


def test_wide_scores_stay_stable(kernels: Kernels, dtype: RowDtype, make_pool: MakePool) -> None:
    """Scores hundreds apart, rising from block to block: no overflow, and the last one wins."""
    pool = make_pool(200, 16, dtype)
    x = bits_to_float32(pool, dtype).astype(np.float64).reshape(-1, 1, 16)
    query = (100 * np.ones((2, 16))).astype(np.float32)
    rows = np.argsort(x.sum(axis=(1, 2))).astype(np.int32)
    for order in (rows, rows[::-1]):
        got = kernels.decode_attention(query, pool, order, None, order, 0, dtype, 1, 16, 16)
        expected = _attend(query.astype(np.float64), x, x, 0.25)
        np.testing.assert_allclose(got, expected, atol=2e-4)


def test_nothing_to_attend_to(kernels: Kernels, dtype: RowDtype, make_pool: MakePool) -> None:
    pool = make_pool(2, 32, dtype)
    query = np.ones((4, 16), np.float32)
    for rows, first in ((ids(), 0), (ids(0, 1), 2), (ids(0, 1), 9)):
        got = kernels.decode_attention(query, pool, rows, None, rows, first, dtype, 2, 16, 16)
        np.testing.assert_array_equal(got, np.zeros((4, 16), np.float32))


def test_a_nan_in_use_shows(kernels: Kernels) -> None:
    pool = np.ones((2, 16), np.float32)
    pool[1, 3] = np.nan
    query = np.ones((1, 16), np.float32)
    bits = pool.view(np.uint32)
    args = (RowDtype.FP32, 1, 16, 16)
    assert np.isnan(
        kernels.decode_attention(query, bits, ids(0, 1), None, ids(0, 0), 0, *args)
    ).all()
    assert np.isnan(
        kernels.decode_attention(query, bits, ids(0, 0), None, ids(0, 1), 0, *args)
    ).any()


def test_explicit_scale(kernels: Kernels, make_pool: MakePool, rng: np.random.Generator) -> None:
    pool = make_pool(5, 16, RowDtype.FP32)
    rows = np.arange(5, dtype=np.int32)
    query = rng.standard_normal((1, 16)).astype(np.float32)
    args = (pool, rows, None, rows, 0, RowDtype.FP32, 1, 16, 16)
    got = kernels.decode_attention(query, *args, scale=0.0)
    np.testing.assert_allclose(got[0], pool.view(np.float32).mean(axis=0), atol=1e-6)
