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

KEY: Final = 0
VALUE: Final = 1

# States of an entry: it names its own row, awaits a decision, or names a donor's row.
OWN: Final = 0
PENDING: Final = 1
SHARED: Final = 2


class RequestTable:
    """Which row holds the K and the V of each sealed token in each layer.

    All arrays are [2, num_layers, capacity] (kind, layer, token); entries from `sealed` on mean
    nothing. `errors` holds the relative squared distance of shared entries. `taint` is the first
    position that is shared approximately, -1 if none is. `indexed` tokens are in the agent's
    index, `examined[s]` tokens have been examined by stage s of the policy.

    Raises `InvalidArgument` for an impossible `first_token`.
    """

    def __init__(self, request_id: int, generation: int, first_token: int, num_layers: int) -> None:
        if not 0 <= first_token <= MAX_TOKENS:
            raise InvalidArgument(
                f"first_token is {first_token}, must be 0 to {MAX_TOKENS}", field="first_token"
            )
        self.request_id = request_id
        self.generation = generation
        self.first_token = first_token
        self.num_layers = num_layers
        self.sealed = 0
        self.indexed = 0
        self.examined: list[int] = []
        self.taint = -1
        self.error = 0.0
        self.pending_error = 0.0
        self.shadow_error = 0.0
        self.decisions: set[int] = set()
        self._rows = np.empty((2, num_layers, 0), np.int32)
        self._entries = np.empty((2, num_layers, 0), np.uint8)
        self._errors = np.empty((2, num_layers, 0), np.float32)
        self._shadow = np.empty((2, num_layers, 0), np.uint8)

    @property
    def rows(self) -> Rows:
        """Rows of the sealed tokens, a view [2, num_layers, sealed]."""
        return self._rows[:, :, : self.sealed]

    @property
    def entries(self) -> npt.NDArray[np.uint8]:
        """States of the sealed entries, a view [2, num_layers, sealed]."""
        return self._entries[:, :, : self.sealed]

    @property
    def errors(self) -> npt.NDArray[np.float32]:
        """Distances of the sealed entries, a view [2, num_layers, sealed]."""
        return self._errors[:, :, : self.sealed]

    @property
    def shadow(self) -> npt.NDArray[np.uint8]:
        """Entries that `observe` counted (1) or used as a donor (2), like `rows`."""
        return self._shadow[:, :, : self.sealed]

    def append(self, rows: Rows, entries: npt.NDArray[np.uint8] | None = None) -> None:
        """Seal tokens: `rows` is [2, num_layers, n]; `entries` defaults to OWN."""
        start, end = self.sealed, self.sealed + rows.shape[2]
        if end > self._rows.shape[2]:
            self._grow(max(end, 2 * self._rows.shape[2]))
        self._rows[:, :, start:end] = rows
        self._entries[:, :, start:end] = OWN if entries is None else entries
        self._errors[:, :, start:end] = 0
        self._shadow[:, :, start:end] = 0
        self.sealed = end

    def _grow(self, capacity: int) -> None:
        self._rows = _grown(self._rows, capacity, self.sealed)
        self._entries = _grown(self._entries, capacity, self.sealed)
        self._errors = _grown(self._errors, capacity, self.sealed)
        self._shadow = _grown(self._shadow, capacity, self.sealed)

    def truncate(self, keep: int, generation: int) -> Rows:
        """Drop tokens from `keep` on.

        Returns the rows that the dropped entries named, a view [2, num_layers, dropped] that the
        next `append` overwrites.
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
        """Shared entries, [2, num_layers]."""
        counts: npt.NDArray[np.uint32] = (self.entries == SHARED).sum(axis=2, dtype=np.uint32)
        return counts

    def own(self, end: int) -> Mask:
        """Entries of the tokens before `end` that name their own row, [2, num_layers, end]."""
        return np.equal(self._entries[:, :, :end], OWN)

    def clear_shadow(self) -> None:
        """Forget what `observe` counted."""
        self._shadow[:] = 0
        self.shadow_error = 0.0


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
