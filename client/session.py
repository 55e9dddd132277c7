"""A session: one engine's stay with the sidecar, from attach to detach."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from memshare.client.allocator import RowAllocator, Rows
from memshare.client.memory import MappedPool
from memshare.client.messages import (
    MESSAGE_BYTES,
    close_message,
    open_message,
    seal_message,
    snapshot_messages,
    tokens_per_message,
    truncate_message,
)
from memshare.client.options import SessionOptions, SessionStatistics
from memshare.client.tables import BLOCK_TOKENS, RowTables
from memshare.client.uplink import ATTACHED, CLOSED, LOST, Uplink
from memshare.v1 import common_pb2, handoff_pb2, manager_pb2
from memshare.wire import packing
from memshare.wire.errors import MemshareError, PoolLost
from memshare.wire.handoff import PoolConnection, connect_pool
from memshare.wire.layout import RowLayout
from memshare.wire.runtime import RuntimeDirectory

_log = logging.getLogger("memshare.client")


def attach(layout: RowLayout, options: SessionOptions | None = None) -> Session:
    """Map the sidecar's pool and open a session.

    Raises `AgentUnavailable` or `ManagerUnavailable` if the sidecar does not answer,
    `VersionMismatch`, `LayoutMismatch`, `PeerRefused` or `InvalidArgument` as it refuses.
    """
    options = options or SessionOptions()
    runtime = RuntimeDirectory.at(options.runtime_dir)
    connection = connect_pool(runtime.owner_socket, handoff_pb2.POOL_ROLE_ENGINE, options.timeout)
    try:
        return Session(layout, options, runtime, connection)
    except BaseException:
        connection.close()
        raise


class Session:
    """Made by `attach`. For the engine's thread alone.

    If the sidecar goes away, what is mapped stays readable and running requests go on without
    new sharing; the session resumes by itself when the manager is back (see `Uplink`).
    """

    def __init__(
        self,
        layout: RowLayout,
        options: SessionOptions,
        runtime: RuntimeDirectory,
        connection: PoolConnection,
    ) -> None:
        self.layout = layout
        self.options = options
        self._tables: dict[int, RowTables] = {}
        self._next_request = 1
        self._overflow_said = False
        self._uplink = Uplink(layout, options, runtime, connection, self._snapshot)
        try:
            self.pool = MappedPool(
                connection.descriptor,
                self._uplink.welcome.pool.pool_bytes,
                layout.row_bytes,
                options.overflow_bytes // layout.row_bytes,
            )
        except BaseException:
            self._uplink.close()
            raise
        connection.close_descriptor()
        self._allocator = RowAllocator(self.pool.first_overflow_row, self.pool.total_rows)
        self._uplink.allocator = self._allocator

    @property
    def state(self) -> str:
        """ "attached", "detached-by-manager", "lost" or "closed": see `Uplink`."""
        return self._uplink.state

    @property
    def lost_reason(self) -> MemshareError | None:
        """Why the session is lost, if it is."""
        return self._uplink.lost_reason

    @property
    def session_id(self) -> int:
        """The manager's name for this session."""
        return self._uplink.welcome.session_id

    @property
    def policy(self) -> common_pb2.Policy:
        """The policy in force, as the manager last told it."""
        return self._uplink.welcome.policy

    @property
    def mode_reason(self) -> str:
        """Why less is shared than the policy asked for; empty if it is not."""
        return self._uplink.welcome.mode_reason

    @property
    def statistics(self) -> SessionStatistics:
        """Counts since the session was attached."""
        return self._uplink.statistics

    # ---- requests -------------------------------------------------------------------------

    def open_request(self, first_token: int = 0) -> RowTables:
        """Start a request whose first `first_token` slots are left padding.

        Raises `PoolLost` if this session has no sidecar any more: attach a new one.
        """
        if self.state in (LOST, CLOSED):
            raise PoolLost(
                f"session {self.session_id} is {self.state} "
                f"({self.lost_reason or 'detached'}): attach a new session for new requests"
            )
        with self._uplink.lock:
            tables = RowTables(self._next_request, self.layout.num_layers, first_token)
            self._next_request += 1
            self._tables[tables.request_id] = tables
        return tables

    def reserve(self, tables: Iterable[RowTables], tokens: int, wait: bool) -> None:
        """Make room for `tokens` more tokens in each request.

        With `wait` (a prompt) this may block up to the session's timeout for a grant and
        raises `PoolExhausted` when the sidecar has no such rows. Without (a decode step) it
        never waits: rows that are not at hand come from the private overflow, and
        `PoolExhausted` is raised only when that is used up too. Raises `PoolLost` once the
        session is closed, and in a forked child.
        """
        self._check_open()
        for table in tables:
            need = table.rows_needed(tokens)
            if need == 0:
                continue
            # In one go: a snapshot must find these rows with the allocator or in the table.
            with self._uplink.lock:
                rows = self._allocator.take(need)
                if rows is None and wait:
                    rows = self._await_rows(need)
                private = rows is None
                if rows is None:
                    rows = self._allocator.take_overflow(need)
                    self._count_overflow(need)
                table.add_rows(rows, private)
        # A prompt may have used up what is meant for the steps after it.
        self._lease_ahead()

    def truncate(self, tables: RowTables, length: int) -> None:
        """Forget the tokens of a request from `length` on (a rollback)."""
        self._check_open()
        with self._uplink.lock:
            sealed, generation = tables.sealed, tables.generation
            self._allocator.give_back(tables.truncate(length))
            if tables.opened:
                self._send(
                    truncate_request=truncate_message(tables, generation, min(length, sealed))
                )

    def close_requests(self, tables: Iterable[RowTables]) -> None:
        """End requests; nothing may read their rows any more."""
        if self.state == CLOSED:
            return  # all was given back, or is the parent's of this forked process
        with self._uplink.lock:
            ended = [t for t in tables if self._tables.pop(t.request_id, None) is t]
            for table in ended:
                self._allocator.give_back(table.unsealed_rows())
            known = [table for table in ended if table.opened]
            if known:
                self._send(close_requests=close_message(known))
                self._complete_step()
            self._return_surplus()

    # ---- steps ----------------------------------------------------------------------------

    def end_step(self, flush: bool = False) -> None:
        """Between two steps: apply what was decided, seal what is final, lease ahead.

        Never waits for the sidecar. With `flush`, tokens are sealed even where they do not
        fill a block.
        """
        self.statistics.steps += 1
        with self._uplink.lock:
            if self._uplink.decisions:
                self._apply_decisions()
            if self.state != ATTACHED or self._uplink.is_behind:
                return
            least = 1 if flush else BLOCK_TOKENS
            for tables in self._tables.values():
                if tables.overflow_from is not None:
                    self._leave_overflow(tables)
                if tables.seal_limit() - tables.sealed >= least:
                    self._seal(tables)
            self._lease_ahead()

    def synchronise(self, timeout: float = 60.0) -> bool:
        """Wait until the sidecar has decided on all that is final, and apply it.

        For evaluation and tests: an engine that serves never calls this. Returns False if the
        sidecar is gone or `timeout` seconds have passed.
        """
        self.end_step(flush=True)
        answered = self._uplink.synchronise(timeout)
        self.end_step()
        return answered

    def detach(self) -> None:
        """End the session and all its requests. Safe to call twice, and in any state."""
        if self.state == CLOSED:
            return
        self.close_requests(list(self._tables.values()))
        self._uplink.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # ---- inside ---------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.state == CLOSED:
            raise PoolLost(
                f"session {self.session_id} is closed in this process (it was detached, or this "
                "is a forked child): its rows may be another engine's by now; attach anew"
            )

    def _await_rows(self, need: int) -> Rows | None:
        try:
            return self._uplink.wait_for_rows(need, self._rows_ahead())
        except MemshareError:
            # What came in pieces helps nobody while the rest is missing.
            self._return_surplus()
            raise

    def _return_surplus(self) -> None:
        surplus = self._allocator.trim(4 * self._rows_ahead())
        for piece in np.array_split(surplus, -(-surplus.nbytes // MESSAGE_BYTES) or 1):
            if len(piece):
                rows = packing.pack(piece, packing.INT32)
                self._send(return_rows=manager_pb2.ReturnRows(rows=rows))

    def _rows_ahead(self) -> int:
        requests = max(1, len(self._tables))
        return requests * self.options.ahead_tokens * 2 * self.layout.num_layers

    def _send(self, **message: object) -> None:
        self._uplink.send(manager_pb2.AttachRequest(**message))  # type: ignore[arg-type]

    def _seal(self, tables: RowTables) -> None:
        if not tables.opened:
            tables.opened = True
            self._send(open_request=open_message(tables))
        while tables.sealed < tables.seal_limit():
            end = min(tables.seal_limit(), tables.sealed + tokens_per_message(tables.num_layers))
            self._send(seal_tokens=seal_message(tables, end))
            self.statistics.sealed_tokens += end - tables.sealed
            tables.sealed = end

    def _leave_overflow(self, tables: RowTables) -> None:
        """Move a request's oldest tokens from the overflow to the leased rows that are left."""
        tokens = tables.tokens_in_overflow(self.pool.first_overflow_row)
        count = min(len(tokens), self._allocator.available // (2 * self.layout.num_layers))
        private = tables.rows[:, :, tokens[:count]]
        leased = self._allocator.take(private.size)
        if leased is None:
            return
        rows = self.pool.rows(np.uint8)
        rows[leased] = rows[private.ravel()]
        tables.rows[:, :, tokens[:count]] = leased.reshape(private.shape)
        tables.overflow_from = int(tokens[count]) if count < len(tokens) else None
        self._allocator.give_back(private.ravel())

    def _lease_ahead(self) -> None:
        in_overflow = any(tables.overflow_from is not None for tables in self._tables.values())
        if in_overflow or self._allocator.available < self._rows_ahead():
            self._uplink.ask_for_rows(2 * self._rows_ahead())

    def _complete_step(self) -> None:
        self._send(step_completed=manager_pb2.StepCompleted(step=self.statistics.steps))

    def _apply_decisions(self) -> None:
        decisions = self._uplink.decisions
        while decisions:
            decision = decisions.popleft()
            tables = self._tables.get(decision.request_id)
            applied = np.zeros(len(decision.targets), np.bool_)
            if tables is not None:
                applied = tables.apply(decision)
            self.statistics.applied += int(applied.sum())
            self.statistics.missed += int((~applied).sum())
            self._send(
                decision_result=manager_pb2.DecisionResult(
                    decision_id=decision.decision_id,
                    applied=packing.pack(applied, packing.UINT8),
                )
            )
        # Between two steps of a synchronous engine nothing reads the old rows any more.
        self._complete_step()

    def _snapshot(self, session_id: int, epoch: int) -> list[manager_pb2.SnapshotRequest]:
        return snapshot_messages(
            session_id,
            epoch,
            [tables for tables in self._tables.values() if tables.opened],
            [tables for tables in self._tables.values() if not tables.opened],
            self._allocator.held(),
            self.pool.num_rows,
        )

    def _count_overflow(self, rows: int) -> None:
        self.statistics.overflow_tokens += rows // (2 * self.layout.num_layers)
        if not self._overflow_said:
            self._overflow_said = True
            _log.warning(
                "memshare: no leased row is left; new tokens go to private memory and are not "
                "shared"
            )
