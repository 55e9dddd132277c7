"""Nearest signatures, against FAISS."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memshare.kernels import Kernels, get_kernels

from .conftest import ids


def _words(rng: np.random.Generator, n: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return rng.integers(0, 1 << 64, (n, 2), dtype=np.uint64)


@pytest.mark.parametrize("n", [1, 5, 63, 64, 65, 2047, 2049, 5003])
def test_distances_are_those_of_faiss(kernels: Kernels, n: int, rng: np.random.Generator) -> None:
    slab, queries = _words(rng, n), _words(rng, 7)
    queries[0] = slab[n // 2]
    index, distance = kernels.hamming_topk(
        queries, slab, np.ones(n, np.bool_), np.full(7, n, np.int32), 4
    )
    oracle = faiss.IndexBinaryFlat(128)
    oracle.add(slab.view(np.uint8))
    expected, _ = oracle.search(queries.view(np.uint8), min(4, n))
    np.testing.assert_array_equal(distance[:, : min(4, n)], expected)
    assert index[0, 0] == n // 2
    assert distance[0, 0] == 0
    found = index[:, : min(4, n)]
    real = np.bitwise_count(slab[found] ^ queries[:, None]).sum(axis=2)
    np.testing.assert_array_equal(real, expected)
    assert (index[:, n:] == -1).all()
    assert (distance[:, n:] == -1).all()


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 300), m=st.integers(0, 5), k=st.integers(1, 6), bits=st.integers(1, 8),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_ties_validity_and_limits(n: int, m: int, k: int, bits: int, seed: int) -> None:
    """Few distinct signatures make many ties; both backends give the lowest index first."""
    rng = np.random.default_rng(seed)
    slab = rng.integers(0, 1 << bits, (n, 2), dtype=np.uint64)
    queries = rng.integers(0, 1 << bits, (m, 2), dtype=np.uint64)
    valid = rng.integers(0, 2, n).astype(np.uint8)
    limit = rng.integers(-2, n + 5, m).astype(np.int32)
    index, distance = get_kernels("numba").hamming_topk(queries, slab, valid, limit, k)
    other = get_kernels("numpy").hamming_topk(queries, slab, valid, limit, k)
    np.testing.assert_array_equal(index, other[0])
    np.testing.assert_array_equal(distance, other[1])
    for q in range(m):
        keys = [
            (int(np.bitwise_count(slab[j] ^ queries[q]).sum()), j)
            for j in range(max(0, min(n, int(limit[q]))))
            if valid[j]
        ]
        keys = sorted(keys)[:k] + [(-1, -1)] * (k - len(keys))
        assert list(zip(distance[q].tolist(), index[q].tolist(), strict=True)) == keys


def test_bad_arguments(kernels: Kernels, rng: np.random.Generator) -> None:
    slab = _words(rng, 3)
    valid, limit = np.ones(3, np.uint8), ids(3, 3, 3)
    with pytest.raises(ValueError, match="k must be"):
        kernels.hamming_topk(slab, slab, valid, limit, 0)
    with pytest.raises(ValueError, match="valid"):
        kernels.hamming_topk(slab, slab, valid[:2], limit, 1)
    with pytest.raises(ValueError, match="valid"):
        kernels.hamming_topk(slab, slab, valid.astype(np.int64), limit, 1)
    with pytest.raises(ValueError, match="limit"):
        kernels.hamming_topk(slab, slab, valid, limit[:2], 1)
    with pytest.raises(ValueError, match="slab"):
        kernels.hamming_topk(slab, slab[:, :1], valid, limit, 1)
    with pytest.raises(ValueError, match="queries"):
        kernels.hamming_topk(slab.view(np.int64), slab, valid, limit, 1)
