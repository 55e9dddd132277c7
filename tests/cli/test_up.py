"""`memshare up` as a process: from its start to what it leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from memshare.client.cli.admin import AdminClient
from memshare.wire.runtime import RuntimeDirectory

from .conftest import Result, Up

SOCKETS = ("owner.sock", "worker.sock", "manager.sock")
Start = Callable[..., Up]
Run = Callable[..., Result]


def children(up: Up) -> list[psutil.Process]:
    return psutil.Process(up.process.pid).children(recursive=True)


def child(up: Up, name: str) -> psutil.Process:
    return next(process for process in children(up) if process.cmdline()[3:4] == [name])


def await_end(processes: list[psutil.Process]) -> None:
    assert psutil.wait_procs(processes, timeout=20)[1] == []


def test_a_stop_signal_leaves_nothing(runtime_dir: Path, start_up: Start, memshare: Run) -> None:
    up = start_up()
    up.wait_for("ready")
    assert memshare("status", "-d", runtime_dir).code == 0
    examination = memshare("doctor", "-d", runtime_dir)
    assert examination.code == 0, examination.out
    processes = children(up)
    assert len(processes) == 3
    ending = up.stop(signal.SIGTERM)
    assert ending.code == 0, ending.err
    await_end(processes)
    assert [name for name in SOCKETS if (runtime_dir / name).exists()] == []
    assert ending.out == ""


@pytest.mark.slow
def test_an_interrupt_stops_it_too(start_up: Start) -> None:
    up = start_up()
    up.wait_for("ready")
    ending = up.stop(signal.SIGINT)
    assert ending.code == 0
    assert "Traceback" not in ending.err


def test_a_stop_signal_during_the_start_is_obeyed(runtime_dir: Path, start_up: Start) -> None:
    up = start_up()
    up.wait_for("starting")
    time.sleep(0.3)
    processes = children(up)
    ending = up.stop()
    assert ending.code == 0, ending.err
    await_end(processes)
    assert [name for name in SOCKETS if (runtime_dir / name).exists()] == []


@pytest.mark.slow
def test_json_is_the_only_thing_on_stdout(start_up: Start) -> None:
    up = start_up("--json", "--policy", "strict")
    up.wait_for("ready")
    ending = up.stop()
    document = json.loads(ending.out)
    assert document["ready"] is True
    assert document["policy"]["name"] == "strict"
    assert document["status"]["pool"]["pool_bytes"] == 64 << 20


def test_a_live_socket_is_not_stolen(runtime_dir: Path, start_up: Start, memshare: Run) -> None:
    first = start_up()
    first.wait_for("ready")
    second = memshare("up", "-d", runtime_dir, "--pool-bytes", "64MiB")
    assert second.code == 1
    assert "owner.sock is served by another memshare process" in second.err
    assert "Traceback" not in second.err
    assert memshare("status", "-d", runtime_dir).code == 0


def test_left_over_sockets_are_replaced(runtime_dir: Path, start_up: Start) -> None:
    runtime_dir.chmod(0o750)
    for name in SOCKETS:
        kind = socket.SOCK_SEQPACKET if name == "owner.sock" else socket.SOCK_STREAM
        with socket.socket(socket.AF_UNIX, kind) as dead:
            dead.bind(str(runtime_dir / name))
    start_up().wait_for("ready")


def test_a_dead_manager_is_replaced(runtime_dir: Path, start_up: Start) -> None:
    up = start_up()
    up.wait_for("ready")
    runtime = RuntimeDirectory(runtime_dir)
    with AdminClient(runtime) as admin:
        before = admin.status()
    os.kill(before.pid, signal.SIGKILL)
    up.wait_for("the manager is back")
    with AdminClient(runtime) as admin:
        after = admin.status()
    assert after.pid != before.pid
    assert after.pool.pool_id == before.pool.pool_id


def test_a_dead_agent_ends_it_with_an_error(runtime_dir: Path, start_up: Start) -> None:
    up = start_up()
    up.wait_for("ready")
    child(up, "agent").kill()
    ending = up.wait()
    assert ending.code == 1
    assert "the agent ended with SIGKILL and its memory is gone" in ending.err
    assert [name for name in SOCKETS if (runtime_dir / name).exists()] == []


@pytest.mark.slow
def test_killed_it_leaves_no_process_behind(start_up: Start) -> None:
    up = start_up()
    up.wait_for("ready")
    processes = children(up)
    up.process.kill()
    up.process.wait()
    await_end(processes)


@pytest.mark.slow
def test_a_start_that_takes_too_long_names_who_is_missing(runtime_dir: Path, memshare: Run) -> None:
    # A directory in the worker's place: it can never bind its socket.
    (runtime_dir / "worker.sock").mkdir()
    result = memshare("up", "-d", runtime_dir, "--pool-bytes", "64MiB", "--start-timeout", "6")
    assert result.code == 1
    assert "the worker is missing" in result.err


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ('[agent]\npool_bytes = "lots"', "pool_bytes", "lots"),
        ('[agent]\nallowed_uids = "1000"', "allowed_uids", "1000"),
        ("[agent]\nthreads = 0", "threads", "0"),
        ("[agent]\ncolour = 'red'", "colour", "red"),
        ("[manager]\ncolour = 'red'", "colour", "red"),
        ("[manager]\npolicy = 'lax'", "policy", "lax"),
        ("pool_bytes = 1", "pool_bytes", "1"),
        ("[agnet]\nthreads = 3", "agnet", "3"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(
    tmp_path: Path, runtime_dir: Path, command: Run, table: str, key: str, value: str
) -> None:
    config = tmp_path / "memshare.toml"
    config.write_text(table)
    result = command("up", "-d", runtime_dir, "--config", config)
    assert result.code == 1
    assert key in result.err
    assert value in result.err
    assert result.err.count("\n") == 1, result.err


def test_a_wrong_variable_is_named_with_its_value(
    runtime_dir: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSHARE_AGENT_THREADS", "many")
    result = command("up", "-d", runtime_dir)
    assert result.code == 1
    assert "MEMSHARE_AGENT_THREADS" in result.err
    assert "many" in result.err
