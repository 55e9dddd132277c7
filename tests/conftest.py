"""Fixtures for all tests: runtime directories, a running sidecar, and a check for leaks."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from memshare.client.cli.sidecar import Sidecar, running_sidecar

# Inherited by every process that a test starts, however deep and whoever adopts it.
RUN_MARK = "MEMSHARE_PYTEST_RUN"
POOL_BYTES = 64 << 20

# A machine that is busy with something else is no failure. In CI Hypothesis has a profile for it.
settings.register_profile("patient", deadline=None)
if "CI" not in os.environ:
    settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Fail the run if a process that a test started still lives at its end."""
    os.environ[RUN_MARK] = uuid.uuid4().hex
    yield
    mark = f"{RUN_MARK}={os.environ.pop(RUN_MARK)}".encode()
    deadline = time.monotonic() + 10
    while left := _marked(mark):
        if time.monotonic() > deadline:
            pytest.fail(f"processes that tests left behind: {left}")
        time.sleep(0.1)


def _marked(mark: bytes) -> dict[int, str]:
    left = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                # Python's own helper of shared memory ends with the interpreter.
                if command and "resource_tracker" not in command:
                    left[int(entry.name)] = command
    return left


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A private directory whose path is short enough for a socket's."""
    path = Path(tempfile.mkdtemp(prefix="memshare-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    """A running agent and manager, shared by the tests of one module."""
    with running_sidecar(pool_bytes=POOL_BYTES) as running:
        yield running


@pytest.fixture
def fresh_sidecar() -> Iterator[Sidecar]:
    """A running agent and manager that a test may break."""
    with running_sidecar(pool_bytes=POOL_BYTES) as running:
        yield running
