"""Every invariant of the counts, checked from the tables up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from memshare.manager.blocks import ASKING, BlockPool
from memshare.manager.rows import NOBODY, Rows, RowState
from memshare.manager.tables import OWN, PENDING, SHARED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memshare.manager.state import ManagerState

Counts = npt.NDArray[np.int64]


def check(state: ManagerState) -> list[str]:
    """One line for each broken invariant; empty if all hold."""
    return [
        *_check_references(state),
        *_check_states(state),
        *_check_holders(state),
        *_check_entries(state),
        *_check_requests(state),
        *_check_loans(state),
    ]


def _differences(what: str, counted: npt.NDArray[np.generic], real: Counts) -> list[str]:
    wrong = np.flatnonzero(counted != real)
    if not len(wrong):
        return []
    row = int(wrong[0])
    return [f"{what} of row {row} is {counted[row]}, should be {real[row]} ({len(wrong)} rows)"]


def _names(state: ManagerState) -> Iterator[tuple[int, Rows]]:
    """Rows that entries name, with the slot of their session; a row comes once for each entry."""
    for session, table in state.tables():
        yield session.slot, table.rows.ravel()
    for session in state.sessions.values():
        for rows in session.condemned:
            yield session.slot, rows.ravel()


def _pins(state: ManagerState) -> Iterator[tuple[int, Rows]]:
    """Rows that are pinned, with the slot in whose name; a row comes once for each pin."""
    for decision in state.pending.values():
        yield state.sessions[decision.session_id].slot, decision.items.donor_rows
    for asked in state.asked.values():
        yield ASKING, asked.rows
    for rows in state.unclaimed:
        yield ASKING, rows


def _check_references(state: ManagerState) -> list[str]:
    pool = state.pool
    named, pinned = (np.zeros(pool.num_rows, np.int64) for _ in range(2))
    for _, rows in _names(state):
        np.add.at(named, rows, 1)
    for _, rows in _pins(state):
        np.add.at(pinned, rows, 1)
    return [
        *_differences("the reference count", pool.references, named),
        *_differences("the pin count", pool.pins, pinned),
    ]


def _check_states(state: ManagerState) -> list[str]:
    pool, errors = state.pool, []
    real = np.bincount(pool.state, minlength=4)
    for name, count in pool.counts().items():
        if count != real[name]:
            errors.append(f"{count} rows are counted as {name.name}, {real[name]} are")
    needed = (pool.references > 0) | (pool.pins > 0)
    live = pool.state == RowState.LIVE
    if (needed != live).any():
        wrong = np.flatnonzero(needed != live)
        errors.append(f"{len(wrong)} rows, {wrong[:4]} first, are live without need or reverse")
    waiting = [rows for parts in pool.quarantine.values() for _, rows in parts]
    listed = np.sort(np.concatenate(waiting)) if waiting else np.empty(0, np.int32)
    closing = [s.slot for s in state.sessions.values() if s.closing]
    quarantined = (pool.state == RowState.QUARANTINED) & ~np.isin(pool.holder, closing)
    if not np.array_equal(listed, np.flatnonzero(quarantined)):
        errors.append("the quarantine lists and the rows in quarantine differ")
    return errors


def _check_holders(state: ManagerState) -> list[str]:
    pool, errors = state.pool, []
    used = pool.state != RowState.FREE
    if (pool.holder[~used] != NOBODY).any():
        errors.append("a free row has a holder")
    slots = {session.slot for session in state.sessions.values()}
    unknown = set(np.unique(pool.holder[used]).tolist()) - slots - {NOBODY}
    if unknown:
        errors.append(f"rows are held by slots {sorted(unknown)} without a session")
    if (pool.holder[used & (pool.state != RowState.LIVE)] == NOBODY).any():
        errors.append("a leased or quarantined row has no holder")
    for session in state.sessions.values():
        held = pool.holder == session.slot
        if int(held.sum()) != pool.held_by(session.slot):
            errors.append(f"session {session.session_id} holds another number of rows than counted")
        leased = int((held & (pool.state == RowState.LEASED)).sum())
        if leased != (counted := pool.leased_by(session.slot)):
            errors.append(f"session {session.session_id} leases {leased}, counted {counted}")
    return errors


def _check_entries(state: ManagerState) -> list[str]:
    pool, errors = state.pool, []
    owners = np.zeros(pool.num_rows, np.int64)
    pending = np.zeros(pool.num_rows, np.int64)
    for session, table in state.tables():
        np.add.at(owners, table.rows[table.entries != SHARED], 1)
        np.add.at(pending, table.rows[table.entries == PENDING], 1)
        if (pool.tenant[table.rows] != session.tenant_number).any():
            errors.append(f"request {table.request_id} names a row of another tenant")
        if (pool.holder[table.rows[table.entries != SHARED]] != session.slot).any():
            errors.append(f"request {table.request_id} owns a row that its session does not hold")
    # An engine's own cache may name a block any number of times.
    once = not isinstance(pool, BlockPool)
    if once and (owners > 1).any():
        errors.append(f"row {int(owners.argmax())} is owned by {int(owners.max())} entries")
    targets = pending > 0
    lends = (pool.references[targets] != 1).any() or (pool.pins[targets] != 0).any()
    if once and lends:
        errors.append("an entry that awaits a decision is a donor")
    for decision in state.pending.values():
        table = state.sessions[decision.session_id].requests[decision.request_id]
        items = decision.items
        where = items.kinds, items.layers, items.targets
        if (table.entries[where] != PENDING).any():
            errors.append(f"decision {decision.decision_id} has a target that is not pending")
        if (table.rows[where] != decision.target_rows).any():
            errors.append(f"decision {decision.decision_id} has a target of another row")
    waiting = sum(len(decision.items) for decision in state.pending.values())
    if int(pending.sum()) != waiting:
        errors.append(f"{int(pending.sum())} entries are pending, {waiting} are proposed")
    return errors


def _check_loans(state: ManagerState) -> list[str]:
    pool, errors = state.pool, []
    if not isinstance(pool, BlockPool):
        return []
    borrowed = np.zeros(pool.num_rows, np.int64)
    for slot, rows in (*_names(state), *_pins(state)):
        np.add.at(borrowed, rows[pool.holder[rows] != slot], 1)
    errors += _differences("the count of borrowers", pool.borrowed, borrowed)
    held = (pool.state == RowState.LIVE) & (pool.holder != NOBODY)
    idle = pool.lent & ~(held & (pool.borrowed > 0))
    if idle.any():
        errors.append(f"row {int(idle.argmax())} is lent to nobody or by nobody")
    for asked in state.asked.values():
        np.subtract.at(borrowed, asked.rows, 1)
    taken = held & (borrowed > 0) & ~pool.lent
    if taken.any():
        errors.append(f"row {int(taken.argmax())} is borrowed and not lent")
    if pool.quarantine:
        errors.append("blocks are in quarantine")
    return errors


def _check_requests(state: ManagerState) -> list[str]:
    errors = []
    for _, table in state.tables():
        error = float(table.errors.sum(dtype=np.float64))
        if abs(error - table.error) > 1e-3 * max(1.0, error):
            errors.append(f"request {table.request_id} has error {error}, counted {table.error}")
        if (table.errors[table.entries == OWN] != 0).any():
            errors.append(f"request {table.request_id} counts an error for an unshared entry")
        if table.taint >= table.sealed or table.indexed > table.sealed:
            errors.append(f"request {table.request_id} marks a position beyond its end")
    return errors
