"""What the services act on: the pool's state, the engines, and their comings and goings."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from typing import Any, Final

import structlog

from memshare.manager.absent import RETRY_AFTER, AbsentEngines
from memshare.manager.agent_link import AgentLink
from memshare.manager.config import ManagerSettings
from memshare.manager.engines import (
    Engine,
    requested_policy,
    require_bounded,
    row_mode_obstacle,
)
from memshare.manager.policy import Mode, Policy
from memshare.manager.recovery import Snapshot
from memshare.manager.sessions import Session, require_bound
from memshare.manager.sharing import Sharer
from memshare.manager.state import ManagerState
from memshare.v1 import common_pb2, manager_pb2
from memshare.wire.errors import (
    AgentUnavailable,
    Draining,
    InvalidArgument,
    LayoutMismatch,
    PoolLost,
    Recovering,
    StaleGeneration,
    TokenRefused,
    UnknownSession,
)
from memshare.wire.layout import RowLayout
from memshare.wire.runtime import RuntimeDirectory
from memshare.wire.tokens import verify_token
from memshare.wire.version import agree_protocol

_MAX_ROWS: Final = (1 << 31) - 1
_END_OF_IDS: Final = 1 << 63
_log = structlog.get_logger("memshare.manager")


class Manager:
    """The one object behind all services. Lives on one event loop."""

    def __init__(self, settings: ManagerSettings) -> None:
        self.settings = settings
        self.default_policy = settings.policy
        self.state: ManagerState | None = None
        self.row_bytes = 0
        self.engines: dict[int, Engine] = {}
        self.draining = False
        self.started = time.monotonic()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._index_closings: set[asyncio.Task[None]] = set()
        self._unproven = False
        self.link = AgentLink(
            RuntimeDirectory(settings.runtime_dir),
            self._pool_found,
            self._pool_lost,
            self._worker_ready,
        )
        self.absent = AbsentEngines(self.link.holders, self._give_back, self._note_recovered)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside the stream that caused it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # The agent

    def _pool_found(self, holders: dict[bytes, int]) -> None:
        self.state, self.row_bytes = None, 0
        self._unproven = bool(holders)
        if holders:
            _log.warning("waiting for engines to come back", pids=sorted(holders.values()))
        self.absent.expect(holders)

    def _pool_lost(self) -> None:
        self.state, self.row_bytes = None, 0
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
        pool.CopyFrom(self._require_pool())
        pool.row_bytes = self.row_bytes
        pool.num_rows = self.state.pool.num_rows if self.state else 0
        return pool

    def _require_pool(self) -> common_pb2.PoolDescriptor:
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
        if self.state and self._unproven and not self.absent.awaited_pids():
            self._unproven = False
            _log.info("recovered", rows=self.state.row_counts())
            for error in self.state.check_integrity():
                _log.error("integrity", error=error)

    async def _give_back(self, session: Session) -> None:
        """Release all rows of a session, in slices between which others get their turn."""
        state, session_id = self.state, session.session_id
        while state is not None and state.sessions.get(session_id) is session:
            if not session.closing:
                state.close_session(session_id)
            state.close_slice(session_id)
            await asyncio.sleep(0)

    # Engines

    async def attach(self, hello: manager_pb2.Hello) -> tuple[Engine, int]:
        """Begin or resume a session; returns it and the protocol.

        Raises the refusal; what is refused has changed nothing.
        """
        if self.draining:
            raise Draining("the manager is stopping", retry_after=1.0)
        require_bounded(hello)
        protocol = agree_protocol(
            hello.min_protocol, hello.max_protocol, "the engine", hello.client_version
        )
        self._require_pool()
        verify_token(self.link.token_key, hello.token)
        layout = RowLayout.from_proto(hello.layout)
        policy, follows_default = requested_policy(hello, self.default_policy)
        resume = hello.resume if hello.HasField("resume") else None
        if self.row_bytes != layout.row_bytes:
            await self._finish_departures()
        if resume is None:
            self._require_unused(hello.token)
        else:
            self._require_resumable(hello.token, resume)
        self._require_room(hello, layout)
        session_id, epoch = await self._make_way(hello.token, resume)
        # Much may have happened while others were waited for; from here on nothing does.
        peer = verify_token(self.link.token_key, hello.token)
        self._require_unused(hello.token)
        self._require_room(hello, layout)
        if resume is None:
            self.absent.remove(hello.token)
        state = self._divided_pool(layout)
        session = state.open_session(
            session_id,
            tenant=hello.tenant,
            num_layers=layout.num_layers,
            layout=layout,
            max_rows=hello.max_rows,
            epoch=epoch,
        )
        engine = Engine(
            hello.token, peer.pid, hello, layout, row_mode_obstacle(hello), policy,
            follows_default, state, session, snapshot_required=resume is not None,
        )  # fmt: skip
        self.engines[session_id] = engine
        engine.sharer = Sharer(
            state, session, layout, engine.narrowed, self.link, engine.outbox.put,
            batch_tokens=self.settings.batch_tokens, candidates=self.settings.candidates,
        )  # fmt: skip
        engine.sharer.start()
        _log.info(
            "engine attached", session=session_id, epoch=epoch, pid=peer.pid,
            engine=hello.engine, policy=engine.narrowed.name, reason=engine.reason,
        )  # fmt: skip
        return engine, protocol

    def _live(self, token: bytes) -> Engine | None:
        return next((e for e in self.engines.values() if e.token == token), None)

    def _session_of(self, token: bytes) -> Session | None:
        live, absent = self._live(token), self.absent.get(token)
        return live.session if live else absent.session if absent else None

    def _require_unused(self, token: bytes) -> None:
        if self._live(token):
            raise TokenRefused("the session token is in use by an open session")

    def _require_resumable(self, token: bytes, resume: manager_pb2.Resume) -> None:
        if not 0 < resume.session_id < _END_OF_IDS:
            raise InvalidArgument(f"resume: session id {resume.session_id} is impossible")
        if not resume.epoch < _END_OF_IDS:
            raise InvalidArgument(f"resume: epoch {resume.epoch} is impossible")
        if self._live(token) is None and self.absent.get(token) is None:
            raise UnknownSession(
                f"session {resume.session_id} was released: attach anew",
                session_id=resume.session_id,
            )
        known = self._session_of(token)
        if known is not None and known.session_id != resume.session_id:
            raise TokenRefused("the session token belongs to another session")
        taken = self.state.sessions.get(resume.session_id) if self.state else None
        if taken is not None and taken.closing:
            raise Recovering(
                f"session {resume.session_id} is being released", retry_after=RETRY_AFTER
            )
        if taken is not None and taken is not known:
            raise TokenRefused(f"session {resume.session_id} belongs to another token")

    def _require_room(self, hello: manager_pb2.Hello, layout: RowLayout) -> None:
        """Raise unless the pool is or can be divided for this session, apart from its own rows."""
        if self.state is not None and self.row_bytes == layout.row_bytes:
            require_bound(hello.max_rows, self.state.pool.num_rows, self.state.pool.free)
            return
        resuming, known = hello.HasField("resume"), self._session_of(hello.token)
        if not resuming:
            self.absent.require_none_awaited(but=hello.token)
        if self.state is not None and (
            resuming
            or self.absent.others(hello.token)
            or any(session is not known for session in self.state.sessions.values())
        ):
            raise LayoutMismatch(
                f"the pool is divided into rows of {self.row_bytes} bytes, this engine's rows "
                f"have {layout.row_bytes}: give it a sidecar of its own",
                pool_row_bytes=self.row_bytes,
                row_bytes=layout.row_bytes,
            )
        num_rows = self._num_rows(layout)
        if not num_rows:
            raise InvalidArgument(
                f"layout: a row of {layout.row_bytes} bytes is larger than the pool of "
                f"{self._require_pool().pool_bytes}"
            )
        require_bound(hello.max_rows, num_rows, num_rows)

    def _num_rows(self, layout: RowLayout) -> int:
        return min(self._require_pool().pool_bytes // layout.row_bytes, _MAX_ROWS)

    async def _finish_departures(self) -> None:
        """See whether the last session is really gone, so that the pool may be divided anew."""
        await self.absent.let_go_of_the_dead()
        if self._index_closings:
            await asyncio.wait(self._index_closings)

    async def _make_way(self, token: bytes, resume: manager_pb2.Resume | None) -> tuple[int, int]:
        """Release what the engine held before; its session's id and new epoch."""
        if resume is None:
            if known := self._session_of(token):
                await self._release(known)
            return secrets.randbits(48) + 1, 1
        if live := self._live(token):
            live.fail(StaleGeneration(f"session {live.session_id} attached anew"))
            await live.departed.wait()
        self._require_resumable(token, resume)  # it may have said goodbye
        absent, known, epoch = self.absent.get(token), self._session_of(token), resume.epoch
        self._unproven = True
        if absent and known:
            absent.session = None  # from here on nothing is granted
            epoch = max(epoch, known.epoch)
            await self._release(known)
        return resume.session_id, epoch + 1

    async def _release(self, session: Session) -> None:
        # Whoever asked may go away meanwhile; what is begun must be finished.
        await asyncio.shield(self.spawn(self._give_back(session)))

    def _divided_pool(self, layout: RowLayout) -> ManagerState:
        if self.state is None or self.row_bytes != layout.row_bytes:
            num_rows = self._num_rows(layout)
            self.state, self.row_bytes = ManagerState(num_rows), layout.row_bytes
            _log.info("pool divided", row_bytes=self.row_bytes, rows=num_rows)
        return self.state

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
            self._index_closings.add(closing)
            closing.add_done_callback(self._index_closings.discard)
        try:
            if engine.state is not self.state:
                return
            if goodbye or engine.snapshot_required:
                await self._give_back(engine.session)
            else:
                self.absent.add(engine.token, engine.pid, engine.session)
            if goodbye:
                self.absent.remove(engine.token)
        finally:
            self.engines.pop(engine.session_id, None)
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
