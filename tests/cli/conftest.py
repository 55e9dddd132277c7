"""The command line as a user runs it: a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memshare.client.cli.app import run

COMMAND = [sys.executable, "-m", "memshare.client.cli"]


@dataclass
class Result:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


def run_memshare(*arguments: object, **environment: str) -> Result:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, **environment},
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


class Up:
    """A running `memshare up`."""

    def __init__(self, runtime_dir: Path, logs: Path, *arguments: str) -> None:
        self._out, self._err = logs / "out", logs / "err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [*COMMAND, "up", "--runtime-dir", str(runtime_dir), *arguments],
                stdout=out,
                stderr=err,
            )

    def wait_for(self, text: str, timeout: float = 90) -> None:
        """Wait until it has said this on stderr."""
        deadline = time.monotonic() + timeout
        while text not in (said := self._err.read_text()):
            assert self.process.poll() is None, f"it ended and never said {text!r}: {said}"
            assert time.monotonic() < deadline, f"it never said {text!r}: {said}"
            time.sleep(0.05)

    def wait(self) -> Result:
        """Wait for its end."""
        code = self.process.wait(60)
        return Result(code, self._out.read_text(), self._err.read_text())

    def stop(self, number: int = signal.SIGTERM) -> Result:
        """Send a signal and wait for the end."""
        self.process.send_signal(number)
        return self.wait()


@pytest.fixture
def memshare() -> Callable[..., Result]:
    """Run a command to its end, as a process."""
    return run_memshare


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a command that starts nothing, in this process: a second sooner."""

    def run_here(*arguments: object) -> Result:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        return Result(code, *capfd.readouterr())

    return run_here


@pytest.fixture
def start_up(runtime_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Start `memshare up` in the test's runtime directory; it ends with the test."""
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        logs = tmp_path / f"up-{len(started)}"
        logs.mkdir()
        started.append(Up(runtime_dir, logs, "--pool-bytes", "64MiB", *arguments))
        return started[-1]

    yield start
    for up in started:
        if up.process.poll() is None:
            up.stop()
