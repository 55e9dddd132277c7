"""Rebuilding counts from the tables of engines that outlived their manager."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from memshare.manager import lending
from memshare.manager.blocks import BlockPool
from memshare.manager.rows import NOBODY, Mask, RowPool, Rows, RowState
from memshare.manager.tables import (
    OWN,
    SHARED,
    RequestTable,
    require_candidates,
    require_room,
    require_whole,
)
from memshare.wire.errors import InvalidArgument, PoolExhausted, RowNotHeld

if TYPE_CHECKING:
    from memshare.manager.sessions import Session
    from memshare.manager.state import ManagerState


@dataclass(frozen=True)
class SnapshotTable:
    """Sealed tokens of one request's row tables, each array [num_layers, n] or flat.

    `shared` is [kinds, num_layers, n] or flat: where the entry names a donor's row. A request may
    come in several, one after the other; `start` is the first token of this one. Blocks have no
    `value_rows` and may have `candidates`, as in `ManagerState.seal`.
    """

    request_id: int
    generation: int
    first_token: int
    key_rows: Rows
    value_rows: Rows
    shared: Mask
    accumulated_error: float = 0.0
    start: int = 0
    candidates: Rows | None = None
    private: bool = False

    @property
    def size(self) -> int:
        """Ids in it."""
        candidates = 0 if self.candidates is None else self.candidates.size
        return self.key_rows.size + self.value_rows.size + candidates


@dataclass
class Snapshot:
    """Everything that a session holds; `pinned` are the blocks that it keeps for others."""

    leases: list[Rows] = field(default_factory=list)
    tables: list[SnapshotTable] = field(default_factory=list)
    pinned: list[Rows] = field(default_factory=list)


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
    requests = _built(session, pool, snapshot.tables, approximate)
    tables = list(requests.values())
    rows = _Named(
        _joined(snapshot.leases),
        _joined([table.rows[table.entries == OWN] for table in tables]),
        _joined([table.rows[table.entries == SHARED] for table in tables]),
        _joined(snapshot.pinned),
    )
    if isinstance(pool, BlockPool):
        _adopt_blocks(state, pool, session, rows)
    else:
        _adopt_rows(pool, session, rows)
    pool.add_references(rows.owned, session.slot)
    pool.add_references(rows.shared, session.slot)
    session.requests = requests


@dataclass(frozen=True)
class _Named:
    """Rows of a snapshot; those of entries come once for each entry."""

    leases: Rows
    owned: Rows
    shared: Rows
    pinned: Rows


def _adopt_rows(pool: RowPool, session: Session, rows: _Named) -> None:
    leases, owned, shared = rows.leases, rows.owned, rows.shared
    pool.require_rows(np.concatenate((leases, owned)), "snapshot")
    pool.require_range(shared, "snapshot")
    orphan = _known(pool, session, owned) & (pool.holder[owned] == NOBODY)
    for named, fit in (
        (leases, _free(pool, leases)),
        (owned, _free(pool, owned) | orphan),
        (shared, (_free(pool, shared) | _known(pool, session, shared)) & ~np.isin(shared, leases)),
    ):
        _require(pool, named, fit, "not this session's to name")
    _require_bound(session, len(leases) + len(owned))

    pool.set_holder(owned[orphan], session.slot)
    pool.adopt(owned[~orphan], session.slot, RowState.LIVE)
    pool.adopt(leases, session.slot, RowState.LEASED)
    lent = np.unique(shared)
    pool.adopt(lent[_free(pool, lent)], NOBODY, RowState.LIVE)
    for named in (owned, leases, shared):
        pool.tenant[named] = session.tenant_number


def _adopt_blocks(state: ManagerState, pool: BlockPool, session: Session, rows: _Named) -> None:
    """Here a row may be leased, named and pinned at once: it is the session's however it is
    called. What its entries share beyond that is another's, who has come before or may come yet.
    """
    for named in (rows.leases, rows.pinned):
        pool.require_rows(named, "snapshot")
    for named in (rows.owned, rows.shared):
        pool.require_range(named, "snapshot")
    held = np.unique(np.concatenate((rows.leases, rows.owned, rows.pinned)))
    foreign = np.setdiff1d(rows.shared, held)
    free = _free(pool, held)
    orphan = _known(pool, session, held) & (pool.holder[held] == NOBODY)
    _require(pool, held, free | orphan, "not this session's to hold")
    _require(
        pool, held, free | np.isin(held, rows.pinned),
        "named by another session, for which the snapshot does not pin it",
    )  # fmt: skip
    offered = (pool.holder[foreign] == NOBODY) | pool.lent[foreign]
    fit = _free(pool, foreign) | (_known(pool, session, foreign) & offered)
    _require(pool, foreign, fit, "neither this session's nor lent by another")
    _require_bound(session, len(held))

    fresh = held[free]
    needed = np.isin(fresh, np.concatenate((rows.owned, rows.shared, rows.pinned)))
    pool.set_holder(held[~free], session.slot)
    pool.adopt(fresh[needed], session.slot, RowState.LIVE)
    pool.adopt(fresh[~needed], session.slot, RowState.LEASED)
    pool.adopt(foreign[_free(pool, foreign)], NOBODY, RowState.LIVE)
    for named in (held, foreign):
        pool.tenant[named] = session.tenant_number
    if len(rows.pinned):
        lending.claim(state, rows.pinned)


def _free(pool: RowPool, rows: Rows) -> Mask:
    mask: Mask = pool.state[rows] == RowState.FREE
    return mask


def _known(pool: RowPool, session: Session, rows: Rows) -> Mask:
    """Which rows are live and of the session's tenant."""
    mask: Mask = (pool.state[rows] == RowState.LIVE) & (pool.tenant[rows] == session.tenant_number)
    return mask


def _require_bound(session: Session, held: int) -> None:
    if session.max_rows and held > session.max_rows:
        raise PoolExhausted(
            f"the snapshot holds {held} rows, the session's bound is {session.max_rows}",
            held=held,
            max_rows=session.max_rows,
        )


def _require(pool: RowPool, rows: Rows, fit: Mask, otherwise: str) -> None:
    if not fit.all():
        row = int(rows[~fit][0])
        raise RowNotHeld(
            f"snapshot: row {row} is {RowState(pool.state[row]).name.lower()} and {otherwise}",
            row=row,
        )


def _joined(arrays: list[Rows]) -> Rows:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int32)


def _built(
    session: Session, pool: RowPool, parts: list[SnapshotTable], approximate: bool
) -> dict[int, RequestTable]:
    requests: dict[int, RequestTable] = {}
    for part in parts:
        table = requests.get(part.request_id)
        if table is None:
            require_room(requests)
            table = requests[part.request_id] = RequestTable(
                part.request_id,
                part.generation,
                part.first_token,
                session.num_layers,
                pool.kinds,
                private=part.private,
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
    rows = require_whole(table, part.key_rows, part.value_rows, none=True)
    if part.shared.size != rows.size:
        raise InvalidArgument(
            f"request {part.request_id}: {rows.size} rows and {part.shared.size} shared flags",
            field="table",
        )
    if not (np.isfinite(part.accumulated_error) and part.accumulated_error >= 0):
        raise InvalidArgument(
            f"request {part.request_id}: accumulated_error is {part.accumulated_error}",
            field="accumulated_error",
        )
    count = rows.size // table.per_token
    shape = (table.kinds, table.num_layers, count)
    shared = part.shared.reshape(shape)
    candidates = require_candidates(table, part.candidates, part.start, count)
    table.append(rows.reshape(shape), np.where(shared, SHARED, OWN).astype(np.uint8), candidates)
    positions = np.flatnonzero(shared.any(axis=(0, 1)))
    if len(positions):
        # Which entry cost how much is not known any more: spread it.
        table.errors[:, :, part.start :][shared] = part.accumulated_error / int(shared.sum())
        table.error += part.accumulated_error
        if table.taint < 0 and (approximate or part.accumulated_error > 0):
            table.taint = part.start + int(positions[0])
