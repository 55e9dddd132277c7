"""How many row operations one core of the manager serves.

`python -m memshare.manager.benchmark --runtime-dir DIR` measures a running sidecar's owner: it
starts a manager of its own in a directory beside it, pinned to one core.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc

from memshare.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    handoff_pb2,
    manager_pb2,
    manager_pb2_grpc,
)
from memshare.wire import packing
from memshare.wire.errors import ManagerUnavailable, MemshareError
from memshare.wire.handoff import connect_pool
from memshare.wire.layout import RowLayout
from memshare.wire.runtime import RuntimeDirectory
from memshare.wire.version import MAX_PROTOCOL, MIN_PROTOCOL, VERSION

_LAYOUT: Final = RowLayout(16, 1, 32, 32, common_pb2.ROW_DTYPE_FP32)
_START_SECONDS: Final = 60.0
_IN_FLIGHT: Final = 4


def measure_row_operations(
    seconds: float, batch: int, runtime_dir: Path | None = None, core: int | None = None
) -> dict[str, float]:
    """Lease, seal and close batches of `batch` rows through gRPC for `seconds`.

    Each row of a batch counts as one operation of each kind. The manager is a process of its own
    that runs on `core` alone (the last one if None). With `runtime_dir` its memory owner is the
    one that serves there, else an agent is started. Returns operations per second of wall time
    and of the manager's processor time, and the share of the core it used.
    """
    per_token = 2 * _LAYOUT.num_layers
    if batch <= 0 or batch % per_token:
        raise ValueError(f"batch is {batch}, must be a multiple of {per_token}")
    with tempfile.TemporaryDirectory(prefix="memshare-", dir="/tmp") as temporary:
        runtime = RuntimeDirectory(Path(temporary) / "run")
        runtime.create()
        processes = []
        if runtime_dir is None:
            processes.append(_start("memshare.gpu_agent", runtime, "--pool-bytes=256MiB"))
        else:
            served = RuntimeDirectory(runtime_dir)
            runtime.owner_socket.symlink_to(served.owner_socket)
            runtime.worker_socket.symlink_to(served.worker_socket)
        try:
            manager = _start("memshare.manager", runtime)
            processes.append(manager)
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(manager.pid, {cores[-1] if core is None else core})
            return _measure(runtime, seconds, batch)
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(20)


def _start(module: str, runtime: RuntimeDirectory, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, f"--runtime-dir={runtime.path}", *flags]
    return subprocess.Popen([*command, "--log-level=warning"])


class _Load:
    """One engine that keeps a few batches in flight."""

    def __init__(self, runtime: RuntimeDirectory, batch: int) -> None:
        self._owner = connect_pool(runtime.owner_socket, handoff_pb2.POOL_ROLE_ENGINE)
        self._channel = grpc.insecure_channel(f"unix:{runtime.manager_socket}")
        self._outbox: queue.SimpleQueue[manager_pb2.AttachRequest | None] = queue.SimpleQueue()
        hello = manager_pb2.Hello(
            min_protocol=MIN_PROTOCOL,
            max_protocol=MAX_PROTOCOL,
            client_version=VERSION,
            token=self._owner.token,
            engine="benchmark",
            tenant="benchmark",
            layout=_LAYOUT.to_proto(),
            # Never old enough: what the agent's search costs is not measured here.
            policy=common_pb2.Policy(
                mode=common_pb2.SHARING_MODE_EXACT,
                stages=[common_pb2.PolicyStage(min_age=1 << 24)],
            ),
        )
        self._batch = batch
        self._requests = 0
        self._send(hello=hello)
        stub = manager_pb2_grpc.ManagerServiceStub(self._channel)
        self._answers: Iterator[Any] = stub.Attach(iter(self._outbox.get, None))
        next(self._answers)

    def _send(self, **message: Any) -> None:
        self._outbox.put(manager_pb2.AttachRequest(**message))

    def ask(self) -> None:
        """Ask for a batch."""
        self._send(lease_rows=manager_pb2.LeaseRows(count=self._batch))

    def use(self) -> None:
        """Wait for a lease, then seal and close it."""
        answer = next(self._answers)
        if not answer.HasField("row_lease"):
            raise MemshareError(f"the manager refused: {answer}")
        rows, half = answer.row_lease.rows, len(answer.row_lease.rows) // 2
        self._requests += 1
        request = self._requests
        self._send(open_request=manager_pb2.OpenRequest(request_id=request))
        self._send(
            seal_tokens=manager_pb2.SealTokens(
                request_id=request,
                num_tokens=self._batch // (2 * _LAYOUT.num_layers),
                key_rows=rows[:half],
                value_rows=rows[half:],
            )
        )
        self._send(
            close_requests=manager_pb2.CloseRequests(
                request_ids=packing.pack([request], packing.UINT64),
                generations=packing.pack([0], packing.UINT32),
            )
        )

    def close(self) -> None:
        """Say goodbye."""
        self._outbox.put(manager_pb2.AttachRequest(goodbye=manager_pb2.Goodbye()))
        self._outbox.put(None)
        for _ in self._answers:
            pass
        self._channel.close()
        self._owner.close()


def _measure(runtime: RuntimeDirectory, seconds: float, batch: int) -> dict[str, float]:
    with grpc.insecure_channel(f"unix:{runtime.manager_socket}") as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        _wait_until_served(admin)
        load = _Load(runtime, batch)
        for _ in range(_IN_FLIGHT):
            load.ask()
        for _ in range(16):  # rows are zeroed once, indexes opened, caches warmed
            load.use()
            load.ask()
        before, began, cycles = _cpu_seconds(admin), time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            load.use()
            load.ask()
            cycles += 1
        elapsed = time.perf_counter() - began
        used = _cpu_seconds(admin) - before
        load.close()
    operations = 3 * batch * cycles
    return {
        "batch": batch,
        "seconds": elapsed,
        "row_operations": operations,
        "row_operations_per_second": operations / elapsed,
        "row_operations_per_cpu_second": operations / max(used, 1e-9),
        "manager_cpu_share": used / elapsed,
    }


def _cpu_seconds(admin: Any) -> float:
    return float(admin.GetStatus(admin_pb2.GetStatusRequest()).cpu_seconds)


def _wait_until_served(admin: Any) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            status = admin.GetStatus(admin_pb2.GetStatusRequest(), wait_for_ready=True, timeout=5)
        except grpc.RpcError:
            continue
        if status.state == "serving" and status.agent_state == "ready":
            return
        time.sleep(0.05)
    raise ManagerUnavailable(f"no manager with an agent within {_START_SECONDS:g} s")


def main() -> int:
    """Measure several batch sizes and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime-dir", type=Path, help="of a running agent; else one is started")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--batch", type=int, nargs="*", default=[256, 1024, 4096, 16384])
    options = parser.parse_args()
    for batch in options.batch:
        measured = measure_row_operations(options.seconds, batch, options.runtime_dir)
        print(
            f"batch {batch:6}: {measured['row_operations_per_second'] / 1e6:6.2f} M row ops/s, "
            f"{measured['row_operations_per_cpu_second'] / 1e6:6.2f} M per CPU second, "
            f"core used {measured['manager_cpu_share']:.0%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
