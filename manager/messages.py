"""The messages of an attached engine, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from memshare.manager.engines import Engine
from memshare.manager.manager import Manager
from memshare.manager.rows import Mask, Rows
from memshare.v1 import manager_pb2
from memshare.wire import status
from memshare.wire.errors import (
    AgentUnavailable,
    Draining,
    InvalidArgument,
    MemshareError,
    Recovering,
)
from memshare.wire.packing import INT32, UINT8, UINT32, UINT64, pack, unpack

_log = structlog.get_logger("memshare.manager")
Answer = manager_pb2.AttachResponse | None
# More would not fit into one answer.
_MAX_COUNT: Final = 1 << 23
# For rows to be zeroed, before a lease is refused; and until it should be asked for again.
_ZERO_SECONDS: Final = 3.0
_ZERO_RETRY: Final = 0.5


class MessageHandler:
    """Turns stream messages into calls of the state, for one engine, one message at a time."""

    def __init__(self, manager: Manager, engine: Engine) -> None:
        self._manager = manager
        self._engine = engine
        self._state = engine.state
        self._id = engine.session_id
        self._handlers: dict[str, Callable[[manager_pb2.AttachRequest], Awaitable[Answer]]] = {
            "lease_rows": self._lease,
            "return_rows": self._return,
            "open_request": self._open,
            "seal_tokens": self._seal,
            "truncate_request": self._truncate,
            "close_requests": self._close,
            "decision_result": self._decide,
            "step_completed": self._step,
            "sync": self._sync,
            "pin_result": self._pin,
        }

    async def handle(self, request: manager_pb2.AttachRequest) -> Answer:
        """The answer to a message, if it has one; Rejected if it is refused."""
        kind = request.WhichOneof("message")
        try:
            handler = self._handlers.get(kind or "")
            if handler is None:
                raise InvalidArgument(
                    "a second Hello" if kind == "hello" else "the message is empty or unknown"
                )
            if self._engine.snapshot_required:
                raise Recovering("the session is resumed: send Snapshot first", retry_after=0.05)
            answer = await handler(request)
        except MemshareError as error:
            return rejected(request.sequence, error)
        except Exception as error:
            _log.exception("message failed", session=self._id, kind=kind)
            return rejected(request.sequence, MemshareError(f"internal error in {kind}: {error}"))
        finally:
            self._engine.pins.give_back()
        if answer is not None:
            answer.sequence = request.sequence
        return answer

    async def _lease(self, request: manager_pb2.AttachRequest) -> Answer:
        if self._manager.draining:
            raise Draining("the manager is stopping", retry_after=1.0)
        self._manager.absent.require_none_awaited()
        count = request.lease_rows.count
        if count > _MAX_COUNT:
            raise InvalidArgument(
                f"count is {count}, must be 1 to {_MAX_COUNT}: lease more than that in pieces",
                field="count",
                max_count=_MAX_COUNT,
            )
        if not await self._finish_zeroing():
            raise self._worker_is_silent()
        rows, foreign = self._state.lease(self._id, count)
        if foreign.any():
            await self._zero(rows, foreign)
        return manager_pb2.AttachResponse(row_lease=manager_pb2.RowLease(rows=pack(rows, INT32)))

    async def _zero(self, rows: Rows, foreign: Mask) -> None:
        given_up = asyncio.Event()
        zeroing = self._manager.spawn(self._clean(rows, rows[foreign], given_up))
        self._engine.zeroing = zeroing
        try:
            if not await self._finish_zeroing():
                raise self._worker_is_silent()
        except BaseException:
            given_up.set()
            raise
        zeroing.result()

    async def _clean(self, rows: Rows, dirty: Rows, given_up: asyncio.Event) -> None:
        """Zero what a lease got of others. Whatever becomes of the stream, the rows stay leased
        until the worker is done with them; then they go back if nobody waits for them any more.
        """
        try:
            await self._manager.link.zero_rows(self._engine.layout, dirty)
        except MemshareError:
            self._state.return_rows(self._id, rows)
            raise
        self._state.confirm_zeroed(self._id, dirty)
        if given_up.is_set():
            self._state.return_rows(self._id, rows)

    async def _finish_zeroing(self) -> bool:
        """Whether the worker has done, within a bounded time, what a lease needed of it."""
        zeroing = self._engine.zeroing
        if zeroing is not None:
            done, _ = await asyncio.wait([zeroing], timeout=_ZERO_SECONDS)
            if not done:
                return False
            zeroing.exception()  # told by whoever began it, if by anybody
            self._engine.zeroing = None
        return True

    def _worker_is_silent(self) -> AgentUnavailable:
        pid = self._manager.link.last_worker.worker_pid
        return AgentUnavailable(
            f"rows of another tenant must be zeroed and the worker (pid {pid}) has not done so "
            f"within {_ZERO_SECONDS:g} s",
            retry_after=_ZERO_RETRY,
            worker_pid=pid,
        )

    async def _return(self, request: manager_pb2.AttachRequest) -> Answer:
        self._state.return_rows(self._id, unpack(request.return_rows.rows, INT32, "rows"))
        return None

    async def _open(self, request: manager_pb2.AttachRequest) -> Answer:
        message = request.open_request
        self._state.open_request(
            self._id,
            message.request_id,
            message.generation,
            message.first_token,
            message.private,
        )
        return None

    async def _seal(self, request: manager_pb2.AttachRequest) -> Answer:
        message = request.seal_tokens
        count = message.num_tokens * self._engine.session.num_layers
        values = (self._state.pool.kinds - 1) * count
        self._state.seal(
            self._id,
            message.request_id,
            message.generation,
            message.start,
            unpack(message.key_rows, INT32, "key_rows", count),
            unpack(message.value_rows, INT32, "value_rows", values),
            unpack(message.candidates, INT32, "candidates"),
        )
        if self._engine.sharer:
            self._engine.sharer.sealed(message.request_id)
        return None

    async def _truncate(self, request: manager_pb2.AttachRequest) -> Answer:
        message = request.truncate_request
        self._state.truncate(
            self._id,
            message.request_id,
            message.generation,
            message.new_generation,
            message.num_tokens,
        )
        if self._engine.sharer:
            self._engine.sharer.dropped(
                message.request_id, message.num_tokens, message.new_generation
            )
        await self._release()
        return None

    async def _close(self, request: manager_pb2.AttachRequest) -> Answer:
        message = request.close_requests
        request_ids = unpack(message.request_ids, UINT64, "request_ids").tolist()
        generations = unpack(message.generations, UINT32, "generations").tolist()
        self._state.close_requests(self._id, request_ids, generations)
        if self._engine.sharer:
            for request_id, generation in zip(request_ids, generations, strict=True):
                self._engine.sharer.dropped(request_id, 0, generation)
        await self._release()
        return None

    async def _release(self) -> None:
        # In slices: other sessions get their turn between them.
        while not self._state.release_slice(self._id):
            self._engine.pins.give_back()
            await asyncio.sleep(0)

    async def _decide(self, request: manager_pb2.AttachRequest) -> Answer:
        message = request.decision_result
        self._state.resolve(
            self._id, message.decision_id, unpack(message.applied, UINT8, "applied")
        )
        return None

    async def _pin(self, request: manager_pb2.AttachRequest) -> Answer:
        message = request.pin_result
        self._engine.pins.answer(self._id, message.pin_id, unpack(message.pinned, UINT8, "pinned"))
        return None

    async def _step(self, request: manager_pb2.AttachRequest) -> Answer:
        self._state.step_completed(self._id, request.step_completed.step)
        return None

    async def _sync(self, request: manager_pb2.AttachRequest) -> Answer:
        if self._engine.sharer:
            self._engine.sharer.sync(request.sequence)
        return None


def rejected(sequence: int, error: MemshareError) -> manager_pb2.AttachResponse:
    """The answer to a message that was refused and changed nothing."""
    reason = status.to_status(error)
    return manager_pb2.AttachResponse(
        sequence=sequence,
        rejected=manager_pb2.Rejected(
            code=reason.code, message=reason.message, details=reason.details
        ),
    )
