"""`memshare doctor` finds what is broken and says what to do."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from memshare.client.cli.admin import AdminClient
from memshare.client.cli.checks import Finding, check_directory
from memshare.client.cli.doctor import examine
from memshare.client.cli.sidecar import Sidecar
from memshare.wire.runtime import RuntimeDirectory

from .conftest import Result

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")


def problems(runtime: RuntimeDirectory, engine_uid: int | None = None) -> dict[str, Finding]:
    return {
        finding.check: finding
        for finding in examine(runtime, engine_uid)
        if finding.state == "problem"
    }


def test_a_sound_sidecar_has_no_problem(sidecar: Sidecar) -> None:
    findings = list(examine(sidecar.runtime))
    assert [finding for finding in findings if finding.state != "ok"] == []
    assert {"owner.sock", "worker", "manager", "integrity", "engine access"} <= {
        finding.check for finding in findings
    }


def test_a_socket_that_anyone_can_use(sidecar: Sidecar) -> None:
    path = sidecar.runtime.manager_socket
    mode = path.stat().st_mode & 0o777
    path.chmod(0o666)
    try:
        finding = problems(sidecar.runtime)["manager.sock"]
    finally:
        path.chmod(mode)
    assert "0666" in finding.message
    assert finding.fix == f"chmod 0660 {path}"


def test_a_directory_that_anyone_can_write_to(sidecar: Sidecar) -> None:
    path = sidecar.runtime.path
    mode = path.stat().st_mode & 0o777
    path.chmod(0o777)
    try:
        finding = problems(sidecar.runtime)["runtime directory"]
    finally:
        path.chmod(mode)
    assert finding.fix == f"chmod 0750 {path}"


def test_the_exit_code_is_1(runtime_dir: Path, memshare: Callable[..., Result]) -> None:
    result = memshare("doctor", "-d", runtime_dir, "--json")
    assert result.code == 1
    assert result.document["ok"] is False
    assert "memshare up" in str(result.document["findings"])


def test_a_left_over_socket(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(runtime_dir / "owner.sock"))
    finding = problems(RuntimeDirectory(runtime_dir))["owner.sock"]
    assert "left over" in finding.message
    assert "memshare up" in finding.fix


def test_a_dead_manager(fresh_sidecar: Sidecar) -> None:
    fresh_sidecar.kill_manager()
    found = problems(fresh_sidecar.runtime)
    assert "left over" in found["manager.sock"].message
    assert found["manager"].fix


def test_a_worker_that_was_restarted(fresh_sidecar: Sidecar) -> None:
    with AdminClient(fresh_sidecar.runtime) as admin:
        os.kill(admin.status().worker_pid, signal.SIGKILL)
    assert {f.check for f in examine(fresh_sidecar.runtime) if f.state != "ok"}


@as_root
def test_an_engine_of_another_user_is_told_both_uids_and_the_fix(sidecar: Sidecar) -> None:
    finding = problems(sidecar.runtime, STRANGER)["engine access"]
    assert f"uid {STRANGER}" in finding.message
    assert f"uid {os.geteuid()}" in finding.message
    assert f"run the engine as uid {os.geteuid()}" in finding.fix
    assert os.geteuid() == 0


@as_root
def test_an_engine_that_the_owner_refuses_is_told_both_uids_and_the_fix(
    sidecar: Sidecar,
) -> None:
    directory, owner = sidecar.runtime.path, sidecar.runtime.owner_socket
    modes = directory.stat().st_mode & 0o777, owner.stat().st_mode & 0o777
    directory.chmod(0o755)
    owner.chmod(0o666)
    try:
        finding = problems(sidecar.runtime, STRANGER)["engine access"]
    finally:
        directory.chmod(modes[0])
        owner.chmod(modes[1])
    assert f"uid {STRANGER}" in finding.message
    assert "uid 0" in finding.message
    assert f"--allowed-uids {STRANGER}" in finding.fix


@as_root
def test_a_directory_of_another_user(runtime_dir: Path) -> None:
    os.chown(runtime_dir, STRANGER, STRANGER)
    finding = check_directory(RuntimeDirectory(runtime_dir), serving_uid=None)
    assert finding.state == "problem"
    assert f"uid {STRANGER}" in finding.message
    assert "uid 0" in finding.message
    assert "chown 0" in finding.fix
