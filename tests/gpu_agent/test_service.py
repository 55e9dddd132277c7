"""The worker over its socket: status codes, epochs, liveness."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from memshare.v1 import agent_pb2, agent_pb2_grpc, common_pb2
from memshare.wire import packing
from memshare.wire.errors import Draining, InvalidArgument, WorkerRestarted
from memshare.wire.layout import RowLayout
from memshare.wire.status import from_rpc_error

if TYPE_CHECKING:
    from conftest import Agent

MUTATING = ["OpenIndex", "CloseIndex", "IndexRows", "DropRequests", "FindDonors", "CopyRows"]
MUTATING += ["ZeroRows"]


@pytest.mark.parametrize("method", MUTATING)
@pytest.mark.parametrize("epoch", [0, 12345])
def test_a_call_of_another_epoch_is_told_that_the_worker_restarted(
    agent: Agent, method: str, epoch: int
) -> None:
    message = getattr(agent_pb2, f"{method}Request")(worker_epoch=epoch)
    with agent.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        getattr(agent.stub(channel), method)(message)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert isinstance(from_rpc_error(refused.value), WorkerRestarted)


def test_a_wrong_argument_is_named_in_the_status(agent: Agent) -> None:
    epoch = agent.wait_worker().worker_epoch
    with agent.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        agent.stub(channel).ZeroRows(
            agent_pb2.ZeroRowsRequest(worker_epoch=epoch, row_bytes=16, rows=b"123")
        )
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidArgument)
    assert error.details == {"field": "rows"}
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_garbage_instead_of_a_message_harms_only_its_call(agent: Agent) -> None:
    with agent.channel() as channel:
        call = channel.unary_unary("/memshare.v1.AgentService/IndexRows")
        for garbage in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f"):
            with pytest.raises(grpc.RpcError):
                call(garbage, timeout=10)
    assert agent.worker_serves()


def start_long_call(
    stub: agent_pb2_grpc.AgentServiceStub, epoch: int, targets: int
) -> grpc.Future[agent_pb2.FindDonorsResponse]:
    """An exhaustive search that takes a second or more; it finds nothing in rows of zeros."""
    layout = RowLayout(1, 1, 2, 2, common_pb2.ROW_DTYPE_FP32, inv_freq=(0.5,))
    tokens = 20_000
    rows = packing.pack(range(tokens), packing.INT32)
    mask = bytes([255]) * (2 * tokens // 8)
    threshold = packing.pack([0.0], packing.FLOAT32)
    name = {"worker_epoch": epoch, "session_id": 1}
    stub.OpenIndex(agent_pb2.OpenIndexRequest(**name, layout=layout.to_proto(), row_bytes=8))
    stub.IndexRows(
        agent_pb2.IndexRowsRequest(
            **name, request_id=1, num_tokens=tokens, key_rows=rows, value_rows=rows
        )
    )
    return stub.FindDonors.future(
        agent_pb2.FindDonorsRequest(
            **name,
            request_id=1,
            target_start=tokens - targets,
            target_end=tokens,
            donor_mask=mask,
            target_mask=mask,
            key_thresholds=threshold,
            value_thresholds=threshold,
            candidates=1,
            exhaustive=True,
        )
    )


def test_health_answers_while_a_long_call_runs(agent: Agent) -> None:
    info = agent.wait_worker()
    with agent.channel() as channel:
        stub = agent.stub(channel)
        find = start_long_call(stub, info.worker_epoch, targets=300)
        delays = []
        while not find.done():
            started = time.monotonic()
            assert agent.worker_serves()
            stub.GetAgentInfo(agent_pb2.GetAgentInfoRequest())
            delays.append(time.monotonic() - started)
        assert find.result().examined == 600
        stub.CloseIndex(agent_pb2.CloseIndexRequest(worker_epoch=info.worker_epoch, session_id=1))
    assert len(delays) >= 3
    assert max(delays) < 1.0


def test_a_stop_lets_calls_in_progress_finish_and_says_not_serving(
    start_agent: Callable[..., Agent],
) -> None:
    agent = start_agent("--kernels=numba", "--stop-timeout=20")
    info = agent.wait_worker()
    with agent.channel() as channel:
        stub = agent.stub(channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="memshare.v1.AgentService")
        )
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        find = start_long_call(stub, info.worker_epoch, targets=300)
        time.sleep(0.2)
        started = time.monotonic()
        agent.process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as refused:
            stub.ZeroRows(agent_pb2.ZeroRowsRequest(worker_epoch=info.worker_epoch))
        assert isinstance(from_rpc_error(refused.value), Draining)
        assert find.result().examined == 600
        assert agent.process.wait(25) == 0
        # The watch, which never ends, does not hold it up.
        assert time.monotonic() - started < 15
        watch.cancel()


def test_calls_of_many_threads_do_not_mix(agent: Agent) -> None:
    epoch = agent.wait_worker().worker_epoch
    layout = RowLayout(1, 1, 2, 2, common_pb2.ROW_DTYPE_FP32, inv_freq=(0.5,))
    failures: list[BaseException] = []

    def use(session: int) -> None:
        try:
            with agent.channel() as channel:
                stub = agent.stub(channel)
                name = {"worker_epoch": epoch, "session_id": session}
                stub.OpenIndex(
                    agent_pb2.OpenIndexRequest(
                        **name, layout=layout.to_proto(), row_bytes=8, tenant=f"t{session % 2}"
                    )
                )
                for token in range(20):
                    row = packing.pack([session * 100 + token], packing.INT32)
                    reply = stub.IndexRows(
                        agent_pb2.IndexRowsRequest(
                            **name,
                            request_id=1,
                            start=token,
                            num_tokens=1,
                            key_rows=row,
                            value_rows=row,
                        )
                    )
                    assert reply.num_tokens == token + 1
                stub.CloseIndex(agent_pb2.CloseIndexRequest(**name))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(session,)) for session in range(10, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    info = agent.wait_worker()
    assert (info.sessions, info.requests, info.pool.row_bytes) == (0, 0, 0)


def test_the_worker_describes_itself(agent: Agent) -> None:
    info = agent.wait_worker()
    assert info.worker_epoch != 0
    assert info.backend == "host"
    assert info.cpu_seconds > 0
    assert info.pool.pool_bytes == 1 << 20
    with agent.channel() as channel:
        request = reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="memshare.v1.AgentService"
        )
        reply = next(
            reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        )
    (data,) = reply.file_descriptor_response.file_descriptor_proto[:1]
    assert descriptor_pb2.FileDescriptorProto.FromString(data).name == "memshare/v1/agent.proto"
