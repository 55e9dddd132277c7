"""ManagerService: the thin side that faces the engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final, NoReturn

import grpc
import structlog
from grpc_status import rpc_status

from memshare.manager.division import BLOCK_TABLES
from memshare.manager.engines import Engine
from memshare.manager.manager import Manager
from memshare.manager.messages import MessageHandler
from memshare.manager.recovery import Snapshot, SnapshotTable
from memshare.manager.rows import Rows
from memshare.v1 import manager_pb2, manager_pb2_grpc
from memshare.wire import status
from memshare.wire.errors import InvalidArgument, MemshareError, PoolLost
from memshare.wire.packing import INT32, UINT8, unpack
from memshare.wire.version import VERSION

CAPABILITIES: Final = ("row-tables", BLOCK_TABLES, "exact", "observe", "resume")
_MAX_SNAPSHOT_IDS: Final = 1 << 30
_MAX_SNAPSHOT_PARTS: Final = 1 << 17
_log = structlog.get_logger("memshare.manager")
Context = grpc.aio.ServicerContext[Any, Any]


async def abort(context: Context, error: MemshareError) -> NoReturn:
    """End a call with the rich status of a domain error."""
    rich = rpc_status.to_status(status.to_status(error))
    await context.abort(rich.code, rich.details, tuple(rich.trailing_metadata))
    raise AssertionError("abort returns never")


class ManagerService(manager_pb2_grpc.ManagerServiceServicer):
    """Attach and Snapshot."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[manager_pb2.AttachRequest], context: Context
    ) -> None:
        """Serve one engine for as long as its stream is open."""
        requests = aiter(request_iterator)
        try:
            first = await self._first(requests)
            engine, protocol = await self._manager.attach(first.hello)
        except MemshareError as error:
            _log.info("engine refused", reason=error.reason, error=str(error))
            await abort(context, error)
        try:
            welcome = self._welcome(engine, protocol, first.sequence)
            await engine.outbox.put(welcome)
        except BaseException as error:
            # Whatever keeps it from being served: what it holds must not stay behind.
            self._manager.spawn(self._manager.depart(engine, goodbye=False))
            if isinstance(error, MemshareError):
                await abort(context, error)
            raise
        await self._serve(engine, requests, context)
        if engine.failure.done():
            await abort(context, engine.failure.result())

    def _welcome(self, engine: Engine, protocol: int, sequence: int) -> manager_pb2.AttachResponse:
        welcome = manager_pb2.Welcome(
            protocol=protocol,
            server_version=VERSION,
            capabilities=CAPABILITIES,
            session_id=engine.session_id,
            epoch=engine.session.epoch,
            pool=self._manager.pool,
            policy=engine.narrowed.to_proto(),
            mode_reason=engine.reason,
            snapshot_required=engine.snapshot_required,
        )
        return manager_pb2.AttachResponse(sequence=sequence, welcome=welcome)

    async def _first(
        self, requests: AsyncIterator[manager_pb2.AttachRequest]
    ) -> manager_pb2.AttachRequest:
        seconds = self._manager.settings.hello_seconds
        try:
            first = await asyncio.wait_for(anext(requests), seconds)
        except (TimeoutError, StopAsyncIteration):
            raise InvalidArgument(f"no Hello came within {seconds:g} s") from None
        if first.WhichOneof("message") != "hello":
            raise InvalidArgument("the first message must be Hello")
        return first

    async def _serve(
        self,
        engine: Engine,
        requests: AsyncIterator[manager_pb2.AttachRequest],
        context: Context,
    ) -> None:
        reader = asyncio.create_task(self._read(engine, requests))
        writer = asyncio.create_task(_write(engine, context))
        goodbye = False
        try:
            await asyncio.wait(
                (reader, writer, engine.failure), return_when=asyncio.FIRST_COMPLETED
            )
            if reader.done():
                goodbye = reader.result() and not engine.failure.done()
        finally:
            reader.cancel()
            departure = self._manager.spawn(self._depart(engine, reader, goodbye=goodbye))
            if not goodbye:
                writer.cancel()
        await asyncio.shield(departure)
        with contextlib.suppress(asyncio.CancelledError):
            await engine.outbox.put(None)
            await writer

    async def _read(
        self, engine: Engine, requests: AsyncIterator[manager_pb2.AttachRequest]
    ) -> bool:
        """Handle messages to the last. Returns whether that was a goodbye."""
        handler = MessageHandler(self._manager, engine)
        try:
            async for request in requests:
                if request.WhichOneof("message") == "goodbye":
                    return True
                answer = await handler.handle(request)
                if answer is not None:
                    await engine.outbox.put(answer)
        except (grpc.RpcError, grpc.aio.UsageError):
            pass
        return False

    async def _depart(self, engine: Engine, reader: asyncio.Task[bool], *, goodbye: bool) -> None:
        await asyncio.wait([reader])
        await self._manager.depart(engine, goodbye=goodbye)

    async def Snapshot(  # noqa: N802
        self, request_iterator: AsyncIterator[manager_pb2.SnapshotRequest], context: Context
    ) -> manager_pb2.SnapshotResponse:
        """Restore a resumed session's counts, all or nothing."""
        try:
            return await self._restore(request_iterator)
        except MemshareError as error:
            await abort(context, error)

    async def _restore(
        self, parts: AsyncIterator[manager_pb2.SnapshotRequest]
    ) -> manager_pb2.SnapshotResponse:
        snapshot, engine, count, size, ended = Snapshot(), None, 0, 0, False
        async for part in parts:
            if ended:
                raise InvalidArgument("a message came after the end of the snapshot", field="end")
            engine = self._resumed(part.session_id, part.epoch, engine)
            kind = part.WhichOneof("part")
            if kind == "lease":
                snapshot.leases.append(unpack(part.lease.rows, INT32, "lease.rows"))
                snapshot.pinned.append(_pinned(part.lease, engine))
                size += len(snapshot.leases[-1]) + len(snapshot.pinned[-1])
            elif kind == "table":
                snapshot.tables.append(_table(part.table, engine))
                size += snapshot.tables[-1].size
            elif kind != "end":
                raise InvalidArgument("a message of the snapshot is empty or unknown", field="part")
            elif part.end.parts != count:
                raise InvalidArgument(
                    f"{count} messages came before the end of the snapshot, it says "
                    f"{part.end.parts}",
                    field="end.parts",
                )
            ended = kind == "end"
            count += 1
            if size > _MAX_SNAPSHOT_IDS or count > _MAX_SNAPSHOT_PARTS:
                raise InvalidArgument(
                    f"a snapshot names at most {_MAX_SNAPSHOT_IDS} rows in {_MAX_SNAPSHOT_PARTS} "
                    "messages"
                )
        # A stream that breaks off looks like one that was closed: only its end tells them apart.
        if engine is None or not ended:
            raise InvalidArgument(
                f"the snapshot breaks off after {count} messages: its end is missing", field="end"
            )
        # The stream may have ended, or the pool, while the parts came in.
        engine = self._resumed(engine.session_id, engine.session.epoch, engine)
        self._manager.restore(engine, snapshot)
        pool, slot = engine.state.pool, engine.session.slot
        held, leased = pool.held_by(slot), pool.leased_by(slot)
        return manager_pb2.SnapshotResponse(live_rows=held - leased, leased_rows=leased)

    def _resumed(self, session_id: int, epoch: int, known: Engine | None) -> Engine:
        state = self._manager.state
        if state is None:
            raise PoolLost("there is no pool: attach anew")
        state.session(session_id, epoch)
        engine = self._manager.engines[session_id]
        if known is not None and engine is not known:
            raise InvalidArgument("a snapshot speaks of one session only", field="session_id")
        if not engine.snapshot_required:
            raise InvalidArgument(f"session {session_id} has nothing to restore")
        return engine


def _pinned(lease: manager_pb2.SnapshotLease, engine: Engine) -> Rows:
    pinned = unpack(lease.pinned_rows, INT32, "lease.pinned_rows")
    if len(pinned) and engine.state.pool.kinds != 1:
        raise InvalidArgument("only blocks are pinned, not rows", field="lease.pinned_rows")
    return pinned


def _table(table: manager_pb2.SnapshotTable, engine: Engine) -> SnapshotTable:
    kinds, count = engine.state.pool.kinds, table.num_tokens * engine.session.num_layers
    shared = unpack(table.shared, UINT8, "table.shared", kinds * count)
    if len(shared) and shared.max() > 1:
        raise InvalidArgument("table.shared: flags must be 0 or 1", field="table.shared")
    return SnapshotTable(
        table.request_id,
        table.generation,
        table.first_token,
        unpack(table.key_rows, INT32, "table.key_rows", count),
        unpack(table.value_rows, INT32, "table.value_rows", (kinds - 1) * count),
        shared.astype(bool),
        table.accumulated_error,
        table.start,
        unpack(table.candidates, INT32, "table.candidates"),
        table.private,
    )


async def _write(engine: Engine, context: Any) -> None:
    while (message := await engine.outbox.get()) is not None:
        await context.write(message)
