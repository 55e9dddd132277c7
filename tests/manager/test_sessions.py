"""Sessions over real sockets: how they begin, what they survive, how they end."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from manager_harness import LAYOUT, PER_TOKEN, ROWS, Engine, Sidecar, drain, wait_for

from memshare.v1 import admin_pb2, common_pb2, manager_pb2
from memshare.wire.errors import (
    AgentUnavailable,
    InvalidArgument,
    LayoutMismatch,
    ManagerUnavailable,
    MemshareError,
    PoolExhausted,
    PoolLost,
    TokenRefused,
    VersionMismatch,
)
from memshare.wire.layout import RowLayout

_CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {path!r})
from manager_harness import Engine, Sidecar
engine = Engine(Sidecar(Path({runtime!r})))
if {tokens}:
    engine.fill(1, {tokens})
    engine.lease(5)
    engine.sync()
print(engine.welcome.session_id, flush=True)
time.sleep(600)
"""


def start_engine(sidecar: Sidecar, tokens: int) -> subprocess.Popen[str]:
    code = _CHILD.format(
        path=str(Path(__file__).parent), runtime=str(sidecar.runtime.path), tokens=tokens
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdigit()
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_an_engine_killed_with_9_frees_all_its_rows(sidecar: Sidecar) -> None:
    process = start_engine(sidecar, tokens=50)
    assert sidecar.counts()[1:3] == (5, 50 * PER_TOKEN)
    kill(process)
    wait_for(sidecar.all_free, "the dead engine's rows", timeout=3)
    assert sidecar.status().sessions == 0


def test_an_engine_that_dies_right_after_hello_leaves_nothing(sidecar: Sidecar) -> None:
    process = start_engine(sidecar, tokens=0)
    assert sidecar.status().sessions == 1
    kill(process)
    wait_for(lambda: sidecar.status().sessions == 0, "the dead engine's session")
    assert not sidecar.admin.ListEngines(admin_pb2.ListEnginesRequest()).engines


def test_an_engine_that_never_says_hello_is_let_go(sidecar: Sidecar) -> None:
    channel = grpc.insecure_channel(f"unix:{sidecar.runtime.manager_socket}")
    silent = threading.Event()
    call = sidecar.manager.Attach(iter(silent.wait, True))
    with pytest.raises(grpc.RpcError, match="no Hello came within 1 s"):
        next(call)
    silent.set()
    channel.close()


def test_many_engines_that_come_and_go_leak_nothing(sidecar: Sidecar) -> None:
    pid = sidecar.status().pid

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    def come_and_go(times: int) -> None:
        for number in range(times):
            engine = Engine(sidecar)
            engine.lease(100)
            if number % 2:
                engine.goodbye()
            else:
                engine.vanish()
        wait_for(sidecar.all_free, "all rows")

    come_and_go(5)
    before = descriptors()
    come_and_go(50)
    wait_for(lambda: descriptors() <= before + 2, "descriptors to be closed")
    assert sidecar.status().sessions == 0


def test_an_idle_engine_is_never_reaped(fresh: Callable[..., Sidecar]) -> None:
    sidecar = fresh(hello_seconds=0.3)
    engine = Engine(sidecar)
    rows = engine.lease(8)
    time.sleep(1.5)
    assert sidecar.status().sessions == 1
    engine.send(return_rows=manager_pb2.ReturnRows(rows=rows.tobytes()))
    engine.sync()
    engine.goodbye()


def test_a_goodbye_frees_all_rows_before_the_stream_ends(sidecar: Sidecar) -> None:
    engine = Engine(sidecar)
    engine.fill(1, 20)
    engine.lease(7)
    engine.goodbye()
    assert sidecar.all_free()


def test_rows_of_a_living_process_are_kept_when_its_stream_breaks(sidecar: Sidecar) -> None:
    engine = Engine(sidecar)
    engine.fill(1, 20)
    engine.sync()
    engine.break_stream()
    wait_for(lambda: sidecar.status().sessions == 0, "the end of the stream")
    time.sleep(0.5)
    assert sidecar.counts()[2] == 20 * PER_TOKEN
    engine.drop_connection()
    wait_for(sidecar.all_free, "the rows")


def test_version_mismatch_names_both_versions(engine: Engine) -> None:
    engine.goodbye()
    with pytest.raises(VersionMismatch) as caught:
        engine.attach(min_protocol=7, max_protocol=9, client_version="9.9.9")
    assert "9.9.9" in str(caught.value)
    assert "0.1.0" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"token": b""}, TokenRefused, "bytes"),
        ({"token": bytes(60)}, TokenRefused, "not minted"),
        ({"layout": None}, InvalidArgument, "no layout"),
        ({"layout": common_pb2.RowLayout(num_layers=1 << 31)}, InvalidArgument, "num_layers"),
        ({"policy_name": "bold"}, InvalidArgument, "there is no preset 'bold'"),
        ({"policy": common_pb2.Policy()}, InvalidArgument, "mode is 0"),
        ({"max_rows": ROWS + 1}, PoolExhausted, f"{ROWS} are free"),
        ({"max_rows": 1 << 63}, PoolExhausted, "max_rows"),
        ({"resume": manager_pb2.Resume()}, InvalidArgument, "session id 0"),
        (
            {"resume": manager_pb2.Resume(session_id=1, epoch=2**64 - 1)},
            InvalidArgument,
            "epoch 18446744073709551615 is impossible",
        ),
        ({"tenant": "t" * 257}, InvalidArgument, "tenant has 257 bytes, at most 256"),
        ({"engine": "é" * 129}, InvalidArgument, "engine has 258 bytes"),
        ({"engine": "a\x1b[2Jb"}, InvalidArgument, "engine is .* must be printable"),
        ({"tenant": "two\nlines"}, InvalidArgument, "tenant is .* must be printable"),
        ({"client_version": "1" * 257}, InvalidArgument, "client_version has"),
        ({"policy_name": "p" * 257}, InvalidArgument, "policy_name has"),
        (
            {"policy": common_pb2.Policy(name="p" * 257, mode=common_pb2.SHARING_MODE_EXACT)},
            InvalidArgument,
            "name has 257 bytes",
        ),
        ({"row_mode_obstacle": "x" * 1025}, InvalidArgument, "row_mode_obstacle has"),
        ({"capabilities": ["x" * 257]}, InvalidArgument, "capabilities has"),
        ({"capabilities": ["x"] * 65}, InvalidArgument, "65 capabilities"),
        ({"min_protocol": 0, "max_protocol": 0}, VersionMismatch, "upgrade"),
    ],
)
def test_a_wrong_hello_is_refused(
    sidecar: Sidecar, engine: Engine, changes: dict[str, object],
    kind: type[MemshareError], message: str,
) -> None:  # fmt: skip
    engine.goodbye()
    engine.connection.close()
    second = Engine(sidecar)
    second.break_stream()
    wait_for(lambda: sidecar.status().sessions == 0, "the end of the stream")
    with pytest.raises(kind, match=message):
        second.attach(**changes)
    assert sidecar.status().sessions == 0
    second.vanish()


def test_the_first_message_must_be_hello(engine: Engine) -> None:
    engine.goodbye()
    with pytest.raises(InvalidArgument, match="must be Hello"):
        engine.attach(manager_pb2.AttachRequest(sync=manager_pb2.Sync()))


def test_a_token_in_use_is_refused(sidecar: Sidecar, engine: Engine) -> None:
    twin = object.__new__(Engine)
    twin.sidecar, twin.connection, twin.options = sidecar, engine.connection, {}
    with pytest.raises(TokenRefused, match="in use"):
        twin.attach()
    engine.sync()


def test_another_row_size_is_refused_while_sessions_exist(sidecar: Sidecar, engine: Engine) -> None:
    wide = RowLayout(1, 1, 64, 64, common_pb2.ROW_DTYPE_FP32)
    with pytest.raises(LayoutMismatch, match=r"rows of 128 bytes.*has rows of 256"):
        Engine(sidecar, layout=wide.to_proto())
    engine.goodbye()
    other = Engine(sidecar, layout=wide.to_proto())
    assert other.welcome.pool.row_bytes == 256
    assert other.welcome.pool.num_rows == ROWS // 2
    assert len(other.lease(ROWS // 2)) == ROWS // 2
    other.goodbye()
    last = Engine(sidecar)
    assert last.welcome.pool.num_rows == ROWS
    last.goodbye()


def test_two_engines_race_for_the_last_rows(sidecar: Sidecar) -> None:
    engines = [Engine(sidecar), Engine(sidecar)]
    outcomes: list[object] = []
    barrier = threading.Barrier(2)

    def race(engine: Engine) -> None:
        barrier.wait()
        try:
            outcomes.append(len(engine.lease(ROWS // 2 + 1)))
        except MemshareError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=race, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refusals = [one for one in outcomes if isinstance(one, PoolExhausted)]
    assert len(refusals) == 1
    assert ROWS // 2 + 1 in outcomes
    assert refusals[0].retry_after
    assert refusals[0].details["free"] == str(ROWS // 2 - 1)
    assert sidecar.counts()[1] == ROWS // 2 + 1
    for engine in engines:
        engine.goodbye()


def test_rows_are_zeroed_before_another_tenant_gets_them(sidecar: Sidecar) -> None:
    first = Engine(sidecar, tenant="a")
    rows = first.lease(64)
    first.data[rows] = 7.0
    first.send(return_rows=manager_pb2.ReturnRows(rows=rows.tobytes()))
    again = first.lease(64)
    assert (first.data[again] == 7.0).all()
    first.goodbye()
    second = Engine(sidecar, tenant="b")
    assert (second.data[second.lease(ROWS)] == 0).all()
    second.goodbye()


def test_a_lease_that_a_stopped_worker_should_zero_is_refused_and_grants_nothing(
    fresh: Callable[..., Sidecar],
) -> None:
    sidecar = fresh()
    worker = sidecar.status().worker_pid
    first, second = Engine(sidecar), Engine(sidecar, tenant="b")
    first.data[:] = 7.0
    os.kill(worker, signal.SIGSTOP)
    try:
        for _ in range(2):  # asked for again, it waits for what is under way
            with pytest.raises(AgentUnavailable, match=f"worker \\(pid {worker}\\)") as refused:
                first.lease(100)
            assert refused.value.retry_after
            assert refused.value.details["worker_pid"] == str(worker)
            # Nobody gets what a worker may yet write to.
            assert sidecar.counts()[1] == 100
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_for(sidecar.all_free, "the rows that were not granted")
    assert (first.data[first.lease(100)] == 0).all()
    os.kill(worker, signal.SIGSTOP)
    with pytest.raises(AgentUnavailable):
        second.lease(200)
    second.break_stream()
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: sidecar.counts()[1] == 100, "the rows of the lost engine")
    sidecar.check()
    wait_for(lambda: sidecar.status().agent_state == "ready", "another worker")
    second.drop_connection()
    second = Engine(sidecar, tenant="b")
    assert (second.data[second.lease(200)] == 0).all()
    first.goodbye()
    second.goodbye()


def test_releasing_a_huge_session_does_not_stall_another(fresh: Callable[..., Sidecar]) -> None:
    sidecar = fresh(pool_bytes=128 << 20)
    small, huge = Engine(sidecar), Engine(sidecar)
    everything = small.lease(1 << 20)  # zeroed now, so that no lease below waits for that
    small.send(return_rows=manager_pb2.ReturnRows(rows=everything.tobytes()))
    small.sync()
    tokens = (1 << 20) // PER_TOKEN - 1024
    for request in range(8):
        rows = huge.lease(PER_TOKEN * (tokens // 8))
        huge.open(request)
        huge.seal(request, rows)
    while sidecar.counts()[2] < PER_TOKEN * (tokens // 8) * 8:
        time.sleep(0.05)
    huge.vanish()
    waits = []
    while sidecar.rows().live:
        began = time.perf_counter()
        small.lease(1)
        waits.append(time.perf_counter() - began)
    assert sorted(waits)[int(0.99 * len(waits))] < 0.1
    small.goodbye()


def test_status_health_and_reflection(sidecar: Sidecar, engine: Engine) -> None:
    health = health_pb2_grpc.HealthStub(sidecar.channel)
    for name in ("", "memshare.v1.ManagerService", "memshare.v1.AdminService"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(sidecar.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    names = {
        s.name for s in next(stub.ServerReflectionInfo(iter([ask]))).list_services_response.service
    }
    assert "memshare.v1.ManagerService" in names
    answer = sidecar.status()
    assert (answer.state, answer.agent_state, answer.sessions) == ("serving", "ready", 1)
    assert answer.worker_pid
    [info] = sidecar.admin.ListEngines(admin_pb2.ListEnginesRequest()).engines
    assert (info.session_id, info.pid, info.engine) == (
        engine.welcome.session_id, os.getpid(), "test",
    )  # fmt: skip


def test_the_socket_is_for_user_and_group_alone(sidecar: Sidecar) -> None:
    mode = stat.S_IMODE(sidecar.runtime.manager_socket.stat().st_mode)
    assert mode == 0o660
    assert stat.S_IMODE(sidecar.runtime.path.stat().st_mode) == 0o750


def test_a_second_manager_steals_nothing(sidecar: Sidecar) -> None:
    command = [sys.executable, "-m", "memshare.manager", f"--runtime-dir={sidecar.runtime.path}"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert second.returncode == 1
    assert "SOCKET_IN_USE" in second.stderr
    assert sidecar.status().state == "serving"


def test_a_stop_drains_within_its_bound(fresh: Callable[..., Sidecar]) -> None:
    sidecar = fresh(drain_seconds=1)
    engine = Engine(sidecar)
    engine.lease(4)
    process = sidecar.processes["manager"]
    process.send_signal(signal.SIGTERM)
    assert engine.receive().draining.reason
    health = health_pb2_grpc.HealthStub(sidecar.channel)
    answer = health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(MemshareError, match="stopping"):
        engine.ask(lease_rows=manager_pb2.LeaseRows(count=1))
    with pytest.raises(MemshareError, match="stopping"):
        Engine(sidecar)
    assert process.wait(5) == 0
    assert not sidecar.runtime.manager_socket.exists()
    with pytest.raises(ManagerUnavailable):
        engine.receive()


def test_a_stop_without_engines_is_immediate(fresh: Callable[..., Sidecar]) -> None:
    sidecar = fresh(drain_seconds=60)
    process = sidecar.processes["manager"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(3) == 0


def test_the_death_of_the_memory_owner_ends_all_sessions(fresh: Callable[..., Sidecar]) -> None:
    sidecar = fresh()
    engine = Engine(sidecar)
    engine.fill(1, 4)
    before = engine.welcome.pool.pool_id
    sidecar.kill("agent")
    assert isinstance(drain(engine.inbox), PoolLost)
    wait_for(lambda: sidecar.status().state == "no-agent", "the manager to notice")
    health = health_pb2_grpc.HealthStub(sidecar.channel)
    wait_for(
        lambda: (
            health.Check(health_pb2.HealthCheckRequest()).status
            == health_pb2.HealthCheckResponse.NOT_SERVING
        ),
        "NOT_SERVING",
    )
    sidecar.start_agent()
    wait_for(sidecar.serves, "a new pool")
    with pytest.raises(TokenRefused):
        engine.attach()
    renewed = Engine(sidecar)
    assert renewed.welcome.pool.pool_id != before
    renewed.fill(1, 4)
    renewed.sync()
    sidecar.check()
    renewed.goodbye()
    assert sidecar.all_free()
    assert LAYOUT.row_bytes == renewed.welcome.pool.row_bytes


def test_a_stream_that_ends_without_goodbye_keeps_its_rows(
    sidecar: Sidecar, engine: Engine
) -> None:
    engine.lease(10)
    engine.outbox.put(None)
    engine.reader.join(10)
    assert sidecar.rows().leased == 10
    engine.drop_connection()
    wait_for(sidecar.all_free, "the rows of an engine that is gone")
