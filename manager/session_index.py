"""What the agent's worker has indexed of one session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import structlog

from memshare.manager.agent_link import AgentLink
from memshare.manager.division import Layout
from memshare.manager.sessions import Session
from memshare.manager.tables import RequestTable
from memshare.v1 import agent_pb2
from memshare.wire.block_layout import BlockLayout
from memshare.wire.errors import MemshareError
from memshare.wire.packing import INT32, UINT32, UINT64, pack

_MAX_INDEXED_IDS: Final = 1 << 21
_log = structlog.get_logger("memshare.manager")


class SessionIndex:
    """Follows the session's tables, one call of the worker at a time. `open` it first, and again
    after a call failed or the worker is another: it is then built anew.
    """

    def __init__(self, session: Session, layout: Layout, link: AgentLink) -> None:
        self._session = session
        self._layout = layout
        self._link = link
        # Epoch in which the index is whole, and the last in which it was opened at all.
        self.epoch = self._opened = 0
        self._calling = self._stopped = False
        self._dropped: dict[int, tuple[int, int]] = {}
        self._known: set[int] = set()

    async def call(self, method: Callable[..., Any], request: Any) -> Any:
        """Call the worker on behalf of the session. Raises its domain error."""
        self._calling = True
        try:
            response = await self._link.call(method, request)
        finally:
            self._calling = False
        if self._stopped:
            raise asyncio.CancelledError
        return response

    async def close(self, task: asyncio.Task[None] | None) -> None:
        """Stop the session's task, and let the worker forget the session."""
        self._stopped = True
        if task is not None:
            # The worker would finish a call that is cancelled here, perhaps after CloseIndex.
            if not self._calling:
                task.cancel()
            await asyncio.wait([task])
        if self._opened and self._opened == self._link.worker_epoch:
            request = agent_pb2.CloseIndexRequest(
                worker_epoch=self._opened, session_id=self._session.session_id
            )
            try:
                await self._link.call(self._link.stub.CloseIndex, request)
            except MemshareError as error:
                _log.info("index not closed", error=str(error))

    async def open(self) -> bool:
        """Make sure that the worker has an index of the session; whether it is a new one."""
        epoch = self._link.worker_epoch
        if epoch == self.epoch:
            return False
        session_id = self._session.session_id
        self._dropped.clear()
        self._known.clear()
        close = agent_pb2.CloseIndexRequest(worker_epoch=epoch, session_id=session_id)
        await self.call(self._link.stub.CloseIndex, close)
        open_ = agent_pb2.OpenIndexRequest(
            worker_epoch=epoch,
            session_id=session_id,
            row_bytes=self._layout.row_bytes,
            tenant=self._session.tenant,
        )
        if isinstance(self._layout, BlockLayout):
            open_.block_layout.CopyFrom(self._layout.to_proto())
        else:
            open_.layout.CopyFrom(self._layout.to_proto())
        self._opened = epoch
        await self.call(self._link.stub.OpenIndex, open_)
        for table in self._session.requests.values():
            table.indexed = 0
        self.epoch = epoch
        return True

    def note_dropped(self, request_id: int, keep: int, generation: int) -> bool:
        """A request was truncated to `keep` tokens, or closed (0). Whether there is to `drop`."""
        if request_id not in self._known:
            return False
        before = self._dropped.get(request_id, (keep, generation))
        self._dropped[request_id] = (min(keep, before[0]), generation)
        return True

    async def drop(self) -> None:
        """Forget what was dropped."""
        while self._dropped:
            dropped, self._dropped = self._dropped, {}
            self._known.difference_update(
                request_id for request_id, (keep, _) in dropped.items() if not keep
            )
            request = agent_pb2.DropRequestsRequest(
                worker_epoch=self.epoch,
                session_id=self._session.session_id,
                request_ids=pack(list(dropped), UINT64),
                keep_tokens=pack([keep for keep, _ in dropped.values()], UINT32),
                generations=pack([generation for _, generation in dropped.values()], UINT32),
            )
            await self.call(self._link.stub.DropRequests, request)

    async def add(self, table: RequestTable) -> None:
        """Index the tokens of a request that are sealed and not indexed yet."""
        while table.indexed < table.sealed:
            # What a truncation dropped must be forgotten before more is added after it.
            await self.drop()
            start = table.indexed
            tokens = min(table.sealed - start, max(1, _MAX_INDEXED_IDS // table.num_layers))
            if tokens <= 0 or not self.is_open(table, table.generation):
                return
            rows = table.rows[:, :, start : start + tokens]
            request = agent_pb2.IndexRowsRequest(
                worker_epoch=self.epoch,
                session_id=self._session.session_id,
                request_id=table.request_id,
                generation=table.generation,
                start=start,
                num_tokens=tokens,
                key_rows=pack(rows[0], INT32),
                value_rows=pack(rows[1], INT32) if table.kinds == 2 else b"",
                first_token=table.first_token,
                candidates=pack(table.candidates_of(start, start + tokens), INT32),
                private=table.private,
            )
            table.indexed = start + tokens
            self._known.add(table.request_id)
            await self.call(self._link.stub.IndexRows, request)

    def is_open(self, table: RequestTable, generation: int) -> bool:
        """Whether a table is still that of an open request in this generation."""
        current = self._session.requests.get(table.request_id)
        return current is table and table.generation == generation
