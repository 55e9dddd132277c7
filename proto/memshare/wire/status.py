"""The one table from domain errors to gRPC status, in both directions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from memshare.wire import errors

DOMAIN: Final = "memshare"

STATUS_OF: Final[dict[type[errors.MemshareError], grpc.StatusCode]] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.VersionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnknownSession: grpc.StatusCode.NOT_FOUND,
    errors.UnknownRequest: grpc.StatusCode.NOT_FOUND,
    errors.StaleGeneration: grpc.StatusCode.ABORTED,
    errors.RowNotHeld: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PoolExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TokenRefused: grpc.StatusCode.UNAUTHENTICATED,
    errors.PeerRefused: grpc.StatusCode.PERMISSION_DENIED,
    errors.WorkerRestarted: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AgentUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.ManagerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Recovering: grpc.StatusCode.UNAVAILABLE,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.PoolLost: grpc.StatusCode.DATA_LOSS,
    errors.SocketInUse: grpc.StatusCode.ALREADY_EXISTS,
    errors.IntegrityError: grpc.StatusCode.INTERNAL,
    errors.MemshareError: grpc.StatusCode.INTERNAL,
}
_BY_REASON: Final = {kind.reason: kind for kind in STATUS_OF}


def code_of(error: errors.MemshareError) -> grpc.StatusCode:
    """The status code of a domain error; a subclass takes its nearest listed base's."""
    return next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)


def to_status(error: errors.MemshareError) -> status_pb2.Status:
    """A google.rpc.Status with ErrorInfo and, where waiting helps, RetryInfo."""
    status = status_pb2.Status(code=code_of(error).value[0], message=str(error))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.details)
    status.details.add().Pack(info)
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_details(
    message: str, details: Iterable[any_pb2.Any], default: type[errors.MemshareError]
) -> errors.MemshareError:
    """The domain error that `to_status` was given; `default` if it is not one of ours."""
    kind, metadata, retry_after = default, {}, None
    for detail in details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            kind, metadata = _BY_REASON.get(info.reason, default), dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    error = kind(message, retry_after=retry_after)
    error.details = metadata
    return error


def from_rpc_error(
    error: grpc.RpcError, peer: type[errors.MemshareError] = errors.ManagerUnavailable
) -> errors.MemshareError:
    """The domain error behind a failed call; `peer` is the kind for a peer that is gone."""
    call = cast(grpc.Call, error)
    status = rpc_status.from_call(call)
    if status is not None:
        return from_details(status.message, status.details, errors.MemshareError)
    if call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return peer(f"no answer: {call.details()}")
    if call.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return errors.InvalidArgument(call.details() or "")
    return errors.MemshareError(f"{call.code().name}: {call.details()}")
