"""Shared cases: every backend, element type and row shape the kernel tests run over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from memshare.kernels import Kernels, RowDtype, float32_to_bits, get_kernels

SHAPES = [(1, 16), (3, 64), (8, 128), (1, 96), (3, 20)]
"""(num_heads, head_dim); the last one is no multiple of any vector width."""

EPSILON = {RowDtype.FP32: 2.0**-24, RowDtype.FP16: 2.0**-11, RowDtype.BF16: 2.0**-8}
"""Largest relative error of rounding to each element type."""

MakePool = Callable[..., npt.NDArray[Any]]


@pytest.fixture(params=["numba", "numpy"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return get_kernels(request.param)


@pytest.fixture(params=list(RowDtype), ids=lambda dtype: dtype.value)
def dtype(request: pytest.FixtureRequest) -> RowDtype:
    value: RowDtype = request.param
    return value


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    value: tuple[int, int] = request.param
    return value


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture
def make_pool(rng: np.random.Generator) -> MakePool:
    def make(rows: int, width: int, dtype: RowDtype, extra: int = 0) -> npt.NDArray[Any]:
        """Random rows of `width` elements, followed by `extra` elements that must not matter."""
        values = rng.standard_normal((rows, width + extra)).astype(np.float32)
        values[:, width:] = np.nan
        return np.ascontiguousarray(float32_to_bits(values, dtype))

    return make


def ids(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)
