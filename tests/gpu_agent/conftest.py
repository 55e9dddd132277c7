"""A real agent: its processes, its sockets, its log."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from memshare.gpu_agent.operations import AgentOperations
from memshare.gpu_agent.pool import HostPool
from memshare.gpu_agent.search import SEARCHES
from memshare.gpu_agent.sessions import Sessions
from memshare.kernels import get_block_kernels, get_kernels
from memshare.v1 import agent_pb2, agent_pb2_grpc, common_pb2, handoff_pb2
from memshare.wire import packing
from memshare.wire.handoff import PoolConnection, connect_pool
from memshare.wire.layout import RowLayout
from memshare.wire.runtime import RuntimeDirectory
from memshare.wire.sockets import is_served

POOL_BYTES = 1 << 20
EPOCH = 7


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 20.0) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.01)
    return value


class Agent:
    """One agent, started in a directory of its own."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.runtime = RuntimeDirectory(directory)
        self.log_path = directory.with_name(f"{uuid.uuid4().hex}.log")
        command = [sys.executable, "-m", "memshare.gpu_agent", "--log-format=json"]
        command += [f"--runtime-dir={directory}", f"--pool-bytes={POOL_BYTES}", *flags]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log)

    def wait_owner(self) -> Agent:
        """Wait until the owner serves."""
        path = self.runtime.owner_socket

        def serves() -> bool:
            assert self.process.poll() is None, self.log_path.read_text()
            return path.exists() and is_served(path)

        wait_for(serves, "the owner")
        return self

    def wait_worker(self) -> agent_pb2.GetAgentInfoResponse:
        """Wait until the worker serves; what it says of itself."""
        self.wait_owner()
        try:
            wait_for(self.worker_serves, "the worker", timeout=60)
        except AssertionError:
            print(self.log_path.read_text())
            raise
        with self.channel() as channel:
            return self.stub(channel).GetAgentInfo(agent_pb2.GetAgentInfoRequest())

    def worker_serves(self) -> bool:
        """Whether the worker's health service says SERVING."""
        with self.channel() as channel:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service="memshare.v1.AgentService"), timeout=5
                )
            except grpc.RpcError:
                return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def channel(self) -> grpc.Channel:
        """A new channel to the worker."""
        return grpc.insecure_channel(f"unix:{self.runtime.worker_socket}")

    def stub(self, channel: grpc.Channel) -> agent_pb2_grpc.AgentServiceStub:
        """The worker's calls."""
        return agent_pb2_grpc.AgentServiceStub(channel)

    def connect(self, role: handoff_pb2.PoolRole = handoff_pb2.POOL_ROLE_ENGINE) -> PoolConnection:
        """Ask the owner for the pool."""
        return connect_pool(self.runtime.owner_socket, role)

    def events(self) -> list[dict[str, Any]]:
        """What was logged."""
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]

    def logged(self, part: str) -> bool:
        """Whether an event's text holds `part`."""
        return any(part in event["event"] for event in self.events())

    def descriptors(self) -> int:
        """Open descriptors of the owner."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self) -> int:
        """End it in order; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)


@pytest.fixture
def start_agent(runtime_dir: Path) -> Iterator[Callable[..., Agent]]:
    """Starts agents in one directory; they compile nothing, to be up soon."""
    agents = []

    def start(*flags: str) -> Agent:
        agents.append(Agent(runtime_dir / "run", "--kernels=numpy", *flags))
        return agents[-1]

    yield start
    for agent in agents:
        agent.stop()


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    """One agent for the tests of a module, with its worker ready."""
    directory = Path(tempfile.mkdtemp(prefix="memshare-", dir="/tmp"))
    running = Agent(directory / "run", "--request-timeout=0.5")
    try:
        running.wait_worker()
        yield running
    finally:
        running.stop()
        shutil.rmtree(directory, ignore_errors=True)


class Calls:
    """A worker's operations on a small pool, with the messages filled in.

    Rows are float32 [num_rows, 4]: two heads of two, rotated by one frequency.
    """

    def __init__(self, num_rows: int = 1024, layers: int = 2, search: str = "popcount") -> None:
        self.layout = RowLayout(layers, 2, 2, 2, common_pb2.ROW_DTYPE_FP32, inv_freq=(0.5,))
        self.pool = HostPool.create(num_rows * self.layout.row_bytes)
        kernels = get_kernels("numpy")
        self.sessions = Sessions(self.pool, kernels, get_block_kernels("numpy"))
        self.operations = AgentOperations(self.sessions, SEARCHES[search](kernels), EPOCH)
        bits = self.pool.rows(self.layout.row_bytes, 4)
        self.rows: npt.NDArray[np.float32] = bits.view(np.float32)
        self.open()

    def open(self, session: int = 1, tenant: str = "", **changes: Any) -> None:
        """OpenIndex."""
        fields: dict[str, Any] = {
            "session_id": session,
            "layout": self.layout.to_proto(),
            "row_bytes": self.layout.row_bytes,
            "tenant": tenant,
        }
        self.operations.open_index(agent_pb2.OpenIndexRequest(**(fields | changes)))

    def close(self, session: int = 1) -> None:
        """CloseIndex."""
        self.operations.close_index(agent_pb2.CloseIndexRequest(session_id=session))

    def index(
        self,
        key_rows: npt.ArrayLike,
        value_rows: npt.ArrayLike,
        session: int = 1,
        request: int = 1,
        start: int = 0,
        **changes: Any,
    ) -> int:
        """IndexRows of row ids [layers, tokens]."""
        keys = np.asarray(key_rows, np.int32)
        fields: dict[str, Any] = {
            "session_id": session,
            "request_id": request,
            "start": start,
            "num_tokens": keys.shape[1],
            "key_rows": packing.pack(keys, packing.INT32),
            "value_rows": packing.pack(value_rows, packing.INT32),
        }
        message = agent_pb2.IndexRowsRequest(**(fields | changes))
        return self.operations.index_rows(message).num_tokens

    def drop(self, request: int = 1, keep: int = 0, generation: int = 0, session: int = 1) -> None:
        """DropRequests of one request."""
        self.operations.drop_requests(
            agent_pb2.DropRequestsRequest(
                session_id=session,
                request_ids=packing.pack([request], packing.UINT64),
                keep_tokens=packing.pack([keep], packing.UINT32),
                generations=packing.pack([generation], packing.UINT32),
            )
        )

    def find(
        self,
        start: int,
        end: int,
        session: int = 1,
        request: int = 1,
        key: float = 0.1,
        value: float = 0.1,
        **changes: Any,
    ) -> list[dict[str, Any]]:
        """FindDonors among all tokens, as one dictionary a match, in order."""
        layers = self.layout.num_layers
        mask = packing.pack_mask(np.ones((2, layers, end), np.bool_))
        fields: dict[str, Any] = {
            "session_id": session,
            "request_id": request,
            "target_start": start,
            "target_end": end,
            "donor_mask": mask,
            "target_mask": mask,
            "key_thresholds": packing.pack(np.full(layers, key), packing.FLOAT32),
            "value_thresholds": packing.pack(np.full(layers, value), packing.FLOAT32),
            "candidates": 4,
        }
        self.reply = self.operations.find_donors(agent_pb2.FindDonorsRequest(**(fields | changes)))
        columns = {
            "kind": np.frombuffer(self.reply.kinds, packing.UINT8),
            "layer": np.frombuffer(self.reply.layers, packing.UINT16),
            "target": np.frombuffer(self.reply.targets, packing.INT32),
            "donor": np.frombuffer(self.reply.donors, packing.INT32),
            "row": np.frombuffer(self.reply.donor_rows, packing.INT32),
            "distance": np.frombuffer(self.reply.distances, packing.FLOAT32),
        }
        if self.reply.donor_sessions:
            columns["session"] = np.frombuffer(self.reply.donor_sessions, packing.UINT64)
            columns["request"] = np.frombuffer(self.reply.donor_requests, packing.UINT64)
        assert len({len(column) for column in columns.values()}) == 1
        found = [
            dict(zip(columns, values, strict=True))
            for values in zip(*(column.tolist() for column in columns.values()), strict=True)
        ]
        return sorted(found, key=lambda one: (one["kind"], one["layer"], one["target"]))


@pytest.fixture
def calls() -> Calls:
    """Operations with one session, 1, without a tenant."""
    return Calls()


@pytest.fixture(scope="session")
def make_calls() -> type[Calls]:
    """Operations of another shape."""
    return Calls
