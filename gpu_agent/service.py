"""AgentService on grpc.aio: a thin adapter of `AgentOperations`."""

# ruff: noqa: N802

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

import grpc
import structlog
from grpc_status import rpc_status

from memshare.gpu_agent.operations import AgentOperations
from memshare.v1 import agent_pb2, agent_pb2_grpc
from memshare.wire.errors import Draining, MemshareError, WorkerRestarted
from memshare.wire.status import to_status

# About what a new worker needs to come up.
_RESTART_SECONDS: Final = 1.0
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context = grpc.aio.ServicerContext[Any, Any]

log = structlog.get_logger()


class AgentServicer(agent_pb2_grpc.AgentServiceServicer):
    """Answers the manager. Calls run on `executor`, so that the event loop stays free."""

    def __init__(self, operations: AgentOperations, executor: Executor) -> None:
        self._operations = operations
        self._executor = executor
        self._running: set[asyncio.Future[Any]] = set()
        self._draining = False

    async def drain(self, timeout: float) -> None:
        """Refuse new calls and wait, at most `timeout` seconds, for those in progress."""
        self._draining = True
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)

    async def GetAgentInfo(
        self, request: agent_pb2.GetAgentInfoRequest, context: _Context
    ) -> agent_pb2.GetAgentInfoResponse:
        return self._operations.get_agent_info()

    async def OpenIndex(
        self, request: agent_pb2.OpenIndexRequest, context: _Context
    ) -> agent_pb2.OpenIndexResponse:
        return await self._call(context, self._operations.open_index, request)

    async def CloseIndex(
        self, request: agent_pb2.CloseIndexRequest, context: _Context
    ) -> agent_pb2.CloseIndexResponse:
        return await self._call(context, self._operations.close_index, request)

    async def IndexRows(
        self, request: agent_pb2.IndexRowsRequest, context: _Context
    ) -> agent_pb2.IndexRowsResponse:
        return await self._call(context, self._operations.index_rows, request)

    async def DropRequests(
        self, request: agent_pb2.DropRequestsRequest, context: _Context
    ) -> agent_pb2.DropRequestsResponse:
        return await self._call(context, self._operations.drop_requests, request)

    async def FindDonors(
        self, request: agent_pb2.FindDonorsRequest, context: _Context
    ) -> agent_pb2.FindDonorsResponse:
        return await self._call(context, self._operations.find_donors, request)

    async def CopyRows(
        self, request: agent_pb2.CopyRowsRequest, context: _Context
    ) -> agent_pb2.CopyRowsResponse:
        return await self._call(context, self._operations.copy_rows, request)

    async def ZeroRows(
        self, request: agent_pb2.ZeroRowsRequest, context: _Context
    ) -> agent_pb2.ZeroRowsResponse:
        return await self._call(context, self._operations.zero_rows, request)

    async def _call(
        self, context: _Context, method: Callable[[_Request], _Response], request: _Request
    ) -> _Response:
        try:
            if self._draining:
                raise Draining("the worker is stopping", retry_after=_RESTART_SECONDS)
            loop = asyncio.get_running_loop()
            call = loop.run_in_executor(self._executor, self._checked, method, request)
            self._running.add(call)
            call.add_done_callback(self._running.discard)
            return await call
        except MemshareError as error:
            failure = error
        except Exception as error:
            log.exception("a call failed", method=method.__name__)
            failure = MemshareError(f"the worker failed: {error!r}")
        status = rpc_status.to_status(to_status(failure))
        return await context.abort(status.code, status.details, status.trailing_metadata)

    def _checked(self, method: Callable[[Any], _Response], request: Any) -> _Response:
        if request.worker_epoch != self._operations.epoch:
            raise WorkerRestarted(
                f"this worker's epoch is {self._operations.epoch}, the call speaks of "
                f"{request.worker_epoch}: index again",
                worker_epoch=self._operations.epoch,
            )
        return method(request)
