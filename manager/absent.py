"""Engines that map the pool and have no stream: whom the manager waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from memshare.manager.sessions import Session
from memshare.wire.errors import AgentUnavailable, Recovering

_POLL_SECONDS: Final = 0.1
RETRY_AFTER: Final = 0.2
_log = structlog.get_logger("memshare.manager")


@dataclass
class Absent:
    """One engine. With a `session` its rows are still counted; without, nobody knows which rows
    it uses, and none may be granted.
    """

    pid: int
    session: Session | None = None


class AbsentEngines:
    """By session token. `holders` asks the owner who maps the pool, `give_back` releases all rows
    of a session, `changed` is called when an engine is waited for no longer.
    """

    def __init__(
        self,
        holders: Callable[[], Awaitable[dict[bytes, int]]],
        give_back: Callable[[Session], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self._holders = holders
        self._give_back = give_back
        self._changed = changed
        self._engines: dict[bytes, Absent] = {}
        self._watch: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, token: bytes) -> Absent | None:
        """The engine of this token, if it is absent."""
        return self._engines.get(token)

    def expect(self, holders: dict[bytes, int]) -> None:
        """Wait for the engines that used a pool before, and no others."""
        self._engines = {token: Absent(pid) for token, pid in holders.items()}
        self._start()

    def add(self, token: bytes, pid: int, session: Session) -> None:
        """Keep the rows of an engine whose stream broke, while it maps the pool."""
        self._engines.setdefault(token, Absent(pid, session))
        self._start()

    def remove(self, token: bytes) -> Absent | None:
        """The engine is back, or gone for good."""
        engine = self._engines.pop(token, None)
        if engine:
            self._changed()
        return engine

    def others(self, token: bytes) -> bool:
        """Whether any engine but the one of this token is absent."""
        return bool(self._engines.keys() - {token})

    def awaited_pids(self, but: bytes = b"") -> list[int]:
        """Engines whose rows nobody knows, `but` not this token's."""
        return sorted(
            engine.pid
            for token, engine in self._engines.items()
            if engine.session is None and token != but
        )

    def require_none_awaited(self, but: bytes = b"") -> None:
        """Raise `Recovering` while rows may be in use, by others, that are not counted."""
        if pids := self.awaited_pids(but):
            raise Recovering(
                f"waiting for engines that used the pool before this manager: pids {pids}",
                retry_after=RETRY_AFTER,
                pids=pids,
            )

    async def let_go_of_the_dead(self) -> None:
        """Release the rows of engines that map the pool no more.

        Raises `AgentUnavailable` without an owner.
        """
        before = dict(self._engines)
        if not before:
            return
        holders = await self._holders()
        for token, engine in before.items():
            if token in holders or self._engines.get(token) is not engine:
                continue
            _log.info("engine is gone", pid=engine.pid)
            if engine.session:
                await self._give_back(engine.session)
            if self._engines.get(token) is engine:
                self.remove(token)

    def _start(self) -> None:
        if self._engines and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        known = True
        while self._engines:
            try:
                await self.let_go_of_the_dead()
                known = True
            except AgentUnavailable as error:
                if known:
                    _log.warning("holders of the pool are unknown", error=str(error))
                known = False
            await asyncio.sleep(_POLL_SECONDS)
