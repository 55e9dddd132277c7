"""Rebuilding counts from the tables of engines that outlived their manager."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from memshare.manager.rows import NOBODY, Mask, Rows, RowState
from memshare.manager.tables import OWN, SHARED, RequestTable, require_room
from memshare.wire.errors import InvalidArgument, PoolExhausted, RowNotHeld

if TYPE_CHECKING:
    from memshare.manager.sessions import Session
    from memshare.manager.state import ManagerState


@dataclass(frozen=True)
class SnapshotTable:
    """Sealed tokens of one request's row tables, each array [num_layers, n] or flat.

    `shared` is [2, num_layers, n] or flat: where the entry names a donor's row. A request may
    come in several, one after the other; `start` is the first token of this one.
    """

    request_id: int
    generation: int
    first_token: int
    key_rows: Rows
    value_rows: Rows
    shared: Mask
    accumulated_error: float = 0.0
    start: int = 0


@dataclass
class Snapshot:
    """Everything that a session holds."""

    leases: list[Rows] = field(default_factory=list)
    tables: list[SnapshotTable] = field(default_factory=list)


def restore(state: ManagerState, session_id: int, snapshot: Snapshot, *, approximate: bool) -> None:
    """Take a snapshot over into a session that holds nothing yet, all or nothing.

    A row that a table owns must be free, or live without an owner because another session's
    snapshot named it first. `approximate` says that shared entries may be inexact: then they
    taint their request. Raises `InvalidArgument`, `RowNotHeld` or `PoolExhausted`.
    """
    session = state.session(session_id)
    pool = state.pool
    if session.requests or session.condemned or pool.held_by(session.slot):
        raise InvalidArgument(f"session {session_id} holds rows already: restore it once")
    leases = _joined(snapshot.leases)
    requests = _built(session, snapshot.tables, approximate)
    tables = list(requests.values())
    owned = _joined([table.rows[table.entries == OWN] for table in tables])
    shared = _joined([table.rows[table.entries == SHARED] for table in tables])
    pool.require_rows(np.concatenate((leases, owned)), "snapshot")
    pool.require_range(shared, "snapshot")
    _require_state(state, session, leases, owned, shared)
    held = len(leases) + len(owned)
    if session.max_rows and held > session.max_rows:
        raise PoolExhausted(
            f"the snapshot holds {held} rows, the session's bound is {session.max_rows}",
            held=held,
            max_rows=session.max_rows,
        )

    orphaned = pool.state[owned] == RowState.LIVE
    pool.set_holder(owned[orphaned], session.slot)
    pool.adopt(owned[~orphaned], session.slot, RowState.LIVE)
    pool.adopt(leases, session.slot, RowState.LEASED)
    lent = np.unique(shared)
    pool.adopt(lent[pool.state[lent] == RowState.FREE], NOBODY, RowState.LIVE)
    for rows in (owned, leases, shared):
        pool.tenant[rows] = session.tenant_number
    pool.add_references(owned)
    pool.add_references(shared)
    session.leased = len(leases)
    session.requests = requests


def _joined(arrays: list[Rows]) -> Rows:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int32)


def _built(
    session: Session, parts: list[SnapshotTable], approximate: bool
) -> dict[int, RequestTable]:
    requests: dict[int, RequestTable] = {}
    for part in parts:
        table = requests.get(part.request_id)
        if table is None:
            require_room(requests)
            table = requests[part.request_id] = RequestTable(
                part.request_id, part.generation, part.first_token, session.num_layers
            )
        elif not part.key_rows.size:
            raise InvalidArgument(
                f"the snapshot names request {part.request_id} twice", field="request_id"
            )
        _append(table, part, approximate)
    return requests


def _append(table: RequestTable, part: SnapshotTable, approximate: bool) -> None:
    """Add a part to what came before it. Raises `InvalidArgument` if it does not go on there."""
    before = (table.generation, table.first_token, table.sealed)
    if (part.generation, part.first_token, part.start) != before:
        raise InvalidArgument(
            f"request {part.request_id}: a part of generation {part.generation}, first_token "
            f"{part.first_token}, starts at {part.start}; expected generation {before[0]}, "
            f"first_token {before[1]}, start {before[2]}",
            field="table",
        )
    per_token = 2 * table.num_layers
    rows = np.concatenate((part.key_rows, part.value_rows), axis=None)
    if (
        part.key_rows.size != part.value_rows.size
        or rows.size % per_token
        or part.shared.size != rows.size
    ):
        raise InvalidArgument(
            f"request {part.request_id}: {part.key_rows.size} key rows, {part.value_rows.size} "
            f"value rows and {part.shared.size} shared flags are no whole number of tokens of "
            f"{table.num_layers} layers",
            field="table",
        )
    if not (np.isfinite(part.accumulated_error) and part.accumulated_error >= 0):
        raise InvalidArgument(
            f"request {part.request_id}: accumulated_error is {part.accumulated_error}",
            field="accumulated_error",
        )
    shape = (2, table.num_layers, rows.size // per_token)
    shared = part.shared.reshape(shape)
    table.append(rows.reshape(shape), np.where(shared, SHARED, OWN).astype(np.uint8))
    positions = np.flatnonzero(shared.any(axis=(0, 1)))
    if len(positions):
        # Which entry cost how much is not known any more: spread it.
        table.errors[:, :, part.start :][shared] = part.accumulated_error / int(shared.sum())
        table.error += part.accumulated_error
        if table.taint < 0 and (approximate or part.accumulated_error > 0):
            table.taint = part.start + int(positions[0])


def _require_state(
    state: ManagerState, session: Session, leases: Rows, owned: Rows, shared: Rows
) -> None:
    pool = state.pool
    free = RowState.FREE
    orphan = (
        (pool.state[owned] == RowState.LIVE)
        & (pool.holder[owned] == NOBODY)
        & (pool.tenant[owned] == session.tenant_number)
    )
    live = (pool.state[shared] == RowState.LIVE) & (pool.tenant[shared] == session.tenant_number)
    for rows, valid in (
        (leases, pool.state[leases] == free),
        (owned, (pool.state[owned] == free) | orphan),
        (shared, ((pool.state[shared] == free) | live) & ~np.isin(shared, leases)),
    ):
        if not valid.all():
            row = int(rows[~valid][0])
            raise RowNotHeld(
                f"snapshot: row {row} is {RowState(pool.state[row]).name.lower()} and not this "
                "session's to name",
                row=row,
            )
