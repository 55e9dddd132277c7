"""Rows equal bit for bit, across the requests of one tenant.

An open-addressing hash table over an append-only log of rows, worked on in whole batches: an
operation takes as many vectorised steps as its longest probe, not as many as there are rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from memshare.gpu_agent.rows import Bools, Int32, UInt64

# Equal rows that are kept as candidates, oldest first; more would only lengthen probes.
MAX_EQUAL: Final = 4
_FIRST_CAPACITY: Final = 1 << 12
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
# A token that is not below any `live` count.
_NEVER_LIVE: Final = np.iinfo(np.int32).max
_Int64 = npt.NDArray[np.int64]

_ENTRY: Final = np.dtype(
    [("hash", "u8"), ("plane", "i4"), ("segment", "i4"), ("token", "i4"), ("row", "i4")]
)
_SEGMENT: Final = np.dtype([("session", "u8"), ("request", "u8"), ("live", "i4")])


class ExactTable:
    """Where the rows of one tenant and layout are, by content. Safe for several threads.

    An entry belongs to a *segment*: tokens that one request added between two truncations. It is
    live while its token is below the segment's `live` count, so forgetting a request or its tail
    is one number. Memory is bounded by `max_entries`; past it the oldest entries go first.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max(max_entries, 1)
        self._lock = threading.Lock()
        self._entries = np.zeros(min(_FIRST_CAPACITY, self._max_entries), _ENTRY)
        self._count = 0
        self._segments = np.zeros(16, _SEGMENT)
        self._free_segments = list(range(15, -1, -1))
        self._slots = self._empty_slots()

    def __len__(self) -> int:
        """Entries in the log, live or not."""
        return self._count

    def open_segment(self, session: int, request: int) -> int:
        """A segment for tokens of this request."""
        with self._lock:
            if not self._free_segments:
                known = len(self._segments)
                self._segments = np.concatenate((self._segments, np.zeros(known, _SEGMENT)))
                self._free_segments = list(range(2 * known - 1, known - 1, -1))
            segment = self._free_segments.pop()
            self._segments[segment] = (session, request, _NEVER_LIVE)
            return segment

    def truncate(self, segments: list[int], keep: int) -> None:
        """Entries of tokens from `keep` on are no longer found."""
        with self._lock:
            live = self._segments["live"]
            live[segments] = np.minimum(live[segments], keep)

    def insert(
        self, segment: int, planes: Int32, tokens: Int32, rows: Int32, hashes: UInt64
    ) -> None:
        """Add rows [n] of a segment, all in order of age; those of hash 0 are left out."""
        wanted = hashes != 0
        count = int(wanted.sum())
        with self._lock:
            # A batch larger than the bound goes in parts.
            entries = np.empty(count, _ENTRY)
            entries["hash"], entries["plane"] = hashes[wanted], planes[wanted]
            entries["token"], entries["row"] = tokens[wanted], rows[wanted]
            entries["segment"] = segment
            for start in range(0, count, max(self._max_entries // 2, 1)):
                self._append(entries[start : start + max(self._max_entries // 2, 1)])

    def find(
        self, segments: list[int], planes: Int32, tokens: Int32, hashes: UInt64, allowed: Bools
    ) -> npt.NDArray[np.void]:
        """Candidates [n, MAX_EQUAL] for target rows [n], the oldest first.

        A structured array of `session`, `request`, `token` and `row` (-1: none). `segments` are
        those of the targets' request; in it only the entries with `allowed[plane, token]` count,
        and no entry younger than the target's own does. Hashes may collide: compare the rows.
        """
        n = len(hashes)
        found = np.full((n, MAX_EQUAL), -1, np.int64)
        fill = np.zeros(n, np.int64)
        own = np.full(n, np.iinfo(np.int64).max)
        with self._lock:
            is_own = self._marked(segments)
            for at, ids in self._probe(hashes, planes):
                entries = self._entries[ids]
                mine = is_own[entries["segment"]]
                self_match = mine & (entries["token"] == tokens[at])
                own[at[self_match]] = ids[self_match]
                inside = mine & (entries["token"] < allowed.shape[1])
                token = np.where(inside, entries["token"], 0)
                usable = ~mine | (inside & allowed[entries["plane"], token])
                usable &= fill[at] < MAX_EQUAL
                at, ids = at[usable], ids[usable]
                found[at, fill[at]] = ids
                fill[at] += 1
            found[found > own[:, None]] = -1
            order = np.argsort(np.where(found < 0, np.iinfo(np.int64).max, found), axis=1)
            found = np.take_along_axis(found, order, axis=1)
            return self._describe(found)

    def forget(self, segments: list[int], planes: Int32, tokens: Int32, hashes: UInt64) -> None:
        """Take out single rows [n] of a request: they are no longer found."""
        with self._lock:
            is_own = self._marked(segments)
            for at, ids in self._probe(hashes, planes):
                entries = self._entries[ids]
                match = is_own[entries["segment"]] & (entries["token"] == tokens[at])
                self._entries["token"][ids[match]] = _NEVER_LIVE

    def _probe(self, hashes: UInt64, planes: Int32) -> Iterator[tuple[_Int64, _Int64]]:
        """Step by step (which of the given, the live entry equal to it), never one twice."""
        pending = np.flatnonzero(hashes != 0)
        slot = self._home(hashes[pending], planes[pending])
        while len(pending):
            ids = self._slots[slot]
            occupied = ids >= 0
            pending, slot, ids = pending[occupied], slot[occupied], ids[occupied]
            entries = self._entries[ids]
            equal = (entries["hash"] == hashes[pending]) & (entries["plane"] == planes[pending])
            equal &= entries["token"] < self._segments["live"][entries["segment"]]
            yield pending[equal], ids[equal].astype(np.int64)
            slot = (slot + 1) & (len(self._slots) - 1)

    def _marked(self, segments: list[int]) -> Bools:
        marks = np.zeros(len(self._segments), np.bool_)
        marks[segments] = True
        return marks

    def _describe(self, found: _Int64) -> npt.NDArray[np.void]:
        out = np.zeros(
            found.shape, [("session", "u8"), ("request", "u8"), ("token", "i4"), ("row", "i4")]
        )
        entries = self._entries[found]
        segments = self._segments[entries["segment"]]
        out["session"], out["request"] = segments["session"], segments["request"]
        out["token"] = entries["token"]
        out["row"] = np.where(found >= 0, entries["row"], -1)
        return out

    def _append(self, entries: npt.NDArray[np.void]) -> None:
        if self._count + len(entries) > len(self._entries):
            self._rebuild(len(entries))
        ids = np.arange(self._count, self._count + len(entries))
        self._entries[ids] = entries
        self._count += len(entries)
        self._place(ids)

    def _place(self, pending: _Int64) -> None:
        """Put entries into the table, the older of equals first."""
        equals = np.zeros(len(pending), np.int64)
        slot = self._home(self._entries["hash"][pending], self._entries["plane"][pending])
        while len(pending):
            occupant = self._slots[slot]
            empty = occupant < 0
            mine, other = self._entries[pending], self._entries[occupant]
            same = ~empty & (other["hash"] == mine["hash"]) & (other["plane"] == mine["plane"])
            live = other["token"] < self._segments["live"][other["segment"]]
            claim = empty | (same & ~live)
            # Of several assignments to one slot NumPy keeps the last.
            self._slots[slot[claim][::-1]] = pending[claim][::-1]
            won = claim & (self._slots[slot] == pending)
            equals += same & live
            going = ~won & (equals < MAX_EQUAL)
            # Who lost a claim looks at the winner next.
            slot = np.where(claim, slot, (slot + 1) & (len(self._slots) - 1))
            pending, slot, equals = pending[going], slot[going], equals[going]

    def _rebuild(self, needed: int) -> None:
        """Drop what is no longer live and make room for `needed` more entries."""
        entries = self._entries[: self._count]
        live = entries["token"] < self._segments["live"][entries["segment"]]
        keep = entries[live][-(self._max_entries - needed) :] if self._max_entries > needed else []
        capacity = min(max(2 * (len(keep) + needed), _FIRST_CAPACITY), self._max_entries)
        self._entries = np.zeros(capacity, _ENTRY)
        self._entries[: len(keep)] = keep
        self._count = len(keep)
        dead = np.flatnonzero(self._segments["live"] == 0)
        self._free_segments = dead[::-1].tolist()
        self._slots = self._empty_slots()
        self._place(np.arange(self._count))

    def _empty_slots(self) -> Int32:
        # At most half full, so that probes stay short.
        size = 1 << (2 * len(self._entries) - 1).bit_length()
        return np.full(size, -1, np.int32)

    def _home(self, hashes: UInt64, planes: Int32) -> _Int64:
        bits = len(self._slots).bit_length() - 1
        mixed = (hashes ^ (planes.astype(np.uint64) * _GOLDEN)) * _GOLDEN
        return (mixed >> np.uint64(64 - bits)).astype(np.int64)
