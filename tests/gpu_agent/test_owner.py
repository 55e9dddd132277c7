"""Life and death of the agent's processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from memshare.gpu_agent.pool import HostPool
from memshare.v1 import handoff_pb2
from memshare.wire.errors import AgentUnavailable

if TYPE_CHECKING:
    from conftest import Agent

# Maps the pool, forks a child that ends, and writes through the mapping afterwards.
FORKING_ENGINE = """
import os, sys
from pathlib import Path
from memshare.gpu_agent.pool import HostPool
from memshare.v1 import handoff_pb2
from memshare.wire.handoff import connect_pool
engine = connect_pool(Path(sys.argv[1]), handoff_pb2.POOL_ROLE_ENGINE)
rows = HostPool.attach(engine.descriptor, engine.pool.pool_id).rows(64, 4)
if os.fork() == 0:
    sys.exit(0)
os.wait()
rows[0] = 99
print("forked", flush=True)
sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def map_rows(connection: object) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    pool = connection.pool  # type: ignore[attr-defined]
    descriptor = os.dup(connection.descriptor)  # type: ignore[attr-defined]
    return HostPool.attach(descriptor, pool.pool_id).rows(64, 4)


def test_worker_crash_keeps_memory_and_engine_mapping(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent()
    before = agent.wait_worker()
    engine = agent.connect()
    rows = map_rows(engine)
    rows[7] = 42
    os.kill(before.worker_pid, signal.SIGKILL)
    wait_until(lambda: not is_running(before.worker_pid))
    after = before
    wait_until(lambda: agent.runtime.worker_socket.exists() and agent.worker_serves())
    after = agent.wait_worker()
    assert after.worker_epoch != before.worker_epoch
    assert after.worker_pid != before.worker_pid
    assert after.pool.pool_id == before.pool.pool_id == engine.pool.pool_id
    assert engine.is_open()
    assert (rows[7] == 42).all()
    later = agent.connect()
    assert (map_rows(later)[7] == 42).all()
    assert agent.logged("swept the socket of a worker that died")
    assert agent.logged("the worker ended, starting it again")
    engine.close()
    later.close()


def test_a_worker_that_keeps_crashing_is_started_with_growing_delays(
    start_agent: Callable[..., Agent],
) -> None:
    agent = start_agent("--search=faiss").wait_owner()

    def kill_worker() -> bool:
        for child in psutil.Process(agent.process.pid).children():
            child.kill()
        ends = [event for event in agent.events() if "the worker ended" in event["event"]]
        return len(ends) >= 3

    wait_until(kill_worker)
    delays = [event["delay"] for event in agent.events() if "delay" in event]
    assert delays[:3] == [0.1, 0.2, 0.4]
    agent.connect().close()


def test_owner_crash_is_seen_at_once_and_memory_stays_mapped(
    start_agent: Callable[..., Agent],
) -> None:
    agent = start_agent()
    worker = agent.wait_worker().worker_pid
    engine = agent.connect()
    rows = map_rows(engine)
    rows[7] = 42
    agent.process.kill()
    engine.connection.settimeout(1)
    assert engine.connection.recv(1) == b""
    assert (rows[7] == 42).all()
    wait_until(lambda: not is_running(worker), timeout=5)
    with pytest.raises(AgentUnavailable, match="no memory owner answers"):
        agent.connect()
    engine.close()


def test_a_dead_socket_is_replaced_and_said_so(start_agent: Callable[..., Agent]) -> None:
    first = start_agent()
    first.wait_worker()
    first.process.kill()
    first.process.wait()
    assert first.runtime.owner_socket.exists()
    second = start_agent()
    second.wait_worker()
    assert second.logged("swept the socket of an agent that died")
    second.connect().close()


def test_a_live_socket_is_not_stolen(start_agent: Callable[..., Agent]) -> None:
    first = start_agent().wait_owner()
    engine = first.connect()
    second = start_agent()
    assert second.process.wait(20) == 1
    assert any("served by another memshare process" in e.get("error", "") for e in second.events())
    assert engine.is_open()
    first.connect().close()
    engine.close()


def test_of_agents_that_race_for_one_directory_all_but_one_say_why_they_end(
    start_agent: Callable[..., Agent],
) -> None:
    agents = [start_agent() for _ in range(3)]
    wait_until(lambda: sum(agent.process.poll() is not None for agent in agents) == 2)
    (winner,) = (agent for agent in agents if agent.process.poll() is None)
    for agent in agents:
        if agent is not winner:
            assert agent.process.wait() == 1
            (event,) = agent.events()
            assert event["reason"] == "SOCKET_IN_USE"
            assert "served by another" in event["error"]
    winner.wait_worker()
    winner.connect().close()


def test_the_socket_of_another_program_is_not_stolen(
    start_agent: Callable[..., Agent], runtime_dir: Path
) -> None:
    (runtime_dir / "run").mkdir(mode=0o750)
    path = runtime_dir / "run" / "owner.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        agent = start_agent()
        assert agent.process.wait(20) == 1
        assert path.exists()
    assert any("served by another process" in event.get("error", "") for event in agent.events())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_leaves_no_sockets_and_no_children(
    start_agent: Callable[..., Agent], number: signal.Signals
) -> None:
    agent = start_agent()
    worker = agent.wait_worker().worker_pid
    engine = agent.connect()
    started = time.monotonic()
    agent.process.send_signal(number)
    assert agent.process.wait(10) == 0
    assert time.monotonic() - started < 5
    assert not is_running(worker)
    assert not list(agent.runtime.path.glob("*.sock"))
    assert engine.connection.recv(1) == b""
    engine.close()


def test_a_stop_while_the_worker_starts_leaves_nothing(
    start_agent: Callable[..., Agent],
) -> None:
    agent = start_agent().wait_owner()
    children = psutil.Process(agent.process.pid).children()
    assert agent.stop() == 0
    assert not any(is_running(child.pid) for child in children)
    assert not list(agent.runtime.path.glob("*.sock"))


def test_a_worker_that_hangs_does_not_outlast_the_stop(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent("--stop-timeout=0.2")
    worker = agent.wait_worker().worker_pid
    os.kill(worker, signal.SIGSTOP)
    started = time.monotonic()
    assert agent.stop() == 0
    assert time.monotonic() - started < 5
    assert not is_running(worker)
    assert agent.logged("the worker does not stop, killing it")


def test_a_worker_that_hangs_is_killed_and_another_started(
    start_agent: Callable[..., Agent],
) -> None:
    agent = start_agent("--worker-timeout=0.8")
    before = agent.wait_worker()
    engine = agent.connect()
    time.sleep(1.2)
    assert is_running(before.worker_pid)
    os.kill(before.worker_pid, signal.SIGSTOP)
    wait_until(lambda: not is_running(before.worker_pid), timeout=5)
    wait_until(lambda: agent.runtime.worker_socket.exists() and agent.worker_serves())
    assert agent.wait_worker().worker_pid != before.worker_pid
    assert agent.logged("the worker gives no sign of life, killing it")
    assert engine.is_open()
    engine.close()


def test_an_owner_that_stood_still_does_not_blame_its_worker(
    start_agent: Callable[..., Agent],
) -> None:
    agent = start_agent("--worker-timeout=0.4")
    worker = agent.wait_worker().worker_pid
    os.kill(agent.process.pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(agent.process.pid, signal.SIGCONT)
    time.sleep(0.5)
    assert is_running(worker)


def test_a_worker_is_not_watched_when_its_timeout_is_zero(
    start_agent: Callable[..., Agent],
) -> None:
    agent = start_agent("--worker-timeout=0")
    worker = agent.wait_worker().worker_pid
    os.kill(worker, signal.SIGSTOP)
    time.sleep(1)
    assert is_running(worker)
    os.kill(worker, signal.SIGCONT)


def test_a_forked_child_of_an_engine_frees_nothing(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent().wait_owner()
    command = [sys.executable, "-c", FORKING_ENGINE, str(agent.runtime.owner_socket)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdin is not None
        assert engine.stdout.readline() == b"forked\n"
        manager = agent.connect(handoff_pb2.POOL_ROLE_MANAGER)
        assert [holder.pid for holder in manager.list_holders()] == [engine.pid]
        assert (map_rows(manager)[0] == 99).all()
        engine.stdin.close()
    assert engine.returncode == 0
    wait_until(lambda: manager.list_holders() == [])
    manager.close()


def test_a_pool_that_does_not_fit_ends_the_start(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent("--pool-bytes=1PiB")
    assert agent.process.wait(20) == 1
    (event,) = agent.events()
    assert "does not fit" in event["error"]
    assert not list(agent.runtime.path.glob("*.sock"))


def test_a_directory_that_others_may_write_to_is_refused(
    start_agent: Callable[..., Agent], runtime_dir: Path
) -> None:
    (runtime_dir / "run").mkdir()
    (runtime_dir / "run").chmod(0o777)
    agent = start_agent()
    assert agent.process.wait(20) == 1
    assert "others cannot write to" in agent.events()[0]["error"]


def test_the_owner_runs_no_compiler_and_no_grpc() -> None:
    code = "import sys, memshare.gpu_agent.owner as _; print({'numba', 'grpc'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "set()"
