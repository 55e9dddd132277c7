"""Asking engines to keep blocks for others, and telling them when they need not any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from memshare.manager import lending
from memshare.manager.lending import Ask
from memshare.manager.rows import Rows
from memshare.manager.sessions import Session
from memshare.manager.state import ManagerState
from memshare.v1 import manager_pb2
from memshare.wire.packing import INT32, UINT16, UINT32, UINT64, pack

PIN_SECONDS: Final = 3.0
"""For an engine to answer, at one of its steps, before its blocks are left alone."""
_MESSAGES: Final = 1024
_MAX_ROWS: Final = 1 << 20


@dataclass(eq=False)
class Outlet:
    """What is to be sent to one engine, in order.

    What a lender is told of its pins must arrive, however long it does not read, and in order:
    it waits here, by its rows, while the queue is full.
    """

    queue: asyncio.Queue[manager_pb2.AttachResponse | None] = field(
        default_factory=lambda: asyncio.Queue(_MESSAGES)
    )
    _unpinned: list[Rows] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    def offer(self, message: manager_pb2.AttachResponse) -> bool:
        """Send unless the queue is full; whether it was sent."""
        if self.queue.full():
            return False
        self.queue.put_nowait(message)
        return True

    def ask(self, asked: Ask) -> bool:
        """Send PinRows; False if it would have to wait."""
        if self._unpinned or (self._task and not self._task.done()):
            return False
        message = manager_pb2.PinRows(
            pin_id=asked.pin_id,
            rows=pack(asked.rows, INT32),
            request_ids=pack(asked.requests, UINT64),
            generations=pack(asked.generations, UINT32),
            indices=pack(asked.indices, INT32),
            groups=pack(asked.groups, UINT16),
        )
        return self.offer(manager_pb2.AttachResponse(pin_rows=message))

    def unpin(self, rows: Rows) -> None:
        """Send UnpinRows, now or as soon as there is room."""
        self._unpinned.append(rows)
        if self._task is None or self._task.done():
            while self._unpinned and self.offer(self._next_unpinned()):
                self._drop_unpinned()
            if self._unpinned:
                self._task = asyncio.create_task(self._send_unpinned())

    async def _send_unpinned(self) -> None:
        while self._unpinned:
            await self.queue.put(self._next_unpinned())
            self._drop_unpinned()

    def _next_unpinned(self) -> manager_pb2.AttachResponse:
        rows = pack(self._unpinned[0][:_MAX_ROWS], INT32)
        return manager_pb2.AttachResponse(unpin_rows=manager_pb2.UnpinRows(rows=rows))

    def _drop_unpinned(self) -> None:
        left = self._unpinned.pop(0)[_MAX_ROWS:]
        if len(left):
            self._unpinned.insert(0, left)

    def close(self) -> None:
        """Nobody reads any more."""
        if self._task:
            self._task.cancel()


class Pins:
    """Who borrows what in one pool, as the engines hear of it. `outlet_of` is the way to an
    attached session's engine.
    """

    def __init__(self, state: ManagerState, outlet_of: Callable[[int], Outlet | None]) -> None:
        self._state = state
        self._outlet_of = outlet_of
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def wait(self, asks: Sequence[Ask]) -> None:
        """Ask the lenders and wait for their answers, a bounded time. The asks must be finished
        afterwards, whatever came of them.
        """
        loop = asyncio.get_running_loop()
        for ask in asks:
            outlet = self._outlet_of(ask.lender)
            if outlet is not None and outlet.ask(ask):
                self._waiting[ask.pin_id] = loop.create_future()
            else:
                lending.refuse(self._state, ask.pin_id)
        waiting = [self._waiting[ask.pin_id] for ask in asks if ask.pin_id in self._waiting]
        try:
            if waiting:
                await asyncio.wait(waiting, timeout=PIN_SECONDS)
        finally:
            for ask in asks:
                self._waiting.pop(ask.pin_id, None)

    def finish(self, asks: Sequence[Ask]) -> None:
        """Nobody waits for these asks any more."""
        for ask in asks:
            lending.finish(self._state, ask.pin_id)
        self.give_back()

    def answer(self, session_id: int, pin_id: int, pinned: npt.NDArray[np.uint8]) -> None:
        """Take a lender's answer. Raises as `lending.answer`."""
        lending.answer(self._state, session_id, pin_id, pinned)
        self._note(pin_id)

    def forsake(self, session: Session) -> None:
        """An engine is gone: what it was asked for is refused."""
        for pin_id in lending.forsake(self._state, session):
            self._note(pin_id)

    def _note(self, pin_id: int) -> None:
        future = self._waiting.get(pin_id)
        if future is not None and not future.done():
            future.set_result(None)

    def settle(self) -> None:
        """All engines are back or gone: give back what none of them borrows."""
        lending.settle(self._state)
        self.give_back()

    def give_back(self) -> None:
        """Tell lenders what nobody borrows any more."""
        for session_id, rows in lending.take_returned(self._state).items():
            outlet = self._outlet_of(session_id)
            if outlet is not None:
                outlet.unpin(rows)
