"""Rows that are held and not written yet: never handed out twice, never lost."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memshare.client.allocator import RowAllocator
from memshare.wire.errors import PoolExhausted

FIRST, TOTAL = 1000, 1040


def rows(*ids):
    return np.array(ids, np.int32)


def test_leased_rows_are_handed_out_in_the_order_of_their_grant():
    allocator = RowAllocator(FIRST, TOTAL)
    allocator.add_lease(rows(5, 3))
    allocator.add_lease(rows(9))
    assert allocator.take(2).tolist() == [5, 3]
    assert allocator.available == 1


def test_a_lease_that_is_too_small_is_not_touched():
    allocator = RowAllocator(FIRST, TOTAL)
    allocator.add_lease(rows(1, 2))
    assert allocator.take(3) is None
    assert allocator.held().tolist() == [1, 2]


def test_the_overflow_serves_what_it_has_and_not_half_of_more():
    allocator = RowAllocator(FIRST, TOTAL)
    assert allocator.take_overflow(30).tolist() == list(range(1000, 1030))
    with pytest.raises(PoolExhausted, match=r"overflow of 40 rows is used up: run fewer"):
        allocator.take_overflow(11)
    assert allocator.overflow_in_use == 30
    assert allocator.take_overflow(10).tolist() == list(range(1030, 1040))


def test_overflow_rows_are_used_again():
    allocator = RowAllocator(FIRST, TOTAL)
    allocator.give_back(allocator.take_overflow(40)[:5])
    assert allocator.overflow_in_use == 35
    assert sorted(allocator.take_overflow(5)) == [1000, 1001, 1002, 1003, 1004]
    with pytest.raises(PoolExhausted):
        allocator.take_overflow(1)


def test_a_refused_overflow_keeps_what_was_free():
    allocator = RowAllocator(FIRST, TOTAL)
    allocator.give_back(allocator.take_overflow(40)[:5])
    with pytest.raises(PoolExhausted):
        allocator.take_overflow(6)
    assert len(allocator.take_overflow(5)) == 5


def test_returned_rows_go_to_their_own_lists():
    allocator = RowAllocator(FIRST, TOTAL)
    allocator.give_back(rows(7, 1003, 8))
    assert allocator.held().tolist() == [7, 8]


def test_trimming_keeps_the_oldest_and_hands_over_the_others():
    allocator = RowAllocator(FIRST, TOTAL)
    allocator.add_lease(rows(1, 2, 3, 4))
    assert allocator.trim(3).tolist() == [4]
    assert allocator.trim(3).tolist() == []
    assert allocator.available == 3


def test_what_is_held_is_told_as_a_copy():
    allocator = RowAllocator(FIRST, TOTAL)
    allocator.add_lease(rows(1, 2))
    allocator.held()[:] = 99
    assert allocator.take(2).tolist() == [1, 2]


def test_two_threads_never_get_the_same_row():
    allocator = RowAllocator(20_000, 20_000)
    taken = [[], []]

    def engine(mine):
        while len(mine) < 4000:
            got = allocator.take(7)
            if got is not None:
                mine.extend(got[:5].tolist())
                allocator.give_back(got[5:])

    threads = [threading.Thread(target=engine, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for start in range(0, 10_000, 100):
        allocator.add_lease(np.arange(start, start + 100, dtype=np.int32))
    for thread in threads:
        thread.join()
    everything = taken[0] + taken[1] + allocator.held().tolist()
    assert sorted(everything) == list(range(10_000))


class RowsAreInOnePlace(RuleBasedStateMachine):
    """Each row is with the allocator or with its taker, whatever happens."""

    def __init__(self):
        super().__init__()
        self.allocator = RowAllocator(FIRST, TOTAL)
        self.taken: list[int] = []
        self.returned: list[int] = []
        self.granted = 0

    @rule(count=st.integers(0, 20))
    def grant(self, count):
        self.allocator.add_lease(np.arange(self.granted, self.granted + count, dtype=np.int32))
        self.granted += count

    @rule(count=st.integers(0, 25))
    def take(self, count):
        got = self.allocator.take(count)
        if got is not None:
            self.taken.extend(got.tolist())

    @rule(count=st.integers(0, 25))
    def overflow(self, count):
        private = sum(row >= FIRST for row in self.taken)
        if private + count > TOTAL - FIRST:
            with pytest.raises(PoolExhausted):
                self.allocator.take_overflow(count)
        else:
            self.taken.extend(self.allocator.take_overflow(count).tolist())

    @rule(data=st.data())
    def give_back(self, data):
        some = data.draw(st.lists(st.sampled_from(self.taken), unique=True)) if self.taken else []
        self.allocator.give_back(np.array(some, np.int32))
        self.taken = [row for row in self.taken if row not in some]

    @rule(keep=st.integers(0, 10))
    def trim(self, keep):
        self.returned.extend(self.allocator.trim(keep).tolist())

    @invariant()
    def every_row_is_in_one_place(self):
        assert len(set(self.taken)) == len(self.taken)
        leased = [row for row in self.taken if row < FIRST]
        known = leased + self.allocator.held().tolist() + self.returned
        assert sorted(known) == list(range(self.granted))
        assert self.allocator.overflow_in_use == len(self.taken) - len(leased)


TestRowsAreInOnePlace = RowsAreInOnePlace.TestCase
