"""The pool: all there or refused, and of one size for ever."""

from __future__ import annotations

import fcntl
import os

import numpy as np
import pytest

from memshare.gpu_agent import pool as pool_module
from memshare.gpu_agent.pool import HostPool, available_bytes
from memshare.wire.errors import PoolExhausted


def test_a_pool_that_does_not_fit_is_refused_with_what_is_available() -> None:
    with pytest.raises(PoolExhausted, match=r"1,125,899,906,842,624 bytes.* bytes of memory are"):
        HostPool.create(1 << 50)


def test_a_refusal_of_the_kernel_is_no_crash_and_leaks_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PoolExhausted):
        HostPool.create(1 << 20)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_nobody_can_truncate_grow_or_unseal_the_pool() -> None:
    pool = HostPool.create(1 << 16)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    pool.close()


def test_an_unsealed_descriptor_is_refused() -> None:
    descriptor = os.memfd_create("other")
    with pytest.raises(ValueError, match="not a sealed pool"):
        HostPool.attach(descriptor, bytes(16))
    os.close(descriptor)


def test_all_mappings_see_the_same_zeroed_rows() -> None:
    pool = HostPool.create(1000)
    other = HostPool.attach(os.dup(pool.descriptor), pool.pool_id)
    rows = pool.rows(64, 4)
    assert rows.shape == (15, 16)
    assert rows.dtype == np.uint32
    assert not rows.any()
    rows[3] = 5
    assert (other.rows(64, 2)[3, ::2] == 5).all()
    pool.close()
    assert (other.rows(64, 4)[3] == 5).all()
    other.close()


def test_the_descriptor_does_not_leak_into_other_programs() -> None:
    pool = HostPool.create(1 << 12)
    assert not os.get_inheritable(pool.descriptor)
    pool.close()


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "0::/box/inner\n",
        "/sys/fs/cgroup/box/memory.max": "5000",
        "/sys/fs/cgroup/box/memory.current": "4000",
        "/sys/fs/cgroup/box/memory.stat": "anon 1\ninactive_file 300\n",
        "/sys/fs/cgroup/box/inner/memory.max": "max",
        "/sys/fs/cgroup/box/inner/memory.current": "4000",
        "/sys/fs/cgroup/box/inner/memory.stat": "anon 1\n",
    }

    def read(path: object) -> str:
        try:
            return files[str(path)]
        except KeyError:
            raise FileNotFoundError(str(path)) from None

    monkeypatch.setattr(pool_module.Path, "read_text", read)
    assert available_bytes() == 1300
