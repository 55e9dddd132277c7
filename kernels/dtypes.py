"""Element types of pool rows and exact conversions between raw bits and float32.

Pools hold raw bits, never floats: NumPy has no bfloat16, and a bit view can be copied, compared and
hashed without touching the floating-point unit (which may quieten signalling NaNs).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["F32", "I32", "U64", "Bits", "RowDtype", "bits_to_float32", "float32_to_bits"]

Bits = npt.NDArray[Any]
"""Raw element bits: uint32 for fp32, uint16 for fp16 and bf16."""
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]


class RowDtype(Enum):
    """Element type of the rows of one pool."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is RowDtype.FP32 else 2

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """Unsigned integer dtype that holds the bits of one element."""
        return np.dtype(np.uint32 if self is RowDtype.FP32 else np.uint16)

    @property
    def magnitude_mask(self) -> int:
        """All bits of an element but its sign. Zero under this mask means plus or minus zero."""
        return 0x7FFFFFFF if self is RowDtype.FP32 else 0x7FFF

    @property
    def exponent_mask(self) -> int:
        """The exponent bits. All of them set means infinity or NaN."""
        return {RowDtype.FP32: 0x7F800000, RowDtype.FP16: 0x7C00, RowDtype.BF16: 0x7F80}[self]


def bits_to_float32(bits: Bits, dtype: RowDtype) -> F32:
    """Widen raw bits to float32. Exact for every value.

    `bits` has any shape and dtype `dtype.bits_dtype`; the result has its shape. For fp32 it is a
    view of `bits`, else a copy. ValueError when the integer dtype does not fit.
    """
    if bits.dtype != dtype.bits_dtype:
        raise ValueError(f"{dtype.value} bits must be {dtype.bits_dtype}, not {bits.dtype}")
    if dtype is RowDtype.FP32:
        return bits.view(np.float32)
    if dtype is RowDtype.FP16:
        return bits.view(np.float16).astype(np.float32)
    # bfloat16 is the upper half of a float32.
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bits(values: F32, dtype: RowDtype) -> Bits:
    """Round float32 to `dtype`, nearest with ties to even, and return raw bits of the same shape.

    Values beyond the range become infinity, NaN stays NaN (quiet). For fp32 the result is a view.
    """
    values = np.asarray(values, dtype=np.float32)
    if dtype is RowDtype.FP32:
        return values.view(np.uint32)
    if dtype is RowDtype.FP16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    raw = values.view(np.uint32)
    # Add half a unit in the last place, less one when the kept part is even: ties go to even. A
    # carry out of the mantissa moves into the exponent, as it should.
    rounded = (raw + (np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet_nan = (raw >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)
