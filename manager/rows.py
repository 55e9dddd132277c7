"""Who holds each row of the pool, and how often it is named."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from memshare.wire.errors import InvalidArgument, PoolExhausted, RowNotHeld

Rows = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

NOBODY: Final = -1
UNKNOWN_TENANT: Final = -1
RETRY_AFTER: Final = 0.05
_WINDOW: Final = 1 << 16


class RowState(IntEnum):
    """Where a row is in its life."""

    FREE = 0
    LEASED = 1
    LIVE = 2
    QUARANTINED = 3


class RowPool:
    """One struct of arrays over `num_rows` rows; every operation is a batch.

    Methods named `require_*` validate and change nothing. All others trust their arguments:
    callers validate first. `references[r]` is the number of sealed table entries that name row
    r, `pins[r]` the number of undecided proposals that offer it as a donor. A row is LIVE while
    either is above zero. `holder` is a session's slot or NOBODY, `tenant` the number of the
    tenant whose data the row holds or held last.

    Not safe for use from several threads.
    """

    kinds: ClassVar[int] = 2
    """Rows that hold one token in one layer."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.state = np.zeros(num_rows, np.uint8)
        self.references = np.zeros(num_rows, np.int32)
        self.pins = np.zeros(num_rows, np.int32)
        self.holder = np.full(num_rows, NOBODY, np.int32)
        self.generation = np.zeros(num_rows, np.uint32)
        self.tenant = np.full(num_rows, UNKNOWN_TENANT, np.int32)
        self.quarantine: dict[int, list[tuple[int, Rows]]] = {}
        self._stamp = np.zeros(num_rows, np.int32)
        self._counts = np.array([num_rows, 0, 0, 0], np.int64)
        # By slot, NOBODY first.
        self._held = np.zeros(16, np.int64)
        self._leased = np.zeros(16, np.int64)
        # No row below this one is free.
        self._lowest = 0

    @property
    def free(self) -> int:
        """Number of rows that can be granted."""
        return int(self._counts[RowState.FREE])

    def counts(self) -> dict[RowState, int]:
        """Number of rows in each state."""
        return {state: int(self._counts[state]) for state in RowState}

    def held_by(self, slot: int) -> int:
        """Rows charged to a session: leased, live or in quarantine."""
        return int(self._held[slot + 1]) if slot + 1 < len(self._held) else 0

    def leased_by(self, slot: int) -> int:
        """Rows that a session leases and no table names."""
        return int(self._leased[slot + 1]) if slot + 1 < len(self._leased) else 0

    def quarantined_by(self, slot: int) -> int:
        """Rows of a session that wait for the end of a step."""
        return sum(len(rows) for _, rows in self.quarantine.get(slot, ()))

    def require_rows(self, rows: Rows, field: str) -> None:
        """Raise `InvalidArgument` unless all ids are in the pool and none comes twice."""
        self.require_range(rows, field)
        order = np.arange(len(rows), dtype=np.int32)
        self._stamp[rows] = order
        again = self._stamp[rows] != order
        if again.any():
            row = int(rows[again][0])
            raise InvalidArgument(
                f"{field}: row {row} (generation {self.generation[row]}) comes twice",
                field=field, row=row, generation=self.generation[row],
            )  # fmt: skip

    def require_range(self, rows: Rows, field: str) -> None:
        """Raise `InvalidArgument` unless all ids are in the pool."""
        if not len(rows):
            return
        lowest, highest = int(rows.min()), int(rows.max())
        if lowest < 0 or highest >= self.num_rows:
            row = lowest if lowest < 0 else highest
            raise InvalidArgument(
                f"{field}: row {row} is not in 0 to {self.num_rows - 1}", field=field, row=row
            )

    def require_leased(self, rows: Rows, slot: int, field: str) -> None:
        """Raise unless all `rows` are distinct and leased by the session in `slot`.

        `InvalidArgument` for impossible ids, `RowNotHeld` for a row in another state or of
        another session.
        """
        self.require_rows(rows, field)
        self._require_all(rows, self.state[rows] == RowState.LEASED, slot, field)

    def require_sealable(self, rows: Rows, slot: int, field: str) -> None:
        """Raise, as `require_leased`, unless the session may name `rows` as its own."""
        self.require_leased(rows, slot, field)

    def _require_all(self, rows: Rows, fit: Mask, slot: int, field: str) -> None:
        wrong = ~fit | (self.holder[rows] != slot)
        if wrong.any():
            row = int(rows[wrong][0])
            state = RowState(self.state[row]).name.lower()
            whose = {slot: "this", NOBODY: "no"}.get(int(self.holder[row]), "another")
            raise RowNotHeld(
                f"{field}: row {row} (generation {self.generation[row]}) is {state} and held by "
                f"{whose} session; {int(wrong.sum())} of {len(rows)} rows are not this one's "
                "leases",
                field=field, row=row, generation=self.generation[row], state=state,
            )  # fmt: skip

    def grant(self, count: int, slot: int) -> Rows:
        """Lease the lowest `count` free rows to a session, all or none.

        One run of rows is taken if there is one near the lowest free row. Raises
        `PoolExhausted` with the number of free rows.
        """
        if count > self.free:
            raise PoolExhausted(
                f"{count} rows were asked for, {self.free} of {self.num_rows} are free",
                retry_after=RETRY_AFTER,
                asked=count,
                free=self.free,
            )
        rows = self._lowest_free(count)
        self.state[rows] = RowState.LEASED
        self.holder[rows] = slot
        self._counts[RowState.FREE] -= count
        self._counts[RowState.LEASED] += count
        self._hold(slot, count)
        self._leased[slot + 1] += count
        if rows[0] == self._lowest:
            run = int(rows[-1]) - self._lowest + 1 == count
            self._lowest = int(rows[-1] if run else rows[0]) + 1
        return rows

    def _lowest_free(self, count: int) -> Rows:
        found: list[npt.NDArray[np.int64]] = []
        missing, start = count, self._lowest
        while missing > 0:
            window = self.state[start : start + max(_WINDOW, 4 * count)]
            free = np.flatnonzero(window == RowState.FREE)
            free += start
            if not found and len(free):
                self._lowest = int(free[0])
                if len(free) >= count:
                    runs = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] < count)
                    first = int(runs[0]) if len(runs) else 0
                    free = free[first:]
            found.append(free[:missing])
            missing -= len(found[-1])
            start += len(window)
        return np.concatenate(found).astype(np.int32)

    def _hold(self, slot: int, count: int) -> None:
        if slot + 1 >= len(self._held):
            more = np.zeros(slot + 16, np.int64)
            self._held = np.concatenate((self._held, more))
            self._leased = np.concatenate((self._leased, more))
        self._held[slot + 1] += count

    def set_holder(self, rows: Rows, slot: int) -> None:
        """Charge rows to another session, or to NOBODY."""
        self._charge(self._held, rows, -1)
        self.holder[rows] = slot
        self._hold(slot, len(rows))

    def _charge(self, account: npt.NDArray[np.int64], rows: Rows, change: int) -> None:
        counts = np.bincount(self.holder[rows] + 1)
        account[: len(counts)] += change * counts

    def seal(self, rows: Rows, slot: int) -> None:
        """Leased rows of a session become live, named once."""
        self.state[rows] = RowState.LIVE
        self.references[rows] = 1
        self._counts[RowState.LEASED] -= len(rows)
        self._counts[RowState.LIVE] += len(rows)
        self._leased[slot + 1] -= len(rows)

    def adopt(self, rows: Rows, slot: int, state: RowState) -> None:
        """Take free rows out of the pool for a session that held them before."""
        self.state[rows] = state
        self.holder[rows] = slot
        self._counts[RowState.FREE] -= len(rows)
        self._counts[state] += len(rows)
        self._hold(slot, len(rows))
        if state is RowState.LEASED:
            self._leased[slot + 1] += len(rows)

    def add_references(self, rows: Rows, slot: int) -> None:
        """Count one more entry of a session for each naming of a live row; rows may come twice."""
        np.add.at(self.references, rows, 1)

    def drop_references(self, rows: Rows, slot: int) -> None:
        """Count one entry less for each naming; rows that nothing needs any more are given up."""
        np.subtract.at(self.references, rows, 1)
        self._give_up_unneeded(rows)

    def pin(self, rows: Rows, slot: int) -> None:
        """Keep donors of a session's proposal alive until it is decided; rows may come twice."""
        np.add.at(self.pins, rows, 1)

    def unpin(self, rows: Rows, slot: int) -> None:
        """Undo `pin`; rows that nothing needs any more are given up."""
        np.subtract.at(self.pins, rows, 1)
        self._give_up_unneeded(rows)

    def leave(self, rows: Rows, slot: int, step: int) -> None:
        """A session's entries leave distinct rows for those of donors, before its next step."""
        self.release(rows, quarantine=(slot, step))

    def _give_up_unneeded(self, rows: Rows) -> None:
        unneeded = (self.references[rows] == 0) & (self.pins[rows] == 0)
        if not unneeded.all():
            rows = rows[unneeded]
        if len(rows):
            order = np.arange(len(rows), dtype=np.int32)
            self._stamp[rows] = order
            last = self._stamp[rows] == order
            self._give_up(rows if last.all() else rows[last])

    def _give_up(self, rows: Rows) -> None:
        self.release(rows)

    def offered(self, rows: Rows, slot: int) -> Mask:
        """Which donors' rows a session may name: here all."""
        return np.ones(len(rows), np.bool_)

    def release(self, rows: Rows, quarantine: tuple[int, int] | None = None) -> None:
        """The one way out of use: distinct rows become free.

        With `quarantine=(slot, step)` they first wait until that session's step is over.
        """
        to = RowState.FREE if quarantine is None else RowState.QUARANTINED
        before = np.bincount(self.state[rows], minlength=4)
        if before[RowState.LEASED]:
            self._charge(self._leased, rows[self.state[rows] == RowState.LEASED], -1)
        self._counts -= before
        self._counts[to] += len(rows)
        self.state[rows] = to
        self.references[rows] = 0
        if quarantine is not None:
            slot, step = quarantine
            self.set_holder(rows, slot)
            self.quarantine.setdefault(slot, []).append((step, rows))
            return
        self._charge(self._held, rows, -1)
        self.holder[rows] = NOBODY
        self.generation[rows] += 1
        self._lowest = min(self._lowest, int(rows.min()))

    def end_step(self, slot: int, step: int) -> int:
        """Free what a session released up to `step`; returns the number of rows."""
        waiting = self.quarantine.get(slot, [])
        over = [rows for since, rows in waiting if since <= step]
        if not over:
            return 0
        left = [(since, rows) for since, rows in waiting if since > step]
        if left:
            self.quarantine[slot] = left
        else:
            del self.quarantine[slot]
        rows = np.concatenate(over)
        self.release(rows)
        return len(rows)

    def clear_slot(self, slot: int, start: int, limit: int) -> int:
        """Free, within rows [start, start + limit), what an ended session still holds.

        Live rows, which other sessions name, pass to NOBODY. Call `forget_quarantine` first.
        Returns where to go on.
        """
        end = min(start + limit, self.num_rows)
        held = np.flatnonzero(self.holder[start:end] == slot)
        if len(held):
            rows = (held + start).astype(np.int32)
            live = self.state[rows] == RowState.LIVE
            if live.any():
                self.set_holder(rows[live], NOBODY)
            if not live.all():
                self.release(rows[~live])
        return end

    def forget_quarantine(self, slot: int) -> None:
        """Drop the list of a session whose rows `clear_slot` frees; no step of it runs."""
        self.quarantine.pop(slot, None)
