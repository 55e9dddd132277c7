"""The sealed row tables of one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from memshare.manager.rows import Mask, Rows
from memshare.wire.errors import InvalidArgument

MAX_TOKENS: Final = 1 << 24
MAX_REQUESTS: Final = 1 << 16
MAX_CANDIDATES: Final = 64
"""Candidates of a token that an engine may name."""

KEY: Final = 0
VALUE: Final = 1

# States of an entry: it names its own row, awaits a decision, or names a donor's row.
OWN: Final = 0
PENDING: Final = 1
SHARED: Final = 2


class RequestTable:
    """Which row holds the K and the V of each sealed token in each layer.

    All arrays are [kinds, num_layers, capacity] (kind, layer, token); entries from `sealed` on
    mean nothing. Where a row is a block, `kinds` is 1, layers are groups and tokens are blocks.
    A `private` request shares within itself alone.
    `errors` holds the relative squared distance of shared entries. `taint` is the first
    position that is shared approximately, -1 if none is. `indexed` tokens are in the agent's
    index, `examined[s]` tokens have been examined by stage s of the policy. `changed` is the
    state's clock when entries were last dropped, or the request opened.

    Raises `InvalidArgument` for an impossible `first_token`.
    """

    def __init__(
        self,
        request_id: int,
        generation: int,
        first_token: int,
        num_layers: int,
        kinds: int = 2,
        changed: int = 0,
        private: bool = False,
    ) -> None:
        if not 0 <= first_token <= MAX_TOKENS:
            raise InvalidArgument(
                f"first_token is {first_token}, must be 0 to {MAX_TOKENS}", field="first_token"
            )
        self.request_id = request_id
        self.generation = generation
        self.first_token = first_token
        self.num_layers = num_layers
        self.kinds = kinds
        self.changed = changed
        self.private = private
        self.sealed = 0
        self.indexed = 0
        self.examined: list[int] = []
        self.taint = -1
        self.error = 0.0
        self.pending_error = 0.0
        self.shadow_error = 0.0
        self.decisions: set[int] = set()
        self._rows = np.empty((kinds, num_layers, 0), np.int32)
        self._entries = np.empty((kinds, num_layers, 0), np.uint8)
        self._errors = np.empty((kinds, num_layers, 0), np.float32)
        self._shadow = np.empty((kinds, num_layers, 0), np.uint8)
        # [capacity, width]; of no width until the engine names some.
        self._candidates = np.empty((0, 0), np.int32)

    @property
    def per_token(self) -> int:
        """Rows that a token takes."""
        return self.kinds * self.num_layers

    @property
    def rows(self) -> Rows:
        """Rows of the sealed tokens, a view [kinds, num_layers, sealed]."""
        return self._rows[:, :, : self.sealed]

    @property
    def entries(self) -> npt.NDArray[np.uint8]:
        """States of the sealed entries, a view [kinds, num_layers, sealed]."""
        return self._entries[:, :, : self.sealed]

    @property
    def errors(self) -> npt.NDArray[np.float32]:
        """Distances of the sealed entries, a view [kinds, num_layers, sealed]."""
        return self._errors[:, :, : self.sealed]

    @property
    def shadow(self) -> npt.NDArray[np.uint8]:
        """Entries that `observe` counted (1) or used as a donor (2), like `rows`."""
        return self._shadow[:, :, : self.sealed]

    def append(
        self,
        rows: Rows,
        entries: npt.NDArray[np.uint8] | None = None,
        candidates: Rows | None = None,
    ) -> None:
        """Seal tokens: `rows` is [kinds, num_layers, n]; `entries` defaults to OWN.

        `candidates` [n, k] are what `candidates_of` gives back.
        """
        start, end = self.sealed, self.sealed + rows.shape[2]
        if end > self._rows.shape[2]:
            self._grow(max(end, 2 * self._rows.shape[2]))
        self._rows[:, :, start:end] = rows
        self._entries[:, :, start:end] = OWN if entries is None else entries
        self._errors[:, :, start:end] = 0
        self._shadow[:, :, start:end] = 0
        self.sealed = end
        self._append_candidates(start, end, candidates)

    def _append_candidates(self, start: int, end: int, candidates: Rows | None) -> None:
        # Each call may be of another width: the greatest so far is kept, filled up with -1.
        length, width = self._candidates.shape
        wanted = 0 if candidates is None else candidates.shape[1]
        if not max(width, wanted):
            return
        if end > length or wanted > width:
            kept = min(start, length)
            grown = np.full((self._rows.shape[2], max(width, wanted)), -1, np.int32)
            grown[:kept, :width] = self._candidates[:kept]
            self._candidates = grown
        self._candidates[start:end] = -1
        if candidates is not None:
            self._candidates[start:end, :wanted] = candidates

    def candidates_of(self, start: int, end: int) -> Rows:
        """Earlier tokens of this request that the engine takes for similar, [n, k], -1 for none.

        k is 0 until it names some.
        """
        if not self._candidates.shape[1]:
            return np.empty((end - start, 0), np.int32)
        return self._candidates[start:end]

    def _grow(self, capacity: int) -> None:
        self._rows = _grown(self._rows, capacity, self.sealed)
        self._entries = _grown(self._entries, capacity, self.sealed)
        self._errors = _grown(self._errors, capacity, self.sealed)
        self._shadow = _grown(self._shadow, capacity, self.sealed)

    def truncate(self, keep: int, generation: int) -> Rows:
        """Drop tokens from `keep` on.

        Returns the rows that the dropped entries named, a view [kinds, num_layers, dropped] that
        the next `append` overwrites.
        """
        dropped = self.rows[:, :, keep:]
        self.sealed = keep
        self.generation = generation
        self.indexed = min(self.indexed, keep)
        self.examined = [min(frontier, keep) for frontier in self.examined]
        if self.taint >= keep:
            self.taint = -1
        self.error = float(self.errors.sum(dtype=np.float64))
        return dropped

    def shared_by_layer(self) -> npt.NDArray[np.uint32]:
        """Shared entries, [kinds, num_layers]."""
        counts: npt.NDArray[np.uint32] = (self.entries == SHARED).sum(axis=2, dtype=np.uint32)
        return counts

    def own(self, end: int) -> Mask:
        """Entries of the tokens before `end` that name their own row, [kinds, num_layers, end]."""
        return np.equal(self._entries[:, :, :end], OWN)

    def clear_shadow(self) -> None:
        """Forget what `observe` counted."""
        self._shadow[:] = 0
        self.shadow_error = 0.0


def require_whole(
    table: RequestTable, key_rows: Rows, value_rows: Rows, *, none: bool = False
) -> Rows:
    """Both joined, flat. Raises `InvalidArgument` unless they are whole tokens of a table, at
    least one if not `none`.
    """
    rows = np.concatenate((key_rows, value_rows), axis=None, dtype=np.int32, casting="safe")
    if value_rows.size != (table.kinds - 1) * key_rows.size:
        what = "as many" if table.kinds == 2 else "with a block layout none"
        raise InvalidArgument(
            f"request {table.request_id}: {key_rows.size} key rows and {value_rows.size} value "
            f"rows: there must be {what}",
            field="value_rows",
        )
    if not (rows.size or none) or rows.size % table.per_token:
        what = "tokens" if table.kinds == 2 else "blocks"
        raise InvalidArgument(
            f"request {table.request_id}: {rows.size} rows are no whole number of {what} of "
            f"{table.per_token} rows each, or none",
            field="key_rows",
        )
    return rows


def require_candidates(
    table: RequestTable, candidates: Rows | None, start: int, count: int
) -> Rows | None:
    """Candidates of blocks [start, start + count) as [count, k], None if there are none.

    Raises `InvalidArgument` unless each is -1 or a block before the one it is for.
    """
    if candidates is None or not candidates.size:
        return None
    if table.kinds != 1:
        raise InvalidArgument("only blocks have candidates, not rows", field="candidates")
    width, rest = divmod(candidates.size, max(count, 1))
    if rest or not count or width > MAX_CANDIDATES:
        raise InvalidArgument(
            f"{candidates.size} candidates for {count} blocks: need as many for each, at most "
            f"{MAX_CANDIDATES}",
            field="candidates",
        )
    shaped = candidates.reshape(count, width)
    ends = np.arange(start, start + count, dtype=np.int64)[:, None]
    wrong = (shaped < -1) | (shaped >= ends)
    if wrong.any():
        block, place = (int(at[0]) for at in np.nonzero(wrong))
        raise InvalidArgument(
            f"candidate {shaped[block, place]} of block {start + block} is no earlier block and "
            "not -1",
            field="candidates",
        )
    return shaped


def require_room(requests: Mapping[int, RequestTable]) -> None:
    """Raise `InvalidArgument` unless a session with these may have one more."""
    if len(requests) >= MAX_REQUESTS:
        raise InvalidArgument(
            f"{len(requests)} requests are open, the most that a session may have: close some",
            field="request_id",
            max_requests=MAX_REQUESTS,
        )


def _grown(array: npt.NDArray[Any], capacity: int, used: int) -> npt.NDArray[Any]:
    grown = np.empty((*array.shape[:2], capacity), array.dtype)
    grown[:, :, :used] = array[:, :, :used]
    return grown
