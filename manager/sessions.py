"""Sessions and the rows they lease, hold in quarantine and give back."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from memshare.manager.blocks import BlockPool
from memshare.manager.counters import ShareCounters
from memshare.manager.rows import RETRY_AFTER, Mask, RowPool, Rows, RowState
from memshare.manager.tables import RequestTable
from memshare.wire.errors import InvalidArgument, PoolExhausted, StaleGeneration, UnknownSession

_TENANTS: Final = 1024
"""Tenants that are remembered before those nobody uses are forgotten."""
SLICE: Final = 1 << 16
"""Rows that are released before other sessions get a turn."""


@dataclass
class Session:
    """One attached engine. `slot` names it in the row arrays, `tenant_number` its tenant."""

    session_id: int
    slot: int
    epoch: int
    tenant: str
    tenant_number: int
    layout: Hashable
    num_layers: int
    max_rows: int
    requests: dict[int, RequestTable] = field(default_factory=dict)
    counters: ShareCounters = field(default_factory=ShareCounters)
    last_step: int = 0
    stale: dict[int, int] = field(default_factory=dict)
    """Sizes of decisions that a truncation or close took back, until the engine answers."""
    condemned: deque[Rows] = field(default_factory=deque)
    """Rows [kinds, num_layers, n] of dropped entries, still counted, to be released in slices."""
    closing: bool = False
    cleared: int = 0


def require_bound(max_rows: int, num_rows: int, free: int) -> None:
    """Raise `PoolExhausted` for a session's bound above the pool."""
    if not 0 <= max_rows <= num_rows:
        raise PoolExhausted(
            f"max_rows is {max_rows}, the pool has {num_rows} rows and {free} are free",
            total=num_rows,
            free=free,
        )


class SessionState:
    """The part of `ManagerState` that knows nothing of decisions."""

    def __init__(self, num_rows: int, *, blocks: bool = False) -> None:
        self.pool: RowPool = BlockPool(num_rows) if blocks else RowPool(num_rows)
        self.sessions: dict[int, Session] = {}
        self._slots: list[Session | None] = []
        self._tenants: dict[str, int] = {}
        self._next_tenant = 0
        self._tenant_limit = _TENANTS

    def open_session(
        self,
        session_id: int,
        *,
        tenant: str,
        num_layers: int,
        layout: Hashable = None,
        max_rows: int = 0,
        epoch: int = 1,
    ) -> Session:
        """Begin a session that holds nothing.

        `layout` is compared for equality: rows are shared among sessions of one layout. In a
        pool of blocks `num_layers` is the number of groups.
        `max_rows` of 0 is no bound. Raises `InvalidArgument` for an id in use or a bad size,
        `PoolExhausted` for a bound above the pool.
        """
        if session_id <= 0 or session_id in self.sessions:
            raise InvalidArgument(f"session id {session_id} is in use or not above 0")
        if num_layers <= 0:
            raise InvalidArgument(f"num_layers is {num_layers}, must be above 0")
        require_bound(max_rows, self.pool.num_rows, self.pool.free)
        if None in self._slots:
            slot = self._slots.index(None)
        else:
            slot = len(self._slots)
            self._slots.append(None)
        session = Session(
            session_id,
            slot,
            epoch,
            tenant,
            self._tenant_number(tenant),
            layout,
            num_layers,
            max_rows,
        )
        self._slots[slot] = self.sessions[session_id] = session
        return session

    def _tenant_number(self, tenant: str) -> int:
        # Without a tenant nothing may pass to or from others: a number of its own.
        number = self._tenants.get(tenant) if tenant else None
        if number is None and len(self._tenants) >= self._tenant_limit:
            self._forget_tenants()
        if number is None:
            number = self._next_tenant
            self._next_tenant += 1
        if tenant:
            self._tenants[tenant] = number
        return number

    def _forget_tenants(self) -> None:
        # A number stays while rows carry it, and is never given out again.
        carried = set(np.unique(self.pool.tenant).tolist())
        attached = {session.tenant for session in self.sessions.values()}
        self._tenants = {
            tenant: number
            for tenant, number in self._tenants.items()
            if tenant in attached or number in carried
        }
        # Looking through all rows takes time: seldom enough to cost nothing on the whole.
        self._tenant_limit = max(_TENANTS, 2 * len(self._tenants))

    def session(self, session_id: int, epoch: int | None = None) -> Session:
        """The live session of this id.

        Raises `UnknownSession`, or `StaleGeneration` if `epoch` is given and not the session's.
        """
        session = self.sessions.get(session_id)
        if session is None or session.closing:
            raise UnknownSession(
                f"session {session_id} is not known here: attach again", session_id=session_id
            )
        if epoch is not None and epoch != session.epoch:
            raise StaleGeneration(
                f"session {session_id} is in epoch {session.epoch}, the message in {epoch}",
                session_id=session_id,
                epoch=session.epoch,
            )
        return session

    def close_slice(self, session_id: int, limit: int = SLICE) -> bool:
        """Release about `limit` rows of an ending session; True when all are given back."""
        session = self.sessions.get(session_id)
        if session is None:
            return True
        if not session.closing:
            raise InvalidArgument(f"session {session_id} is not closing")
        if not self._release_condemned(session, limit):
            return False
        session.cleared = self.pool.clear_slot(session.slot, session.cleared, limit)
        if session.cleared < self.pool.num_rows:
            return False
        self._slots[session.slot] = None
        del self.sessions[session_id]
        return True

    def lease(self, session_id: int, count: int) -> tuple[Rows, Mask]:
        """Grant rows: ids in ascending order, and which of them hold another tenant's data.

        Those must be zeroed, then `confirm_zeroed`, before the engine hears of them. Raises
        `InvalidArgument` for a count of 0 or less, `PoolExhausted` if the pool or the session's
        bound has less; then none is granted.
        """
        session = self.session(session_id)
        if count <= 0:
            raise InvalidArgument(f"count is {count}, must be above 0", field="count")
        held = self.pool.held_by(session.slot)
        if session.max_rows and held + count > session.max_rows:
            raise PoolExhausted(
                f"{count} rows were asked for, the session holds {held} of its bound of "
                f"{session.max_rows}; {self.pool.free} are free in the pool",
                retry_after=RETRY_AFTER, asked=count, held=held,
                max_rows=session.max_rows, free=self.pool.free,
            )  # fmt: skip
        rows = self.pool.grant(count, session.slot)
        return rows, self.pool.tenant[rows] != session.tenant_number

    def confirm_zeroed(self, session_id: int, rows: Rows) -> None:
        """Note that leased rows hold nothing of another tenant any more."""
        session = self.session(session_id)
        self.pool.require_leased(rows, session.slot, "rows")
        self.pool.tenant[rows] = session.tenant_number

    def return_rows(self, session_id: int, rows: Rows) -> None:
        """Give leased rows back. Raises `InvalidArgument` or `RowNotHeld`."""
        session = self.session(session_id)
        if not len(rows):
            raise InvalidArgument("rows is empty", field="rows")
        self.pool.require_leased(rows, session.slot, "rows")
        self.pool.release(rows)

    def row_counts(self) -> dict[RowState, int]:
        """Number of rows in each state; they sum to the pool's."""
        return self.pool.counts()

    def step_completed(self, session_id: int, step: int) -> int:
        """Free all that this session's earlier messages put in quarantine; returns how many rows.

        Raises `StaleGeneration` if a later step was acknowledged before.
        """
        session = self.session(session_id)
        if step < session.last_step:
            raise StaleGeneration(
                f"step {step} is acknowledged after step {session.last_step}",
                step=session.last_step,
            )
        session.last_step = step
        return self.pool.end_step(session.slot, step)

    def release_slice(self, session_id: int, limit: int = SLICE) -> bool:
        """Release about `limit` rows of dropped entries; True when none is left."""
        session = self.sessions.get(session_id)
        return session is None or self._release_condemned(session, limit)

    def _release_condemned(self, session: Session, limit: int) -> bool:
        while session.condemned and limit > 0:
            rows = session.condemned.popleft()
            tokens = max(1, limit // (rows.shape[0] * rows.shape[1]))
            if rows.shape[2] > tokens:
                session.condemned.appendleft(rows[:, :, tokens:])
                rows = rows[:, :, :tokens]
            limit -= max(1, rows.size)
            self.pool.drop_references(rows.ravel(), session.slot)
        return not session.condemned
