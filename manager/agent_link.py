"""The manager's two ties to the agent: the memory owner's socket and the worker's service."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Any, Final, TypeVar

import grpc
import numpy as np
import structlog

from memshare.v1 import agent_pb2, agent_pb2_grpc, common_pb2, handoff_pb2
from memshare.wire import status
from memshare.wire.block_layout import BlockLayout
from memshare.wire.errors import AgentUnavailable, MemshareError, WorkerRestarted
from memshare.wire.handoff import PoolConnection, connect_pool
from memshare.wire.layout import RowLayout
from memshare.wire.packing import INT32, pack
from memshare.wire.runtime import RuntimeDirectory

MAX_MESSAGE_BYTES: Final = 64 << 20
_RETRY_SECONDS: Final = 0.2
_POLL_SECONDS: Final = 1.0
_CALL_SECONDS: Final = 60.0
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_log = structlog.get_logger("memshare.manager")
Reply = TypeVar("Reply")


class AgentLink:
    """Follows the agent as its processes come and go.

    `on_pool(holders)` is called when an owner is found, with the engines (token to pid) that
    hold its pool already; `on_pool_lost()` when it is gone; `on_worker()` when a worker is
    ready, anew or again. All run on the event loop.
    """

    def __init__(
        self,
        runtime: RuntimeDirectory,
        on_pool: Callable[[dict[bytes, int]], None],
        on_pool_lost: Callable[[], None],
        on_worker: Callable[[], None],
    ) -> None:
        self.owner_socket = runtime.owner_socket
        self._on_pool = on_pool
        self._on_pool_lost = on_pool_lost
        self._on_worker = on_worker
        self._owner: PoolConnection | None = None
        self._owner_lock = asyncio.Lock()
        self._channel = grpc.aio.insecure_channel(
            f"unix:{runtime.worker_socket}", options=_CHANNEL_OPTIONS
        )
        self.stub = agent_pb2_grpc.AgentServiceStub(self._channel)
        self._poll_now = asyncio.Event()
        self._worker: agent_pb2.GetAgentInfoResponse | None = None
        # Until the worker was told to forget what an earlier manager had it index.
        self._inherited = True
        self.last_worker = agent_pb2.GetAgentInfoResponse()
        self.worker_restarts = 0

    # Owner

    @property
    def pool(self) -> common_pb2.PoolDescriptor | None:
        """The pool of the owner that is connected, None while there is none."""
        return self._owner.pool if self._owner else None

    @property
    def token_key(self) -> bytes:
        """What session tokens are checked with."""
        return self._owner.token_key if self._owner else b""

    async def run(self) -> None:
        """Stay connected to whoever owns the memory until cancelled."""
        worker = asyncio.create_task(self._watch_worker())
        try:
            while True:
                await self._follow_owner()
        finally:
            worker.cancel()
            if self._owner:
                self._owner.close()
            await self._channel.close(None)

    async def _follow_owner(self) -> None:
        try:
            owner = await asyncio.to_thread(
                connect_pool, self.owner_socket, handoff_pb2.POOL_ROLE_MANAGER
            )
        except MemshareError as error:
            _log.debug("no memory owner", error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)
            return
        owner.close_descriptor()  # the manager never touches the memory itself
        try:
            holders = await self._list(owner)
        except AgentUnavailable:
            owner.close()
            return
        self._owner = owner
        _log.info("pool found", pool=owner.pool.pool_id.hex(), bytes=owner.pool.pool_bytes)
        self._poll_now.set()
        self._on_pool(holders)
        try:
            await _hang_up(owner)
        finally:
            self._owner = self._worker = None
            owner.close()
        _log.error("pool lost", pool=owner.pool.pool_id.hex())
        self._on_pool_lost()

    async def holders(self) -> dict[bytes, int]:
        """Token and pid of each engine that holds the pool mapped.

        Raises `AgentUnavailable` without an owner.
        """
        if self._owner is None:
            raise AgentUnavailable("no memory owner is connected")
        return await self._list(self._owner)

    async def _list(self, owner: PoolConnection) -> dict[bytes, int]:
        async with self._owner_lock:
            holders = await asyncio.to_thread(owner.list_holders)
        return {holder.token: holder.pid for holder in holders}

    # Worker

    @property
    def worker_epoch(self) -> int:
        """Epoch of the worker that is ready, 0 while none is."""
        return self._worker.worker_epoch if self._worker else 0

    @property
    def agent_state(self) -> str:
        """For the operator: "ready", "worker-restarting" or "no-owner"."""
        if self._owner is None:
            return "no-owner"
        return "ready" if self._worker else "worker-restarting"

    async def _watch_worker(self) -> None:
        while True:
            self._poll_now.clear()
            try:
                info = await self.stub.GetAgentInfo(
                    agent_pb2.GetAgentInfoRequest(), timeout=_CALL_SECONDS
                )
            except grpc.aio.AioRpcError:
                self._worker = None
            else:
                if self._inherited and not await self._forget_inherited(info.worker_epoch):
                    continue
                self._see_worker(info)
            try:
                pause = _POLL_SECONDS if self._worker else _RETRY_SECONDS
                await asyncio.wait_for(self._poll_now.wait(), pause)
            except TimeoutError:
                pass

    async def _forget_inherited(self, worker_epoch: int) -> bool:
        """Close the indexes of an earlier manager's sessions. Returns whether it worked."""
        request = agent_pb2.CloseIndexRequest(worker_epoch=worker_epoch)
        try:
            await self.stub.CloseIndex(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(_RETRY_SECONDS)
            return False
        self._inherited = False
        return True

    def _see_worker(self, info: agent_pb2.GetAgentInfoResponse) -> None:
        if self._owner is None or info.pool.pool_id != self._owner.pool.pool_id:
            self._worker = None
            return
        known, self._worker = self.worker_epoch, info
        before, self.last_worker = self.last_worker.worker_epoch, info
        if before and before != info.worker_epoch:
            self.worker_restarts += 1
            _log.warning("worker restarted", pid=info.worker_pid, epoch=info.worker_epoch)
        if known != info.worker_epoch:
            self._on_worker()

    async def call(
        self, method: Callable[..., Any], request: Any, timeout: float | None = _CALL_SECONDS
    ) -> Any:
        """Call the worker. Raises its domain error.

        After `AgentUnavailable` and `WorkerRestarted` the worker counts as gone until it is
        heard of again.
        """
        try:
            return await method(request, timeout=timeout)
        except grpc.aio.AioRpcError as failure:
            error = status.from_rpc_error(failure, AgentUnavailable)
            if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                error = AgentUnavailable(f"the worker gave no answer within {timeout} s")
            if isinstance(error, (AgentUnavailable, WorkerRestarted)):
                self._worker = None
                self._poll_now.set()
            raise error from failure

    async def zero_rows(self, layout: RowLayout | BlockLayout, rows: np.ndarray[Any, Any]) -> None:
        """Overwrite rows with zeros. Raises `AgentUnavailable` while no worker is ready."""
        if not self.worker_epoch:
            raise AgentUnavailable(
                "rows of another tenant must be zeroed and no worker is ready",
                retry_after=_RETRY_SECONDS,
            )
        request = agent_pb2.ZeroRowsRequest(
            worker_epoch=self.worker_epoch, row_bytes=layout.row_bytes, rows=pack(rows, INT32)
        )
        if isinstance(layout, BlockLayout):
            request.block_layout.CopyFrom(layout.to_proto())
        # Without a deadline: a worker that is merely slow may still be writing.
        try:
            await self.call(self.stub.ZeroRows, request, timeout=None)
        except (AgentUnavailable, WorkerRestarted) as error:
            pid = self.last_worker.worker_pid
            raise AgentUnavailable(
                f"rows of another tenant must be zeroed and the worker (pid {pid}) is gone: "
                f"{error}",
                retry_after=_RETRY_SECONDS,
                worker_pid=pid,
            ) from error


async def _hang_up(owner: PoolConnection) -> None:
    """Return when the peer has closed the connection; reads nothing from it."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    with select.epoll() as watch:
        # No event asked for: a hang-up is reported always, packets are left to their reader.
        watch.register(owner.connection.fileno(), 0)
        loop.add_reader(watch.fileno(), gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(watch.fileno())
