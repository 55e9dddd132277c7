"""Blocks that one engine lends to others: asked for, pinned by their holder, given back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memshare.manager import decisions
from memshare.manager.blocks import ASKING, BlockPool
from memshare.manager.rows import Rows
from memshare.wire.errors import InvalidArgument, StaleGeneration

if TYPE_CHECKING:
    from memshare.manager.decisions import Candidates
    from memshare.manager.sessions import Session
    from memshare.manager.state import ManagerState

Ids = npt.NDArray[Any]


@dataclass
class Ask:
    """Distinct rows that session `lender` is asked to keep: row i is entry indices[i] of its
    request requests[i], in group groups[i].

    The rows are pinned until the ask is finished: while it is under way the lender is not told
    that nobody needs them. One that is `abandoned` is finished by its answer.
    """

    pin_id: int
    lender: int
    rows: Rows
    requests: Ids
    generations: Ids
    indices: Ids
    groups: Ids
    answered: bool = False
    abandoned: bool = False


def ask(
    state: ManagerState,
    session_id: int,
    request_id: int,
    generation: int,
    candidates: Candidates,
    as_of: int,
) -> list[Ask]:
    """What must be asked of other sessions before exact matches can be proposed, by lender.

    Each ask must be finished. A session that owes an answer which somebody gave up waiting for
    is not asked. Raises what `decisions.propose` raises.
    """
    session = state.session(session_id)
    table = state.request(session_id, request_id, generation)
    if not isinstance(state.pool, BlockPool):
        return []
    items = decisions.valid_items(state, session, table, candidates, False, as_of)
    items = items.where(~state.pool.offered(items.donor_rows, session.slot))
    if not len(items) or items.donor_sessions is None or items.donor_requests is None:
        return []
    _, first = np.unique(items.donor_rows, return_index=True)
    items = items.where(first)
    assert items.donor_sessions is not None
    assert items.donor_requests is not None
    overdue = {ask.lender for ask in state.asked.values() if ask.abandoned}
    asks = []
    for lender in np.unique(items.donor_sessions).tolist():
        if lender in overdue:
            continue
        at = np.flatnonzero(items.donor_sessions == lender)
        requests = items.donor_requests[at]
        tables = state.sessions[lender].requests
        generations = [tables[request].generation for request in requests.tolist()]
        asks.append(
            Ask(
                state.new_id(), lender, items.donor_rows[at].copy(), requests,
                np.array(generations, np.uint32), items.donors[at], items.layers[at],
            )
        )  # fmt: skip
        state.asked[asks[-1].pin_id] = asks[-1]
        state.pool.pin(asks[-1].rows, ASKING)
    return asks


def answer(
    state: ManagerState, session_id: int, pin_id: int, pinned: npt.NDArray[np.uint8]
) -> None:
    """Note which rows a lender keeps; an empty `pinned` refuses all.

    Raises `StaleGeneration` for an ask that is not open or of another session, `InvalidArgument`
    for a mask of another length or with other values than 0 and 1.
    """
    state.session(session_id)
    asked = state.asked.get(pin_id)
    if asked is None or asked.lender != session_id or asked.answered:
        raise StaleGeneration(f"pin {pin_id} is not asked for", pin_id=pin_id)
    if len(pinned):
        if len(pinned) != len(asked.rows) or pinned.max() > 1:
            raise InvalidArgument(
                f"pin {pin_id} has {len(asked.rows)} items: `pinned` must hold as many zeros and "
                f"ones, it has {len(pinned)} values up to {pinned.max()}",
                field="pinned",
            )
        pool = state.pool
        assert isinstance(pool, BlockPool)
        pool.lent[asked.rows[pinned.astype(np.bool_)]] = True
    asked.answered = True
    if asked.abandoned:
        finish(state, pin_id)


def finish(state: ManagerState, pin_id: int) -> None:
    """Nobody waits for this ask any more; what was lent is borrowed by now, or given back."""
    asked = state.asked.get(pin_id)
    if asked is None:
        return
    asked.abandoned = not asked.answered
    if asked.answered:
        del state.asked[pin_id]
        state.pool.unpin(asked.rows, ASKING)


def refuse(state: ManagerState, pin_id: int) -> None:
    """Answer for a lender that cannot: it keeps nothing, and nothing is kept for it."""
    if asked := state.asked.pop(pin_id, None):
        state.pool.unpin(asked.rows, ASKING)


def forsake(state: ManagerState, session: Session) -> list[int]:
    """Refuse in the name of a session all that it is asked for; returns the asks."""
    mine = [pin_id for pin_id, asked in state.asked.items() if asked.lender == session.session_id]
    for pin_id in mine:
        refuse(state, pin_id)
    return mine


def claim(state: ManagerState, rows: Rows) -> None:
    """Keep rows that a snapshot calls pinned until `settle`: those who borrow them may come."""
    pool = state.pool
    assert isinstance(pool, BlockPool)
    pool.pin(rows, ASKING)
    pool.lent[rows] = True
    state.unclaimed.append(rows)


def keep_borrowed(state: ManagerState, session: Session) -> None:
    """Keep what a session borrows, or may yet by a decision that it has not answered, until
    `settle`: it is about to be released and to come back.
    """
    pool = state.pool
    if not isinstance(pool, BlockPool):
        return
    named = [table.rows.ravel() for table in session.requests.values()]
    named += [
        decision.items.donor_rows
        for decision in state.pending.values()
        if decision.session_id == session.session_id
    ]
    rows = np.unique(np.concatenate(named)) if named else np.empty(0, np.int32)
    rows = rows[(pool.holder[rows] != session.slot) & pool.lent[rows]]
    if len(rows):
        pool.pin(rows, ASKING)
        state.unclaimed.append(rows)


def settle(state: ManagerState) -> None:
    """All engines have come back or are gone: what nobody borrows is given back."""
    unclaimed, state.unclaimed = state.unclaimed, []
    for rows in unclaimed:
        state.pool.unpin(rows, ASKING)


def take_returned(state: ManagerState) -> dict[int, Rows]:
    """Rows, by session id, that were lent and that nobody borrows any more; each is told once."""
    if not isinstance(state.pool, BlockPool):
        return {}
    slots = {session.slot: session.session_id for session in state.sessions.values()}
    returned = state.pool.take_returned()
    return {slots[slot]: rows for slot, rows in returned.items() if slot in slots}
