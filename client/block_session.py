"""A session of an engine that shares by its own block table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memshare.client.allocator import Rows
from memshare.client.block_messages import seal_message, snapshot_messages
from memshare.client.block_tables import BlockDecision, BlockTable, Int32, PinRequest
from memshare.client.messages import close_message, truncate_message
from memshare.client.options import BLOCK_TABLES, SessionOptions, SessionStatistics
from memshare.client.uplink import ATTACHED, CLOSED, Uplink
from memshare.v1 import common_pb2, handoff_pb2, manager_pb2
from memshare.wire import packing
from memshare.wire.block_layout import MAX_BLOCKS, BlockLayout
from memshare.wire.errors import InvalidArgument, MemshareError, PoolExhausted
from memshare.wire.handoff import connect_pool
from memshare.wire.runtime import RuntimeDirectory


class BlockSession:
    """The engine owns its free list, block tables and prefix cache, and says here what they hold.

    For the engine's thread alone. Nothing but the constructor, `lease` and `synchronise` waits
    for the sidecar. If it goes away, the blocks stay this engine's, nothing new is shared, and
    the session resumes by itself when the manager is back (see `Uplink`).
    """

    def __init__(
        self, layout: BlockLayout, options: SessionOptions, token: bytes | None = None
    ) -> None:
        """Attach. `token` is that of the process that maps the pool, if it is another one.

        Raises `AgentUnavailable` or `ManagerUnavailable` if the sidecar does not answer,
        `VersionMismatch`, `LayoutMismatch`, `PeerRefused` or `InvalidArgument` as it refuses.
        """
        self.layout = layout
        self._tables: dict[int, BlockTable] = {}
        self._next_request = 1
        self._held = np.zeros(layout.num_blocks, np.bool_)
        self._pinned: set[int] = set()
        runtime = RuntimeDirectory.at(options.runtime_dir)
        # The manager waits, after a restart, for all that map the pool: this process may not.
        role = handoff_pb2.POOL_ROLE_ENGINE if token is None else handoff_pb2.POOL_ROLE_WATCHER
        connection = connect_pool(runtime.owner_socket, role, options.timeout)
        try:
            connection.close_descriptor()
            self._uplink = Uplink(
                layout,
                replace(options, capabilities=(BLOCK_TABLES,)),
                runtime,
                connection,
                self._snapshot,
                token,
            )
        except BaseException:
            connection.close()
            raise

    @property
    def state(self) -> str:
        """ "attached", "detached-by-manager", "lost" or "closed": see `Uplink`."""
        return self._uplink.state

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

    @property
    def held(self) -> npt.NDArray[np.bool_]:
        """Blocks that are leased to this engine, bool `[num_blocks]`, a view."""
        return self._held

    @property
    def pinned(self) -> frozenset[int]:
        """Blocks of this engine that are kept for others."""
        return frozenset(self._pinned)

    # ---- blocks ---------------------------------------------------------------------------

    def lease(self, count: int = 0) -> Rows:
        """Lease blocks for good: `count`, or all that are free with 0.

        Raises `PoolExhausted` if there are fewer, or none at all, `InvalidArgument` for a number
        that is none.
        """
        if not 0 <= count <= MAX_BLOCKS:
            raise InvalidArgument(f"lease: {count} blocks, must be 0 to {MAX_BLOCKS}")
        wanted = count or self.layout.num_blocks
        while True:
            try:
                rows = self._uplink.wait_for_rows(wanted, 0)
                break
            except PoolExhausted as error:
                free = int(error.details.get("free", 0))
                if count or not 0 < free < wanted:
                    raise
                wanted = free
        if rows is None:
            raise MemshareError(f"session {self.session_id} is {self.state}: nothing was leased")
        with self._uplink.lock:
            self._held[rows] = True
        return rows

    def open_request(self, *, private: bool = False) -> BlockTable:
        """Start a request. The manager hears of it when its first block is sealed.

        A `private` one shares within itself alone, whatever the session's tenant.
        """
        with self._uplink.lock:
            table = BlockTable(self._next_request, self.layout.num_groups, private)
            self._next_request += 1
            self._tables[table.request_id] = table
        return table

    def can_seal(self) -> bool:
        """Whether the manager takes part and keeps up; else seal later, in one go."""
        if self.state != ATTACHED:
            return False
        if self._uplink.is_behind:
            self.statistics.deferred += 1
            return False
        return True

    def seal(self, table: BlockTable, blocks: Int32, candidates: Int32) -> None:
        """The next `[num_groups, n]` blocks of a request are written and final.

        `candidates` is int32 `[n, MAX_CANDIDATES]`: earlier blocks of this request by index.
        """
        with self._uplink.lock:
            start = table.sealed
            table.append(blocks, candidates)
            if self.state != ATTACHED:
                return  # the snapshot will say it
            if not table.opened:
                table.opened = True
                self._send(
                    open_request=manager_pb2.OpenRequest(
                        request_id=table.request_id,
                        generation=table.generation,
                        private=table.private,
                    )
                )
            self._send(seal_tokens=seal_message(table, start))
            self.statistics.sealed_tokens += (table.sealed - start) * self.layout.block_tokens

    def truncate(self, table: BlockTable, keep: int = 0) -> None:
        """The engine took the blocks from index `keep` on from a request (a preemption)."""
        with self._uplink.lock:
            generation = table.generation
            table.truncate(keep)
            if table.opened:
                self._send(truncate_request=truncate_message(table, generation, table.sealed))

    def close_requests(self, tables: Iterable[BlockTable]) -> None:
        """End requests."""
        with self._uplink.lock:
            ended = [t for t in tables if self._tables.pop(t.request_id, None) is t]
            known = [table for table in ended if table.opened]
            if known:
                self._send(close_requests=close_message(known))

    # ---- decisions ------------------------------------------------------------------------

    def take_decisions(self) -> Iterator[BlockDecision]:
        """Decisions that wait to be applied; each must be answered by `answer`.

        Those of requests that have ended or were rolled back are answered here. While one is in
        the caller's hands the session cannot resume: its snapshot would miss what is applied.
        """
        while self._uplink.decisions:
            with self._uplink.lock:
                if not self._uplink.decisions:
                    return
                decision = self._uplink.decisions.popleft()
                table = self._tables.get(decision.request_id)
                named = len(decision.donors) == len(decision.targets)
                if table is None or table.generation != decision.generation or not named:
                    self._answer(decision.decision_id, np.zeros(len(decision.targets), np.bool_))
                else:
                    yield BlockDecision.of(decision, table)

    def answer(self, decision: BlockDecision, applied: npt.NDArray[np.bool_]) -> None:
        """Say which items of a decision the engine's table now follows."""
        with self._uplink.lock:
            table = decision.table
            for item in np.flatnonzero(applied).tolist():
                table.share(
                    int(decision.groups[item]),
                    int(decision.targets[item]),
                    int(decision.donor_blocks[item]),
                    float(decision.distances[item]),
                )
            self._answer(decision.decision_id, applied)

    def _answer(self, decision_id: int, applied: npt.NDArray[np.bool_]) -> None:
        self.statistics.applied += int(applied.sum())
        self.statistics.missed += int((~applied).sum())
        self._send(
            decision_result=manager_pb2.DecisionResult(
                decision_id=decision_id, applied=packing.pack(applied, packing.UINT8)
            )
        )

    # ---- blocks for other engines -----------------------------------------------------------

    def take_pin_requests(self) -> Iterator[tuple[PinRequest, npt.NDArray[np.bool_]]]:
        """Each request for pins, with the items that this session's tables still bear out.

        The engine must keep those blocks from reuse, then call `answer_pins`. As with decisions,
        the session cannot resume meanwhile.
        """
        while self._uplink.pin_requests:
            with self._uplink.lock:
                if not self._uplink.pin_requests:
                    return
                request = self._uplink.pin_requests.popleft()
                valid = np.array(
                    [self._bears_out(request, item) for item in range(len(request.blocks))],
                    np.bool_,
                )
                yield request, valid

    def _bears_out(self, request: PinRequest, item: int) -> bool:
        table = self._tables.get(int(request.request_ids[item]))
        return (
            table is not None
            and table.generation == request.generations[item]
            and table.holds(
                int(request.groups[item]), int(request.indices[item]), int(request.blocks[item])
            )
        )

    def answer_pins(self, request: PinRequest, pinned: npt.NDArray[np.bool_]) -> None:
        """Say which blocks are kept from reuse."""
        with self._uplink.lock:
            self._pinned.update(request.blocks[pinned].tolist())
            self._send(
                pin_result=manager_pb2.PinResult(
                    pin_id=request.pin_id, pinned=packing.pack(pinned, packing.UINT8)
                )
            )

    def take_unpinned(self) -> list[int]:
        """Blocks that need not be kept for others any more."""
        blocks: list[int] = []
        with self._uplink.lock:
            while self._uplink.unpinned:
                for block in self._uplink.unpinned.popleft().tolist():
                    if block in self._pinned:
                        self._pinned.remove(block)
                        blocks.append(block)
        return blocks

    # ---- the session ------------------------------------------------------------------------

    def end_step(self) -> None:
        """A step of the engine is over."""
        self.statistics.steps += 1

    def synchronise(self, timeout: float = 60.0) -> bool:
        """Wait until the sidecar has decided on all that is sealed. For tests and evaluation."""
        return self._uplink.synchronise(timeout)

    def detach(self) -> None:
        """End the session: its blocks are not this engine's any more. Safe to call twice."""
        if self.state == CLOSED:
            return
        self.close_requests(list(self._tables.values()))
        self._uplink.close()

    def _send(self, **message: object) -> None:
        self._uplink.send(manager_pb2.AttachRequest(**message))  # type: ignore[arg-type]

    def _snapshot(self, session_id: int, epoch: int) -> list[manager_pb2.SnapshotRequest]:
        tables = [table for table in self._tables.values() if table.opened or table.sealed]
        for table in tables:
            table.opened = True
        pinned = np.array(sorted(self._pinned), np.int32)
        return snapshot_messages(session_id, epoch, tables, self._held, pinned)
