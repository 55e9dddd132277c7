"""Rows an engine holds and has not written yet."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from memshare.wire.errors import PoolExhausted

Rows = npt.NDArray[np.int32]


class RowAllocator:
    """Hands out leased rows, then overflow rows; never asks anyone.

    Safe to use from the engine's thread and the session's background thread at once.
    """

    def __init__(self, first_overflow_row: int, total_rows: int) -> None:
        self._lock = threading.Lock()
        self._leased: Rows = np.empty(0, np.int32)
        self._overflow_next = first_overflow_row
        self._overflow_end = total_rows
        self._overflow_free: Rows = np.empty(0, np.int32)
        self._first_overflow_row = first_overflow_row
        self.overflow_in_use = 0

    @property
    def available(self) -> int:
        """Leased rows that can be handed out."""
        return len(self._leased)

    def add_lease(self, rows: Rows) -> None:
        """Take rows that the manager granted."""
        with self._lock:
            self._leased = np.concatenate([self._leased, rows])

    def take(self, count: int) -> Rows | None:
        """`count` leased rows in the order of their grant, or None if there are fewer."""
        with self._lock:
            if count > len(self._leased):
                return None
            taken, self._leased = self._leased[:count], self._leased[count:]
            return taken

    def take_overflow(self, count: int) -> Rows:
        """`count` private rows. Raises `PoolExhausted` when the overflow is used up too."""
        with self._lock:
            reused, self._overflow_free = np.split(
                self._overflow_free, [min(count, len(self._overflow_free))]
            )
            fresh = count - len(reused)
            if self._overflow_next + fresh > self._overflow_end:
                self._overflow_free = np.concatenate([reused, self._overflow_free])
                raise PoolExhausted(
                    f"{count} rows are needed, no leased row is left and the private overflow "
                    f"of {self._overflow_end - self._first_overflow_row} rows is used up: run "
                    "fewer or shorter requests, give the agent a larger pool, or raise "
                    "overflow_bytes"
                )
            rows = np.arange(self._overflow_next, self._overflow_next + fresh, dtype=np.int32)
            self._overflow_next += fresh
            self.overflow_in_use += count
            return np.concatenate([reused, rows])

    def give_back(self, rows: Rows) -> None:
        """Return rows that no table names: leased and overflow rows each to their list."""
        with self._lock:
            private = rows >= self._first_overflow_row
            self._leased = np.concatenate([rows[~private], self._leased])
            self._overflow_free = np.concatenate([self._overflow_free, rows[private]])
            self.overflow_in_use -= int(private.sum())

    def trim(self, keep: int) -> Rows:
        """Remove and return the leased rows beyond the first `keep`."""
        with self._lock:
            surplus, self._leased = self._leased[keep:], self._leased[:keep]
            return surplus

    def held(self) -> Rows:
        """A copy of the leased rows that are in no table."""
        with self._lock:
            return self._leased.copy()
