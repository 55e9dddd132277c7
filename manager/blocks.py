"""A pool whose rows are blocks of engines with free lists of their own."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from memshare.manager.rows import NOBODY, Mask, RowPool, Rows, RowState

ASKING: Final = -2
"""A slot that holds nothing: whatever is pinned in its name is another's."""


class BlockPool(RowPool):
    """A row that nothing needs any more goes back on lease to its holder, at once; only without a
    holder it becomes free.

    The holder's own entries may name a row any number of times. `borrowed[r]` is how many of its
    references and pins are of others than the holder, `lent[r]` whether the holder has promised
    not to reuse it; the promise ends when nobody borrows the row any more.
    """

    kinds: ClassVar[int] = 1

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.borrowed = np.zeros(num_rows, np.int32)
        self.lent = np.zeros(num_rows, np.bool_)
        self._returned: list[tuple[npt.NDArray[np.int32], Rows]] = []

    def require_sealable(self, rows: Rows, slot: int, field: str) -> None:
        """Raise, as `require_leased`, unless the session leases `rows` or they are live and its."""
        self.require_rows(rows, field)
        state = self.state[rows]
        fit = (state == RowState.LEASED) | (state == RowState.LIVE)
        self._require_all(rows, fit, slot, field)

    def seal(self, rows: Rows, slot: int) -> None:
        """Distinct rows of a session become or stay live; one entry more names each."""
        leased = int((self.state[rows] == RowState.LEASED).sum())
        self.state[rows] = RowState.LIVE
        self.references[rows] += 1
        self._counts[RowState.LEASED] -= leased
        self._counts[RowState.LIVE] += leased
        self._leased[slot + 1] -= leased

    def add_references(self, rows: Rows, slot: int) -> None:
        """Count one more entry of a session for each naming of a live row; rows may come twice."""
        super().add_references(rows, slot)
        self._borrow(rows, slot, 1)

    def drop_references(self, rows: Rows, slot: int) -> None:
        """Count one entry less for each naming; rows that nothing needs any more are given up."""
        self._borrow(rows, slot, -1)
        super().drop_references(rows, slot)

    def pin(self, rows: Rows, slot: int) -> None:
        """Keep rows alive for a session, or for ASKING; rows may come twice."""
        super().pin(rows, slot)
        self._borrow(rows, slot, 1)

    def unpin(self, rows: Rows, slot: int) -> None:
        """Undo `pin`; rows that nothing needs any more are given up."""
        self._borrow(rows, slot, -1)
        super().unpin(rows, slot)

    def leave(self, rows: Rows, slot: int, step: int) -> None:
        """A session's entries leave distinct rows. Its engine knows when it may reuse them."""
        self.drop_references(rows, slot)

    def _borrow(self, rows: Rows, slot: int, change: int) -> None:
        rows = rows[self.holder[rows] != slot]
        if not len(rows):
            return
        np.add.at(self.borrowed, rows, change)
        over = np.unique(rows[self.lent[rows] & (self.borrowed[rows] == 0)])
        if len(over):
            self.lent[over] = False
            self._returned.append((self.holder[over], over))

    def take_returned(self) -> dict[int, Rows]:
        """Rows, by the holder's slot, whose holders need not keep their promise any longer."""
        if not self._returned:
            return {}
        holders, rows = (np.concatenate(column) for column in zip(*self._returned, strict=True))
        self._returned = []
        return {int(slot): rows[holders == slot] for slot in np.unique(holders)}

    def offered(self, rows: Rows, slot: int) -> Mask:
        """Which donors' rows a session may name: its own, and what others lend."""
        mask: Mask = (self.holder[rows] == slot) | self.lent[rows]
        return mask

    def _give_up(self, rows: Rows) -> None:
        held = self.holder[rows] != NOBODY
        if not held.all():
            self.release(rows[~held])
            rows = rows[held]
        self._counts[RowState.LIVE] -= len(rows)
        self._counts[RowState.LEASED] += len(rows)
        self.state[rows] = RowState.LEASED
        self.generation[rows] += 1
        self._charge(self._leased, rows, 1)

    def clear_slot(self, slot: int, start: int, limit: int) -> int:
        """As of any pool; what others still name of an ended session is lent by nobody."""
        end = super().clear_slot(slot, start, limit)
        self.lent[start:end] &= self.holder[start:end] != NOBODY
        # Whoever gets the slot next promised nothing.
        self._returned = [
            (holders[holders != slot], rows[holders != slot]) for holders, rows in self._returned
        ]
        return end
