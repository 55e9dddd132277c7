"""Row tables to messages and decisions from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from memshare.client.allocator import Rows
from memshare.client.options import SessionOptions
from memshare.client.tables import KEY, VALUE, RowTables, TableDecision
from memshare.v1 import manager_pb2
from memshare.wire import packing
from memshare.wire.block_layout import BlockLayout
from memshare.wire.layout import RowLayout
from memshare.wire.version import MAX_PROTOCOL, MIN_PROTOCOL, VERSION

# Far below the largest message, so that a long request's tables go out in pieces.
MESSAGE_BYTES: Final = 4 << 20
# The K and the V row and a flag for each.
_BYTES_PER_ENTRY: Final = 10


class OpenedTable(Protocol):
    """A request as the manager knows it, whatever its table holds."""

    request_id: int
    generation: int


def hello_message(
    layout: RowLayout | BlockLayout,
    options: SessionOptions,
    token: bytes,
    resume: manager_pb2.Resume | None,
) -> manager_pb2.Hello:
    """What an engine introduces itself with."""
    hello = manager_pb2.Hello(
        min_protocol=MIN_PROTOCOL,
        max_protocol=MAX_PROTOCOL,
        client_version=VERSION,
        capabilities=options.capabilities,
        token=token,
        pid=os.getpid(),
        engine=options.engine,
        tenant=options.tenant,
        max_rows=options.max_rows,
        row_mode_obstacle=options.row_mode_obstacle,
        resume=resume,
    )
    if isinstance(layout, BlockLayout):
        hello.block_layout.CopyFrom(layout.to_proto())
    else:
        hello.layout.CopyFrom(layout.to_proto())
    if isinstance(options.policy, str):
        hello.policy_name = options.policy
    elif options.policy is not None:
        hello.policy.CopyFrom(options.policy)
    return hello


def open_message(tables: RowTables) -> manager_pb2.OpenRequest:
    """The opening of a request."""
    return manager_pb2.OpenRequest(
        request_id=tables.request_id,
        generation=tables.generation,
        first_token=tables.first_token,
    )


def seal_message(tables: RowTables, end: int) -> manager_pb2.SealTokens:
    """The rows of the tokens from the last sealed one up to `end`."""
    start = tables.sealed
    return manager_pb2.SealTokens(
        request_id=tables.request_id,
        generation=tables.generation,
        start=start,
        num_tokens=end - start,
        key_rows=packing.pack(tables.rows[KEY, :, start:end], packing.INT32),
        value_rows=packing.pack(tables.rows[VALUE, :, start:end], packing.INT32),
    )


def close_message(tables: Sequence[OpenedTable]) -> manager_pb2.CloseRequests:
    """The end of several requests."""
    return manager_pb2.CloseRequests(
        request_ids=packing.pack([t.request_id for t in tables], packing.UINT64),
        generations=packing.pack([t.generation for t in tables], packing.UINT32),
    )


def decision_from_proto(message: manager_pb2.ShareDecision) -> TableDecision:
    """The decision of a message. Raises `InvalidArgument` if its arrays differ in length."""
    targets = packing.unpack(message.targets, packing.INT32, "targets")
    count = len(targets)
    named = count if message.donors else 0
    return TableDecision(
        decision_id=message.decision_id,
        request_id=message.request_id,
        generation=message.generation,
        layers=packing.unpack(message.layers, packing.UINT16, "layers", count),
        kinds=packing.unpack(message.kinds, packing.UINT8, "kinds", count),
        targets=targets,
        target_rows=packing.unpack(message.target_rows, packing.INT32, "target_rows", count),
        donor_rows=packing.unpack(message.donor_rows, packing.INT32, "donor_rows", count),
        deltas=packing.unpack(message.deltas, packing.INT32, "deltas", count),
        distances=packing.unpack(message.distances, packing.FLOAT32, "distances", count),
        donors=packing.unpack(message.donors, packing.INT32, "donors", named),
        donor_requests=packing.unpack(
            message.donor_requests, packing.UINT64, "donor_requests", named
        ),
        donor_generations=packing.unpack(
            message.donor_generations, packing.UINT32, "donor_generations", named
        ),
    )


def truncate_message(
    tables: OpenedTable, generation: int, num_tokens: int
) -> manager_pb2.TruncateRequest:
    """A rollback from `generation` to the tables' present one."""
    return manager_pb2.TruncateRequest(
        request_id=tables.request_id,
        generation=generation,
        new_generation=tables.generation,
        num_tokens=num_tokens,
    )


def snapshot_messages(
    session_id: int,
    epoch: int,
    opened: Sequence[RowTables],
    unopened: Sequence[RowTables],
    held: Rows,
    num_rows: int,
) -> list[manager_pb2.SnapshotRequest]:
    """Everything this session holds: rows in no sealed table entry, then the sealed tables."""
    unsealed = np.concatenate([held, *(t.unsealed_rows() for t in (*opened, *unopened))])
    leased = unsealed[unsealed < num_rows]
    parts = [
        manager_pb2.SnapshotRequest(
            lease=manager_pb2.SnapshotLease(rows=packing.pack(piece, packing.INT32))
        )
        for piece in np.array_split(leased, max(1, -(-leased.nbytes // MESSAGE_BYTES)))
    ]
    for table in opened:
        step = tokens_per_message(table.num_layers)
        # A table that has sealed nothing any more still is an open request.
        for start in range(0, max(1, table.sealed), step):
            end = min(start + step, table.sealed)
            parts.append(manager_pb2.SnapshotRequest(table=_table_part(table, start, end)))
    return finish_snapshot(parts, session_id, epoch)


def finish_snapshot(
    parts: list[manager_pb2.SnapshotRequest], session_id: int, epoch: int
) -> list[manager_pb2.SnapshotRequest]:
    """Address the parts of a snapshot and append its end."""
    last = manager_pb2.SnapshotEnd(parts=len(parts))
    parts.append(manager_pb2.SnapshotRequest(end=last))
    for part in parts:
        part.session_id, part.epoch = session_id, epoch
    return parts


def tokens_per_message(num_layers: int) -> int:
    """How many tokens' entries of a table go into one message."""
    return max(1, MESSAGE_BYTES // (num_layers * _BYTES_PER_ENTRY))


def _table_part(table: RowTables, start: int, end: int) -> manager_pb2.SnapshotTable:
    return manager_pb2.SnapshotTable(
        request_id=table.request_id,
        generation=table.generation,
        first_token=table.first_token,
        start=start,
        num_tokens=end - start,
        key_rows=packing.pack(table.rows[KEY, :, start:end], packing.INT32),
        value_rows=packing.pack(table.rows[VALUE, :, start:end], packing.INT32),
        shared=packing.pack(table.shared[:, :, start:end], packing.UINT8),
        accumulated_error=float(table.errors[start:end].sum()),
    )
