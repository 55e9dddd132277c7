"""Row tables: where the K and the V of each token of each layer really lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

KEY: Final = 0
VALUE: Final = 1
# Tokens whose rows are allocated together, so that each layer's rows are contiguous.
BLOCK_TOKENS: Final = 16


@dataclass(frozen=True)
class TableDecision:
    """Entries to point at donors' rows. All arrays have one element per item."""

    decision_id: int
    request_id: int
    generation: int
    layers: npt.NDArray[np.uint16]
    kinds: npt.NDArray[np.uint8]
    targets: Int32
    target_rows: Int32
    donor_rows: Int32
    deltas: Int32
    distances: npt.NDArray[np.float32]
    # Only for engines that share by their own block tables; empty otherwise.
    donors: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    donor_requests: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    donor_generations: npt.NDArray[np.uint32] = field(
        default_factory=lambda: np.empty(0, np.uint32)
    )


class RowTables:
    """One request's tables. Only the engine's thread calls this; the session guards what its
    own threads read.

    Attributes:
        rows: int32 `[2, num_layers, capacity]`, K rows then V rows.
        deltas: int32 `[num_layers, capacity]`, by how many positions a K row is rotated when
            it is read; 0 for a token's own row.
        shared: bool `[2, num_layers, capacity]`, entries that point at a donor's row.
        errors: float64 `[capacity]`, per token the distances of its shared entries.
        length: tokens that have rows in use.
        allocated: tokens that have rows at all.
        final: tokens that are written and will not change: they may be sealed.
        sealed: tokens the manager was told of.
        opened: whether the manager knows this request.
        overflow_from: first token with a row in the overflow; nothing from there on is sealed.
    """

    def __init__(self, request_id: int, num_layers: int, first_token: int = 0) -> None:
        self.request_id = request_id
        self.generation = 1
        self.num_layers = num_layers
        self.first_token = first_token
        self.rows: Int32 = np.empty((2, num_layers, 0), np.int32)
        self.deltas: Int32 = np.empty((num_layers, 0), np.int32)
        self.shared: npt.NDArray[np.bool_] = np.empty((2, num_layers, 0), np.bool_)
        self.errors: npt.NDArray[np.float64] = np.zeros(0)
        self.shared_entries: npt.NDArray[np.int64] = np.zeros((2, num_layers), np.int64)
        self.length = 0
        self.allocated = 0
        self.final = 0
        self.sealed = 0
        self.overflow_from: int | None = None
        self.opened = False

    def rows_needed(self, tokens: int) -> int:
        """Rows to allocate before `tokens` more tokens fit."""
        missing = max(0, self.length + tokens - self.allocated)
        return -(-missing // BLOCK_TOKENS) * BLOCK_TOKENS * 2 * self.num_layers

    def add_rows(self, rows: Int32, private: bool) -> None:
        """Append rows for whole blocks of tokens, contiguous for each kind and layer."""
        tokens = len(rows) // (2 * self.num_layers)
        end = self.allocated + tokens
        self._reserve(end)
        block = rows.reshape(2, self.num_layers, tokens)
        self.rows[:, :, self.allocated : end] = block
        if private and self.overflow_from is None:
            self.overflow_from = self.allocated
        self.allocated = end

    def seal_limit(self) -> int:
        """Tokens that may be sealed now."""
        return self.final if self.overflow_from is None else min(self.final, self.overflow_from)

    def tokens_in_overflow(self, first_overflow_row: int) -> npt.NDArray[np.int64]:
        """The tokens whose rows lie in the overflow, in their order."""
        start = self.allocated if self.overflow_from is None else self.overflow_from
        # A token's rows are allocated together, so that one of them tells for all.
        rows = self.rows[KEY, 0, start : self.allocated]
        return np.flatnonzero(rows >= first_overflow_row) + start

    def apply(self, decision: TableDecision) -> npt.NDArray[np.bool_]:
        """Point entries at their donors' rows, where the tables still are as the decision
        supposes. Returns which items were applied, bool `[items]`.

        Only safe between two steps, while nothing reads the tables.
        """
        layers, kinds = decision.layers.astype(np.int64), decision.kinds.astype(np.int64)
        targets = decision.targets
        if decision.generation != self.generation:
            return np.zeros(len(targets), np.bool_)
        valid = (targets >= 0) & (targets < self.sealed) & (layers < self.num_layers)
        valid &= kinds <= VALUE
        spot = (kinds * valid, layers * valid, targets * valid)
        valid &= self.rows[spot] == decision.target_rows
        valid &= ~self.shared[spot]
        spot = (kinds[valid], layers[valid], targets[valid])
        self.rows[spot] = decision.donor_rows[valid]
        self.shared[spot] = True
        keys = valid & (kinds == KEY)
        self.deltas[layers[keys], targets[keys]] = decision.deltas[keys]
        np.add.at(self.shared_entries, (kinds[valid], layers[valid]), 1)
        np.add.at(self.errors, targets[valid], decision.distances[valid])
        return valid

    def truncate(self, length: int) -> Int32:
        """Drop the tokens from `length` on. Returns the rows that were never sealed and go
        back to the allocator; sealed ones are the manager's to release.
        """
        keep_allocated = min(self.allocated, -(-length // BLOCK_TOKENS) * BLOCK_TOKENS)
        # A partly kept block that was sealed beyond the cut has lost those rows to the
        # manager: its free slots are allocated anew, as a shorter last block.
        if self.sealed > length:
            keep_allocated = length
        first_loose = max(keep_allocated, self.sealed)
        loose = self.rows[:, :, first_loose : self.allocated].reshape(-1).copy()
        dropped = self.shared[:, :, length : self.length]
        self.shared_entries -= dropped.sum(axis=2)
        self.shared[:, :, length:] = False
        self.deltas[:, length:] = 0
        self.errors[length:] = 0
        self.length, self.allocated = length, keep_allocated
        self.final, self.sealed = min(self.final, length), min(self.sealed, length)
        if self.overflow_from is not None and self.overflow_from >= self.allocated:
            self.overflow_from = None
        self.generation += 1
        return loose

    def unsealed_rows(self) -> Int32:
        """Rows of the tokens that the manager was not told of."""
        return self.rows[:, :, self.sealed : self.allocated].reshape(-1).copy()

    def _reserve(self, tokens: int) -> None:
        capacity = self.rows.shape[2]
        if tokens <= capacity:
            return
        extra = max(tokens, 2 * capacity, 256) - capacity
        # Deltas and flags of new slots are 0: an own row, not rotated.
        self.rows = np.concatenate(
            [self.rows, np.zeros((2, self.num_layers, extra), np.int32)], axis=2
        )
        self.deltas = np.concatenate(
            [self.deltas, np.zeros((self.num_layers, extra), np.int32)], axis=1
        )
        self.shared = np.concatenate(
            [self.shared, np.zeros((2, self.num_layers, extra), np.bool_)], axis=2
        )
        self.errors = np.concatenate([self.errors, np.zeros(extra)])
