"""The session's stream to the manager, on threads of its own."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import grpc

from memshare.v1 import manager_pb2, manager_pb2_grpc
from memshare.wire import status
from memshare.wire.errors import ManagerUnavailable, MemshareError

MAX_MESSAGE_BYTES: Final = 64 << 20
_OPTIONS: Final = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Two sessions of one process must not share a connection: its end is their end.
    ("grpc.use_local_subchannel_pool", 1),
]
_log = logging.getLogger("memshare.client")


def open_channel(socket_path: Path) -> grpc.Channel:
    """A channel to a memshare service on this host."""
    return grpc.insecure_channel(f"unix:{socket_path}", options=_OPTIONS)


class ManagerStream:
    """One Attach call. Made for each attempt to attach; never used again after it ended.

    `send` never blocks. `receive` is called on a thread of this object for each answer but
    Welcome, `ended` once, with this stream and the reason; by then `is_over` is set.
    """

    def __init__(
        self,
        socket_path: Path,
        receive: Callable[[manager_pb2.AttachResponse], None],
        ended: Callable[[ManagerStream, MemshareError], None],
    ) -> None:
        self.is_over = False
        self._receive = receive
        self._ended = ended
        self._outbox: queue.SimpleQueue[manager_pb2.AttachRequest | None] = queue.SimpleQueue()
        self._hold_lock = threading.Lock()
        self._held: list[manager_pb2.AttachRequest] | None = None
        self._pid = os.getpid()
        self._path = socket_path
        self._channel = open_channel(socket_path)
        self.stub = manager_pb2_grpc.ManagerServiceStub(self._channel)
        self._call: grpc.Call | None = None
        self._reader: threading.Thread | None = None

    def attach(self, hello: manager_pb2.Hello, timeout: float) -> manager_pb2.Welcome:
        """Say hello and wait for the welcome.

        Raises the manager's refusal, or `ManagerUnavailable` after `timeout` seconds.
        """
        self.send(manager_pb2.AttachRequest(hello=hello))
        responses = self.stub.Attach(iter(self._outbox.get, None), wait_for_ready=False)
        self._call = responses
        first: queue.SimpleQueue[manager_pb2.Welcome | MemshareError] = queue.SimpleQueue()
        self._reader = threading.Thread(
            target=self._read, args=(responses, first), name="memshare-session", daemon=True
        )
        self._reader.start()
        try:
            answer = first.get(timeout=timeout)
        except queue.Empty:
            self.cancel()
            raise ManagerUnavailable(
                f"the manager did not welcome this session within {timeout:g} s"
            ) from None
        if isinstance(answer, ManagerUnavailable):
            self.cancel()
            raise ManagerUnavailable(
                f"no manager answers at {self._path} ({answer}): start it with `memshare up` or "
                "`memshare manager`, or set MEMSHARE_RUNTIME_DIR to its directory"
            ) from answer
        if isinstance(answer, MemshareError):
            self.cancel()
            raise answer
        return answer

    @property
    def queued(self) -> int:
        """Messages that gRPC has not taken yet."""
        return self._outbox.qsize()

    def restore(self, parts: list[manager_pb2.SnapshotRequest]) -> None:
        """Send a snapshot and wait for its answer. Raises what the manager refuses it with."""
        try:
            self.stub.Snapshot(iter(parts), timeout=30.0)
        except grpc.RpcError as failure:
            raise status.from_rpc_error(failure) from failure
        except ValueError as failure:  # the channel was closed, for the stream is over
            raise ManagerUnavailable(f"the stream ended: {failure}") from failure

    def hold(self) -> None:
        """Keep back what is sent from now on, until `release`."""
        self._held = []

    def release(self) -> None:
        """Send what was kept back, in its order."""
        with self._hold_lock:
            for message in self._held or ():
                self._outbox.put(message)
            self._held = None

    def send(self, message: manager_pb2.AttachRequest) -> None:
        """Queue a message; it is lost if the stream ends before it is sent."""
        with self._hold_lock:
            if self._held is not None:
                self._held.append(message)
            else:
                self._outbox.put(message)

    def finish(self, timeout: float) -> None:
        """Send what is queued, say goodbye and wait until the manager has taken note."""
        self._outbox.put(manager_pb2.AttachRequest(goodbye=manager_pb2.Goodbye()))
        self._outbox.put(None)
        if self._reader is not None and self._reader is not threading.current_thread():
            deadline = time.monotonic() + timeout
            self._reader.join(max(0.0, deadline - time.monotonic()))
        self.cancel()

    def cancel(self) -> None:
        """End the stream without waiting."""
        if os.getpid() != self._pid:
            return  # a forked child has no right to its parent's connection
        self._outbox.put(None)
        if self._call is None:
            self._channel.close()
        else:
            # The reader then closes the channel: that may wait for a peer that does not answer.
            self._call.cancel()  # type: ignore[no-untyped-call]

    def _read(
        self,
        responses: Iterator[manager_pb2.AttachResponse],
        first: queue.SimpleQueue[manager_pb2.Welcome | MemshareError],
    ) -> None:
        welcomed = False
        error: MemshareError = ManagerUnavailable("the manager closed the stream")
        try:
            for response in responses:
                if not welcomed and response.WhichOneof("message") == "welcome":
                    welcomed = True
                    first.put(response.welcome)
                else:
                    self._receive(response)
        except grpc.RpcError as failure:
            error = status.from_rpc_error(failure)
        except Exception as failure:
            _log.exception("memshare: an answer of the manager could not be handled")
            error = MemshareError(f"internal error: {failure}")
        self.is_over = True
        # gRPC's own thread waits for the next message, the channel for another call.
        self._outbox.put(None)
        self._channel.close()
        if welcomed:
            self._ended(self, error)
        else:
            first.put(error)
