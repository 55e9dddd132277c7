"""Share decisions: proposed, then applied or refused by the engine between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memshare.manager.rows import Mask, Rows
from memshare.manager.tables import KEY, OWN, PENDING, SHARED, RequestTable
from memshare.wire.errors import InvalidArgument, StaleGeneration

if TYPE_CHECKING:
    from memshare.manager.sessions import Session
    from memshare.manager.state import ManagerState

Ids = npt.NDArray[Any]


@dataclass(frozen=True)
class Candidates:
    """Item i: the kinds[i] entry of token targets[i] in layer layers[i] may point at
    donor_rows[i], which token donors[i] of request donor_requests[i] in session
    donor_sessions[i] owns; without the last two arrays, a token of the same request.
    """

    layers: Ids
    kinds: Ids
    targets: Ids
    donors: Ids
    donor_rows: Rows
    distances: npt.NDArray[np.float32]
    donor_sessions: Ids | None = None
    donor_requests: Ids | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def where(self, mask: Mask | Ids) -> Candidates:
        """The items at a mask or at indices."""
        return Candidates(*(
            None if column is None else column[mask]
            for column in (
                self.layers, self.kinds, self.targets, self.donors, self.donor_rows,
                self.distances, self.donor_sessions, self.donor_requests,
            )
        ))  # type: ignore[arg-type]  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """What was proposed to an engine and is not answered yet."""

    decision_id: int
    session_id: int
    request_id: int
    generation: int
    items: Candidates
    target_rows: Rows
    approximate: bool


@dataclass(frozen=True)
class Resolution:
    """How an engine answered a decision."""

    applied: int
    missed: int


def propose(
    state: ManagerState,
    session_id: int,
    request_id: int,
    generation: int,
    candidates: Candidates,
    *,
    approximate: bool,
    as_of: int | None = None,
) -> Decision | None:
    """Keep the items that are still valid, pin their donors, mark their targets PENDING.

    A target must own its row, alone, and be nobody's donor. A donor must own its row (no chains)
    and be sealed, of the same layer, kind, tenant and layout. It must be of the same request
    unless the match is exact, the session has a tenant and neither request is private, and
    older unless the match is exact. A donor of another request must have been there since the
    clock said `as_of`; in a pool of blocks one of another session must be lent. Returns None if
    no item is left. Raises `UnknownRequest` or `StaleGeneration`, and `InvalidArgument` for
    columns of different lengths.
    """
    session = state.session(session_id)
    table = state.request(session_id, request_id, generation)
    items = valid_items(state, session, table, candidates, approximate, as_of)
    items = items.where(state.pool.offered(items.donor_rows, session.slot))
    if not len(items):
        return None
    target_rows = table.rows[items.kinds, items.layers, items.targets]
    decision = Decision(
        state.new_id(), session_id, request_id, generation, items, target_rows, approximate
    )
    state.pool.pin(items.donor_rows, session.slot)
    table.entries[items.kinds, items.layers, items.targets] = PENDING
    table.pending_error += float(items.distances.sum(dtype=np.float64))
    table.decisions.add(decision.decision_id)
    state.pending[decision.decision_id] = decision
    session.counters.proposed += len(items)
    return decision


def valid_items(
    state: ManagerState,
    session: Session,
    table: RequestTable,
    candidates: Candidates,
    approximate: bool,
    as_of: int | None,
) -> Candidates:
    """The items that may be proposed once their donors are lent; see `propose`."""
    _require_columns(candidates)
    items = candidates.where(_valid_targets(state, table, candidates))
    items = items.where(_valid_donors(state, session, table, items, approximate, as_of))
    # One proposal may neither fill a target twice nor lend from one of its own targets.
    _, first = np.unique(_flat(table, items), return_index=True)
    items = items.where(np.sort(first))
    target_rows = table.rows[items.kinds, items.layers, items.targets]
    return items.where(~np.isin(items.donor_rows, target_rows))


def _require_columns(items: Candidates) -> None:
    lengths = {
        len(column)
        for column in (
            items.layers, items.kinds, items.targets, items.donors, items.donor_rows,
            items.distances, items.donor_sessions, items.donor_requests,
        )
        if column is not None
    }  # fmt: skip
    if len(lengths) > 1:
        raise InvalidArgument(f"columns of candidates differ in length: {sorted(lengths)}")


def _flat(table: RequestTable, items: Candidates) -> npt.NDArray[np.int64]:
    entry = items.kinds.astype(np.int64) * table.num_layers + items.layers
    return entry * table.sealed + items.targets


def _in_table(table: RequestTable, items: Candidates, tokens: Ids) -> Mask:
    inside: Mask = (items.kinds >= 0) & (items.kinds < table.kinds)
    inside &= (items.layers >= 0) & (items.layers < table.num_layers)
    inside &= (tokens >= table.first_token) & (tokens < table.sealed)
    return inside


def _valid_targets(state: ManagerState, table: RequestTable, items: Candidates) -> Mask:
    valid = _in_table(table, items, items.targets)
    at = np.flatnonzero(valid)
    where = items.kinds[at], items.layers[at], items.targets[at]
    rows = table.rows[where]
    valid[at] = (
        (table.entries[where] == OWN)
        & (state.pool.references[rows] == 1)
        & (state.pool.pins[rows] == 0)
    )
    return valid


def _valid_donors(
    state: ManagerState,
    session: Session,
    table: RequestTable,
    items: Candidates,
    approximate: bool,
    as_of: int | None,
) -> Mask:
    if items.donor_sessions is None or items.donor_requests is None:
        valid = _owned_in(table, items)
        same_request = np.ones(len(items), np.bool_)
    else:
        valid = np.zeros(len(items), np.bool_)
        same_request = (items.donor_sessions == session.session_id) & (
            items.donor_requests == table.request_id
        )
        pairs = np.stack((items.donor_sessions, items.donor_requests), axis=1)
        for donor_session, donor_request in np.unique(pairs, axis=0).tolist():
            lender = state.sessions.get(donor_session)
            donor_table = lender.requests.get(donor_request) if lender else None
            if lender is None or donor_table is None or not _may_lend(lender, session):
                continue
            if donor_table is not table and (donor_table.private or table.private):
                continue
            if as_of is not None and donor_table.changed > as_of:
                # The entry may name the same row again, for other data.
                continue
            at = np.flatnonzero(
                (items.donor_sessions == donor_session) & (items.donor_requests == donor_request)
            )
            valid[at] = _owned_in(donor_table, items.where(at))
    if approximate or not session.tenant:
        valid &= same_request
    if approximate:
        valid &= (items.donors < items.targets) & np.isfinite(items.distances)
    valid &= ~(same_request & (items.donors == items.targets))
    return valid


def _may_lend(lender: Session, borrower: Session) -> bool:
    # Sessions without a tenant have a number of their own each.
    return lender.tenant_number == borrower.tenant_number and lender.layout == borrower.layout


def _owned_in(table: RequestTable, items: Candidates) -> Mask:
    valid: Mask = _in_table(table, items, items.donors)
    at = np.flatnonzero(valid)
    where = items.kinds[at], items.layers[at], items.donors[at]
    valid[at] = (table.entries[where] == OWN) & (table.rows[where] == items.donor_rows[at])
    return valid


def resolve(
    state: ManagerState, session_id: int, decision_id: int, applied: npt.NDArray[np.uint8]
) -> Resolution:
    """Commit the items that the engine applied, cancel the others.

    An applied target's own row goes to quarantine until the engine next acknowledges a step, or,
    a block, back on lease to the engine at once.
    An empty `applied` refuses all. Raises `StaleGeneration` for a decision that is unknown, or
    was taken back by a truncation or close and yet applied; `InvalidArgument` for a mask of
    another length or with other values than 0 and 1.
    """
    session = state.session(session_id)
    decision = state.pending.get(decision_id)
    if decision is None or decision.session_id != session_id:
        return _resolve_stale(session, decision_id, applied)
    mask = _require_mask(decision_id, applied, len(decision.items))
    table = session.requests[decision.request_id]
    _forget(state, table, decision)
    _commit(state, session, table, decision, mask)
    done = int(mask.sum())
    missed = len(mask) - done
    session.counters.applied += done
    session.counters.missed += missed
    return Resolution(done, missed)


def _require_mask(decision_id: int, applied: npt.NDArray[np.uint8], size: int) -> Mask:
    if not len(applied):
        return np.zeros(size, np.bool_)
    if len(applied) != size or applied.max() > 1:
        raise InvalidArgument(
            f"decision {decision_id} has {size} items: `applied` must hold as many zeros and "
            f"ones, it has {len(applied)} values up to {applied.max()}",
            field="applied",
        )
    return applied.astype(np.bool_)


def _resolve_stale(
    session: Session, decision_id: int, applied: npt.NDArray[np.uint8]
) -> Resolution:
    size = session.stale.get(decision_id)
    if size is None:
        raise StaleGeneration(f"decision {decision_id} is not open", decision_id=decision_id)
    if _require_mask(decision_id, applied, size).any():
        raise StaleGeneration(
            f"decision {decision_id} was taken back when its request was truncated or closed, "
            "and must not be applied any more",
            decision_id=decision_id,
        )
    del session.stale[decision_id]
    session.counters.missed += size
    return Resolution(0, size)


def _forget(state: ManagerState, table: RequestTable, decision: Decision) -> None:
    del state.pending[decision.decision_id]
    table.decisions.discard(decision.decision_id)
    distances = decision.items.distances
    table.pending_error -= float(distances.sum(dtype=np.float64))
    if not table.decisions:
        table.pending_error = 0.0


def _commit(
    state: ManagerState, session: Session, table: RequestTable, decision: Decision, mask: Mask
) -> None:
    items = decision.items
    table.entries[items.kinds, items.layers, items.targets] = OWN
    if mask.any():
        taken = items.where(mask)
        where = taken.kinds, taken.layers, taken.targets
        table.rows[where] = taken.donor_rows
        table.entries[where] = SHARED
        table.errors[where] = taken.distances
        state.pool.add_references(taken.donor_rows, session.slot)
        state.pool.leave(decision.target_rows[mask], session.slot, session.last_step)
        error = float(taken.distances.sum(dtype=np.float64))
        table.error += error
        keys = int((taken.kinds == KEY).sum())
        session.counters.accumulated_error += error
        session.counters.shared_keys += keys
        session.counters.shared_values += len(taken) - keys
        if decision.approximate:
            first = int(taken.targets.min())
            table.taint = first if table.taint < 0 else min(table.taint, first)
    state.pool.unpin(items.donor_rows, session.slot)


def withdraw(state: ManagerState, session: Session, table: RequestTable) -> None:
    """Take back all undecided proposals of a request whose generation ends."""
    for decision_id in list(table.decisions):
        decision = state.pending[decision_id]
        _forget(state, table, decision)
        _commit(state, session, table, decision, np.zeros(len(decision.items), np.bool_))
        session.stale[decision_id] = len(decision.items)
