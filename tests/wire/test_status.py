"""The one table from errors to gRPC status and back."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from memshare.wire import errors, status

KINDS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type)),
    key=lambda kind: kind.__name__,
)


class Failing(grpc.GenericRpcHandler):
    """A server whose one method fails as `fail` says."""

    def __init__(self):
        self.fail = None

    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(self.answer)

    def answer(self, request, context):
        self.fail(context)


@pytest.fixture(scope="module")
def server():
    with ThreadPoolExecutor(2) as pool:
        handler = Failing()
        server = grpc.server(pool, handlers=[handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            handler.call = channel.unary_unary("/memshare.test/Fail")
            yield handler
        server.stop(None).wait()


def failure(server, fail, **options):
    """What the call raises when the server fails so."""
    server.fail = fail
    with pytest.raises(grpc.RpcError) as caught:
        server.call(b"", **options)
    return caught.value


def failed_call(server, error):
    rich = rpc_status.to_status(status.to_status(error))
    return failure(server, lambda context: context.abort_with_status(rich))


def test_every_error_is_in_the_table():
    assert set(KINDS) == set(status.STATUS_OF)
    assert all(issubclass(kind, errors.MemshareError) for kind in KINDS)


def test_no_two_errors_have_one_reason():
    reasons = [kind.reason for kind in KINDS]
    assert len(set(reasons)) == len(reasons)
    assert all(reason.isupper() for reason in reasons)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_comes_back_as_it_was(server, kind):
    error = kind("what and why", retry_after=0.25, row=7, state="live")
    back = status.from_rpc_error(failed_call(server, error))
    assert type(back) is kind
    assert str(back) == "what and why"
    assert back.retry_after == 0.25
    assert back.details == {"row": "7", "state": "live"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_code_is_the_tables(server, kind):
    call = failed_call(server, kind("why"))
    assert call.code() is status.STATUS_OF[kind]
    assert call.code() not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
    assert status.from_rpc_error(call).retry_after is None


def test_an_error_outside_the_table_has_the_code_of_its_base(server):
    class PoolOnFire(errors.PoolLost):
        reason = "POOL_ON_FIRE"

    assert status.code_of(PoolOnFire("hot")) is grpc.StatusCode.DATA_LOSS
    back = status.from_rpc_error(failed_call(server, PoolOnFire("hot", row=3)))
    assert type(back) is errors.MemshareError
    assert back.details == {"row": "3"}


def test_details_of_other_domains_mean_nothing_here():
    foreign = error_details_pb2.ErrorInfo(reason="POOL_LOST", domain="elsewhere")
    detail = any_pb2.Any()
    detail.Pack(foreign)
    back = status.from_details("hm", [detail, any_pb2.Any()], errors.RowNotHeld)
    assert type(back) is errors.RowNotHeld
    assert back.details == {}


def test_a_peer_that_is_gone_is_named(runtime_dir):
    channel = grpc.insecure_channel(f"unix:{runtime_dir}/none.sock")
    with channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/memshare.test/Fail")(b"")
    back = status.from_rpc_error(caught.value, errors.AgentUnavailable)
    assert type(back) is errors.AgentUnavailable
    assert "none.sock" in str(back)
    assert type(status.from_rpc_error(caught.value)) is errors.ManagerUnavailable


def test_what_grpc_itself_refuses_is_an_error_of_ours(server):
    def refuse(context):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "bad frame")

    back = status.from_rpc_error(failure(server, refuse))
    assert type(back) is errors.InvalidArgument
    assert str(back) == "bad frame"


def test_an_answer_that_comes_too_late_says_so(server):
    answered = threading.Event()
    late = failure(server, lambda _: answered.wait(10), timeout=0.05)
    answered.set()
    back = status.from_rpc_error(late)
    assert type(back) is errors.MemshareError
    assert "DEADLINE_EXCEEDED" in str(back)


def test_a_status_without_our_details_keeps_its_message(server):
    rich = rpc_status.to_status(status_pb2.Status(code=5, message="gone"))
    back = status.from_rpc_error(failure(server, lambda context: context.abort_with_status(rich)))
    assert type(back) is errors.MemshareError
    assert str(back) == "gone"
