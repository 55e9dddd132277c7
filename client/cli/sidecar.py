"""A sidecar as child processes of this one: for `memshare up`, tests, evaluation and demo."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc

from memshare.client.cli.admin import AdminClient
from memshare.client.cli.processes import Child, SidecarFailed
from memshare.v1 import admin_pb2, agent_pb2, agent_pb2_grpc
from memshare.wire.errors import MemshareError, SocketInUse
from memshare.wire.runtime import ENVIRONMENT, RuntimeDirectory
from memshare.wire.sockets import is_served

# A first start compiles the kernels.
START_TIMEOUT: Final = 120.0
STOP_TIMEOUT: Final = 15.0
_POLL_INTERVAL: Final = 0.05


class Sidecar:
    """An agent and a manager in one runtime directory."""

    def __init__(
        self,
        runtime: RuntimeDirectory,
        *,
        pool_bytes: int,
        policy: str | None = None,
        config: Path | None = None,
        log_level: str | None = None,
        log_directory: Path | None = None,
    ) -> None:
        """`log_directory`: where the processes write their logs, else this one's stderr."""
        self.runtime = runtime
        self.agent: Child | None = None
        self.manager: Child | None = None
        self._log_directory = log_directory
        shared = ["--runtime-dir", str(runtime.path)]
        if config is not None:
            shared += ["--config", str(config)]
        if log_level is not None:
            shared += ["--log-level", log_level]
        self._agent_arguments = [*shared, "--pool-bytes", str(pool_bytes)]
        self._manager_arguments = [*shared, *(["--policy", policy] if policy else [])]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that is to find this sidecar."""
        return {**os.environ, ENVIRONMENT: str(self.runtime.path)}

    def admin(self) -> AdminClient:
        """A client of the manager's AdminService; close it."""
        return AdminClient(self.runtime)

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Start both and return once they serve.

        Raises `SocketInUse` if another sidecar lives in the directory, and `SidecarFailed`
        naming who is missing when `timeout` seconds have passed.
        """
        self.runtime.create()
        for path in (self.runtime.owner_socket, self.runtime.manager_socket):
            if path.exists() and is_served(path):
                raise SocketInUse(
                    f"{path} is served by another memshare process: stop it, or choose another "
                    "directory with --runtime-dir",
                    path=path,
                )
        deadline = time.monotonic() + timeout
        self.start_agent(deadline - time.monotonic())
        manager = self.start_manager(deadline - time.monotonic())
        self._await(manager, "the manager's link to the agent", self._agent_is_linked, deadline)

    def start_agent(self, timeout: float = START_TIMEOUT) -> None:
        """Start the agent and return once its owner and its worker serve."""
        self.agent = self._spawn("agent", self._agent_arguments)
        deadline = time.monotonic() + timeout
        self._await(self.agent, "the memory owner", self._owner_serves, deadline)
        self._await(self.agent, "the worker", self._worker_serves, deadline)

    def start_manager(self, timeout: float = START_TIMEOUT) -> Child:
        """Start the manager and return once it serves, or waits for its engines' return."""
        self.manager = self._spawn("manager", self._manager_arguments)
        deadline = time.monotonic() + timeout
        self._await(self.manager, "the manager", self._manager_serves, deadline)
        return self.manager

    def kill_manager(self) -> None:
        """End the manager as a crash would."""
        if self.manager is not None:
            self.manager.kill()

    def kill_agent(self) -> None:
        """End the memory owner as a crash would."""
        if self.agent is not None:
            self.agent.kill()

    def stop(self, timeout: float = STOP_TIMEOUT) -> list[str]:
        """Stop the manager, then the agent. Returns the names of those that had to be killed."""
        sockets = (
            (self.manager, (self.runtime.manager_socket,)),
            (self.agent, (self.runtime.worker_socket, self.runtime.owner_socket)),
        )
        killed = []
        for child, paths in sockets:
            if child is None:
                continue
            if not child.stop(timeout):
                killed.append(child.name)
            # A signal leaves no time to remove them. One that ended by itself did so, or they
            # were never its own.
            for path in paths if child.was_killed() else ():
                if path.is_socket() and not is_served(path):
                    path.unlink(missing_ok=True)
        self.manager = self.agent = None
        return killed

    def _spawn(self, name: str, arguments: list[str]) -> Child:
        log = self._log_directory / f"{name}.log" if self._log_directory else None
        return Child(name, arguments, log)

    def _await(self, child: Child, who: str, serves: Callable[[], bool], deadline: float) -> None:
        started = time.monotonic()
        while True:
            # Before the sockets: what serves there may be another sidecar, which this child lost
            # the directory to.
            ending = child.ended()
            if ending is not None:
                raise SidecarFailed(
                    f"{who} is missing: `memshare {child.name}` ended with {ending} before it "
                    f"was ready. {child.last_words()}".rstrip()
                )
            if serves():
                return
            if time.monotonic() > deadline:
                raise SidecarFailed(
                    f"{who} is missing: `memshare {child.name}` (pid {child.pid}) is not ready "
                    f"after {time.monotonic() - started:.0f} s. {child.last_words()}".rstrip()
                )
            time.sleep(_POLL_INTERVAL)

    def _owner_serves(self) -> bool:
        return self.runtime.owner_socket.exists() and is_served(self.runtime.owner_socket)

    def _worker_serves(self) -> bool:
        if not self.runtime.worker_socket.exists():
            return False
        with grpc.insecure_channel(f"unix:{self.runtime.worker_socket}") as channel:
            stub = agent_pb2_grpc.AgentServiceStub(channel)
            try:
                stub.GetAgentInfo(agent_pb2.GetAgentInfoRequest(), timeout=1.0)
            except grpc.RpcError:
                return False
        return True

    def _manager_serves(self) -> bool:
        status = self._status()
        return status is not None and status.state in ("serving", "recovering")

    def _agent_is_linked(self) -> bool:
        status = self._status()
        return status is not None and status.agent_state == "ready"

    def _status(self) -> admin_pb2.GetStatusResponse | None:
        if not self.runtime.manager_socket.exists():
            return None
        with AdminClient(self.runtime, timeout=1.0) as admin:
            try:
                return admin.status()
            except MemshareError:
                return None


@contextmanager
def running_sidecar(
    runtime_dir: Path | None = None,
    pool_bytes: int = 256 << 20,
    policy: str | None = None,
    *,
    timeout: float = START_TIMEOUT,
) -> Iterator[Sidecar]:
    """A sidecar that runs while the block does.

    Without `runtime_dir` it gets a private one, which is removed in the end. The logs are
    `agent.log` and `manager.log` in that directory. Raises `SidecarFailed` if it is not ready
    within `timeout` seconds, naming who is missing.
    """
    private = None
    if runtime_dir is None:
        # Not $TMPDIR: a socket's path holds 107 bytes.
        private = runtime_dir = Path(tempfile.mkdtemp(prefix="memshare-", dir="/tmp"))
    runtime = RuntimeDirectory(runtime_dir)
    sidecar = Sidecar(runtime, pool_bytes=pool_bytes, policy=policy, log_directory=runtime_dir)
    try:
        with _stopped_like_interrupted():
            sidecar.start(timeout)
            yield sidecar
    finally:
        sidecar.stop()
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)


@contextmanager
def _stopped_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that nothing is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
