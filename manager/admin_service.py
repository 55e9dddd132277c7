"""AdminService: what operators ask and set."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

import psutil

from memshare.manager.agent_link import MAX_MESSAGE_BYTES
from memshare.manager.counters import ShareCounters
from memshare.manager.engines import Engine
from memshare.manager.manager import Manager
from memshare.manager.policy import PRESETS, Policy, preset
from memshare.manager.rows import RowState
from memshare.manager.service import Context, abort
from memshare.manager.tables import KEY, VALUE, RequestTable
from memshare.v1 import admin_pb2, admin_pb2_grpc
from memshare.wire.errors import InvalidArgument, MemshareError, UnknownSession
from memshare.wire.packing import UINT32, pack
from memshare.wire.version import MAX_PROTOCOL, VERSION

Reply = TypeVar("Reply")
Listed = TypeVar("Listed", admin_pb2.EngineInfo, admin_pb2.RequestInfo)
# Tag and length of a message within another; and what stands beside the list.
_FRAME_BYTES: Final = 8
_MAX_ANSWER_BYTES: Final = MAX_MESSAGE_BYTES - 1024
_Method = Callable[[Any, Any, Context], Awaitable[Reply]]


def _rich(method: Callable[[Any, Any], Reply]) -> _Method[Reply]:
    """Answer a domain error with its rich status."""

    @functools.wraps(method)
    async def served(self: Any, request: Any, context: Context) -> Reply:
        try:
            return method(self, request)
        except MemshareError as error:
            await abort(context, error)

    return served


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Reads and sets; every call is answered from memory at once."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._process = psutil.Process()

    @_rich
    def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest
    ) -> admin_pb2.GetStatusResponse:
        """How the sidecar is and what it holds."""
        manager, link = self._manager, self._manager.link
        total = ShareCounters()
        for engine in manager.engines.values():
            total.add(engine.session.counters)
        blocks = manager.division.blocks if manager.division else None
        cpu, worker = self._process.cpu_times(), link.last_worker
        return admin_pb2.GetStatusResponse(
            server_version=VERSION,
            protocol=MAX_PROTOCOL,
            pid=os.getpid(),
            uptime_seconds=time.monotonic() - manager.started,
            cpu_seconds=cpu.user + cpu.system,
            pool=manager.pool if link.pool else None,
            rows=self._rows(),
            counters=_counters(total),
            sessions=len(manager.engines),
            requests=sum(len(engine.session.requests) for engine in manager.engines.values()),
            state=manager.state_name,
            agent_state=link.agent_state,
            worker_epoch=link.worker_epoch,
            worker_pid=worker.worker_pid if link.worker_epoch else 0,
            worker_cpu_seconds=worker.cpu_seconds,
            worker_restarts=link.worker_restarts,
            awaited_pids=manager.absent.awaited_pids(),
            block_tokens=blocks.block_tokens if blocks else 0,
        )

    def _rows(self) -> admin_pb2.RowCounts:
        state = self._manager.state
        if state is None:
            return admin_pb2.RowCounts()
        counts = state.row_counts()
        return admin_pb2.RowCounts(
            total=state.pool.num_rows,
            free=counts[RowState.FREE],
            leased=counts[RowState.LEASED],
            live=counts[RowState.LIVE],
            quarantined=counts[RowState.QUARANTINED],
        )

    @_rich
    def ListEngines(  # noqa: N802
        self, request: admin_pb2.ListEnginesRequest
    ) -> admin_pb2.ListEnginesResponse:
        """Every attached engine."""
        attached = list(self._manager.engines.values())
        engines = fitting(map(_engine, attached))
        return admin_pb2.ListEnginesResponse(engines=engines, left_out=len(attached) - len(engines))

    @_rich
    def ListRequests(  # noqa: N802
        self, request: admin_pb2.ListRequestsRequest
    ) -> admin_pb2.ListRequestsResponse:
        """Every open request, of one session or all."""
        if request.session_id:
            engines = [self._engine(request.session_id)]
        else:
            engines = list(self._manager.engines.values())
        opened = [
            (engine, table) for engine in engines for table in engine.session.requests.values()
        ]
        requests = fitting(itertools.starmap(_request, opened))
        return admin_pb2.ListRequestsResponse(
            requests=requests, left_out=len(opened) - len(requests)
        )

    @_rich
    def GetPolicy(  # noqa: N802
        self, request: admin_pb2.GetPolicyRequest
    ) -> admin_pb2.GetPolicyResponse:
        """The policy that a session follows, or the default."""
        policy = self._manager.default_policy
        if request.session_id:
            policy = self._engine(request.session_id).narrowed
        return admin_pb2.GetPolicyResponse(policy=policy.to_proto(), presets=list(PRESETS))

    @_rich
    def SetPolicy(  # noqa: N802
        self, request: admin_pb2.SetPolicyRequest
    ) -> admin_pb2.SetPolicyResponse:
        """Change a session's policy, or the default and all that follow it."""
        if request.preset:
            policy = preset(request.preset)
        elif request.HasField("policy"):
            policy = Policy.from_proto(request.policy)
        else:
            raise InvalidArgument("name a preset or give a policy", field="policy")
        changed = self._manager.set_policy(request.session_id, policy)
        if request.session_id:
            policy = self._engine(request.session_id).narrowed
        return admin_pb2.SetPolicyResponse(policy=policy.to_proto(), sessions_changed=changed)

    @_rich
    def CheckIntegrity(  # noqa: N802
        self, request: admin_pb2.CheckIntegrityRequest
    ) -> admin_pb2.CheckIntegrityResponse:
        """Check every invariant of the counts and tables."""
        state = self._manager.state
        errors = state.check_integrity() if state else []
        return admin_pb2.CheckIntegrityResponse(errors=errors, rows=self._rows())

    def _engine(self, session_id: int) -> Engine:
        engine = self._manager.engines.get(session_id)
        if engine is None:
            raise UnknownSession(
                f"session {session_id} is not attached here", session_id=session_id
            )
        return engine


def fitting(messages: Iterable[Listed], limit: int = _MAX_ANSWER_BYTES) -> list[Listed]:
    """As many of the first messages as fit into an answer of `limit` bytes."""
    kept: list[Listed] = []
    for message in messages:
        limit -= message.ByteSize() + _FRAME_BYTES
        if limit < 0:
            break
        kept.append(message)
    return kept


def _counters(counters: ShareCounters) -> admin_pb2.ShareCounters:
    return admin_pb2.ShareCounters(**vars(counters))


def _engine(engine: Engine) -> admin_pb2.EngineInfo:
    session, pool = engine.session, engine.state.pool
    held, leased = pool.held_by(session.slot), pool.leased_by(session.slot)
    waiting = pool.quarantined_by(session.slot)
    return admin_pb2.EngineInfo(
        session_id=session.session_id,
        epoch=session.epoch,
        pid=engine.pid,
        engine=engine.hello.engine,
        tenant=session.tenant,
        layout=engine.hello.layout if engine.hello.HasField("layout") else None,
        block_layout=engine.hello.block_layout if engine.hello.HasField("block_layout") else None,
        policy=engine.narrowed.to_proto(),
        mode_reason=engine.reason,
        leased_rows=leased,
        live_rows=held - leased - waiting,
        requests=len(session.requests),
        counters=_counters(session.counters),
        client_version=engine.hello.client_version,
    )


def _request(engine: Engine, table: RequestTable) -> admin_pb2.RequestInfo:
    shared = table.shared_by_layer()
    keys, values = shared[KEY], shared[VALUE:].reshape(-1)  # blocks have no values apart
    return admin_pb2.RequestInfo(
        session_id=engine.session_id,
        request_id=table.request_id,
        generation=table.generation,
        sealed_tokens=table.sealed,
        shared_keys=int(keys.sum()),
        shared_values=int(values.sum()),
        taint=table.taint,
        accumulated_error=table.error,
        shared_keys_by_layer=pack(keys, UINT32),
        shared_values_by_layer=pack(values, UINT32),
    )
