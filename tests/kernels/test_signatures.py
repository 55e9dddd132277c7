"""Signatures and moments: both backends alike, position-free, and good at finding neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from memshare.kernels import (
    Kernels,
    RopeTable,
    RowDtype,
    SimHasher,
    bits_to_float32,
    float32_to_bits,
    get_kernels,
)
from memshare.kernels.reference import rotate, walsh_hadamard

from .conftest import MakePool, ids

ROWS = 37


@pytest.mark.parametrize("rotary", ["all", "part", "none"])
def test_backends_agree_bit_for_bit(
    dtype: RowDtype,
    shape: tuple[int, int],
    rotary: str,
    make_pool: MakePool,
    rng: np.random.Generator,
) -> None:
    heads, dim = shape
    pool = make_pool(ROWS, heads * dim, dtype, extra=5)
    rows = rng.integers(0, ROWS, 101).astype(np.int32)
    positions = rng.integers(0, 5000, 101).astype(np.int32)
    positions[:3] = 0
    mean = rng.standard_normal(heads * dim).astype(np.float32)
    rope = RopeTable.from_theta(dim if rotary == "all" else dim // 4 * 2)
    args = (dtype, heads, dim, mean, SimHasher(heads * dim, seed=3), rope)
    steps = None if rotary == "none" else positions
    fast = get_kernels("numba").signatures(pool, rows, steps, *args)
    plain = get_kernels("numpy").signatures(pool, rows, steps, *args)
    np.testing.assert_array_equal(fast, plain)
    assert fast.dtype == np.uint64
    assert fast.shape == (101, 2)


@pytest.mark.parametrize("layout", [(4, 64), (12, 64), (3, 64), (2, 128), (4, 128), (2, 256)])
def test_backends_agree_on_the_layouts_with_code_of_their_own(
    layout: tuple[int, int], dtype: RowDtype, make_pool: MakePool, rng: np.random.Generator
) -> None:
    heads, dim = layout
    pool = make_pool(ROWS, heads * dim, dtype, extra=3)
    rows = rng.integers(0, ROWS, 50).astype(np.int32)
    mean = rng.standard_normal(heads * dim).astype(np.float32)
    args = (dtype, heads, dim, mean, SimHasher(heads * dim), RopeTable.from_theta(dim))
    for positions in (None, rng.integers(0, 3000, 50).astype(np.int32)):
        fast, plain = (
            get_kernels(name).signatures(pool, rows, positions, *args)
            for name in ("numba", "numpy")
        )
        np.testing.assert_array_equal(fast, plain)


def test_a_mean_far_above_the_spread_is_taken_off(
    kernels: Kernels, rng: np.random.Generator
) -> None:
    spread = rng.standard_normal((200, 1024)).astype(np.float32)
    mean = (100 * rng.standard_normal(1024)).astype(np.float32)
    args = (np.arange(200, dtype=np.int32), None, RowDtype.FP32, 8, 128)
    hasher = SimHasher(1024)
    near = kernels.signatures(spread.view(np.uint32), *args, np.zeros_like(mean), hasher)
    far = kernels.signatures((spread + mean).view(np.uint32), *args, mean, hasher)
    assert np.bitwise_count(near ^ far).sum(axis=1).mean() < 0.1


@pytest.mark.parametrize("width", [1, 16, 64, 100, 128, 192, 256, 257, 1024])
def test_directions_are_those_of_a_walsh_hadamard_matrix(width: int, kernels: Kernels) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(-50, 50, (5, width)).astype(np.float32)  # sums without rounding
    hasher = SimHasher(width)
    matrix = np.ones((1, 1))
    while len(matrix) < 256:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    np.testing.assert_array_equal(walsh_hadamard(np.eye(256, dtype=np.float32)), matrix)
    planes = [plane * 16 + lane for plane in (0, 9, 10, 3, 12, 5, 6, 15) for lane in range(16)]
    folded = (hasher.spread(x) * hasher.flips).reshape(5, -1, 256).sum(axis=1)
    mix = (matrix.T * hasher.second_flips) @ np.kron(matrix[:16, :16], np.eye(16)).T
    bits = (folded.astype(np.float64) @ mix)[:, planes] >= 0
    got = kernels.signatures(
        x.view(np.uint32), np.arange(5, dtype=np.int32), None, RowDtype.FP32, 1, width,
        np.zeros(width, np.float32), hasher,
    )  # fmt: skip
    packed = np.packbits(np.ascontiguousarray(bits), axis=1, bitorder="little")
    expected = packed.view(np.uint64)
    np.testing.assert_array_equal(got, expected)
    if width >= 16:
        unit = hasher.spread(np.eye(width, dtype=np.float32)) * hasher.flips
        directions = (unit.reshape(width, -1, 256).sum(axis=1) @ mix)[:, planes]
        directions /= np.linalg.norm(directions, axis=0)
        cosine = directions.T @ directions
        assert np.abs(cosine - np.eye(128)).max() < 0.999, "two bits tell the same"


def test_same_key_at_two_positions_has_nearly_the_same_signature(
    kernels: Kernels, dtype: RowDtype, rng: np.random.Generator
) -> None:
    heads, dim, n = 3, 64, 200
    rope = RopeTable.from_theta(dim)
    table = rope.upto(4001)
    free = rng.standard_normal((n, heads, dim)).astype(np.float32)
    positions = rng.integers(0, 4000, (2, n)).astype(np.int32)
    stored = [rotate(free, p, table).reshape(n, -1) for p in positions]
    pool = float32_to_bits(np.concatenate(stored), dtype)
    signed = kernels.signatures(
        pool, np.arange(2 * n, dtype=np.int32), positions.reshape(-1), dtype, heads, dim,
        np.zeros(heads * dim, np.float32), SimHasher(heads * dim), rope,
    )  # fmt: skip
    differing = np.bitwise_count(signed[:n] ^ signed[n:]).sum(axis=1)
    assert differing.mean() < (0.1 if dtype is RowDtype.FP32 else 1.5)


def test_special_rows_and_sizes(kernels: Kernels, dtype: RowDtype, make_pool: MakePool) -> None:
    pool = make_pool(3, 64, dtype)
    pool[1] = 0
    pool[2, 5] = float32_to_bits(np.array([np.nan], np.float32), dtype)[0]
    hasher, mean = SimHasher(64), np.zeros(64, np.float32)
    for rows in (ids(), ids(0), ids(0, 1, 2, 0)):
        signed = kernels.signatures(pool, rows, None, dtype, 1, 64, mean, hasher)
        other = get_kernels("numpy").signatures(pool, rows, None, dtype, 1, 64, mean, hasher)
        np.testing.assert_array_equal(signed, other)


def test_hasher_is_fixed_by_its_seed() -> None:
    np.testing.assert_array_equal(SimHasher(300, 7).flips, SimHasher(300, 7).flips)
    assert (SimHasher(300, 7).flips != SimHasher(300, 8).flips).any()
    assert SimHasher(300).padded == 512
    assert SimHasher(64).copies == 4
    with pytest.raises(ValueError, match="width"):
        SimHasher(0)


def _recall(
    signatures: npt.NDArray[np.uint64], x: npt.NDArray[np.float32], threshold: float
) -> float:
    """Share of rows with a donor within `threshold` for which one of the top 4 is such a donor."""
    n = len(x)
    squares = (x * x).sum(axis=1)
    distance = (squares[:, None] + squares - 2 * x @ x.T) / squares[:, None]
    distance[np.triu_indices(n)] = np.inf
    shareable = np.flatnonzero(distance.min(axis=1) <= threshold)
    index, _ = get_kernels("numba").hamming_topk(
        signatures[shareable], signatures, np.ones(n, np.uint8), shareable.astype(np.int32), 4
    )
    best = np.take_along_axis(distance[shareable], np.maximum(index, 0), axis=1)
    assert len(shareable) > 300
    return float(((best <= threshold) & (index >= 0)).any(axis=1).mean())


@pytest.mark.parametrize("width", [64, 192, 1024])
def test_recall_is_that_of_a_dense_gaussian_projection(width: int) -> None:
    rng = np.random.default_rng(width)
    n = 1500
    # Like keys: a few channels carry most of the energy, rows gather around prototypes, and the
    # distances to them vary.
    channel = np.exp(rng.standard_normal(width) * 1.2)
    centres = rng.standard_normal((75, width))
    noise = rng.uniform(0.05, 0.6, (n, 1)) * rng.standard_normal((n, width))
    x = ((centres[rng.integers(0, 75, n)] + noise) * channel).astype(np.float32)
    mean = x[:300].mean(axis=0)
    pool: npt.NDArray[Any] = x.view(np.uint32)
    rows = np.arange(n, dtype=np.int32)
    fast, dense = [], []
    for seed in range(1, 7):  # one draw of either kind is off by about 0.01
        hasher = SimHasher(width, seed)
        fast.append(
            get_kernels("numba").signatures(pool, rows, None, RowDtype.FP32, 1, width, mean, hasher)
        )
        bits = (x - mean) @ rng.standard_normal((width, 128)) >= 0
        dense.append(np.packbits(bits, axis=1, bitorder="little").view(np.uint64))
    found, found_dense = (
        float(np.mean([_recall(one, x, 0.1) for one in which])) for which in (fast, dense)
    )
    assert found >= 0.97
    assert found >= found_dense - 0.005


def test_moments(
    kernels: Kernels, dtype: RowDtype, shape: tuple[int, int], make_pool: MakePool,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    heads, dim = shape
    pool = make_pool(ROWS, heads * dim, dtype, extra=2)
    pool[4, 1] = float32_to_bits(np.array([np.inf], np.float32), dtype)[0]
    rows = rng.integers(0, ROWS, 59).astype(np.int32)
    positions = rng.integers(0, 900, 59).astype(np.int32)
    rope = RopeTable.from_theta(dim)
    values = bits_to_float32(pool[rows, : heads * dim], dtype).astype(np.float64)
    finite = rows != 4
    for steps in (None, positions):
        x = values.reshape(-1, heads, dim)[finite]
        if steps is not None:
            x = rotate(x, -steps[finite], rope.upto(901))
        mean, square = kernels.row_moments(pool, rows, steps, dtype, heads, dim, rope)
        np.testing.assert_allclose(mean, x.mean(axis=0).reshape(-1), atol=1e-6)
        np.testing.assert_allclose(square, (x * x).mean(axis=(0, 2)), rtol=1e-6)
        assert mean.dtype == square.dtype == np.float32


def test_moments_of_nothing(kernels: Kernels, dtype: RowDtype, make_pool: MakePool) -> None:
    pool = make_pool(2, 32, dtype)
    pool[1, 0] = float32_to_bits(np.array([np.nan], np.float32), dtype)[0]
    for rows in (ids(), ids(1)):
        mean, square = kernels.row_moments(pool, rows, None, dtype, 2, 16)
        assert not mean.any()
        assert not square.any()
