"""Rotation tables, their growth and the group law."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memshare.kernels import RopeTable
from memshare.kernels.reference import rotate


def test_values_and_growth() -> None:
    table = RopeTable.from_theta(8, 10000.0)
    assert table.rotary_dim == 8
    before = table.upto(10)
    cos, sin = table.upto(70_001)
    assert cos.shape == sin.shape == (70_001, 4)
    angles = np.arange(70_001)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-7)
    np.testing.assert_array_equal(before[0], cos[:10])
    assert not cos.flags.writeable
    assert table.upto(0)[0].shape == (0, 4)


def test_limits() -> None:
    table = RopeTable([1.0, 0.5], max_positions=100)
    assert len(table.upto(100)[0]) == 100
    with pytest.raises(ValueError, match="at most 100"):
        table.upto(101)
    with pytest.raises(ValueError, match="at most 100"):
        table.upto(-1)
    for bad in ([], [[1.0]], [float("nan")]):
        with pytest.raises(ValueError, match="inv_freq"):
            RopeTable(bad)
    with pytest.raises(ValueError, match="rotary_dim"):
        RopeTable.from_theta(7)
    with pytest.raises(ValueError, match="max_positions"):
        RopeTable([1.0], max_positions=0)


def test_growth_from_several_threads() -> None:
    table = RopeTable.from_theta(16)
    seen: list[bool] = []

    def grow(n: int) -> None:
        cos, sin = table.upto(n)
        seen.append(cos.shape == sin.shape == (n, 8))

    threads = [threading.Thread(target=grow, args=(1000 * i,)) for i in range(1, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 29


@settings(max_examples=50, deadline=None)
@given(
    position=st.integers(0, 30_000),
    delta=st.integers(-30_000, 30_000),
    seed=st.integers(0, 1000),
)
def test_rotations_form_a_group(position: int, delta: int, seed: int) -> None:
    table = RopeTable.from_theta(32).upto(60_001)
    x = np.random.default_rng(seed).standard_normal((1, 2, 48)).astype(np.float32)
    once = rotate(x, np.array([position + delta], np.int32), table)
    twice = rotate(
        rotate(x, np.array([position], np.int32), table), np.array([delta], np.int32), table
    )
    np.testing.assert_allclose(once, twice, atol=3e-6)
    np.testing.assert_array_equal(once[..., 32:], x[..., 32:])
