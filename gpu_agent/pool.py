"""The memory that the agent owns: one region, divided into rows of one size."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import psutil

from memshare.v1 import common_pb2
from memshare.wire.errors import PoolExhausted

POOL_ID_BYTES: Final = 16
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Between two pieces a signal can end a long allocation.
_PIECE_BYTES: Final = 256 << 20


class Pool(Protocol):
    """What the worker needs of a pool, whichever device holds it."""

    pool_id: bytes
    num_bytes: int

    def rows(self, row_bytes: int, itemsize: int) -> npt.NDArray[Any]:
        """The pool as raw element bits [num_rows, row_bytes / itemsize], shared, writable.

        Two calls with different `row_bytes` alias the same memory: who calls must know that
        nobody uses the other division.
        """
        ...


class HostPool:
    """A pool in host memory: a sealed memfd that other processes map.

    The memory lives as long as any process has it open or mapped. Nobody can truncate it, so no
    holder meets SIGBUS.
    """

    def __init__(self, descriptor: int, pool_id: bytes, num_bytes: int) -> None:
        self.descriptor = descriptor
        self.pool_id = pool_id
        self.num_bytes = num_bytes
        self._mapping: npt.NDArray[np.uint8] | None = None

    @classmethod
    def create(cls, num_bytes: int) -> HostPool:
        """Allocate a pool of zeros, every page of it.

        Raises `PoolExhausted`, naming what was asked and what is available, if it does not fit.
        """
        available = available_bytes()
        # Checked first: past a container's limit the kernel kills instead of refusing.
        if num_bytes > available:
            raise _too_large(num_bytes, available)
        descriptor = os.memfd_create("memshare-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            for start in range(0, num_bytes, _PIECE_BYTES):
                os.posix_fallocate(descriptor, start, min(_PIECE_BYTES, num_bytes - start))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise _too_large(num_bytes, available) from error
            raise
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, secrets.token_bytes(POOL_ID_BYTES), num_bytes)

    @classmethod
    def attach(cls, descriptor: int, pool_id: bytes) -> HostPool:
        """A pool that another process created; takes over `descriptor`.

        Raises `ValueError` if its size could still be changed under the mapping.
        """
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError(f"descriptor {descriptor} is not a sealed pool")
        return cls(descriptor, pool_id, os.fstat(descriptor).st_size)

    def describe(self) -> common_pb2.PoolDescriptor:
        """The descriptor before the pool is divided into rows."""
        return common_pb2.PoolDescriptor(pool_id=self.pool_id, pool_bytes=self.num_bytes)

    def rows(self, row_bytes: int, itemsize: int) -> npt.NDArray[Any]:
        """See `Pool.rows`."""
        if self._mapping is None:
            mapping = mmap.mmap(self.descriptor, self.num_bytes)
            self._mapping = np.frombuffer(mapping, dtype=np.uint8)
        num_rows = self.num_bytes // row_bytes
        bits = self._mapping[: num_rows * row_bytes].view(np.dtype(f"u{itemsize}"))
        return bits.reshape(num_rows, row_bytes // itemsize)

    def close(self) -> None:
        """Close the descriptor. What is mapped, here or elsewhere, stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def available_bytes() -> int:
    """Memory this process can still get without swapping: the host's or its cgroup's."""
    available: int = psutil.virtual_memory().available
    try:
        group = Path("/proc/self/cgroup").read_text().split("0::/", 1)[1].splitlines()[0]
    except (OSError, IndexError):
        return available
    root = Path("/sys/fs/cgroup")
    for directory in (root / group, *(root / group).parents):
        if not directory.is_relative_to(root):
            break
        try:
            limit = (directory / "memory.max").read_text().strip()
            used = int((directory / "memory.current").read_text())
            statistics = dict(
                line.split() for line in (directory / "memory.stat").read_text().splitlines()
            )
        except (OSError, ValueError):
            continue
        if limit != "max":
            # The page cache of files counts as used, but the kernel gives it up.
            reclaimable = int(statistics.get("inactive_file", 0))
            available = min(available, int(limit) - used + reclaimable)
    return max(available, 0)


def _too_large(num_bytes: int, available: int) -> PoolExhausted:
    return PoolExhausted(
        f"a pool of {num_bytes:,} bytes does not fit, {available:,} bytes of memory are "
        "available: choose a smaller pool_bytes or free memory",
        asked=num_bytes,
        available=available,
    )
