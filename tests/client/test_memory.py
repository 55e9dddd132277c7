"""The pool and the private overflow behind it, as one array of rows."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from memshare.client.memory import MappedPool
from memshare.wire.errors import PoolLost

PAGE = mmap.PAGESIZE


@pytest.fixture
def pool_file():
    """(descriptor, bytes) of a memfd like the owner's."""
    descriptor = os.memfd_create("under-test")
    os.ftruncate(descriptor, 4 * PAGE)
    yield descriptor
    os.close(descriptor)


def mappings():
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "under-test" in line
    ]


def test_ids_go_on_from_the_pool_into_the_overflow(pool_file):
    pool = MappedPool(pool_file, 4 * PAGE, 64, overflow_rows=10)
    rows = pool.rows(np.int32)
    assert pool.num_rows == pool.first_overflow_row == 4 * PAGE // 64
    assert rows.shape == (pool.num_rows + 10, 16)
    assert rows.flags.c_contiguous
    rows[:] = np.arange(len(rows))[:, None]
    # What lies in the pool is the file's, the rest is not.
    written = np.frombuffer(os.pread(pool_file, 8 * PAGE, 0), np.int32).reshape(-1, 16)
    assert len(written) == pool.num_rows
    assert (written == np.arange(pool.num_rows)[:, None]).all()
    assert (rows[pool.num_rows :, 0] == np.arange(pool.num_rows, pool.num_rows + 10)).all()


def test_no_row_straddles_the_border(pool_file):
    pool = MappedPool(pool_file, 4 * PAGE, 96, overflow_rows=5)
    assert pool.num_rows == 4 * PAGE // 96
    assert pool.num_rows * 96 <= 4 * PAGE
    assert pool.first_overflow_row * 96 >= 4 * PAGE
    rows = pool.rows(np.uint8)
    before = os.pread(pool_file, 4 * PAGE, 0)
    rows[pool.first_overflow_row :] = 255
    assert os.pread(pool_file, 4 * PAGE, 0) == before
    assert len(rows) - pool.first_overflow_row == 5


def test_a_pool_that_is_no_whole_number_of_pages_keeps_its_border(pool_file):
    pool = MappedPool(pool_file, 3 * PAGE + 100, 100, overflow_rows=3)
    rows = pool.rows(np.uint8)
    rows[: pool.num_rows] = 1
    rows[pool.first_overflow_row :] = 2
    assert (rows[: pool.num_rows] == 1).all()


def test_writing_is_seen_by_all_who_map_the_pool(pool_file):
    one, two = (MappedPool(pool_file, 4 * PAGE, 64, overflow_rows=4) for _ in range(2))
    one.rows(np.int32)[7] = 42
    assert (two.rows(np.int32)[7] == 42).all()
    one.rows(np.int32)[one.first_overflow_row] = 43
    assert (two.rows(np.int32)[two.first_overflow_row] == 0).all()


def test_the_mapping_outlives_its_descriptor():
    descriptor = os.memfd_create("under-test")
    os.ftruncate(descriptor, PAGE)
    pool = MappedPool(descriptor, PAGE, 64, overflow_rows=0)
    os.close(descriptor)
    rows = pool.rows(np.int32)
    rows[:] = 5
    assert (rows == 5).all()


def test_a_view_keeps_the_mapping_and_the_last_one_ends_it(pool_file):
    pool = MappedPool(pool_file, 4 * PAGE, 64, overflow_rows=4)
    view = pool.rows(np.int32)[3:5]
    assert len(mappings()) == 1
    del pool
    gc.collect()
    view[:] = 9
    assert (view == 9).all()
    assert len(mappings()) == 1
    del view
    gc.collect()
    assert mappings() == []


def test_the_overflow_takes_memory_only_where_it_is_written(pool_file):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    before = resident()
    pool = MappedPool(pool_file, 4 * PAGE, 64, overflow_rows=(4 << 30) // 64)
    rows = pool.rows(np.int32)
    rows[-1] = 1
    assert resident() - before < 16 << 20


def test_a_descriptor_that_is_too_short_is_refused(pool_file):
    with pytest.raises(PoolLost, match=f"the pool has {4 * PAGE} bytes where {5 * PAGE} were"):
        MappedPool(pool_file, 5 * PAGE, 64, overflow_rows=0)


def test_addresses_that_cannot_be_had_are_refused(pool_file):
    with pytest.raises(MemoryError, match="cannot map"):
        MappedPool(pool_file, 4 * PAGE, 64, overflow_rows=1 << 50)
    read_only = os.open(f"/proc/self/fd/{pool_file}", os.O_RDONLY)
    with pytest.raises(MemoryError, match="cannot map"):
        MappedPool(read_only, 4 * PAGE, 64, overflow_rows=0)
    os.close(read_only)
    assert mappings() == []


def test_the_end_of_a_forked_child_leaves_the_parents_mapping(pool_file):
    pool = MappedPool(pool_file, 4 * PAGE, 64, overflow_rows=4)
    rows = pool.rows(np.int32)
    rows[:] = 1
    child = os.fork()
    if child == 0:
        rows[0] = 2  # the pool's pages are shared
        rows[pool.first_overflow_row] = 2  # those of the overflow are not
        del rows, pool
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (rows[0] == 2).all()
    assert (rows[pool.first_overflow_row] == 1).all()
    rows[1] = 3
    assert (rows[1] == 3).all()
