"""A sidecar as child processes, as tests and the evaluation use it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from memshare.client.cli.processes import SidecarFailed
from memshare.client.cli.sidecar import Sidecar, running_sidecar
from memshare.wire.errors import SocketInUse


def test_it_lasts_as_long_as_its_block() -> None:
    with running_sidecar(pool_bytes=16 << 20, policy="strict") as sidecar:
        path = sidecar.runtime.path
        with sidecar.admin() as admin:
            assert admin.status().state == "serving"
            assert admin.policy().policy.name == "strict"
        assert sidecar.environment["MEMSHARE_RUNTIME_DIR"] == str(path)
        assert {"agent.log", "manager.log"} <= {entry.name for entry in path.iterdir()}
    assert not path.exists()


def test_a_directory_that_is_in_use_is_refused(sidecar: Sidecar) -> None:
    second = running_sidecar(sidecar.runtime.path, pool_bytes=16 << 20)
    with pytest.raises(SocketInUse, match="choose another directory"), second:
        pass
    with sidecar.admin() as admin:
        assert admin.status().state == "serving"


def test_a_manager_that_was_killed_starts_again(fresh_sidecar: Sidecar) -> None:
    fresh_sidecar.kill_manager()
    fresh_sidecar.start_manager()
    with fresh_sidecar.admin() as admin:
        assert admin.check_integrity().errors == []


def test_one_that_cannot_start_says_who_and_why(runtime_dir: Path) -> None:
    before = set(psutil.Process().children())
    failing = running_sidecar(runtime_dir, pool_bytes=16 << 20, policy="lax")
    with pytest.raises(SidecarFailed, match=r"the manager is missing.*lax"), failing:
        pass
    assert set(psutil.Process().children()) <= before


def test_the_light_install_says_what_the_command_line_needs() -> None:
    without = (
        "import sys; sys.modules['typer'] = None; from memshare.client.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", without], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install 'memshare[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
