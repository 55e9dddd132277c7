"""What the services act on: the pool's state, the engines, and their comings and goings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import structlog

from memshare.manager.absent import RETRY_AFTER, AbsentEngines
from memshare.manager.admission import Admission
from memshare.manager.agent_link import AgentLink
from memshare.manager.config import ManagerSettings
from memshare.manager.division import Division
from memshare.manager.engines import Engine
from memshare.manager.pins import Outlet, Pins
from memshare.manager.policy import Mode, Policy
from memshare.manager.recovery import Snapshot
from memshare.manager.sessions import Session
from memshare.manager.state import ManagerState
from memshare.v1 import common_pb2, manager_pb2
from memshare.wire.errors import AgentUnavailable, PoolLost, UnknownSession
from memshare.wire.runtime import RuntimeDirectory

_log = structlog.get_logger("memshare.manager")


class Manager:
    """The one object behind all services. Lives on one event loop."""

    def __init__(self, settings: ManagerSettings) -> None:
        self.settings = settings
        self.default_policy = settings.policy
        self.state: ManagerState | None = None
        self.division: Division | None = None
        self.pins: Pins | None = None
        self.engines: dict[int, Engine] = {}
        self.draining = False
        self.started = time.monotonic()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.index_closings: set[asyncio.Task[None]] = set()
        self.unproven = False
        """Whether engines may have used the pool before, and not all of them are back."""
        self.link = AgentLink(
            RuntimeDirectory(settings.runtime_dir),
            self._pool_found,
            self._pool_lost,
            self._worker_ready,
        )
        self.absent = AbsentEngines(self.link.holders, self.give_back, self._note_recovered)
        self._admission = Admission(self)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside the stream that caused it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # The agent

    def _pool_found(self, holders: dict[bytes, int]) -> None:
        self.state = self.division = self.pins = None
        self.unproven = bool(holders)
        if holders:
            _log.warning("waiting for engines to come back", pids=sorted(holders.values()))
        self.absent.expect(holders)

    def _pool_lost(self) -> None:
        self.state = self.division = self.pins = None
        self.absent.expect({})
        for engine in self.engines.values():
            engine.fail(PoolLost("the owner of the pool is gone, and its memory with it"))

    def _worker_ready(self) -> None:
        for engine in self.engines.values():
            if engine.sharer:
                engine.sharer.wake()

    @property
    def pool(self) -> common_pb2.PoolDescriptor:
        """The pool as it is divided now. Raises `AgentUnavailable` without an owner."""
        pool = common_pb2.PoolDescriptor()
        pool.CopyFrom(self.require_pool())
        pool.row_bytes = self.division.row_bytes if self.division else 0
        pool.num_rows = self.division.num_rows if self.division else 0
        return pool

    def require_pool(self) -> common_pb2.PoolDescriptor:
        """The pool as the owner has it. Raises `AgentUnavailable` without an owner."""
        if self.link.pool is None:
            raise AgentUnavailable(
                f"no memory owner answers at {self.link.owner_socket}", retry_after=RETRY_AFTER
            )
        return self.link.pool

    @property
    def state_name(self) -> str:
        """For the operator: "draining", "no-agent", "recovering" or "serving"."""
        if self.draining:
            return "draining"
        if self.link.pool is None:
            return "no-agent"
        return "recovering" if self.absent.awaited_pids() else "serving"

    # Recovery

    def _note_recovered(self) -> None:
        if self.state and self.pins and self.unproven and not self.absent.awaited_pids():
            self.unproven = False
            self.pins.settle()
            _log.info("recovered", rows=self.state.row_counts())
            for error in self.state.check_integrity():
                _log.error("integrity", error=error)

    async def give_back(self, session: Session) -> None:
        """Release all rows of a session, in slices between which others get their turn."""
        state, pins, session_id = self.state, self.pins, session.session_id
        while state is not None and state.sessions.get(session_id) is session:
            if not session.closing:
                state.close_session(session_id)
            state.close_slice(session_id)
            if pins:
                pins.give_back()
            await asyncio.sleep(0)

    # Engines

    async def attach(self, hello: manager_pb2.Hello) -> tuple[Engine, int]:
        """Begin or resume a session; returns it and the protocol.

        Raises the refusal; what is refused has changed nothing.
        """
        return await self._admission.attach(hello)

    def divide(self, division: Division) -> tuple[ManagerState, Pins]:
        """The pool's state, divided anew unless it is divided so already."""
        if self.state is None or self.pins is None or self.division != division:
            blocks = division.blocks is not None
            self.state = ManagerState(division.num_rows, blocks=blocks)
            self.pins = Pins(self.state, self._outlet_of)
            self.division = division
            _log.info("pool divided", row_bytes=division.row_bytes, rows=division.num_rows)
        return self.state, self.pins

    def _outlet_of(self, session_id: int) -> Outlet | None:
        engine = self.engines.get(session_id)
        return engine.outlet if engine else None

    def restore(self, engine: Engine, snapshot: Snapshot) -> None:
        """Count the rows of a resumed session again."""
        approximate = engine.narrowed.mode is not Mode.EXACT
        engine.state.restore(engine.session_id, snapshot, approximate=approximate)
        engine.snapshot_required = False
        self.absent.remove(engine.token)
        for request_id in engine.session.requests:
            if engine.sharer:
                engine.sharer.sealed(request_id)

    async def depart(self, engine: Engine, *, goodbye: bool) -> None:
        """End of a stream.

        After a goodbye, or when the process is gone, its rows are given back. A process that
        still maps the pool keeps them: it may be decoding from them, and come back.
        """
        if engine.zeroing:
            await asyncio.wait([engine.zeroing])
        if engine.sharer:
            closing = self.spawn(engine.sharer.close())
            self.index_closings.add(closing)
            closing.add_done_callback(self.index_closings.discard)
        try:
            engine.pins.forsake(engine.session)
            if engine.state is not self.state:
                return
            if goodbye or engine.snapshot_required:
                await self.give_back(engine.session)
            else:
                self.absent.add(engine.token, engine.pid, engine.session)
            if goodbye:
                self.absent.remove(engine.token)
        finally:
            self.engines.pop(engine.session_id, None)
            engine.outlet.close()
            engine.departed.set()
            _log.info("engine detached", session=engine.session_id, goodbye=goodbye)

    # Policy

    def set_policy(self, session_id: int, policy: Policy) -> int:
        """Change one session's policy, or (0) the default and all sessions that follow it."""
        if session_id:
            if session_id not in self.engines:
                raise UnknownSession(f"session {session_id} is not attached")
            engine = self.engines[session_id]
            engine.follows_default = False
            changed = [engine]
        else:
            self.default_policy = policy
            changed = [engine for engine in self.engines.values() if engine.follows_default]
        for engine in changed:
            engine.follow(policy)
        return len(changed)

    def drain(self, reason: str) -> None:
        """Take no new work and tell all engines."""
        self.draining = True
        for engine in self.engines.values():
            engine.tell(manager_pb2.AttachResponse(draining=manager_pb2.Draining(reason=reason)))
