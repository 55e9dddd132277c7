"""A real agent and a real manager as processes, and an engine that says what it is told to."""

from __future__ import annotations

import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from memshare.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    handoff_pb2,
    manager_pb2,
    manager_pb2_grpc,
)
from memshare.wire import packing, status
from memshare.wire.errors import MemshareError
from memshare.wire.handoff import connect_pool
from memshare.wire.layout import RowLayout
from memshare.wire.packing import INT32, UINT8, UINT32, UINT64, pack
from memshare.wire.runtime import RuntimeDirectory
from memshare.wire.version import MAX_PROTOCOL, MIN_PROTOCOL, VERSION

POOL_BYTES = 1 << 20
LAYERS = 2
HEAD = 32
LAYOUT = RowLayout(
    LAYERS, 1, HEAD, HEAD, common_pb2.ROW_DTYPE_FP32,
    tuple(float(10000 ** (-i / (HEAD // 2))) for i in range(HEAD // 2)),
)  # fmt: skip
ROWS = POOL_BYTES // LAYOUT.row_bytes
PER_TOKEN = 2 * LAYERS


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 15.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.01)
    return value


class Sidecar:
    """An agent and a manager in one directory; either may be killed and started again."""

    def __init__(self, directory: Path, pool_bytes: int = POOL_BYTES, **settings: object) -> None:
        self.runtime = RuntimeDirectory(directory)
        self.pool_bytes = pool_bytes
        self.settings = settings
        self.log = directory.parent / f"{directory.name}.log"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.channel = grpc.insecure_channel(
            f"unix:{self.runtime.manager_socket}",
            options=[("grpc.max_reconnect_backoff_ms", 200)],
        )
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.manager = manager_pb2_grpc.ManagerServiceStub(self.channel)

    def start(self) -> Sidecar:
        self.start_agent()
        self.start_manager()
        wait_for(self.serves, "the manager to serve")
        return self

    def start_agent(self) -> None:
        # One worker thread and no compiler: it starts fast.
        self._spawn("agent", "gpu_agent", f"--pool-bytes={self.pool_bytes}", "--kernels=numpy")

    def start_manager(self) -> None:
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in self.settings.items()]
        self._spawn("manager", "manager", *flags)
        wait_for(self.answers, "the manager to answer")

    def _spawn(self, name: str, package: str, *flags: str) -> None:
        command = [sys.executable, "-m", f"memshare.{package}", *flags]
        command.append(f"--runtime-dir={self.runtime.path}")
        with self.log.open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stderr=log)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)
        self.processes[name].wait(20)

    def stop(self) -> None:
        self.channel.close()
        for name in ("manager", "agent"):
            if self.processes[name].poll() is None:
                self.kill(name, signal.SIGTERM)

    def status(self) -> admin_pb2.GetStatusResponse:
        return self.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=5)

    def answers(self) -> bool:
        assert self.processes["manager"].poll() is None, self.log.read_text()
        try:
            self.status()
        except grpc.RpcError:
            return False
        return True

    def serves(self) -> bool:
        answer = self.status()
        return answer.state in ("serving", "recovering") and answer.agent_state == "ready"

    def rows(self) -> admin_pb2.RowCounts:
        return self.status().rows

    def counts(self) -> tuple[int, int, int, int]:
        rows = self.rows()
        assert rows.free + rows.leased + rows.live + rows.quarantined == rows.total
        return rows.free, rows.leased, rows.live, rows.quarantined

    def all_free(self) -> bool:
        rows = self.rows()
        return rows.free == rows.total

    def check(self) -> None:
        assert not self.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).errors


class Engine:
    """Speaks the protocol message by message."""

    def __init__(self, sidecar: Sidecar, **hello: Any) -> None:
        self.sidecar = sidecar
        self.connection = connect_pool(sidecar.runtime.owner_socket, handoff_pb2.POOL_ROLE_ENGINE)
        self.memory = mmap.mmap(self.connection.descriptor, sidecar.pool_bytes)
        self.data = np.frombuffer(self.memory, np.float32).reshape(-1, HEAD)
        self.options = hello
        self.attach()

    def hello(self, **changes: Any) -> manager_pb2.Hello:
        fields = {
            "min_protocol": MIN_PROTOCOL, "max_protocol": MAX_PROTOCOL, "client_version": VERSION,
            "capabilities": ["row-tables"], "token": self.connection.token, "pid": os.getpid(),
            "engine": "test", "tenant": "t", "layout": LAYOUT.to_proto(),
        }  # fmt: skip
        return manager_pb2.Hello(**{**fields, **self.options, **changes})

    def attach(self, first: manager_pb2.AttachRequest | None = None, **changes: Any) -> None:
        self.outbox: queue.SimpleQueue[manager_pb2.AttachRequest | None] = queue.SimpleQueue()
        self.inbox: queue.SimpleQueue[manager_pb2.AttachResponse | MemshareError] = (
            queue.SimpleQueue()
        )
        self.decisions: list[manager_pb2.ShareDecision] = []
        self.sequence = 0
        self.channel = grpc.insecure_channel(
            f"unix:{self.sidecar.runtime.manager_socket}",
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", 64 << 20),
                ("grpc.max_send_message_length", -1),
            ],
        )
        self.stub = manager_pb2_grpc.ManagerServiceStub(self.channel)
        self.outbox.put(first or manager_pb2.AttachRequest(hello=self.hello(**changes)))
        self.call = self.stub.Attach(iter(self.outbox.get, None))
        self.reader = threading.Thread(target=self._read, args=(self.call, self.inbox), daemon=True)
        self.reader.start()
        answer = self.receive()
        self.welcome = answer.welcome

    @staticmethod
    def _read(call: Any, inbox: queue.SimpleQueue[Any]) -> None:
        try:
            for response in call:
                inbox.put(response)
            inbox.put(MemshareError("end of stream"))
        except grpc.RpcError as failure:
            inbox.put(status.from_rpc_error(failure))

    def receive(self, timeout: float = 10.0) -> manager_pb2.AttachResponse:
        """The next answer; raises what the stream ended with."""
        answer = self.inbox.get(timeout=timeout)
        if isinstance(answer, MemshareError):
            raise answer
        return answer

    def send(self, **message: Any) -> int:
        self.sequence += 1
        self.outbox.put(manager_pb2.AttachRequest(sequence=self.sequence, **message))
        return self.sequence

    def ask(self, **message: Any) -> manager_pb2.AttachResponse:
        """Send and wait for the answer to this message; raises if it is Rejected."""
        sequence = self.send(**message)
        while True:
            answer = self.receive()
            if answer.HasField("share_decision"):
                self.decisions.append(answer.share_decision)
            if answer.sequence == sequence:
                if answer.HasField("rejected"):
                    raise status.from_details(
                        answer.rejected.message, answer.rejected.details, MemshareError
                    )
                return answer

    def sync(self) -> None:
        """Wait until all that was sent has had its effect; raises the first refusal."""
        sequence = self.send(sync=manager_pb2.Sync())
        refusal = None
        while True:
            answer = self.receive()
            if answer.HasField("share_decision"):
                self.decisions.append(answer.share_decision)
            elif answer.HasField("rejected"):
                if answer.sequence == sequence and refusal:
                    break
                refusal = refusal or status.from_details(
                    answer.rejected.message, answer.rejected.details, MemshareError
                )
            elif answer.HasField("synced") and answer.sequence == sequence:
                break
        if refusal:
            raise refusal

    def refused(self, **message: Any) -> MemshareError:
        """The refusal of a message."""
        try:
            self.send(**message)
            self.sync()
        except MemshareError as error:
            return error
        raise AssertionError(f"not refused: {message}")

    def lease(self, count: int) -> np.ndarray:
        answer = self.ask(lease_rows=manager_pb2.LeaseRows(count=count))
        return packing.unpack(answer.row_lease.rows, INT32, "rows", count)

    def open(self, request: int, generation: int = 0, first_token: int = 0) -> None:
        self.send(
            open_request=manager_pb2.OpenRequest(
                request_id=request, generation=generation, first_token=first_token
            )
        )

    def seal(self, request: int, rows: np.ndarray, start: int = 0, generation: int = 0) -> None:
        """Seal whole tokens; `rows` is [2, layers, tokens] flat."""
        half = len(rows) // 2
        self.send(
            seal_tokens=manager_pb2.SealTokens(
                request_id=request,
                generation=generation,
                start=start,
                num_tokens=half // LAYERS,
                key_rows=pack(rows[:half], INT32),
                value_rows=pack(rows[half:], INT32),
            )
        )

    def fill(self, request: int, tokens: int, repeat: int = 0, seed: int = 0) -> np.ndarray:
        """Open, write and seal a request. Token t holds what token t % repeat holds."""
        rows = self.lease(PER_TOKEN * tokens)
        shaped = rows.reshape(2, LAYERS, tokens)
        draw = np.random.default_rng(seed)
        for kind in range(2):
            for layer in range(LAYERS):
                content = draw.standard_normal((repeat or tokens, HEAD), np.float32)
                self.data[shaped[kind, layer]] = content[np.arange(tokens) % len(content)]
        self.open(request)
        self.seal(request, rows)
        return rows

    def close(self, requests: list[int], generations: list[int] | None = None) -> None:
        self.send(
            close_requests=manager_pb2.CloseRequests(
                request_ids=pack(requests, UINT64),
                generations=pack(generations or [0] * len(requests), UINT32),
            )
        )

    def answer(self, decision: manager_pb2.ShareDecision, mask: np.ndarray | None = None) -> None:
        size = len(decision.kinds)
        applied = np.ones(size, np.uint8) if mask is None else mask
        self.send(
            decision_result=manager_pb2.DecisionResult(
                decision_id=decision.decision_id, applied=pack(applied, UINT8)
            )
        )

    def step(self, number: int) -> None:
        self.send(step_completed=manager_pb2.StepCompleted(step=number))

    def goodbye(self) -> None:
        """End in order; returns when the manager has taken note."""
        self.send(goodbye=manager_pb2.Goodbye())
        self.outbox.put(None)
        self.reader.join(10)
        self.drop_connection()

    def break_stream(self) -> None:
        """The stream ends, the process stays and maps the pool."""
        self.call.cancel()
        self.outbox.put(None)
        self.channel.close()
        self.reader.join(10)

    def vanish(self) -> None:
        """Both connections end without a word, as when the process is killed."""
        self.break_stream()
        self.drop_connection()

    def drop_connection(self) -> None:
        self.channel.close()
        self.connection.close()


def drain(inbox: queue.SimpleQueue[Any]) -> MemshareError:
    """What a stream ended with."""
    while not isinstance(answer := inbox.get(timeout=10), MemshareError):
        pass
    return answer


@contextmanager
def running(directory: Path, **settings: Any) -> Iterator[Sidecar]:
    sidecar = Sidecar(directory, **settings)
    try:
        yield sidecar.start()
    except BaseException:
        print(sidecar.log.read_text())
        raise
    finally:
        sidecar.stop()
