"""What the manager was told of each request's blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from memshare.client.tables import TableDecision
from memshare.v1 import manager_pb2
from memshare.wire import packing

Int32 = npt.NDArray[np.int32]

MAX_CANDIDATES: Final = 4
"""Earlier blocks that an engine may name as similar to one block."""
NO_CANDIDATE: Final = -1


class BlockTable:
    """One request's sealed blocks, mirrored from the engine's own block table.

    Only the engine's thread changes this; the session guards what its own threads read.

    Attributes:
        blocks: int32 `[num_groups, capacity]`, the block of each entry.
        shared: bool `[num_groups, capacity]`, entries that point at a donor's block.
        errors: float64 `[capacity]`, per index the distances of its shared entries.
        candidates: int32 `[capacity, MAX_CANDIDATES]`, what the engine takes for similar.
        sealed: blocks the manager was told of.
        opened: whether the manager knows this request.
        private: whether it shares within itself alone.
    """

    def __init__(self, request_id: int, num_groups: int, private: bool = False) -> None:
        self.request_id = request_id
        self.private = private
        self.generation = 1
        self.num_groups = num_groups
        self.blocks: Int32 = np.empty((num_groups, 0), np.int32)
        self.shared: npt.NDArray[np.bool_] = np.empty((num_groups, 0), np.bool_)
        self.errors = np.empty(0, np.float64)
        self.candidates: Int32 = np.empty((0, MAX_CANDIDATES), np.int32)
        self.sealed = 0
        self.opened = False

    def append(self, blocks: Int32, candidates: Int32) -> None:
        """Add `[num_groups, n]` blocks with their candidates `[n, MAX_CANDIDATES]`."""
        start, end = self.sealed, self.sealed + blocks.shape[1]
        if end > self.blocks.shape[1]:
            self._grow(max(end, 2 * self.blocks.shape[1], 16))
        self.blocks[:, start:end] = blocks
        self.shared[:, start:end] = False
        self.errors[start:end] = 0.0
        self.candidates[start:end] = candidates
        self.sealed = end

    def truncate(self, keep: int) -> None:
        """Forget the blocks from `keep` on: they belong to a new generation."""
        self.sealed = min(self.sealed, keep)
        self.generation += 1

    def holds(self, group: int, index: int, block: int) -> bool:
        """Whether an entry is sealed, its request's own, and this very block."""
        return (
            0 <= group < self.num_groups
            and 0 <= index < self.sealed
            and self.blocks[group, index] == block
            and not self.shared[group, index]
        )

    def share(self, group: int, index: int, donor: int, distance: float) -> None:
        """Note that an entry points at a donor's block."""
        self.blocks[group, index] = donor
        self.shared[group, index] = True
        self.errors[index] += distance

    def _grow(self, capacity: int) -> None:
        used = self.sealed
        for name in ("blocks", "shared"):
            old = getattr(self, name)
            new = np.empty((self.num_groups, capacity), old.dtype)
            new[:, :used] = old[:, :used]
            setattr(self, name, new)
        errors, candidates = self.errors, self.candidates
        self.errors = np.empty(capacity, np.float64)
        self.errors[:used] = errors[:used]
        self.candidates = np.empty((capacity, MAX_CANDIDATES), np.int32)
        self.candidates[:used] = candidates[:used]


@dataclass(frozen=True)
class BlockDecision:
    """Entries of one request to point at donors' blocks. Arrays have one element per item.

    A donor is entry `donors` of request `donor_requests` at `donor_generations`, or with request
    0 a block that another engine keeps pinned.
    """

    decision_id: int
    table: BlockTable
    groups: npt.NDArray[np.uint16]
    targets: Int32
    target_blocks: Int32
    donor_blocks: Int32
    distances: npt.NDArray[np.float32]
    donors: Int32
    donor_requests: npt.NDArray[np.uint64]
    donor_generations: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, decision: TableDecision, table: BlockTable) -> BlockDecision:
        """A decision as the manager sent it, for the request it names."""
        return cls(
            decision.decision_id,
            table,
            decision.layers,
            decision.targets,
            decision.target_rows,
            decision.donor_rows,
            decision.distances,
            decision.donors,
            decision.donor_requests,
            decision.donor_generations,
        )


@dataclass(frozen=True)
class PinRequest:
    """Blocks that another engine would point at. Arrays have one element per item."""

    pin_id: int
    blocks: Int32
    request_ids: npt.NDArray[np.uint64]
    generations: npt.NDArray[np.uint32]
    indices: Int32
    groups: npt.NDArray[np.uint16]

    @classmethod
    def from_proto(cls, message: manager_pb2.PinRows) -> PinRequest:
        """Raises `InvalidArgument` if the arrays differ in length."""
        blocks = packing.unpack(message.rows, packing.INT32, "rows")
        count = len(blocks)
        return cls(
            message.pin_id,
            blocks,
            packing.unpack(message.request_ids, packing.UINT64, "request_ids", count),
            packing.unpack(message.generations, packing.UINT32, "generations", count),
            packing.unpack(message.indices, packing.INT32, "indices", count),
            packing.unpack(message.groups, packing.UINT16, "groups", count),
        )
