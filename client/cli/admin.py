"""A small client of the manager's AdminService."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import grpc

from memshare.client.cli import output
from memshare.client.stream import open_channel
from memshare.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from memshare.wire.errors import ManagerUnavailable
from memshare.wire.runtime import RuntimeDirectory
from memshare.wire.status import from_rpc_error

TIMEOUT: Final = 10.0


class AdminClient:
    """Ask and set what operators may. Every method raises a `MemshareError`, never gRPC's."""

    def __init__(self, runtime: RuntimeDirectory, timeout: float = TIMEOUT) -> None:
        self._socket = runtime.manager_socket
        self._timeout = timeout
        self._channel = open_channel(self._socket)
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def status(self) -> admin_pb2.GetStatusResponse:
        """State of the manager, its pool and the agent."""
        response: admin_pb2.GetStatusResponse = self._call(
            self._stub.GetStatus, admin_pb2.GetStatusRequest()
        )
        return response

    def engines(self) -> list[admin_pb2.EngineInfo]:
        """The attached engines."""
        answer = self._call(self._stub.ListEngines, admin_pb2.ListEnginesRequest())
        _say_left_out(answer.left_out, "engines")
        return list(answer.engines)

    def requests(self, session_id: int = 0) -> list[admin_pb2.RequestInfo]:
        """Open requests of one session, or of all (0)."""
        request = admin_pb2.ListRequestsRequest(session_id=session_id)
        answer = self._call(self._stub.ListRequests, request)
        _say_left_out(answer.left_out, "requests")
        return list(answer.requests)

    def policy(self, session_id: int = 0) -> admin_pb2.GetPolicyResponse:
        """The policy of one session, or the default (0), and the presets' names."""
        response: admin_pb2.GetPolicyResponse = self._call(
            self._stub.GetPolicy, admin_pb2.GetPolicyRequest(session_id=session_id)
        )
        return response

    def set_policy(
        self, policy: str | common_pb2.Policy, session_id: int = 0
    ) -> admin_pb2.SetPolicyResponse:
        """Set a preset by name, or a whole policy, for one session or for all (0)."""
        request = admin_pb2.SetPolicyRequest(session_id=session_id)
        if isinstance(policy, str):
            request.preset = policy
        else:
            request.policy.CopyFrom(policy)
        response: admin_pb2.SetPolicyResponse = self._call(self._stub.SetPolicy, request)
        return response

    def check_integrity(self) -> admin_pb2.CheckIntegrityResponse:
        """Have the manager check every invariant of its counts and tables."""
        response: admin_pb2.CheckIntegrityResponse = self._call(
            self._stub.CheckIntegrity, admin_pb2.CheckIntegrityRequest()
        )
        return response

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            translated = from_rpc_error(error)
            if isinstance(translated, ManagerUnavailable) and not translated.details:
                raise ManagerUnavailable(self._advice()) from error
            raise translated from error

    def _advice(self) -> str:
        why = "answers" if self._socket.exists() else "has made its socket"
        return (
            f"no manager {why} at {self._socket}: start one with `memshare up`, or name the "
            "running one's directory with --runtime-dir or MEMSHARE_RUNTIME_DIR"
        )


def _say_left_out(count: int, what: str) -> None:
    if count:
        output.say(f"{count:,} more {what} do not fit into one answer")
