"""Block tables to messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memshare.client.allocator import Rows
from memshare.client.block_tables import BlockTable
from memshare.client.messages import MESSAGE_BYTES, finish_snapshot
from memshare.v1 import manager_pb2
from memshare.wire import packing


def seal_message(table: BlockTable, start: int) -> manager_pb2.SealTokens:
    """The blocks from `start` on."""
    end = table.sealed
    return manager_pb2.SealTokens(
        request_id=table.request_id,
        generation=table.generation,
        start=start,
        num_tokens=end - start,
        key_rows=packing.pack(table.blocks[:, start:end], packing.INT32),
        candidates=packing.pack(table.candidates[start:end], packing.INT32),
    )


def snapshot_messages(
    session_id: int,
    epoch: int,
    tables: Sequence[BlockTable],
    held: npt.NDArray[np.bool_],
    pinned: Rows,
) -> list[manager_pb2.SnapshotRequest]:
    """Everything this session holds: blocks that no table names as its own, then the tables.

    `held` marks the blocks that are leased to this session, `pinned` lists those that other
    sessions may name.
    """
    unnamed = held.copy()
    for table in tables:
        blocks, shared = table.blocks[:, : table.sealed], table.shared[:, : table.sealed]
        # A donor whose own request is over is named here alone, and is on lease all the same.
        unnamed[blocks[~shared]] = False
    leased = np.flatnonzero(unnamed).astype(np.int32)
    parts = [
        manager_pb2.SnapshotRequest(
            lease=manager_pb2.SnapshotLease(rows=packing.pack(piece, packing.INT32))
        )
        for piece in np.array_split(leased, max(1, -(-leased.nbytes // MESSAGE_BYTES)))
    ]
    parts[0].lease.pinned_rows = packing.pack(pinned, packing.INT32)
    parts += [manager_pb2.SnapshotRequest(table=_whole_table(table)) for table in tables]
    return finish_snapshot(parts, session_id, epoch)


def _whole_table(table: BlockTable) -> manager_pb2.SnapshotTable:
    sealed = table.sealed
    return manager_pb2.SnapshotTable(
        request_id=table.request_id,
        generation=table.generation,
        num_tokens=sealed,
        key_rows=packing.pack(table.blocks[:, :sealed], packing.INT32),
        shared=packing.pack(table.shared[:, :sealed], packing.UINT8),
        accumulated_error=float(table.errors[:sealed].sum()),
        candidates=packing.pack(table.candidates[:sealed], packing.INT32),
        private=table.private,
    )
