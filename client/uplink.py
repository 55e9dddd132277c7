"""The session's tie to the manager: messages out, decisions and leases in, resumption."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from memshare.client.allocator import RowAllocator, Rows
from memshare.client.block_tables import PinRequest
from memshare.client.messages import decision_from_proto, hello_message
from memshare.client.options import SessionOptions, SessionStatistics
from memshare.client.stream import ManagerStream
from memshare.client.tables import TableDecision
from memshare.v1 import manager_pb2
from memshare.wire import packing, status
from memshare.wire.block_layout import BlockLayout
from memshare.wire.errors import (
    AgentUnavailable,
    Draining,
    InvalidArgument,
    ManagerUnavailable,
    MemshareError,
    PoolExhausted,
    PoolLost,
    Recovering,
    StaleGeneration,
    TokenRefused,
    UnknownSession,
)
from memshare.wire.handoff import PoolConnection
from memshare.wire.layout import RowLayout
from memshare.wire.runtime import RuntimeDirectory

ATTACHED: Final = "attached"
DETACHED: Final = "detached-by-manager"
LOST: Final = "lost"
CLOSED: Final = "closed"
_RETRY_SECONDS: Final = (0.1, 0.2, 0.5, 1.0)
_NEWS_SECONDS: Final = 0.25
# A manager that stands still sees from the closed connection that the session is over.
_GOODBYE_SECONDS: Final = 5.0
_TRY_AGAIN: Final = (ManagerUnavailable, AgentUnavailable, Draining, Recovering, TokenRefused)
_log = logging.getLogger("memshare.client")

SnapshotParts = Callable[[int, int], list[manager_pb2.SnapshotRequest]]


class Uplink:
    """One per session. `lock` guards the session's tables against the threads in here.

    State is one of:
        "attached": the manager takes part.
        "detached-by-manager": it does not answer; the uplink tries to resume.
        "lost": the pool's owner is gone or the session cannot be resumed.
        "closed": after `close`, and in a forked child.
    """

    def __init__(
        self,
        layout: RowLayout | BlockLayout,
        options: SessionOptions,
        runtime: RuntimeDirectory,
        connection: PoolConnection,
        snapshot: SnapshotParts,
        token: bytes | None = None,
    ) -> None:
        """Attach. `snapshot(session_id, epoch)` tells what the session holds, under `lock`.

        `token` is that of the process that maps the pool, if it is not the one of `connection`:
        the session's rows are its own as long as that process is connected.
        """
        self.lock = threading.RLock()
        self.state = ATTACHED
        self.lost_reason: MemshareError | None = None
        self.statistics = SessionStatistics()
        self.decisions: deque[TableDecision] = deque()
        self.pin_requests: deque[PinRequest] = deque()
        self.unpinned: deque[Rows] = deque()
        self.allocator = RowAllocator(0, 0)
        self._layout = layout
        self._options = options
        self._runtime = runtime
        self._connection = connection
        self._token = connection.token if token is None else token
        self._snapshot = snapshot
        self._news = threading.Condition(self.lock)
        self._sequence = 0
        self._lease_asked: int | None = None
        self._lease_refused: MemshareError | None = None
        self._synced: set[int] = set()
        self._resuming = False
        self._stream = self._new_stream()
        self.welcome = self._greet(self._stream, None)
        _live_uplinks.add(self)

    @property
    def is_behind(self) -> bool:
        """Whether the manager has left many messages unread."""
        return self._stream.queued > MAX_QUEUED_MESSAGES

    def send(self, message: manager_pb2.AttachRequest) -> int:
        """Queue a message and return its sequence; dropped while nobody listens."""
        with self.lock:
            self._sequence += 1
            if self.state == ATTACHED:
                message.sequence = self._sequence
                self._stream.send(message)
                if self._stream.queued > MAX_BACKLOG:
                    # Nobody reads: rather than remember more, tell all anew when somebody does.
                    self.statistics.backlogs += 1
                    self._stream.cancel()
            return self._sequence

    def ask_for_rows(self, count: int) -> None:
        """Ask for a lease unless one is on its way. Never waits.

        If the last one was refused because fewer rows were left, those are asked for. Very many
        come in pieces: ask again.
        """
        count = min(count, MAX_LEASED_ROWS)
        with self.lock:
            if self._lease_asked is not None or self.state != ATTACHED:
                return
            refused, self._lease_refused = self._lease_refused, None
            if isinstance(refused, PoolExhausted):
                count = min(count, _rows_left(refused)) or count
            message = manager_pb2.AttachRequest(lease_rows=manager_pb2.LeaseRows(count=count))
            self._lease_asked = self.send(message)

    def wait_for_rows(self, need: int, ahead: int) -> Rows | None:
        """`need` leased rows, or None if the manager is not there to grant them.

        Asks for `ahead` more, but does without them if there are no more.

        Raises `PoolExhausted` if it refuses, `ManagerUnavailable` after the timeout.
        """
        deadline = time.monotonic() + self._options.timeout
        reason: MemshareError | None = None
        self.statistics.waits += 1
        with self._news:
            while self.state == ATTACHED:
                rows = self.allocator.take(need)
                if rows is not None:
                    return rows
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise ManagerUnavailable(
                        f"the manager granted no {need} rows within {self._options.timeout:g} s"
                        + (f": {reason}" if reason else "")
                    )
                refused, self._lease_refused = self._lease_refused, None
                reason = refused or reason
                if isinstance(refused, PoolExhausted | InvalidArgument):
                    if ahead == 0:
                        raise refused
                    ahead = 0
                elif refused is not None:
                    # It passes (the manager is recovering): ask again, but not at once.
                    pause = min(refused.retry_after or _NEWS_SECONDS, remaining)
                    self._news.wait_for(lambda: self.state != ATTACHED, pause)
                self.ask_for_rows(need - self.allocator.available + ahead)
                self._news.wait(min(_NEWS_SECONDS, remaining))
        return None

    def synchronise(self, timeout: float) -> bool:
        """Wait until the manager has dealt with all that was sent."""
        with self._news:
            if self.state != ATTACHED:
                return False
            sequence = self.send(manager_pb2.AttachRequest(sync=manager_pb2.Sync()))
            self._news.wait_for(lambda: sequence in self._synced or self.state != ATTACHED, timeout)
            answered = sequence in self._synced
            self._synced.discard(sequence)
            return answered

    def close(self) -> None:
        """Say goodbye; the manager releases what the session still holds."""
        with self._news:
            attached = self.state == ATTACHED
            self._set_state(CLOSED)
        if attached:
            self._stream.finish(min(self._options.timeout, _GOODBYE_SECONDS))
        else:
            self._stream.cancel()
        self._connection.close()

    def forget_in_child(self) -> None:
        """A forked child neither frees nor keeps alive what its parent holds."""
        self.state = CLOSED
        # Another thread of the parent may have held it at the fork; here nobody gives it back.
        self.lock = threading.RLock()
        self._news = threading.Condition(self.lock)
        self._connection.close()

    # ---- on the stream's threads ----------------------------------------------------------

    def _receive(self, response: manager_pb2.AttachResponse) -> None:
        kind = response.WhichOneof("message")
        with self._news:
            if kind == "share_decision":
                self.decisions.append(decision_from_proto(response.share_decision))
            elif kind == "row_lease":
                rows = packing.unpack(response.row_lease.rows, packing.INT32, "row_lease.rows")
                self.allocator.add_lease(rows.astype(np.int32))
                self._lease_asked = None
            elif kind == "pin_rows":
                self.pin_requests.append(PinRequest.from_proto(response.pin_rows))
            elif kind == "unpin_rows":
                rows = packing.unpack(response.unpin_rows.rows, packing.INT32, "unpin_rows.rows")
                self.unpinned.append(rows)
            elif kind == "synced":
                self._synced.add(response.sequence)
            elif kind == "rejected":
                self._take_rejection(response)
            elif kind == "policy_changed":
                self.welcome.policy.CopyFrom(response.policy_changed.policy)
                self.welcome.mode_reason = response.policy_changed.mode_reason
            elif kind == "draining":
                # Breaking off, not saying goodbye: the rows stay this session's.
                self._stream.cancel()
            self._news.notify_all()

    def _take_rejection(self, response: manager_pb2.AttachResponse) -> None:
        rejected = response.rejected
        error = status.from_details(rejected.message, rejected.details, MemshareError)
        if response.sequence == self._lease_asked:
            self._lease_asked, self._lease_refused = None, error
        else:
            self.statistics.rejected += 1
            _log.warning("memshare: the manager refused a message: %s", error)

    def _stream_ended(self, stream: ManagerStream, error: MemshareError) -> None:
        with self._news:
            if stream is not self._stream or not self._interrupt() or self._resuming:
                return
            self._resuming = True
        _log.warning(
            "memshare: the sidecar is gone (%s); running requests go on without new sharing",
            error,
        )
        if isinstance(error, PoolLost):
            self._lose(error)
            return
        threading.Thread(target=self._resume, name="memshare-resume", daemon=True).start()

    def _interrupt(self) -> bool:
        """From attached to detached; whether it was attached."""
        if self.state != ATTACHED:
            return False
        self._set_state(DETACHED)
        self._lease_asked = None
        return True

    def _resume(self) -> None:
        """Try to go on with the same rows until that works or the pool is gone."""
        attempt = 0
        while True:
            with self._news:
                if self.state != DETACHED:
                    self._resuming = False
                    return
            if not self._connection.is_open():
                self._lose(PoolLost("the pool's owner is gone"))
                return
            time.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
            attempt += 1
            try:
                self._resume_once()
            except _TRY_AGAIN:
                continue
            except MemshareError as error:
                _log.warning("memshare: the session cannot go on: %s", error)
                self._lose(error)
                return

    def _resume_once(self) -> None:
        stream = self._new_stream()
        resume = manager_pb2.Resume(session_id=self.welcome.session_id, epoch=self.welcome.epoch)
        welcome = self._greet(stream, resume)
        with self._news:
            if self.state != DETACHED:
                stream.cancel()
                return
            if stream.is_over:
                raise ManagerUnavailable("the manager closed the stream at once")
            self.welcome = welcome
            # Decisions of the old epoch are void; the tables say what was applied of them.
            self.decisions.clear()
            self.pin_requests.clear()
            self.unpinned.clear()
            parts = self._snapshot(welcome.session_id, welcome.epoch)
            # What the engine says from here on belongs after the snapshot, so it is held back
            # until that is answered. No step waits for it.
            stream.hold()
            self._stream = stream
            self._set_state(ATTACHED)
        try:
            if welcome.snapshot_required:
                stream.restore(parts)
        except MemshareError as error:
            with self._news:
                self._interrupt()
            stream.cancel()
            if isinstance(error, UnknownSession | StaleGeneration | PoolLost):
                # Not this manager's word on the snapshot: it is another one than the welcome's.
                raise ManagerUnavailable(f"the manager changed meanwhile: {error}") from error
            raise
        stream.release()
        self.statistics.reattached += 1
        _log.warning("memshare: attached again as session %d", welcome.session_id)

    def _greet(
        self, stream: ManagerStream, resume: manager_pb2.Resume | None
    ) -> manager_pb2.Welcome:
        hello = hello_message(self._layout, self._options, self._token, resume)
        welcome = stream.attach(hello, self._options.timeout)
        if welcome.mode_reason:
            _log.warning("memshare: %s", welcome.mode_reason)
        return welcome

    def _new_stream(self) -> ManagerStream:
        return ManagerStream(self._runtime.manager_socket, self._receive, self._stream_ended)

    def _lose(self, error: MemshareError) -> None:
        # The connection stays open: as long as the owner sees it, the manager gives none of the
        # rows that running requests go on using to another engine.
        with self._news:
            if self.state != CLOSED:
                self.lost_reason = error
                self._set_state(LOST)

    def _set_state(self, state: str) -> None:
        self.state = state
        self._news.notify_all()


def _rows_left(refused: PoolExhausted) -> int:
    """Rows that could have been granted when this was refused."""
    left = int(refused.details.get("free", 0))
    if "max_rows" in refused.details:
        bound, held = (int(refused.details[key]) for key in ("max_rows", "held"))
        left = min(left, bound - held)
    return max(0, left)


# So many rows in one lease make a message of 16 MiB.
MAX_LEASED_ROWS: Final = 1 << 22
# Beyond this many unread messages the manager is behind: sealing waits, nothing is lost.
MAX_QUEUED_MESSAGES: Final = 1024
# Beyond this many the stream is given up; the session resumes with a snapshot.
MAX_BACKLOG: Final = 16 * MAX_QUEUED_MESSAGES
_live_uplinks: weakref.WeakSet[Uplink] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    for uplink in list(_live_uplinks):
        uplink.forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
