"""The driver of one session: index what was sealed, look for donors, propose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog

from memshare.manager import search
from memshare.manager.agent_link import AgentLink
from memshare.manager.policy import Mode, Policy
from memshare.manager.sessions import Session
from memshare.manager.state import ManagerState
from memshare.manager.tables import RequestTable
from memshare.v1 import agent_pb2, manager_pb2
from memshare.wire.errors import AgentUnavailable, MemshareError, WorkerRestarted
from memshare.wire.layout import RowLayout
from memshare.wire.packing import INT32, UINT32, UINT64, pack

_BACKOFF_SECONDS: Final = 1.0
_MAX_INDEXED_IDS: Final = 1 << 21
_log = structlog.get_logger("memshare.manager")
Send = Callable[[manager_pb2.AttachResponse], Awaitable[None]]


class Sharer:
    """Runs beside a session's stream; nothing an engine waits for passes through here.

    The stream tells it what happened (`sealed`, `dropped`, `sync`); it works through it in
    order, one call of the worker at a time. While no worker is ready it pauses, then opens the
    session's index anew and indexes from the tables.
    """

    def __init__(
        self,
        state: ManagerState,
        session: Session,
        layout: RowLayout,
        policy: Policy,
        link: AgentLink,
        send: Send,
        *,
        batch_tokens: int,
        candidates: int,
    ) -> None:
        self._state = state
        self._session = session
        self._layout = layout
        self._link = link
        self._send = send
        self._batch_tokens = batch_tokens
        self._candidates = candidates
        self._policy = policy
        # Epoch in which the index is whole, and the last in which it was opened at all.
        self._epoch = self._opened = 0
        self._task: asyncio.Task[None] | None = None
        self._calling = self._stopped = False
        self._wake = asyncio.Event()
        self._touched: dict[int, None] = {}
        self._dropped: dict[int, tuple[int, int]] = {}
        self._syncs: list[int] = []
        self._known: set[int] = set()

    @property
    def _policy_is_exact(self) -> bool:
        return self._policy.mode is Mode.EXACT or not self._layout.inv_freq

    def wake(self) -> None:
        """Go on: a worker is ready."""
        self._wake.set()

    def sealed(self, request_id: int) -> None:
        """Tokens of a request were sealed."""
        self._touched[request_id] = None
        self._wake.set()

    def dropped(self, request_id: int, keep: int, generation: int) -> None:
        """A request was truncated to `keep` tokens, or closed (0)."""
        if request_id not in self._known:
            return
        before = self._dropped.get(request_id, (keep, generation))
        self._dropped[request_id] = (min(keep, before[0]), generation)
        self._wake.set()

    def sync(self, sequence: int) -> None:
        """Answer with Synced when all that was told before is done."""
        self._syncs.append(sequence)
        self._wake.set()

    def set_policy(self, policy: Policy) -> None:
        """Examine all tokens again, by another policy."""
        self._policy = policy
        for table in self._session.requests.values():
            table.examined = [0] * len(policy.stages)
            table.clear_shadow()
            self._touched[table.request_id] = None
        self._wake.set()

    def start(self) -> None:
        """Work, beside whatever else runs, until `close`."""
        self._task = asyncio.create_task(self._run())
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            syncs, self._syncs = self._syncs, []
            try:
                if self._link.worker_epoch:
                    await self._work(everything=bool(syncs))
            except (WorkerRestarted, AgentUnavailable) as error:
                self._epoch = 0
                _log.info("sharing paused", session=self._session.session_id, error=str(error))
            except MemshareError as error:
                self._epoch = 0
                _log.error("search refused", session=self._session.session_id, error=str(error))
                asyncio.get_running_loop().call_later(_BACKOFF_SECONDS, self._wake.set)
            except Exception:
                self._epoch = 0
                _log.exception("search failed", session=self._session.session_id)
                asyncio.get_running_loop().call_later(_BACKOFF_SECONDS, self._wake.set)
            for sequence in syncs:
                await self._send(
                    manager_pb2.AttachResponse(sequence=sequence, synced=manager_pb2.Synced())
                )

    async def _call(self, method: Callable[..., Any], request: Any) -> Any:
        self._calling = True
        try:
            response = await self._link.call(method, request)
        finally:
            self._calling = False
        if self._stopped:
            raise asyncio.CancelledError
        return response

    async def close(self) -> None:
        """Stop, and let the worker forget the session."""
        self._stopped = True
        if self._task is not None:
            # The worker would finish a call that is cancelled here, perhaps after CloseIndex.
            if not self._calling:
                self._task.cancel()
            await asyncio.wait([self._task])
        if self._opened and self._opened == self._link.worker_epoch:
            request = agent_pb2.CloseIndexRequest(
                worker_epoch=self._opened, session_id=self._session.session_id
            )
            try:
                await self._link.call(self._link.stub.CloseIndex, request)
            except MemshareError as error:
                _log.info("index not closed", error=str(error))

    async def _work(self, *, everything: bool) -> None:
        await self._open()
        await self._drop()
        if everything:
            self._touched.update(dict.fromkeys(self._session.requests))
        while self._touched:
            request_id = next(iter(self._touched))
            del self._touched[request_id]
            table = self._session.requests.get(request_id)
            if table is None:
                continue
            if everything or table.sealed - table.indexed >= self._batch_tokens:
                await self._index(table)
                await self._examine(table, everything=everything)

    async def _open(self) -> None:
        epoch = self._link.worker_epoch
        if epoch == self._epoch:
            return
        session_id = self._session.session_id
        self._dropped.clear()
        self._known.clear()
        close = agent_pb2.CloseIndexRequest(worker_epoch=epoch, session_id=session_id)
        await self._call(self._link.stub.CloseIndex, close)
        open_ = agent_pb2.OpenIndexRequest(
            worker_epoch=epoch,
            session_id=session_id,
            layout=self._layout.to_proto(),
            row_bytes=self._layout.row_bytes,
            tenant=self._session.tenant,
        )
        self._opened = epoch
        await self._call(self._link.stub.OpenIndex, open_)
        for table in self._session.requests.values():
            table.indexed = 0
            self._touched[table.request_id] = None
        self._epoch = epoch

    async def _drop(self) -> None:
        while self._dropped:
            dropped, self._dropped = self._dropped, {}
            self._known.difference_update(
                request_id for request_id, (keep, _) in dropped.items() if not keep
            )
            request = agent_pb2.DropRequestsRequest(
                worker_epoch=self._epoch,
                session_id=self._session.session_id,
                request_ids=pack(list(dropped), UINT64),
                keep_tokens=pack([keep for keep, _ in dropped.values()], UINT32),
                generations=pack([generation for _, generation in dropped.values()], UINT32),
            )
            await self._call(self._link.stub.DropRequests, request)

    async def _index(self, table: RequestTable) -> None:
        while table.indexed < table.sealed:
            # What a truncation dropped must be forgotten before more is added after it.
            await self._drop()
            start = table.indexed
            tokens = min(table.sealed - start, max(1, _MAX_INDEXED_IDS // table.num_layers))
            if tokens <= 0 or not self._is_open(table, table.generation):
                return
            rows = table.rows[:, :, start : start + tokens]
            request = agent_pb2.IndexRowsRequest(
                worker_epoch=self._epoch,
                session_id=self._session.session_id,
                request_id=table.request_id,
                generation=table.generation,
                start=start,
                num_tokens=tokens,
                key_rows=pack(rows[0], INT32),
                value_rows=pack(rows[1], INT32),
                first_token=table.first_token,
            )
            table.indexed = start + tokens
            self._known.add(table.request_id)
            await self._call(self._link.stub.IndexRows, request)

    def _is_open(self, table: RequestTable, generation: int) -> bool:
        current = self._session.requests.get(table.request_id)
        return current is table and table.generation == generation

    async def _examine(self, table: RequestTable, *, everything: bool) -> None:
        policy, exact = self._policy, self._policy_is_exact
        least = 1 if everything else self._batch_tokens
        table.examined = table.examined or [0] * len(policy.stages)
        first = table.first_token + (0 if exact else policy.protected_tokens)
        for number, stage in enumerate(policy.stages):
            while True:
                await self._drop()
                # Either may have changed while the worker was waited for.
                if self._policy is not policy or not self._is_open(table, table.generation):
                    return
                start = max(table.examined[number], first)
                end = min(table.sealed - stage.min_age, table.indexed)
                if end - start < least:
                    break
                end = min(end, start + self._batch_tokens)
                window = search.Window(number, start, end, first, exact)
                await self._find(table, policy, window)

    async def _find(self, table: RequestTable, policy: Policy, window: search.Window) -> None:
        generation = table.generation
        table.examined[window.stage] = window.end
        pool = self._state.pool
        used = 1 - pool.free / pool.num_rows
        request = search.build_request(pool, table, policy, window, used)
        if request is None:
            return
        request.worker_epoch = self._epoch
        request.session_id = self._session.session_id
        request.candidates = self._candidates
        try:
            response = await self._call(self._link.stub.FindDonors, request)
        except MemshareError:
            if self._is_open(table, generation) and self._policy is policy:
                table.examined[window.stage] = min(table.examined[window.stage], window.start)
            raise
        counters = self._session.counters
        counters.examined_entries += response.examined
        counters.nonfinite += response.nonfinite
        if not self._is_open(table, generation) or self._policy is not policy:
            return
        found = search.read_response(response)
        if not window.exact:
            found = search.affordable(table, policy, found, counters)
        if not len(found):
            return
        if policy.mode is Mode.OBSERVE:
            search.observe(table, self._session.session_id, found, counters)
            return
        decision = self._state.propose(
            self._session.session_id,
            table.request_id,
            generation,
            found,
            approximate=not window.exact,
        )
        if decision is not None:
            await self._send(manager_pb2.AttachResponse(share_decision=search.to_message(decision)))
