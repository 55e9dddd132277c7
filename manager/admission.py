"""Who may attach, to which session, and to a pool divided how."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final

import structlog

from memshare.manager import lending
from memshare.manager.absent import RETRY_AFTER
from memshare.manager.division import Division, planes, read_layout
from memshare.manager.engines import Engine, requested_policy, require_bounded
from memshare.manager.sessions import Session, require_bound
from memshare.manager.sharing import Sharer
from memshare.v1 import manager_pb2
from memshare.wire.errors import (
    Draining,
    InvalidArgument,
    Recovering,
    StaleGeneration,
    TokenRefused,
    UnknownSession,
)
from memshare.wire.tokens import verify_token
from memshare.wire.version import agree_protocol

if TYPE_CHECKING:
    from memshare.manager.manager import Manager

_END_OF_IDS: Final = 1 << 63
_log = structlog.get_logger("memshare.manager")


class Admission:
    """The manager's way from a Hello to an attached engine."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def attach(self, hello: manager_pb2.Hello) -> tuple[Engine, int]:
        """Begin or resume a session; returns it and the protocol.

        Raises the refusal; what is refused has changed nothing.
        """
        manager = self._manager
        if manager.draining:
            raise Draining("the manager is stopping", retry_after=1.0)
        require_bounded(hello)
        protocol = agree_protocol(
            hello.min_protocol, hello.max_protocol, "the engine", hello.client_version
        )
        pool = manager.require_pool()
        verify_token(manager.link.token_key, hello.token)
        layout = read_layout(hello)
        division = Division.of(layout, pool.pool_bytes)
        policy, follows_default = requested_policy(hello, manager.default_policy)
        resume = hello.resume if hello.HasField("resume") else None
        if manager.division != division:
            await self._finish_departures()
        if resume is None:
            self._require_unused(hello.token)
        else:
            self._require_resumable(hello.token, resume)
        self._require_room(hello, division)
        session_id, epoch = await self._make_way(hello.token, resume)
        # Much may have happened while others were waited for; from here on nothing does.
        peer = verify_token(manager.link.token_key, hello.token)
        self._require_unused(hello.token)
        self._require_room(hello, division)
        if resume is None:
            manager.absent.remove(hello.token)
        state, pins = manager.divide(division)
        session = state.open_session(
            session_id,
            tenant=hello.tenant,
            num_layers=planes(layout),
            layout=layout,
            max_rows=hello.max_rows,
            epoch=epoch,
        )
        engine = Engine(
            hello.token, peer.pid, hello, layout, policy, follows_default, state, session, pins,
            snapshot_required=resume is not None,
        )  # fmt: skip
        manager.engines[session_id] = engine
        engine.sharer = Sharer(
            state, session, layout, engine.narrowed, manager.link, engine.outbox.put, pins,
            batch_tokens=manager.settings.batch_tokens, candidates=manager.settings.candidates,
        )  # fmt: skip
        engine.sharer.start()
        _log.info(
            "engine attached", session=session_id, epoch=epoch, pid=peer.pid,
            engine=hello.engine, policy=engine.narrowed.name, reason=engine.reason,
        )  # fmt: skip
        return engine, protocol

    def _live(self, token: bytes) -> Engine | None:
        return next((e for e in self._manager.engines.values() if e.token == token), None)

    def _session_of(self, token: bytes) -> Session | None:
        live, absent = self._live(token), self._manager.absent.get(token)
        return live.session if live else absent.session if absent else None

    def _require_unused(self, token: bytes) -> None:
        if self._live(token):
            raise TokenRefused("the session token is in use by an open session")

    def _require_resumable(self, token: bytes, resume: manager_pb2.Resume) -> None:
        if not 0 < resume.session_id < _END_OF_IDS:
            raise InvalidArgument(f"resume: session id {resume.session_id} is impossible")
        if not resume.epoch < _END_OF_IDS:
            raise InvalidArgument(f"resume: epoch {resume.epoch} is impossible")
        if self._live(token) is None and self._manager.absent.get(token) is None:
            raise UnknownSession(
                f"session {resume.session_id} was released: attach anew",
                session_id=resume.session_id,
            )
        known = self._session_of(token)
        if known is not None and known.session_id != resume.session_id:
            raise TokenRefused("the session token belongs to another session")
        state = self._manager.state
        taken = state.sessions.get(resume.session_id) if state else None
        if taken is not None and taken.closing:
            raise Recovering(
                f"session {resume.session_id} is being released", retry_after=RETRY_AFTER
            )
        if taken is not None and taken is not known:
            raise TokenRefused(f"session {resume.session_id} belongs to another token")

    def _require_room(self, hello: manager_pb2.Hello, division: Division) -> None:
        """Raise unless the pool is or can be divided for this session, apart from its own rows."""
        state, divided, absent = (
            self._manager.state, self._manager.division, self._manager.absent
        )  # fmt: skip
        if state is not None and divided == division:
            require_bound(hello.max_rows, state.pool.num_rows, state.pool.free)
            return
        resuming, known = hello.HasField("resume"), self._session_of(hello.token)
        if not resuming:
            absent.require_none_awaited(but=hello.token)
        if (
            state is not None
            and divided is not None
            and (
                resuming
                or absent.others(hello.token)
                or any(session is not known for session in state.sessions.values())
            )
        ):
            divided.require_same(division)
        require_bound(hello.max_rows, division.num_rows, division.num_rows)

    async def _finish_departures(self) -> None:
        """See whether the last session is really gone, so that the pool may be divided anew."""
        await self._manager.absent.let_go_of_the_dead()
        if self._manager.index_closings:
            await asyncio.wait(self._manager.index_closings)

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
        absent, known = self._manager.absent.get(token), self._session_of(token)
        epoch = resume.epoch
        self._manager.unproven = True
        if absent and known:
            absent.session = None  # from here on nothing is granted
            epoch = max(epoch, known.epoch)
            if self._manager.state is not None:
                lending.keep_borrowed(self._manager.state, known)
            await self._release(known)
        return resume.session_id, epoch + 1

    async def _release(self, session: Session) -> None:
        # Whoever asked may go away meanwhile; what is begun must be finished.
        await asyncio.shield(self._manager.spawn(self._manager.give_back(session)))
