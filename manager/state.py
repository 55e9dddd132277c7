"""Sessions, requests and the rows they name: the manager's truth.

Pure: no clock, no I/O. Every method validates all of its arguments before it changes anything
and raises a `memshare.wire.errors` kind; after an error the state is what it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from memshare.manager import decisions, integrity, recovery
from memshare.manager.counters import ShareCounters
from memshare.manager.decisions import Candidates, Decision, Resolution
from memshare.manager.rows import Mask, RowPool, Rows, RowState
from memshare.manager.tables import RequestTable
from memshare.wire.errors import (
    InvalidArgument,
    PoolExhausted,
    StaleGeneration,
    UnknownRequest,
    UnknownSession,
)

SLICE: Final = 1 << 16
"""Rows that are released before other sessions get a turn."""
MAX_TOKENS: Final = 1 << 24


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
    leased: int = 0
    last_step: int = 0
    stale: dict[int, int] = field(default_factory=dict)
    """Sizes of decisions that a truncation or close took back, until the engine answers."""
    condemned: deque[Rows] = field(default_factory=deque)
    """Rows [2, num_layers, n] of dropped entries, still counted, to be released in slices."""
    closing: bool = False
    cleared: int = 0


class ManagerState:
    """All counts over one pool of `num_rows` rows. Not safe for use from several threads."""

    def __init__(self, num_rows: int) -> None:
        self.pool = RowPool(num_rows)
        self.sessions: dict[int, Session] = {}
        self.pending: dict[int, Decision] = {}
        self._slots: list[Session | None] = []
        self._tenants: dict[str, int] = {}
        self._next_tenant = 0
        self._next_decision = 1

    # Sessions

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

        `layout` is compared for equality: rows are shared among sessions of one layout.
        `max_rows` of 0 is no bound. Raises `InvalidArgument` for an id in use or a bad size,
        `PoolExhausted` for a bound above the pool.
        """
        if session_id <= 0 or session_id in self.sessions:
            raise InvalidArgument(f"session id {session_id} is in use or not above 0")
        if num_layers <= 0:
            raise InvalidArgument(f"num_layers is {num_layers}, must be above 0")
        if not 0 <= max_rows <= self.pool.num_rows:
            raise PoolExhausted(
                f"max_rows is {max_rows}, the pool has {self.pool.num_rows} rows and "
                f"{self.pool.free} are free",
                total=self.pool.num_rows,
                free=self.pool.free,
            )
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
        if number is None:
            number = self._next_tenant
            self._next_tenant += 1
        if tenant:
            self._tenants[tenant] = number
        return number

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

    def close_session(self, session_id: int) -> None:
        """End a session: nothing may name it any more; `close_slice` gives its rows back."""
        session = self.session(session_id)
        for table in session.requests.values():
            session.condemned.append(self._drop(session, table, 0))
        session.requests.clear()
        self.pool.forget_quarantine(session.slot)
        session.closing = True

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

    # Rows

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
                retry_after=decisions.RETRY_AFTER, asked=count, held=held,
                max_rows=session.max_rows, free=self.pool.free,
            )  # fmt: skip
        rows = self.pool.grant(count, session.slot)
        session.leased += count
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
        session.leased -= len(rows)

    def row_counts(self) -> dict[RowState, int]:
        """Number of rows in each state; they sum to the pool's."""
        return self.pool.counts()

    # Requests

    def open_request(
        self, session_id: int, request_id: int, generation: int, first_token: int = 0
    ) -> RequestTable:
        """Begin a request. Raises `InvalidArgument` if it is open already."""
        session = self.session(session_id)
        if request_id in session.requests:
            raise InvalidArgument(
                f"request {request_id} is open already, in generation "
                f"{session.requests[request_id].generation}",
                field="request_id",
            )
        if not 0 <= first_token <= MAX_TOKENS:
            raise InvalidArgument(
                f"first_token is {first_token}, must be 0 to {MAX_TOKENS}", field="first_token"
            )
        table = RequestTable(request_id, generation, first_token, session.num_layers)
        session.requests[request_id] = table
        return table

    def request(self, session_id: int, request_id: int, generation: int) -> RequestTable:
        """The table of an open request. Raises `UnknownRequest` or `StaleGeneration`."""
        table = self.session(session_id).requests.get(request_id)
        if table is None:
            raise UnknownRequest(
                f"session {session_id} has no request {request_id}", request_id=request_id
            )
        if table.generation != generation:
            raise StaleGeneration(
                f"request {request_id} is in generation {table.generation}, the message in "
                f"{generation}",
                request_id=request_id,
                generation=table.generation,
            )
        return table

    def seal(
        self,
        session_id: int,
        request_id: int,
        generation: int,
        start: int,
        key_rows: Rows,
        value_rows: Rows,
    ) -> RequestTable:
        """Tokens from `start` on are written and final.

        `key_rows` and `value_rows` hold [num_layers, n] ids, flat or not; all of them must be
        leased by the session. Raises `InvalidArgument`, `RowNotHeld`, `UnknownRequest` or
        `StaleGeneration`.
        """
        session = self.session(session_id)
        table = self.request(session_id, request_id, generation)
        rows = np.concatenate((key_rows, value_rows), axis=None, dtype=np.int32, casting="safe")
        if key_rows.size != value_rows.size or not rows.size or rows.size % (2 * table.num_layers):
            raise InvalidArgument(
                f"{key_rows.size} key rows and {value_rows.size} value rows are no whole number "
                f"of tokens of {table.num_layers} layers",
                field="key_rows",
            )
        if start != table.sealed:
            raise InvalidArgument(
                f"start is {start}, but {table.sealed} tokens of request {request_id} are sealed",
                field="start",
            )
        self.pool.require_leased(rows, session.slot, "key_rows and value_rows")
        self.pool.seal(rows)
        session.leased -= rows.size
        table.append(rows.reshape(2, table.num_layers, -1))
        session.counters.sealed_tokens += rows.size // (2 * table.num_layers)
        return table

    def truncate(
        self, session_id: int, request_id: int, generation: int, new_generation: int, keep: int
    ) -> None:
        """Drop the tokens from `keep` on; the request goes on as `new_generation`.

        Rows that other entries name stay live. Undecided proposals become stale. Large drops
        are released by `release_slice`.
        """
        session = self.session(session_id)
        table = self.request(session_id, request_id, generation)
        if new_generation <= generation:
            raise InvalidArgument(
                f"new_generation is {new_generation}, must be above {generation}",
                field="new_generation",
            )
        if not 0 <= keep <= table.sealed:
            raise InvalidArgument(
                f"num_tokens is {keep}, must be 0 to {table.sealed}", field="num_tokens"
            )
        session.condemned.append(self._drop(session, table, keep).copy())
        table.generation = new_generation
        self._release_condemned(session, SLICE)

    def close_requests(
        self, session_id: int, request_ids: Sequence[int], generations: Sequence[int]
    ) -> None:
        """End requests, all or none. Large ones are released by `release_slice`."""
        session = self.session(session_id)
        if not len(request_ids) or len(request_ids) != len(generations):
            raise InvalidArgument(
                f"{len(request_ids)} request ids and {len(generations)} generations: need as "
                "many of both, at least one",
                field="request_ids",
            )
        if len(set(request_ids)) != len(request_ids):
            raise InvalidArgument("request_ids names a request twice", field="request_ids")
        named = zip(request_ids, generations, strict=True)
        tables = [self.request(session_id, request, generation) for request, generation in named]
        for table in tables:
            session.condemned.append(self._drop(session, table, 0))
            del session.requests[table.request_id]
        self._release_condemned(session, SLICE)

    def release_slice(self, session_id: int, limit: int = SLICE) -> bool:
        """Release about `limit` rows of dropped entries; True when none is left."""
        session = self.sessions.get(session_id)
        return session is None or self._release_condemned(session, limit)

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

    def _drop(self, session: Session, table: RequestTable, keep: int) -> Rows:
        decisions.withdraw(self, session, table)
        return table.truncate(keep, table.generation)

    def _release_condemned(self, session: Session, limit: int) -> bool:
        while session.condemned and limit > 0:
            rows = session.condemned.popleft()
            tokens = max(1, limit // (2 * session.num_layers))
            if rows.shape[2] > tokens:
                session.condemned.appendleft(rows[:, :, tokens:])
                rows = rows[:, :, :tokens]
            limit -= max(1, rows.size)
            self.pool.drop_references(rows.ravel())
        return not session.condemned

    # Sharing

    def propose(
        self,
        session_id: int,
        request_id: int,
        generation: int,
        candidates: Candidates,
        *,
        approximate: bool,
    ) -> Decision | None:
        """Offer donors to targets of one request; see `decisions.propose`."""
        return decisions.propose(
            self, session_id, request_id, generation, candidates, approximate=approximate
        )

    def resolve(
        self, session_id: int, decision_id: int, applied: npt.NDArray[np.uint8]
    ) -> Resolution:
        """Commit or cancel each item of a decision; see `decisions.resolve`."""
        return decisions.resolve(self, session_id, decision_id, applied)

    def new_decision_id(self) -> int:
        """An id that no other decision of this state has."""
        self._next_decision += 1
        return self._next_decision - 1

    # Recovery and checks

    def restore(self, session_id: int, snapshot: recovery.Snapshot, *, approximate: bool) -> None:
        """Rebuild a session's counts from the engine's own tables; see `recovery.restore`."""
        recovery.restore(self, session_id, snapshot, approximate=approximate)

    def check_integrity(self) -> list[str]:
        """What is wrong with the counts, judged from the tables up; empty if nothing is."""
        return integrity.check(self)

    def tables(self) -> Iterator[tuple[Session, RequestTable]]:
        """Every open request with its session."""
        for session in self.sessions.values():
            for table in session.requests.values():
                yield session, table
