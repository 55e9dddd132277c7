"""The pool and a private overflow behind it, mapped as one array of rows."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from memshare.wire.errors import PoolLost

_PROT_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class MappedPool:
    """The agent's pool in this process, followed by an overflow of private rows.

    One reservation of addresses holds both, so that a row id names a row of either: ids below
    `num_rows` lie in the pool, those from `num_rows` to `total_rows` in the overflow, which
    takes memory only where it is written. The overflow lets a generation go on when the
    sidecar grants nothing more; nothing in it is ever shared.

    The mapping does not need the owner: its pages live as long as somebody maps them.
    """

    def __init__(
        self, descriptor: int, pool_bytes: int, row_bytes: int, overflow_rows: int
    ) -> None:
        """Map `pool_bytes` of `descriptor` as rows of `row_bytes`; the descriptor may be closed.

        Raises `PoolLost` if the descriptor is shorter than that, `MemoryError` if the addresses
        cannot be had.
        """
        actual = os.fstat(descriptor).st_size
        if actual < pool_bytes:
            raise PoolLost(f"the pool has {actual} bytes where {pool_bytes} were announced")
        self.row_bytes = row_bytes
        self.num_rows = pool_bytes // row_bytes
        # The overflow starts at the first whole row after the pool's pages, so that ids go on
        # without a gap in meaning: rows that would straddle the border are never used.
        span = -(-pool_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.first_overflow_row = -(-span // row_bytes)
        self.total_rows = self.first_overflow_row + overflow_rows
        self._bytes = -(-self.total_rows * row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._address = _map(
            None, self._bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1
        )
        self._release = weakref.finalize(self, _libc.munmap, self._address, self._bytes)
        _map(self._address, pool_bytes, mmap.MAP_SHARED | _MAP_FIXED, descriptor)

    def rows(self, bits: npt.DTypeLike) -> npt.NDArray[Any]:
        """All rows as raw bits, `[total_rows, row_bytes / itemsize]`, without a copy.

        Writing is safe only to rows this session holds on lease or in the overflow.
        """
        buffer = (ctypes.c_uint8 * self._bytes).from_address(self._address)
        # Views keep the buffer alive, and the buffer the mapping.
        buffer.mapping = self  # type: ignore[attr-defined]
        flat = np.frombuffer(memoryview(buffer), dtype=np.uint8)
        used = flat[: self.total_rows * self.row_bytes].view(bits)
        return used.reshape(self.total_rows, -1)


def _map(address: int | None, length: int, flags: int, descriptor: int) -> int:
    result = _libc.mmap(address, length, _PROT_READ_WRITE, flags, descriptor, 0)
    if result == _FAILED:
        code = ctypes.get_errno()
        raise MemoryError(f"cannot map {length} bytes: {os.strerror(code)}")
    return int(result)
