"""Conversions between bits and float32, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from memshare.kernels import RowDtype, bits_to_float32, float32_to_bits

ORACLE = {
    RowDtype.FP32: np.dtype(np.float32),
    RowDtype.FP16: np.dtype(np.float16),
    RowDtype.BF16: np.dtype(ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("dtype", [RowDtype.FP16, RowDtype.BF16])
def test_every_half_pattern_widens_like_the_oracle(dtype: RowDtype) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = bits_to_float32(bits, dtype)
    np.testing.assert_array_equal(wide, bits.view(ORACLE[dtype]).astype(np.float32))
    back = float32_to_bits(wide, dtype)
    finite = ~np.isnan(wide)
    np.testing.assert_array_equal(back[finite], bits[finite])
    assert np.isnan(bits_to_float32(back[~finite], dtype)).all()


def test_rounding_is_to_nearest_even_like_the_oracle(
    dtype: RowDtype, rng: np.random.Generator
) -> None:
    raw = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate((raw, ties, ties + np.uint32(1), ties - np.uint32(1))).view(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        expected = values.astype(ORACLE[dtype]).view(dtype.bits_dtype)
    np.testing.assert_array_equal(float32_to_bits(values, dtype), expected)


def test_nan_stays_nan(dtype: RowDtype) -> None:
    # The lowest payload bits: rounding them away must not leave an infinity.
    values = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(bits_to_float32(float32_to_bits(values, dtype), dtype)).all()


def test_wrong_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="uint16"):
        bits_to_float32(np.zeros(3, np.uint32), RowDtype.BF16)


def test_sizes(dtype: RowDtype) -> None:
    assert dtype.itemsize == dtype.bits_dtype.itemsize == ORACLE[dtype].itemsize
