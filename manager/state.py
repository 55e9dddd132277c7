"""Sessions, requests and the rows they name: the manager's truth.

Pure: no clock, no I/O. Every method validates all of its arguments before it changes anything
and raises a `memshare.wire.errors` kind; after an error the state is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from memshare.manager import decisions, integrity, lending, recovery
from memshare.manager.decisions import Candidates, Decision, Resolution
from memshare.manager.rows import Rows
from memshare.manager.sessions import SLICE, Session, SessionState
from memshare.manager.tables import (
    RequestTable,
    require_candidates,
    require_room,
    require_whole,
)
from memshare.wire.errors import InvalidArgument, StaleGeneration, UnknownRequest


class ManagerState(SessionState):
    """All counts over one pool of `num_rows` rows, or of blocks: `kinds` of its tables is then 1,
    layers are groups and tokens are blocks. Not safe for use from several threads.

    `clock` counts the times that entries were dropped or requests opened.
    """

    def __init__(self, num_rows: int, *, blocks: bool = False) -> None:
        super().__init__(num_rows, blocks=blocks)
        self.pending: dict[int, Decision] = {}
        self.asked: dict[int, lending.Ask] = {}
        self.unclaimed: list[Rows] = []
        """Rows that a snapshot called pinned, until it is known who borrows them."""
        self.clock = 0
        self._next_id = 1

    def close_session(self, session_id: int) -> None:
        """End a session: nothing may name it any more; `close_slice` gives its rows back."""
        session = self.session(session_id)
        for table in session.requests.values():
            session.condemned.append(self._drop(session, table, 0))
        session.requests.clear()
        lending.forsake(self, session)
        self.pool.forget_quarantine(session.slot)
        session.closing = True

    # Requests

    def open_request(
        self,
        session_id: int,
        request_id: int,
        generation: int,
        first_token: int = 0,
        private: bool = False,
    ) -> RequestTable:
        """Begin a request. Raises `InvalidArgument` if it is open already, or too many are."""
        session = self.session(session_id)
        if request_id in session.requests:
            raise InvalidArgument(
                f"request {request_id} is open already, in generation "
                f"{session.requests[request_id].generation}",
                field="request_id",
            )
        require_room(session.requests)
        table = RequestTable(
            request_id,
            generation,
            first_token,
            session.num_layers,
            self.pool.kinds,
            self.clock + 1,
            private,
        )
        self.clock += 1
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
        candidates: Rows | None = None,
    ) -> RequestTable:
        """Tokens from `start` on are written and final.

        `key_rows` and `value_rows` hold [num_layers, n] ids, flat or not; all of them must be
        leased by the session. Blocks have no `value_rows`, and may be live in the session's hands
        already; `candidates`, [n, k] or flat, are earlier blocks that the engine takes for
        similar, -1 for none. Raises `InvalidArgument`, `RowNotHeld`, `UnknownRequest` or
        `StaleGeneration`.
        """
        session = self.session(session_id)
        table = self.request(session_id, request_id, generation)
        rows = require_whole(table, key_rows, value_rows)
        if start != table.sealed:
            raise InvalidArgument(
                f"start is {start}, but {table.sealed} tokens of request {request_id} are sealed",
                field="start",
            )
        tokens = rows.size // table.per_token
        similar = require_candidates(table, candidates, start, tokens)
        self.pool.require_sealable(rows, session.slot, "key_rows and value_rows")
        self.pool.seal(rows, session.slot)
        table.append(rows.reshape(table.kinds, table.num_layers, -1), candidates=similar)
        session.counters.sealed_tokens += tokens
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
        self.clock += 1
        table.changed = self.clock
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

    def _drop(self, session: Session, table: RequestTable, keep: int) -> Rows:
        decisions.withdraw(self, session, table)
        return table.truncate(keep, table.generation)

    # Sharing

    def propose(
        self,
        session_id: int,
        request_id: int,
        generation: int,
        candidates: Candidates,
        *,
        approximate: bool,
        as_of: int | None = None,
    ) -> Decision | None:
        """Offer donors to targets of one request; see `decisions.propose`."""
        return decisions.propose(
            self, session_id, request_id, generation, candidates,
            approximate=approximate, as_of=as_of,
        )  # fmt: skip

    def resolve(
        self, session_id: int, decision_id: int, applied: npt.NDArray[np.uint8]
    ) -> Resolution:
        """Commit or cancel each item of a decision; see `decisions.resolve`."""
        return decisions.resolve(self, session_id, decision_id, applied)

    def new_id(self) -> int:
        """An id that no other decision or question of this state has."""
        self._next_id += 1
        return self._next_id - 1

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
